"""Pictures and tables from run records. Knows nothing of models; matplotlib and rich load when first used."""

from undertow.report.curve import learning_curve, read_metrics
from undertow.report.tables import table

__all__ = ["learning_curve", "read_metrics", "table"]

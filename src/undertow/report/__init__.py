"""Pictures and tables from run records. Knows nothing of models; matplotlib and rich load when first used."""

from undertow.report.curve import learning_curve, read_metrics
from undertow.report.policies import document_table, policy_table, position_plot
from undertow.report.ratios import ratios
from undertow.report.tables import table

__all__ = ["document_table", "learning_curve", "policy_table", "position_plot", "ratios", "read_metrics", "table"]

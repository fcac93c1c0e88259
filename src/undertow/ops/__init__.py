"""One elementwise recurrence, one signature, several backends."""

from undertow.ops.reference import recurrence

__all__ = ["recurrence"]

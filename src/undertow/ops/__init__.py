"""One elementwise recurrence, one signature, several backends."""

from undertow.ops.backends import BACKENDS, BackendInfo, backend, backend_info
from undertow.ops.operator import recurrence

__all__ = ["BACKENDS", "BackendInfo", "backend", "backend_info", "recurrence"]

"""Arrays: the primitives that algorithms are written over, and NumPy's, the reference."""

from hvd_compress.backends.base import (
    Array,
    Backend,
    EagerBackend,
    HostFunction,
    Output,
    TracingBackend,
    backend_of,
)

__all__ = [
    "Array",
    "Backend",
    "EagerBackend",
    "HostFunction",
    "Output",
    "TracingBackend",
    "backend_of",
]

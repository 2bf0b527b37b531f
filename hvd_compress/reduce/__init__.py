"""The averaging of gradients: a reducer, the store of its states, and the buckets that travel."""

from hvd_compress.reduce.reducer import Reducer
from hvd_compress.reduce.store import MemoryStore, Store

__all__ = ["MemoryStore", "Reducer", "Store"]

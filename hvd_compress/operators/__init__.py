"""Compression operators: which elements to keep."""

from hvd_compress.operators.at_random import random_k
from hvd_compress.operators.base import Selector
from hvd_compress.operators.threshold import threshold
from hvd_compress.operators.top_k import top_k

__all__ = [
    "Selector",
    "random_k",
    "threshold",
    "top_k",
]

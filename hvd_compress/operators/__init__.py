"""Compression operators: which elements to keep, one file each."""

from hvd_compress.operators.adaptive_random import adaptive_random
from hvd_compress.operators.base import Selector
from hvd_compress.operators.bernoulli import bernoulli
from hvd_compress.operators.random_k import random_k
from hvd_compress.operators.threshold import threshold
from hvd_compress.operators.top_k import top_k

__all__ = [
    "Selector",
    "adaptive_random",
    "bernoulli",
    "random_k",
    "threshold",
    "top_k",
]

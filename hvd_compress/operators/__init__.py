"""Compression operators: which elements to keep, one file each."""

from hvd_compress.operators.adaptive_random import adaptive_random
from hvd_compress.operators.adaptive_threshold import adaptive_threshold
from hvd_compress.operators.base import Selector
from hvd_compress.operators.bernoulli import bernoulli
from hvd_compress.operators.ms_top_k import ms_top_k
from hvd_compress.operators.random_k import random_k
from hvd_compress.operators.sidco import sidco
from hvd_compress.operators.threshold import threshold
from hvd_compress.operators.top_k import top_k

__all__ = [
    "Selector",
    "adaptive_random",
    "adaptive_threshold",
    "bernoulli",
    "ms_top_k",
    "random_k",
    "sidco",
    "threshold",
    "top_k",
]

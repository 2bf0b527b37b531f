"""Methods as users name them: ``compression=DGC`` or ``"dgc:density=0.01"``; mostly a chain of
blocks.

What all methods have in common:

- A gradient is an array of floating-point numbers of any shape, of n elements; with other dtypes
  exchanges raise ``UnsupportedError``.  Its average has its shape and dtype, and the same bits on
  all ranks.  If one rank has a NaN or Inf, all get one, and every state stays as it was.
- Options are checked when a method is made: ``ConfigError`` names the option, what it may be, and
  what it was.  They are fields of a frozen dataclass, so methods can be compared, printed and
  stored (``to_config()``, :func:`hvd_compress.from_config`).
- ``indices`` of elements are "packed" on the wire, about log2(n / k) + 1.5 bits each, or "int32".
- ``algorithm`` says over MPI how sums are made (:class:`hvd_compress.blocks.allreduce`; ``None``:
  the engine decides), or how entries are added up (:class:`hvd_compress.blocks.allgather`).
- ``rows`` says how rows of sparse gradients are sent, such as "int8" or "top:0.1"; see
  :mod:`hvd_compress.methods.rows`.
- "State" is what is kept of each tensor from one step to the next, on every rank: arrays with as
  many elements as the gradient, of 4 bytes (8 for gradients of float64), or as is said.
- "Sent" is what a rank hands over for a tensor in a step; ``stats()`` counts it in bytes.
- ``density`` is the fraction of the elements that are sent, in (0, 1]: k = ceil(density * n), at
  least one; or a schedule of that.
- ``momentum`` and ``nesterov`` are those of the optimizer, which then applies none itself: a
  momentum in [0, 1), and whether it is Nesterov's.  ``None``, the default, takes the optimizer's.

In the examples a ``World`` has so many ranks in one process.  Its ``exchange`` takes the gradient
of each, and returns what each gets: the average, ``mean``, and the ``direction`` of the optimizer's
step, which is another one where momentum is applied afterwards.
"""

from __future__ import annotations

from hvd_compress.methods.composed import MomentumAfter, Partition, Switch, partition, rule, switch
from hvd_compress.methods.dense import BF16, FP16, NoCompression
from hvd_compress.methods.dgc import DGC
from hvd_compress.methods.ef21 import EF21
from hvd_compress.methods.onebit import OneBitAdamCompression, ZeroOneAdamCompression
from hvd_compress.methods.power_sgd import PowerSGD
from hvd_compress.methods.quantised import (
    FP8,
    QSGD,
    LinearQuantization,
    NaturalCompression,
    NaturalDithering,
    TernGrad,
)
from hvd_compress.methods.signs import EFSignSGD, OneBit, SignSGD, Signum
from hvd_compress.methods.sparsifiers import OkTopk, RandomK, ScaleCom, Threshold, TopK
from hvd_compress.methods.texts import as_compressor, method_names

__all__ = [
    "BF16",
    "DGC",
    "EF21",
    "FP8",
    "FP16",
    "QSGD",
    "EFSignSGD",
    "LinearQuantization",
    "MomentumAfter",
    "NaturalCompression",
    "NaturalDithering",
    "NoCompression",
    "OkTopk",
    "OneBit",
    "OneBitAdamCompression",
    "Partition",
    "PowerSGD",
    "RandomK",
    "ScaleCom",
    "SignSGD",
    "Signum",
    "Switch",
    "TernGrad",
    "Threshold",
    "TopK",
    "ZeroOneAdamCompression",
    "as_compressor",
    "method_names",
    "partition",
    "rule",
    "switch",
]

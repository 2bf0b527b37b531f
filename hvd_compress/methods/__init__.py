"""Compression methods, for ``compression=`` of an optimizer and as the first argument of a state::

    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.DGC(density=0.001))
    state = hvd.DDPState(hvd.DGC(density=0.001, momentum=0.9), model)

A text, ``compression="dgc:density=0.001"``, and a class, ``compression=hvd.DGC``, do as well.

All methods have this in common:

- A gradient has floating-point numbers and any shape, otherwise exchanges raise
  ``UnsupportedError``.  Its average has its shape and dtype, and the same bits on all ranks.
- If one rank has a NaN or Inf, all ranks get one, and every state stays as it was.
- Methods are frozen dataclasses: they can be compared, printed and stored (``to_config()``,
  :func:`hvd_compress.from_config`).
- ``density`` is the fraction of the elements that is sent, in (0, 1], or a schedule: k =
  ceil(density * n) of n elements.
- ``momentum`` and ``nesterov`` belong to methods that apply momentum themselves.  ``None``, the
  default, takes the optimizer's; a number is in [0, 1).
- ``indices`` of elements are "packed" on the wire, about log2(n / k) + 1.5 bits each, or "int32".
- ``algorithm`` says how MPI adds up: see :class:`hvd_compress.blocks.allreduce` and
  :class:`hvd_compress.blocks.allgather`.  ``None`` leaves it to the engine.
- ``rows`` says how rows of sparse gradients are sent: see :mod:`hvd_compress.methods.rows`.
- "State" lists the arrays that a rank keeps per tensor.  They have as many elements as the
  gradient, of 4 bytes (8 for float64), unless stated otherwise.

Examples with a ``World`` run several ranks in one process.  Its ``exchange`` takes all gradients
and returns for each rank ``mean``, and ``direction``, which has momentum if that is applied later.
"""

from __future__ import annotations

from hvd_compress.methods.composed import MomentumAfter, Partition, Switch, partition, rule, switch
from hvd_compress.methods.dense import BF16, FP16, NoCompression
from hvd_compress.methods.dgc import DGC
from hvd_compress.methods.ef21 import EF21
from hvd_compress.methods.lgc import LGC
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
    "LGC",
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

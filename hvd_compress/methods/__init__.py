"""What users name: ``compression=DGC`` or ``"dgc:density=0.01"``; mostly a chain of blocks."""

from __future__ import annotations

import ast
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.chain import Chain
from hvd_compress.config import build, lookup
from hvd_compress.errors import ConfigError
from hvd_compress.methods.dense import BF16, FP16, NoCompression
from hvd_compress.methods.dgc import DGC
from hvd_compress.methods.ef21 import EF21
from hvd_compress.methods.float8 import FP8
from hvd_compress.methods.one_bit import OneBit
from hvd_compress.methods.power_sgd import PowerSGD
from hvd_compress.methods.quantised import QSGD, NaturalCompression, NaturalDithering, TernGrad
from hvd_compress.methods.random_k import RandomK
from hvd_compress.methods.sign import EFSignSGD, SignSGD, Signum
from hvd_compress.methods.top_k import TopK

__all__ = [
    "BF16",
    "DGC",
    "EF21",
    "FP8",
    "FP16",
    "QSGD",
    "EFSignSGD",
    "NaturalCompression",
    "NaturalDithering",
    "NoCompression",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "Signum",
    "TernGrad",
    "TopK",
    "as_compressor",
]


def as_compressor(compression: Any) -> Compressor:
    """A method from an instance, a class (its defaults) or a text.

    >>> as_compressor("topk:density=0.05,values=float16")
    TopK(density=0.05, selection='sampled', values='float16', error_feedback=True)
    """
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return compression()
    if isinstance(compression, str):
        name, _, text = compression.partition(":")
        method = lookup("method", name.strip().lower())
        if method is Chain:
            raise ConfigError("a chain cannot be written as a text: pass chain(..., via=...)")
        pairs = [part.partition("=") for part in text.split(",") if part]
        for _, equals, _ in pairs:
            if not equals:
                raise ConfigError(f"options in {compression!r} are written {name}:option=value")
        return build(method, {key.strip(): _value(v) for key, _, v in pairs})
    raise ConfigError(
        f"{compression!r} is no compression method: pass DGC, DGC(density=0.01) or "
        "'dgc:density=0.01'"
    )


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.strip(), text.strip())

"""Codings: the message that a rank makes of a flat array, and what a receiver reads in it."""

from hvd_compress.coding.base import Coding, Decoded, Encoded
from hvd_compress.coding.codes import codes
from hvd_compress.coding.cosine_elements import cosine_elements
from hvd_compress.coding.drawn import drawn
from hvd_compress.coding.elements import elements
from hvd_compress.coding.factors import factors
from hvd_compress.coding.whole import whole

__all__ = [
    "Coding",
    "Decoded",
    "Encoded",
    "codes",
    "cosine_elements",
    "drawn",
    "elements",
    "factors",
    "whole",
]

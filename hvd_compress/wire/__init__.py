"""Bytes on the wire; described in docs/wire-format.md.  Works on NumPy arrays only."""

from hvd_compress.wire.frame import (
    decode,
    decode_sparse,
    dense_is_shorter,
    encode_dense,
    encode_sparse,
    sparse_size,
)

__all__ = [
    "decode",
    "decode_sparse",
    "dense_is_shorter",
    "encode_dense",
    "encode_sparse",
    "sparse_size",
]

"""Bytes on the wire; described in docs/wire-format.md.  Works on NumPy arrays only."""

from hvd_compress.wire.frame import decode_sparse, encode_sparse, sparse_size

__all__ = ["decode_sparse", "encode_sparse", "sparse_size"]

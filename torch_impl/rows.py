"""Sparse gradients (``Embedding(sparse=True)``): rows are sent whole, without loss, or with their
values in half precision (``Compressor.rows_wire``).

Duplicate rows are merged before they are sent, and frames hold raw bytes, so any dtype is possible.
A rank without a gradient sends no rows.
"""

from __future__ import annotations

import numpy as np
import torch

from hvd_compress.base import Context, Exchange, Gather, Outcome
from hvd_compress.errors import PayloadError
from hvd_compress.wire.rows import decode_rows, encode_rows

from . import backend


def exchange_rows(gradient: torch.Tensor, context: Context, wire: str | None = None) -> Exchange:
    """Average a sparse COO tensor; the outcome's ``mean`` is sparse and coalesced.

    Args:
        gradient: sparse in its first dimension, dense in the others.
        wire: the dtype in which values are sent, if that is narrower; sums are made in the
            gradient's.
    """
    merged = gradient.coalesce()
    if merged.sparse_dim() != 1:
        raise PayloadError(
            f"sparse gradients must be rows of a matrix (sparse_dim 1), got {merged.sparse_dim()};"
            " pass sparse_as_dense=True to hvd.DistributedOptimizer"
        )
    values, n = merged.values().contiguous(), gradient.shape[0]
    if wire is not None and gradient.element_size() > 2:
        values = values.to(getattr(torch, wire))
    row = gradient.shape[1:].numel() * values.element_size()
    raw = values.view(-1).view(torch.uint8)
    indices = merged.indices()[0]

    def encode(places: np.ndarray, theirs: np.ndarray) -> list[np.ndarray]:
        return [encode_rows(places, theirs, n)]

    (frame,) = backend.on_host(encode, [indices, raw], [("uint8", None)], raw)
    places, rows = [], []
    for rank, part in enumerate((yield Gather(frame))):
        found, theirs = decode_rows(backend.to_numpy(part), n, row, sender=f"rank {rank}")
        places.append(torch.from_numpy(found.copy()).to(raw.device))
        own = values.new_empty(found.size, *gradient.shape[1:])
        own.view(-1).view(torch.uint8).copy_(torch.from_numpy(theirs.copy()))
        rows.append(own.to(gradient.dtype))
    total = torch.sparse_coo_tensor(
        torch.cat(places)[None], torch.cat(rows), gradient.shape, check_invariants=False
    )
    total = total.coalesce()
    mean = torch.sparse_coo_tensor(
        total.indices(),
        total.values() / context.size,
        gradient.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    sent = torch.sparse_coo_tensor(
        merged.indices(),
        values.to(gradient.dtype),
        gradient.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    return Outcome(mean, sent, {})

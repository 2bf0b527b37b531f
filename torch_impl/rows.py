"""Sparse gradients (``Embedding(sparse=True)``): rows travel whole, without loss.

Duplicate rows are merged before they are sent, and payloads carry raw bytes, so any dtype travels.
A rank without a gradient sends no rows.
"""

from __future__ import annotations

import torch

from hvd_compress.base import Context, Exchange, Gather, Outcome
from hvd_compress.errors import PayloadError


def exchange_rows(gradient: torch.Tensor, context: Context) -> Exchange:
    """Average a sparse COO tensor; the outcome's ``mean`` is sparse and coalesced.

    Args:
        gradient: sparse in its first dimension, dense in the others.
    """
    merged = gradient.coalesce()
    if merged.sparse_dim() != 1:
        raise PayloadError(
            f"sparse gradients must be rows of a matrix (sparse_dim 1), got {merged.sparse_dim()};"
            " pass sparse_as_dense=True to hvd.DistributedOptimizer"
        )
    values = merged.values().contiguous()
    # Eight-byte indices first, so that both parts are aligned in what the others receive.
    parts = yield Gather(_bytes(merged.indices()[0].contiguous()))
    indices = [part.clone().view(torch.int64) for part in parts]
    row = values[:1].numel() * values.element_size() if len(values) else _row_bytes(gradient)
    parts = yield Gather(_bytes(values))
    rows = []
    for rank, (index, part) in enumerate(zip(indices, parts, strict=True)):
        in_range = index.numel() == 0 or (index.min() >= 0 and index.max() < gradient.shape[0])
        if not in_range or part.numel() != index.numel() * row:
            raise PayloadError(f"rank {rank} sent sparse rows that do not fit {gradient.shape}")
        rows.append(part.clone().view(values.dtype).view(-1, *gradient.shape[1:]))
    total = torch.sparse_coo_tensor(
        torch.cat(indices)[None], torch.cat(rows), gradient.shape, check_invariants=False
    )
    total = total.coalesce()
    mean = torch.sparse_coo_tensor(
        total.indices(),
        total.values() / context.size,
        gradient.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    return Outcome(mean, merged, {})


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _row_bytes(gradient: torch.Tensor) -> int:
    return gradient.shape[1:].numel() * gradient.element_size()

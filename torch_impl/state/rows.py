"""Sparse gradients (``Embedding(sparse=True)``): rows are sent as the option ``rows`` of a method
says; see :mod:`hvd_compress.methods.rows`.

Duplicate rows are merged before they are sent, and frames hold raw bytes, so any dtype is possible
where nothing has to wait.  A rank without a gradient sends no rows.
"""

from __future__ import annotations

import torch

from hvd_compress.base import Context, Exchange, Outcome
from hvd_compress.errors import PayloadError
from hvd_compress.methods.rows import Rows
from hvd_compress.methods.rows import exchange_rows as exchange


def exchange_rows(
    gradient: torch.Tensor, context: Context, rows: Rows, residual: torch.Tensor | None = None
) -> Exchange:
    """Average a sparse COO tensor; the outcome's ``mean`` is sparse and coalesced.

    Args:
        gradient: sparse in its first dimension, dense in the others.
        rows: what is sent.
        residual: of the whole matrix, flat, if ``rows.keeps_residual``; it is changed in place.
    """
    merged = gradient.coalesce()
    if merged.sparse_dim() != 1:
        raise PayloadError(
            f"sparse gradients must be rows of a matrix (sparse_dim 1), got {merged.sparse_dim()};"
            " pass sparse_as_dense=True to hvd.DistributedOptimizer"
        )
    n, width = gradient.shape[0], gradient.shape[1:].numel()
    indices = merged.indices()[0]
    values = merged.values().reshape(indices.numel(), width)
    table = None if residual is None else residual.view(n, width)

    def merge(places: torch.Tensor, each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.sparse_coo_tensor(
            places[None], each, (n, width), check_invariants=False
        ).coalesce()
        return total.indices()[0], total.values()

    waiting = None if table is None else table[indices]
    found = yield from exchange(
        rows, indices, values, waiting=waiting, n=n, context=context, merge=merge
    )
    state = {}
    if residual is not None and table is not None and found.left is not None:
        table[indices] = found.left
        state = {"residual": residual}
    mean = torch.sparse_coo_tensor(
        found.indices[None],
        found.values.reshape(-1, *gradient.shape[1:]) if width else found.values,
        gradient.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    return Outcome(mean, found.sent, state)

"""Sparse gradients: rows of all ranks, with their values as they are or in half precision."""

from __future__ import annotations

import pytest
import torch

from hvd_compress import BF16, FP16, TopK
from hvd_compress.base import Context
from hvd_compress.engines import lockstep
from hvd_compress.engines.base import watched
from hvd_compress.torch.rows import exchange_rows

#: rows of a matrix of 6 x 2, by rank; the first has row 4 twice
ROWS = (
    ([4, 1, 4], [[1.0, 2.0], [0.1, -3.0], [0.5, 70000.0]]),
    ([1], [[1e-9, 1.0]]),
    ([], []),
)


def exchanged(wire, dtype=torch.float32):
    """The dense mean, what rank 0 sent, and the bytes of its message."""
    sizes, exchanges = [], []
    for rank, (indices, values) in enumerate(ROWS):
        gradient = torch.sparse_coo_tensor(
            torch.tensor([indices], dtype=torch.int64),
            torch.tensor(values, dtype=dtype).reshape(-1, 2),
            (6, 2),
            check_invariants=True,
        )
        exchange = exchange_rows(gradient, Context("e", rank, len(ROWS)), wire)
        exchanges.append(
            watched(exchange, lambda request, _: sizes.append(request.payload.numel()))
        )
    outcomes = lockstep.run(exchanges)
    for outcome in outcomes:
        assert outcome.mean.dtype is dtype
        assert torch.equal(outcome.mean.indices(), outcomes[0].mean.indices())
        assert torch.equal(outcome.mean.values(), outcomes[0].mean.values())
    return outcomes[0].mean.to_dense(), outcomes[0].sent.to_dense(), sizes[0]


@pytest.mark.parametrize(
    ("wire", "dtype"), [(None, None), ("float16", torch.float16), ("bfloat16", torch.bfloat16)]
)
def test_each_value_is_rounded_once_and_added_in_full_precision(wire, dtype):
    def rounded(x):
        return torch.tensor(x) if dtype is None else torch.tensor(x).to(dtype).float()

    mean, sent, size = exchanged(wire)
    own = torch.zeros(6, 2)
    own[1], own[4] = rounded([0.1, -3.0]), rounded([1.5, 70002.0])
    torch.testing.assert_close(sent, own, rtol=0, atol=0)
    own[1] += rounded([1e-9, 1.0])
    torch.testing.assert_close(mean, own / 3, rtol=0, atol=0)
    assert torch.isinf(mean).any() == (wire == "float16"), "70002 is beyond float16"
    assert size == 16 + 2 * 8 + 4 * (4 if wire is None else 2)


def test_half_precision_gradients_stay_as_they_are():
    for wire in (None, "float16", "bfloat16"):
        _, sent, size = exchanged(wire, torch.bfloat16)
        assert size == 16 + 2 * 8 + 4 * 2
        assert sent[1].tolist() == torch.tensor([0.1, -3.0], dtype=torch.bfloat16).tolist()


def test_who_sends_rows_how():
    assert (FP16().rows_wire, BF16().rows_wire) == ("float16", "bfloat16")
    assert TopK().rows_wire is TopK(values="float16").rows_wire is None

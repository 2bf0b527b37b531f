"""Sparse gradients in PyTorch: bfloat16, which NumPy does not have; see tests/core/test_rows.py."""

from __future__ import annotations

import pytest
import torch

from hvd_compress.base import Context
from hvd_compress.engines import lockstep
from hvd_compress.engines.joining import alone
from hvd_compress.methods.rows import as_rows
from hvd_compress.torch.state.store import exchange_rows

#: rows of a matrix of 6 x 2, by rank; the first has row 4 twice
ROWS = (
    ([4, 1, 4], [[1.0, 2.0], [0.1, -3.0], [0.5, 70000.0]]),
    ([1], [[1e-9, 1.0]]),
    ([], []),
)


def exchanged(text, dtype=torch.float32):
    """The dense mean, what rank 0 sent, and the bytes of its message."""
    sizes, exchanges = [], []
    for rank, (indices, values) in enumerate(ROWS):
        gradient = torch.sparse_coo_tensor(
            torch.tensor([indices], dtype=torch.int64),
            torch.tensor(values, dtype=dtype).reshape(-1, 2),
            (6, 2),
            check_invariants=True,
        )
        exchange = exchange_rows(gradient, Context("e", rank, len(ROWS)), as_rows(text))
        exchanges.append(alone(exchange, lambda request, _: sizes.append(request.payload.numel())))
    outcomes = lockstep.run(exchanges)
    for outcome in outcomes:
        assert outcome.mean.dtype is dtype
        assert torch.equal(outcome.mean.indices(), outcomes[0].mean.indices())
        assert torch.equal(outcome.mean.values(), outcomes[0].mean.values())
    return outcomes[0].mean.to_dense(), outcomes[0].sent, sizes[0]


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("whole", None), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_each_value_is_rounded_once_and_added_in_full_precision(text, dtype):
    def rounded(x):
        return torch.tensor(x) if dtype is None else torch.tensor(x).to(dtype).float()

    mean, sent, size = exchanged(text)
    own = torch.zeros(6, 2)
    own[1], own[4] = rounded([0.1, -3.0]), rounded([1.5, 70002.0])
    torch.testing.assert_close(sent, own[[1, 4]], rtol=0, atol=0)
    own[1] += rounded([1e-9, 1.0])
    torch.testing.assert_close(mean, own / 3, rtol=0, atol=0)
    assert torch.isinf(mean).any() == (text == "float16"), "70002 is beyond float16"
    assert size == 16 + 2 * 8 + 4 * (4 if text == "whole" else 2)


def test_half_precision_gradients_stay_as_they_are():
    for text in ("whole", "float16", "bfloat16"):
        _, sent, size = exchanged(text, torch.bfloat16)
        assert size == 16 + 2 * 8 + 4 * 2
        assert sent[0].tolist() == torch.tensor([0.1, -3.0], dtype=torch.bfloat16).tolist()


@pytest.mark.parametrize("text", ["top:0.5", "top:0.5:bfloat16", "int8"])
def test_the_residual_of_bfloat16_is_float32(text):
    residual, x = torch.zeros(8), torch.tensor([[1.0, 3.0], [4.0, 5.0]])
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), x.bfloat16(), (4, 2), check_invariants=True
    )
    exchange = exchange_rows(gradient, Context("e", 0, 1), as_rows(text), residual)
    mean = lockstep.run([exchange])[0].mean
    assert mean.dtype is torch.bfloat16
    left = residual.view(4, 2)[[0, 2]]
    assert left.any()
    torch.testing.assert_close(
        mean.to_dense().float()[[0, 2]] + left, x, rtol=2**-8, atol=0, msg="of the mean itself"
    )

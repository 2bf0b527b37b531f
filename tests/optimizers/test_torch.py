"""Precisions of PyTorch, and what its optimizers refuse."""

from __future__ import annotations

import pytest
import torch

import hvd_compress.torch as hvd
from hvd_compress.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_without_gradients_stay_finite_in_half_precision(dtype):
    p = torch.nn.Parameter(torch.ones(3, 4, dtype=dtype))
    p.grad = torch.ones_like(p)
    p.grad[0] = 0
    hvd.LAMB([p], lr=0.1, betas=(0.99, 0.999)).step()
    assert torch.isfinite(p).all()
    assert (p[0] == 1).all()


def test_parameters_may_get_another_dtype():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.LAMB([p], lr=0.1)
    for dtype in (torch.float32, torch.bfloat16):
        p.data, p.grad = p.data.to(dtype), torch.ones(3, dtype=dtype)
        optimizer.step()
    assert p.dtype == torch.bfloat16
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_arguments_that_are_none_are_refused():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2))], 0.1)
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module"):
        hvd.SAM(sgd)
    with pytest.raises(ConfigError, match="steps must be"):
        hvd.scaled_warmup(sgd, batch_size=8, reference_batch_size=4, steps=-1)

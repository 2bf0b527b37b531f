"""Sparse and one-bit methods under optimizers that are not linear in the gradient warn."""

import warnings

import pytest
import torch

import hvd_compress.torch.mpi as hvd
from hvd_compress import NeedsTuning, as_compressor
from hvd_compress.methods.optimizers import too_coarse
from hvd_compress.methods.texts import method_names

COARSE = {
    *("dgc", "ef21", "efsignsgd", "lgc", "oktopk", "onebit", "randomk", "scalecom", "signsgd"),
    *("signum", "threshold", "topk"),
}


def test_which_methods_are_coarse():
    ours = [name for name in method_names() if not name.startswith("test-")]
    methods = {name: as_compressor(name) for name in ours}
    assert {name for name, m in methods.items() if m.is_coarse and m.partner is None} == COARSE
    parts = hvd.partition(("embedding*", "topk"), otherwise="linear")
    assert parts.is_coarse


@pytest.mark.parametrize(
    ("optimizer", "warns"),
    [("SGD", False), ("AdamW", True), ("Adam", True), ("NAdam", True), ("RMSprop", True)],
)
def test_it_warns_where_the_optimizer_is_not_linear(optimizer, warns):
    weights = [torch.nn.Parameter(torch.zeros(3))]

    class Mine(getattr(torch.optim, optimizer)):
        """A user's own."""

    for kind in (getattr(torch.optim, optimizer), Mine):
        made = kind(weights, lr=0.1)
        assert (too_coarse(as_compressor("topk"), made) is not None) == warns
        for method in ("linear", "powersgd", "onebit_adam", "none"):
            assert too_coarse(as_compressor(method), made) is None


def test_our_own_optimizers_are_known():
    weights = [torch.nn.Parameter(torch.zeros(3))]
    assert too_coarse(as_compressor("onebit"), hvd.LAMB(weights, lr=0.1))
    assert not too_coarse(as_compressor("onebit"), hvd.LARS(weights, lr=0.1))


def test_an_optimizer_warns_once_and_names_what_to_write():
    hvd.init()
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), compression="topk")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    [warning] = [w for w in caught if w.category is NeedsTuning]
    assert 'compression="linear"' in str(warning.message)
    assert warning.filename == __file__

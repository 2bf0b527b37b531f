"""Ranks of a node that share the exchange between nodes: four ranks, as two nodes of two.

Scenarios of other modules run over nodes, too: tests/integrations/test_frameworks.py names them.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from typing import Any
from unittest import mock

import numpy as np
import torch

from hvd_compress.errors import ConfigError, MismatchError, SetupError, UnsupportedError
from hvd_compress.torch import DGC
from tests.devices import DEVICE
from tests.in_nodes import (
    FOLLOWING,
    NODES,
    OF_A_NODE,
    SAME_BITS,
    cut,
    gradients_of,
    lockstep,
    uneven_model,
)
from tests.scenarios import applies, horovod_only, refused
from tests.scenarios.common import (
    LR,
    assert_close,
    assert_equal,
    assert_same_everywhere,
    backward,
    begin,
    dense_reference,
    distribute,
    loss_of,
    sgd,
    train,
)
from tests.scenarios.driver import hvd, raises

#: of all scenarios here
APPLIES = {"least": 4, "most": 4}
STEPS = 4
DGC_TEXT = "dgc:density=0.05,min_size=0"


def _run(method: Any, momentum: float = 0.0, nodes: Any = NODES, **options: Any) -> Any:
    """Small buckets, so that there are several."""
    model, optimizer = begin(method, uneven_model(), momentum=momentum, nodes=nodes, **options)
    reducer = optimizer.compression.reducer
    reducer.buckets.nbytes, reducer.intake.nbytes = 1000, 2000
    return model, optimizer


def _trained(*args: Any, **options: Any) -> Any:
    run = _run(*args, **options)
    train(*run, range(STEPS))
    assert_same_everywhere(run[0])
    return run


def _place() -> int:
    return hvd.rank() % OF_A_NODE


def _own(optimizer: Any, key: str = "residual") -> dict[str, torch.Tensor]:
    names = optimizer._parameter_names
    found = {names[p]: x for p, own in optimizer.state.items() for k, x in own.items() if key in k}
    return {name: x.clone() for name, x in found.items()}


def trains_as_the_lockstep_world_of_nodes() -> None:
    for method, momentum in FOLLOWING:
        model, _ = _trained(method, momentum)
        reference = lockstep(method, STEPS, loss_of, momentum)
        if method.startswith(SAME_BITS):
            assert_equal(model, reference)
        else:
            assert_close(model, reference)


def a_rank_has_its_share_of_states_and_of_bytes_between_nodes() -> None:
    (model, optimizer), (whole, all_of_it) = (
        _run("topk:density=0.05", nodes=nodes) for nodes in (NODES, None)
    )
    train(model, optimizer, range(2))
    train(whole, all_of_it, range(2))
    parts, everything = _own(optimizer), _own(all_of_it)
    for name, p in model.named_parameters():
        own = cut(np.empty(tuple(p.shape)))[_place()]
        assert parts.get(name, torch.empty(0)).numel() == own.size
        assert everything[name].numel() == p.numel()
    stats = (each.compression.stats().layers["inner.weight"] for each in (optimizer, all_of_it))
    mine, theirs = stats
    assert mine.elements == 2 * len(cut(np.empty((33, 40)))[_place()]) * 40
    assert math.isclose(mine.elements_sent, theirs.elements_sent / 2, rel_tol=0.05)
    assert math.isclose(mine.bytes_sent, theirs.bytes_sent / 2, rel_tol=0.15)
    # Half of a message, from one other rank instead of three.
    assert math.isclose(mine.bytes_received, theirs.bytes_received / 6, rel_tol=0.15)


def exchanges_between_nodes_begin_during_backward() -> None:
    model, optimizer = _run("topk:density=0.05")
    train(model, optimizer, range(2))
    backward(model, optimizer, 2)
    engine, limit = optimizer.compression.engine, time.monotonic() + 60
    while not engine._in_flight:
        optimizer.compression.reducer.poll()
        assert time.monotonic() < limit, "they wait for step()"
    optimizer.step()
    assert_same_everywhere(model)


def one_node_exchanges_nothing_and_nodes_of_one_rank_are_plain() -> None:
    plain = uneven_model()
    dense_reference(plain, sgd(plain, momentum=0.0), range(STEPS))
    for nodes in (1, "auto"):  # on this machine
        assert_close(_trained("none", nodes=nodes)[0], plain)
        _, optimizer = _trained(DGC_TEXT, 0.9, nodes=nodes)
        assert _own(optimizer, "velocity")["inner.weight"].any()
        assert optimizer.compression.stats().total.bytes_received == 0
    (model, optimizer), (other, _) = (_trained("topk:density=0.05", nodes=n) for n in (4, None))
    assert optimizer.compression.reducer.node is None
    assert_equal(model, other)


def wrong_nodes_are_errors_on_every_rank() -> None:
    own = hvd.OneBitAdam(uneven_model().parameters(), lr=0.1, freeze_step=2)
    refused(
        ConfigError,
        (lambda: _run("auto"), "name the method, or leave nodes"),
        (lambda: _run("topk", nodes=3), "4 ranks are no 3 nodes"),
        (lambda: _run("topk", op=hvd.Sum), "op=hvd.Average"),
        (lambda: _run("topk", process_set=hvd.ProcessSet([0, 1])), "leave process_set out"),
        (lambda: _run("topk", sparse_step=True), "leave sparse_step out"),
        (lambda: distribute(own, None, own.compressor(), nodes=2), "needs whole parameters"),
    )
    one = hvd.rank() == 3
    refused(
        MismatchError,
        (lambda: _run("topk", nodes=1 if one else 2), "nodes"),
        (lambda: train(*_run("topk", nodes=None if one else 2), range(1)), "nodes"),
        # Ranks of one node meet different others, which would not see it.
        (
            lambda: train(*_run(f"topk:density={0.1 if _place() else 0.2}"), range(1)),
            r"rank 0, 2: TopK\(density=0\.2",
        ),
    )


@applies(over=["mpi"])
def optimizers_that_were_dropped_have_no_communicators() -> None:
    from hvd_compress.mpi.transport.handles import Handles

    make, free, there = Handles.__init__, Handles.free, list[Handles]()

    def made(self: Handles, mpi: Any, name: bytes = b"") -> None:
        make(self, mpi, name)
        there.extend([self] * bool(name))  # else it is the caller's

    def freed(self: Handles) -> None:
        free(self)
        there.remove(self) if self in there else None

    with mock.patch.multiple(Handles, __init__=made, free=freed):
        for _ in range(5):
            _run("topk")
            gc.collect()
    assert len(there) <= 6  # of the last one, and those that all are made of


@horovod_only
def process_sets_that_cannot_be_made_are_errors() -> None:
    problem = ValueError("Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets")
    sets = "hvd_compress.torch.optimizers.nodes._sets"
    with (
        mock.patch(sets, {}),
        mock.patch("horovod.torch.add_process_set", side_effect=problem),
        raises(SetupError, 'hvd.init\\(process_sets="dynamic"\\)'),
    ):
        _run("topk")
    uneven = int(hvd.rank() > 0)
    with (
        mock.patch("horovod.torch.cross_rank", return_value=uneven),
        raises(ConfigError, "nodes of 1 and 3 ranks"),
    ):
        _run("topk", nodes="auto")
    node = hvd.rank() // OF_A_NODE
    with mock.patch("horovod.torch.cross_rank", return_value=node):
        model, optimizer = _run("topk:density=0.05", nodes="auto")
    train(model, optimizer, range(STEPS))
    assert_equal(model, lockstep("topk:density=0.05", STEPS, loss_of))


def clipping_of_the_method_goes_by_the_gradient_of_the_node() -> None:
    model, optimizer = _run(DGC(density=0.05, clip_norm=0.1), 0.9)
    store = optimizer.compression.store
    norm, found = store.norm, []
    with mock.patch.object(store, "norm", lambda x: found.append(norm(x)) or found[-1]):
        train(model, optimizer, range(1))
    assert_same_everywhere(model)
    means = gradients_of(uneven_model(), hvd.rank() // OF_A_NODE, 0, loss_of)
    right = torch.nn.utils.get_total_norm(means.values()).item()
    assert len(found) == 1
    assert math.isclose(found[0], right, rel_tol=1e-5)


def a_bucket_may_have_nothing_for_a_rank() -> None:
    alone = torch.nn.Parameter(torch.ones(1, device=DEVICE))
    sgd_of_it = torch.optim.SGD([alone], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd_of_it, compression="topk", nodes=NODES)
    for _ in range(2):
        optimizer.zero_grad()
        (alone * hvd.rank()).backward()
        optimizer.step()
    assert alone.tolist() == [1 - 2 * 1.5]


def nan_in_one_shard_reaches_every_rank_and_not_its_state() -> None:
    for place in range(OF_A_NODE):
        model, optimizer = _run("topk:density=0.05")
        train(model, optimizer, range(2))
        before, weight = _own(optimizer)["inner.weight"], model.inner.weight
        factors = torch.ones_like(weight)
        if hvd.rank() == 0:
            cut(factors)[place].fill_(math.nan)
        weight.register_hook(lambda gradient, factors=factors: gradient * factors)
        backward(model, optimizer, 2)
        optimizer.synchronize()
        finite = [np.isfinite(part).all() for part in cut(weight.grad.cpu().numpy())]
        assert finite == [i != place for i in range(OF_A_NODE)]
        assert torch.equal(_own(optimizer)["inner.weight"], before) == (_place() == place)


def rates_that_differ_are_an_error_after_which_training_goes_on() -> None:
    """Also if some ranks were faster than others when they learned of it."""
    model, optimizer = _run("topk:density=0.05")
    train(model, optimizer, range(2))
    group, engine = optimizer.param_groups[0], optimizer.compression.engine
    group["lr"] += hvd.rank() == 0
    backward(model, optimizer, 2)
    while hvd.rank() == 0 and not engine._in_flight:
        optimizer.compression.reducer.poll()
    with raises(MismatchError, "lr="):
        optimizer.step()
    group["lr"] = LR
    train(model, optimizer, range(3, 5))
    assert_same_everywhere(model)


def gradients_may_have_16_bits() -> None:
    value = 60000.0 if hvd.rank() < OF_A_NODE else -40000.0  # of two ranks no sum fits
    large = torch.full((1, 8), value, dtype=torch.float16, device=DEVICE)
    for method in ("none", "fp16"):
        half = torch.nn.Linear(8, 1, bias=False).half().to(DEVICE)
        sums = distribute(sgd(half), half, method, nodes=NODES)
        half(large).sum().backward()
        sums.synchronize()
        assert half.weight.grad.tolist() == [[10000.0] * 8]


def sparse_gradients_travel_dense() -> None:
    rows = torch.nn.Embedding(10, 3, sparse=True)
    with torch.no_grad():
        rows.weight.fill_(1.0)
    optimizer = distribute(sgd(rows, momentum=0.0), rows, "none", nodes=NODES)
    rows(torch.tensor([hvd.rank(), 9])).sum().backward()
    optimizer.step()
    assert_same_everywhere(rows)
    right = torch.ones(10, 3)
    right[:4] -= LR / 4
    right[9] -= LR
    torch.testing.assert_close(rows.weight.detach(), right)
    adam = torch.optim.SparseAdam(rows.parameters(), lr=LR)  # takes no others
    optimizer = distribute(adam, rows, "none", nodes=NODES)
    for step in range(3):
        optimizer.zero_grad()
        if step == 0 or hvd.rank() != 1:
            rows(torch.tensor([hvd.rank(), 9])).sum().backward()
        optimizer.step()
    assert_same_everywhere(rows)


def checkpoints_go_on_in_as_many_nodes() -> None:
    """Ranks of the first node save, each its own, or all ranks do."""
    for method, momentum in ((DGC_TEXT, 0.9), ("onebit", 0.0), ("powersgd", 0.0)):
        model, optimizer = _run(method, momentum)
        train(model, optimizer, range(3))
        weights, states = copy.deepcopy(model.state_dict()), _own(optimizer)
        with mock.patch("warnings.warn"):
            own = copy.deepcopy(optimizer.state_dict())
        optimizer.consolidate_state_dict()
        saved = hvd.allgather_object(copy.deepcopy(optimizer.state_dict()))[_place()]
        train(model, optimizer, range(3, 5))
        again, later = _run(method, momentum)
        again.load_state_dict(weights)
        later.load_state_dict(own)
        torch.testing.assert_close(_own(later), states, rtol=0, atol=0)
        train(again, later, range(3, 5))
        if method == DGC_TEXT:
            assert_equal(again, model)
        else:
            assert_close(again, model)
        again, later = _run(method, momentum)
        again.load_state_dict(weights)
        hvd.broadcast_optimizer_state(later, 0)  # before the first step there is nothing to send
        later.load_state_dict(saved)
        everyones = hvd.allgather_object(states)
        for name, mean in _own(later).items():
            right = sum(own[name] for own in everyones[_place() :: OF_A_NODE]) / NODES
            torch.testing.assert_close(mean, right)
        with raises(UnsupportedError, "let each rank load"):
            hvd.broadcast_optimizer_state(later, 0)
        train(again, later, range(3, 5))
        assert_same_everywhere(again)


def states_of_other_nodes_are_refused() -> None:
    (model, optimizer), (whole, plain) = (_run("topk:density=0.05", nodes=n) for n in (2, None))
    train(model, optimizer, range(2))
    train(whole, plain, range(2))
    with mock.patch("warnings.warn"):
        own, theirs = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(plain.state_dict())
    before = _own(optimizer)
    with raises(ConfigError, rf"ranks\] \[{_place()}, 2\].*this rank is at \[0, 1\]"):
        plain.load_state_dict(own)
    with raises(ConfigError, rf"ranks\] \[0, 1\].*this rank is at \[{_place()}, 2\]"):
        optimizer.load_state_dict(theirs)
    everyones = hvd.allgather_object(own)
    with raises(ConfigError, f"this rank is at \\[{_place()}, 2\\]"):
        optimizer.load_state_dict(everyones[hvd.rank() ^ 1])
    torch.testing.assert_close(_own(optimizer), before, rtol=0, atol=0)
    sgd_state = sgd(model).state_dict()
    optimizer.load_state_dict(sgd_state)  # a plain optimizer's

"""Scenarios of the DDP hook with nodes, for four ranks as two nodes of two;
``torchrun tests/ddp_nodes_worker.py FOLDER`` runs them on every rank."""

from __future__ import annotations

import copy
import math
import os
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.torch import DGC, DDPState, ddp_hook
from tests import ddp_worker, group_worker
from tests.ddp_worker import _heads, _step_of
from tests.devices import DEVICE
from tests.group_worker import (
    assert_close,
    assert_equal,
    assert_same_everywhere,
    assert_same_states,
    from_rank_0,
    loss_of,
    mesh_of,
    states_of,
    train,
)
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
from tests.scenarios import of_program

STEPS = 4
DGC_TEXT = "dgc:density=0.05,momentum=0.9,min_size=0"


def _compressed(method, model=None, nodes=NODES, is_early=False, **options):
    """Small buckets, which DDP divides in another way after the first step."""
    ddp = DistributedDataParallel(model or uneven_model(), bucket_cap_mb=0.002)
    state = DDPState(method, None if is_early else ddp, nodes=nodes, **options)
    ddp.register_comm_hook(state, ddp_hook)
    return ddp, state


def _place():
    return dist.get_rank() % OF_A_NODE


def trains_as_the_lockstep_world() -> None:
    for method, momentum in FOLLOWING:
        model, _ = _compressed(method, momentum=momentum or None)
        train(model, range(STEPS))
        assert_same_everywhere(model)
        reference = lockstep(method, STEPS, loss_of, momentum)
        if method.startswith(SAME_BITS):
            assert_equal(model, reference)
        else:
            assert_close(model, reference)


def clipping_goes_by_the_gradient_of_the_node() -> None:
    model, state = _compressed(DGC(density=0.05, momentum=0.9, clip_norm=0.1))
    norm, found = state.reducer.store.norm, []
    with mock.patch.object(
        state.reducer.store, "norm", lambda x: found.append(norm(x)) or found[-1]
    ):
        train(model, range(1))
    assert_same_everywhere(model)
    means = gradients_of(uneven_model(), dist.get_rank() // OF_A_NODE, 0, loss_of)
    right = torch.nn.utils.get_total_norm(means.values()).item()
    assert found == [pytest.approx(right, rel=1e-5)]


def a_rank_has_its_share_of_states_and_bytes() -> None:
    (model, state), (whole, all_of_it) = (
        _compressed("topk:density=0.05", nodes=nodes) for nodes in (NODES, None)
    )
    for each in (model, whole):
        train(each, range(2))
    for name, p in model.module.named_parameters():
        parts = cut(np.empty(tuple(p.shape)))
        own = state.reducer.store.states.get(name, {"residual": torch.empty(0)})
        assert own["residual"].numel() == parts[_place()].size
        assert all_of_it.reducer.store.states[name]["residual"].numel() == p.numel()
    mine, theirs = (s.stats().layers["inner.weight"] for s in (state, all_of_it))
    assert mine.elements == 2 * len(cut(np.empty((33, 40)))[_place()]) * 40
    assert mine.elements_sent == pytest.approx(theirs.elements_sent / 2, rel=0.05)
    assert mine.bytes_sent == pytest.approx(theirs.bytes_sent / 2, rel=0.15)
    # Half of a message, from one other rank instead of three.
    assert mine.bytes_received == pytest.approx(theirs.bytes_received / 6, rel=0.15)


def nodes_are_found_and_given_in_many_ways() -> None:
    expected, _ = _compressed("topk:density=0.05")
    train(expected, range(STEPS))
    name = {"GROUP_RANK": str(dist.get_rank() // OF_A_NODE)}
    for nodes, variables, is_early in (
        (mesh_of(2, 2), {}, False),
        ("auto", name, False),
        ("auto", name, True),
    ):
        with mock.patch.dict(os.environ, variables):
            model, state = _compressed("topk:density=0.05", nodes=nodes, is_early=is_early)
            train(model, range(STEPS))
        assert_equal(model, expected)
        assert state.reducer.node.ranks == OF_A_NODE
    whole, _ = _compressed("topk:density=0.05", nodes=None)
    train(whole, range(STEPS))
    for nodes in (4, mesh_of(4, 1)):  # of one rank each
        model, state = _compressed("topk:density=0.05", nodes=nodes)
        train(model, range(STEPS))
        assert state._nodes is None
        assert_equal(model, whole)


def one_node_exchanges_nothing() -> None:
    """The method works all the same, as it does on one rank."""
    plain = DistributedDataParallel(uneven_model())
    train(plain, range(STEPS))
    for nodes in (1, "auto"):  # on this machine
        model, _ = _compressed("none", nodes=nodes)
        train(model, range(STEPS))
        assert_same_everywhere(model)
        assert_close(model, plain)
        model, state = _compressed(DGC_TEXT, nodes=nodes)
        train(model, range(STEPS))
        assert_same_everywhere(model)
        assert state.reducer.store.states["inner.weight"]["velocity"].any()
        assert state.stats().total.bytes_received == 0


def states_share_the_groups_of_their_ranks() -> None:
    """Each has threads, files and, over NCCL, memory of a GPU, until the job ends."""
    found = []
    for _ in range(2):
        model, state = _compressed("topk:density=0.05")
        train(model, range(2))
        assert_same_everywhere(model)
        found.append(state._nodes)
    assert found[0] == found[1]


def wrong_nodes_are_errors_on_every_rank() -> None:
    for nodes in (0, -1, 2.5, "hosts", True, [[0, 1], [2, 3]]):
        with pytest.raises(ConfigError, match='nodes="auto", which finds them'):
            DDPState("topk", nodes=nodes)
    with pytest.raises(ConfigError, match=r"name the method, or leave nodes"):
        DDPState("auto", nodes=2)
    with pytest.raises(ConfigError, match="4 ranks are no 3 nodes"):
        _compressed("topk", nodes=3)
    with pytest.raises(ConfigError, match=r"mesh of two dimensions.*of just these"):
        _compressed("topk", nodes=mesh_of(4, 1)["replica"])
    crossed = DeviceMesh(DEVICE.type, [[1, 0], [2, 3]])
    with pytest.raises(ConfigError, match="let the ranks of every row ascend"):
        _compressed("topk", nodes=crossed)
    uneven = {"GROUP_RANK": str(int(dist.get_rank() > 0))}
    with (
        mock.patch.dict(os.environ, uneven),
        pytest.raises(ConfigError, match=r"nodes of 1 and 3 ranks.*as many ranks on every node"),
    ):
        _compressed("topk", nodes="auto")
    last = dist.get_rank() == 3
    with pytest.raises(MismatchError, match=r"(?s)nodes\n.*rank 0, 1, 2: 2\n.*rank 3: 1"):
        _compressed("topk", nodes=1 if last else 2)
    with pytest.raises(MismatchError, match=r"(?s)nodes\n.*rank 0, 1, 2: 2\n.*rank 3: nothing"):
        train(_compressed("topk", nodes=None if last else 2)[0], range(1))
    # Ranks of one node meet different others, which would not see it.
    method = f"topk:density={0.1 if _place() else 0.2}"
    with pytest.raises(MismatchError, match=r"rank 0, 2: TopK\(density=0\.2"):
        _compressed(method)


def sums_of_16_bits_do_not_overflow() -> None:
    large = torch.full((8,), 60000.0, dtype=torch.float16)
    for method in ("none", "fp16"):
        model = DistributedDataParallel(torch.nn.Linear(8, 1, bias=False).half().to(DEVICE))
        state = DDPState(method, model, nodes=NODES)
        model.register_comm_hook(state, ddp_hook)
        model(large.to(DEVICE)[None]).sum().backward()
        assert model.module.weight.grad.tolist() == [[60000.0] * 8]


def one_rank_of_a_node_counts_for_all_of_it() -> None:
    """A head that others do not use counts, as does one whose gradient is zero in its own part."""
    model, state = _heads("topk:density=0.1")
    _step_of(model, "b", dist.get_rank(), 0)
    before = states_of(state)
    _step_of(model, "b" if dist.get_rank() == 1 else "a", dist.get_rank(), 1)
    assert model.module.b.weight.grad.any()
    after = states_of(state)
    assert (after["b.weight"]["residual"] != before["b.weight"]["residual"]).any()
    b = model.module.b.weight
    mask = torch.zeros_like(b)
    cut(mask)[0].fill_(1)
    masked = b.register_hook(lambda gradient: gradient * mask)
    _step_of(model, "a" if _place() else "b", dist.get_rank(), 2)
    masked.remove()
    assert (states_of(state)["b.weight"]["residual"] != after["b.weight"]["residual"]).any()


def nan_in_one_shard_reaches_every_rank_and_not_its_state() -> None:
    """Each shard is a tensor of its own, and the others go on."""
    for place in range(OF_A_NODE):
        model, state = _compressed("topk:density=0.05")
        train(model, range(2))
        before = states_of(state)
        name, weight = max(model.module.named_parameters(), key=lambda named: named[1].numel())
        factors = torch.ones_like(weight)
        if dist.get_rank() == 0:
            cut(factors)[place].fill_(math.nan)
        weight.register_hook(lambda gradient, factors=factors: gradient * factors)
        loss_of(model, dist.get_rank(), 2).backward()
        finite = [np.isfinite(part).all() for part in cut(weight.grad.cpu().numpy())]
        assert finite == [i != place for i in range(OF_A_NODE)]
        kept = torch.equal(states_of(state)[name]["residual"], before[name]["residual"])
        assert kept == (_place() == place)


def passes_that_do_not_meet_are_added() -> None:
    (model, state), (twin, _) = _compressed("topk:density=0.05"), _compressed("topk:density=0.05")
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            loss_of(model, dist.get_rank(), step).backward()
        loss_of(model, dist.get_rank(), step).backward()
        twin.zero_grad()
        (2 * loss_of(twin, dist.get_rank(), step)).backward()
    gradients = ([p.grad for p in each.parameters()] for each in (model, twin))
    torch.testing.assert_close(*gradients)
    assert state.reducer.step == 2


def checkpoints_go_on() -> None:
    for method in (DGC_TEXT, "onebit", "powersgd"):
        model, state = _compressed(method, residuals="ranks")
        train(model, range(3))
        weights = copy.deepcopy(model.module.state_dict())
        own, everything = state.state_dict(consolidate=False), from_rank_0(state.state_dict())
        states = states_of(state)
        train(model, range(3, 5))
        for saved in (own, everything):
            again, later = _compressed(method)
            again.module.load_state_dict(weights)
            later.load_state_dict(saved)
            assert_same_states(states_of(later), states)
            train(again, range(3, 5))
            if method == DGC_TEXT:  # else sums depend on DDP's buckets, which begin anew
                assert_equal(again, model)
            else:
                assert_close(again, model)


def consolidated_states_are_means_over_nodes() -> None:
    model, state = _compressed(DGC_TEXT)
    train(model, range(3))
    saved = from_rank_0(state.state_dict())
    other, later = _compressed(DGC_TEXT)
    later.load_state_dict(saved)
    for name, own in state.reducer.store.states.items():
        if "residual" not in own:  # too small
            continue
        total = own["residual"].clone()
        dist.all_reduce(total, group=state._nodes.between)
        found = later.reducer.store.states[name]["residual"]
        torch.testing.assert_close(found, total / NODES)
    other.module.load_state_dict(model.module.state_dict())
    train(other, range(3, 5))
    assert_same_everywhere(other)
    # Of as many ranks a node, and fewer nodes.
    alone = [each for each in range(NODES) for _ in range(OF_A_NODE)][dist.get_rank()]
    groups = [dist.new_group([2 * node, 2 * node + 1]) for node in range(NODES)]
    smaller = DistributedDataParallel(uneven_model(), process_group=groups[alone])
    fewer = DDPState(DGC_TEXT, smaller, nodes=1)
    fewer.load_state_dict(saved)
    smaller.register_comm_hook(fewer, ddp_hook)
    train(smaller, range(1))
    assert fewer.reducer.step == 4


def states_of_other_nodes_are_refused() -> None:
    model, state = _compressed("topk:density=0.05")
    whole, without = _compressed("topk:density=0.05", nodes=None)
    for each in (model, whole):
        train(each, range(2))
    own, plain = state.state_dict(consolidate=False), without.state_dict()
    before = states_of(state)
    with pytest.raises(ConfigError, match=r"nodes of 2 ranks, and here they have 1.*empty"):
        without.load_state_dict(own)
    with pytest.raises(ConfigError, match=r"nodes of 1 ranks, and here they have 2"):
        state.load_state_dict(plain)
    other = 1 - _place()
    with pytest.raises(ConfigError, match=rf"places {other} in a node, and this rank is at"):
        state.load_state_dict({**own, "shards": {other: own["shards"][_place()]}})
    for damaged in ({"shards": 3}, {"ranks_per_node": "2"}, {"shards": {_place(): 1}}):
        with pytest.raises(ConfigError, match="nothing was changed"):
            state.load_state_dict({**own, **damaged})
    assert_same_states(states_of(state), before)


def _begin() -> None:
    ddp_worker.OPTIONS["nodes"] = NODES


#: those of the hook that say something of nodes, too
SHARED = (
    *("nan_reaches_every_rank_and_no_state", "a_discarded_pass_leaves_no_trace"),
    *("buckets_hold_parameters_of_every_kind", "a_head_that_no_rank_used_keeps_its_state"),
)
SCENARIOS = of_program(globals()) | {name: ddp_worker.SCENARIOS[name] for name in SHARED}

if __name__ == "__main__":
    group_worker.main(SCENARIOS, _begin)

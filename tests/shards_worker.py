"""Scenarios of compressed shards, for four ranks; ``torchrun tests/shards_worker.py FOLDER`` runs
them on every rank."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import hvd_compress.torch as hvd
from hvd_compress import FP8, LinearQuantization
from hvd_compress.errors import CollectiveTimeout, ConfigError, MismatchError, UnsupportedError
from tests import group_worker
from tests.devices import DEVICE
from tests.group_worker import assert_refuses_loss_scale, from_rank_0, mesh_of
from tests.scenarios import of_program

LR = 0.1
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class _Model(torch.nn.Module):
    """Sizes that four ranks cannot divide evenly; of the scale three ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 40)
        self.inner = torch.nn.Linear(40, 33)
        self.middle = torch.nn.Linear(33, 70, bias=False)
        self.head = torch.nn.Linear(70, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = torch.ones(8, 40).to(DEVICE) if x is None else self.words(x).mean(1)
        return self.head(self.middle(self.inner(x).tanh()).tanh()) * self.scale


def _sharded(mesh=None, wrap=lambda module: module, **options):
    torch.manual_seed(0)
    model, mesh = _Model().to(DEVICE), mesh or mesh_of(4)
    for name in ("inner", "middle", "head"):
        setattr(model, name, fully_shard(wrap(getattr(model, name)), mesh=mesh, **options))
    return fully_shard(model, mesh=mesh, **options)


def _loss(model, step, rank=None):
    random = torch.Generator().manual_seed(
        1000 * (dist.get_rank() if rank is None else rank) + step
    )
    x = torch.randint(20, (8, 6), generator=random).to(DEVICE)
    return torch.nn.functional.cross_entropy(model(x).float(), x.sum(1) % 3)


def _gradients(model, steps=(0,)):
    model.zero_grad()
    for step in steps:
        _loss(model, step).backward()
    return {
        name: p.grad.full_tensor().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def _assert_close(found, expected, rtol=1e-5, atol=1e-6):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=rtol, atol=atol)


def gradients_are_those_of_fsdp2_but_for_the_codes() -> None:
    """Exempt parameters are exact, and coded ones are off by half a level of each rank at most."""
    expected = _gradients(_sharded())
    for method, level in {"none": 0, "linear": 254, "linear:bits=4": 14, FP8: 16}.items():
        model = _sharded()
        hvd.compress_shards(model, method)
        found = _gradients(model)
        plain = {"words.weight", "inner.bias", "head.bias", "scale"}
        _assert_close({name: found[name] for name in plain}, {n: expected[n] for n in plain})
        for name in found.keys() - plain:
            most = 4 * _gradients_max(name) / level if level else 1e-6
            assert (found[name] - expected[name]).abs().max() <= most
            assert level == 0 or not torch.equal(found[name], expected[name])


def _gradients_max(name):
    """The largest magnitude of a gradient on any rank."""
    torch.manual_seed(0)
    model = _Model()
    _loss(model, 0).backward()
    largest = dict(model.named_parameters())[name].grad.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


def what_waits_makes_up_for_what_was_left_out() -> None:
    """Sums of what was applied and what waits are the sums of the gradients."""
    for nodes in (None, 2):
        model, dense = _sharded(), _sharded()
        exchange = hvd.compress_shards(model, "linear:bits=4", nodes=nodes)
        sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        expected = {name: x.clone() for name, x in sums.items()}
        for step in range(6):
            for name, x in _gradients(model, [step]).items():
                sums[name] += x
            for name, x in _gradients(dense, [step]).items():
                expected[name] += x
        waiting = exchange.state_dict()["waiting"]
        assert sorted(waiting) == ["head.weight", "inner.weight", "middle.weight"]
        for name, x in waiting.items():
            # The residual itself is rounded to 255 levels in each step.
            off = (sums[name] + x.full_tensor() - expected[name]).abs().max()
            assert off < 0.05 * (sums[name] - expected[name]).abs().max()


def training_follows_fsdp2() -> None:
    expected = _train(_sharded(), range(10))
    ways = [{"compression": "linear"}, {"compression": "linear:bits=4"}, {"compression": "bf16"}]
    ways += [{**ways[0], "parameters": "linear"}, {**ways[1], "parameters": "linear:bits=4"}]
    ways += [{**ways[1], "nodes": 2}, {**ways[1], "residual": None, "nodes": "auto"}]
    for options in ways:
        model = _sharded()
        exchange = hvd.compress_shards(model, **options)
        found = _train(model, range(10))
        assert abs(found[-1] - expected[-1]) < 0.02, (options, found[-1], expected[-1])
        assert exchange.stats().total.steps == 10


def bytes_are_those_of_the_messages() -> None:
    """Counted by hand from the elements: a scale for 512, and what is exempt as it is."""
    model = _sharded()
    exchange = hvd.compress_shards(model, LinearQuantization(bits=4))
    _gradients(model)
    layers = exchange.stats().layers
    # 33 rows of 40 are 9 on each rank, padded; 4 bytes in front of all parts of a module.
    assert layers["inner.weight"].bytes_sent == 3 * (4 + 9 * 40 // 2 + 4)
    assert layers["inner.weight"].dense_bytes == 3 * 4 * 9 * 40
    assert layers["inner.bias"].bytes_sent == layers["inner.bias"].dense_bytes == 3 * 4 * 9
    assert layers["words.weight"].bytes_sent == 3 * (4 * 5 * 40 + 4)
    exchange.reset_stats()
    assert exchange.stats().total.bytes_sent == 0


def accumulation_sends_once_and_is_exact() -> None:
    model, dense = _sharded(), _sharded()
    exchange = hvd.compress_shards(model, "bf16", exempt=lambda name, p: False)
    model.set_requires_gradient_sync(False)
    model.zero_grad()
    _loss(model, 0).backward()
    assert exchange.stats().total.steps == 0
    model.set_requires_gradient_sync(True)
    _loss(model, 1).backward()
    assert exchange.stats().total.steps == 1
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    _assert_close(found, _gradients(dense, [0, 1]), rtol=2e-2, atol=1e-3)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
    clipped = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    _assert_close(clipped, {name: x * 0.01 / norm for name, x in found.items()})


def options_of_fully_shard() -> None:
    """Precisions, resharding, freezing, compiled and recomputed blocks, parameters on "meta"."""
    recomputed = type("Recomputed", (torch.nn.Module,), {"forward": _recompute})

    def wrapped(module):
        outer = recomputed()
        outer.module = module
        return outer

    ways = [{"mp_policy": HALF}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}]
    ways += [{"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, {"wrap": wrapped}]
    ways += [{"wrap": lambda module: torch.compile(module, backend="aot_eager")}]
    plain = _train(_sharded(), range(4))
    for options in ways:
        loose = "mp_policy" in options
        # Of the same losses without, since compiling takes longer than all else here.
        expected = plain if "wrap" in options else _train(_sharded(**options), range(4))
        model = _sharded(**options)
        hvd.compress_shards(model, "linear", parameters="linear")
        found = _train(model, range(4))
        most = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        assert most < (0.05 if loose else 0.01)
    torch.manual_seed(0)
    weights = _Model().state_dict()
    with torch.device("meta"):
        empty = _Model()
    for part in (empty.inner, empty.middle, empty.head, empty):
        fully_shard(part, mesh=mesh_of(4))
    exchange = hvd.compress_shards(empty, "linear")
    empty.to_empty(device=DEVICE)
    with torch.no_grad():
        for name, p in empty.named_parameters():
            whole = torch.distributed.tensor.distribute_tensor(weights[name], p.device_mesh)
            p.copy_(whole.redistribute(p.device_mesh, p.placements))
    expected = _train(_sharded(), range(3))
    assert abs(_train(empty, range(3))[-1] - expected[-1]) < 0.01
    empty.inner.requires_grad_(False)
    _train(empty, range(3))
    assert exchange.stats().layers["inner.weight"].steps == 3
    assert exchange.stats().layers["middle.weight"].steps == 6
    empty.inner.requires_grad_(True)
    _train(empty, range(3))
    assert exchange.stats().layers["inner.weight"].steps == 6


def _recompute(self, x):
    return checkpoint(self.module, x, use_reentrant=False)


def parameters_are_equal_on_all_ranks_and_travel_once_a_pass() -> None:
    model = _sharded()
    exchange = hvd.compress_shards(model, "none", parameters="linear:bits=4")
    seen = []
    model.middle.register_forward_hook(
        lambda module, *_: seen.append(module.weight.detach().clone()), prepend=True
    )
    _train(model, range(3))
    layers = exchange.stats().layers
    assert layers["middle.weight, gathered"].steps == 3  # not in backward
    with torch.no_grad():
        for _ in range(5):
            _loss(model, 3)
    whole = model.middle.weight.full_tensor()
    errors = [(x - whole).abs().max().item() for x in seen[3:]]
    assert errors[0] > 10 * errors[-1]  # what one pass leaves out the next one sends
    assert errors[-1] < 1e-4
    theirs = [torch.empty_like(whole) for _ in range(4)]
    dist.all_gather(theirs, seen[2].detach().contiguous())
    assert all(torch.equal(x, theirs[0]) for x in theirs)
    assert not torch.equal(seen[1], seen[2])
    model.load_state_dict(model.state_dict())
    before = exchange.stats().layers["middle.weight, gathered"].bytes_sent
    with torch.no_grad():
        _loss(model, 4)
    after = exchange.stats().layers["middle.weight, gathered"].bytes_sent
    assert torch.equal(seen[-1], whole)
    assert after - before == 3 * 4 * 18 * 33
    exchange.forget_parameters()
    with torch.inference_mode():
        _loss(model, 4)
    _train(model, range(2))


def checkpoints_keep_what_waits_on_other_numbers_of_ranks() -> None:
    folder = from_rank_0(tempfile.mkdtemp() if dist.get_rank() == 0 else None)
    model = _sharded()
    exchange = hvd.compress_shards(model, "linear:bits=4")
    _train(model, range(5))
    saved = _waiting(exchange)
    assert all(x.any() for x in saved.values())
    dcp.save({"model": model.state_dict(), "exchange": exchange}, checkpoint_id=folder)
    for mesh, dense in ((mesh_of(4), _sharded()), (mesh_of(2, 2)["shard"], None)):
        again = _sharded(mesh)
        other = hvd.compress_shards(again, "linear:bits=4")
        weights = again.state_dict()
        dcp.load({"model": weights, "exchange": other}, checkpoint_id=folder)
        again.load_state_dict(weights)
        state = other.state_dict()
        assert '"step": 5' in state["about"]
        _assert_close({n: x.full_tensor() for n, x in state["waiting"].items()}, saved)
        if dense is not None:  # the next step applies it, once
            dense.load_state_dict(model.state_dict())
            found, expected = _gradients(again, [7]), _gradients(dense, [7])
            for name, x in saved.items():
                error = (found[name] - expected[name] - x).abs().max()
                assert error < 4 * _gradients_max(name) / 7
                assert error < (found[name] - expected[name]).abs().max()


def damaged_states_are_refused_and_change_nothing() -> None:
    model = _sharded()
    exchange = hvd.compress_shards(model, "linear:bits=4")
    _train(model, range(2))
    state = exchange.state_dict()
    about, waiting = state["about"], state["waiting"]
    name = "inner.weight"
    others = {key: x for key, x in waiting.items() if key != name}
    damaged = {
        "has no 'about'": {"waiting": waiting},
        "'about' is damaged": {**state, "about": about[:-4]},
        "has version 7": {**state, "about": about.replace('"version": 1', '"version": 7')},
        "'step' is": {**state, "about": about.replace('"step": 2', '"step": -2')},
        "nothing waits of it": {**state, "about": about.replace("inner", "other")},
        "was not loaded": {**state, "waiting": others},
        "is no DTensor": {**state, "waiting": {**others, name: torch.ones(33, 40)}},
        "has the shape": {**state, "waiting": {**others, name: waiting["head.weight"]}},
        "is not finite": {**state, "waiting": {**others, name: waiting[name] * torch.nan}},
    }
    for words, wrong in damaged.items():
        with pytest.raises(ConfigError, match=f"nothing was changed.*{words}"):
            exchange.load_state_dict(wrong)
    plain = hvd.compress_shards(_sharded(), "bf16")
    with pytest.raises(ConfigError, match="a method that keeps a residual"):
        plain.load_state_dict(state)
    _assert_close(_waiting(exchange), {n: x.full_tensor() for n, x in waiting.items()})


def one_rank_alone_gets_an_error_that_names_the_call() -> None:
    model = _sharded()
    exchange = hvd.compress_shards(model, "linear", parameters="linear")
    _train(model, range(1))
    state, weights = exchange.state_dict(), model.state_dict()
    store = distributed_c10d._get_default_store()
    before = store.timeout
    dist.barrier()
    if dist.get_rank() == 1:
        store.set_timeout(timedelta(seconds=0.2))
        for call, words in (
            (exchange.forget_parameters, r"^forget_parameters\(\)"),
            (lambda: exchange.load_state_dict(state), r"^load_state_dict\(\) of the exchange"),
            (lambda: model.load_state_dict(weights), r"^model\.load_state_dict\(\)"),
        ):
            with pytest.raises(CollectiveTimeout, match=f"{words} .* not on rank 0, 2, 3: call"):
                call()
        store.set_timeout(before)
    dist.barrier()
    exchange.forget_parameters()
    _train(model, range(1))


def what_waits_of_float16_is_an_average_too() -> None:
    """FSDP2 divides it by 2 before the sum, and by 2 afterwards."""
    found = []
    for dtype in (None, torch.float16):
        model = _sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        exchange = hvd.compress_shards(model, "linear:bits=4")
        _gradients(model)
        found.append(_waiting(exchange))
        before = _waiting(exchange)
        exchange.load_state_dict(exchange.state_dict())
        _assert_close(_waiting(exchange), before)
    for name, x in found[0].items():
        assert abs(found[1][name].norm() / x.norm() - 1) < 0.1


def nan_reaches_every_rank_and_no_state() -> None:
    for bad, options in itertools.product((torch.nan, torch.inf), ({}, {"nodes": 2})):
        model = _sharded()
        exchange = hvd.compress_shards(model, "linear:bits=4", **options)
        _gradients(model, [0])
        before = _waiting(exchange)
        hook = model.middle.register_full_backward_hook(_spoil(bad))
        spoiled = _gradients(model, [1])
        assert not spoiled["inner.weight"].isfinite().any()
        assert torch.isfinite(spoiled["head.weight"]).all()
        words = spoiled["words.weight"].isfinite()  # not coded, so NaN where words occur
        assert words.any()
        assert not words.all()
        after = _waiting(exchange)
        assert torch.equal(before["inner.weight"], after["inner.weight"])
        assert not torch.equal(before["head.weight"], after["head.weight"])
        hook.remove()
        assert all(x.isfinite().all() for x in _gradients(model, [2]).values())


def _spoil(bad):
    """The norm of the gradient that comes out of a module, on one rank."""

    def hook(module, inputs, outputs):
        return (inputs[0] * (bad if dist.get_rank() == 1 else 1),)

    return hook


def _waiting(exchange):
    return {name: x.full_tensor() for name, x in exchange.state_dict()["waiting"].items()}


def what_waits_is_dropped_after_so_many_steps() -> None:
    model, fresh = _sharded(), _sharded()
    exchange = hvd.compress_shards(model, "linear:bits=4", reset_every=3)
    _gradients(model, [0])
    _gradients(model, [1])
    _gradients(model, [2])
    assert all(x.any() for x in _waiting(exchange).values())
    hvd.compress_shards(fresh, "linear:bits=4")
    _assert_close(_gradients(model, [3]), _gradients(fresh, [3]), rtol=0, atol=0)


def shards_and_replicas_have_each_their_own_method() -> None:
    mesh = mesh_of(2, 2)
    expected = _gradients(_sharded(mesh))
    native = _sharded(mesh)
    exchange = hvd.compress_shards(native, "linear")
    _assert_close(_gradients(native), expected, rtol=0.05, atol=1e-3)
    assert len(exchange.state_dict()["waiting"]) == 3
    model = _sharded(mesh["shard"])
    shards = hvd.compress_shards(model, "linear", replicas=mesh["replica"])
    replicas = hvd.compress_replicas(model, mesh["replica"], "fp8")
    _assert_close(_gradients(model), expected, rtol=0.1, atol=2e-3)
    assert shards.stats().total.ratio > 1
    assert replicas.stats().total.ratio > 1
    mine = shards.state_dict()["waiting"]["inner.weight"].to_local()
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh["replica"].get_group())
    assert torch.equal(mine, largest)


def divide_factors_count_as_in_fsdp2() -> None:
    for factor, forced in ((None, True), (2.0, True), (4.0, False)):
        found = []
        for method in (None, "none"):
            model = _sharded()
            for module in (model.inner, model.middle, model.head, model):
                module.set_force_sum_reduction_for_comms(forced)
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
            if method is not None:
                hvd.compress_shards(model, method)
            found.append(_gradients(model))
        _assert_close(*found)


def ranks_that_differ_all_say_so() -> None:
    rank = dist.get_rank()
    for options, words in (
        ({"compression": "linear:bits=4" if rank == 1 else "linear"}, "compression"),
        ({"compression": "linear", "beta": 0.5 if rank == 1 else 0.8}, "residual, beta"),
        ({"compression": "linear", "parameters": "linear" if rank else None}, "parameters"),
        ({"compression": "linear", "exempt": lambda n, p: rank == 1}, "exempt"),
        ({"compression": "linear", "nodes": 2 if rank == 1 else None}, "nodes"),
    ):
        with pytest.raises(MismatchError, match=words):
            hvd.compress_shards(_sharded(), **options)


def what_cannot_work_says_what_to_write() -> None:
    for method in ("topk:density=0.01", "onebit", "powersgd", "qsgd"):
        with pytest.raises(UnsupportedError, match=f"{method.partition(':')[0]}.*take 'linear'"):
            hvd.compress_shards(_sharded(), method)
    for options, words in (
        ({"residual": "bf16"}, "bfloat16 has 8 bits of significand.*'int8'"),
        ({"residual": "int4"}, "pass 'int8' or None"),
        ({"beta": 1.0}, r"pass a number in \[0, 1\)"),
        ({"reset_every": 0}, "pass a number of steps"),
        ({"parameters": "bf16"}, "MixedPrecisionPolicy"),
        ({"nodes": 3}, "4 ranks are no 3 nodes"),
    ):
        with pytest.raises(ConfigError, match=words):
            hvd.compress_shards(_sharded(), "linear", **options)
    model, own, gathers, gathers_too, whole = (_sharded() for _ in range(5))
    hvd.compress_shards(model, "linear")
    own.inner.set_custom_reduce_scatter(object())
    for each in (gathers, gathers_too):
        each.inner.set_custom_all_gather(object())
    hvd.compress_shards(gathers, "linear")
    _loss(whole, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that FSDP2 has come
        old = FullyShardedDataParallel(_Model(), device_id=DEVICE)
    for words, each, options in (
        (r"hvd\.compress_shards\(model, 'linear'\)", _Model(), {}),
        ("call compress_shards once", model, {}),
        ("inner has a collective of its own, object", own, {}),
        ("inner has a collective of its own, object", gathers_too, {"parameters": "linear"}),
        ("the model are others.*a forward pass has gathered", whole, {}),
        ("FSDP1.*call fully_shard", old, {}),
    ):
        with pytest.raises((ConfigError, UnsupportedError), match=words):
            hvd.compress_shards(each, "linear", **options)
    whole.reshard()
    hvd.compress_shards(whole, "linear")
    wide = _sharded()
    wide.double()
    hvd.compress_shards(wide, "linear")
    with pytest.raises(UnsupportedError, match=r"float64: set fully_shard"):
        _loss(wide, 0).backward()


def a_loss_scale_is_refused_where_residuals_wait() -> None:
    for residual in ("int8", None):
        model = _sharded()
        hvd.compress_shards(model, "linear", residual=residual)
        if residual is None:
            torch.amp.GradScaler(DEVICE.type).scale(_loss(model, 0)).backward()
        else:
            assert_refuses_loss_scale(_loss(model, 0))


def unused_parameters_are_refused() -> None:
    model = _sharded()
    hvd.compress_shards(model, "linear")
    with pytest.raises(UnsupportedError, match=r"set_reduce_scatter_unused_params\(True\)"):
        model(None).sum().backward()
    model.reset_iter_state()
    model.set_reduce_scatter_unused_params(True)
    model(None).sum().backward()
    assert not model.words.weight.grad.full_tensor().any()


def _begin():
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)  # of Dynamo


SCENARIOS = of_program(globals())

if __name__ == "__main__":
    group_worker.main(SCENARIOS, _begin, (DeprecationWarning, FutureWarning))

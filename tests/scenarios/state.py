"""Momentum that moves, state that is saved, statistics that count."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import itertools
import warnings
import weakref
from typing import Any

import torch

from hvd_compress import Gather, Outcome, Sum
from hvd_compress.torch import DGC, LGC, ConfigError, MismatchError, NoCompression, TopK
from hvd_compress.torch.distributed.compressed_optimizer import _is_ready
from hvd_compress.torch.state.checkpoint import broadcast, local_state_dict
from tests.mutations import mutations, same
from tests.scenarios import applies, horovod_only
from tests.scenarios.common import (
    assert_close,
    assert_same_everywhere,
    dense_reference,
    distribute,
    loss_of,
    make_model,
    sgd,
    train,
)
from tests.scenarios.driver import barrier, hvd, raises
from tests.stateless import Stateless

SPARSE = DGC(density=0.05)
#: of what parameters have in common
KEYS = {"autoencoder", "first_moment", "second_moment", "quality"}


def _warnings_of(action) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught]


def _clone_run(method, **options):
    model = make_model()
    optimizer = distribute(sgd(model, **options), model, method)
    train(model, optimizer, range(5))
    return model, optimizer


def every_rank_may_save_its_own_state() -> None:
    """Saved and loaded by the same rank, a run goes on as if nothing had happened."""
    learned = LGC(density=0.05, learn=2, code=6)
    for method in (SPARSE, learned):
        model, optimizer = _clone_run(method, weight_decay=0.01, nesterov=True)
        saved = io.BytesIO()
        _warnings_of(
            lambda o=optimizer, m=model, f=saved: torch.save([m.state_dict(), o.state_dict()], f)
        )
        train(model, optimizer, range(5, 9))

        again = make_model(seed=1)
        resumed = distribute(sgd(again, weight_decay=0.01, nesterov=True), again, method)
        saved.seek(0)
        weights, state = torch.load(saved)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(again, resumed, range(5, 9))
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q)


def damaged_checkpoints_are_refused_whole() -> None:
    """Or they do no harm: whatever is loaded is finite, and a step can be taken."""
    model = make_model()
    method = DGC(density=0.05, weight_decay="gradient")
    optimizer = distribute(sgd(model, weight_decay=0.01), model, method)
    train(model, optimizer, range(2))
    saved, refused = copy.deepcopy(local_state_dict(optimizer)), 0
    for what, damaged in mutations(saved, 100):
        before = copy.deepcopy(local_state_dict(optimizer))
        problem: list[str] = []
        _warnings_of(lambda d=damaged, p=problem: p.extend(_problem_of(optimizer, d)))
        if problem:
            refused += 1
            assert "nothing was changed" in problem[0], (what, problem)
            assert same(local_state_dict(optimizer), before), what
            continue
        for p in model.parameters():
            for key, x in optimizer.compression.store.state_of(p).items():
                assert torch.isfinite(x).all(), (what, key)
        train(model, optimizer, range(1))
        optimizer.load_state_dict(copy.deepcopy(saved), exact=True)
    assert refused > 20, refused


def every_optimizer_of_torch_takes_its_own_state() -> None:
    """Whatever it keeps: checks must not take it for damage."""
    classes = [
        cls
        for name, cls in sorted(vars(torch.optim).items())
        if isinstance(cls, type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    ]
    assert len(classes) > 8
    for cls in classes:
        known = inspect.signature(cls).parameters
        wanted = {"lr": 0.01, "momentum": 0.9, "amsgrad": True, "centered": True}
        options = {key: value for key, value in wanted.items() if key in known}
        model = make_model()
        optimizer = distribute(cls(model.parameters(), **options), model, TopK(density=0.05))
        train(model, optimizer, range(2))
        optimizer.consolidate_state_dict()
        state = copy.deepcopy(optimizer.state_dict())
        again = make_model()
        resumed = distribute(cls(again.parameters(), **options), again, TopK(density=0.05))
        resumed.load_state_dict(state)
        train(again, resumed, range(2, 3))


def _problem_of(optimizer: Any, state: Any) -> list[str]:
    try:
        optimizer.load_state_dict(state)
    except ConfigError as error:
        return [str(error)]
    return []


def consolidation_leaves_the_run_alone() -> None:
    model, optimizer = _clone_run(SPARSE)
    other, undisturbed = _clone_run(SPARSE)
    optimizer.consolidate_state_dict()
    assert not _warnings_of(optimizer.state_dict)
    state = optimizer.state_dict()
    assert state["hvd_compress"]["consolidated"]
    assert_same_everywhere(
        [s["compression.residual"] for s in state["state"].values() if "compression.residual" in s]
    )
    train(model, optimizer, range(5, 8))
    train(other, undisturbed, range(5, 8))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert len(_warnings_of(optimizer.state_dict)) == (hvd.size() > 1)  # those means are stale


@applies(least=2)
def a_state_that_one_rank_alone_has_loaded_has_no_mean() -> None:
    """Others have nothing to send, and would go on without it."""
    _, trained = _clone_run(SPARSE)
    trained.consolidate_state_dict()
    saved, model = trained.state_dict(), make_model()
    optimizer = distribute(sgd(model), model, SPARSE)
    if hvd.rank() == 0:
        optimizer.load_state_dict(saved)
    with raises(MismatchError, "rank 0: .*residual", "rank 1"):
        optimizer.consolidate_state_dict()


@applies(least=2)  # from all ranks to one fewer
def a_file_of_rank_0_serves_another_number_of_ranks() -> None:
    """The mean of what waited is kept."""
    model, optimizer = _clone_run(SPARSE, weight_decay=0.01)
    optimizer.consolidate_state_dict()
    file, store = io.BytesIO(), optimizer.compression.store
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    weights, state = torch.load(io.BytesIO(hvd.broadcast_object(file.getvalue(), 0, name="file")))
    means = {
        f"{name}.{key}": hvd.allreduce(x, name=f"{name}.{key}")
        for name, p in model.named_parameters()
        for key, x in store.state_of(p).items()
    }
    assert len(means) > 10
    fewer = hvd.add_process_set(range(hvd.size() - 1))
    if fewer.included():
        again = make_model(seed=1)
        inner = sgd(again, weight_decay=0.01)
        resumed = distribute(inner, again, SPARSE, process_set=fewer)
        again.load_state_dict(weights)
        assert not _warnings_of(lambda: resumed.load_state_dict(state))
        for name, p in again.named_parameters():
            for key, x in resumed.compression.store.state_of(p).items():
                mean = hvd.allreduce(x, name=f"again.{name}.{key}", process_set=fewer)
                torch.testing.assert_close(mean, means.pop(f"{name}.{key}"))
        assert not means
        assert resumed.compression.step == 5
        train(again, resumed, range(5, 9))
        assert_same_everywhere(again, fewer)
    barrier()
    hvd.remove_process_set(fewer)


def a_plain_optimizer_can_take_over_and_hand_over() -> None:
    """Plain, compressed, plain again: one run, with the same momentum throughout."""
    for op, options in (
        (hvd.Average, {"nesterov": True}),
        (hvd.Average, {"weight_decay": 0.01}),
        (hvd.Sum, {"maximize": True}),
    ):
        model, reference = make_model(), make_model()
        scale = hvd.size() if op == hvd.Sum else 1
        options = {"lr": 0.02 / scale, **options}
        inner, plain = sgd(model, **options), sgd(reference, **options)
        _plain_steps(model, inner, range(4), scale)
        _plain_steps(reference, plain, range(12), scale)

        wrapped = distribute(inner, model, DGC(density=1.0), op=op)  # with its buffers
        train(model, wrapped, range(4, 6))
        fresh = make_model(seed=1)
        loaded = distribute(sgd(fresh, **options), fresh, DGC(density=1.0), op=op)
        fresh.load_state_dict(model.state_dict())
        wrapped.consolidate_state_dict()
        loaded.load_state_dict(copy.deepcopy(wrapped.state_dict()))
        train(fresh, loaded, range(6, 8))

        loaded.consolidate_state_dict()
        final = make_model(seed=2)
        final.load_state_dict(fresh.state_dict())
        back = sgd(final, **options)
        back.load_state_dict(copy.deepcopy(loaded.state_dict()))
        assert back.param_groups[0]["momentum"] == 0.9
        _plain_steps(final, back, range(8, 12), scale)
        # Decay has a momentum of its own inside DGC, which a plain SGD knows nothing of.
        tolerance = 2e-2 if "weight_decay" in options else 1e-4
        assert_close(final, reference, rtol=tolerance, atol=tolerance / 10)


def _plain_steps(model, optimizer, steps, scale) -> None:
    for step in steps:
        optimizer.zero_grad()
        losses = sum(loss_of(model, rank, step) for rank in range(hvd.size()))
        (losses * scale / hvd.size()).backward()
        optimizer.step()


@horovod_only
def means_do_not_outlive_what_they_are_of() -> None:
    model, optimizer = _clone_run(SPARSE)
    box = []
    _warnings_of(lambda: box.append(copy.deepcopy(optimizer.state_dict())))
    own = box[0]["state"][0]["compression.residual"]
    optimizer.consolidate_state_dict()
    handler = hvd.elastic.state._get_handler(optimizer)
    assert torch.equal(handler._saved["state"][0]["compression.residual"], own)
    optimizer.load_state_dict(box[0])
    assert optimizer.compression.consolidated is None
    assert torch.equal(optimizer.compression.store.state_of(model[0].weight)["residual"], own)


def step_hooks_run_once_also_after_loading() -> None:
    model, calls, state = make_model(), [], []
    inner = sgd(model)
    inner.register_step_pre_hook(lambda *_: calls.append("made before"))
    optimizer = distribute(inner, model, SPARSE)
    optimizer.register_step_post_hook(lambda *_: calls.append("made after"))
    train(model, optimizer, range(1))
    _warnings_of(lambda: state.append(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(state[0]), exact=True)
    train(model, optimizer, range(1))
    assert calls == ["made before", "made after"] * 2


def sparse_parameters_in_checkpoints() -> None:
    """Their velocity is common to all ranks, and who has just joined must know."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 30, sparse=True), torch.nn.Linear(30, 5))
    optimizer = distribute(sgd(model), model, DGC(density=0.5))

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            words = torch.randint(0, 50, (12,))
            torch.nn.functional.cross_entropy(model(words), words % 5).backward()
            optimizer.step()

    torch.manual_seed(hvd.rank())
    steps(3)
    states = []
    _warnings_of(lambda: states.append(hvd.broadcast_object(optimizer.state_dict(), 0)))
    if hvd.rank() == hvd.size() - 1:  # a rank that knows nothing yet
        optimizer.compression.store.sparse.clear()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    velocity = optimizer.compression.store.state_of(model[0].weight)["velocity"]
    assert velocity.abs().sum() > 0
    assert_same_everywhere([velocity])
    optimizer.compression.store.sparse.clear()
    _warnings_of(lambda: optimizer.load_state_dict(states[0]))
    after = optimizer.compression.store.state_of(model[0].weight)["velocity"]
    assert torch.equal(velocity, after)
    steps(2)
    assert_same_everywhere(model)


def rows_that_wait_in_checkpoints() -> None:
    """The mean of what waits goes on, on any number of ranks."""
    for method in (NoCompression(rows="top:0.3"), DGC(density=0.5, rows="int8")):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(50, 30, sparse=True), torch.nn.Linear(30, 5))
        optimizer = distribute(sgd(model, momentum=0.0), model, method)
        torch.manual_seed(hvd.rank())
        for _ in range(3):
            optimizer.zero_grad()
            words = torch.randint(0, 50, (12,))
            torch.nn.functional.cross_entropy(model(words), words % 5).backward()
            optimizer.step()
        weight = model[0].weight
        own = optimizer.compression.store.state_of(weight)["residual"].clone()
        assert own.any()
        mean = hvd.allreduce(own, name="mean of what waits")
        optimizer.consolidate_state_dict()
        state = hvd.broadcast_object(optimizer.state_dict(), 0)
        assert torch.equal(optimizer.compression.store.state_of(weight)["residual"], own)
        optimizer.compression.store.sparse.clear()
        optimizer.load_state_dict(state)
        torch.testing.assert_close(optimizer.compression.store.state_of(weight)["residual"], mean)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        torch.testing.assert_close(optimizer.compression.store.state_of(weight)["residual"], mean)


def one_parameter_keeps_the_autoencoder_of_all() -> None:
    """Through a checkpoint of rank 0, a broadcast, and a second checkpoint."""
    method = LGC(density=0.05, learn=2, code=6)
    model, optimizer = _clone_run(method)

    def everyones() -> list[torch.Tensor]:
        found = [
            p for p in model.parameters() if optimizer.compression.store.state_of(p).keys() >= KEYS
        ]
        assert found == [model[0].weight]
        state = optimizer.compression.store.state_of(found[0])
        return [state[key] for key in sorted(KEYS)]

    for action in ("load", "broadcast", "load", "step"):
        before = [x.clone() for x in everyones()]
        if action == "load":
            optimizer.consolidate_state_dict()
            optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), 0))
        elif action == "broadcast":
            broadcast(optimizer, 0)
        if action == "step":
            train(model, optimizer, range(5, 12))
            assert not torch.equal(before[0], everyones()[0])
        else:
            assert all(map(torch.equal, before, everyones()))
        assert_same_everywhere([*everyones(), *model.parameters()])
    state = local_state_dict(optimizer)
    del state["state"][0]["compression.quality"]
    with raises(ConfigError, "'0.weight' has no 'quality'"):
        optimizer.load_state_dict(state)
    assert_same_everywhere(everyones())


@horovod_only
def broadcast_optimizer_state() -> None:
    import horovod.torch

    for function in (hvd.broadcast_optimizer_state, horovod.torch.broadcast_optimizer_state):
        for make in (sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)):
            method = DGC(density=0.05, momentum=None if make is sgd else 0.0)
            # Rank 0 resumes, the others are new.
            model = make_model(seed=hvd.rank())
            optimizer = distribute(make(model), model, method)
            if hvd.rank() == 0:
                for p in model.parameters():
                    binding = optimizer.compression
                    state = {k: torch.randn_like(x) for k, x in method.init(p.detach()).items()}
                    binding.store.set_state(p, state)
                optimizer.param_groups[0]["lr"] = 0.123
            function(optimizer, root_rank=0)
            assert optimizer.param_groups[0]["lr"] == 0.123
            tensors = [
                x
                for p in model.parameters()
                for x in optimizer.compression.store.state_of(p).values()
            ]
            assert tensors
            assert any(x.abs().sum() > 0 for x in tensors)
            assert_same_everywhere(tensors)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            train(model, optimizer, range(3))
            assert_same_everywhere(model)

    # In mid-training every rank has residuals; their mean goes on.
    model, optimizer = _clone_run(SPARSE)
    residual = optimizer.compression.store.state_of(model[0].weight)["residual"].clone()
    mean = hvd.allreduce(residual, name="residual")
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    after = optimizer.compression.store.state_of(model[0].weight)["residual"]
    torch.testing.assert_close(after, mean)
    assert_same_everywhere([after])


@dataclasses.dataclass(frozen=True)
class TwoRounds(Stateless, name="test-two-rounds"):
    """The average, found in two rounds: half of it in each."""

    def exchange(self, gradient, state, context):
        first = yield Sum(gradient.reshape(-1) / 2)
        parts = yield Gather((gradient.reshape(-1) / 2).view(torch.uint8), equal_sizes=True)
        second = sum(part.view(gradient.dtype) for part in parts)
        mean = (first + second).view(gradient.shape) / context.size
        return Outcome(mean, gradient.reshape(-1), {})


def several_rounds_advance_together() -> None:
    """Ranks start and wait in opposite orders; one tensor's second round must not wait for
    another's first."""
    for groups in (None, 2):
        model, reference = make_model(), make_model()
        optimizer = distribute(sgd(model), model, TwoRounds(), groups=groups)
        dense_reference(reference, sgd(reference), range(4))
        for step in range(4):
            optimizer.zero_grad()
            if groups is None:
                gradients = torch.autograd.grad(
                    loss_of(model, hvd.rank(), step), list(model.parameters())
                )
                pairs = list(zip(model.parameters(), gradients, strict=True))
                for p, g in pairs if hvd.rank() % 2 else pairs[::-1]:
                    p.grad = g
                    _is_ready(weakref.ref(optimizer), id(p), p)
            else:
                loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        assert_same_everywhere(model)
        assert_close(model, reference)


def one_rank_loads_its_own_state_again() -> None:
    """Or clears it: which collectives there are does not depend on what a rank remembers."""
    weights = []
    changes = [lambda _: None, lambda o: o.load_state_dict(o.state_dict()), _clear]
    for method, change in itertools.product([SPARSE, TopK(density=0.05)], changes):
        if method is SPARSE and change is _clear:  # the momentum of what is sent whole is common
            continue
        model = make_model()
        optimizer = distribute(sgd(model, momentum=0.9 if method is SPARSE else 0), model, method)
        train(model, optimizer, range(3))
        if hvd.rank() == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                change(optimizer)
        train(model, optimizer, range(3, 6))
        assert_same_everywhere(model)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[3], weights[4])


def _clear(optimizer) -> None:
    optimizer.state.clear()


def a_second_optimizer_takes_over() -> None:
    """Also where the first is alive on one rank only, as if the collector had not come there."""
    model = make_model()
    first = distribute(sgd(model), model, SPARSE)
    train(model, first, range(2))
    kept = [first] if hvd.rank() == 0 else []
    del first
    second = distribute(sgd(model), model, TopK(density=0.05))
    train(model, second, range(2, 5))
    assert_same_everywhere(model)
    for optimizer in kept:
        with raises(ConfigError, "taken them over"):
            optimizer.step()

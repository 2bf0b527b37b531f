"""Momentum that moves, state that is saved, statistics that count."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import itertools
import weakref
from typing import Any

import torch

from hvd_compress import Gather, Outcome, Sum
from hvd_compress.torch import DGC, LGC, ConfigError, MismatchError, NoCompression, TopK
from hvd_compress.torch.optimizers.compressed_optimizer import _is_ready
from hvd_compress.torch.state.checkpoint import broadcast, local_state_dict
from tests.mutations import mutations, same
from tests.scenarios import applies, horovod_only
from tests.scenarios.common import (
    User,
    as_plain,
    assert_close,
    assert_equal,
    assert_same_everywhere,
    begin,
    distribute,
    goes_on_from_a_checkpoint,
    loss_of,
    make_model,
    sgd,
    train,
    trains_as_plain,
    warned,
    words_loss_of,
    words_model,
)
from tests.scenarios.driver import barrier, hvd, raises
from tests.stateless import Stateless

SPARSE = DGC(density=0.05)
#: of what parameters have in common
KEYS = {"autoencoder", "first_moment", "second_moment", "quality"}


def _clone_run(method, **options):
    model, optimizer = begin(method, **options)
    train(model, optimizer, range(5))
    return model, optimizer


def _own_state(optimizer) -> Any:
    """A copy of what this rank has, without the warning."""
    with warned():
        return copy.deepcopy(optimizer.state_dict())


def every_rank_may_save_its_own_state() -> None:
    """Saved and loaded by the same rank, a run goes on as if nothing had happened."""
    for method in (SPARSE, LGC(density=0.05, learn=2, code=6)):
        options = {"weight_decay": 0.01, "nesterov": True}
        goes_on_from_a_checkpoint(lambda seed, m=method, o=options: begin(m, seed=seed, **o), 5)


def damaged_checkpoints_are_refused_whole() -> None:
    """Or they do no harm: whatever is loaded is finite, and a step can be taken."""
    model, optimizer = begin(DGC(density=0.05, weight_decay="gradient"), weight_decay=0.01)
    train(model, optimizer, range(2))
    saved, refused = copy.deepcopy(local_state_dict(optimizer)), 0
    for what, damaged in mutations(saved, 100):
        before = copy.deepcopy(local_state_dict(optimizer))
        problem = ""
        try:
            with warned():
                optimizer.load_state_dict(damaged)
        except ConfigError as error:
            problem = str(error)
        if problem:
            refused += 1
            assert "nothing was changed" in problem, (what, problem)
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
        models = make_model(), make_model()
        optimizer, resumed = (
            distribute(cls(model.parameters(), **options), model, TopK(density=0.05))
            for model in models
        )
        train(models[0], optimizer, range(2))
        optimizer.consolidate_state_dict()
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(models[1], resumed, range(2, 3))


def consolidation_leaves_the_run_alone() -> None:
    model, optimizer = _clone_run(SPARSE)
    other, undisturbed = _clone_run(SPARSE)
    optimizer.consolidate_state_dict()
    with warned() as said:
        state = optimizer.state_dict()
    assert not said
    assert state["hvd_compress"]["consolidated"]
    assert_same_everywhere(
        [s["compression.residual"] for s in state["state"].values() if "compression.residual" in s]
    )
    train(model, optimizer, range(5, 8))
    train(other, undisturbed, range(5, 8))
    assert_equal(model, other)
    with warned() as said:
        optimizer.state_dict()
    assert len(said) == (hvd.size() > 1)  # those means are stale


@applies(least=2)
def a_state_that_one_rank_alone_has_loaded_has_no_mean() -> None:
    """Others have nothing to send, and would go on without it."""
    _, trained = _clone_run(SPARSE)
    trained.consolidate_state_dict()
    saved, (_, optimizer) = trained.state_dict(), begin(SPARSE)
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
        again, resumed = begin(SPARSE, seed=1, weight_decay=0.01, process_set=fewer)
        again.load_state_dict(weights)
        with warned() as said:
            resumed.load_state_dict(state)
        assert not said
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

        def scaled(*args: Any, scale: int = scale) -> torch.Tensor:
            return scale * loss_of(*args)

        options = {"lr": 0.02 / scale, **options}
        inner, plain = sgd(model, **options), sgd(reference, **options)
        as_plain(User.train, model, inner, range(4), scaled)
        as_plain(User.train, reference, plain, range(12), scaled)

        wrapped = distribute(inner, model, DGC(density=1.0), op=op)  # with its buffers
        train(model, wrapped, range(4, 6))
        fresh, loaded = begin(DGC(density=1.0), seed=1, op=op, **options)
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
        as_plain(User.train, final, back, range(8, 12), scaled)
        # Decay has a momentum of its own inside DGC, which a plain SGD knows nothing of.
        tolerance = 2e-2 if "weight_decay" in options else 1e-4
        assert_close(final, reference, rtol=tolerance, atol=tolerance / 10)


@horovod_only
def means_do_not_outlive_what_they_are_of() -> None:
    model, optimizer = _clone_run(SPARSE)
    state = _own_state(optimizer)
    own = state["state"][0]["compression.residual"]
    optimizer.consolidate_state_dict()
    handler = hvd.elastic.state._get_handler(optimizer)
    assert torch.equal(handler._saved["state"][0]["compression.residual"], own)
    optimizer.load_state_dict(state)
    assert optimizer.compression.consolidated is None
    assert torch.equal(optimizer.compression.store.state_of(model[0].weight)["residual"], own)


def step_hooks_run_once_also_after_loading() -> None:
    model, calls = make_model(), []
    inner = sgd(model)
    inner.register_step_pre_hook(lambda *_: calls.append("made before"))
    optimizer = distribute(inner, model, SPARSE)
    optimizer.register_step_post_hook(lambda *_: calls.append("made after"))
    train(model, optimizer, range(1))
    optimizer.load_state_dict(_own_state(optimizer), exact=True)
    train(model, optimizer, range(1))
    assert calls == ["made before", "made after"] * 2


def sparse_parameters_in_checkpoints() -> None:
    """Their velocity is common to all ranks, and who has just joined must know."""
    model, optimizer = begin(DGC(density=0.5), words_model(sparse=True))
    train(model, optimizer, range(3), words_loss_of)
    state = hvd.broadcast_object(_own_state(optimizer), 0)
    if hvd.rank() == hvd.size() - 1:  # a rank that knows nothing yet
        optimizer.compression.store.sparse.clear()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    velocity = optimizer.compression.store.state_of(model[0].weight)["velocity"]
    assert velocity.abs().sum() > 0
    assert_same_everywhere([velocity])
    optimizer.compression.store.sparse.clear()
    with warned():
        optimizer.load_state_dict(state)
    after = optimizer.compression.store.state_of(model[0].weight)["velocity"]
    assert torch.equal(velocity, after)
    train(model, optimizer, range(3, 5), words_loss_of)
    assert_same_everywhere(model)


def rows_that_wait_in_checkpoints() -> None:
    """The mean of what waits goes on, on any number of ranks."""
    for method in (NoCompression(rows="top:0.3"), DGC(density=0.5, rows="int8")):
        model, optimizer = begin(method, words_model(sparse=True), momentum=0.0)
        train(model, optimizer, range(3), words_loss_of)
        store, weight = optimizer.compression.store, model[0].weight
        own = store.state_of(weight)["residual"].clone()
        assert own.any()
        mean = hvd.allreduce(own, name="mean of what waits")
        optimizer.consolidate_state_dict()
        state = hvd.broadcast_object(optimizer.state_dict(), 0)
        assert torch.equal(store.state_of(weight)["residual"], own)
        store.sparse.clear()
        optimizer.load_state_dict(state)
        torch.testing.assert_close(store.state_of(weight)["residual"], mean)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        torch.testing.assert_close(store.state_of(weight)["residual"], mean)


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

    def program(user, groups):
        model = make_model()
        optimizer = user.begin(model, TwoRounds(), groups=groups)
        for step in range(4):
            optimizer.zero_grad()
            if user.distributes and groups is None:
                gradients = torch.autograd.grad(user.loss(model, step), [*model.parameters()])
                pairs = list(zip(model.parameters(), gradients, strict=True))
                for p, g in pairs if hvd.rank() % 2 else pairs[::-1]:
                    p.grad = g
                    _is_ready(weakref.ref(optimizer), id(p), p)
            else:
                user.loss(model, step).backward()
            optimizer.step()
        return model

    for groups in (None, 2):
        trains_as_plain(program, groups)


def one_rank_loads_its_own_state_again() -> None:
    """Or clears it: which collectives there are does not depend on what a rank remembers."""
    weights = []
    clear = lambda o: o.state.clear()  # noqa: E731
    changes = [lambda _: None, lambda o: o.load_state_dict(o.state_dict()), clear]
    for method, change in itertools.product([SPARSE, TopK(density=0.05)], changes):
        if method is SPARSE and change is clear:  # the momentum of what is sent whole is common
            continue
        model, optimizer = begin(method, momentum=0.9 if method is SPARSE else 0)
        train(model, optimizer, range(3))
        if hvd.rank() == 0:
            with warned():
                change(optimizer)
        train(model, optimizer, range(3, 6))
        assert_same_everywhere(model)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[3], weights[4])


def a_second_optimizer_takes_over() -> None:
    """Also where the first is alive on one rank only, as if the collector had not come there."""
    model, first = begin(SPARSE)
    train(model, first, range(2))
    kept = [first] if hvd.rank() == 0 else []
    del first
    second = distribute(sgd(model), model, TopK(density=0.05))
    train(model, second, range(2, 5))
    assert_same_everywhere(model)
    for optimizer in kept:
        with raises(ConfigError, "taken them over"):
            optimizer.step()

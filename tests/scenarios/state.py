"""Momentum that moves, state that is saved, statistics that count."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
import itertools
import logging
import sys
import tempfile
import threading
import warnings
import weakref
from typing import Any
from unittest import mock

import torch

from hvd_compress import Gather, Outcome, Sum
from hvd_compress.torch import DGC, EF21, LGC, ConfigError, NoCompression, PowerSGD, TopK
from hvd_compress.torch.distributed.compressed_optimizer import _is_ready
from hvd_compress.torch.state.checkpoint import broadcast, local_state_dict
from hvd_compress.wire import sparse_size
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
from tests.scenarios.driver import hvd, raises
from tests.stateless import Stateless

SPARSE = DGC(density=0.05)
#: of what parameters have in common
KEYS = {"autoencoder", "first_moment", "second_moment", "quality"}


def _log_of(action) -> list[str]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    logger, handler = logging.getLogger("hvd_compress"), Keep()
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    return records


def _warnings_of(action) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught]


def momentum_moves_once_and_says_so() -> None:
    model = make_model()

    def make_and_train():
        optimizer = distribute(sgd(model, nesterov=True), model, DGC)
        train(model, optimizer, range(3))
        assert optimizer.param_groups[0]["momentum"] == 0.9
        assert optimizer.param_groups[0]["nesterov"] is True
        assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.9
        assert all("momentum_buffer" not in s for s in optimizer.state.values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = _log_of(make_and_train)
    assert len(lines) == (hvd.rank() == 0), lines
    if lines:
        assert "momentum 0.9 (Nesterov) of SGD" in lines[0]


def adam_gets_error_feedback_and_a_warning() -> None:
    for method, warns in ((DGC(density=0.05), True), (DGC(density=0.05, momentum=0.0), False)):
        model = make_model()
        inner = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
        box = []
        messages = _warnings_of(
            lambda m=model, i=inner, c=method, b=box: b.append(distribute(i, m, c))
        )
        assert len(messages) == (warns and hvd.rank() == 0), messages
        assert not messages or "Adam" in messages[0]
        assert not messages or "DGC(momentum=0.0)" in messages[0]
        optimizer = box[0]
        train(model, optimizer, range(5))
        assert_same_everywhere(model)
        state = optimizer.state[model[0].weight]
        assert {"exp_avg", "compression.residual"} <= state.keys()
        # Without momentum in the exchange, velocity is the last gradient where it was not sent.
        assert optimizer.param_groups[0]["weight_decay"] == 0.01

    model, reference = make_model(), make_model()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = distribute(inner, model, DGC(density=1.0, momentum=0.0))
    train(model, optimizer, range(8))
    dense_reference(reference, torch.optim.Adam(reference.parameters(), lr=0.01), range(8))
    assert_close(model, reference, rtol=1e-2, atol=2e-3)


def _clone_run(method, **options):
    model = make_model()
    optimizer = distribute(sgd(model, **options), model, method)
    train(model, optimizer, range(5))
    return model, optimizer


def every_rank_may_save_its_own_state() -> None:
    """Saved and loaded by the same rank, a run goes on as if nothing had happened."""
    learned = LGC(density=0.05, learn=2, code=6)
    for method in (SPARSE, TopK(density=0.05), DGC(density=0.05, values="float16"), learned):
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
    for method, make_inner in (
        (SPARSE, sgd),
        (DGC(density=0.05, weight_decay="gradient"), lambda m: sgd(m, weight_decay=0.01)),
        (PowerSGD(rank=2), lambda m: torch.optim.Adam(m.parameters(), lr=0.01)),
    ):
        model = make_model()
        optimizer = distribute(make_inner(model), model, method)
        train(model, optimizer, range(2))
        saved, refused = copy.deepcopy(local_state_dict(optimizer)), 0
        for what, damaged in mutations(saved, 100):
            before = copy.deepcopy(local_state_dict(optimizer))
            problem: list[str] = []
            _warnings_of(lambda d=damaged, p=problem, o=optimizer: p.extend(_problem_of(o, d)))
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


def estimates_that_are_lost_are_made_anew() -> None:
    """EF21's mean estimate must be the mean of the estimates: nothing would mend it later."""
    _, optimizer = _clone_run(EF21(density=0.05))
    box = []
    _warnings_of(lambda: box.append(hvd.broadcast_object(optimizer.state_dict(), 0)))
    again = make_model()
    resumed = distribute(sgd(again), again, EF21(density=0.05))
    _warnings_of(lambda: resumed.load_state_dict(box[0]))
    for distributed in (optimizer, resumed):
        for p in distributed.param_groups[0]["params"]:
            state = distributed.compression.store.state_of(p)
            mean = hvd.allreduce(state["estimate"], op=hvd.Average, name="estimate")
            torch.testing.assert_close(mean, state["mean_estimate"], rtol=1e-4, atol=1e-6)


def an_own_state_saved_as_everybodys_warns() -> None:
    model, optimizer = _clone_run(SPARSE)
    messages = _warnings_of(optimizer.state_dict)
    assert len(messages) == (hvd.size() > 1), messages
    if hvd.size() == 1:
        return
    assert "consolidate_state_dict" in messages[0]
    box = []
    _warnings_of(lambda: box.append(hvd.broadcast_object(optimizer.state_dict(), 0)))
    again = make_model()
    resumed = distribute(sgd(again), again, SPARSE)
    messages = _warnings_of(lambda: resumed.load_state_dict(box[0]))
    assert bool(messages) == (hvd.rank() != 0)
    assert all("lost" in message for message in messages)
    # Rank 0's share of what waited is kept, nothing is counted P times, and whole tensors agree.
    mine = resumed.compression.store.state_of(again[0].weight)["residual"]
    own = optimizer.compression.store.state_of(model[0].weight)["residual"]
    assert torch.equal(mine, own if hvd.rank() == 0 else torch.zeros_like(own))
    assert_same_everywhere([resumed.compression.store.state_of(again[0].bias)["velocity"]])


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


def a_plain_optimizer_can_take_over_and_hand_over() -> None:
    """Plain, compressed, plain again: one run, with the same momentum throughout."""
    for options in ({}, {"nesterov": True}, {"maximize": True}, {"weight_decay": 0.01}):
        for op in (hvd.Average, hvd.Sum):
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


def top_k_goes_on_with_the_momentum_of_dgc() -> None:
    model, optimizer = _clone_run(DGC(density=1.0))
    optimizer.consolidate_state_dict()
    reference = make_model()
    dense_reference(reference, sgd(reference), range(8))
    again = make_model()
    resumed = distribute(sgd(again), again, TopK(density=1.0))
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(again, resumed, range(5, 8))
    assert_close(again, reference)


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
    model, optimizer = _clone_run(SPARSE)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, range(1))
    state = []
    _warnings_of(lambda: state.append(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(state[0]), exact=True)
    train(model, optimizer, range(1))
    assert len(calls) == 2


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


def statistics_count_every_byte() -> None:
    density, steps = 0.05, 4
    model = make_model()
    optimizer = distribute(sgd(model), model, DGC(density=density, indices="int32"))
    train(model, optimizer, range(steps))
    stats = optimizer.compression.stats()
    others = hvd.size() - 1
    compressed = []
    for name, p in model.named_parameters():
        record, n = stats.layers[name], p.numel()
        assert record.steps == steps
        assert record.dense_bytes == 4 * n * steps
        if p.dim() == 2 and n >= 1024:
            k = -(-n // 20)
            # And a share of the header, which all have in common.
            assert 8 * k <= record.bytes_sent / steps <= 8 * k + 16
            assert 8 * k * others <= record.bytes_received / steps <= (8 * k + 16) * others
            compressed.append((k, n, record))
            assert record.elements_sent == k * steps
            residual = optimizer.compression.store.state_of(p)["residual"]
            assert abs(record.residual_norm - residual.norm().item()) < 1e-5
            assert record.residual_norm > 0
        else:
            assert record.bytes_sent == 4 * n * steps
            assert record.bytes_received == (4 * n * steps if others else 0)
            assert record.density == 1
    ks, sizes, records = zip(*compressed, strict=True)
    frame = sparse_size(sum(ks), sum(sizes), "float32")
    assert frame == 16 + 8 * sum(ks)
    assert sum(r.bytes_sent for r in records) == frame * steps
    assert sum(r.bytes_received for r in records) == frame * steps * others
    total = stats.total
    assert total.bytes_sent == sum(r.bytes_sent for r in stats.layers.values())
    assert total.ratio == total.dense_bytes / total.bytes_sent > 1
    assert f"ratio of bytes {total.ratio:.1f}" in stats.line()
    assert "0.weight" in str(stats)
    # The method that was handed over answers, too.
    method, model = DGC(density=density), make_model()
    keep = distribute(sgd(model), model, method)
    train(model, keep, range(1))
    assert method.stats().as_dict() == keep.compression.stats().as_dict()
    model = make_model()
    half = distribute(sgd(model), model, "fp16")
    train(model, half, range(1))
    assert half.compression.stats().total.ratio == 2


def statistics_go_to_tensorboard() -> None:
    _, optimizer = _clone_run(SPARSE)
    if hvd.rank() > 0:
        return  # one rank writes, as users do
    without_tensorflow = mock.patch.dict(sys.modules, {"tensorflow": None})  # takes long to import
    with tempfile.TemporaryDirectory() as folder, without_tensorflow:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(folder) as writer:
            optimizer.compression.stats().to_tensorboard(writer, step=5)
        events = EventAccumulator(folder)
        events.Reload()
        [ratio] = events.Scalars("compression/total/ratio")
        assert ratio.step == 5
        assert abs(ratio.value - optimizer.compression.stats().total.ratio) < 1e-3
        assert "compression/0.weight/residual_norm" in events.Tags()["scalars"]


@applies(most=1)  # what this shows for one rank, the references show for several
def alone_momentum_does_not_vanish() -> None:
    """Where Horovod reduces nothing (one rank), the exchange still applies momentum."""
    for method in (DGC(density=1.0), NoCompression()):
        model, reference = make_model(), make_model()
        train(model, distribute(sgd(model), model, method), range(6))
        train(reference, sgd(reference), range(6))
        assert_close(model, reference)


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


def a_name_for_every_collective() -> None:
    """Collectives are named after parameters, so ranks may start them in any order."""
    model = make_model()
    optimizer = distribute(sgd(model), model, SPARSE)
    names = [name for name, _ in model.named_parameters()]
    order = names if hvd.rank() % 2 else names[::-1]
    parameters = dict(model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        gradients = torch.autograd.grad(loss_of(model, hvd.rank(), step), list(parameters.values()))
        for p, g in zip(parameters.values(), gradients, strict=True):
            p.grad = g
        for name in order:
            optimizer.compression.exchange_gradients([parameters[name]])
        optimizer.compression.finish()
        optimizer._synchronized = True
        with optimizer.skip_synchronize():
            optimizer.step()
    other = make_model()
    train(other, distribute(sgd(other), other, SPARSE), range(3))
    assert_same_everywhere(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


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


def nothing_comes_between_backward_and_step() -> None:
    """Refused on all ranks, and the optimizer goes on."""
    weights = []
    for tries in (False, True):
        model = make_model()
        optimizer = distribute(sgd(model), model, SPARSE)
        train(model, optimizer, range(2))
        saved = local_state_dict(optimizer)
        for step in range(2, 5):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            if tries:
                for call in (
                    lambda o=optimizer, s=saved: o.load_state_dict(s),
                    optimizer.consolidate_state_dict,
                    lambda o=optimizer: broadcast(o, 0),
                    lambda m=model: distribute(sgd(m), m, TopK),
                ):
                    with raises(ConfigError, "under way"):
                        call()
            optimizer.step()
        assert_same_everywhere(model)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*weights)


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


def backward_passes_on_several_threads() -> None:
    """Each on a part of the model, in any order."""
    parts = torch.nn.ModuleList(make_model(seed) for seed in range(3))
    optimizer = distribute(sgd(parts), parts, SPARSE)
    problems = []

    def work(part, step):
        try:
            loss_of(part, hvd.rank(), step).backward()
        except Exception as error:  # told below, since a thread has nobody to tell
            problems.append(error)

    for step in range(10):
        optimizer.zero_grad()
        threads = [threading.Thread(target=work, args=(part, step)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems
        optimizer.step()
    assert_same_everywhere(parts)


def what_is_dropped_is_freed() -> None:
    """Models that were optimised once do not stay in memory."""
    for method in (SPARSE, NoCompression, PowerSGD):
        model = make_model()
        optimizer = distribute(sgd(model), model, method)
        train(model, optimizer, range(3))
        tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
        entries = [x for own in optimizer.state.values() for x in own.values()]
        held = [weakref.ref(x) for x in (optimizer, optimizer.compression, *tensors, *entries)]
        del model, optimizer, tensors, entries
        gc.collect()
        assert not [own() for own in held if own() is not None], method

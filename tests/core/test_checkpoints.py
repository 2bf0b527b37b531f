"""States by ways to restore them: what waited counts once, and a damaged one changes nothing.

The table's rows are what keeps a state, and its columns who saved it and who loads it; the ways of
TensorFlow are in ``tests/scenarios/keras_restore.py``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from hvd_compress import ConfigError
from hvd_compress.engines.local import LocalEngine
from hvd_compress.reduce import Reducer
from hvd_compress.systems.coordinator import Coordinator
from hvd_compress.systems.rounds import LocalSGD
from tests.method_table import ROWS
from tests.mutations import mutations, same


def gradients(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        "matrix": random.standard_normal((24, 16)).astype(np.float32),
        "bias": random.standard_normal(24).astype(np.float32),
    }


def reducer_of(row, steps: int) -> Reducer:
    options = {key: row.context[key] for key in ("momentum", "nesterov") if key in row.context}
    reducer = Reducer(row.method, LocalEngine(), **options)
    for step in range(steps):
        reducer.set_epoch(step)
        reducer.reduce(gradients(step))
    return reducer


@pytest.mark.parametrize("has_trained", [True, False], ids=["into a run", "into a fresh one"])
@pytest.mark.parametrize(
    "name", ["dgc", "powersgd", "onebit", "lgc", "ef21", "oktopk", "scalecom", "signum"]
)
def test_damaged_states_of_a_reducer(name, has_trained):
    row = ROWS[name]
    saved = reducer_of(row, 3).state_dict()
    refused = 0
    for what, damaged in mutations(saved, 150):
        target = reducer_of(row, 2 if has_trained else 0)
        before = target.state_dict()
        if problem := problem_of(lambda t=target, d=damaged: t.load_state_dict(d)):
            refused += 1
            assert "nothing was changed" in problem, (what, problem)
            assert same(target.state_dict(), before), what
            continue
        target.set_epoch(3)
        results: dict[str, np.ndarray] = {}
        if problem := problem_of(lambda t=target, r=results: r.update(t.reduce(gradients(3)))):
            # A fresh reducer learns from the first gradients what fits.
            assert not has_trained, (what, problem)
            assert "a state to its model and options" in problem, (what, problem)
        assert all(np.isfinite(x).all() for x in results.values()), what
    assert refused > 50


def test_damaged_states_of_a_binding_of_tensorflow():
    import tensorflow as tf

    import hvd_compress.tensorflow.mpi as hvd

    hvd.init()
    given = [[tf.constant(x) for x in gradients(step).values()] for step in range(3)]
    binding = hvd.bind(ROWS["dgc"].method, [tf.Variable(x) for x in given[0]], momentum=0.9)
    for step in range(2):
        binding.reduce(given[step])
    saved, refused = binding.values(), 0
    binding.reduce(given[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of entries without a use
        for what, damaged in mutations(saved, 120):
            before = binding.values()
            if problem := problem_of(lambda d=damaged: binding.load_values(d)):
                refused += 1
                assert "nothing was changed" in problem, (what, problem)
                assert same(binding.values(), before), what
                continue
            results = [x.numpy() for x in (*binding.reduce(given[2]), *binding.kept()[1].values())]
            assert all(np.isfinite(x).all() for x in results), what
            binding.load_values(saved)
            binding.reduce(given[2])
    assert refused > 40


def problem_of(action: Callable[[], None]) -> str:
    """The message of a ``ConfigError``; no other error is expected."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["dgc", "powersgd", "none"])
def test_a_state_from_before_the_first_step_begins_anew(name):
    """The state of a reducer that took no step, or whose first step was discarded."""
    row = ROWS[name]
    fresh = reducer_of(row, 0).state_dict()
    discarded = reducer_of(row, 0)
    discarded.keep_undo()
    discarded.set_epoch(0)
    discarded.reduce(gradients(0))
    discarded.discard()
    for target, saved in ((reducer_of(row, 2), fresh), (discarded, discarded.state_dict())):
        target.load_state_dict(saved)
        for step in range(2):
            target.set_epoch(step)
            target.reduce(gradients(step))
        assert same(target.state_dict(), reducer_of(row, 2).state_dict())


def test_what_is_no_state_at_all():
    target = reducer_of(ROWS["dgc"], 1)
    for nothing in (None, [], "state", 3, {}):
        with pytest.raises(ConfigError, match="nothing was changed"):
            target.load_state_dict(nothing)


class Ranks(LocalEngine):
    """One of several ranks that nobody asks for anything."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size  # type: ignore[misc]


class OfReducer:
    """A reducer's own state, which a loop saves; also what the hooks of DDP and FSDP save."""

    def __init__(self, steps: int) -> None:
        self.reducer = reducer_of(ROWS["topk"], steps)

    def save(self) -> dict:
        return self.reducer.state_dict(consolidate=False)

    def load(self, saved: dict) -> None:
        self.reducer.load_state_dict(saved)

    @staticmethod
    def headers(saved: dict) -> list[dict]:
        return [saved]

    @staticmethod
    def residual_in(saved: dict) -> np.ndarray:
        return saved["states"]["matrix"]["residual"]

    def waits(self) -> np.ndarray:
        assert list(self.reducer.store.names())
        return np.asarray(self.reducer.store.get("matrix")["residual"])


class OfLocalSteps(OfReducer):
    """A training method with local steps, and the compression of what it sends."""

    def __init__(self, steps: int) -> None:
        method = LocalSGD(sync_every=1, compression=ROWS["topk"].method)
        self.training = Coordinator(method, LocalEngine())
        self.reducer, x = self.training.reducer, gradients(9)
        for step in range(steps):
            self.training.before_step(x)
            x = {name: x[name] - 0.1 * g for name, g in gradients(step).items()}
            x = self.training.after_step(x)

    def save(self) -> dict:
        return copy.deepcopy(self.training.state_dict())

    def load(self, saved: dict) -> None:
        self.training.load_state_dict(saved)

    @staticmethod
    def headers(saved: dict) -> list[dict]:
        return [saved, saved["compression"]]

    @staticmethod
    def residual_in(saved: dict) -> np.ndarray:
        return saved["compression"]["states"]["matrix"]["residual"]


class OfOptimizer(OfReducer):
    """An optimizer of PyTorch, which has the states among its own."""

    def __init__(self, steps: int) -> None:
        torch = pytest.importorskip("torch")
        import hvd_compress.torch.mpi as hvd

        hvd.init()
        self.p = torch.nn.Parameter(torch.ones(24, 16))
        sgd, method = torch.optim.SGD([self.p], lr=0.1), ROWS["topk"].method
        self.optimizer = hvd.DistributedOptimizer(sgd, [("matrix", self.p)], compression=method)
        self.reducer = self.optimizer.compression.reducer
        for step in range(steps):
            self.p.grad = torch.from_numpy(gradients(step)["matrix"])
            self.optimizer.step()

    def save(self) -> dict:
        return copy.deepcopy(self.optimizer.state_dict())

    def load(self, saved: dict) -> None:
        self.optimizer.load_state_dict(saved)

    @staticmethod
    def headers(saved: dict) -> list[dict]:
        return [saved["hvd_compress"]]

    @staticmethod
    def residual_in(saved: dict) -> np.ndarray:
        return saved["state"][0]["compression.residual"].numpy()


WAYS = [OfReducer, OfLocalSteps, OfOptimizer]
#: saved by which rank of how many, consolidated or not; the shares of the ranks that load it
CONDITIONS = {
    "same ranks, first": ((0, 3, False), {0: 1.0}),
    "same ranks, last": ((2, 3, False), {2: 1.0}),
    "as many ranks, not consolidated": ((1, 3, False), {0: 0.0, 1: 1.0, 2: 0.0}),
    "fewer ranks, not consolidated": ((0, 3, False), {0: 2 / 3, 1: 0.0}),
    "as many ranks": ((0, 3, True), {0: 1.0, 1: 1.0, 2: 1.0}),
    "fewer ranks": ((0, 3, True), {0: 1.0, 1: 1.0}),
    "more ranks, of one": ((0, 1, False), {0: 1.0, 1: 1.0}),
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("way", WAYS)
def test_what_waited_counts_once(way, condition):
    """And a rank whose residual is lost says so."""
    (saver, of, consolidated), shares = CONDITIONS[condition]
    size = of if condition.startswith("same") else len(shares)
    run = way(3)
    saved = run.save()
    for header in run.headers(saved):
        header |= {"rank": saver, "size": of, "consolidated": consolidated}
    for rank, share in shares.items():
        other = way(0)
        other.reducer._shared = Ranks(rank, size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other.load(copy.deepcopy(saved))
        assert any("are lost" in str(w.message) for w in caught) == (share != 1)
        expected = run.residual_in(saved) * np.float32(share)
        np.testing.assert_allclose(other.waits().ravel(), expected.ravel(), rtol=1e-6)
        assert np.any(expected) == (share > 0)
        assert other.reducer.step == run.reducer.step == 3


def test_estimates_of_one_rank_are_made_consistent():
    """EF21's mean estimate is the mean of the ranks' estimates, whatever of these is lost."""
    run = reducer_of(ROWS["ef21"], 3)
    saved = run.state_dict(consolidate=False) | {"rank": 0, "size": 3, "consolidated": False}
    estimates = []
    for rank in range(3):
        other = reducer_of(ROWS["ef21"], 0)
        other._shared = Ranks(rank, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.load_state_dict(copy.deepcopy(saved))
        state = other.store.state_for("matrix", gradients(3)["matrix"], other.method)
        estimates.append(state["estimate"])
        mean = state["mean_estimate"]
        assert np.any(mean)
    np.testing.assert_allclose(sum(estimates) / 3, mean, rtol=1e-6)


def _spoilt(way, saved: dict) -> None:
    way.residual_in(saved).flat[0] = np.nan


def _with(**entries):
    def change(way, saved: dict) -> None:
        way.headers(saved)[-1] |= entries

    return change


def _without(name: str):
    def change(way, saved: dict) -> None:
        del way.headers(saved)[-1][name]

    return change


DAMAGED = {
    "another version": (_with(version=0), "has version 0"),
    "a later version": (_with(version=7), "has version 7"),
    "no version": (_without("version"), "has no 'version'"),
    "no rank": (_without("rank"), "has no 'rank'"),
    "a rank too many": (_with(rank=3, size=3), "by rank 3 of 3"),
    "no method": (_with(method={}), "'method' has no 'method'"),
    "a step that is none": (_with(step=-1), "'step'"),
    "NaN": (_spoilt, "NaN or Inf"),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_taken_changes_nothing(way, damage):
    change, says = DAMAGED[damage]
    run, other = way(3), way(2)
    saved, before = run.save(), other.save()
    change(run, saved)
    problem = problem_of(lambda: other.load(saved))
    assert "nothing was changed" in problem
    assert says in problem
    assert same(other.save(), before)

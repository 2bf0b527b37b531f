"""Models that teach each other, in every framework, beside all of them in NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from hvd_compress.errors import MismatchError
from hvd_compress.systems import distillation as in_numpy
from hvd_compress.wire.header import padded
from tests.scenarios import applies, oracle
from tests.scenarios.driver import (
    assert_close,
    everything,
    hvd,
    losses,
    raises,
    student,
    tensor,
)

STEPS = 8
#: the gradient of half the distance from the logits to those of teachers
PULLS = {
    "mse": lambda z, others: (z - sum(others) / len(others)) / z.size,
    "kl": lambda z, others: (
        0.5 * (oracle.softmax(z) - sum(map(oracle.softmax, others)) / len(others)) / len(z)
    ),
}


def _mine() -> Any:
    return oracle.others_weights(hvd.rank())


def _reference(loss: str, teachers_at: Any, batch_of: Any) -> oracle.Weights:
    """This rank's weights, beside those of all.

    Args:
        teachers_at: returns the step whose models teach in a step, or ``None``.
        batch_of: whose batch a rank has.
    """
    models = [oracle.others_weights(rank) for rank in range(hvd.size())]
    seen = []
    for step in range(STEPS):
        seen.append(models)
        source = teachers_at(step)
        after = []
        for rank, weights in enumerate(models):
            others = [w for r, w in enumerate(seen[source or 0]) if r != rank]

            def pull(z: Any, x: Any, others: Any = others) -> Any:
                return PULLS[loss](z, [oracle.logits(w, x)[-1] for w in others])

            taught = source is not None and others
            g = oracle.gradients("mlp", weights, batch_of(rank), step, pull if taught else None)
            after.append({name: w - oracle.LR * g[name] for name, w in weights.items()})
        models = after
    return models[hvd.rank()]


def losses_are_those_in_numpy() -> None:
    z, *teachers = np.random.default_rng(0).standard_normal((4, 6, 5))
    assert losses.keys() == in_numpy.LOSSES.keys()
    for name, (view, distance) in losses.items():
        goal = in_numpy.target(view, [tensor(outputs) for outputs in teachers])
        expected = in_numpy.LOSSES[name]
        expected = expected.distance(z, in_numpy.target(expected.view, teachers))
        assert abs(float(distance(tensor(z), goal)) - expected) < 1e-12, name


def predictions_follow_a_reference() -> None:
    for loss, every, burn_in in (("mse", 1, 0), ("kl", 2, 1)):
        options = {"every": every, "burn_in": burn_in, "weight": 0.5, "loss": loss}
        own = student(_mine(), "predictions", **options)
        for step in range(STEPS):
            own.step(0, step)
        due = range(burn_in, STEPS, every)
        expected = _reference(
            loss, lambda step, due=due: step if step in due else None, lambda _: 0
        )
        assert_close(own.weights(), expected, 1e-6, 1e-8)
        assert own.codistillation.step == STEPS
        others = hvd.size() - 1
        assert own.codistillation.exchanges == len(due) * (others > 0)
        sent = len(due) * others * padded(8 * oracle.WIDTHS[-1] * 8)
        total = own.codistillation.stats().total
        assert total.bytes_sent == total.bytes_received == sent


def checkpoints_follow_a_reference() -> None:
    rows = (("kl", 3, 2), ("mse", 4, 0))
    for loss, every, burn_in in rows if everything else rows[:1]:
        options = {"every": every, "burn_in": burn_in}
        own = student(_mine(), weight=0.5, loss=loss, **options)
        for step in range(STEPS):
            own.step(hvd.rank(), step)

        def teachers_at(step: int, every: int = every, burn_in: int = burn_in) -> int | None:
            begun = range(burn_in, step + 1, every)
            return begun[-1] if begun else None

        expected = _reference(loss, teachers_at, lambda rank: rank)
        assert_close(own.weights(), expected, 1e-6, 1e-8)
        others, n = hvd.size() - 1, sum(w.size for w in own.weights().values())
        assert own.codistillation.stats().total.bytes_sent == 2 * others * padded(8 * n)


@applies(least=2)
def the_loss_is_the_tasks_until_the_first_teachers_come() -> None:
    own = student(_mine(), every=4, burn_in=2)
    for step in range(3):
        task, loss = own.losses(hvd.rank(), step)
        assert (loss > task) == (step == 2)


@applies(least=2)
def a_rank_with_nan_is_no_teacher() -> None:
    for exchange in ("predictions", "checkpoints"):
        weights = _mine()
        if hvd.rank() == 0:
            weights["kernel0"] *= np.nan
        own = student(weights, exchange, every=1, weight=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                task, loss = own.losses(0, step)
                assert np.isfinite(loss) == (hvd.rank() != 0)
                if hvd.size() == 2 and hvd.rank() == 1:  # no teacher is left
                    assert loss == task
        told = [str(w.message) for w in caught if "is no teacher" in str(w.message)]
        if hvd.rank():
            assert len(told) == 1
            assert "NaN or Inf in what the model of rank 0 predicts in step 1" in told[0]
        else:
            assert told == [] or exchange == "checkpoints"


@applies(least=2)
def ranks_that_differ_are_told() -> None:
    with raises(MismatchError, "inputs, which must be the same examples"):
        student(_mine(), "predictions").losses(hvd.rank(), 0)
    with raises(MismatchError, "codistillation", "weight=1.0", "weight=2.0"):
        student(_mine(), "predictions", weight=1.0 + hvd.rank()).losses(0, 0)


def a_run_goes_on_from_its_state() -> None:
    rows = ({"every": 3, "burn_in": 1}, {"every": 2})
    for options in rows if everything else rows[:1]:
        exchange = "checkpoints" if options["every"] == 3 else "predictions"
        batch_of = hvd.rank() if exchange == "checkpoints" else 0
        one, two = (student(w, exchange, **options) for w in (_mine(), oracle.others_weights(9)))
        for step in range(6):
            one.step(batch_of, step)
        two.codistillation.load_state_dict(one.codistillation.state_dict())
        two.set_weights(one.weights())
        assert two.codistillation.step == 6
        for each in (one, two):
            for step in range(6, 10):
                each.step(batch_of, step)
        assert_close(two.weights(), one.weights(), 0, 0)

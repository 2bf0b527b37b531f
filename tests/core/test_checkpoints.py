"""States that were damaged are refused whole, or do no harm; in every place that loads one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hvd_compress import ConfigError
from hvd_compress.engines.local import LocalEngine
from hvd_compress.reduce import Reducer
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
    "name", ["dgc", "demo", "powersgd", "onebit", "lgc", "ef21", "oktopk", "scalecom", "signum"]
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


def problem_of(action: Callable[[], None]) -> str:
    """The message of a ``ConfigError``; no other error is expected."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


def test_what_is_no_state_at_all():
    target = reducer_of(ROWS["dgc"], 1)
    for nothing in (None, [], "state", 3, {}):
        with pytest.raises(ConfigError, match="nothing was changed"):
            target.load_state_dict(nothing)

"""A method with its defaults: it trains, or it says what it needs."""

from __future__ import annotations

import functools
import re
import warnings

import pytest

from hvd_compress import NeedsTuning, SignSGD, as_compressor
from tests.lockstep_training import accuracy, methods_of_sgd

#: how far below the dense run
POINTS = 0.02


@functools.cache
def dense() -> float:
    return accuracy(as_compressor("none"))


#: one of each kind; all others with --full
QUICK = {"none", "bf16", "topk", "dgc", "signsgd", "powersgd"}


@pytest.mark.filterwarnings("ignore::hvd_compress.PoorFit")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.full)
        for name in methods_of_sgd()
        if not name.startswith("test-")
    ],
)
def test_defaults_train_or_say_what_they_need(name):
    """At the dense run's learning rate; or at the one that the warning names."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", NeedsTuning)
        method = as_compressor(name)
    rate = 0.05
    if found:
        (named,) = (re.search(r"lr=([\d.]+) instead of 0\.05", str(w.message)) for w in found)
        rate = float(named[1])
    assert accuracy(method, rate) >= dense() - POINTS


def test_the_warning_points_at_who_made_the_method():
    with pytest.warns(NeedsTuning, match="signsgd moves every weight") as found:
        SignSGD()
    assert found[0].filename == __file__


def test_the_network_learns_nothing_without_steps():
    assert accuracy(as_compressor("none"), lr=0.0, epochs=5) < 0.3

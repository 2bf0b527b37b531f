"""Densities by step and by epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import (
    PAPER_DENSITIES,
    ConfigError,
    ExponentialWarmup,
    StagedWarmup,
    warmup_to,
)
from hvd_compress.schedules import as_density, density_at


def test_the_papers_stages():
    assert [1 - d for d in PAPER_DENSITIES] == [0.75, 0.9375, 0.984375, 0.996, 0.999]
    schedule = StagedWarmup("epoch")
    assert [schedule(10**6, epoch) for epoch in range(7)] == [*PAPER_DENSITIES, 0.001, 0.001]


def test_stages_by_step_last_their_length():
    schedule = StagedWarmup(stage_length=3, densities=(1.0, 0.5, 0.1))
    assert [schedule(step) for step in range(9)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.1, 0.1, 0.1]
    assert [schedule(step, epoch=99) for step in (0, 3)] == [1, 0.5]


def test_stages_by_epoch_last_their_length():
    schedule = StagedWarmup("epoch", 2, (0.5, 0.1))
    assert [schedule(0, epoch) for epoch in range(6)] == [0.5, 0.5, 0.1, 0.1, 0.1, 0.1]


def test_the_released_codes_warmup_is_not_the_papers():
    schedule = ExponentialWarmup("epoch")
    densities = [schedule(0, epoch) for epoch in range(7)]
    expected = [0.3162, 0.1, 0.03162, 0.01, 0.003162, 0.001, 0.001]
    assert densities == pytest.approx(expected, rel=1e-4)
    assert densities[5:] == [0.001, 0.001]  # to the bit


def test_no_stages_at_all():
    assert ExponentialWarmup(stages=0, density=0.01)(0) == 0.01


@pytest.mark.parametrize("schedule", [StagedWarmup("epoch"), ExponentialWarmup("epoch")])
def test_an_epoch_that_was_never_announced(schedule):
    with pytest.raises(ConfigError, match=r"set_epoch\(epoch\)"):
        schedule(5, None)


def test_warmup_to_by_epochs():
    assert warmup_to(0.001, epochs=4).densities == (0.25, 0.0625, 0.015625, 0.004, 0.001)
    assert warmup_to(0.001, epochs=4).stage_length == 1
    assert warmup_to(0.001, epochs=8).stage_length == 2


@pytest.mark.parametrize(("epochs", "stages"), [(1, 4), (2, 2), (3, 4 / 3)])
def test_stages_shorter_than_an_epoch(epochs, stages):
    """They begin with 25 % as all do, and follow one another as parts of epochs are announced."""
    schedule = warmup_to(0.001, epochs=epochs)
    assert schedule.densities == PAPER_DENSITIES
    steps = [schedule(0, epoch / 12) for epoch in range(12 * epochs + 1)]
    assert steps == [
        PAPER_DENSITIES[int(stages * epoch / 12 + 1e-9)] for epoch in range(12 * epochs)
    ] + [0.001]
    # Of whole epochs every one has the density of its beginning.
    assert [schedule(0, epoch) for epoch in range(epochs + 1)] == steps[::12]


def test_warmup_to_by_steps():
    schedule = warmup_to(0.001, steps=400)
    assert (schedule.unit, schedule.stage_length) == ("step", 100)
    assert [schedule(step) for step in (0, 99, 100, 399, 400)] == [0.25, 0.25, 0.0625, 0.004, 0.001]


def test_warmup_to_other_densities():
    assert warmup_to(0.01, steps=30).densities == (0.25, 0.0625, 0.015625, 0.01)
    assert warmup_to(0.5, steps=30) == StagedWarmup(densities=(0.5,))
    assert warmup_to(0.001, steps=0) == StagedWarmup(densities=(0.001,))


@given(density=st.floats(1e-6, 1), steps=st.integers(0, 1000))
def test_warmup_only_ever_sinks_and_ends_where_asked(density, steps):
    schedule = warmup_to(density, steps=steps)
    values = [schedule(step) for step in range(steps + 5)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == density
    warm = sum(value > density for value in values)
    stages = len(schedule.densities) - 1
    assert not stages or values[0] == 0.25
    assert warm == (steps if stages else 0)
    assert (stages == 0) == (steps == 0 or density >= 0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: warmup_to(2.0, steps=1), "density"),
        (lambda: warmup_to(0.1), "steps=... or epochs=..."),
        (lambda: warmup_to(0.1, steps=1, epochs=1), "one of the two"),
        (lambda: warmup_to(0.1, steps=-1), "length"),
        (lambda: warmup_to(0.1, epochs=1.5), "length"),
        (lambda: as_density("dense"), "density"),
        (lambda: as_density(lambda step: 0.1), "density"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_density_is_a_number_or_a_schedule():
    assert as_density(1) == 1.0
    assert isinstance(as_density(1), float)
    schedule = StagedWarmup(densities=(0.5, 0.25))
    assert as_density(schedule) is schedule
    assert [density_at(d, 1, None) for d in (0.1, schedule)] == [0.1, 0.25]


def test_lists_become_tuples():
    schedule = StagedWarmup(densities=[0.5, 0.1])
    assert schedule == StagedWarmup(densities=(0.5, 0.1))
    assert hash(schedule) == hash(StagedWarmup(densities=(0.5, 0.1)))

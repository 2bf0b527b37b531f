"""The cost of waiting: numbers of the literature, formulas against simulation, and the command."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from hvd_compress.cli.main import main
from hvd_compress.errors import ConfigError
from hvd_compress.studies.stragglers import (
    Delays,
    asynchronous,
    gaussian_order,
    harmonic,
    rows_of,
)


@pytest.mark.parametrize(
    ("workers", "mean"),
    [
        *((2, 0.5642), (4, 1.0294), (8, 1.4236), (16, 1.7660), (32, 2.0697)),
        *((64, 2.3437), (256, 2.8269)),
    ],
)
def test_largest_of_gaussians(workers, mean):
    assert gaussian_order(workers, workers) == pytest.approx(mean, abs=6e-5)
    assert gaussian_order(workers, 1) == pytest.approx(-mean, abs=6e-5)


@pytest.mark.parametrize(
    ("workers", "mean"), [(4, 2.0833), (8, 2.7179), (32, 4.0585), (256, 6.1243)]
)
def test_largest_of_exponentials(workers, mean):
    assert harmonic(workers) == pytest.approx(mean, abs=6e-5)
    assert Delays().waited(workers) == pytest.approx(mean, abs=6e-5)


def test_backup_workers_of_exponentials():
    """The fastest K of K + b: H_{K+b} - H_b."""
    assert Delays().waited(5, 1) == pytest.approx(1 / 2 + 1 / 3 + 1 / 4 + 1 / 5)
    assert Delays("exponential", 0.5).waited(5, 1) == pytest.approx(0.5 + 0.5 * (77 / 60))


def test_pareto_by_hand():
    """With a = 3 the deviation is 1 / sqrt(3); of one time the mean is 1; the smaller of two has
    the exponent 2a, and so the mean x_m 6/5 = 0.8."""
    delays = Delays("pareto", 3**-0.5)
    assert delays.waited(1) == pytest.approx(1)
    assert delays.waited(2, 1) == pytest.approx(2 / 3 * 6 / 5)
    assert delays.waited(2) == pytest.approx(2 - 0.8)


@pytest.mark.parametrize(
    "delays",
    [Delays(), Delays("exponential", 0.3), Delays("gaussian", 0.2), Delays("pareto", 0.5)],
)
def test_the_simulation_finds_the_formulas(delays):
    synchronous, backup, local, free = rows_of(delays, 8, backup=2, local_steps=4, steps=20_000)
    assert synchronous.simulated == pytest.approx(synchronous.expected, rel=0.02)
    assert backup.simulated == pytest.approx(backup.expected, rel=0.02)
    assert free.simulated == pytest.approx(1 / 8, rel=0.03)
    assert free.staleness == pytest.approx(7, rel=0.03), "n - 1"
    assert synchronous.used == pytest.approx(8 / synchronous.simulated)
    assert backup.used == pytest.approx(6 / backup.simulated)
    assert 1 < local.simulated < synchronous.simulated
    assert free.idle == 0 < local.idle < synchronous.idle < 1


def test_asynchronous_by_hand():
    """Two workers of equal speed: one update each in every unit of time."""
    span, stale = asynchronous(Delays("gaussian", 1e-12), 2, 1000, np.random.default_rng(0))
    assert span == pytest.approx(0.5)
    assert stale == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distribution": "cauchy"}, "distribution must be one of"),
        ({"spread": 0.0}, "spread=0.0"),
        ({"spread": 2.0}, "at most 1"),
    ],
)
def test_times_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        Delays(**options)


def test_the_command(capsys, tmp_path):
    picture = tmp_path / "stragglers.png"
    options = ["--workers", "4", "8", "--steps", "200", "--picture", str(picture)]
    assert main(["stragglers", *options]) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if re.search(r" [48]   ", line)]
    assert len(rows) == 8
    assert rows[0][:3] == ["synchronous", "4", "2.0833"]
    assert rows[1][:4] == ["1", "backup", "4", "1.0833"]
    assert rows[4][:3] == ["synchronous", "8", "2.7179"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture.resolve()) in output
    assert main(["stragglers", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["workers"], row["strategy"]) for row in found[:2]] == [
        (4, "synchronous"),
        (4, "1 backup"),
    ]
    assert found[0]["expected"] == pytest.approx(25 / 12)
    assert found[2]["expected"] is None, "there is no formula for local steps"
    assert main(["stragglers", "--backup", "4"]) == 2
    assert "--backup 4 must be less than --workers" in capsys.readouterr().err

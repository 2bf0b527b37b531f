"""Short runs of the campaigns of damage; docs/reliability.md has the long ones."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from benchmarks.reliability import damage, exchanges, frames
from hvd_compress import kernels
from hvd_compress.errors import PayloadError
from tests import jobs

CORPUS = jobs.TESTS / "wire" / "damaged.txt"


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_frames(seed):
    """A seed with which something came out that should not is added here, and stays."""
    counts, problems = damage.chunk_of("frames", seed, 0, 2000)
    assert not problems, problems[:5]
    assert counts.total() == 2000
    assert sum(n for (_, outcome), n in counts.items() if outcome == damage.NOTICED) > 0.7 * 2000
    kinds = {kind for kind, _ in counts}
    assert kinds == {"coded", "dense", "joined", "method", "rows", "server", "sparse"}


def test_no_damage_is_another_whole_frame():
    """No receiver could know it from the right one."""
    frame, other = np.zeros(20, np.uint8), np.repeat([255, 0], 10).astype(np.uint8)
    for seed in range(200):
        assert not np.array_equal(damage.spoil(frame, [other], random.Random(seed)), other)


def test_corpus():
    """Each check of each kind of frame has one that it notices, and has always noticed:
    ``python -m benchmarks.reliability frames --cases 60000 --corpus tests/wire/damaged.txt``."""
    by_name = {frame.name: frame for frame in frames.every(0)}
    lines = CORPUS.read_text().splitlines()
    for line in lines:
        check, name, text = line.split("\t")
        with pytest.raises(PayloadError) as error:
            by_name[name].read(np.frombuffer(bytes.fromhex(text), np.uint8).copy())
        if kernels.native is not None:  # NumPy looks at some things in another order
            assert damage.check_of(error.value) == check, name
    assert len(lines) > 70


def test_damaged_exchanges():
    counts, problems = damage.chunk_of("exchanges", 0, 0, 150)
    assert not problems, problems[:5]
    assert sum(n for (_, outcome), n in counts.items() if outcome == damage.NOTICED) > 100


def test_what_is_not_noticed_would_be_found():
    """By the campaign: a reader that takes everything, and one whose results are out of range."""
    frame = next(f for f in frames.every(0) if f.name.startswith("sparse float32 int32"))
    damaged = frame.frame.copy()
    damaged[20] ^= 1
    with pytest.raises(AssertionError, match="not noticed"):
        frame._replace(read=lambda f: ()).judge(damaged, False)
    where = np.array([3, frame.n])
    with pytest.raises(AssertionError, match="out of range"):
        frame._replace(read=lambda f: (where, where)).judge(damaged, True)
    assert frame.judge(damaged, False) == damage.NOTICED


def test_all_methods_that_send_bytes_are_in_the_campaign():
    assert {"topk", "dgc-packed", "onebit", "oktopk", "fp8", "scalecom"} <= set(exchanges.names())
    case = exchanges.Case("fp8", random.Random(0))
    assert case.outcome() in (damage.NOTICED, damage.UNCHANGED)


@pytest.mark.parametrize("campaign", ["frames", "soak", "kills"])
def test_help_needs_neither_frameworks_nor_mpi(campaign):
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['reliability', '{campaign}', '--help']\n"
        "try:\n    runpy.run_module('benchmarks.reliability', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'numpy', 'torch', 'mpi4py', 'tensorflow'} & set(sys.modules)\n"
    )
    _, output = jobs.run([sys.executable, "-c", script], timeout=60)
    assert "--seed" in output

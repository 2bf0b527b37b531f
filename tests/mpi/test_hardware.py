"""Tests that need more than a small machine: arrays of more than 2^31 bytes."""

from __future__ import annotations

import sys

import psutil
import pytest

from tests import jobs

TESTS = jobs.TESTS


@pytest.mark.full
@pytest.mark.timeout(200)
def test_more_than_two_billion_bytes():
    needed = 8 * 2**30
    if psutil.virtual_memory().available < needed:
        pytest.skip("8 GiB of free memory are needed for two arrays of more than 2^31 bytes")
    command = [*jobs.launcher(2, "mpirun"), sys.executable, str(TESTS / "mpi_large.py")]
    jobs.run(command, timeout=180)

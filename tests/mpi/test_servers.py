"""Ranks that begin a parameter server with other options, over MPI in one process."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.mpi import Communicator, ParameterServer
from tests.simulated_mpi import Simulation


def test_seeds_that_differ_are_an_error():
    """Otherwise codes would be drawn by one, and read by another."""
    said = []

    def rank():
        comm = Communicator()
        with pytest.raises(MismatchError) as error:
            ParameterServer({"w": np.zeros(3)}, seed=comm.rank, comm=comm)
        said.append(str(error.value))

    Simulation(2).run(rank)
    assert all("seed=0" in text and "seed=1" in text for text in said)
    assert len(said) == 2


def test_an_option_that_there_is_not_names_those_that_there_are():
    def rank():
        comm = Communicator()
        with pytest.raises(ConfigError, match=r"no option 'mod'; it has .*mode"):
            ParameterServer({"w": np.zeros(3)}, mod="async", comm=comm)

    Simulation(2).run(rank)

"""The framework under test, behind one small interface: ``SCENARIOS_OVER`` says which.

"horovod" is PyTorch over Horovod, "mpi" PyTorch over MPI without Horovod, "tensorflow" a Keras
optimizer in a ``tf.function``, "tape" a gradient tape; "tensorflow-mpi" and "tape-mpi" are these
two over MPI without Horovod.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from typing import Any, Protocol

import numpy as np

from tests.scenarios import Errors
from tests.scenarios import raises as raises
from tests.scenarios.oracle import Setup

over, _, library = os.environ.get("SCENARIOS_OVER", "horovod").partition("-")
_MODULES = {"horovod": "torch", "mpi": "torch", "tensorflow": "tensorflow", "tape": "tensorflow"}
_driver: Any = importlib.import_module(f"tests.scenarios.driver_{_MODULES[over]}")
#: whether to go through all options: TensorFlow traces a graph for each, which takes a second of
#: each rank, and leaves to tests that are marked as full those that others have in one process
everything = over in ("horovod", "mpi") or os.environ.get("SCENARIOS_FULL") == "1"
#: the drop-in for Horovod's module
hvd: Any = _driver.hvd
#: the framework's Adam
adam: Any = _driver.adam
#: this package's optimizers of those names
lars: Any = _driver.lars
onebit_adam: Any = _driver.onebit_adam
zero_one_adam: Any = _driver.zero_one_adam
lamb: Any = _driver.lamb
onebit_lamb: Any = _driver.onebit_lamb
#: how ranks that differ say so
mismatch: Errors = _driver.mismatch
#: make a run believe that it is at another step
set_step: Any = _driver.set_step
#: give a run's optimizer another learning rate, as schedulers do
set_rate: Any = _driver.set_rate
#: arrays of all ranks, one behind the other
allgather: Any = _driver.allgather
#: gradients of the weighted sum of a function's results, in each way that the framework has, and
#: the first and second gradient of its sum
gradients_through: Any = _driver.gradients_through
second_gradient: Any = _driver.second_gradient
#: codistillation's, by name
losses: Any = _driver.LOSSES
#: an array as a tensor of the framework
tensor: Any = _driver.tensor
#: over MPI without Horovod
is_mpi = "mpi" in (over, library)
#: a weight of the oracle's in the layout of the framework, and back
turned: Any = _driver.turned


class Student(Protocol):
    """A model in float64 that others teach, beside plain SGD.

    Attributes:
        codistillation: what is made of the model and of options.
    """

    codistillation: Any

    def step(self, rank: int, number: int) -> None:
        """One on a rank's batch."""

    def losses(self, rank: int, number: int) -> tuple[float, float]:
        """The task's, and that with teachers; an exchange without a step."""

    def weights(self) -> dict[str, np.ndarray]:
        """By the oracle's names, in its layout."""

    def set_weights(self, weights: dict[str, np.ndarray]) -> None: ...


def student(weights: dict[str, np.ndarray], *args: Any, **options: Any) -> Student:
    return _driver.Student(weights, *args, **options)


class Run(Protocol):
    """Training of the oracle's network on this rank.

    Attributes:
        compression: what users meet under that name; ``None`` if a training method is used.
        optimizer: the distributed one.
        framework_names: what the framework calls the weights, in the oracle's order.
    """

    compression: Any
    optimizer: Any
    framework_names: list[str]

    def step(self, number: int, *, passes: int = 1, spoilt: bool = False) -> None:
        """One optimizer step on the batches of this rank; ``spoilt``: the input is NaN."""

    def weights(self) -> dict[str, np.ndarray]:
        """By the oracle's names, in its layout."""

    def set_weights(self, weights: dict[str, np.ndarray]) -> None: ...

    def states(self) -> dict[str, np.ndarray]:
        """All of the compression's state."""


def make(method: Any, /, **options: Any) -> Run:
    """A run from the oracle's initial weights.

    Args:
        method: a value for ``compression=``; without effect beside ``method=``.
        options: those of :class:`oracle.Setup`, ``groups="two"`` for a group of the first two
            variables; all others go to ``DistributedOptimizer``.
    """
    own = {field.name for field in dataclasses.fields(Setup)} & options.keys()
    setup = Setup(**{name: options.pop(name) for name in own})
    return _driver.Run(method, setup, options)


def barrier() -> None:
    allgather(np.zeros(1, np.uint8))


def train(run: Run, steps: Any, **options: Any) -> Run:
    for step in steps:
        run.step(step, **options)
    return run


def assert_same_everywhere(weights: dict[str, np.ndarray], process_set: Any = None) -> None:
    """All ranks hold the same bits."""
    data = b"".join(np.ascontiguousarray(w).tobytes() for w in weights.values())
    digest = np.frombuffer(hashlib.sha256(data).digest(), np.uint8)
    options = {} if process_set is None else {"process_set": process_set}
    digests = np.reshape(allgather(digest, **options), (-1, digest.size))
    assert (digests == digests[0]).all(), "ranks diverged"


def assert_close(
    weights: dict[str, np.ndarray],
    other: dict[str, np.ndarray],
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    assert weights.keys() == other.keys()
    for name, w in weights.items():
        np.testing.assert_allclose(w, other[name], rtol=rtol, atol=atol, err_msg=name)


def embedding_of(run: Run) -> Any:
    """The counts of the embedding of a network with words."""
    layers = run.compression.stats().layers
    return next(record for name, record in layers.items() if "embedding" in name)

"""All ranks of a training method in one process, for tests, studies and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.agreement import differences, encode
from hvd_compress.config import is_number, is_whole
from hvd_compress.engines import lockstep
from hvd_compress.engines.lockstep import replies_to, reply_to
from hvd_compress.errors import CompressionError, ConfigError, MismatchError
from hvd_compress.requests import Sum
from hvd_compress.stats import Record
from hvd_compress.systems.base import (
    WEIGHTS_AT_START,
    Arrays,
    Finish,
    Mean,
    Start,
    State,
    StepContext,
    TrainingMethod,
    Unsent,
    all_finite,
    residuals,
)


class Ranks:
    """All ranks of a training method in one process, one request at a time.

    Args:
        method: the training method.
        size: the number of ranks.
        nodes: the name of each rank's node; ``None`` if all are on one.
        seed: the seed of random numbers that the ranks share.

    Raises:
        MismatchError: from the first step: the ranks begin with other weights, and the method needs
            the same.

    Attributes:
        states: the state of each rank.
        step, exchanges: the number of local steps so far, and of those with an exchange.
        bytes_sent: bytes that rank 0 has sent.

    >>> ranks = Ranks(LocalSGD(sync_every=2), size=2)
    >>> x = [{"w": np.array([0.0])}, {"w": np.array([4.0])}]
    >>> for _ in range(2):
    ...     x = ranks.after_step(ranks.before_step(x))
    >>> x[0]["w"], ranks.exchanges, ranks.bytes_sent
    (array([2.]), 1, 8)
    """

    def __init__(
        self,
        method: TrainingMethod,
        size: int,
        *,
        nodes: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        method.check_ranks(size)
        self.method, self.size = method, size
        self.nodes = [""] * size if nodes is None else list(nodes)
        self.states: list[State] = []
        self.step = self.exchanges = 0
        self._averages = lockstep.World(method.compression, size, seed)
        self._record = Record()
        self._started: list[Arrays] = []
        self._losses: list[list[Any]] = [[] for _ in range(size)]
        self._rates: Mapping[str, float] = {}
        self._has_met = False  # in the step under way

    @property
    def bytes_sent(self) -> int:
        return self._record.bytes_sent + self._averages.record.bytes_sent

    def before_step(
        self,
        parameters: Sequence[Arrays],
        *,
        losses: Sequence[float] | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> list[Arrays]:
        """Run what the method does between the computation of gradients and the local step; all
        but ``rates`` are in rank order."""
        if not self.states:
            self.states = [self.method.init(own) for own in parameters]
            starts = [self.method.in_common(state) for state in self.states]
            if any(start != starts[0] for start in starts):
                texts = [encode({WEIGHTS_AT_START: own}) for own in starts]
                raise MismatchError(differences(texts))
        window = self.method.loss_window
        for rank in range(self.size if window else 0):
            if losses is None:
                raise CompressionError(f"{self.method!r} needs losses")
            self._losses[rank] = [*self._losses[rank], losses[rank]][-window:]
        self._rates = rates or {}
        return self._stepped(self.method.before_step, parameters)

    def after_step(self, parameters: Sequence[Arrays]) -> list[Arrays]:
        """Run what the method does after the local step."""
        result = self._stepped(self.method.after_step, parameters)
        self.step += 1
        return result

    def consensus(self, parameters: Sequence[Arrays]) -> list[Arrays]:
        """Return the parameters that are to be tested."""
        pairs = zip(parameters, self.states, strict=True)
        return lockstep.run([self.method.consensus(*pair) for pair in pairs], self._answers)

    def _stepped(
        self,
        function: Callable[..., Any],
        parameters: Sequence[Arrays],
    ) -> list[Arrays]:
        steps = []
        for rank, own in enumerate(parameters):
            context = StepContext(
                self.step + 1,
                rank,
                self.size,
                self._losses[rank],
                self._rates,
                self.nodes[rank],
            )
            steps.append(function(own, self.states[rank], context))
        self._has_met = False
        results = lockstep.run(steps, self._answers)
        self.exchanges += self._has_met
        self.states = [state for _, state in results]
        return [own for own, _ in results]

    def _answers(self, requests: Sequence[Any]) -> list[Any]:
        first = requests[0]
        if isinstance(first, Unsent):
            states = self._averages.states.items()
            return [
                residuals(own.arrays, {name: of[rank] for name, of in states})
                for rank, own in enumerate(requests)
            ]
        self._has_met |= not isinstance(first, Finish)
        if isinstance(first, Start):
            outcomes = self._averages.exchange_all(
                [request.arrays for request in requests], step=first.round
            )
            self._started = [{name: o.direction for name, o in own.items()} for own in outcomes]
            return [None] * self.size
        if isinstance(first, Finish):
            if not all_finite(self._started[0]):
                for name in self._started[0]:
                    self._averages.begin(name, [own[name] for own in self._started])
            return self._started
        if isinstance(first, Mean):
            self._record.bytes_sent += sum(int(x.nbytes) for x in first.arrays.values())
            mean = {
                name: reply_to([Sum(request.arrays[name]) for request in requests]) / self.size
                for name in first.arrays
            }
            return [mean] * self.size
        replies = replies_to(requests)
        sent, _ = first.count(replies[0], 0, self.size)
        self._record.bytes_sent += first.nbytes + sent
        return replies


def simulate(
    method: TrainingMethod,
    gradient: Callable[[int, np.ndarray, int], np.ndarray],
    start: np.ndarray | Sequence[np.ndarray],
    steps: int,
    rate: float,
    *,
    observe: Callable[[int, np.ndarray], None] | None = None,
) -> np.ndarray:
    """Train functions that are given by their gradients, and return the ranks' last iterates,
    (ranks, d), in the dtype of ``start``.

    Args:
        method: such as ``ExactDiffusion("cycle")``; without losses.
        gradient: ``gradient(rank, x, step)`` is the gradient of a rank's function at x, (d,), in
            step 0, 1, ...; it may be noisy.
        start: the ranks' first iterates, (ranks, d).
        steps: how many to take.
        rate: the learning rate.
        observe: is called with the number of steps taken and the iterates, after each.
    """
    if not is_whole(steps) or steps < 0:
        raise ConfigError(f"steps must be a whole number from 0; got {steps!r}")
    if not is_number(rate) or not rate > 0:
        raise ConfigError(f"rate must be more than 0, for instance rate=0.1; got {rate!r}")
    x = [{"x": np.array(row)} for row in start]
    ranks = Ranks(method, len(x))
    for step in range(steps):
        x = ranks.before_step(x, rates={"x": rate})
        x = [
            {"x": own["x"] - float(rate) * gradient(rank, own["x"], step)}
            for rank, own in enumerate(x)
        ]
        x = ranks.after_step(x)
        if observe is not None:
            observe(step + 1, np.stack([own["x"] for own in x]))
    return np.stack([own["x"] for own in x])

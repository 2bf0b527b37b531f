"""Statistics of a server."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np


@dataclasses.dataclass
class ServerStats:
    """The counts of a server.

    Attributes:
        updates: steps of the optimizer.
        pushes: gradients that arrived, of which ``dropped`` came too late, by worker, and
            ``non_finite`` were NaN or Inf; neither was used.  Of Leader SGD, ``non_finite`` are the
            workers that ended so, which are not in the mean.
        staleness: numbers of gradients by the updates between their parameters and their use.
        ahead: the most steps that a worker that went on was ahead of the slowest.
        bytes_up, bytes_down: of all messages with gradients, and with parameters.
        lost, failed, returned: workers that were silent too long, that left with an error, and that
            were taken for lost and came back.

    >>> from collections import Counter
    >>> ServerStats(updates=4, staleness=Counter({0: 3, 2: 1})).mean_staleness  # in updates
    0.5
    """

    updates: int = 0
    pushes: int = 0
    dropped: Counter[int] = dataclasses.field(default_factory=Counter)
    non_finite: int = 0
    staleness: Counter[int] = dataclasses.field(default_factory=Counter)
    ahead: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    lost: list[int] = dataclasses.field(default_factory=list)
    failed: list[int] = dataclasses.field(default_factory=list)
    returned: list[int] = dataclasses.field(default_factory=list)

    def left(self, worker: int, failed: bool) -> None:
        """Note that a worker has left, which may have been taken for lost."""
        if worker in self.lost:
            self.lost.remove(worker)
        if failed:
            self.failed.append(worker)

    def to_bytes(self) -> np.ndarray:
        return np.frombuffer(json.dumps(vars(self)).encode(), np.uint8)

    @classmethod
    def from_bytes(cls, raw: np.ndarray) -> ServerStats:
        found = cls(**json.loads(raw.tobytes()))
        for name in ("dropped", "staleness"):  # JSON's keys are texts
            counts = {int(key): count for key, count in getattr(found, name).items()}
            setattr(found, name, Counter(counts))
        return found

    @property
    def mean_staleness(self) -> float:
        total = self.staleness.total()
        return sum(tau * count for tau, count in self.staleness.items()) / total if total else 0.0

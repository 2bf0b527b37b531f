"""How long a server waits for a worker that is silent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set


class Patience:
    """Finds the workers without which the others go on.  Times are seconds, of any clock.

    A worker is silent from the reply that it got until it sends something.  The others go on
    without it when one of them has waited for a reply for ``timeout`` seconds meanwhile.  They do
    so, too, when one has gone on for that long itself.  All may be silent, since nobody could go on
    then: a validation on all workers takes as long as it takes.

    Workers that have left wait for the end: they do without the silent ones after ``at_end``.

    Args:
        workers: their numbers.
        timeout, at_end: see above.
        now: the time at which workers begin.
    """

    def __init__(self, workers: Iterable[int], timeout: float, at_end: float, now: float) -> None:
        self.timeout, self.at_end = timeout, at_end
        self._replied = dict.fromkeys(workers, now)
        self._heard = dict(self._replied)
        self._left: float | None = None  # when the first one did

    def heard(self, worker: int, active: Set[int], waiting: Collection[int], now: float) -> None:
        """Note that a worker has sent something, while ``active`` workers are expected to, of which
        ``waiting`` wait for a reply."""
        is_pause = all(w not in waiting and now - self._replied[w] > self.timeout for w in active)
        if is_pause:  # all of them have this long again
            self._replied = dict.fromkeys(self._replied, now)
        self._heard[worker] = now

    def replied(self, worker: int, now: float) -> None:
        """Note a reply."""
        self._replied[worker] = now

    def left(self, now: float) -> None:
        """Note that a worker sends no more, and waits for the end."""
        self._left = now if self._left is None else self._left

    def lost(self, active: Set[int], waiting: Collection[int], now: float) -> dict[int, float]:
        """Return the workers that the others go on without, and for how long each was silent."""
        return {
            worker: now - self._replied[worker]
            for worker in sorted(active)
            if worker not in waiting and self._is_lost(worker, active, waiting, now)
        }

    def _is_lost(self, worker: int, active: Set[int], waiting: Collection[int], now: float) -> bool:
        since = self._replied[worker]
        if self._left is not None and now - max(self._left, since) > self.at_end:
            return True
        for other in active - {worker}:
            heard = self._heard[other]
            waited = now - max(heard, since) if other in waiting else heard - since
            if waited > self.timeout:
                return True
        return False

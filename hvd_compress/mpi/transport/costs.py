"""The costs of messages."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds, of which the time of an algorithm is made up.

    Attributes:
        alpha: of a round with one small message out and one in.
        beta: of a byte, sending to one rank and receiving from another at once.
        gamma: to add one byte of float32.
        overhead: of one more message in the same round.
        pair, fan: ``beta`` with one partner, and with all at once.
        merge: for an entry of a sparse vector that is packed, unpacked and added.
    """

    alpha: float
    beta: float
    gamma: float
    overhead: float
    pair: float
    fan: float
    merge: float = 0.0

    def round_with_all(self, p: int) -> float:
        """Return the seconds of a round of small messages with all other of ``p`` ranks."""
        return self.alpha + (p - 2) * self.overhead

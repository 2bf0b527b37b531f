"""The costs of exchanges on a network, by the usual formulas.

A round costs the latency, a byte what the bandwidth of a host's line allows (Thakur, Rabenseifner,
Gropp, 2005).  Formulas are those of good algorithms, which no library reaches everywhere: dense
exchanges, with which compression competes, are rather taken for faster than they are.
"""

from __future__ import annotations

import dataclasses
import math

from hvd_compress.config import check_whole, is_number
from hvd_compress.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Network:
    """Ranks on hosts, as evenly as may be.

    Attributes:
        ranks: their number.
        bandwidth: bits per second of each host's line, in either direction.
        latency: seconds of a round with one small message, half of what ping says.
        hosts: their number; ``None``: each rank has one.
        inner_bandwidth: bits per second between ranks of one host.
        inner_latency: seconds of a round between ranks of one host.

    >>> network = Network(ranks=4, bandwidth=10e9, latency=0.0)
    >>> network.seconds("sum", nbytes=100e6)  # 2 * 3/4 of 100 MB by the line of each
    0.12
    """

    ranks: int
    bandwidth: float
    latency: float = 50e-6
    hosts: int | None = None
    inner_bandwidth: float = 100e9
    inner_latency: float = 2e-6

    def __post_init__(self) -> None:
        check_whole("ranks", self.ranks, 1)
        if self.hosts is not None:
            check_whole("hosts", self.hosts, 1)
            if self.ranks % self.hosts:
                raise ConfigError(
                    f"hosts={self.hosts}: {self.ranks} ranks cannot be divided evenly; pass a "
                    "divisor of the number of ranks"
                )
        for name in ("bandwidth", "inner_bandwidth"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ConfigError(f"{name} must be bits per second, more than 0; got {value!r}")
        for name in ("latency", "inner_latency"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be seconds, 0 or more; got {value!r}")

    @classmethod
    def fitted(cls, ranks: int, hosts: int, short: float, long: float, nbytes: float) -> Network:
        """Return the network on which two sums take what was measured.

        Args:
            ranks: their number, 2 or more.
            hosts: their number; where ranks are not divided evenly among them, each rank counts as
                a host.
            short: seconds of a sum of next to nothing.
            long: seconds of a sum of ``nbytes`` bytes.
        """
        hosts = hosts if ranks % hosts == 0 else ranks
        here, inner = ranks // hosts, cls(ranks, 1e12, 0.0, hosts)
        between, inside = (2 * math.ceil(math.log2(n)) for n in (hosts, here))
        # Where two are as one, the rate is beyond what can be measured.
        moved = max(long - short, 1e-3 * long, 1e-9)
        if hosts == 1:
            rate = 8 * _bytes("sum", nbytes, ranks, here)[1] / moved
            latency = short / inside
            return cls(ranks, rate, latency, 1, inner_bandwidth=rate, inner_latency=latency)
        line, within = _bytes("sum", nbytes, ranks, here)
        moved = max(moved - 8 * within / inner.inner_bandwidth, 0.1 * moved)
        latency = max(short - inside * inner.inner_latency, 0.0) / between
        return cls(ranks, 8 * line / moved, latency, hosts)

    @property
    def ranks_per_host(self) -> int:
        return self.ranks if self.hosts == 1 else self.ranks // (self.hosts or self.ranks)

    def seconds(self, kind: str, nbytes: float, count: int = 1) -> float:
        """Return the seconds of ``count`` exchanges of one kind, of ``nbytes`` bytes together.

        Args:
            kind: "sum" of arrays of ``nbytes``; "gather" of ``nbytes`` from every other rank;
                "alltoall" of ``nbytes``, a part of them to each rank.  Others count as sums.
        """
        p, here = self.ranks, self.ranks_per_host
        if p == 1:
            return 0.0
        hosts = p // here
        rounds = (2 if kind not in ("gather", "alltoall") else 1) * count
        seconds = rounds * math.ceil(math.log2(hosts)) * self.latency if hosts > 1 else 0.0
        if here > 1:
            seconds += rounds * math.ceil(math.log2(here)) * self.inner_latency
        line, inside = _bytes(kind, nbytes, p, here)
        return seconds + 8 * line / self.bandwidth + 8 * inside / self.inner_bandwidth


def _bytes(kind: str, n: float, p: int, here: int) -> tuple[float, float]:
    """The bytes that pass a host's line in one direction, and those that a rank gets within it."""
    hosts = p // here
    if kind == "gather":
        return n * (p - here), n * (p - 1) if here > 1 else 0.0
    if kind == "alltoall":
        return n * here * (p - here) / p, n * (here - 1) / p
    # A sum inside each host, one among the hosts, and the result handed out.
    return 2 * n * (hosts - 1) / hosts, 2 * n * (here - 1) / here


def rate_text(bits: float) -> str:
    """Return bits per second as a text such as "1.5 Gbit/s".

    >>> rate_text(25e6)
    '25 Mbit/s'
    """
    for scale, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"

"""What averaging one gradient costs: a pass over memory, Python, messages, and adding up.

Messages cost what :class:`hvd_compress.mpi.CostModel` says of the collective; all else is local::

    float32   20 n bytes + python + the fastest allreduce of 4 n bytes
    fp16      20 n bytes + 3 n casts + python + the fastest allreduce of 2 n bytes
    DGC       24 n bytes + python + an allgather of k entries a rank, decoding P messages and
              adding P k entries

The bytes are those that a step reads and writes: float32 looks for NaN, copies and divides; DGC has
the gradient, velocity and residual to read, and the two new ones and the average to write.  "fp16
at best" is fp16 whose casts cost nothing, as on a GPU, and the dense exchange that is hardest to
beat.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from hvd_compress.fused import dense_is_less
from hvd_compress.mpi.sparse.algorithm import EntryCount
from hvd_compress.mpi.sparse.split_allgather import seconds_by_owners
from hvd_compress.mpi.tuning.cost_model import CostModel

#: bytes that a step reads and writes for an element, and how often it casts one there and back
_TOUCHED = {"float32": 20, "fp16": 20, "fp16 at best": 20, "DGC": 24}
_CASTS = {"fp16": 3}
_ENGINE = ("direct", "halving_doubling", "ring")  # what an engine's sums choose from
_HEADER = 16

#: DGC's entries may also be added up by these; Ok-Topk chooses other entries, but as many
SPARSE = ("DGC", "split_allgather", "Ok-Topk")
METHODS = ("float32", "fp16", "fp16 at best", *SPARSE)


def entry_bytes(n: int, k: int, value: int = 4) -> float:
    """Return the bytes of one of ``k`` of ``n`` entries: a packed index of about log2(n/k) + 1.5
    bits, and a value of ``value`` bytes; the header's are shared among all."""
    return value + (math.log2(n / k) + 1.5) / 8 + _HEADER / k


@dataclasses.dataclass(frozen=True)
class StepModel:
    """A step on ranks that were measured, and on other numbers of ranks with the same network.

    Attributes:
        cost: of messages.
        stream: seconds a byte of a pass over memory, on all ranks at once.
        cast: seconds for an element that is rounded to half precision and back.
        frame, entry: seconds for each of DGC's messages, and for each entry, to decode it and add
            it to an array of n.
        python: seconds of a step of almost no elements on one rank, by method.
        density: of DGC.
    """

    cost: CostModel
    stream: float
    cast: float
    frame: float
    entry: float
    python: Mapping[str, float]
    density: float = 0.001

    def seconds(self, method: str, n: int, p: int | None = None) -> float:
        """Return the seconds of a step of ``n`` elements on ``p`` ranks (``None``: as many as were
        measured)."""
        p = self.cost.size if p is None else p
        return self.local_seconds(method, n) + self.message_seconds(method, n, p)

    def local_seconds(self, method: str, n: int) -> float:
        """Return what one rank does by itself, but for adding up."""
        kind = "DGC" if method in SPARSE else method
        casts = _CASTS.get(kind, 0) * self.cast
        python = self.python["fp16" if kind == "fp16 at best" else kind]
        return n * (_TOUCHED[kind] * self.stream + casts) + python

    def message_seconds(self, method: str, n: int, p: int) -> float:
        """Return what messages and adding up take."""
        k = math.ceil(self.density * n)
        if method == "DGC" and dense_is_less(n, k, "float32", p):
            method = "float32"  # which is what it sends then
        if method in SPARSE:
            pair = entry_bytes(n, k)
            if method == "Ok-Topk":  # whose first exchange balances regions, and which returns k
                if p == 1:
                    return 0.0
                entries = EntryCount(k, n, pair, item=4)
                return seconds_by_owners(self.cost, entries, p, pair * k, exchanges=3)
            if method != "DGC":
                return self.cost.sparse_seconds(method, k, n, pair=pair, size=p)
            # What an allgather brings is added to a dense array, not to sparse vectors.
            cost = dataclasses.replace(self.cost, merge=0.0)
            adding = p * (self.frame + k * self.entry) if p > 1 else 0.0
            return cost.sparse_seconds("allgather", k, n, pair=pair, size=p) + adding
        if method == "float32":
            return min(self.cost.seconds(name, 4 * n, size=p) for name in _ENGINE)
        # Partial sums of half precision travel as float32, where there are any.
        sizes = {name: 2 * n if name == "direct" else 3 * n for name in _ENGINE}
        return min(self.cost.seconds(name, size, size=p) for name, size in sizes.items())

    def crossing(self, slow: str, fast: str, n: int, most: int = 4096) -> int | None:
        """Return the smallest number of ranks on which ``slow`` takes longer than ``fast``;
        ``None``: there is none up to ``most``."""
        for p in range(2, most + 1):
            if self.seconds(slow, n, p) > self.seconds(fast, n, p):
                return p
        return None

    def on(self, gbits: float | None, latency: float | None) -> StepModel:
        """Return the model without the times of whole collectives, which are of the measured ranks
        only, and of another network: ``gbits`` Gbit/s of each link, ``latency`` seconds a round;
        ``None`` keeps what was measured."""
        changes: dict[str, object] = {"points": {}}
        if gbits is not None:
            changes |= {"beta": 8e-9 / gbits, "beta_pair": None, "beta_fan": None}
        if latency is not None:
            changes |= {"alpha": latency, "overhead": min(self.cost.overhead, latency)}
        return dataclasses.replace(self, cost=dataclasses.replace(self.cost, **changes))

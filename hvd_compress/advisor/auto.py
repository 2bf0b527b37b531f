"""``compression="auto"``: the method is chosen in the first steps, by the advisor's model."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.advisor.advice import is_bottleneck, step_of
from hvd_compress.advisor.meeting import longest, measured_network, told
from hvd_compress.advisor.network import Network, rate_text
from hvd_compress.advisor.pieces import Messages, Piece, kept
from hvd_compress.advisor.shapes import MODELS, elements_of
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Sparse
from hvd_compress.config import check_whole
from hvd_compress.errors import UnsupportedError

log = logging.getLogger("hvd_compress")

#: first steps that are not measured, since buckets are planned in them
UNEVEN = 2
#: the model whose costs stand for those of all, by their elements
_MODEL = "resnet50"
#: tensors whose elements are below this on the average (of their squares, but zeros) lose more than
#: a 256th of themselves in fp16, which has multiples of 2^-24 there
_SMALL = 2.0**-18
_LARGE = 65504.0


@dataclasses.dataclass(frozen=True)
class Auto(Compressor, name="auto"):
    """Choose between "none" and "fp16" in the first steps of the training::

        compression="auto"

    The first steps are dense.  Then the ranks time exchanges, and the model of ``hvd-compress
    advise`` says which step is shorter.  One line of the log has the method and the reason.  "fp16"
    is taken only if gradients fit into it.  The choice stays for the run and for those that go on
    from its checkpoints.

    It works in PyTorch over Horovod, MPI and DistributedDataParallel, and with a
    :class:`~hvd_compress.reduce.Reducer`.

    Options:
        steps: dense steps that are measured, after two that are not; 1 or more.

    >>> Auto(steps=10)
    Auto(steps=10)
    """

    is_chosen_later = True

    steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("steps", self.steps, 1)

    def decide(
        self,
        reducer: Any,
        backward: Sequence[float],
        gradients: Mapping[str, Array],
        directions: Mapping[str, Array],
    ) -> tuple[str, str] | None:
        dense, averages = _dense(gradients), _dense(directions).values()
        shapes = {name: tuple(x.shape) for name, x in dense.items()}
        if len(backward) < UNEVEN + self.steps or not elements_of(shapes):
            return None
        if not all(backend_of(x).all_finite(x) for x in averages):
            return None  # on all ranks
        like = next(iter(dense.values()))
        network = measured_network(reducer, like)
        seconds = longest(told(reducer, statistics.median(backward[-self.steps :]), like))
        own = None
        if reducer.engine.rank == 0:
            own = self.choice(dense, averages, network, seconds)
            log.info("auto: %s", own[1])
        text, why = told(reducer, own, like)[0]
        return text, why

    def choice(
        self,
        gradients: Mapping[str, Array],
        averages: Iterable[Array],
        network: Network,
        backward: float,
    ) -> tuple[str, str]:
        """Return the method of the shorter step, and why.

        Args:
            gradients: dense ones, by name.
            averages: of these.
            network: as measured.
            backward: seconds of computing gradients.
        """
        sizes = {True: 0, False: 0}  # by whether elements have 16 bits
        for x in gradients.values():
            xp = backend_of(x)
            sizes[xp.dtype(x) in ("float16", "bfloat16")] += xp.size(x)
        factor = sum(sizes.values()) / elements_of(MODELS[_MODEL]())
        pieces = {text: _scaled(piece, factor) for text, piece in kept(_MODEL).items()}
        half, note = sizes[True] > sizes[False], ""
        among = ("none",) if half else ("none", "fp16")
        if half:  # "none" sends 16 bits
            pieces["none"] = pieces["fp16"]
        elif not _fits_in_halves(averages, network.ranks):
            among, note = ("none",), "; gradients are too small or too large for fp16"
        seconds = {text: step_of(pieces[text], network, backward).whole for text in pieces}
        best = min(among, key=seconds.__getitem__)
        hosts = network.hosts or network.ranks
        latency = network.latency if hosts > 1 else network.inner_latency
        where = (
            f"{rate_text(network.bandwidth)} and rounds of {_span(latency)} measured between "
            f"{network.ranks} ranks on {hosts} host{'s' * (hosts > 1)}, {_span(backward)} of "
            f"backward"
        )
        if not is_bottleneck(pieces, network, backward):
            return best, f"the network is not your bottleneck: {best} ({where}){note}"
        other = "none" if best == "fp16" else "fp16"
        times = f"{_span(seconds[best])} per step against {_span(seconds[other])} with {other}"
        return best, f"{best}, {times} ({where}){note}"

    def _not_itself(self, *_: Any) -> Any:
        raise UnsupportedError(
            'compression="auto" sends nothing itself: a Reducer replaces it by the method that it '
            "chooses. Elsewhere write a method, such as the one that hvd-compress advise names"
        )

    init = exchange = per_rank = _not_itself  # type: ignore[assignment]


def _scaled(piece: Piece, factor: float) -> Piece:
    """Return the costs for ``factor`` times the elements, all of which are sent."""
    buckets = max(round(factor * piece.buckets), 1)
    messages = {
        kind: Messages(round(factor * own.whole), round(factor * own.shared), buckets)
        for kind, own in piece.messages.items()
    }
    return Piece(messages, buckets, *(factor * x for x in (piece.before, piece.after, piece.each)))


def _span(seconds: float) -> str:
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if scale * seconds < 999.5:
            return f"{scale * seconds:.3g} {unit}"
    return f"{seconds:.3g} s"


def _dense(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return those that are neither rows nor elements of others."""
    return {
        name: x
        for name, x in arrays.items()
        if not isinstance(x, Sparse) and not getattr(x, "is_sparse", False)
    }


def _fits_in_halves(averages: Iterable[Array], ranks: int) -> bool:
    """Return whether averages, and the sums that they are of, are in a range in which fp16 changes
    each tensor by less than a 256th."""
    for x in averages:
        xp = backend_of(x)
        values = np.abs(xp.to_numpy(xp.widen(x)))
        if not (count := np.count_nonzero(values)):
            continue
        average = np.linalg.norm(values.astype(np.float64)) / math.sqrt(count)
        if average < _SMALL or values.max() * ranks > _LARGE / 4:
            return False
    return True

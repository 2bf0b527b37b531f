"""``compression="auto"``: the method is chosen in the first steps, by the advisor's model."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from hvd_compress.advisor.advice import (
    ACCURACIES,
    Candidate,
    allowed,
    choose,
    is_bottleneck,
    seconds_of,
)
from hvd_compress.advisor.meeting import longest, measured_network, told
from hvd_compress.advisor.network import Network, rate_text
from hvd_compress.advisor.pieces import Piece, measured
from hvd_compress.advisor.shapes import elements_of
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Context, Exchange, Sparse, State
from hvd_compress.config import check_choice, check_whole
from hvd_compress.errors import UnsupportedError
from hvd_compress.methods import as_compressor

log = logging.getLogger("hvd_compress")

#: first steps that are not measured, since buckets are planned in them
UNEVEN = 2
#: seconds after which no further candidate is measured
_SECONDS = 3.0
#: elements on which a candidate is measured, in some tenths of a second
_ELEMENTS = 2**20
#: tensors whose elements are below this on the average (of their squares, but zeros) lose more than
#: a 256th of themselves in fp16, which has multiples of 2^-24 there
_SMALL = 2.0**-18
_LARGE = 65504.0


@dataclasses.dataclass(frozen=True)
class Auto(Compressor, name="auto"):
    """Choose the method in the first steps of the training: "none" or "fp16" by default::

        compression="auto:accuracy=measured"

    After dense steps the ranks time exchanges, and rank 0 measures what candidates cost.  The model
    of ``hvd-compress advise`` chooses, and the log says why.  Checkpoints keep the choice.

    Methods that take over the optimizer's momentum, such as DGC, are no candidates.  It works in
    PyTorch over Horovod, MPI and DistributedDataParallel, and with a
    :class:`~hvd_compress.reduce.Reducer`.

    Options:
        accuracy: the most that averages may lose.  "exact": rounding to 16 bits, while gradients
            fit.  "measured": at most 0.5 % of the loss or 0.2 points of accuracy, in all our
            trainings with SGD and with AdamW.  "feedback": what waits for later steps.  "lossy":
            rounding to few bits.
        steps: dense steps that are measured, after two that are not; 1 or more.

    >>> Auto().candidates
    ('none', 'fp16')
    >>> Auto(accuracy="measured").candidates
    ('none', 'fp16', 'linear', 'fp8')
    """

    is_chosen_later = True

    accuracy: str = "exact"
    steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("accuracy", self.accuracy, ACCURACIES)
        check_whole("steps", self.steps, 1)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The methods to choose from, those that lose least first."""
        return tuple(candidate.row for candidate in self._candidates)

    @property
    def _candidates(self) -> list[Candidate]:
        """Those that need neither another optimizer nor a start of their own."""
        found = [candidate for candidate in allowed(self.accuracy) if not candidate.first]
        return [c for c in found if not as_compressor(c.method).takes_momentum]

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
            try:
                own = self.choice(dense, averages, network, seconds)
            except Exception as error:  # the other ranks wait for what is said here
                own = "none", f"none, since measuring failed: {error!r}"
                log.warning("auto: %s", own[1])
            else:
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
        """Return the method of the shortest step, as this rank measures the candidates, and why.

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
        half, notes, texts = sizes[True] > sizes[False], [], self.candidates
        if not str(getattr(next(iter(gradients.values())), "device", "cpu")).startswith("cpu"):
            notes.append("the model knows no work on a GPU, so nothing but 16 bits was considered")
            texts = Auto().candidates
        if half:
            texts = tuple(text for text in texts if text != "fp16")
        elif not _fits_in_halves(averages, network.ranks):
            texts = tuple(text for text in texts if text != "fp16")
            notes.append("gradients are too small or too large for fp16")
        shapes = {name: tuple(x.shape) for name, x in gradients.items()}
        pieces: dict[str, Piece] = {}
        end = time.perf_counter() + _SECONDS
        for text in dict.fromkeys(("fp16", "none", *texts)):
            if len(pieces) < 2 or time.perf_counter() < end:
                pieces[text] = measured(text, shapes, steps=2, most=_ELEMENTS)
        if left := [text for text in texts if text not in pieces]:
            notes.append(f"no time was left to measure {', '.join(left)}")
        if half:  # "none" sends 16 bits
            pieces["none"] = pieces["fp16"]
        among = {text: pieces[text] for text in texts if text in pieces}
        best = choose(among, network, backward, self._candidates).method
        hosts = network.hosts or network.ranks
        latency = network.latency if hosts > 1 else network.inner_latency
        where = (
            f"{rate_text(network.bandwidth)} and rounds of {_span(latency)} measured between "
            f"{network.ranks} ranks on {hosts} host{'s' * (hosts > 1)}, {_span(backward)} of "
            "backward"
        )
        if best in Auto().candidates and not is_bottleneck(pieces, network, backward):
            why = f"the network is not your bottleneck: {best} ({where})"
        else:
            other = "none" if best == "fp16" else "fp16"
            seconds = seconds_of(pieces, network, backward)
            why = (
                f"{best}, {_span(seconds[best])} per step against {_span(seconds[other])} with "
                f"{other} ({where})"
            )
        return best, "; ".join([why, *notes])

    def _not_itself(self) -> NoReturn:
        raise UnsupportedError(
            'compression="auto" sends nothing itself: a Reducer replaces it by the method that it '
            "chooses. Elsewhere write a method, such as the one that hvd-compress advise names"
        )

    def init(self, gradient: Array) -> State:
        self._not_itself()

    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        self._not_itself()

    def per_rank(self, gradient: Array) -> frozenset[str]:
        self._not_itself()


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

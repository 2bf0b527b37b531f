"""The choice itself, which rank 0 makes for all, and whether it was a good one."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_compress.advisor import Candidate, Network, Piece, choose, is_bottleneck, seconds_of
from hvd_compress.advisor.estimates import elements_of, estimated, sampled, scaled_from_kept
from hvd_compress.advisor.shapes import Shapes
from hvd_compress.auto.method import Auto, accuracy_of
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Sparse
from hvd_compress.methods import as_compressor

log = logging.getLogger("hvd_compress")

#: seconds in which candidates are measured; for those that are left, what is kept is scaled
_SECONDS = 3.0
#: what a part of a step must be to be worth a word, or a change
_MATTERS = 0.05
#: how much longer exchanges may take than the model says of others, which were not measured
_DOUBT = 1.3
#: tensors whose elements are below this on the average (of their squares, but zeros) lose more than
#: a 256th of themselves in fp16, which has multiples of 2^-24 there
_SMALL = 2.0**-18
_LARGE = 65504.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured, of which all ranks know the same.

    Attributes:
        ranks, hosts: their numbers.
        bandwidth: bit/s of a host's line, or of a rank's where there is one host.
        latency: seconds of a round.
        backward: seconds of a dense step apart from
        dense: those that exchanging it takes its caller.
        predicted: seconds of a step by method, by the advisor's model.
        elements: of all tensors.
        model: a digest of their names and shapes.
        since: the step from which on the choice is used.
    """

    ranks: int
    hosts: int
    bandwidth: float
    latency: float
    backward: float
    dense: float
    predicted: Mapping[str, float]
    elements: int
    model: str
    since: int

    def expected(self, method: str) -> float:
        """Return the seconds that exchanging a step takes its caller, by the model, which is
        corrected by what dense steps really took; without ``backward``."""
        if method == "none" or not self.predicted.get("none"):
            return self.dense
        off = (self.backward + self.dense) / self.predicted["none"]
        whole = self.predicted[method] * min(max(off, 0.2), 5.0)
        return max(whole - self.backward, 0.0)


def decided(
    auto: Auto,
    shapes: Shapes,
    network: Network,
    *,
    backward: float,
    like: Array,
    fits: bool,
    half: bool,
) -> tuple[str, str, dict[str, float]]:
    """Return the method that is chosen, why, and the seconds of a step by method.

    Args:
        auto: the options.
        shapes: of the dense gradients.
        network: as measured.
        backward: seconds of computing gradients.
        like: a gradient.
        fits: gradients fit into 16 bits.
        half: gradients have 16 bits.
    """
    candidates, notes = list(auto.candidates), []
    if not _is_on_host(like):
        candidates = [c for c in candidates if c.accuracy == "exact"]
        notes.append("the model knows no work on a GPU, so nothing but 16 bits was considered")
    if half:
        candidates = [c for c in candidates if not has_16_bits(c.method)]
    elif not fits:
        candidates = [c for c in candidates if not is_narrow(c.method)]
        notes.append("gradients are too small or too large for fp16")
    texts = [c.method for c in candidates]
    log.info(
        "auto: rank 0 measures what %s cost, on %.2g of %.2g million elements, for %.0f seconds at "
        "most",
        ", ".join(texts),
        elements_of(sampled(shapes)) / 1e6,
        elements_of(shapes) / 1e6,
        _SECONDS,
    )
    pieces = _with_halves(estimated(texts, shapes, seconds=_SECONDS), half)
    best = choose(pieces, network, backward, candidates=candidates)
    predicted = seconds_of(pieces, network, backward)
    why = _reason(best, pieces, network, backward)
    if hint := _more(
        *(auto, best, candidates, pieces), shapes=shapes, network=network, backward=backward
    ):
        notes.append(hint)
    return best, "; ".join([why, *notes]), predicted


def _with_halves(pieces: dict[str, Piece], half: bool) -> dict[str, Piece]:
    """Pieces are measured of float32; "none" sends 16 bits of half precisions."""
    return {**pieces, "none": pieces["fp16"]} if half else pieces


def _reason(best: str, pieces: Mapping[str, Piece], network: Network, backward: float) -> str:
    seconds = seconds_of(pieces, network, backward)
    hosts = network.hosts or network.ranks
    latency = network.latency if hosts > 1 else network.inner_latency
    where = (
        f"{_rate(network.bandwidth)} and rounds of {_span(latency)} measured between "
        f"{network.ranks} ranks on {hosts} host{'s' * (hosts > 1)}, {_span(backward)} of backward"
    )
    if accuracy_of(best) == "exact" and not is_bottleneck(pieces, network, backward):
        return f"the network is not your bottleneck: {best} ({where})"
    other = "none" if best == "fp16" else "fp16"
    return (
        f"{best}, {_span(seconds[best])} a step against {_span(seconds[other])} with {other} "
        f"({where})"
    )


def _more(
    auto: Auto,
    best: str,
    candidates: Sequence[Candidate],
    pieces: Mapping[str, Piece],
    *,
    shapes: Shapes,
    network: Network,
    backward: float,
) -> str:
    """What would be gained by what loses as little as was measured; by kept pieces, since nothing
    of it was timed here."""
    if auto.methods or auto.accuracy != "exact":
        return ""
    more = dataclasses.replace(auto, accuracy="measured").candidates
    others = [c for c in more if c in candidates or c.accuracy != "exact"]
    about = scaled_from_kept([c.method for c in others], elements_of(shapes), pieces)
    about = {**about, **pieces}
    found = choose(about, network, backward, candidates=others)
    seconds = seconds_of(about, network, backward)
    if seconds[found] > 0.8 * seconds[best]:
        return ""
    return (
        f'"auto:accuracy=measured" could choose {found} with some {_span(seconds[found])}: '
        "see docs/advise.md for what it may lose"
    )


def is_narrow(method: str) -> bool:
    """Return whether the range of what is sent is much smaller than that of gradients."""
    return as_compressor(method).name == "fp16"


def has_16_bits(method: str) -> bool:
    """Return whether all is sent, in 16 bits."""
    return as_compressor(method).name in ("fp16", "bf16")


def _rate(bits: float) -> str:
    scale, unit = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s")
    return f"{bits / scale:.3g} {unit}"


def _span(seconds: float) -> str:
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if scale * seconds < 999.5:
            return f"{scale * seconds:.3g} {unit}"
    return f"{seconds:.3g} s"


def _is_on_host(x: Array) -> bool:
    return str(getattr(x, "device", "cpu")).startswith("cpu")


def dense_arrays(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return those that are neither rows nor elements of others."""
    return {
        name: x
        for name, x in arrays.items()
        if not isinstance(x, Sparse) and not getattr(x, "is_sparse", False)
    }


def is_finite(directions: Mapping[str, Array]) -> bool:
    """Return whether a step was finite, which is the same on all ranks."""
    return all(bool(backend_of(x).all_finite(x)) for x in dense_arrays(directions).values())


def fits_in_halves(directions: Mapping[str, Array], ranks: int) -> bool:
    """Return whether averages, and the sums that they are of, are in a range in which fp16 changes
    each tensor by less than a 256th."""
    for x in dense_arrays(directions).values():
        xp = backend_of(x)
        values = np.abs(xp.to_numpy(xp.widen(x)))
        if not (count := np.count_nonzero(values)):
            continue
        average = np.linalg.norm(values.astype(np.float64)) / math.sqrt(count)
        if average < _SMALL or values.max() * ranks > _LARGE / 4:
            return False
    return True


def alternative(auto: Auto, chosen: str, struck: Mapping[str, str], figures: Figures) -> str:
    """Return the fastest method that loses nothing, but the one that was chosen."""
    open_ = [c.method for c in auto.candidates if c.accuracy == "exact"]
    open_ = [m for m in open_ if m != chosen and m not in struck and m in figures.predicted]
    if accuracy_of(chosen) == "exact" or not open_:
        return "none"
    return min(open_, key=figures.expected)


def is_wrong(seconds: float, other: str, figures: Figures) -> bool:
    """Return whether exchanges that take their caller so long take clearly longer than others
    would."""
    less = min(_DOUBT * figures.expected(other), figures.dense)
    return seconds > less + _MATTERS * (figures.backward + less)

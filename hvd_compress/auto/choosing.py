"""Measures dense steps, and lets rank 0 choose the method for all ranks."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.advisor import Candidate, Network, Piece, choose, is_bottleneck, seconds_of
from hvd_compress.advisor.estimates import elements_of, estimated, sampled
from hvd_compress.advisor.shapes import Shapes
from hvd_compress.auto.meeting import longest, measured_network, middle, told
from hvd_compress.auto.method import Auto, accuracy_of
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Sparse
from hvd_compress.config import is_number
from hvd_compress.errors import ConfigError
from hvd_compress.integrations.checkpoints import entry, refused, whole
from hvd_compress.methods import as_compressor
from hvd_compress.reduce import Chooser, Reducer

log = logging.getLogger("hvd_compress")

PHASES = ("measuring", "using")
#: first steps that are not measured, since buckets are planned in them
_UNEVEN = 2
#: seconds in which candidates are measured; for those that are left, what is kept is scaled
_SECONDS = 3.0
#: tensors whose elements are below this on the average (of their squares, but zeros) lose more than
#: a 256th of themselves in fp16, which has multiples of 2^-24 there
_SMALL = 2.0**-18
_LARGE = 65504.0


class AutoChooser(Chooser):
    """See :class:`hvd_compress.auto.Auto`.

    All that decides about the next step is equal on all ranks: it is the number of measured steps,
    or was told by rank 0 or by all.
    """

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self._facts: dict[str, Any] = {"phase": "measuring", "method": "none", "why": ""}
        self.method = as_compressor("none")
        self._samples: list[tuple[float, float]] = []
        self._since: tuple[float, float] | None = None
        self._ranks = 0  # of the steps that were measured

    @property
    def _is_done(self) -> bool:
        return self._facts["phase"] == "using"

    def sees(self, reducer: Reducer) -> None:
        if self._since is None and not self._is_done:
            if self._ranks != reducer.engine.size:
                self._ranks = reducer.engine.size
                self._samples.clear()
            self._since = reducer.clock.now(), reducer.clock.times.total

    def abandoned(self) -> None:
        self._since = None

    def progress(self) -> str:
        return f"{self._facts['phase']} {len(self._samples)}, {self._facts['method']}"

    def ended(
        self, reducer: Reducer, gradients: Mapping[str, Array], directions: Mapping[str, Array]
    ) -> None:
        since, self._since = self._since, None
        shapes = {name: tuple(x.shape) for name, x in _dense(gradients).items()}
        alone = reducer.engine.size == 1
        if since is None or alone or not elements_of(shapes) or not _is_finite(directions):
            return
        began, total = since
        self._samples.append((reducer.clock.now() - began, reducer.clock.times.total - total))
        if len(self._samples) == _UNEVEN + self.auto.steps:
            self._choose(reducer, gradients, directions, shapes)

    def _choose(
        self,
        reducer: Reducer,
        gradients: Mapping[str, Array],
        directions: Mapping[str, Array],
        shapes: Shapes,
    ) -> None:
        samples, self._samples = self._samples[_UNEVEN:], []
        like = next(x for name, x in gradients.items() if name in shapes)
        network = measured_network(reducer, like, reducer.clock.now)
        own = [middle([whole - inside for whole, inside in samples])]
        own.append(middle([inside for _, inside in samples]))
        backward, dense = map(longest, zip(*told(reducer, own, like), strict=True))
        choice = None
        if reducer.engine.rank == 0:
            half, fits = _mostly_half(gradients), _fits_in_halves(directions, network.ranks)
            candidates, notes = _candidates(self.auto, like, half, fits)
            try:
                choice = decided(candidates, notes, shapes, network, backward, half)
            except Exception as error:  # the other ranks wait for what is said here
                log.warning("auto: none, since measuring failed: %r", error)
                choice = "none", f"none, since measuring failed: {error!r}", {"none": dense}
        chosen, why, predicted = told(reducer, choice, like)[0]
        self._facts = {
            "phase": "using",
            "method": chosen,
            "why": why,
            "ranks": network.ranks,
            "hosts": network.hosts or network.ranks,
            "bandwidth": network.bandwidth,
            "latency": network.latency if (network.hosts or 2) > 1 else network.inner_latency,
            "backward": backward,
            "dense": dense,
            "predicted": predicted,
        }
        if reducer.engine.rank == 0:
            log.info("auto: %s", why)
        if chosen != "none":
            self.method = as_compressor(chosen)
            reducer.change_method(self.method)

    # -- what is saved -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return dict(self._facts)

    def read(self, state: Any) -> AutoChooser:
        found = AutoChooser(self.auto)
        if state is None:
            return found
        phase, chosen = (entry(state, key, str, of="the choice") for key in ("phase", "method"))
        if phase not in PHASES or (phase == "measuring" and chosen != "none"):
            raise refused(f"the choice has the phase {phase!r}, and the method {chosen!r}")
        try:
            found.method = as_compressor(chosen)
        except ConfigError as error:
            raise refused(f"the method that was chosen is {chosen!r}: {error}") from None
        if found.method.is_chosen_later:
            raise refused(f"the method that was chosen is {chosen!r}")
        if phase == "using":
            found._facts = _checked(state)
        return found


def _checked(state: Mapping[str, Any]) -> dict[str, Any]:
    predicted = entry(state, "predicted", Mapping, of="the choice")
    found = {name: entry(state, name, str, of="the choice") for name in ("phase", "method", "why")}
    counts = {name: whole(state, name) for name in ("ranks", "hosts")}
    figures = {
        name: entry(state, name, (int, float), of="the choice")
        for name in ("bandwidth", "latency", "backward", "dense")
    }
    for x in (*figures.values(), *predicted.values()):
        if not is_number(x) or not math.isfinite(x) or x < 0:
            raise refused(f"the choice has the figure {x!r}")
    if not all(isinstance(name, str) for name in predicted):
        raise refused("methods of the choice are no texts")
    return {**found, **counts, **figures, "predicted": dict(predicted)}


def _candidates(
    auto: Auto, like: Array, half: bool, fits: bool
) -> tuple[list[Candidate], list[str]]:
    """Return the methods to choose from, and what is to be said of those that are left out.

    Args:
        like: a gradient.
        half: gradients have 16 bits.
        fits: gradients fit into fp16.
    """
    candidates, notes = list(auto.candidates), []
    if not str(getattr(like, "device", "cpu")).startswith("cpu"):
        candidates = [c for c in candidates if c.accuracy == "exact"]
        notes.append("the model knows no work on a GPU, so nothing but 16 bits was considered")
    if half:
        candidates = [c for c in candidates if _name(c) not in ("fp16", "bf16")]
    elif not fits:
        candidates = [c for c in candidates if _name(c) != "fp16"]
        notes.append("gradients are too small or too large for fp16")
    return candidates, notes


def _name(candidate: Candidate) -> str:
    return as_compressor(candidate.method).name


def decided(
    candidates: Sequence[Candidate],
    notes: Sequence[str],
    shapes: Shapes,
    network: Network,
    backward: float,
    half: bool,
) -> tuple[str, str, dict[str, float]]:
    """Return the method that is chosen, why, and the seconds of a step by method.

    Args:
        candidates: to choose from, those that lose least first.
        notes: what else is to be said.
        shapes: of the dense gradients.
        network: as measured.
        backward: seconds of computing gradients.
        half: gradients have 16 bits, which "none" sends then.
    """
    methods = [c.method for c in candidates]
    log.info(
        "auto: rank 0 measures what %s cost, on %.2g of %.2g million elements, for %.0f seconds at "
        "most",
        ", ".join(methods),
        elements_of(sampled(shapes)) / 1e6,
        elements_of(shapes) / 1e6,
        _SECONDS,
    )
    pieces = estimated(methods, shapes, seconds=_SECONDS)
    if half:
        pieces["none"] = pieces["fp16"]
    best = choose(pieces, network, backward, candidates=candidates)
    seconds = seconds_of(pieces, network, backward)
    return best, "; ".join([_reason(best, pieces, network, backward, seconds), *notes]), seconds


def _reason(
    best: str,
    pieces: Mapping[str, Piece],
    network: Network,
    backward: float,
    seconds: Mapping[str, float],
) -> str:
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


def _rate(bits: float) -> str:
    scale, unit = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s")
    return f"{bits / scale:.3g} {unit}"


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


def _is_finite(directions: Mapping[str, Array]) -> bool:
    """Return whether a step was finite, which is the same on all ranks."""
    return all(bool(backend_of(x).all_finite(x)) for x in _dense(directions).values())


def _fits_in_halves(directions: Mapping[str, Array], ranks: int) -> bool:
    """Return whether averages, and the sums that they are of, are in a range in which fp16 changes
    each tensor by less than a 256th."""
    for x in _dense(directions).values():
        xp = backend_of(x)
        values = np.abs(xp.to_numpy(xp.widen(x)))
        if not (count := np.count_nonzero(values)):
            continue
        average = np.linalg.norm(values.astype(np.float64)) / math.sqrt(count)
        if average < _SMALL or values.max() * ranks > _LARGE / 4:
            return False
    return True


def _mostly_half(gradients: Mapping[str, Array]) -> bool:
    sizes = collections.Counter[bool]()
    for x in _dense(gradients).values():
        xp = backend_of(x)
        sizes[xp.dtype(x) in ("float16", "bfloat16")] += xp.size(x)
    return sizes[True] > sizes[False]

"""Measures dense steps, and lets rank 0 choose the method for all ranks."""

from __future__ import annotations

import collections
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.advisor import Candidate, Network, Piece, choose, is_bottleneck, seconds_of
from hvd_compress.advisor.network import rate_text
from hvd_compress.advisor.pieces import estimated
from hvd_compress.advisor.shapes import Shapes, elements_of, sampled
from hvd_compress.auto.meeting import longest, measured_network, told
from hvd_compress.auto.method import Auto, accuracy_of
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Sparse
from hvd_compress.config import is_number
from hvd_compress.errors import ConfigError
from hvd_compress.methods import as_compressor
from hvd_compress.reduce import Chooser, Reducer
from hvd_compress.reduce.state_file import entry, refused, whole

log = logging.getLogger("hvd_compress")

PHASES = ("measuring", "using")
#: first steps that are not measured, since buckets are planned in them
_UNEVEN = 2
#: seconds after which no further candidate is measured
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
        if since is None or alone or not elements_of(shapes):
            return
        if not all(backend_of(x).all_finite(x) for x in _dense(directions).values()):
            return  # on all ranks
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
        own = [statistics.median(whole - inside for whole, inside in samples)]
        own.append(statistics.median(inside for _, inside in samples))
        backward, dense = map(longest, zip(*told(reducer, own, like), strict=True))
        choice = None
        if reducer.engine.rank == 0:
            sizes = collections.Counter[bool]()
            for x in _dense(gradients).values():
                xp = backend_of(x)
                sizes[xp.dtype(x) in ("float16", "bfloat16")] += xp.size(x)
            half, notes = sizes[True] > sizes[False], []
            without: tuple[str, ...] = ()
            if half:
                without = ("fp16", "bf16")
            elif not _fits_in_halves(directions, network.ranks):
                without = ("fp16",)
                notes.append("gradients are too small or too large for fp16")
            names = {c: as_compressor(c.method).name for c in self.auto.candidates}
            candidates = [c for c, name in names.items() if name not in without]
            if not str(getattr(like, "device", "cpu")).startswith("cpu"):
                candidates = [c for c in candidates if c.accuracy == "exact"]
                notes.insert(
                    0, "the model knows no work on a GPU, so nothing but 16 bits was considered"
                )
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
        if phase == "measuring":
            return found
        of = "the choice"
        predicted = dict(entry(state, "predicted", Mapping, of=of))
        figures = {
            name: entry(state, name, (int, float), of=of)
            for name in ("bandwidth", "latency", "backward", "dense")
        }
        for x in (*figures.values(), *predicted.values()):
            if not is_number(x) or not math.isfinite(x) or x < 0:
                raise refused(f"the choice has the figure {x!r}")
        if not all(isinstance(name, str) for name in predicted):
            raise refused("methods of the choice are no texts")
        found._facts = {
            "phase": phase,
            "method": chosen,
            "why": entry(state, "why", str, of=of),
            "ranks": whole(state, "ranks"),
            "hosts": whole(state, "hosts"),
            **figures,
            "predicted": predicted,
        }
        return found


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
    pieces: dict[str, Piece] = {}
    end = time.perf_counter() + _SECONDS
    for method in dict.fromkeys(("fp16", "none", *methods)):
        if len(pieces) < 2 or time.perf_counter() < end:
            pieces[method] = estimated(method, shapes)
    if left := [method for method in methods if method not in pieces]:
        notes = [*notes, f"no time was left to measure {', '.join(left)}"]
    if half:
        pieces["none"] = pieces["fp16"]
    best = choose(pieces, network, backward, candidates=candidates)
    seconds = seconds_of(pieces, network, backward)
    hosts = network.hosts or network.ranks
    latency = network.latency if hosts > 1 else network.inner_latency
    where = (
        f"{rate_text(network.bandwidth)} and rounds of {_span(latency)} measured between "
        f"{network.ranks} ranks on {hosts} host{'s' * (hosts > 1)}, {_span(backward)} of backward"
    )
    if accuracy_of(best) == "exact" and not is_bottleneck(pieces, network, backward):
        why = f"the network is not your bottleneck: {best} ({where})"
    else:
        other = "none" if best == "fp16" else "fp16"
        times = f"{_span(seconds[best])} a step against {_span(seconds[other])} with {other}"
        why = f"{best}, {times} ({where})"
    return best, "; ".join([why, *notes]), seconds


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

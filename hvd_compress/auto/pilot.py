"""Measures dense steps, lets rank 0 choose, and watches what becomes of the choice."""

from __future__ import annotations

import collections
import dataclasses
import glob
import hashlib
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hvd_compress.advisor.estimates import elements_of
from hvd_compress.advisor.shapes import Shapes
from hvd_compress.aggregators import allreduce
from hvd_compress.agreement import listed
from hvd_compress.auto.choosing import (
    Figures,
    alternative,
    decided,
    dense_arrays,
    fits_in_halves,
    is_finite,
    is_narrow,
    is_wrong,
)
from hvd_compress.auto.meeting import longest, measured_network, middle, told
from hvd_compress.auto.method import Auto, accuracy_of
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor
from hvd_compress.chain import chain
from hvd_compress.config import is_number, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.integrations.checkpoints import entry, refused, whole
from hvd_compress.methods import Partition, as_compressor, rule
from hvd_compress.reduce import Pilot, Reducer
from hvd_compress.schedules import schedules_of
from hvd_compress.transforms import error_feedback

log = logging.getLogger("hvd_compress")

#: sends all of a gradient and all that waits
FLUSH = chain(error_feedback(), via=allreduce())
PHASES = ("measuring", "flushing", "using")
#: steps after a change that are not measured, since buckets are planned in them
_UNEVEN = 2
#: steps whose median counts
_WINDOW = 12
#: finite steps in which what waits is sent; what then still waits has its tensor sent in full
_TRIES = 3


class AutoPilot(Pilot):
    """See :class:`hvd_compress.auto.Auto`.

    In phase "measuring" everything is sent as it is.  In phase "using" the choice is used.  A way
    from a method that keeps residuals to another one leads through phase "flushing", in which
    everything is sent with all that waits.  Tensors that had no gradient then keep what waits, and
    send it in full when they have one: ``left`` has their names.

    All that decides about the next step is equal on all ranks: it is the step, or was told by rank
    0 or by all.
    """

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self.phase, self.chosen, self.why = "measuring", "none", ""
        self.left: tuple[str, ...] = ()
        self.struck: dict[str, str] = {}
        self.figures: Figures | None = None
        self.ranks = 0  # for which all this is; 0: not known yet
        self._is_stale = False  # all is to be begun anew
        self._looks_at_model = False  # the next step says whether it is the model of before
        self._since: tuple[float, float] | None = None
        self._samples: collections.deque[tuple[float, float]]
        self._tries = 0
        self._set("measuring", "none")

    # -- what is in use ------------------------------------------------------------------------

    def _set(self, phase: str, chosen: str, left: Iterable[str] = ()) -> None:
        """Take up a phase; ``chosen``: what is used in it or after it, "" to measure after it."""
        self.phase, self.chosen, self.left = phase, chosen, tuple(sorted(left))
        self.method = FLUSH if phase == "flushing" else _made(chosen, self.left)
        self._tries = 0
        # Dense steps are all measured, others as long as they are recent.
        self._samples = collections.deque(maxlen=_WINDOW if phase == "using" else None)

    def _go_on(
        self, reducer: Reducer, phase: str, chosen: str, left: Iterable[str] | None = None
    ) -> None:
        waiting = reducer.waiting()
        self._set(phase, chosen, self.left if left is None else left)
        if phase != "flushing":
            waiting = {name: x for name, x in waiting.items() if name in self.left}
        reducer.change_method(self.method, waiting)

    def _leave(self, reducer: Reducer, chosen: str) -> None:
        """Go on with ``chosen``, "" to measure first, when all that waits has been sent."""
        waits = accuracy_of(self.chosen) in ("measured", "feedback")
        if waits or self.left or self.phase == "flushing":
            self._go_on(reducer, "flushing", chosen, ())
        else:
            self._go_on(reducer, "using" if chosen else "measuring", chosen or "none")

    def _begin_anew(self, reducer: Reducer) -> None:
        self.figures, self.struck, self.why = None, {}, ""
        self._is_stale = self._looks_at_model = False
        self._leave(reducer, "")

    # -- steps ---------------------------------------------------------------------------------

    def begins(self, reducer: Reducer) -> None:
        size = reducer.engine.size
        if self._is_stale or self.ranks not in (0, size):
            self._begin_anew(reducer)
        self.ranks = size

    def sees(self, reducer: Reducer) -> None:
        if self._since is None:
            self._since = reducer.clock.now(), reducer.clock.times.total

    def abandoned(self) -> None:
        self._since = None

    def progress(self) -> str:
        count = len(self._samples) if self.phase == "measuring" else self._tries
        return f"{self.phase} {count}, {self.chosen}"

    def ended(
        self, reducer: Reducer, gradients: Mapping[str, Array], directions: Mapping[str, Array]
    ) -> None:
        since, self._since = self._since, None
        if since is not None and directions:
            began, total = since
            took = reducer.clock.now() - began, reducer.clock.times.total - total
            if self.phase == "measuring":
                self._measure(reducer, gradients, directions, took)
            elif self.phase == "flushing":
                self._flush(reducer, gradients, directions)
            else:
                self._watch(reducer, gradients, directions, took)

    def _measure(
        self,
        reducer: Reducer,
        gradients: Mapping[str, Array],
        directions: Mapping[str, Array],
        took: tuple[float, float],
    ) -> None:
        shapes = _shapes(gradients)
        if self.ranks == 1 or not elements_of(shapes) or not is_finite(directions):
            return
        self._samples.append(took)
        if len(self._samples) < _UNEVEN + self.auto.steps:
            return
        samples = list(self._samples)[_UNEVEN:]
        like = next(x for name, x in gradients.items() if name in shapes)
        network = measured_network(reducer, like, reducer.clock.now)
        own = [middle([all_ - inside for all_, inside in samples])]
        own.append(middle([inside for _, inside in samples]))
        backward, dense = map(longest, zip(*told(reducer, own, like), strict=True))
        choice = None
        if reducer.engine.rank == 0:
            fits = fits_in_halves(directions, self.ranks)
            half = _mostly_half(gradients)
            try:
                choice = decided(
                    *(self.auto, shapes, network),
                    backward=backward,
                    like=like,
                    fits=fits,
                    half=half,
                )
            except Exception as error:  # the other ranks wait for what is said here
                log.warning("auto: none, since measuring failed: %r", error)
                choice = "none", f"none, since measuring failed: {error!r}", {"none": dense}
        chosen, self.why, predicted = told(reducer, choice, like)[0]
        self.figures = Figures(
            ranks=network.ranks,
            hosts=network.hosts or network.ranks,
            bandwidth=network.bandwidth,
            latency=network.latency if (network.hosts or 2) > 1 else network.inner_latency,
            backward=backward,
            dense=dense,
            predicted=predicted,
            elements=elements_of(shapes),
            model=_digest(shapes),
            since=reducer.step,
        )
        if reducer.engine.rank == 0:
            log.info("auto: %s", self.why)
        if chosen == "none":
            self._set("using", "none", self.left)
        else:
            self._go_on(reducer, "using", chosen)

    def _flush(
        self, reducer: Reducer, gradients: Mapping[str, Array], directions: Mapping[str, Array]
    ) -> None:
        like = next(iter(gradients.values()))
        waiting = reducer.waiting().items()
        own = [name for name, x in waiting if float(backend_of(x).norm(x))]
        left = set().union(*told(reducer, own, like))
        if left & directions.keys():  # as after a step that was not finite
            self._tries += is_finite(directions)
            if self._tries < _TRIES:
                return
        phase = "using" if self.chosen else "measuring"
        self._go_on(reducer, phase, self.chosen or "none", left)

    def _watch(
        self,
        reducer: Reducer,
        gradients: Mapping[str, Array],
        directions: Mapping[str, Array],
        took: tuple[float, float],
    ) -> None:
        self._samples.append(took)
        if self._looks_at_model:
            self._looks_at_model = False
            self._is_stale = _digest(_shapes(gradients)) != self._known.model
        after, first = reducer.step - self._known.since, _UNEVEN + _WINDOW
        if after < first or (after > first and after % self.auto.check):
            return
        elements = elements_of(_shapes(gradients))
        if abs(elements - self._known.elements) > 0.25 * self._known.elements:
            self._is_stale = True
        if self.chosen == "none" or self._is_stale or _warms_up(self.method, reducer):
            return
        like = next(iter(gradients.values()))
        own = [inside for _, inside in self._samples]
        fits = not is_narrow(self.chosen) or not is_finite(directions)
        fits = fits or fits_in_halves(directions, self.ranks)
        everyone = told(reducer, [middle(own) if len(own) == _WINDOW else None, fits], like)
        seconds, fit = zip(*everyone, strict=True)
        other = alternative(self.auto, self.chosen, self.struck, self._known)
        if not fit[0]:
            reason = "gradients have become too small or too large for it"
        elif None not in seconds and is_wrong(longest(seconds), other, self._known):
            reason = (
                f"exchanges took {1000 * longest(seconds):.3g} ms a step where "
                f"{1000 * self._known.expected(other):.3g} ms were expected of {other}"
            )
        else:
            return
        self._drop(reducer, other, reason)

    def _drop(self, reducer: Reducer, other: str, reason: str) -> None:
        """Go back to a method that loses nothing."""
        self.struck[self.chosen] = reason
        self.why = f"{other} in the place of {self.chosen}: {reason}"
        if reducer.engine.rank == 0:
            log.info("auto: %s", self.why)
        self.figures = dataclasses.replace(self._known, since=reducer.step)
        self._leave(reducer, other)

    @property
    def _known(self) -> Figures:
        if self.figures is None:
            raise ConfigError("nothing was measured yet")
        return self.figures

    # -- what is saved -------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        figures = {} if self.figures is None else dataclasses.asdict(self.figures)
        return {
            "phase": self.phase,
            "method": self.chosen,
            "why": self.why,
            "struck": dict(self.struck),
            **figures,
        }

    def state(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "method": self.chosen,
            "why": self.why,
            "left": list(self.left),
            "struck": dict(self.struck),
            "ranks": self.ranks,
            "figures": None if self.figures is None else dataclasses.asdict(self.figures),
        }

    def read(self, state: Any) -> AutoPilot:
        found = AutoPilot(self.auto)
        if state is None:
            return found
        phase, chosen = (entry(state, key, str, of="the choice") for key in ("phase", "method"))
        left, struck = entry(state, "left", (list, tuple)), entry(state, "struck", Mapping)
        if phase not in PHASES:
            raise refused(f"the choice has the phase {phase!r}")
        if not all(isinstance(x, str) for x in (*left, *struck, *struck.values())):
            raise refused("names and reasons of the choice are no texts")
        try:
            found._set(phase, chosen if phase == "using" else chosen or "none", left)
            accuracy_of(found.chosen)
        except ConfigError as error:
            raise refused(f"the method that was chosen is {chosen!r}: {error}") from None
        found.chosen = chosen if phase == "flushing" else found.chosen
        found.why, found.struck = entry(state, "why", str), dict(struck)
        found.ranks = whole(state, "ranks")
        if (figures := entry(state, "figures", (Mapping, type(None)))) is not None:
            found.figures = _figures_in(figures)
        elif phase == "using":
            raise refused("the choice has no figures")
        found._looks_at_model = phase == "using"
        known = {c.method for c in self.auto.candidates}
        found._is_stale = phase != "measuring" and chosen not in {*known, "none", ""}
        return found


def _figures_in(saved: Mapping[str, Any]) -> Figures:
    values = {f.name: entry(saved, f.name, object) for f in dataclasses.fields(Figures)}
    predicted = entry(saved, "predicted", Mapping)
    for name in ("ranks", "hosts", "elements", "since"):
        if not is_whole(values[name]) or values[name] < 0:
            raise refused(f"{name!r} of the choice is {values[name]!r}")
    times = [values[name] for name in ("bandwidth", "latency", "backward", "dense")]
    for x in (*times, *predicted.values()):
        if not is_number(x) or not math.isfinite(x) or x < 0:
            raise refused(f"the choice has the figure {x!r}")
    if not all(isinstance(name, str) for name in (*predicted, values["model"])):
        raise refused("names of the choice are no texts")
    return Figures(**{**values, "predicted": dict(predicted)})


def _made(text: str, left: Iterable[str]) -> Compressor:
    """Return the method, but for tensors of which something is left, which are sent in full."""
    method = as_compressor(text)
    rules = tuple(rule(FLUSH, glob.escape(name)) for name in left)
    return Partition(rules, method) if rules else method


def _shapes(gradients: Mapping[str, Array]) -> Shapes:
    return {name: tuple(x.shape) for name, x in dense_arrays(gradients).items()}


def _digest(shapes: Shapes) -> str:
    return hashlib.sha256(repr(listed(sorted(shapes.items()))).encode()).hexdigest()[:16]


def _mostly_half(gradients: Mapping[str, Array]) -> bool:
    sizes = collections.Counter[bool]()
    for x in dense_arrays(gradients).values():
        xp = backend_of(x)
        sizes[xp.dtype(x) in ("float16", "bfloat16")] += xp.size(x)
    return sizes[True] > sizes[False]


def _warms_up(method: Compressor, reducer: Reducer) -> bool:
    """Return whether the schedule of a method has not come to its end."""
    return any(
        schedule.stage(reducer.step, reducer.epoch) < schedule.stages_in_all - 1
        for schedule in schedules_of(method)
    )

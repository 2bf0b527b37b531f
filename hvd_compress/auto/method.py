"""What users write: ``compression="auto"``, and what may be chosen."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any, NoReturn

import numpy as np

from hvd_compress.advisor import ACCURACIES, Candidate, allowed
from hvd_compress.base import Array, Compressor, Context, Exchange, State
from hvd_compress.config import as_tuple, check_choice, check_whole, converted
from hvd_compress.errors import ConfigError, NeedsTuning, UnsupportedError
from hvd_compress.methods import as_compressor
from hvd_compress.methods.rows import as_rows

#: what a method that is left in the middle of a run may have kept: what waits is sent, and the rest
#: is made anew
_KNOWN_KEYS = frozenset({"residual", "owner_residual", "factor"})
_LIKE = np.ones((30, 40), np.float32)


@dataclasses.dataclass(frozen=True)
class Auto(Compressor, name="auto"):
    """Measure in the first steps, then choose "none" or "fp16", or more if ``accuracy`` permits it,
    by the model of ``hvd-compress advise``.

    The first steps are dense.  Then the ranks time some exchanges of their own, rank 0 measures for
    some seconds what the candidates cost it, and all use what it chooses; one line of the log says
    what, and why.  Later the ranks look now and then at how long exchanges really take.  If less
    would be taken by a method that loses nothing, they go on with that one, after a step in which
    all that waited is sent.

    It is the choice of a :class:`~hvd_compress.reduce.Reducer`: in PyTorch over Horovod, MPI and
    DistributedDataParallel, and in loops of one's own.

    Options:
        accuracy: the most that averages may lose.  "exact": rounding to 16 bits, and only while
            gradients are in the range of these.  "measured": nothing that comparisons with dense
            training saw, under SGD or AdamW.  "feedback": what is not sent in a step is sent in a
            later one; a short run without compression says whether your training tolerates it.
            "lossy": what rounding to few bits loses.
        methods: to choose from these instead, as texts such as "topk:density=0.01"; "none" is
            always one of them.  None of them may take over the optimizer's momentum, as DGC does,
            since it would have to change hands in the middle of a run.
        steps: dense steps that are measured, after two that are not; 1 or more.
        check: the ranks look at how long exchanges take after so many steps again and again; the
            first time soon after the choice.

    >>> [candidate.method for candidate in Auto().candidates]
    ['none', 'fp16']
    >>> [candidate.method for candidate in Auto(methods=("topk:density=0.01",)).candidates]
    ['none', 'topk:density=0.01']
    """

    is_chosen_later = True

    accuracy: str = "exact"
    methods: tuple[str, ...] = dataclasses.field(
        default=(), metadata=converted(as_tuple("methods"))
    )
    steps: int = 5
    check: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("accuracy", self.accuracy, ACCURACIES)
        check_whole("steps", self.steps, 1)
        check_whole("check", self.check, 1)
        for text in self.methods:
            if not isinstance(text, str):
                raise ConfigError(f"methods are texts such as 'topk:density=0.01'; got {text!r}")
            if problem := _problem(as_compressor(text)):
                raise ConfigError(f"methods=({text!r}, ...): {problem}")

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """What is chosen from, those that lose least first."""
        if not self.methods:
            return tuple(c for c in allowed(self.accuracy) if not _problem(as_compressor(c.method)))
        return _in_order({"none", *self.methods})

    def pilot(self) -> Any:
        from hvd_compress.auto.pilot import AutoPilot

        return AutoPilot(self)

    def _not_itself(self) -> NoReturn:
        raise UnsupportedError(
            'compression="auto" sends nothing itself: a Reducer puts what it chooses in its place. '
            "Elsewhere write a method, such as the one that hvd-compress advise names"
        )

    def init(self, gradient: Array) -> State:
        self._not_itself()

    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        self._not_itself()

    def per_rank(self, gradient: Array) -> frozenset[str]:
        self._not_itself()


@functools.cache
def accuracy_of(text: str) -> str:
    """Return what a method does to averages, one of ``ACCURACIES``."""
    known = {c.method: c.accuracy for c in allowed("lossy")}
    if text in known:
        return known[text]
    method = as_compressor(text)
    if method.name in ("none", "fp16", "bf16"):
        return "exact"
    return "feedback" if "residual" in method.for_tensor("a", (30, 40)).init(_LIKE) else "lossy"


def _in_order(texts: set[str]) -> tuple[Candidate, ...]:
    found = (Candidate(text, accuracy_of(text)) for text in sorted(texts))
    return tuple(sorted(found, key=lambda c: (ACCURACIES.index(c.accuracy), c.method != "none")))


def _problem(method: Compressor) -> str:
    """Return why a method cannot be chosen in the middle of a run; an empty text if it can."""
    if method.is_chosen_later:
        return "it is none of the methods"
    if method.takes_momentum or method.partner is not None:
        return (
            f"{method.name} takes over the optimizer's momentum, which cannot change hands in the "
            f"middle of a run: to use it, write compression={method.name!r} itself"
        )
    if method.needs_gradient_norm or any(as_rows(t).keeps_residual for t in method.rows_texts):
        return "it does more than a change of methods knows of: write it without these options"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedsTuning)
        inner = method.for_tensor("a", _LIKE.shape)
        keys = {*inner.init(_LIKE), *inner.common(_LIKE)}
    strange = keys - _KNOWN_KEYS
    if "residual" not in keys:  # an owner's is in units of gradients only beside it
        strange |= keys & {"owner_residual"}
    if strange:
        return (
            f"{method.name} keeps {sorted(strange)[0]!r}, which would be lost in a change of "
            f"methods: to use it, write compression={method.name!r} itself"
        )
    return ""

"""The method ``compression="auto"`` as users write it, and the candidates for the choice."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import numpy as np

from hvd_compress.advisor import ACCURACIES, Candidate, allowed
from hvd_compress.base import Array, Compressor, Context, Exchange, State
from hvd_compress.config import as_tuple, check_choice, check_whole, converted
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.methods import as_compressor

_LIKE = np.ones((30, 40), np.float32)


@dataclasses.dataclass(frozen=True)
class Auto(Compressor, name="auto"):
    """Measure in the first steps, then choose "none" or "fp16", or more if ``accuracy`` permits it,
    by the model of ``hvd-compress advise``.

    The first steps are dense.  Then the ranks time some exchanges of their own, rank 0 measures for
    some seconds what the candidates cost it, and all use what it chooses; one line of the log says
    what, and why.  The choice stays for the run, and for those that go on from its checkpoints.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("accuracy", self.accuracy, ACCURACIES)
        check_whole("steps", self.steps, 1)
        for text in self.methods:
            if not isinstance(text, str):
                raise ConfigError(f"methods are texts such as 'topk:density=0.01'; got {text!r}")
            if problem := _problem(as_compressor(text)):
                raise ConfigError(f"methods=({text!r}, ...): {problem}")

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidates for the choice, those that lose least first."""
        if not self.methods:
            return tuple(c for c in allowed(self.accuracy) if not _problem(as_compressor(c.method)))
        return _in_order({"none", *self.methods})

    def chooser(self) -> Any:
        from hvd_compress.auto.choosing import AutoChooser

        return AutoChooser(self)

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
    return ""

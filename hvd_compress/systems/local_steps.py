"""The base of local SGD, DiLoCo and SparseLoCo: rounds of local steps, and a step in common from
where the round began."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from hvd_compress.backends import backend_of
from hvd_compress.config import check_whole
from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.outer import OuterSGD
from hvd_compress.systems.base import (
    Arrays,
    Finish,
    Start,
    State,
    StepContext,
    Steps,
    TrainingMethod,
    all_finite,
    apart,
    copied,
    like,
    widened,
)


class Exchange(NamedTuple):
    """The exchange that begins after a step: its fragment, and the number of exchanges of this
    before it."""

    fragment: int
    round: int


class Rounds(TrainingMethod):
    """The base of methods whose ranks begin a round at the same ``anchor`` x0 and take local steps
    to x_i.  The differences d_i = x0 - x_i, called pseudo-gradients, are averaged.  All ranks take
    the same step of ``outer`` from x0 along their average.

    If the average is NaN or Inf, because a rank's parameters are, the round is lost: all ranks go
    back to x0.  They forget what was not sent before.  NaN and Inf in other fragments go back, too,
    since they would lead there again.
    """

    #: the number of local steps between two exchanges of the same parameter
    sync_every: int
    #: the model is divided into so many parts, each with exchanges of its own
    fragments: int = 1
    #: local steps between the beginning of an exchange and the use of its result
    delay: int = 0
    #: the share of a rank's own parameters in those that it goes on with
    mix: float = 0.0
    outer: OuterSGD = OuterSGD(1.0, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("sync_every", self.sync_every, 1)

    def exchange_after(self, step: int) -> Exchange | None:
        """Return what is exchanged after a local step, counted from 1; ``None`` if nothing is."""
        count, rest = divmod(step, self.sync_every // self.fragments)
        return (
            None if rest else Exchange((count - 1) % self.fragments, (count - 1) // self.fragments)
        )

    def init(self, parameters: Arrays) -> State:
        anchor = {name: copied(x) for name, x in parameters.items()}
        if not self.outer.momentum:
            return {"anchor": anchor}
        return {"anchor": anchor, "velocity": {name: x * 0 for name, x in anchor.items()}}

    def after_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        if (begins := self.exchange_after(context.step)) is not None:
            names = self._names(parameters, begins.fragment)
            yield Start(self.sent({n: parameters[n] for n in names}, state), begins.round)
        arrives = self.exchange_after(context.step - self.delay)
        if context.step <= self.delay or arrives is None:
            return parameters, state
        means = yield Finish()
        return self.received(means, parameters, state, context)

    def sent(self, parameters: Arrays, state: State) -> Arrays:
        """Return what is averaged over the ranks."""
        anchor = state["anchor"]
        return {name: anchor[name] - widened(x) for name, x in parameters.items()}

    def received(
        self, means: Arrays, parameters: Arrays, state: State, context: StepContext
    ) -> tuple[Arrays, State]:
        """Return the parameters that ranks go on with, given the averages."""
        parameters = dict(parameters)
        state = {key: dict(arrays) for key, arrays in state.items()}
        is_lost = not all_finite(means)
        if is_lost:
            warnings.warn(
                f"NaN or Inf in the parameters of a rank: the round that ends with step "
                f"{context.step} is lost, and all ranks go back to where it began",
                RuntimeWarning,
                stacklevel=2,
            )
        for name, mean in means.items():
            own, anchor = parameters[name], state["anchor"][name]
            if not is_lost:
                before = {key: arrays[name] for key, arrays in state.items() if key != "anchor"}
                anchor, after = self.outer.stepped(anchor, mean, before)
                state["anchor"][name] = anchor
                for key, x in after.items():
                    state[key][name] = x
            elif self.mix:
                own = like(anchor, own)
            mixed = anchor + (widened(own) - anchor) * self.mix if self.mix else anchor
            # The anchor must stay as it is when the parameter is changed in place.
            parameters[name] = apart(mixed, own) if mixed is anchor else like(mixed, own)
        if is_lost:
            for name in parameters.keys() - means.keys():
                if not all_finite({name: (own := parameters[name])}):
                    parameters[name] = apart(state["anchor"][name], own)
        return parameters, state

    def _names(self, parameters: Arrays, fragment: int) -> list[str]:
        sizes = [backend_of(x).size(x) for x in parameters.values()]
        names = list(parameters)
        begin, end = list(itertools.pairwise(cuts(sizes, self.fragments)))[fragment]
        return names[begin:end]


def cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return where to cut a list of tensors into parts of about equally many elements.

    No part is empty unless there are no tensors; the first cut is 0, the last one the length.

    >>> cuts([4, 1, 1, 6], 2)
    [0, 3, 4]
    """
    n = len(sizes)
    if not n:  # all are frozen
        return [0] * (parts + 1)
    if n < parts:
        raise ConfigError(f"fragments={parts}: there are only {n} parameters to divide")
    ends = [0, *itertools.accumulate(sizes)]
    found = [0]
    for part in range(1, parts):
        wanted = ends[-1] * part / parts
        choices = range(found[-1] + 1, n - (parts - part) + 1)
        found.append(min(choices, key=lambda cut: abs(ends[cut] - wanted)))
    return [*found, n]

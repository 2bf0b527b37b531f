"""Transforms of a bucket's tensors, in place and part by part.

A chain of elementwise transforms treats each part of a tensor as it treats the tensor.  So a tensor
needs memory for the output alone, and a part is finished while it is in the processor's caches.
The transforms are those of the blocks, and so are the bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from hvd_compress.base import Array, Context, Sparse, Spec, State
from hvd_compress.chain import Transform
from hvd_compress.fused.in_place import InPlaceForm, InPlacePlan, Views, two_rows
from hvd_compress.transforms import error_feedback

#: elements of a part
_PART = 1 << 14

_Form = TypeVar("_Form", bound="StagedForm")
#: what was sent of a run of elements; or, which is all that some stages ask, what takes it off one
Sent: TypeAlias = np.ndarray | Sparse | Callable[[np.ndarray], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """Elementwise transforms, in the order in which they are applied to a gradient.

    Attributes:
        keys: of their states.
        nesterov: the optimizer's flag.
        finishes: the direction of the step is not the average.
    """

    transforms: tuple[Transform, ...]
    nesterov: bool

    @classmethod
    def of(
        cls, transforms: Sequence[Transform], context: Context
    ) -> tuple[tuple[Transform, ...], Stages] | None:
        """Return the transforms that come first and have no state, and those after them, which are
        elementwise; ``None`` if there are others."""
        first = next((i for i, t in enumerate(transforms) if t.elementwise), len(transforms))
        before, behind = tuple(transforms[:first]), tuple(transforms[first:])
        if any(t.keys or t.finishes for t in before):
            return None
        if not all(t.elementwise for t in behind):
            return None
        return before, cls(behind, context.nesterov)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for transform in self.transforms for key in transform.keys)

    @property
    def finishes(self) -> bool:
        return any(t.finishes for t in self.transforms)

    @property
    def only_feeds_back(self) -> bool:
        """Whether all that is made of what was sent is to take it off a residual."""
        return len(self.transforms) == 1 and type(self.transforms[0]) is error_feedback

    def settle(
        self,
        x: np.ndarray,
        states: Mapping[str, np.ndarray],
        context: Context,
        sent: Sent,
        mean: np.ndarray | None = None,
        out: np.ndarray | None = None,
    ) -> None:
        """Write the new states after a step in which all is finite.  If they make the direction of
        the step of the ``mean``, write it to ``out``, which may be ``x``."""
        if self.only_feeds_back:
            residual = states["residual"]
            np.add(x, residual, out=residual)
            if callable(sent):
                sent(residual)
            elif isinstance(sent, Sparse):
                residual[sent.indices] -= sent.values
            else:
                residual -= sent
            return
        assert isinstance(sent, np.ndarray | Sparse)
        for part in _parts(x.size):
            its_x, its_states, its_sent = x[part], _at(states, part), _sent_in(sent, part)
            _, own = self.updated(its_x, its_states, context)
            its_mean = None if mean is None else mean[part]
            direction, new = self.settled(its_sent, own, its_mean, context)
            for key in self.keys:
                its_states[key][:] = new[key]
            if out is not None:
                out[part] = direction

    def updated(self, x: Array, states: State, context: Context) -> tuple[Array, list[State]]:
        """Return what is passed on of ``x``, and the state of each transform."""
        context, own = context._replace(nesterov=self.nesterov), []
        for transform in self.transforms:
            x, state = transform.update(x, {key: states[key] for key in transform.keys}, context)
            own.append(state)
        return x, own

    def settled(
        self, sent: Any, own: Sequence[State], mean: Array | None, context: Context
    ) -> tuple[Array, State]:
        """Return the direction of the step, given the ``mean`` if they make it of that, and the new
        states, given those that :meth:`updated` has returned."""
        context, direction, new = context._replace(nesterov=self.nesterov), mean, dict[str, Array]()
        for transform, state in zip(reversed(self.transforms), reversed(own), strict=True):
            state = transform.settle(sent, state, context)
            if mean is not None:
                direction, state = transform.finish(direction, state, context)
            new |= {key: state[key] for key in transform.keys}
        return direction, new


@dataclasses.dataclass(frozen=True, eq=False)
class StagedForm(InPlaceForm):
    """A form whose transforms are ``stages``; what follows in its fields is the exchange."""

    stages: Stages

    @classmethod
    def of(
        cls: type[_Form], transforms: Sequence[Transform], context: Context, *exchange: Any
    ) -> _Form | None:
        """Return the form of ``transforms`` and an ``exchange``, if there is one."""
        stages = Stages.of(transforms, context)
        return None if stages is None else cls(*stages, *exchange)

    @property
    def additive(self) -> bool:  # type: ignore[override]
        return all(transform.additive for transform in self.stages.transforms)


class StagedPlan(InPlacePlan):
    form: StagedForm

    def __init__(
        self, form: StagedForm, specs: Sequence[Spec], key: Hashable, step: Context
    ) -> None:
        super().__init__(form, specs, key, step)
        self.keys = form.stages.keys

    def passed_on(
        self, views: Views, tensor: int, own: slice, step: Context, longest: int
    ) -> np.ndarray:
        """Return what the transforms make of a run of elements: these themselves if there are none,
        else in memory for the ``longest`` run."""
        stages, x = self.form.stages, views.x[tensor][own]
        if not stages.transforms:
            return x
        states, out = views.states_at(tensor, own, stages.keys), two_rows(longest)[0, : x.size]
        if stages.only_feeds_back:
            return np.add(x, states["residual"], out=out)
        for part in _parts(x.size):
            out[part], _ = stages.updated(x[part], _at(states, part), step)
        return out

    def settle(
        self,
        views: Views,
        tensor: int,
        own: slice,
        step: Context,
        sent: Sent | None,
        mean: Callable[[np.ndarray], Any],
    ) -> None:
        """Write result and states of a run of elements.

        Args:
            sent: what was sent of it, ``None`` if states stay as they are.
            mean: writes the average.
        """
        stages, out = self.form.stages, views.out[tensor][own]
        x, states = views.x[tensor][own], views.states_at(tensor, own, stages.keys)
        makes_it = sent is not None and stages.finishes
        average = two_rows(out.size)[0, : out.size] if makes_it else out
        if sent is not None and not makes_it:  # states first, since out may be the gradient
            stages.settle(x, states, step, sent)
        mean(average)
        if sent is not None and makes_it:
            stages.settle(x, states, step, sent, average, out)


def _parts(n: int) -> Iterator[slice]:
    return (slice(at, min(n, at + _PART)) for at in range(0, n, _PART))


def _at(states: Mapping[str, np.ndarray], part: slice) -> State:
    return {key: x[part] for key, x in states.items()}


def _sent_in(sent: np.ndarray | Sparse, part: slice) -> np.ndarray | Sparse:
    if not isinstance(sent, Sparse):
        return sent[part]
    a, b = np.searchsorted(sent.indices, [part.start, part.stop])
    return Sparse(sent.indices[a:b] - part.start, sent.values[a:b])

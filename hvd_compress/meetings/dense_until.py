"""Everything in full first, compressed later."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hvd_compress.base import Array, Coding, Context, Form, Place, Plan, Spec, State
from hvd_compress.chain import Aggregation, Aggregator, Transform
from hvd_compress.config import converted
from hvd_compress.errors import ConfigError
from hvd_compress.meetings.averaging import summed, whole
from hvd_compress.schedules import Start, as_start, started


@dataclasses.dataclass(frozen=True)
class dense_until(Aggregator, name="dense_until"):
    """Sum everything until ``start``, and then go ``via`` another aggregator.

    State: that of the other, which does not change until then.

    Options:
        start: a number of steps, or ``After("epoch", ...)``; ``True``: from the first step on.
        via: an aggregator.

    >>> world = World(chain(via=dense_until(1, allgather(top_k(0.5)))), size=1)
    >>> [world.exchange([np.array([4.0, 1.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 1.0], [4.0, 0.0]]
    """

    start: Start = dataclasses.field(metadata=converted(as_start))
    via: Aggregator

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.via, Aggregator):
            raise ConfigError(f"dense_until(start, via): {self.via!r} is not an aggregator")

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.via.keys

    @property
    def per_rank(self) -> bool:  # type: ignore[override]
        return self.via.per_rank

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.via.unbiased

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        return self.via.init(x, shape)

    def common(self, x: Array) -> State:
        return self.via.common(x)

    def check_feedback(self, shape: tuple[int, ...], context: Context) -> None:
        self.via.check_feedback(shape, context)

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        if started(self.start, context.step, context.epoch):
            return (yield from self.via.aggregate(x, state, context))
        own = {key: state[key] for key in self.keys if key in state}
        return (yield from summed(x, own, context))

    def fused(self, transforms: Sequence[Transform], context: Context) -> Form | None:
        form = self.via.fused(transforms, context)
        return None if form is None else _Beginning(form, self.start)

    def coding(self, n: int, context: Context) -> Coding:
        if started(self.start, context.step, context.epoch):
            return self.via.coding(n, context)
        return whole()


class _Beginning(NamedTuple):
    """A form that takes tensors from ``start`` on."""

    form: Form
    start: Start

    def place(self, gradient: Array, context: Context) -> Place | None:
        if not started(self.start, context.step, context.epoch):
            return None
        return self.form.place(gradient, context)

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> Plan:
        return self.form.plan(specs, key, step)

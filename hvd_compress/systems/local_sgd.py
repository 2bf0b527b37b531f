"""Local SGD and post-local SGD."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Compressor
from hvd_compress.config import check_choice, check_whole, converted
from hvd_compress.errors import ConfigError
from hvd_compress.methods import NoCompression
from hvd_compress.systems.base import (
    Arrays,
    State,
    StepContext,
    Steps,
    Unsent,
    checked_compression,
    like,
    widened,
)
from hvd_compress.systems.local_steps import Exchange, Rounds


@dataclasses.dataclass(frozen=True)
class LocalSGD(Rounds, name="local_sgd"):
    """Take H = ``sync_every`` local steps on every rank, then go on with the average::

        method=hvd.LocalSGD(sync_every=8)

    After a round, and with compression, where ``unsent="stays"`` leaves x_i = x0 - e_i::

        x_i = mean of x_j over the ranks
        x_i = x0 = x0 - mean of C(x0 - x_j) over the ranks; C keeps e_i for later

    State: ``anchor`` x0, with compression only; without it NaN or Inf on a rank reaches all.

    Args:
        sync_every: H, the number of local steps between exchanges.
        start: exchange after every step until this one: post-local SGD.  0 for never.
        compression: of differences, for instance "topk:density=0.01".
        unsent: e_i "waits" apart, or "stays" in the rank's parameters; needs error feedback.

    Reference: Stich, ICLR 2019; Lin et al., ICLR 2020; Basu et al., NeurIPS 2019 (compression).

    >>> ranks = Ranks(LocalSGD(sync_every=1), size=2)
    >>> x = ranks.before_step([{"w": np.array([1.0])}, {"w": np.array([3.0])}])
    >>> ranks.after_step(x)[0]["w"]
    array([2.])
    """

    sync_every: int = 8
    start: int = 0
    compression: Compressor = dataclasses.field(
        default=NoCompression(), metadata=converted(checked_compression)
    )
    unsent: str = "waits"

    of_state = ("unsent",)  # which is in the weights, too, if it stays

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("start", self.start, 0)
        check_choice("unsent", self.unsent, ("waits", "stays"))
        if self.unsent == "stays" and self._sends_parameters:
            raise _nothing_stays(self.compression)

    @property
    def _sends_parameters(self) -> bool:
        return isinstance(self.compression, NoCompression)

    def exchange_after(self, step: int) -> Exchange | None:
        if step <= self.start:
            return Exchange(0, step - 1)
        rounds, rest = divmod(step - self.start, self.sync_every)
        return None if rest else Exchange(0, self.start + rounds - 1)

    def after_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        if self.unsent == "waits" or self.exchange_after(context.step) is None:
            return (yield from super().after_step(parameters, state, context))
        # The compression adds what it has kept, which x0 - x_i would have a second time.
        kept = yield Unsent(parameters)
        whole = {n: widened(x) + kept[n] if n in kept else x for n, x in parameters.items()}
        common, state = yield from super().after_step(whole, state, context)
        kept = yield Unsent(parameters)
        if parameters and not kept:
            raise _nothing_stays(self.compression)
        own = {n: like(widened(common[n]) - x, parameters[n]) for n, x in kept.items()}
        return {**common, **own}, state

    def init(self, parameters: Arrays) -> State:
        return {} if self._sends_parameters else super().init(parameters)

    def sent(self, parameters: Arrays, state: State) -> Arrays:
        return parameters if self._sends_parameters else super().sent(parameters, state)

    def received(
        self, means: Arrays, parameters: Arrays, state: State, context: StepContext
    ) -> tuple[Arrays, State]:
        if self._sends_parameters:
            own = {name: like(mean, parameters[name]) for name, mean in means.items()}
            return {**parameters, **own}, state
        return super().received(means, parameters, state, context)


def _nothing_stays(compression: Compressor) -> ConfigError:
    return ConfigError(
        f'unsent="stays" and compression={compression.name!r} cannot be combined, since that has '
        'no residual: take for instance compression="onebit:column=512,via=allgather"'
    )

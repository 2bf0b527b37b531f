"""Elastic averaging SGD (Zhang, Choromanska, LeCun; 2015), synchronous."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Generator
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.config import check_between, check_whole, converted
from hvd_compress.methods import NoCompression
from hvd_compress.systems.base import (
    Arrays,
    Finish,
    Request,
    Start,
    State,
    StepContext,
    Steps,
    TrainingMethod,
    all_finite,
    apart,
    checked_compression,
    copied,
    like,
    widened,
)


@dataclasses.dataclass(frozen=True)
class EASGD(TrainingMethod, name="easgd"):
    """Pull every rank elastically to a centre c, and c to the ranks::

        method=hvd.EASGD(sync_every=8, beta=0.9)

    Every ``sync_every`` steps, with the parameters x_i before the step::

        x_i = x_i - alpha (x_i - c), and the local step from the gradient at the old x_i
        c = (1 - beta) c + beta mean of x_i over the ranks

    State: ``centre`` c, the same on all ranks, which is tested.  With NaN or Inf on a rank, the
    exchange is lost with a warning, and that rank goes on from c.

    Args:
        sync_every: tau, the number of local steps between exchanges.
        beta: how far the centre moves to the average, from 0 to 1.
        alpha: how far a rank moves to the centre, from 0 to 1; ``None`` for beta / P with P ranks.
        compression: of x_i - c, for instance "topk:density=0.01".

    Reference: Zhang, Choromanska, LeCun, NeurIPS 2015; here every rank keeps the centre.

    >>> ranks = Ranks(EASGD(sync_every=2, beta=0.5), size=2)
    >>> x = ranks.after_step(ranks.before_step([{"w": np.ones(1)}, {"w": np.ones(1)}]))
    >>> ranks.before_step([{"w": np.zeros(1)}, {"w": np.ones(1)}])[0]["w"]  # a quarter of the way
    array([0.25])
    """

    sync_every: int = 10
    beta: float = 0.43
    alpha: float | None = None
    compression: Compressor = dataclasses.field(
        default=NoCompression(), metadata=converted(checked_compression)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("sync_every", self.sync_every, 1)
        check_between("beta", self.beta, 0, 1)
        if self.alpha is not None:
            check_between("alpha", self.alpha, 0, 1)

    def init(self, parameters: Arrays) -> State:
        return {"centre": {name: copied(x) for name, x in parameters.items()}}

    def before_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        rounds, rest = divmod(context.step, self.sync_every)
        if rest:
            return parameters, state
        centre = state["centre"]
        differences = {name: widened(x) - centre[name] for name, x in parameters.items()}
        yield Start(differences, rounds - 1)
        means = yield Finish()
        if not all_finite(means):
            warnings.warn(
                f"NaN or Inf in the parameters of a rank: the exchange of step {context.step} is "
                "lost, and that rank goes on from the centre",
                RuntimeWarning,
                stacklevel=2,
            )
            return parameters, state
        alpha = self.beta / context.size if self.alpha is None else self.alpha
        moved = {
            name: like(widened(x) - differences[name] * alpha, x) for name, x in parameters.items()
        }
        after = {name: centre[name] + mean * self.beta for name, mean in means.items()}
        return {**parameters, **moved}, {"centre": {**centre, **after}}

    def after_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        # The gradients of before the step are NaN, too, so it would have led there again.
        if context.step % self.sync_every == 0 and not all_finite(parameters):
            centre = state["centre"]
            parameters = {name: apart(centre[name], x) for name, x in parameters.items()}
        return parameters, state
        yield

    def consensus(self, parameters: Arrays, state: State) -> Generator[Request, Any, Arrays]:
        return {name: like(state["centre"][name], x) for name, x in parameters.items()}
        yield

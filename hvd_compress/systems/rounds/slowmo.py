"""SlowMo (Wang et al., 2020)."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array, Compressor
from hvd_compress.config import check_between, converted
from hvd_compress.errors import ConfigError
from hvd_compress.methods import NoCompression
from hvd_compress.optimizers.outer import slow_momentum
from hvd_compress.systems.base import checked_compression
from hvd_compress.systems.rounds.rounds import Rounds


@dataclasses.dataclass(frozen=True)
class SlowMo(Rounds, name="slowmo"):
    """Add momentum across the rounds of local SGD::

        method=hvd.SlowMo(sync_every=12, momentum=0.5)

    After H = ``sync_every`` local steps, with gamma the learning rate of the last one::

        u = beta u + (x0 - mean of x_i) / gamma;  x_i = x0 = x0 - alpha gamma u

    State: ``anchor`` x0 and ``slow_momentum`` u, the same on all ranks.

    Args:
        sync_every: H, the number of local steps between exchanges.
        momentum: beta, from 0 to 1.
        lr: alpha, 0 or more.
        compression, buffers: see :class:`LocalSGD`.

    Reference: Wang et al., ICLR 2020.

    >>> ranks = Ranks(SlowMo(sync_every=1, momentum=0.5), size=2)
    >>> x = ranks.before_step([{"w": np.zeros(1)}, {"w": np.zeros(1)}], rates={"w": 0.1})
    >>> ranks.after_step([{"w": x[0]["w"] - 1}, {"w": x[1]["w"] - 3}])[0]["w"]
    array([-2.])
    """

    needs_rates = True
    moments = ("slow_momentum",)

    sync_every: int = 8
    momentum: float = 0.7
    lr: float = 1.0
    compression: Compressor = dataclasses.field(
        default=NoCompression(), metadata=converted(checked_compression)
    )
    buffers: str = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("momentum", self.momentum, 0, 1)
        check_between("lr", self.lr, 0)

    def outer_step(
        self, anchor: Array, mean: Array, moments: dict[str, Array], rate: float | None
    ) -> tuple[Array, dict[str, Array]]:
        if not rate:
            raise ConfigError(
                "SlowMo divides by the learning rate, which is 0 or unknown at the end of a round: "
                "choose sync_every such that no round ends there, or pass rates"
            )
        u, beta = moments["slow_momentum"], self.momentum
        x, u = slow_momentum(anchor, mean, u, rate=rate, lr=self.lr, momentum=beta)
        return x, {"slow_momentum": u}

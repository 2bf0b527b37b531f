"""SparseLoCo (Sarfi et al., 2025)."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Compressor
from hvd_compress.chain import chain
from hvd_compress.codecs import Codec, top_k
from hvd_compress.config import check_between, converted
from hvd_compress.meetings import allgather
from hvd_compress.meetings.elements import as_values
from hvd_compress.optimizers.outer import OuterSGD
from hvd_compress.schedules import Density
from hvd_compress.systems.local_steps import Rounds
from hvd_compress.transforms import momentum_feedback


@dataclasses.dataclass(frozen=True)
class SparseLoCo(Rounds, name="sparse_loco"):
    """Take local steps, send the largest changes, keep the rest (Sarfi et al., arXiv 2508.15706)::

        method=hvd.SparseLoCo(sync_every=100, density=0.03)

    After H local steps of any optimizer::

        e_i = decay e_i + (x0 - x_i);  d_i = the largest elements of e_i;  e_i = e_i - d_i
        x0  = x0 - lr (mean of d_i over the ranks)

    State: ``anchor`` x0, the same on all ranks, and each rank's e_i, which replaces outer momentum.

    Args:
        sync_every: H, the number of local steps between two exchanges.
        density: fraction of a tensor to send, in (0, 1], or a schedule; the paper's is per chunk.
        decay: of the elements that wait, in [0, 1).
        lr: the rate of the outer step; without momentum it has to be larger than DiLoCo's.
        values: how elements are sent: "float32", "float16", "4bit" or a codec; the paper has 2
            bits.

    >>> ranks = Ranks(SparseLoCo(sync_every=1, density=0.5, values="float32"), size=1)
    >>> x = ranks.before_step([{"w": np.zeros(2)}])
    >>> ranks.after_step([{"w": np.array([-2.0, -0.5])}])[0]["w"]  # 0 - 2 * 2; 0.5 waits
    array([-4.,  0.])
    """

    sync_every: int = 15
    density: Density = 0.01
    decay: float = 0.95
    lr: float = 2.0
    values: str | Codec = dataclasses.field(default="4bit", metadata=converted(as_values))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("lr", self.lr, 0)
        _ = self.compression  # its blocks check the other options

    @property
    def compression(self) -> Compressor:  # type: ignore[override]
        via = allgather(top_k(self.density), self.values)
        return chain(momentum_feedback(self.decay), via=via)

    @property
    def outer(self) -> OuterSGD:  # type: ignore[override]
        return OuterSGD(self.lr, 0.0)

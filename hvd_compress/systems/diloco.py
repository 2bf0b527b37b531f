"""DiLoCo and Streaming DiLoCo (Douillard et al., 2023 and 2025)."""

from __future__ import annotations

import dataclasses
import warnings

from hvd_compress.base import Compressor
from hvd_compress.config import check_between, check_whole, converted
from hvd_compress.errors import ConfigError, NeedsTuning
from hvd_compress.methods import NoCompression
from hvd_compress.optimizers.outer import OuterSGD
from hvd_compress.systems.base import checked_compression
from hvd_compress.systems.local_steps import Rounds

#: momentum that goes on for as many exchanges as a method of less than a tenth keeps things waiting
_LONG = 0.9


@dataclasses.dataclass(frozen=True)
class DiLoCo(Rounds, name="diloco"):
    """Take local steps of any optimizer, then a step of an outer optimizer along their average::

        method=hvd.DiLoCo(sync_every=100, compression="linear")

    After every H = ``sync_every`` local steps::

        d = mean of (x0 - x_i) over the ranks;  x0 = outer(x0, d);  x_i = x0 + mix (x_i - x0)

    State: ``anchor`` x0 and ``velocity``, the same on all ranks.  Sparse methods make weights grow
    without end in long runs, unless momentum is less: :class:`~hvd_compress.NeedsTuning` warns.

    Args:
        outer: SGD with Nesterov momentum; see :class:`~hvd_compress.optimizers.outer.OuterSGD`.
        sync_every: H, the number of local steps between two exchanges of the same parameter.
        fragments: F parts of the model, exchanged in turn (Streaming DiLoCo); H is a multiple of F.
        delay: the number of local steps during which an exchange travels; less than H / F.
        mix: the share of a rank's own parameters in those that it goes on with, from 0 to 1.
        compression: of differences, for instance "linear".

    Reference: Douillard et al., 2023, 2025 (streaming; fragments here are neighbouring parameters).

    >>> DiLoCo(sync_every=100, compression="linear").outer
    OuterSGD(lr=0.7, momentum=0.9, nesterov=True)
    """

    outer: OuterSGD = OuterSGD()  # noqa: RUF009, frozen
    sync_every: int = 500
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    compression: Compressor = dataclasses.field(
        default=NoCompression(), metadata=converted(checked_compression)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.outer, OuterSGD):
            raise ConfigError(f"outer must be OuterSGD(lr, momentum, nesterov); got {self.outer!r}")
        check_whole("fragments", self.fragments, 1)
        check_whole("delay", self.delay, 0)
        check_between("mix", self.mix, 0, 1)
        gap, rest = divmod(self.sync_every, self.fragments)
        if rest:
            raise ConfigError(
                f"sync_every={self.sync_every} must be a multiple of fragments={self.fragments}"
            )
        if self.delay >= gap:
            raise ConfigError(
                f"delay={self.delay} must be less than sync_every / fragments = {gap}, so that one "
                "exchange ends before the next begins"
            )
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Warn where what is not sent waits for longer than momentum remembers."""
        density = getattr(self.compression, "density", None)
        if not isinstance(density, float) or not getattr(self.compression, "error_feedback", True):
            return
        if self.outer.momentum >= _LONG and density < 0.1:
            warnings.warn(
                f"diloco with {self.compression.name} at a density of {density} and an outer "
                f"momentum of {self.outer.momentum}: what is not sent waits for some "
                f"{1 / density:.0f} exchanges, longer than momentum remembers, and in a long run "
                "the weights grow without end. Take hvd.SparseLoCo, a method of more bits such as "
                "'linear', or outer=hvd.OuterSGD(lr=1.0, momentum=0.0)",
                NeedsTuning,
                stacklevel=4,
            )

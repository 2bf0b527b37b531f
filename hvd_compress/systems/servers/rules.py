"""Rules that servers and workers agree on: when a gradient counts, and how it is sent."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.base import Compressor
from hvd_compress.config import Configurable, check_choice, check_whole, converted, is_number
from hvd_compress.errors import ConfigError
from hvd_compress.methods import NoCompression
from hvd_compress.systems.base import checked_compression

MODES = ("sync", "async", "bounded")
CORRECTIONS = ("none", "divide", "compensate", "compensate_adaptive")
#: lambda of the two kinds of delay compensation
_LAM = {"compensate": 0.04, "compensate_adaptive": 2.0}


_as_compression = functools.partial(checked_compression, sent="a server takes gradients")


@dataclasses.dataclass(frozen=True)
class Rules(Configurable, kind="parameter server", name="rules"):
    """The rules of a parameter server with n workers.

    A worker sends a gradient and gets parameters back; the reply comes when the worker may begin
    its next step.

    Args:
        mode: "sync": a step is the mean of the first n - ``backup`` gradients at the current
            parameters.  "async": every gradient is a step, as soon as it arrives.  "bounded": as
            "async", but a worker waits while it is more than ``staleness`` steps ahead of the
            slowest (stale synchronous parallel).
        backup: of "sync": that many workers may be late; what arrives for a step that is over is
            dropped.
        staleness: of "bounded": a number of steps, 0 or more.
        correction: of gradients g that are tau steps late, of "async" and "bounded": "none";
            "divide" divides the learning rate by 1 + tau; "compensate" steps along
            g + lam g g (x - x'), element by element, with the parameters x of now and x' that the
            worker had (DC-ASGD-c); "compensate_adaptive" takes lam / sqrt(m + 1e-7) for lam, with
            m = 0.95 m + 0.05 g g (DC-ASGD-a).
        lam: lambda of "compensate", 0.04 if it is ``None``, and of "compensate_adaptive", 2.
        compression: of gradients, with the worker's residual.
        compression_down: of what is new about the parameters, with the server's residual.

    Raises:
        ConfigError: an option makes no sense, or two of them do not go together.

    Reference: Ho et al., NeurIPS 2013 (bounded staleness); Zheng et al., ICML 2017 (DC-ASGD).

    >>> Rules("async", correction="compensate").lam
    0.04
    """

    mode: str = "sync"
    backup: int = 0
    staleness: int | None = None
    correction: str = "none"
    lam: float | None = None
    compression: Compressor = dataclasses.field(
        default=NoCompression(), metadata=converted(_as_compression)
    )
    compression_down: Compressor = dataclasses.field(
        default=NoCompression(), metadata=converted(_as_compression)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, MODES)
        check_choice("correction", self.correction, CORRECTIONS)
        check_whole("backup", self.backup, 0)
        if self.backup and self.mode != "sync":
            raise ConfigError(f"backup={self.backup} needs mode='sync': in others nobody waits")
        if (self.staleness is None) == (self.mode == "bounded"):
            raise ConfigError("staleness=, and nothing but it, makes mode='bounded': pass both")
        if self.staleness is not None:
            check_whole("staleness", self.staleness, 0)
        if self.correction != "none" and self.mode == "sync":
            raise ConfigError("correction= is for late gradients, and mode='sync' has none")
        if self.lam is None:
            object.__setattr__(self, "lam", _LAM.get(self.correction))
        elif self.correction not in _LAM or not is_number(self.lam) or self.lam < 0:
            raise ConfigError(
                f"lam={self.lam!r} must be 0 or more, and needs correction='compensate' or "
                "'compensate_adaptive'"
            )

    def check_workers(self, workers: int) -> None:
        """Raise ``ConfigError`` unless the rules work with so many workers."""
        if self.backup >= workers:
            raise ConfigError(
                f"backup={self.backup} of {workers} workers: a step takes a gradient of one at "
                f"least, so backup can be up to {workers - 1} here"
            )

    @property
    def needs_copies(self) -> bool:
        """Whether the server keeps what each worker knows of the parameters."""
        return self.correction in _LAM or self.is_delta

    @property
    def is_delta(self) -> bool:
        """Whether differences go to the workers, and not the parameters themselves."""
        return not isinstance(self.compression_down, NoCompression)

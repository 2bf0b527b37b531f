"""Rules that servers and workers agree on: when a gradient counts, and how it is sent."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.base import Compressor
from hvd_compress.config import Configurable, check_choice, check_whole, converted
from hvd_compress.errors import ConfigError
from hvd_compress.methods import NoCompression
from hvd_compress.systems.base import checked_compression

MODES = ("sync", "async")

_as_compression = functools.partial(checked_compression, sent="a server takes gradients")


@dataclasses.dataclass(frozen=True)
class Rules(Configurable, kind="parameter server", name="rules"):
    """The rules of a parameter server with n workers.

    A worker sends a gradient and gets parameters back; the reply comes when the worker may begin
    its next step.

    Args:
        mode: "sync": a step is the mean of the first n - ``backup`` gradients at the current
            parameters.  "async": every gradient is a step, as soon as it arrives.
        backup: of "sync": that many workers may be late; what arrives for a step that is over is
            dropped.
        compression: of gradients, with the worker's residual.

    Raises:
        ConfigError: an option makes no sense, or two of them do not go together.

    Reference: Li et al., OSDI 2014; Chen et al., 2016 (backup workers).

    >>> Rules(backup=1, compression="topk:density=0.01").mode
    'sync'
    """

    mode: str = "sync"
    backup: int = 0
    compression: Compressor = dataclasses.field(
        default=NoCompression(), metadata=converted(_as_compression)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, MODES)
        check_whole("backup", self.backup, 0)
        if self.backup and self.mode != "sync":
            raise ConfigError(f"backup={self.backup} needs mode='sync': in 'async' nobody waits")

    def check_workers(self, workers: int) -> None:
        """Raise ``ConfigError`` unless the rules work with so many workers."""
        if self.backup >= workers:
            raise ConfigError(
                f"backup={self.backup} of {workers} workers: a step takes a gradient of one at "
                f"least, so backup can be up to {workers - 1} here"
            )

"""The options that Horovod's optimizers and tapes have in common, with their checks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hvd_compress.base import Compressor
from hvd_compress.config import (
    check_choice,
    check_process_set,
    check_seed,
    is_number,
    is_one_of,
    is_whole,
)
from hvd_compress.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class HorovodOptions:
    """Options of the exchange of gradients, for PyTorch and TensorFlow; :meth:`checked` makes them.

    Args:
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: the ranks that take part.
        gradient_predivide_factor: divide by it before adding and by the rest afterwards.
        backward_passes_per_step: number of passes whose gradients add up before they are exchanged.
        groups: lists of what is sent together, or the number of lists.
        sparse_as_dense: make sparse gradients dense before they are exchanged.
        device_dense, device_sparse: where TensorFlow computes exchanges.
        seed: for randomness that the ranks share.
    """

    op: Any
    process_set: Any
    gradient_predivide_factor: float = 1.0
    backward_passes_per_step: int = 1
    groups: Any = None
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    seed: int = 0

    @classmethod
    def checked(
        cls, hvd: Any, method: Compressor, *, op: Any = None, process_set: Any = None, **others: Any
    ) -> HorovodOptions:
        """Return the options that a user has given.

        Args:
            hvd: a module of Horovod, or another with its functions.
            method: the compression that they go with.
            op, process_set: ``None`` for averages, and for all ranks.

        Raises:
            ConfigError: an option has a value that cannot be honoured.  Groups, and devices, are
                checked by the frameworks, which know what they are made of.
        """
        op = hvd.Average if op is None else op
        process_set = hvd.global_process_set if process_set is None else process_set
        options = cls(op, process_set, **others)
        check_seed(options.seed)
        if is_one_of(op, (hvd.Adasum,)):
            raise ConfigError(
                f"op=Adasum cannot be combined with {method.name}: Adasum needs every rank's dense "
                "update; use op=hvd.Average, or Horovod's own compression"
            )
        if not is_one_of(op, (hvd.Average, hvd.Sum)):
            raise ConfigError(f"op must be hvd.Average or hvd.Sum with {method.name}")
        predivide = options.gradient_predivide_factor
        if not is_number(predivide) or not 0 < predivide < math.inf:
            raise ConfigError(
                f"gradient_predivide_factor must be greater than 0; got {predivide!r}"
            )
        if predivide != 1.0 and op != hvd.Average:
            raise ConfigError(
                "gradient_predivide_factor divides an average in two steps: use it with "
                "op=hvd.Average, or leave it out"
            )
        check_passes(options.backward_passes_per_step)
        check_choice("sparse_as_dense", options.sparse_as_dense, (True, False))
        check_process_set(process_set)
        return options


def check_passes(passes: Any) -> None:
    """Raise ``ConfigError`` unless this is a value for ``backward_passes_per_step``."""
    if not is_whole(passes) or passes < 1:
        raise ConfigError(f"backward_passes_per_step={passes!r}: it must be 1 or more")

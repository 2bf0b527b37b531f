"""Drop-in for ``horovod.torch`` with gradient compression::

    import hvd_compress.torch as hvd

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=..., compression=hvd.DGC)

It has everything that ``horovod.torch`` has.  Horovod's own import line works as well, if this
package is imported too: ``import horovod.torch as hvd; from hvd_compress.torch import DGC``.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("hvd_compress.torch needs PyTorch: pip install torch") from error

from hvd_compress.advisor.auto import Auto
from hvd_compress.config import check_process_set as _check_process_set
from hvd_compress.engines.local import LocalEngine
from hvd_compress.integrations.exports import *  # noqa: F403
from hvd_compress.integrations.exports import SYSTEMS
from hvd_compress.integrations.exports import __all__ as _common
from hvd_compress.integrations.horovod import load_horovod, names_of, rest_of, show_log
from hvd_compress.optimizers.outer import OuterSGD

from .ddp import DDPState, ddp_hook
from .ddp.fsdp import compress_replicas
from .ddp.shard_exchange import compress_shards
from .optimizers import *  # noqa: F403
from .optimizers import __all__ as _optimizers
from .process_groups import engine_over
from .replicas import is_group


def _register(horovod_torch: Any) -> None:
    from .optimizers.registration import register

    register(horovod_torch, _engine)


def _engine(process_set: Any) -> Any:
    from .engine import HorovodEngine

    if is_group(process_set):
        return engine_over(process_set)
    chosen = __getattr__("global_process_set") if process_set is None else process_set
    _check_process_set(chosen)
    return HorovodEngine(_horovod, chosen) if chosen.included() else LocalEngine()


show_log()
_horovod = load_horovod("horovod.torch", "PyTorch", _register)
_ONE_THREAD = threading.RLock()

__all__ = [
    *_common,
    *_optimizers,
    *SYSTEMS,
    "Auto",
    "DDPState",
    "OuterSGD",
    "compress_replicas",
    "compress_shards",
    "ddp_hook",
]

if isinstance(_horovod, ImportError):

    def DistributedOptimizer(  # noqa: N802, Horovod's name
        optimizer: torch.optim.Optimizer,
        named_parameters: Any = None,
        *,
        method: Any = None,
        process_set: Any = None,
        seed: int = 0,
        **options: Any,
    ) -> Any:
        """Return an optimizer that trains by a ``method`` such as ``hvd.DiLoCo(sync_every=100)``,
        among the ranks of a mesh or a process group of ``torch.distributed``.

        Args:
            optimizer, named_parameters, method, seed: as with Horovod.
            process_set: the mesh, such as ``mesh["replica"]``, or the group.

        Raises:
            SetupError: it has other options, ``compression`` among them, which need Horovod.
        """
        if method is None or options or not is_group(process_set):
            return rest_of(_horovod, "DistributedOptimizer", __name__, "PyTorch")
        from .optimizers.local_steps import train_locally

        named: dict[str, Any] = {"named_parameters": named_parameters, "process_set": process_set}
        return train_locally(_engine, optimizer, method, **named, seed=seed)


def __getattr__(name: str) -> Any:
    """Return a name of the systems, which are imported now, or one of ``horovod.torch`` that this
    package does not replace."""
    if name in SYSTEMS:
        with _ONE_THREAD:  # pickle needs one class of a name
            if name not in globals():
                from hvd_compress.systems.codistiller import systems_over

                from .codistillation import TorchCodistiller

                globals().update(systems_over(TorchCodistiller, _engine, __name__))
        return globals()[name]
    return rest_of(_horovod, name, __name__, "PyTorch")


__dir__ = functools.partial(names_of, _horovod, [*__all__, "DistributedOptimizer"])

"""The average of all ranks' models, over Horovod or MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hvd_compress.config import check_process_set
from hvd_compress.errors import ConfigError


def averaging(hvd: Any, module: str) -> Callable[..., None]:
    """Return ``average_parameters`` over the functions of ``hvd``; it belongs to ``module``."""

    @torch.no_grad()
    def average_parameters(parameters: Any, process_set: Any = None) -> None:
        """Average tensors over the ranks, in place and with the same bits on all of them::

            hvd.average_parameters(model.state_dict())

        A collective, for the end of training that leaves ranks with models of their own.  Half
        precisions are added in float32.  Integers, such as the counts of batches of batch
        normalisation, become the largest of all ranks.

        Args:
            parameters: ``model.parameters()``, ``model.named_parameters()`` or
                ``model.state_dict()``; the last has the buffers, too.
            process_set: the ranks that take part; ``None`` for all.
        """
        options = {} if process_set is None else {"process_set": process_set}
        if process_set is not None:
            check_process_set(process_set)
            if not process_set.included():
                return
        for name, x in entries_of(parameters, "average_parameters"):
            if not isinstance(x, torch.Tensor):
                continue
            options["name"] = f"average_parameters.{name}"
            x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
            if x.is_floating_point():
                wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
                x.copy_(hvd.allreduce(wide, op=hvd.Average, **options))
            else:
                x.copy_(hvd.allreduce(x.long(), op=hvd.Max, **options))

    average_parameters.__module__ = module
    average_parameters.__qualname__ = "average_parameters"
    return average_parameters


def entries_of(parameters: Any, call: str) -> list[tuple[str, Any]]:
    """Return tensors with their names, or their places; a state dict may have entries that are no
    tensors.  ``call`` is what they were passed to, for its error."""
    if isinstance(parameters, Mapping):
        return list(parameters.items())
    if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable):
        raise _no_tensors(parameters, call)
    found = []
    for place, entry in enumerate(parameters):
        name, x = entry if isinstance(entry, tuple) and len(entry) == 2 else (str(place), entry)
        if not isinstance(x, torch.Tensor):
            raise _no_tensors(x, call)
        found.append((name, x))
    return found


def _no_tensors(found: Any, call: str) -> ConfigError:
    return ConfigError(
        f"{call} takes model.parameters(), model.named_parameters() or model.state_dict(); got "
        f"{type(found).__name__}"
    )

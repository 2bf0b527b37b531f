"""``DistributedOptimizer`` over MPI, and functions that give all ranks the same initial state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from mpi4py import MPI

from hvd_compress.base import Compressor
from hvd_compress.config import is_one_of
from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.integrations.environment import chosen
from hvd_compress.mpi.engine import MpiEngine
from hvd_compress.mpi.objects import broadcast_bytes
from hvd_compress.mpi.process_sets import ProcessSet, engine_over, global_process_set, rank
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.reduce.nodes import Node
from hvd_compress.systems import TrainingMethod
from hvd_compress.systems.base import train_by_method
from hvd_compress.systems.codistiller import systems_over

from ..codistillation import TorchCodistiller
from ..optimizers.compressed_optimizer import CompressedOptimizer
from ..optimizers.distributed_optimizer import distribute
from ..optimizers.local_steps import LocalStepsOptimizer, broadcast_training_state, train_locally
from ..optimizers.nodes import node_in
from ..optimizers.registration import watch_grad_scaler
from ..state import checkpoint
from . import collectives
from .collectives import Average, Compression, bytes_of, put_bytes


def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor | type[Compressor] | str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    seed: int = 0,
    sparse_step: bool = False,
    method: TrainingMethod | type[TrainingMethod] | None = None,
    nodes: int | str | None = None,
) -> CompressedOptimizer | LocalStepsOptimizer:
    """Return an optimizer whose ``step()`` steps along compressed averages over all ranks::

        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=hvd.DGC(density=0.01)
        )

    A collective: every rank calls it, with the same options.

    Args:
        optimizer: over the model's parameters, of any class but LBFGS.
        named_parameters: ``model.named_parameters()``; names appear in statistics.
        compression: a method such as ``hvd.DGC``, an instance, its name, or a text.
        backward_passes_per_step: number of passes whose gradients add up before they are exchanged.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: divide by it before adding and by the rest afterwards.
        num_groups: deprecated; pass ``groups``.
        groups: parameters that are exchanged together: a number of groups, or lists.
        sparse_as_dense: make sparse gradients dense before they are exchanged.
        process_set: the ranks that take part.
        seed: for randomness that the ranks share.
        sparse_step: averages of top-k's elements are sparse gradients, so that ``torch.optim.SGD``
            writes no other elements of a parameter.
        method: a training method, such as ``hvd.DiLoCo(sync_every=100)``, instead.
        nodes: "auto" or a number; ranks of a node then share one exchange with other nodes.
    """
    options = dict(locals())
    if process_set is global_process_set:
        process_set.rank()  # says if init() is missing
    if method is not None:
        signature = inspect.signature(DistributedOptimizer)
        return train_by_method(functools.partial(train_locally, engine_over), signature, options)
    del options["method"]
    options["compression"] = chosen(compression, Compression.none, rank)
    return distribute(collectives, engine_over, _in_nodes, **options)


def _in_nodes(nodes: Any, predivide: float) -> Node | None:
    """Return this rank's node; see :func:`node_in`."""
    everyone = global_process_set.communicator
    everyone.agree(f"DistributedOptimizer(..., nodes={nodes!r})", always=True)

    def engine_of(groups: list[list[int]]) -> MpiEngine:
        return MpiEngine(_split(everyone, tuple(map(tuple, groups))), predivide=predivide)

    here = everyone.mpi.Split_type(MPI.COMM_TYPE_SHARED)
    hosts = everyone.mpi.allgather(here.allreduce(everyone.rank, MPI.MIN))
    here.Free()
    return node_in(nodes, hosts, engine_of)


@functools.cache  # what is made of a communicator is freed when more is made of the same
def _split(everyone: Communicator, groups: tuple[tuple[int, ...], ...]) -> MPI.Comm:
    color = next(i for i, ranks in enumerate(groups) if everyone.rank in ranks)
    return everyone.mpi.Split(color, everyone.rank)


#: training methods and what belongs to them, by name
SYSTEMS = systems_over(TorchCodistiller, engine_over, "hvd_compress.torch.mpi")


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite all ranks' parameters by those of ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: among all ranks.

    Raises:
        MismatchError: the ranks' parameters differ in shape or dtype; it names the first.
        UnsupportedError: an entry has no bytes to send, such as a sparse tensor; it is named.
    """
    everyone = global_process_set
    for name, tensor in sorted(entries_of(params, "broadcast_parameters"), key=_by_name):
        with everyone.communicator.told(always=True):
            raw = bytes_of(tensor, f"{name!r} of broadcast_parameters")
        what = f"{name!r}: {tensor.dtype}{list(tensor.shape)}"
        broadcast_bytes(raw, root_rank, what, everyone, always=True)
        put_bytes(raw, tensor)


def _by_name(entry: tuple[Any, Any]) -> str:
    return str(entry[0])


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Give all ranks the state of ``root_rank``'s optimizer; of what differs by rank, the mean.

    Args:
        optimizer: plain, or made by ``DistributedOptimizer``.
        root_rank: among all ranks.
        model: what has no gradient yet gets zeros, sparse ones for such embeddings of it.

    Raises:
        MismatchError: the optimizer of ``root_rank`` has other groups of parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer={optimizer!r}: pass an optimizer of torch.optim")
    if isinstance(optimizer, CompressedOptimizer):
        checkpoint.broadcast_optimizer_state(optimizer, root_rank, model)
    elif isinstance(optimizer, LocalStepsOptimizer):
        broadcast_training_state(collectives, optimizer, root_rank)
    else:
        state = optimizer.state_dict() if is_one_of(root_rank, (rank(),)) else None
        found = checkpoint.broadcast_tree(collectives, state, root_rank)
        try:
            optimizer.load_state_dict(found)
        except ValueError as error:
            raise MismatchError(f"the optimizer of rank {root_rank} is another: {error}") from error


watch_grad_scaler()


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

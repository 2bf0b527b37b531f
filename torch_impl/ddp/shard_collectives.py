"""The collectives that FSDP2 calls instead of its own: one object of each for a module.

They are set by ``FSDPModule.set_custom_reduce_scatter`` and ``set_custom_all_gather``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec
from hvd_compress.errors import UnsupportedError
from hvd_compress.stats import Record

from ..amp import current_pass
from ..lost_ranks import naming_lost_ranks
from ..process_groups import all_gather
from .fsdp import ShardedParameter, check_complete, trained_of
from .nodes import NodeGroups
from .shard_hops import Hop
from .shard_rows import RowLayout, check_wire


class Way(NamedTuple):
    """How gradients travel.

    Attributes:
        codec: of what is sent to the rank that adds it up, or with ``nodes`` to the other nodes.
        inside: of what is sent inside a node.
        wire: the dtype of what is not coded; ``None``: that in which FSDP2 reduces.
        beta: of error feedback; ``None`` for none.
        reset_every: the number of steps that errors are kept; ``None``: for ever.
        nodes: ``None``: all ranks are alike.
    """

    codec: Codec | None
    inside: Codec | None
    wire: torch.dtype | None
    beta: float | None
    reset_every: int | None
    nodes: NodeGroups | None


class _Comm:
    """Allocates as FSDP2's own collectives do.

    Args:
        group: FSDP2's group of the module's parameters.
        parts: all of them.
    """

    def __init__(self, group: Any, parts: Sequence[ShardedParameter]) -> None:
        self.of, self.parts = group, parts
        self.ranks: Any = group.mesh_info.shard_process_group
        self.records = {part.name: Record() for part in parts}

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _count(
        self, sent: Mapping[str, int], parts: Sequence[ShardedParameter], itemsize: int
    ) -> None:
        """Count what goes to other ranks, and as much that comes from them."""
        others = dist.get_world_size(self.ranks) - 1
        for part in parts:
            record, elements = self.records[part.name], others * part.elements
            record.steps += 1
            record.elements += elements
            record.elements_sent += elements
            record.dense_bytes += elements * itemsize
            record.bytes_sent += sent.get(part.name, 0)
            record.bytes_received += sent.get(part.name, 0)


class ReduceScatter(_Comm):
    """Sums of the gradients of a module, each rank's own shard.

    They are an all-to-all of codes and a sum in float32, or with nodes one inside the node and one
    between nodes.

    Attributes:
        step: how many there were.
        carried: what has waited when a checkpoint was saved, as an average, of shape (elements,).
    """

    def __init__(
        self,
        group: Any,
        parts: Sequence[ShardedParameter],
        way: Way,
        name: str,
        check: Callable[[], None],
    ) -> None:
        super().__init__(group, parts)
        self._way, self._name, self._check = way, name, check
        self.step = 0
        self.carried: torch.Tensor | None = None
        self._hops: list[Hop] = []
        self._known: Any = None

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._check()
        trained, size = trained_of(self.parts), dist.get_world_size(group)
        check_complete(trained, input_tensor, self._name, size)
        hops = self.hops(input_tensor)
        if self._way.reset_every and self.step and self.step % self._way.reset_every == 0:
            for hop in hops:
                hop.reset()
            self.carried = None
        self.step += 1
        factor = _factor_of(op, size, self.of.gradient_divide_factor)
        x, notes = hops[0](input_tensor.view(size, -1), 1.0 if hops[1:] else factor)
        for hop in hops[1:]:
            x, notes = hop(x, factor)
        for hop in hops:
            hop.settle(notes)
        if self.carried is not None:
            x.add_(self.carried, alpha=size * factor / self._divided_before())
            self.carried.masked_fill_(~notes.isnan(), 0)  # what did not arrive waits on
        output_tensor.copy_(x.view(-1))
        sent: dict[str, int] = {}
        for name, count in (pair for hop in hops for pair in hop.sent().items()):
            sent[name] = sent.get(name, 0) + count
        self._count(sent, trained, input_tensor.element_size())

    def hops(self, like: torch.Tensor | None = None) -> list[Hop]:
        """Return what there is for the parameters that are trained now.  Errors of those that
        were trained before as well stay.

        Args:
            like: a gradient; ``None``: as FSDP2 will reduce it.
        """
        trained, way, nodes = trained_of(self.parts), self._way, self._way.nodes
        if like is None:
            policy, own = self.of.mp_policy, trained[0].of.sharded_param.dtype
            dtype = policy.reduce_dtype or policy.param_dtype or own
            like = torch.empty(0, dtype=dtype, device=self.of.device)
        if self._known == (trained, like.dtype):
            return self._hops
        check_wire(like.dtype, f"gradients of {self._name}")
        wire = way.wire or like.dtype
        if nodes is None:
            hops = [Hop(trained, way.codec, wire, self.ranks, 1, like, way.beta)]
        else:
            count = dist.get_world_size(nodes.between)
            hops = [
                Hop(trained, way.inside, wire, nodes.inside, count, like, way.beta),
                Hop(trained, way.codec, wire, nodes.between, 1, like, way.beta),
            ]
        for old, new in zip(self._hops, hops, strict=False):
            new.carry(old)
        if self._known is not None and self._known[0] != trained:
            self.carried = None
        self._hops, self._known = hops, (trained, like.dtype)
        return hops

    def _divided_before(self) -> int:
        """Return by how much FSDP2 has divided gradients before they come here.  In float16 that is
        about the root of its divisor, against overflow."""
        replicas = getattr(self.of.mesh_info, "replicate_mesh_size", 1)
        divisor = self.of.gradient_divide_factor or replicas * dist.get_world_size(self.ranks)
        before = 1
        while self._known[1] == torch.float16 and divisor % before == 0 and divisor > before**2:
            before *= 2
        return before

    def waiting(self) -> dict[str, torch.Tensor]:
        """Return what waits for this rank's shards, as averages (float32), by name of the coded
        parameters.  A collective."""
        if self._way.beta is None or not trained_of(self.parts):
            return {}
        hops, x = self.hops(), None
        for hop in hops:
            x = hop.waiting(x)
        if x is None:
            return {}
        x = x.view(-1).mul_(self._divided_before() / dist.get_world_size(self.ranks))
        if self.carried is not None:
            x += self.carried
        return {name: x[place.span] for name, place in hops[-1].row.coded.items()}

    def resume(self, waiting: Mapping[str, torch.Tensor], step: int) -> None:
        """Go on with what :meth:`waiting` has returned, on as many ranks or others: the next step
        adds it to its averages."""
        self.step = step
        if not trained_of(self.parts):
            return
        hops = self.hops()
        for hop in hops:
            hop.reset()
        self.carried = torch.zeros(hops[-1].row.elements, device=self.of.device)
        for name, x in waiting.items():
            span = hops[-1].row.coded[name].span
            self.carried[span][: x.numel()] = x.reshape(-1)

    def names(self) -> set[str]:
        """Return the parameters of which something may wait."""
        keeps = self._way.beta is not None and trained_of(self.parts)
        return set(self.hops()[-1].row.coded) if keeps else set()

    def norms(self) -> dict[str, float]:
        """Return the norm of what waits on this rank, by parameter."""
        found: dict[str, float] = {}
        for hop in self._hops:
            for name, norm in hop.norm().items():
                found[name] = (found.get(name, 0.0) ** 2 + norm**2) ** 0.5
        return found


class AllGather(_Comm):
    """The parameters of a module, whole: each rank sends the code of the difference between its
    shard and what the others have of it, ``y = y + decode(code(x - y))``.

    So an error does not grow with a weight, and what one step leaves out the next one sends.  All
    ranks keep y of all shards.  The first time, and after :meth:`forget`, parameters travel as they
    are.  In a backward pass nothing is sent: it goes on with the y of the forward pass.
    """

    def __init__(
        self, group: Any, parts: Sequence[ShardedParameter], codec: Codec, name: str
    ) -> None:
        super().__init__(group, parts)
        self._codec, self._name = codec, name
        self._seen: torch.Tensor | None = None  # y, of shape (ranks, elements)
        self._stream_event: Any = None

    @property
    def is_under_way(self) -> bool:
        """Whether differences are sent next time."""
        return self._seen is not None

    def forget(self) -> None:
        """Send parameters as they are next time, since they are others now."""
        self._seen = None

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        size, elements = dist.get_world_size(group), sum(part.elements for part in self.parts)
        if group is not self.ranks:  # of those to which it was resharded after forward
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        if input_tensor.numel() != elements:
            raise UnsupportedError(
                f"{self._name} gathers something else than its parameters (an extension of FSDP2 "
                "such as float8 weights): leave parameters=... out"
            )
        check_wire(input_tensor.dtype, f"parameters of {self._name}")
        if self._stream_event is not None:  # FSDP2 gathers on several streams
            torch.accelerator.current_stream().wait_event(self._stream_event)
        out = output_tensor.view(size, elements)
        if self._seen is None:
            with naming_lost_ranks(group):
                all_gather(output_tensor, input_tensor, group=group)
            self._row = RowLayout.of(self.parts, self._codec, input_tensor.dtype)
            self._make_runs(input_tensor, size)
            with torch.inference_mode(False):  # training will write into it
                self._seen = out.clone()
            whole = {part.name: part.elements * input_tensor.element_size() for part in self.parts}
            self._sent(whole, input_tensor)
        elif current_pass() < 0:
            self._update(input_tensor, out, group)
            self._sent(self._row.bytes_of(), input_tensor)
        else:
            out.copy_(self._seen)
        if input_tensor.is_cuda:
            self._stream_event = torch.accelerator.current_stream().record_event()
        return None

    def _make_runs(self, like: torch.Tensor, size: int) -> None:
        row, like = self._row, like.new_empty(0, dtype=torch.float32)
        if row.coded:
            self._own = row.runs([0], [0], like)
            starts = [q * row.elements for q in range(size)]
            self._all = row.runs(starts, [q * row.size for q in range(size)], like)

    def _update(self, x: torch.Tensor, out: torch.Tensor, group: Any) -> None:
        row, seen, rank = self._row, self._seen, dist.get_rank(group)
        assert seen is not None
        message = torch.empty(row.size, dtype=torch.uint8, device=x.device)
        row.put_plain(x, message)
        note: Any = 0.0
        if row.coded:
            difference = x.float() - seen[rank].float()
            note = self._own.encode(difference, message)
            message = torch.where(note.isnan(), 0, message)  # which decodes to zeros
            message.view(torch.float32)[0] = note
        arrived = message.new_empty(len(out), row.size)
        with naming_lost_ranks(group):
            all_gather(arrived.view(-1), message, group=group)
        if row.coded:
            whole = seen if seen.dtype == torch.float32 else seen.float()
            self._all.read(arrived.view(-1), whole.view(-1), add=True)
            if whole is not seen:
                seen.copy_(whole)
        out.copy_(seen)
        row.take_plain(arrived, out)
        if row.coded:
            out += arrived.view(torch.float32)[:, :1].to(out.dtype)  # NaN where x is not finite

    def _sent(self, sent: Mapping[str, int], x: torch.Tensor) -> None:
        others = dist.get_world_size(self.ranks) - 1
        sent = {name: others * count for name, count in sent.items()}
        self._count(sent, self.parts, x.element_size())


def _factor_of(op: Any, ranks: int, divided_by: float | None) -> float:
    """Return by how much FSDP2 wants sums multiplied.

    Args:
        op: its reduction.
        divided_by: what users set by ``set_gradient_divide_factor``.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    return 1 / (ranks if op == dist.ReduceOp.AVG or divided_by is None else divided_by)

"""One hop of a reduce-scatter: an all-to-all of codes, and sums in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec

from ..lost_ranks import naming_lost_ranks
from ..process_groups import reduce_scatter
from .fsdp import ShardedParameter
from .shard_rows import RowLayout


class Hop:
    """Sums over the ranks of a group, of rows of numbers.

    Error feedback is that of LoCo (Xie et al., arXiv 2407.04480), ``e = beta e + (1 - beta) (h -
    sent)`` with ``h = g + e``.  The error that waits is ``r = e / (1 - beta)``: all sums of
    gradients equal those that were sent and ``r``, until it is reset.  So r is kept::

        h = g + (1 - beta) r
        r = beta r + h - sent

    It has eight bits per element and a scale for 512 of them (``RESIDUAL`` of ``shard_rows.py``).

    Args:
        parts, codec, wire: see :meth:`RowLayout.of`.
        group: n ranks.
        rows: what each of them gets: the row ``q`` of the input is for rank ``q % n``.
        like: a tensor on the device.
        beta: ``None``: no error feedback.

    Attributes:
        row: the layout of what is sent.
        waits: the codes of r, or ``None``.
    """

    def __init__(
        self,
        parts: Sequence[ShardedParameter],
        codec: Codec | None,
        wire: torch.dtype,
        group: Any,
        rows: int,
        like: torch.Tensor,
        beta: float | None,
    ) -> None:
        self.group, self._ranks, self._rows = group, dist.get_world_size(group), rows
        self.row = row = RowLayout.of(parts, codec, wire)
        self._beta, self._like = beta, like
        self.waits: torch.Tensor | None = None
        if not row.coded:
            return
        own, all_rows = range(rows), range(rows * self._ranks)
        starts = [q * row.elements for q in all_rows]
        # The rows of one receiver are end to end.
        places = [(q % self._ranks * rows + q // self._ranks) * row.size for q in all_rows]
        self._sent = row.runs(starts, places, like)
        self._arriving = row.runs(starts[:rows], [q * row.size for q in own], like)
        if beta is not None:
            self.kept = row.of_what_waits()
            self._kept = self.kept.runs(starts, [q * self.kept.size for q in all_rows], like)
            self.waits = torch.zeros(
                len(all_rows), self.kept.size, dtype=torch.uint8, device=like.device
            )

    def __call__(self, x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of this rank's rows over the ranks, times a factor, of shape (rows,
        elements), in float32.

        The second result is 0, or NaN if a rank had something to code that is not finite.  The
        errors that wait are the old ones until :meth:`settle`.

        Args:
            x: (rows * ranks, elements); it may be overwritten.
        """
        n, k, row = self._ranks, self._rows, self.row
        message = torch.empty(n, k, row.size, dtype=torch.uint8, device=x.device)
        row.put_plain(x.view(k, n, row.elements).transpose(0, 1), message)
        note = None
        if row.coded:
            note = self._encode(x if x.dtype == torch.float32 else x.float(), message)
        message.view(torch.float32)[..., 0] = 0.0 if note is None else note
        arrived = torch.empty_like(message)
        with naming_lost_ranks(self.group):
            dist.all_to_all_single(arrived.view(-1), message.view(-1), group=self.group)
        out = torch.empty(k, row.elements, dtype=torch.float32, device=x.device)
        if row.coded:
            self._arriving.read(arrived.view(-1), out.view(-1), ranks=n)
        row.add_plain(arrived, out)
        notes = arrived.view(torch.float32)[..., 0].sum()
        return out.mul_(notes + factor), notes

    def _encode(self, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1)
        if self._beta is None or self.waits is None:
            return self._sent.encode(flat, message.view(-1))
        waits = torch.empty_like(flat)
        self._kept.read(self.waits.view(-1), waits)
        flat.add_(waits, alpha=1 - self._beta)
        note = self._sent.encode(flat, message.view(-1))
        if self._beta:
            flat.add_(waits, alpha=self._beta)
        self._new = torch.empty_like(self.waits)
        self._fine = self._kept.encode(flat, self._new.view(-1))
        return note

    def settle(self, note: torch.Tensor) -> None:
        """Take over what waits since the last call, unless a step was not finite: on any rank, then
        ``note`` is NaN."""
        if self.waits is not None:
            old, new = self.waits.view(torch.int32), self._new.view(torch.int32)
            torch.where((note + self._fine).isnan(), old, new, out=old)
            del self._new

    def reset(self) -> None:
        """Forget what waits."""
        if self.waits is not None:
            self.waits.zero_()  # which decodes to zeros

    def carry(self, other: Hop) -> None:
        """Take over what waits of parameters that another hop has as well."""
        if self.waits is not None and other.waits is not None:
            for name in self.kept.coded.keys() & other.kept.coded.keys():
                theirs = other.kept.coded[name].bytes
                self.waits[:, self.kept.coded[name].bytes] = other.waits[:, theirs]

    def waiting(self, more: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sums over the ranks of what waits for this rank, of shape (rows, elements), in
        float32.  A collective.

        Args:
            more: what waits elsewhere, as the input of :meth:`__call__`.
        """
        n, k, size = self._ranks, self._rows, self.row.elements
        x = torch.zeros(n * k, size, dtype=torch.float32, device=self._like.device)
        if self.waits is not None:
            self._kept.read(self.waits.view(-1), x.view(-1))
        if more is not None:
            x += more
        x = x.view(k, n, size).transpose(0, 1).contiguous()
        out = x.new_empty(k, size)
        reduce_scatter(out.view(-1), x.view(-1), group=self.group)
        return out

    def norm(self) -> dict[str, float]:
        """Return the norm of what waits on this rank, by parameter."""
        if self.waits is None:
            return {}
        x = self._like.new_zeros(self._ranks * self._rows, self.row.elements, dtype=torch.float32)
        self._kept.read(self.waits.view(-1), x.view(-1))
        return {name: x[:, place.span].norm().item() for name, place in self.kept.coded.items()}

    def sent(self) -> dict[str, int]:
        """Return the bytes that go to other ranks in a step, by parameter."""
        rows = (self._ranks - 1) * self._rows
        return {name: rows * size for name, size in self.row.bytes_of().items()}

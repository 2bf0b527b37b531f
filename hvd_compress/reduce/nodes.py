"""Several ranks in a node, which share the work of an exchange between nodes.

The ranks of a node average their gradients among themselves, uncompressed.  Each keeps a shard of
every tensor: 1/L of the elements, if a node has L ranks.  Ranks with the same shard exchange it
between nodes, by a method with states of the shard alone.  At last a node's ranks give each other
their results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import is_whole
from hvd_compress.engines.base import Engine, asking
from hvd_compress.engines.joining import BucketKey
from hvd_compress.engines.named import NamedEngine
from hvd_compress.errors import ConfigError
from hvd_compress.reduce.buckets import Buckets
from hvd_compress.requests import Alltoall, Collective, Gather
from hvd_compress.sharding import shards_of


class Node:
    """This rank's place in a node.

    Args:
        everyone: an engine over the ranks of all nodes, which compares them.
        inside: an engine over the ranks of this node; all nodes have equally many.
        between: an engine over the ranks with the same place in all nodes.

    Attributes:
        place, ranks: this rank's place in its node, and the number of ranks there.
    """

    def __init__(self, everyone: Engine, inside: Engine, between: Engine) -> None:
        self.everyone, self.inside, self.between = everyone, inside, between
        self.place, self.ranks = inside.rank, inside.size
        if isinstance(inside, NamedEngine):
            inside.moves_early = True  # so that exchanges between nodes begin during backward

    def ask(self, request: Collective) -> Any:
        """Return the reply to a request of the ranks of this node, between exchanges."""
        return self.inside.run("question", asking(request))


def pieces_of(x: Array, ranks: int) -> list[Array]:
    """Return the parts of an array that the ranks of a node have, views if it is contiguous.

    An array with at least as many rows as there are ranks is divided by rows, so that a method
    finds a matrix.  Any other is divided by elements, and some ranks may have none.

    >>> import numpy as np
    >>> [part.tolist() for part in pieces_of(np.arange(6).reshape(3, 2), 2)]
    [[[0, 1]], [[2, 3], [4, 5]]]
    >>> [part.tolist() for part in pieces_of(np.ones((1, 1)), 2)]
    [[], [1.0]]
    """
    by_rows = x.ndim > 1 and len(x) >= ranks
    units = x if by_rows else x.reshape(-1)
    return [units[own] for own in shards_of(len(units), ranks)]


class _Whole(NamedTuple):
    """A gradient that is divided among the ranks of a node; see ``joining.Entry``."""

    name: str
    gradient: Array
    look: BucketKey


class Sharing:
    """Divides gradients among the ranks of a node, and puts results together.

    Args:
        node: where this rank is.
        whole: the gradients of this step so far; emptied at its end.
        take: takes this rank's parts of averages over the node.
        in_place: results may be written into the memory of the gradients.
        options: of :class:`Buckets`.

    Attributes:
        buckets: the assignment of whole gradients to buckets.
    """

    def __init__(
        self,
        node: Node,
        whole: dict[str, Array],
        take: Callable[[dict[str, Array]], None],
        in_place: bool,
        **options: Any,
    ) -> None:
        self._node, self._whole, self._take, self._in_place = node, whole, take, in_place
        self._divided: list[Callable[[Mapping[str, Array]], Generator[Any, Any, Any]]] = []
        self.buckets = Buckets(
            lambda: node.inside, self._enter, self._scatter, watches=False, **options
        )

    def start(self, gradients: Mapping[str, Array]) -> None:
        """Begin to average gradients over the node; never waits for ranks that compute."""
        self._whole.update(gradients)
        self.buckets.start(gradients)

    def spread(self, directions: Mapping[str, Array]) -> dict[str, Array]:
        """Return whole results, given those of this rank's parts."""
        found = dict[str, Array]()
        try:
            for number, gather in enumerate(self._divided):
                self._node.inside.start(f"results.{number}", gather(directions))
            for part in self._node.inside.finish().values():
                found |= part
        except BaseException:
            self.abandon()
            raise
        self._forget()
        return found

    def abandon(self) -> None:
        """Discard everything in flight."""
        self._forget()
        self.buckets.abandon()
        self._node.everyone.abandon()

    def _forget(self) -> None:
        self._whole.clear()
        self._divided.clear()

    def _enter(self, names: Sequence[str]) -> list[Any]:
        entries = []
        for name in names:
            x = self._whole[name]
            kind = backend_of(x).dtype(x), str(getattr(x, "device", ""))
            look = BucketKey(kind, False, x.nbytes, f"{kind[0]} of {tuple(x.shape)}")
            entries.append(_Whole(name, x, look))
        return entries

    def _scatter(self, entries: Sequence[_Whole]) -> Generator[Any, Any, None]:
        """Average a bucket over the node, and hand on this rank's parts of it."""
        alike: dict[Hashable, dict[str, Array]] = {}
        for entry in entries:  # which may be a group of the user's, of several dtypes
            alike.setdefault(entry.look.kind, {})[entry.name] = entry.gradient
        # In the order in which buckets start, which is the same on all ranks.
        self._divided += [functools.partial(self._gather, group) for group in alike.values()]
        for group in alike.values():
            yield from self._averaged(group)

    def _averaged(self, gradients: Mapping[str, Array]) -> Generator[Any, Any, None]:
        first = next(iter(gradients.values()))
        xp, dtype = backend_of(first), backend_of(first).dtype(first)
        cuts, rows = self._cut(gradients.values())
        nothing = xp.zeros(0, first)
        arrived = yield Alltoall([xp.to_bytes(xp.end_to_end(row or [nothing])) for row in rows])
        mine = zip(gradients, (cut[self._node.place] for cut in cuts), strict=True)
        own = {name: part for name, part in mine if xp.size(part)}
        if not own:
            return
        mean = _mean(xp, [xp.from_bytes(raw, dtype, first) for raw in arrived])
        parts = xp.split(mean, [xp.size(part) for part in own.values()])
        averages = zip(own.items(), parts, strict=True)
        found = {name: xp.reshape(x, xp.shape(part)) for (name, part), x in averages}
        self._take(found)

    def _cut(self, arrays: Iterable[Array]) -> tuple[list[list[Array]], list[list[Array]]]:
        """Return the parts of each array, and those of each rank that are not empty."""
        cuts = [pieces_of(x, self._node.ranks) for x in arrays]
        rows = zip(*cuts, strict=True)
        return cuts, [[part for part in row if backend_of(part).size(part)] for row in rows]

    def _gather(
        self, gradients: Mapping[str, Array], directions: Mapping[str, Array]
    ) -> Generator[Any, Any, dict[str, Array]]:
        """Give the ranks of the node each other's results of a bucket."""
        # Results go where gradients are by now, or into copies.
        outs = []
        for x in gradients.values():
            xp = backend_of(x)
            is_out = self._in_place and xp.address(x) is not None
            outs.append(x if is_out else xp.restore(xp.copy(xp.reshape(x, (-1,))), x))
        _, rows = self._cut(outs)
        first = outs[0]
        xp, dtype = backend_of(first), backend_of(first).dtype(first)
        sizes = [sum(map(xp.size, row)) for row in rows]
        own = [directions[name] for name in gradients if name in directions]
        padding = xp.zeros(max(sizes) - sizes[self._node.place], first)
        message = xp.cast(xp.end_to_end([*own, padding]), dtype)
        everyones = yield Gather(xp.to_bytes(message), equal_sizes=True)
        for raw, size, row in zip(everyones, sizes, rows, strict=True):
            if size:
                xp.write_into(row, xp.from_bytes(raw, dtype, first)[:size])
        return dict(zip(gradients, outs, strict=True))


def _mean(xp: Any, rows: Sequence[Array]) -> Array:
    """Return the mean of flat arrays, in their dtype: added in their order, half precisions in
    float32."""
    total = xp.widen(rows[0])
    for row in rows[1:]:
        total = total + xp.widen(row)
    return xp.cast(xp.divided(total, len(rows)), xp.dtype(rows[0]))


def check_nodes(nodes: Any, method: Any = None, others: str = "") -> None:
    """Raise ``ConfigError`` unless this is a value for the option ``nodes``, and the method, if
    given, can exchange shards.  A message about values ends with the ``others``."""
    is_auto = nodes is None or (isinstance(nodes, str) and nodes == "auto")
    if not is_auto and (not is_whole(nodes) or nodes < 1):
        raise ConfigError(
            f"nodes={nodes!r}: pass the number of nodes, of equally many ranks each, nodes=2; or "
            f'nodes="auto", which finds them{others}'
        )
    if method is not None and nodes is not None and method.is_chosen_later:
        raise ConfigError(
            f"compression={method.name!r} measures one exchange of the whole gradient, and "
            "with nodes=... the ranks of a node have one each: name the method, or leave nodes "
            "out"
        )


def table_of(nodes: Any, ranks: Sequence[int], hosts: Sequence[Hashable]) -> list[list[int]]:
    """Return the ranks of each node, in ascending order.

    Args:
        nodes: the number of nodes, which have neighbouring ranks; or "auto".
        ranks: of all nodes.
        hosts: where each of them is, for "auto".

    Raises:
        ConfigError: nodes have different numbers of ranks.
    """
    if nodes != "auto":
        of_a_node, rest = divmod(len(ranks), nodes)
        if rest:
            raise ConfigError(
                f"nodes={nodes}: {len(ranks)} ranks are no {nodes} nodes of equally many ranks each"
            )
        return [list(ranks[i : i + of_a_node]) for i in range(0, len(ranks), of_a_node)]
    by_host: dict[Hashable, list[int]] = {}
    for rank, host in zip(ranks, hosts, strict=True):
        by_host.setdefault(host, []).append(rank)
    if len(sizes := {len(node) for node in by_host.values()}) > 1:
        raise ConfigError(
            f'nodes="auto" found nodes of {" and ".join(map(str, sorted(sizes)))} ranks, and a '
            "rank's shard has its counterpart in each node: start as many ranks on every node, or "
            "leave nodes out"
        )
    return [sorted(node) for node in by_host.values()]

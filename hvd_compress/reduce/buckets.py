"""Buckets: which tensors are sent together, and when."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.engines.base import Engine
from hvd_compress.engines.joining import BucketKey, Entry
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.requests import Gather, Request
from hvd_compress.times import begin_phase, watched
from hvd_compress.wire.content import decode_bytes, encode_bytes

#: a bucket is full when the gradients in it have that many bytes, uncompressed
BUCKET_BYTES = 25 * 2**20
_PLAN = "plan of the buckets"
#: that of a bucket
Exchange: TypeAlias = Generator[Request, Any, Any]


class Planned:
    """A bucket of the plan: its tensors, and the number of those that have not come yet in this
    step.

    ``missing`` is counted by :meth:`Buckets.start`.  ``unready`` tensors, not known to be ready,
    are counted down by whoever watches them.
    """

    __slots__ = ("missing", "names", "unready")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.missing = self.unready = len(names)


class Buckets:
    """Sends each bucket as soon as all its tensors are ready, while backward goes on with others.

    Buckets are planned after the first step, and again when tensors or their requests change.
    Neighbours in the order of rank 0's gradients make one, if they have one kind of request, dtype
    and device.  All ranks send buckets in that order.  A step sends at its end what is not planned,
    and buckets of which a tensor does not come.

    Tensors with one ``BucketKey.together`` are in one bucket, whatever its size and ``groups``.  If
    sums depend on an element's place, neighbours are those of ``names``.  A run that goes on from a
    checkpoint then has the same bits as one that was never interrupted.

    Args:
        engine: returns the current engine; elastic training changes it.
        enter: returns the entries of named tensors; see :mod:`hvd_compress.engines.joining`.
        exchange: returns the exchange of such entries.
        nbytes: bytes of gradients, uncompressed, with which a bucket is full.
        groups: names of tensors that are sent together; all others are sent one by one.
        same_order: all ranks start tensors in the same order, so rank 0 need not send its own.
        names: tensors in an order that is known beforehand, the first ones ready first.
        go_on: returns the exchange of a bucket that has the entries of the last step, or ``None``.
        watches: the time of each bucket is counted.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        enter: Callable[[Sequence[str]], Sequence[Entry]],
        exchange: Callable[[Sequence[Any]], Exchange],
        nbytes: int = BUCKET_BYTES,
        *,
        groups: Sequence[Sequence[str]] | None = None,
        same_order: bool = False,
        names: Sequence[str] = (),
        go_on: Callable[[tuple[str, ...]], Exchange | None] = lambda names: None,
        watches: bool = True,
    ) -> None:
        if nbytes < 1:
            raise ConfigError(f"bucket_bytes={nbytes}: at least 1")
        self._engine, self._enter, self.nbytes = engine, enter, nbytes
        self._exchange, self._go_on, self._watches = exchange, go_on, watches
        self._groups = groups
        self._same_order = same_order
        self.plan: list[tuple[str, ...]] = []
        self._buckets: list[Planned] = []
        self._digest: str | None = None
        self.bucket_of: dict[str, Planned] = {}
        self.next: Planned | None = None
        self._planned: dict[str, BucketKey] = {}
        self._places = {name: i for i, name in enumerate(names)}
        self._reset()

    def _reset(self) -> None:
        self._started: dict[str, None] = {}  # names in this step, in the order in which they came
        self._entries: dict[str, Entry] = {}  # of those that do not go on as in the last step
        self._sent: set[str] = set()
        for bucket in self._buckets:
            bucket.missing = bucket.unready = len(bucket.names)
        self._left = iter(self._buckets)
        self.next = next(self._left, None)

    @property
    def digest(self) -> str:
        """The plan as a text, which must be the same on all ranks."""
        if self._digest is None:
            text = repr(self.plan).encode()
            self._digest = f"{len(self.plan)}, {hashlib.sha256(text).hexdigest()[:8]}"
        return self._digest

    def start(self, names: Iterable[str]) -> None:
        """Take tensors whose gradients are ready, and send every bucket that is complete; never
        waits."""
        for name in names:
            if name in self._started:
                raise ConfigError(f"{name!r} was started twice in one step")
            self._started[name] = None
            if (its := self.bucket_of.get(name)) is not None:
                its.missing -= 1
        while (bucket := self.next) is not None and not bucket.missing:
            if (exchange := self._go_on(bucket.names)) is not None:
                self._launch(bucket.names, exchange)
            else:
                self._begin(bucket.names)
                self._send([name for name in bucket.names if self._is_as_planned(name)])
            self.next = next(self._left, None)
        if self._sent:
            self._engine().poll()

    def finish(self, like: Array) -> list[Any]:
        """Send all remaining buckets, wait for all, and return what their exchanges return.

        Args:
            like: an array; messages in which rank 0 sends its order are arrays of this kind.
        """
        engine = self._engine()
        # Where everything has left already, the order does not matter here.
        is_open = len(self._sent) < len(self._started)
        names = self._sorted() if is_open else list(self._started)
        if len(self._sent | self._entries.keys()) < len(self._started):
            self._begin([n for n in names if n not in self._entries and n not in self._sent])
        engine.check_step(
            lambda: [f"{name} by {self._look(name).first}" for name in self._sorted()],
            # A rank that has nothing says so, where others may have something.
            planned=bool(self.bucket_of) and self.bucket_of.keys() >= self._started.keys(),
            like=like,
        )
        while (bucket := self.next) is not None:  # some of it did not come in this step
            here = [self._entries[name] for name in bucket.names if name in self._entries]
            self._send([entry.name for entry in here if not entry.look.together])
            self.next = next(self._left, None)
        for names_of_one in self._split([name for name in names if name not in self._sent]):
            self._send(names_of_one)
        begin_phase("wait")
        parts = engine.finish()
        begin_phase("other")
        if self._entries or len(names) < len(self._planned):
            before, self._planned = self._planned, {name: self._look(name) for name in names}
            kinds = ({n: look.kind for n, look in x.items()} for x in (before, self._planned))
            if next(kinds) != next(kinds):
                self._make_plan(engine, self._sorted(), like)
        self._reset()
        return list(parts.values())

    def _sorted(self) -> list[str]:
        """The names of what was started, in the same order on all ranks."""
        if self._same_order:
            return list(self._started)
        last = len(self._places)
        return sorted(self._started, key=lambda name: (self._places.get(name, last), name))

    def forget(self) -> None:
        """Forget the plan: to be called at the same time on all ranks, since ranks with a plan and
        ranks without one submit different collectives."""
        self.plan, self._buckets, self.bucket_of = [], [], {}
        self._planned, self._digest = {}, None
        self._reset()

    def abandon(self) -> None:
        """Discard everything in flight.  The plan stays: the other ranks may have theirs still."""
        self._reset()
        self._engine().abandon()

    def _begin(self, names: Iterable[str]) -> None:
        if names := list(names):
            self._entries.update(zip(names, self._enter(names), strict=True))

    def _send(self, names: Sequence[str]) -> None:
        if names:
            self._launch(names, self._exchange([self._entries[name] for name in names]))

    def _launch(self, names: Sequence[str], exchange: Exchange) -> None:
        self._sent.update(names)
        exchange = watched(names, exchange) if self._watches else exchange
        self._engine().start(label_of(names), exchange)

    def _look(self, name: str) -> BucketKey:
        return self._entries[name].look if name in self._entries else self._planned[name]

    def _is_as_planned(self, name: str) -> bool:
        """Whether a tensor may leave with its bucket: where all that request the same belong
        together, only if the plan was made for such requests."""
        look = self._entries[name].look
        return not look.together or self._planned[name].kind == look.kind

    def _make_plan(self, engine: Engine, names: list[str], like: Array) -> None:
        has_order = len(names) > 1 and not self._same_order
        if has_order and engine.sums_in_rank_order and engine.size > 1:
            order = _order_of_rank_0([names.index(n) for n in self._started], like)
            names = [names[i] for i in engine.run(_PLAN, order)]
        self.plan, self._digest = self._split(names), None
        self._buckets = [Planned(bucket) for bucket in self.plan]
        self.bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}

    def _split(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Buckets of the names, in the order in which they are full."""
        if self._groups is not None:
            by_request: dict[Hashable, list[str]] = {}
            for name in names:
                if (look := self._look(name)).together:
                    by_request.setdefault(look.kind, []).append(name)
            free = set(names).difference(*by_request.values())
            together = [tuple(n for n in group if n in free) for group in self._groups]
            grouped = set(itertools.chain(*together))
            rest = ((n,) for n in names if n in free - grouped)
            return [*filter(None, together), *map(tuple, by_request.values()), *rest]
        buckets: list[tuple[str, ...]] = []
        open_buckets: dict[Hashable, list[str]] = {}
        sizes: dict[Hashable, int] = {}
        for name in names:
            look = self._look(name)
            bucket = open_buckets.setdefault(look.kind, [])
            bucket.append(name)
            sizes[look.kind] = sizes.get(look.kind, 0) + look.nbytes
            if sizes[look.kind] >= self.nbytes and not look.together:
                buckets.append(tuple(bucket))
                del open_buckets[look.kind], sizes[look.kind]
        return [*buckets, *map(tuple, open_buckets.values())]


def label_of(names: Sequence[str]) -> str:
    """Return what a bucket is called, by its tensors."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _order_of_rank_0(own: Sequence[int], like: Array) -> Generator[Request, Any, list[int]]:
    xp = backend_of(like)
    frame = encode_bytes(np.array(own, "<i8").view(np.uint8), _PLAN)
    everyones = yield Gather(xp.from_numpy(frame, like), equal_sizes=True)
    first = xp.to_numpy(everyones[0])
    order = decode_bytes(first, _PLAN, sender="rank 0", size=8 * len(own)).view("<i8").tolist()
    if sorted(order) != sorted(own):
        raise PayloadError(f"bad {_PLAN} from rank 0: {order} are not its {len(own)} tensors")
    return order

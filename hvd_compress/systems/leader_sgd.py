"""Leader SGD (Teng et al., 2019): ranks are pulled to the one with the smallest loss."""

from __future__ import annotations

import dataclasses
import math
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import check_between, check_whole, checked
from hvd_compress.errors import ConfigError
from hvd_compress.requests import Broadcast, Gather, Neighbors
from hvd_compress.systems.base import (
    Arrays,
    State,
    StepContext,
    Steps,
    TrainingMethod,
    all_finite,
    apart,
    check_groups,
    groups_of,
    like,
    widened,
)
from hvd_compress.wire.content import decode_bytes, encode_bytes

_REPORT = struct.Struct("<dq")  # a rank's loss and its node
_LOSS, _LEADER = "loss", "parameters of the group's leader"


class Leaders(NamedTuple):
    """The ranks that lead: all ranks, and the group of this rank.  Nobody ``is_led`` by the latter
    if the losses of the whole group are NaN or Inf."""

    of_all: int
    of_group: int
    group: tuple[int, ...]
    is_led: bool


@dataclasses.dataclass(frozen=True)
class LeaderSGD(TrainingMethod, name="leader_sgd"):
    """Pull every rank to the one with the smallest loss, in its group and among all::

        method=hvd.LeaderSGD(global_every=16, local_every=4)

    With the leader z_j of a rank's group, z of all, and the parameters x before the step::

        x = x - l (x - z_j) - g (x - z), and the local step from the gradient at the old x

    Every ``local_every`` steps leaders are chosen by their mean losses, and l = ``local_pull``.  In
    between l = ``local_drift`` / ``local_every``, to the last leader.  The same holds for g.

    State: ``leader`` z and ``group_leader`` z_j, but not on the leaders.

    Args:
        global_every, local_every: the periods in steps; the first is a multiple of the second.
        global_pull, local_pull, global_drift, local_drift: shares of the distance, from 0 to 1.
        groups: the number of ranks of a group; ``None``: the ranks of each node.

    Reference: Teng et al., NeurIPS 2019.

    >>> ranks = Ranks(LeaderSGD(global_every=1, local_every=1, local_pull=0), size=2)
    >>> ranks.before_step([{"w": np.zeros(1)}, {"w": np.ones(1)}], losses=[0.5, 0.2])[0]["w"]
    array([0.1])
    """

    per_rank = frozenset({"leader", "group_leader"})

    global_every: int = 16
    local_every: int = 4
    global_pull: float = 0.1
    local_pull: float = 0.1
    global_drift: float = 0.1
    local_drift: float = 0.1
    groups: int | None = checked(check_groups, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("local_every", self.local_every, 1)
        check_whole("global_every", self.global_every, 1)
        if self.global_every % self.local_every:
            raise ConfigError(
                f"global_every={self.global_every} must be a multiple of "
                f"local_every={self.local_every}"
            )
        for option in ("global_pull", "local_pull", "global_drift", "local_drift"):
            check_between(option, getattr(self, option), 0, 1)

    @property
    def loss_window(self) -> int:  # type: ignore[override]
        return self.local_every

    @property
    def pulls(self) -> dict[str, tuple[float, float]]:
        """The share of the distance to the leader under each key of the state: when it is new, and
        later."""
        return {
            "group_leader": (self.local_pull, self.local_drift / self.local_every),
            "leader": (self.global_pull, self.global_drift / self.global_every),
        }

    def before_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        pulls = {key: drift for key, (_, drift) in self.pulls.items()}
        if context.step % self.local_every == 0:
            first = next(iter(parameters.values()), context.like)
            frame = encode_bytes(self._report(context), _LOSS)
            frames = yield Gather(backend_of(first).from_numpy(frame, first), equal_sizes=True)
            reports = [_read(each, rank) for rank, each in enumerate(frames)]
            leaders = self._elected(reports, context.rank)
            if leaders is None:
                return parameters, state
            flat, state = pack(parameters), dict(state)
            if self.local_pull or self.local_drift:
                found = yield from self._from_group(flat, leaders, context.rank)
                if leaders.is_led:
                    leads = leaders.of_group == context.rank
                    _keep(state, "group_leader", None if leads else unpack(found, parameters))
                    pulls["group_leader"] = self.local_pull
            if context.step % self.global_every == 0 and (self.global_pull or self.global_drift):
                found = []
                for part in flat:
                    found.append((yield Broadcast(part, leaders.of_all)))
                leads = leaders.of_all == context.rank
                _keep(state, "leader", None if leads else unpack(found, parameters))
                pulls["leader"] = self.global_pull
        pulls = {key: pull for key, pull in pulls.items() if pull and key in state}
        if not pulls:
            return parameters, state
        pulled = {}
        for name, x in parameters.items():
            wide = widened(x)
            change = sum(
                (wide - widened(state[key][name])) * pull
                for key, pull in pulls.items()
                if name in state[key]  # it may be trained only since the leader was chosen
            )
            pulled[name] = like(wide - change, x)
        return pulled, state

    def after_step(self, parameters: Arrays, state: State, context: StepContext) -> Steps:
        # The gradients of before the step are NaN, too, so it would have led there again.
        if context.step % self.local_every == 0 and not all_finite(parameters):
            for key in ("group_leader", "leader"):
                leader = state.get(key, {})
                if leader.keys() >= parameters.keys() and all_finite(leader):
                    warnings.warn(
                        f"NaN or Inf in the parameters of this rank in step {context.step}: it "
                        "goes on from those of its leader",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return {name: apart(leader[name], x) for name, x in parameters.items()}, state
        return parameters, state
        yield

    def _report(self, context: StepContext) -> bytes:
        losses = [float(loss) for loss in context.losses]
        mean = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf
        return _REPORT.pack(mean, zlib.crc32(context.node.encode()))

    def _elected(self, reports: Sequence[tuple[float, int]], rank: int) -> Leaders | None:
        """Return the leaders, given all ranks' losses and nodes; of equal losses the first rank's
        is the smallest."""
        losses = [loss for loss, _ in reports]
        everyone = range(len(reports))
        of_all = min(everyone, key=losses.__getitem__)
        if losses[of_all] == math.inf:
            return None
        if self.groups is None:
            group = tuple(r for r in everyone if reports[r][1] == reports[rank][1])
        else:
            group = next(g for g in groups_of(self.groups, len(reports)) if rank in g)
        of_group = min(group, key=lambda r: (losses[r], r))
        return Leaders(of_all, of_group, group, losses[of_group] != math.inf)

    def _from_group(self, flat: Sequence[Array], leaders: Leaders, rank: int) -> Any:
        """Return the parameters of the group's leader."""
        leads = rank == leaders.of_group
        targets = tuple(r for r in leaders.group if r != rank) if leads else ()
        sources = () if leads else (leaders.of_group,)
        found = []
        for part in flat:
            wide = widened(part)  # NumPy, through which bytes go, has no bfloat16
            xp = backend_of(wide)
            frame = encode_bytes(xp.to_numpy(wide).view(np.uint8), _LEADER)
            theirs = yield Neighbors(xp.from_numpy(frame, wide), targets, sources)
            if not leads:
                part = like(_values(theirs[0], wide, leaders.of_group), part)
            found.append(part)
        return found


def _keep(state: State, key: str, leader: Arrays | None) -> None:
    """Keep the parameters of a leader; ``None``: this rank is the leader."""
    if leader is None:
        state.pop(key, None)
    else:
        state[key] = leader


def pack(arrays: Arrays) -> list[Array]:
    """Return all arrays end to end, one flat array for each dtype."""
    parts: dict[str, list[Array]] = {}
    for x in arrays.values():
        xp = backend_of(x)
        parts.setdefault(xp.dtype(x), []).append(xp.reshape(x, (xp.size(x),)))
    return [backend_of(part[0]).concat(part) for part in parts.values()]


def unpack(flat: Sequence[Array], shapes: Arrays) -> Arrays:
    """Undo :func:`pack`, given arrays of the same names, shapes and dtypes."""
    names: dict[str, list[str]] = {}
    for name, x in shapes.items():
        names.setdefault(backend_of(x).dtype(x), []).append(name)
    found: Arrays = {}
    for part, own in zip(flat, names.values(), strict=True):
        xp = backend_of(part)
        sizes = [xp.size(shapes[name]) for name in own]
        for name, piece in zip(own, xp.split(part, sizes), strict=True):
            found[name] = xp.reshape(piece, xp.shape(shapes[name]))
    return {name: found[name] for name in shapes}


def _read(frame: Array, rank: int) -> tuple[float, int]:
    raw = backend_of(frame).to_numpy(frame)
    report = decode_bytes(raw, _LOSS, sender=f"rank {rank}", size=_REPORT.size)
    return _REPORT.unpack(report.tobytes())


def _values(frame: Array, like: Array, rank: int) -> Array:
    """Return the values of a leader, as many as ``like`` has."""
    xp = backend_of(like)
    dtype = np.dtype(xp.dtype(like))
    size = xp.size(like) * dtype.itemsize
    raw = decode_bytes(xp.to_numpy(frame), _LEADER, sender=f"rank {rank}", size=size)
    return xp.from_numpy(raw.view(dtype), like)

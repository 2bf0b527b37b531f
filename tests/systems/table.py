"""The table of systems: each with the promises that the laws hold it to."""

from __future__ import annotations

import dataclasses
from typing import Any

from hvd_compress.systems import graphs
from hvd_compress.systems.graphs import DecentralizedMethod
from hvd_compress.systems.rounds import (
    EASGD,
    DiLoCo,
    LeaderSGD,
    LocalSGD,
    OuterSGD,
    SparseLoCo,
)
from hvd_compress.systems.servers import Rules
from hvd_compress.systems.teachers import Codistillation
from tests.systems.ranks import Served, Taught, Trained

LEADERS = {"local_every": 2, "global_every": 4}
TOP_K = "topk:density=0.5"


@dataclasses.dataclass(frozen=True)
class Row:
    """A system, with short periods.

    Attributes:
        method: the options.
        ranks: runs them; see :mod:`tests.systems.ranks`.
        keeps_mean: the mean of the ranks moves as if there were none but their mean gradient.
        equal_after: the period after which all ranks are equal; 0 if they never need to be.
        starts_equal: ranks that begin apart are told.
        alone: the method of a single rank, which trains as plain SGD does; ``None`` if it does not.
        resumes: it has checkpoints.
        has_models: each rank has a model of its own, whose NaN is its own.
    """

    method: Any
    ranks: Any = Trained
    keeps_mean: bool = False
    equal_after: int = 0
    starts_equal: bool = False
    alone: Any = None
    resumes: bool = True
    has_models: bool = False

    def __repr__(self) -> str:
        return repr(self.method)


def _local(every: int, **options: Any) -> Row:
    method = LocalSGD(sync_every=every, **options)
    return Row(method, equal_after=every, alone=method, keeps_mean="compression" not in options)


def _outer(method: Any, equal_after: int = 2) -> Row:
    return Row(method, equal_after=equal_after, starts_equal=True)


def _leaders(**options: Any) -> Row:
    return Row(LeaderSGD(**LEADERS, **options), alone=LeaderSGD(**LEADERS))


def _graph(cls: type[DecentralizedMethod]) -> Row:
    return Row(cls(), alone=cls("complete"), keeps_mean=True)


def _taught(exchange: str, **options: Any) -> Row:
    method = Codistillation(exchange, **options)
    is_now = options.get("every", 1) == 1
    return Row(method, Taught, keeps_mean=is_now, alone=method, has_models=True)


def _served(mode: str = "sync", **options: Any) -> Row:
    rules, is_sync, is_coded = Rules(mode, **options), mode == "sync", "compression" in options
    return Row(
        rules,
        Served,
        keeps_mean=is_sync and not is_coded,
        equal_after=int(is_sync and not is_coded),
        alone=None if is_coded else rules,
        resumes=False,
    )


ROUNDS = (
    _local(2, start=2),
    dataclasses.replace(_local(2, compression=TOP_K), equal_after=2, starts_equal=True, alone=None),
    Row(LocalSGD(2, compression=TOP_K, unsent="stays"), keeps_mean=True, starts_equal=True),
    _outer(DiLoCo(sync_every=2)),
    _outer(DiLoCo(sync_every=2, compression="linear")),
    _outer(DiLoCo(sync_every=2, compression="powersgd:rank=1,min_compression_rate=1")),
    _outer(DiLoCo(OuterSGD(0.7, 0.5), sync_every=4, fragments=2, delay=1, mix=0.5), 0),
    _outer(SparseLoCo(sync_every=2, density=0.5)),
    _leaders(),
    _leaders(groups=2),
    _leaders(groups=1),
    *(Row(EASGD(sync_every=2, **more), starts_equal=True) for more in ({}, {"compression": TOP_K})),
)
GRAPHS = tuple(map(_graph, graphs.METHODS.values()))
TEACHERS = (
    _taught("predictions"),
    _taught("predictions", every=3, burn_in=1),
    _taught("checkpoints", every=1),
    _taught("checkpoints", every=4, weight=0.5),
)
SERVERS = (
    _served(),
    _served(compression=TOP_K),
    _served("async"),
)
TABLE = (*ROUNDS, *GRAPHS, *TEACHERS, *SERVERS)

"""The node of a rank of ``DistributedOptimizer``, with engines inside and between nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hvd_compress.base import Compressor
from hvd_compress.engines.base import Engine
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError, SetupError
from hvd_compress.integrations.options import HorovodOptions
from hvd_compress.reduce.nodes import Node, check_nodes, table_of

#: Horovod's, by their ranks: it has none twice, and optimizers of one program share them
_sets: dict[tuple[int, ...], Any] = {}


def check_options(
    nodes: Any, method: Compressor, options: HorovodOptions, hvd: Any, sparse_step: bool
) -> None:
    """Raise ``ConfigError`` if ``nodes`` is no value for that option, or other options do not go
    with it."""
    check_nodes(nodes, method)
    refused = (
        (options.op != hvd.Average, "write op=hvd.Average"),
        (options.process_set is not hvd.global_process_set, "leave process_set out"),
        (sparse_step, "leave sparse_step out"),
        (method.partner is not None, f"{method.name} needs whole parameters, take another method"),
    )
    for is_given, advice in refused:
        if nodes is not None and is_given:
            raise ConfigError(f"nodes={nodes!r} averages over all ranks, in parts: {advice}")


def node_in(
    nodes: Any, hosts: Sequence[Hashable], engine_of: Callable[[list[list[int]]], Engine]
) -> Node | None:
    """Return this rank's node; ``None`` if each has one rank.  A collective of all ranks.

    Args:
        nodes: "auto" or a number.
        hosts: where each rank is.
        engine_of: makes an engine over this rank's group, given the groups of all ranks.

    Raises:
        ConfigError: nodes have different numbers of ranks.
    """
    table = table_of(nodes, range(len(hosts)), hosts)
    if len(table[0]) == 1:
        return None
    columns = [list(column) for column in zip(*table, strict=True)]
    between = engine_of(columns) if len(table) > 1 else LocalEngine()
    return Node(engine_of([[*range(len(hosts))]]), engine_of(table), between)


def over_horovod(
    hvd: Any, make_engine: Callable[[Any, float], Engine], nodes: Any, predivide: float
) -> Node | None:
    """Return this rank's node, with engines over process sets; see :func:`node_in`.

    Args:
        make_engine: of a process set and a predivide factor.

    Raises:
        MismatchError: the ranks have given different ``nodes``.
        SetupError: Horovod was started without dynamic process sets.
    """
    # Ranks without nodes compare themselves in their first step, which this would wait for.
    everyone = make_engine(hvd.global_process_set, predivide)
    everyone.agree({"nodes": str(nodes)}, torch.empty(0))
    everyone.finish()
    hosts = hvd.allgather(torch.tensor([hvd.cross_rank()]), name="hvd_compress.hosts").tolist()

    def engine_of(groups: list[list[int]]) -> Engine:
        sets = [_set_of(hvd, ranks, nodes) for ranks in groups]
        return make_engine(next(each for each in sets if each.included()), predivide)

    return node_in(nodes, hosts, engine_of)


def _set_of(hvd: Any, ranks: list[int], nodes: Any) -> Any:
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    own = _sets.setdefault(tuple(ranks), hvd.ProcessSet(ranks))
    try:
        return hvd.add_process_set(own)  # also if hvd.shutdown() has removed it since
    except ValueError as error:
        if own.process_set_id is not None and "duplicate" in str(error):
            return own
        raise SetupError(
            f"nodes={nodes!r} makes process sets, such as {ranks}, which Horovod refuses: {error} "
            'Call hvd.init(process_sets="dynamic"), or set HOROVOD_DYNAMIC_PROCESS_SETS=1, and '
            "make none of these ranks yourself"
        ) from None

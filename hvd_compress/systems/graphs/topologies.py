"""Topologies: graphs for any number of ranks, made by networkx."""

from __future__ import annotations

import abc
import ast
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from hvd_compress.config import (
    Configurable,
    as_tuple,
    build,
    check_choice,
    is_whole,
    lookup,
)
from hvd_compress.errors import ConfigError, SetupError
from hvd_compress.systems.graphs.matrices import (
    check_brings_together,
    check_doubly_stochastic,
    equal_in_weights,
    metropolis_hastings,
)


def networkx() -> Any:
    """Return the library, which is imported when a graph is made."""
    try:
        import networkx
    except ImportError as error:
        raise SetupError(
            "topologies need networkx: pip install 'hvd_compress[decentralized]', or networkx"
        ) from error
    return networkx


class Topology(Configurable, abc.ABC, kind="graph"):
    """A graph for any number of ranks, with its combination matrix.

    Undirected graphs have Metropolis-Hastings weights, directed ones equal weights, unless a
    subclass says otherwise in :meth:`combination`.  Steps count from 0 here, and matrices are
    float64.

    Raises:
        SetupError: networkx, which makes the graphs, is not installed.

    >>> import dataclasses
    >>> import networkx
    >>> @dataclasses.dataclass(frozen=True)
    ... class Wheel(Topology):
    ...     def edges(self, size, step):
    ...         return networkx.wheel_graph(size)
    >>> sorted(Wheel().graph(5).neighbors(1))
    [0, 2, 4]
    """

    @abc.abstractmethod
    def edges(self, size: int, step: int) -> Any:
        """Return a ``networkx.Graph`` or ``DiGraph`` of the nodes 0 to size - 1, whose edges lead
        from senders to receivers; loops are left out."""

    def period(self, size: int) -> int:
        """Return after how many steps the graph repeats."""
        return 1

    def combination(self, graph: Any) -> np.ndarray:
        """Return the weights of one of the graphs."""
        return equal_in_weights(graph) if graph.is_directed() else metropolis_hastings(graph)

    def graph(self, size: int, step: int = 0) -> Any:
        """Return the graph of a step.

        Raises:
            ConfigError: it is not connected, over all steps of a period.
        """
        return _graphs(self, size)[step % self.period(size)].copy()

    def weights(self, size: int, step: int = 0) -> np.ndarray:
        """Return the combination matrix of a step, (size, size), doubly stochastic.

        Raises:
            ConfigError: the graph is not connected, or its weights are not doubly stochastic.
        """
        return _weights(self, size)[step % self.period(size)].copy()


@functools.lru_cache(maxsize=256)
def _graphs(topology: Topology, size: int) -> list[Any]:
    """Return the graphs of a period."""
    nx = networkx()
    if not is_whole(size) or size < 1:
        raise ConfigError(f"a topology needs a number of ranks from 1; got {size!r}")
    graphs = [topology.edges(size, step) for step in range(topology.period(size))]
    for graph in graphs:
        graph.add_nodes_from(range(size))
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))
        if set(graph) != set(range(size)):
            raise ConfigError(f"{topology!r} has nodes beyond the {size} ranks 0 to {size - 1}")
    whole = nx.compose_all(graphs)
    connected = nx.is_strongly_connected if whole.is_directed() else nx.is_connected
    if not connected(whole):
        raise ConfigError(
            f"{topology!r} is not connected with {size} ranks, which could never agree: add edges, "
            "or for a random graph choose a larger p or another seed"
        )
    return graphs


@functools.lru_cache(maxsize=256)
def _weights(topology: Topology, size: int) -> list[np.ndarray]:
    found = [topology.combination(graph) for graph in _graphs(topology, size)]
    for w in found:
        check_doubly_stochastic(w)
        check_brings_together(w)
    return found


@dataclasses.dataclass(frozen=True)
class Line(Topology, name="line"):
    """Each rank has the previous and the next rank.

    >>> sorted(Line().graph(4).edges())
    [(0, 1), (1, 2), (2, 3)]
    """

    def edges(self, size: int, step: int) -> Any:
        return networkx().path_graph(size)


@dataclasses.dataclass(frozen=True)
class Cycle(Topology, name="cycle"):
    """A line whose ends meet.

    >>> sorted(Cycle().graph(4).edges())
    [(0, 1), (0, 3), (1, 2), (2, 3)]
    """

    def edges(self, size: int, step: int) -> Any:
        return networkx().cycle_graph(size)


@dataclasses.dataclass(frozen=True)
class Grid(Topology, name="grid"):
    """Ranks row by row in a rectangle.

    Args:
        rows: the number of rows, which divides that of ranks; ``None`` for as square a rectangle as
            there is.

    >>> sorted(Grid(rows=2).graph(6).edges())
    [(0, 1), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (4, 5)]
    """

    rows: int | None = None
    _periodic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and (not is_whole(self.rows) or self.rows < 1):
            raise ConfigError(f"rows must be a whole number from 1, or None; got {self.rows!r}")

    def edges(self, size: int, step: int) -> Any:
        rows = self.rows or max(r for r in range(1, int(size**0.5) + 1) if size % r == 0)
        if size % rows:
            raise ConfigError(f"rows={rows} do not divide {size} ranks")
        nx, columns = networkx(), size // rows
        grid = nx.grid_2d_graph(rows, columns, periodic=self._periodic)
        return nx.relabel_nodes(grid, lambda place: place[0] * columns + place[1])


@dataclasses.dataclass(frozen=True)
class Torus(Grid, name="torus"):
    """A grid whose opposite sides meet.

    Args:
        rows: as for :class:`Grid`.

    >>> sorted(Torus().graph(9).neighbors(0))
    [1, 2, 3, 6]
    """

    _periodic: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Star(Topology, name="star"):
    """All other ranks have rank 0 only.

    >>> sorted(Star().graph(4).edges())
    [(0, 1), (0, 2), (0, 3)]
    """

    def edges(self, size: int, step: int) -> Any:
        return networkx().star_graph(size - 1)


@dataclasses.dataclass(frozen=True)
class Complete(Topology, name="complete"):
    """Every rank has all others.

    >>> Complete().weights(4)[0]
    array([0.25, 0.25, 0.25, 0.25])
    """

    def edges(self, size: int, step: int) -> Any:
        return networkx().complete_graph(size)


@dataclasses.dataclass(frozen=True)
class StaticExponential(Topology, name="exponential"):
    """Rank i sends to the ranks i + 1, i + 2, i + 4 ..., modulo their number.

    >>> sorted(StaticExponential().graph(8).successors(0))
    [1, 2, 4]
    """

    def edges(self, size: int, step: int) -> Any:
        hops = [1 << k for k in range(_rounds(size))]
        return networkx().DiGraph([(i, (i + hop) % size) for i in range(size) for hop in hops])


@dataclasses.dataclass(frozen=True)
class OnePeerExponential(Topology, name="one_peer"):
    """Rank i sends to one rank per step, i + 1, i + 2, i + 4 ... in turn.  With a power of two of
    ranks each turn has averaged exactly.

    >>> [list(OnePeerExponential().graph(8, step).successors(0)) for step in range(3)]
    [[1], [2], [4]]
    """

    def period(self, size: int) -> int:
        return max(_rounds(size), 1)

    def edges(self, size: int, step: int) -> Any:
        hop = 1 << step
        return networkx().DiGraph([(i, (i + hop) % size) for i in range(size)])


def _rounds(size: int) -> int:
    """Return how many powers of two are less than ``size``."""
    return (size - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Edges(Topology, name="edges"):
    """The edges that are given, as pairs of ranks, from sender to receiver if ``directed_edges``.

    Args:
        pairs: such as ``((0, 1), (1, 2))``.
        directed_edges: a pair says nothing of the other direction.

    >>> Edges([(0, 1), (1, 2)]).weights(3)[0].round(3)
    array([0.667, 0.333, 0.   ])
    """

    pairs: tuple[tuple[int, int], ...] = ()
    directed_edges: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("directed_edges", self.directed_edges, (True, False))
        pairs = tuple(map(as_tuple("pairs"), as_tuple("pairs")(self.pairs)))
        if any(len(pair) != 2 or not all(is_whole(i) and i >= 0 for i in pair) for pair in pairs):
            raise ConfigError("pairs must be pairs of ranks, for instance ((0, 1), (1, 2))")
        object.__setattr__(self, "pairs", pairs)

    def edges(self, size: int, step: int) -> Any:
        nx = networkx()
        return (nx.DiGraph if self.directed_edges else nx.Graph)(list(self.pairs))


@dataclasses.dataclass(frozen=True)
class Weights(Topology, name="weights"):
    """A combination matrix of one's own: who has a weight is a neighbour.

    Args:
        matrix: square, a row for each rank; row i has the weights of what rank i takes of the
            others and of itself.  A NumPy array, a tensor, or rows of numbers.  Columns and
            rows have to add up to 1, and methods for undirected graphs need a symmetric matrix.

    >>> list(Weights([[0.5, 0.5], [0.5, 0.5]]).graph(2).edges())
    [(0, 1)]
    """

    matrix: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.matrix.tolist() if hasattr(self.matrix, "tolist") else self.matrix
        try:
            w = np.array(rows, np.float64)
        except (TypeError, ValueError):
            w = np.empty(0)
        if w.ndim != 2 or w.shape[0] != w.shape[1] or not w.size:
            raise ConfigError(
                "matrix must be square, a row of numbers for each rank, for instance "
                "[[0.5, 0.5], [0.5, 0.5]]"
            )
        if not (w >= 0).all() or np.isinf(w).any():
            raise ConfigError("the weights of matrix must be finite, and none less than 0")
        object.__setattr__(self, "matrix", tuple(map(tuple, w.tolist())))

    def __hash__(self) -> int:
        return hash(self.matrix[0])  # asked for in every step, where all of it would take long

    def edges(self, size: int, step: int) -> Any:
        w = np.array(self.matrix)
        if size != len(w):
            raise ConfigError(
                f"the matrix of weights is for {len(w)} ranks, and there are {size}: give it as "
                "many rows and columns as ranks"
            )
        nx = networkx()
        kind = nx.Graph if (w == w.T).all() else nx.DiGraph
        return kind([(int(j), int(i)) for i, j in np.argwhere(w)])

    def combination(self, graph: Any) -> np.ndarray:
        return np.array(self.matrix)


def as_topology(topology: Any) -> Topology:
    """Return a topology from what a user wrote.

    Args:
        topology: an instance, a class, a text such as "grid:rows=4", a matrix of weights (a
            two-dimensional array of floats), or pairs of ranks.

    >>> as_topology("grid:rows=4")
    Grid(rows=4)
    """
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, type) and issubclass(topology, Topology):
        return topology()
    if isinstance(topology, str):
        name, _, text = topology.partition(":")
        parts = [part.partition("=") for part in text.split(",") if part]
        try:
            options = {key.strip(): ast.literal_eval(value) for key, _, value in parts}
        except (ValueError, SyntaxError):
            raise ConfigError(f"options in {topology!r} are written {name}:option=value") from None
        return build(lookup("graph", name.strip()), options)
    if getattr(topology, "ndim", 0) == 2 and "float" in str(topology.dtype):
        return Weights(topology)
    if isinstance(topology, Iterable):
        return Edges(tuple(topology))
    raise ConfigError(
        f"{topology!r} is no topology: pass for instance 'cycle', Grid(rows=4), pairs of ranks, "
        "or a matrix of weights"
    )

"""Topologies: graphs for any number of ranks, with their combination matrices.

Row i of a combination matrix W has the weights of rank i's neighbours and its own, so
``x_i = sum_j w_ij x_j``.
"""

from __future__ import annotations

import abc
import ast
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.config import Configurable, as_tuple, build, check_bool, check_choice, is_whole
from hvd_compress.errors import ConfigError

#: by how much sums and symmetry may be off
_ROUNDING = 1e-12


class Neighborhood(NamedTuple):
    """A rank's part of the graph of a step.

    Attributes:
        rank: this rank, from 0.
        step: the number of the step, from 1.
        own: the weight of this rank itself, a fraction.
        targets, sources: the ranks that it sends to and receives from, ascending.
        weights: of the sources, in their order; with ``own`` they add up to 1.

    >>> network = as_topology("cycle").neighborhood(rank=0, size=4, step=1)
    >>> network.sources, [round(w, 3) for w in network.weights], round(network.own, 3)
    ((1, 3), [0.333, 0.333], 0.333)
    """

    rank: int
    step: int
    own: float
    targets: tuple[int, ...]
    sources: tuple[int, ...]
    weights: tuple[float, ...]


class Topology(Configurable, abc.ABC, kind="graph"):
    """A graph for any number of ranks, with its combination matrix.

    Undirected graphs have Metropolis-Hastings weights, ``w_ij = 1 / (1 + max(deg_i, deg_j))`` for
    neighbours.  In directed ones a rank takes equally much of itself and of each sender.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Ring(Topology):
    ...     def links(self, size, step):
    ...         i, j = np.indices((size, size))
    ...         return (i - j) % size == 1
    >>> Ring().weights(4)[0]
    array([0.5, 0. , 0. , 0.5])
    """

    @abc.abstractmethod
    def links(self, size: int, step: int) -> np.ndarray:
        """Return which rank, a row, receives from which, a column: bool, (size, size).  Steps count
        from 0."""

    def period(self, size: int) -> int:
        """Return after how many steps the graph repeats."""
        return 1

    def combination(self, links: np.ndarray) -> np.ndarray:
        """Return the weights of one of the graphs, whose ``links`` have no loops."""
        if (links == links.T).all():
            degree = links.sum(axis=1)
            w = links / (1 + np.maximum(degree[:, None], degree))
            return w + np.diag(1 - w.sum(axis=1))
        w = links + np.eye(len(links))
        return w / w.sum(axis=1, keepdims=True)

    def weights(self, size: int, step: int = 0) -> np.ndarray:
        """Return the combination matrix of a step, float64, (size, size), doubly stochastic; steps
        count from 0.

        Raises:
            ConfigError: the graph is not connected, over all steps of a period, or its weights are
                not doubly stochastic.

        >>> as_topology("complete").weights(4)[0]
        array([0.25, 0.25, 0.25, 0.25])
        """
        return _weights(self, size)[step % self.period(size)].copy()

    def neighborhood(self, rank: int, size: int, step: int) -> Neighborhood:
        """Return a rank's part of the graph of a step, counted from 1."""
        return _neighborhood(self, rank, size, (step - 1) % self.period(size))._replace(step=step)


@functools.lru_cache(maxsize=256)
def _weights(topology: Topology, size: int) -> list[np.ndarray]:
    """Return the matrices of a period."""
    if not is_whole(size) or size < 1:
        raise ConfigError(f"a topology needs a number of ranks from 1; got {size!r}")
    graphs = [topology.links(size, step) for step in range(topology.period(size))]
    for links in graphs:
        np.fill_diagonal(links, False)
    reached = sum(graphs) + np.eye(size)
    for _ in range(size.bit_length()):
        reached = np.minimum(reached @ reached, 1)
    if not reached.all():
        raise ConfigError(
            f"{topology!r} is not connected with {size} ranks, which could never agree: add edges"
        )
    found = [topology.combination(links) for links in graphs]
    for w in found:
        _check_doubly_stochastic(w)
        _check_brings_together(w)
    return found


@functools.lru_cache(maxsize=4096)
def _neighborhood(topology: Topology, rank: int, size: int, step: int) -> Neighborhood:
    w = _weights(topology, size)[step]
    targets, sources = (
        tuple(int(r) for r in np.flatnonzero(weights) if r != rank)
        for weights in (w[:, rank], w[rank])
    )
    of_sources = tuple(w[rank, source].item() for source in sources)
    return Neighborhood(rank, step, w[rank, rank].item(), targets, sources, of_sources)


def _check_doubly_stochastic(w: np.ndarray) -> None:
    off = max(float(np.max(np.abs(w.sum(axis=axis) - 1))) for axis in (0, 1))
    if w.min() < -_ROUNDING or off > _ROUNDING * len(w):
        raise ConfigError(
            "the weights of this topology are not doubly stochastic, so ranks would not agree on "
            f"the average: sums of rows or columns are off 1 by {off:.1e} (of float32, give a "
            "matrix in float64); give all nodes as many neighbours in as out"
        )


def _check_brings_together(w: np.ndarray) -> None:
    """Raise ``ConfigError`` if the ranks of a connected graph only swap their values.  One rank
    with a weight of its own is enough to prevent it."""
    if not w.diagonal().any() and (second := second_eigenvalue(w)) > 1 - _ROUNDING * len(w):
        raise ConfigError(
            f"mixing by this matrix never brings the ranks together, since an eigenvalue beside "
            f"the 1 has a magnitude of {second:.3g}: give each rank a weight of its own, on the "
            "diagonal"
        )


def check_symmetric(w: np.ndarray, method: str) -> None:
    """Raise ``ConfigError`` unless W is symmetric."""
    if abs(w - w.T).max() > _ROUNDING:
        raise ConfigError(
            f"{method} needs an undirected topology, such as 'cycle' or 'grid': use one, or "
            "Diffusion or GradientTracking, which take directed ones"
        )


def eigenvalues(w: np.ndarray) -> np.ndarray:
    """Return the eigenvalues of W by descending magnitude, (ranks,); real ones if W is symmetric.

    Args:
        w: W, (ranks, ranks).
    """
    found = np.linalg.eigvalsh(w) if np.allclose(w, w.T, atol=1e-14) else np.linalg.eigvals(w)
    return found[np.argsort(-abs(found), kind="stable")]


def second_eigenvalue(w: np.ndarray) -> float:
    """Return the largest magnitude of an eigenvalue but the 1 of the average: a mixing brings the
    ranks together by this factor.

    Args:
        w: W, (ranks, ranks); of one rank it is 0.
    """
    return float(abs(eigenvalues(w)[1])) if len(w) > 1 else 0.0


def spectral_gap(w: np.ndarray) -> float:
    """Return 1 - :func:`second_eigenvalue` of ``w``, a fraction.

    >>> [round(spectral_gap(as_topology(name).weights(16)), 3) for name in ("cycle", "complete")]
    [0.051, 1.0]
    """
    return 1 - second_eigenvalue(w)


# -- topologies ----------------------------------------------------------------------------------

Ranks = np.ndarray
#: whether rank i receives from rank j, given their number
_SHAPES: dict[str, Callable[[Ranks, Ranks, int], np.ndarray]] = {
    "line": lambda i, j, size: abs(i - j) == 1,
    "cycle": lambda i, j, size: _around(i, j, size) == 1,
    "star": lambda i, j, size: i * j == 0,
    "complete": lambda i, j, size: i != j,
    "exponential": lambda i, j, size: np.isin((i - j) % size, _hops(size)),
}
#: the distance of two places on a line of so many
_GRIDS: dict[str, Callable[[Ranks, Ranks, int], np.ndarray]] = {
    "grid": lambda i, j, size: abs(i - j),
    "torus": lambda i, j, size: _around(i, j, size),
}
_ONE_PEER = "one_peer"


def _around(i: Ranks, j: Ranks, size: int) -> np.ndarray:
    """Return the distance of two places on a circle of so many."""
    return np.minimum((i - j) % size, (j - i) % size)


def _hops(size: int) -> list[int]:
    """Return the powers of two that are less than ``size``."""
    return [1 << k for k in range((size - 1).bit_length())]


@dataclasses.dataclass(frozen=True)
class Graph(Topology, name="named"):
    """A graph by its name.

    =================  =====================================================================
    ``"line"``         each rank has the previous and the next rank
    ``"cycle"``        a line whose ends meet
    ``"grid"``         ranks row by row in a rectangle
    ``"torus"``        a grid whose opposite sides meet
    ``"star"``         all other ranks have rank 0 only
    ``"complete"``     every rank has all others
    ``"exponential"``  rank i sends to the ranks i + 1, i + 2, i + 4 ..., modulo their number
    ``"one_peer"``     rank i sends to one of these per step, in turn
    =================  =====================================================================

    Args:
        shape: the name.
        rows: of a grid or torus, a divisor of the number of ranks; ``None`` for as square a
            rectangle as there is.

    >>> Graph("grid", rows=2).neighborhood(rank=0, size=6, step=1).targets
    (1, 3)
    """

    shape: str = "cycle"
    rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("graph", self.shape, (*_SHAPES, *_GRIDS, _ONE_PEER))
        if self.rows is not None and (
            self.shape not in _GRIDS or not is_whole(self.rows) or self.rows < 1
        ):
            raise ConfigError(
                f"rows must be a whole number from 1, of a grid or torus, or None; got {self!r}"
            )

    def period(self, size: int) -> int:
        return max(len(_hops(size)), 1) if self.shape == _ONE_PEER else 1

    def links(self, size: int, step: int) -> np.ndarray:
        i, j = np.indices((size, size))
        if self.shape == _ONE_PEER:
            return (i - j) % size == 1 << step
        if self.shape in _SHAPES:
            return _SHAPES[self.shape](i, j, size)
        rows = self.rows or max(r for r in range(1, int(size**0.5) + 1) if size % r == 0)
        if size % rows:
            raise ConfigError(f"rows={rows} do not divide {size} ranks")
        distance, columns = _GRIDS[self.shape], size // rows
        down = distance(i // columns, j // columns, rows)
        return down + distance(i % columns, j % columns, columns) == 1


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
        check_bool("directed_edges", self.directed_edges)
        pairs = tuple(map(as_tuple("pairs"), as_tuple("pairs")(self.pairs)))
        if any(len(pair) != 2 or not all(is_whole(i) and i >= 0 for i in pair) for pair in pairs):
            raise ConfigError("pairs must be pairs of ranks, for instance ((0, 1), (1, 2))")
        object.__setattr__(self, "pairs", pairs)

    def links(self, size: int, step: int) -> np.ndarray:
        if any(rank >= size for pair in self.pairs for rank in pair):
            raise ConfigError(f"{self!r} has nodes beyond the {size} ranks 0 to {size - 1}")
        links = np.zeros((size, size), bool)
        for sender, receiver in self.pairs:
            links[receiver, sender] = True
        return links if self.directed_edges else links | links.T


@dataclasses.dataclass(frozen=True)
class Weights(Topology, name="weights"):
    """A combination matrix of one's own: who has a weight is a neighbour.

    Args:
        matrix: square, a row for each rank; row i has the weights of what rank i takes of the
            others and of itself.  A NumPy array, a tensor, or rows of numbers.  Columns and
            rows have to add up to 1, and methods for undirected graphs need a symmetric matrix.

    >>> Weights([[0.5, 0.5], [0.5, 0.5]]).neighborhood(rank=0, size=2, step=1).sources
    (1,)
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

    def links(self, size: int, step: int) -> np.ndarray:
        w = np.array(self.matrix)
        if size != len(w):
            raise ConfigError(
                f"the matrix of weights is for {len(w)} ranks, and there are {size}: give it as "
                "many rows and columns as ranks"
            )
        return w > 0

    def combination(self, links: np.ndarray) -> np.ndarray:
        return np.array(self.matrix)


def as_topology(topology: Any) -> Topology:
    """Return a topology from what a user wrote.

    Args:
        topology: an instance, a text such as "cycle" or "grid:rows=4", a matrix of weights (a
            two-dimensional array of floats), or pairs of ranks.

    >>> as_topology("grid:rows=4")
    Graph(shape='grid', rows=4)
    """
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str):
        shape, _, text = topology.partition(":")
        parts = [part.partition("=") for part in text.split(",") if part]
        try:
            options = {key.strip(): ast.literal_eval(value) for key, _, value in parts}
        except (ValueError, SyntaxError):
            raise ConfigError(f"options in {topology!r} are written {shape}:option=value") from None
        return build(Graph, {"shape": shape.strip(), **options}, shape)
    if getattr(topology, "ndim", 0) == 2 and "float" in str(topology.dtype):
        return Weights(topology)
    if isinstance(topology, Iterable):
        return Edges(tuple(topology))
    raise ConfigError(
        f"{topology!r} is no topology: pass for instance 'cycle', 'grid:rows=4', pairs of ranks, "
        "or a matrix of weights"
    )

"""Methods that send some elements as they are, and keep the others for later."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import codecs, meetings
from hvd_compress.chain import Chain, chain
from hvd_compress.config import choice, converted
from hvd_compress.meetings import allgather, allreduce, gather_drawn, leader_top_k
from hvd_compress.methods.chained import Chained
from hvd_compress.methods.rows import checked_rows
from hvd_compress.schedules import Density
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class TopK(Chained, name="topk"):
    """Send the elements of largest magnitude, and keep the rest for later::

        compression=hvd.TopK(density=0.01)

    State: ``residual``.  The optimizer applies momentum to the average, so momentum comes late for
    elements in the residual; :class:`DGC` corrects that.

    Options:
        density, indices, algorithm, rows: as in all methods.
        values: "float32", "float16" or "4bit" on the wire.
        error_feedback: without it, elements that are not sent are lost; for studies only.

    Reference: Aji and Heafield, EMNLP 2017; Stich et al., NeurIPS 2018.

    Each rank keeps the elements that it has not sent:

    >>> world = World(TopK(density=0.25), size=2)
    >>> rank_0, rank_1 = np.array([4.0, 1.0, 0.0, 2.0]), np.array([1.0, 0.0, 6.0, 3.0])
    >>> world.exchange([rank_0, rank_1])[0].mean
    array([2., 0., 3., 0.])
    >>> [state["residual"] for state in world.states["tensor"]]
    [array([0., 1., 0., 2.]), array([1., 0., 0., 3.])]
    """

    reference = "Aji and Heafield, EMNLP 2017"

    density: Density = 0.01
    values: str = "float32"
    error_feedback: bool = choice(True, False)
    algorithm: str = "allgather"
    indices: str = "packed"
    rows: str = dataclasses.field(default="whole", metadata=converted(checked_rows))

    @functools.cached_property
    def blocks(self) -> Chain:
        via = allgather(codecs.top_k(self.density), self.values, self.algorithm, self.indices)
        return chain(error_feedback(), via=via) if self.error_feedback else chain(via=via)


@dataclasses.dataclass(frozen=True)
class Threshold(Chained, name="threshold"):
    """Send the elements that have grown beyond ``tau``, and keep the rest for later::

        compression=hvd.Threshold(tau=0.01)

    A step may send none of a tensor, or all of it.  Sent: an index and the value, or one bit.
    State: ``residual``.

    Options:
        tau: in units of the gradient; the best value differs from model to model.
        send: "value", the element as it is, or "sign", the paper's: ``tau sign(x)``.  Residuals
            then grow without end where gradients stay larger than ``tau``.
        indices: as in all methods.

    Reference: Strom, Interspeech 2015.

    Elements below ``tau`` add up until they are above:

    >>> world, gradient = World(Threshold(tau=1.0), size=1), np.array([4.0, 0.75, 0.125])
    >>> [world.exchange([gradient])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0, 0.0], [4.0, 1.5, 0.0]]
    """

    reference = "Strom, Interspeech 2015"

    tau: float = 0.01
    send: str = choice("sign", "value", default="value")
    indices: str = "packed"

    @functools.cached_property
    def blocks(self) -> Chain:
        values = codecs.plus_minus(self.tau) if self.send == "sign" else "float32"
        select = codecs.threshold(self.tau)
        return chain(error_feedback(), via=allgather(select, values, indices=self.indices))


@dataclasses.dataclass(frozen=True)
class RandomK(Chained, name="randomk"):
    """Send elements that are drawn at random, and no indices::

        compression=hvd.RandomK(density=0.25)

    State: ``residual`` with error feedback, which sends the elements unscaled.  Without it they are
    scaled by n/k, so that the average is unbiased, and there is no state.

    Options:
        density: as in all methods.  An element is sent every 1 / density steps, with all that its
            residual holds: at 0.01, the learning rate must be some hundred times smaller.
        error_feedback: see above.
        wire: ``None``, "float16", or "bfloat16" if ``shared``.
        shared: all ranks draw alike, and values are summed.  Otherwise each rank draws for itself,
            from a seed that the others know: values are gathered, and errors are independent.

    Reference: Wangni et al.; Stich et al., both NeurIPS 2018.

    Half of the elements, twice as large, and others in each step:

    >>> world = World(RandomK(density=0.5, error_feedback=False), size=2)
    >>> gradients = [np.ones(4), 3 * np.ones(4)]
    >>> [world.exchange(gradients)[0].mean.tolist() for step in range(2)]
    [[0.0, 0.0, 4.0, 4.0], [0.0, 4.0, 4.0, 0.0]]
    """

    reference = "Stich et al., NeurIPS 2018"

    density: Density = 0.25
    error_feedback: bool = choice(True, False)
    wire: str | None = None
    shared: bool = choice(True, False)

    @functools.cached_property
    def blocks(self) -> Chain:
        aggregate = allreduce if self.shared else gather_drawn
        select = codecs.random_k(self.density)
        via = aggregate(wire=self.wire, select=select, unbiased=not self.error_feedback)
        return chain(error_feedback(), via=via) if self.error_feedback else chain(via=via)


@dataclasses.dataclass(frozen=True)
class ScaleCom(Chained, name="scalecom"):
    """Send the elements that are largest on one rank, from all ranks; ranks take turns::

        compression=hvd.ScaleCom(density=0.01)

    One rank chooses for all and the values are summed, so traffic does not grow with the ranks.

    State: ``residual``.  Sent: k values, and k packed indices in every N-th step.

    Options:
        density: as in all methods.

    Reference: Chen et al., NeurIPS 2020.

    Rank 0 chooses, then rank 1:

    >>> world = World(ScaleCom(density=0.25), size=2)
    >>> gradients = [np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])]
    >>> [world.exchange(gradients)[0].mean.tolist() for step in range(2)]
    [[2.5, 0.0, 0.0, 0.0], [0.0, 0.0, 6.0, 0.0]]
    """

    reference = "Chen et al., NeurIPS 2020"

    density: Density = 0.01

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(error_feedback(), via=leader_top_k(self.density))


@dataclasses.dataclass(frozen=True)
class OkTopk(Chained, name="oktopk"):
    """Send the largest elements to the owners of their regions, and step along the largest sums::

        compression=hvd.OkTopk(density=0.01)

    The step has about k = ceil(density * n) elements.  All others stay in the residuals, so traffic
    does not grow with the ranks.

    State: ``residual``; ``global_threshold``, one number.

    Options:
        density, indices: as in all methods.
        threshold_every: steps from one exact threshold of the sums to the next.
        values: on the wire, "float32" or "float16"; residuals keep the rounding errors.

    Reference: Li, Hoefler, PPoPP 2022.

    One of the sums of four elements:

    >>> world = World(OkTopk(density=0.25), size=2)
    >>> world.exchange([np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])])[0].mean
    array([0., 0., 3., 0.])
    """

    reference = "Li, Hoefler, PPoPP 2022"

    density: Density = 0.01
    threshold_every: int = 32
    indices: str = "packed"
    values: str = "float32"

    @functools.cached_property
    def blocks(self) -> Chain:
        via = meetings.ok_topk(self.density, self.threshold_every, self.indices, self.values)
        return chain(error_feedback(), via=via)

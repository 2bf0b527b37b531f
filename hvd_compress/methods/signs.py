"""Signs: by majority, of momentum, or scaled with error feedback."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import ClassVar

from hvd_compress import codecs
from hvd_compress.chain import Chain, chain
from hvd_compress.codecs import column_means
from hvd_compress.config import choice, converted
from hvd_compress.errors import NeedsTuning
from hvd_compress.meetings import allgather, alltoall, dense_until
from hvd_compress.methods.chained import Chained
from hvd_compress.schedules import Start, as_start
from hvd_compress.transforms import error_feedback, majority_vote, moving_average


class _BySigns(Chained):
    """The base of methods that step along signs, as far for small gradients as for large ones."""

    #: a learning rate that trains where 0.05 is that of SGD
    rate: ClassVar[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        warnings.warn(
            f"{self.name} moves every weight by the whole learning rate in every step. Use one "
            f"some hundred times smaller than SGD's: lr={self.rate} instead of 0.05, falling "
            "towards the end. Then silence this by warnings.simplefilter('ignore', "
            "hvd_compress.NeedsTuning). efsignsgd trains with SGD's own learning rate",
            NeedsTuning,
            stacklevel=3,
        )


@dataclasses.dataclass(frozen=True)
class SignSGD(_BySigns, name="signsgd"):
    """Send the sign of each element, and step along the majority: +1, -1, or 0 for a tie::

        compression=hvd.SignSGD()

    Sent: one bit per element.  No state.  Steps do not shrink with the gradient, so the learning
    rate must, and has to be some hundred times smaller.  :class:`~hvd_compress.NeedsTuning` warns
    of this.  Ranks whose gradient is zero vote at random.

    Reference: Bernstein, Wang, Azizzadenesheli, Anandkumar, ICML 2018.

    >>> world = World(SignSGD(), size=3)
    >>> gradients = [np.array([0.1, -2.0]), np.array([-9.0, -1.0]), np.array([5.0, 3.0])]
    >>> world.exchange(gradients)[0].direction
    array([ 1., -1.])
    """

    reference = "Bernstein et al., ICML 2018"
    rate = 0.0002

    @functools.cached_property
    def blocks(self) -> Chain:
        return chain(majority_vote(), via=allgather(codecs.sign()))


@dataclasses.dataclass(frozen=True)
class Signum(_BySigns, name="signum"):
    """Send the signs of each rank's momentum, and step along the majority as :class:`SignSGD`
    does::

        compression=hvd.Signum(momentum=0.9)

    State: ``velocity``, the average ``m = beta m + (1 - beta) g``, instead of the optimizer's
    momentum.  Weight decay acts as it is, ``w = w - lr (vote + wd w)``.

    Options:
        momentum: beta; ``None`` takes the optimizer's.
        nesterov: signs of ``beta m + (1 - beta) g``; ``None`` takes the optimizer's.

    Reference: Bernstein, Zhao, Azizzadenesheli, Anandkumar, ICLR 2019.

    >>> world = World(Signum(momentum=0.9), size=1)
    >>> [world.exchange([np.array([x])])[0].direction.item() for x in (4.0, -1.0, -1.0, -9.0)]
    [1.0, 1.0, 1.0, -1.0]
    """

    reference = "Bernstein et al., ICLR 2019"
    rate = 0.0005

    momentum: float | None = None
    nesterov: bool | None = None

    @functools.cached_property
    def blocks(self) -> Chain:
        average = moving_average(self.momentum, self.nesterov)
        return chain(average, majority_vote(), via=allgather(codecs.sign()))


@dataclasses.dataclass(frozen=True)
class EFSignSGD(Chained, name="efsignsgd"):
    """Send signs times the mean magnitude of the tensor, and keep the errors for later::

        compression=hvd.EFSignSGD()

    Sent: one bit per element and one number.  State: ``residual``, and ``owner_residual`` with
    "alltoall".

    Options:
        via: see :class:`OneBit`.

    Reference: Karimireddy, Rebjock, Stich, Jaggi, ICML 2019.

    >>> world = World(EFSignSGD(), size=1)
    >>> world.exchange([np.array([3.0, -1.0, 1.0, -1.0])])[0].mean
    array([ 1.5, -1.5,  1.5, -1.5])
    >>> world.states["tensor"][0]["residual"]
    array([ 1.5,  0.5, -0.5,  0.5])
    """

    reference = "Karimireddy et al., ICML 2019"

    via: str = choice("alltoall", "allgather")

    @functools.cached_property
    def blocks(self) -> Chain:
        aggregate = alltoall if self.via == "alltoall" else allgather
        return chain(error_feedback(), via=aggregate(codecs.scaled_sign()))


@dataclasses.dataclass(frozen=True)
class OneBit(Chained, name="onebit"):
    """Send one bit per element and two means per column, and keep the errors for later (1-bit
    SGD)::

        compression=hvd.OneBit(start=500)

    State: ``residual``, and ``owner_residual`` with "alltoall".

    Options:
        column: number of elements that share two means, a run of the flat tensor; ``None`` takes a
            row of a PyTorch matrix; see :class:`hvd_compress.blocks.column_means`.
        via: "alltoall", as in the paper: each rank adds up one shard of every tensor, and quantises
            the sum again.  "allgather": every rank receives one bit per element from each other
            rank.
        start: the number of first steps that send everything, since early gradients suffer most;
            ``True``: none.

    Reference: Seide, Fu, Droppo, Li, Yu, Interspeech 2014.

    >>> world = World(OneBit(), size=1)
    >>> world.exchange([np.array([3.0, 1.0, -2.0, -4.0])])[0].mean
    array([ 2.,  2., -3., -3.])
    """

    reference = "Seide et al., Interspeech 2014"

    column: int | None = None
    via: str = choice("alltoall", "allgather")
    start: Start = dataclasses.field(default=True, metadata=converted(as_start))

    @functools.cached_property
    def blocks(self) -> Chain:
        aggregate = alltoall if self.via == "alltoall" else allgather
        via = dense_until(self.start, aggregate(column_means(self.column)))
        return chain(error_feedback(), via=via)

"""The contract between compression methods and the engines that carry their messages.

A compressor never talks to a network.  ``Compressor.exchange(gradient, state, context)`` is a
generator: it yields *requests*, an engine carries each of them out over all ranks and sends the
*reply* back in, and at the end the generator returns an :class:`Outcome`::

    def exchange(self, gradient, state, context):
        total = yield Sum(gradient)
        mean = total / context.size
        return Outcome(mean=mean, sent=gradient, state=state)

All ranks run the same generator for the same tensor, so they yield the same kinds of request in
the same order.  One generator therefore runs on every engine: the lockstep world inside one
process (:mod:`hvd_compress.engines.lockstep`), Horovod under PyTorch, and whatever comes next.

The type of a request says which collective carries it:

=============  ============================================  ======================================
request        reply                                         used by
=============  ============================================  ======================================
``Sum``        sum of the arrays over the ranks              linear methods (casts, random-k)
``Max``        element-wise maximum                          comparing ranks before each step
``Gather``     list of every rank's bytes, in rank order     sparse and quantised methods
``Alltoall``   list of the bytes each rank has for this one  quantised sums in shards
``Swap``       the partner's bytes                           merging in pairs of ranks
``Batch``      a function of arrays, without communication   many small matrices at once
=============  ============================================  ======================================

The laws that every method obeys (checked by :func:`hvd_compress.testing.check_laws`):

* ``mean`` is the average over the ranks of what each of them ``sent``, but for what stays with the
  owner of a shard (state ``owner_residual``, see :mod:`hvd_compress.aggregators.alltoall`);
* with error feedback nothing is lost: what went in = what was sent + what remains in the state;
* all ranks compute bitwise equal ``mean`` and ``update``;
* shape, dtype and device of the gradient are kept;
* a NaN or Inf on one rank makes ``mean`` non-finite on every rank and leaves every state as it was;
* who claims to be ``homogeneous`` makes twice as much of twice the gradient;
* a world of one rank, zeros, empty and one-element tensors work.

State is handed in and handed out: a dict of arrays that belongs to one tensor on one rank.  After
a successful exchange the old dict must not be used any more.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Generator
from typing import Any, ClassVar, NamedTuple

from hvd_compress.config import Configurable, from_config
from hvd_compress.errors import UnboundError, UnsupportedError
from hvd_compress.stats import Stats

Array = Any  # numpy.ndarray, torch.Tensor, ...: whatever a backend is registered for
State = dict[str, Array]


class Sparse(NamedTuple):
    """``values`` at ascending unique ``indices`` of a flat array; zero elsewhere."""

    indices: Array
    values: Array


class Sum(NamedTuple):
    """Sum ``array`` over the ranks.  ``wire`` names the dtype on the wire where that is not the
    array's own: "float16" or "bfloat16".  The reply has the dtype of ``array``.  ``algorithm`` is
    for engines that have several; ``None`` takes the engine's own."""

    array: Array
    wire: str | None = None
    algorithm: str | None = None


class Max(NamedTuple):
    """Element-wise maximum of ``array`` over the ranks.  No method of this package needs it: ranks
    compare method, options and step by it (:mod:`hvd_compress.agreement`), and methods of users may
    share a scale by it."""

    array: Array


class Gather(NamedTuple):
    """Every rank's ``payload`` (1-D, uint8).  ``equal_sizes`` is a promise that all ranks send the
    same number of bytes, which spares engines the exchange of sizes."""

    payload: Array
    equal_sizes: bool = False


class Alltoall(NamedTuple):
    """One payload (1-D, uint8) for each rank, in rank order; the reply is what each rank has for
    this one.  ``equal_sizes`` is a promise that all ranks have equally many bytes for the same
    rank, which spares engines the exchange of sizes."""

    payloads: list[Array]
    equal_sizes: bool = True


class Swap(NamedTuple):
    """``payload`` (1-D, uint8) for rank ``partner``, which names this rank in turn and has equally
    many bytes for it.  Whoever has no partner in a round asks with ``None``, and gets nothing."""

    payload: Array
    partner: int | None


class SparseSum(NamedTuple):
    """Sum over the ranks of flat arrays of ``n`` elements, of which each rank gives those that are
    not zero; by an ``algorithm`` of the engine's.  The reply is a :class:`SparseTotal`.

    ``wire`` names the dtype of values on the wire where that is not their own: "float16".
    """

    sparse: Sparse
    n: int
    wire: str | None = None
    algorithm: str = "auto"


class SparseTotal(NamedTuple):
    """The reply to a :class:`SparseSum`.

    Attributes:
        total: flat array of all n elements, the same bits on all ranks.
        dropped: what is not in it and stays with this rank.
        bytes_sent, bytes_received: by this rank; ``None`` where no algorithm was at work.
    """

    total: Array
    dropped: Sparse
    bytes_sent: int | None = None
    bytes_received: int | None = None


class Batch(NamedTuple):
    """A function of arrays, for this tensor and at once for all that ask for the same with equal
    shapes: ``function(xp, *stacks)``, each of one more dimension in front, as its result must
    have.  The reply is this tensor's part of it.  Spares many small operations of linear algebra.
    """

    function: Callable[..., Array]
    arrays: tuple[Array, ...]


#: what other ranks have to answer
Collective = Sum | Max | Gather | Alltoall | Swap | SparseSum
Request = Collective | Batch


class Outcome(NamedTuple):
    """What an exchange returns.

    Attributes:
        mean: the average over the ranks of what they sent; shape and dtype of the gradient.
        sent: this rank's own contribution as the others saw it, flat: an array or a ``Sparse``.
        state: the new state.
        update: what an optimizer shall step along, where that differs from ``mean`` (momentum
            that is applied after averaging); ``None`` means ``mean``.
        additive: where gradients are added instead of averaged, ``direction`` is to be multiplied
            by the number of ranks.  A majority's vote is not: it is the same for both.
    """

    mean: Array
    sent: Array | Sparse
    state: State
    update: Array | None = None
    additive: bool = True

    @property
    def direction(self) -> Array:
        return self.mean if self.update is None else self.update


class Context(NamedTuple):
    """What an exchange may know besides the gradient; equal on all ranks but for ``rank`` and
    ``gradient_norm``.

    Attributes:
        name: of the tensor, unique within the model.
        rank, size: this rank and the number of ranks that take part.
        step: exchanges of this tensor so far, counted from 0.
        epoch: as announced by the user, a fraction within an epoch; ``None`` if never announced.
        seed: for randomness that ranks share.
        momentum, nesterov: the optimizer's, for methods that take momentum over.
        gradient_norm: L2 norm of the rank's whole gradient, over all tensors; ``None`` if unknown.
        sums: gradients are added, not averaged, by whoever multiplies the direction of an
            ``additive`` outcome by ``size``.
        dtype, shape: of the gradient as it came, "float16"; set by ``Chain``.
        phase: one of the method's, where ``step`` is a symbol.
    """

    name: str = "tensor"
    rank: int = 0
    size: int = 1
    step: int = 0
    epoch: float | None = None
    seed: int = 0
    momentum: float = 0.0
    nesterov: bool = False
    gradient_norm: float | None = None
    sums: bool = False
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    phase: str = ""


Exchange = Generator[Request, Any, Outcome]


class Compressor(Configurable, abc.ABC, kind="method"):
    """A compression method with its options.

    Subclasses are frozen dataclasses: options are fields, so that equality, ``repr`` and JSON come
    for free; whatever changes from step to step is state.
    """

    #: the paper that the method is from
    reference: ClassVar[str] = ""
    #: the method applies the optimizer's momentum, and weight decay with it, in its place
    takes_momentum: ClassVar[bool] = False
    #: what such a method applies instead of the optimizer's momentum and Nesterov flag; ``None``:
    #: the optimizer's own.  Methods have these as options
    momentum: float | None = None
    nesterov: bool | None = None
    #: how such a method treats weight decay, "separate" or "gradient"; ``None``: it has no say
    weight_decay: str | None = None
    #: what is done to a gradient before the exchange, of methods that are a chain
    transforms: tuple[Any, ...] = ()
    #: and its momentum is a moving average, in units of a gradient, where that of SGD adds up to
    #: 1 / (1 - momentum) times as much; weight decay beside it has to be scaled accordingly
    averages_momentum: ClassVar[bool] = False
    #: the name of the optimizer class that the method needs, if its result is not a gradient
    partner: ClassVar[str | None] = None
    #: the names of the kinds of steps, if the method has several
    phases: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def init(self, gradient: Array) -> State:
        """Return the state before the first exchange of a tensor of the shape, dtype and device of
        ``gradient``."""

    @abc.abstractmethod
    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        """Average ``gradient`` over the ranks; see the module's docstring."""

    @abc.abstractmethod
    def per_rank(self, gradient: Array) -> frozenset[str]:
        """Return the keys of the state under which ranks differ; checkpoints average these."""

    def chain(self, gradient: Array, context: Context) -> Compressor:
        """Return what this exchange of the tensor does: a :class:`~hvd_compress.chain.Chain`, if
        the method is made of chains, else the method itself.  Two methods do the same to a tensor
        if these are equal."""
        return self

    def template(self, gradient: Array) -> Compressor:
        """Return a chain that keeps the same state as those of all exchanges of the tensor, or the
        method itself."""
        return self

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> Compressor:
        """Return the method for a tensor of that name and shape: this one, unless it is a
        composition.  To be called before all other methods."""
        return self

    def repaired(self, gradient: Array, state: State) -> State:
        """Return a consistent state after a checkpoint was loaded, in which entries that differ
        between ranks may have been averaged, or be missing on some ranks."""
        return state

    def phase_index(self, step: Array) -> Array:
        """Return the index into ``phases`` (int32) of a step; ``step`` counts from 1, and may be a
        symbol."""
        raise UnsupportedError(f"{self.name} does the same in every step: it has no phases")

    @property
    def needs_gradient_norm(self) -> bool:
        """Whether the exchange has to wait until the norm of the whole gradient is known."""
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return from_config, (self.to_config(),)  # what it is bound to stays behind

    # Runtime: a compressor knows the optimizers that it was handed to.

    def bind(self, optimizer_side: Any) -> None:
        """Called by framework bindings with what keeps the statistics and the epoch."""
        self.__dict__.setdefault("_bound", weakref.WeakSet()).add(optimizer_side)

    def _only_bound(self) -> Any:
        bound = list(self.__dict__.get("_bound", ()))
        if len(bound) != 1:
            raise UnboundError(
                f"{type(self).__name__} is bound to {len(bound)} optimizers: pass it to one "
                "hvd.DistributedOptimizer(..., compression=...), or ask optimizer.compression"
            )
        return bound[0]

    def stats(self) -> Stats:
        """Exact bytes so far and more; see :class:`hvd_compress.stats.Stats`."""
        return self._only_bound().stats()

    def set_epoch(self, epoch: float) -> None:
        """Announce an epoch, or a part of one such as 2.5, for schedules by epoch."""
        self._only_bound().set_epoch(epoch)

    @classmethod
    def compress(cls, *_: Any, **__: Any) -> Any:
        """Horovod's own interface, which a method with state cannot serve."""
        raise UnboundError(
            f"{cls.__name__} knows neither the optimizer nor the parameters. Import "
            "hvd_compress.torch before you take DistributedOptimizer from Horovod, and write "
            "hvd.DistributedOptimizer(optimizer, named_parameters=..., "
            f"compression={cls.__name__}). A single hvd.allreduce takes hvd.NoCompression and "
            "hvd.FP16"
        )

    decompress = compress

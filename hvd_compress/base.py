"""The contract between compression methods and the engines that carry their messages.

A compressor never talks to a network.  ``Compressor.exchange(gradient, state, context)`` is a
generator of *requests* (:mod:`hvd_compress.requests`).  An engine carries each of them out over all
ranks, which yield the same kinds in the same order, and sends the *reply* back in::

    def exchange(self, gradient, state, context):
        total = yield Sum(gradient)
        return Outcome(mean=total / context.size, sent=gradient, state=state)

The laws that every method obeys (checked by :func:`hvd_compress.testing.check_laws`):

* ``mean`` is the average over the ranks of the values ``sent``, but for the residual of the owner
  of a shard (state ``owner_residual``, see :mod:`hvd_compress.meetings.alltoall`);
* with error feedback nothing is lost: gradient + old residual = what was sent + new residual;
* all ranks compute bitwise equal ``mean`` and ``update``;
* shape, dtype and device of the gradient are kept;
* a NaN or Inf on one rank makes ``mean`` non-finite on every rank and leaves every state as it was;
* a block that claims to be ``homogeneous`` doubles its result if the gradient is doubled;
* a single rank, zeros, empty and one-element tensors work.

State is a dict of arrays that belongs to one tensor on one rank.  After a successful exchange the
old dict must not be used any more.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from hvd_compress.config import Configurable, from_config
from hvd_compress.errors import UnboundError, UnsupportedError
from hvd_compress.requests import Request, Sparse
from hvd_compress.stats import Stats

Array = Any  # numpy.ndarray, torch.Tensor, ...: whatever a backend is registered for
State = dict[str, Array]


class Encoded(NamedTuple):
    """The message that a rank sends, and the state that it keeps.

    Attributes:
        message: the bytes (1-D, uint8), with a header and a checksum.
        sent: what receivers read in them: a flat array, or a ``Sparse``.
        state: the new state.

    >>> elements(top_k(0.5)).encode(np.array([4.0, 1.0, 0.0, -2.0]), {}, Context()).sent
    Sparse(indices=array([0, 3]), values=array([ 4., -2.]))
    """

    message: Array
    sent: Array | Sparse
    state: State = {}


class Decoded(NamedTuple):
    """The result of ``decode``.

    Attributes:
        total: the sum of what the messages hold, flat, in the dtype of ``like``.
        finite: whether all that they hold is finite: a bool, or a symbol of one.
        update: the direction of the step, if that is not the average of what they hold.

    A number beyond half precision arrives as Inf:

    >>> coding, x = whole("float16"), np.array([4.0, 1e6])
    >>> coding.decode([coding.encode(x, {}, Context()).message], x, Context())
    Decoded(total=array([ 4., inf]), finite=False, update=None)
    """

    total: Array
    finite: Any
    update: Array | None = None


class Coding(Configurable, abc.ABC, kind="block"):
    """The way a flat array (float32 or float64) becomes a message, by two functions that anybody
    may call.  Neither talks to a network, or changes an array that it was given.

    ``context`` is the same on both ends, but for the rank.  Random choices follow from step, seed
    and name of the tensor, so that they need not be sent.

    >>> coding, x = elements(top_k(0.5)), np.array([4.0, 1.0, 0.0, -2.0])
    >>> message, sent, state = coding.encode(x, {}, Context())
    >>> message.dtype, coding.decode([message, message], x, Context()).total
    (dtype('uint8'), array([ 8.,  0.,  0., -4.]))
    """

    @abc.abstractmethod
    def varies(self, n: int, context: Context) -> bool:
        """Return whether messages of ``n`` elements may have different sizes on different ranks."""

    @abc.abstractmethod
    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        """Return the message of the flat ``x``.  If ``x`` is not finite, receivers must read
        something that is not finite either."""

    @abc.abstractmethod
    def decode(
        self,
        messages: Sequence[Array],
        like: Array,
        context: Context,
        ranks: Sequence[int] | None = None,
    ) -> Decoded:
        """Return the sum of what messages hold, added in their order.

        Args:
            messages: 1-D, uint8.
            like: an array of the size, dtype and device of the one that was encoded.
            ranks: the senders; by default message i is that of rank i.
        """


class Outcome(NamedTuple):
    """The result of an exchange.

    Attributes:
        mean: the average over the ranks of what they sent; shape and dtype of the gradient.
        sent: this rank's own contribution as the others saw it, flat: an array or a ``Sparse``.
        state: the new state.
        update: the direction of the optimizer's step, if it differs from ``mean`` (because of
            momentum that is applied after averaging); ``None`` means ``mean``.
        additive: if gradients are added instead of averaged, ``direction`` has to be multiplied by
            the number of ranks.  False for a majority vote, which is the same in both cases.

    >>> outcome = World(TopK(density=0.5), size=1).exchange([np.array([4.0, 1.0])])[0]
    >>> outcome.mean, outcome.sent.indices, outcome.state["residual"]
    (array([4., 0.]), array([0]), array([0., 1.]))
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
    """The circumstances of an exchange, in addition to the gradient.  All fields but ``rank`` and
    ``gradient_norm`` are equal on all ranks.

    Attributes:
        name, momentum, nesterov: of the tensor, and of its optimizer.
        rank, size: this rank and the number of ranks that take part.
        step: the number of exchanges of this tensor so far, counted from 0.
        epoch: as the user announced it, fractional within an epoch; ``None`` if none was announced.
        seed: the seed of random numbers that ranks share.
        gradient_norm: the L2 norm of the rank's whole gradient; ``None`` if unknown.
        sums: gradients are added instead of averaged: see :class:`Outcome`.
        dtype, shape: the gradient's before conversion, set by ``Chain``.
        phase: the phase of the method, where ``step`` is a symbol.
        scratch: memory for the loops of graphs, which outlives the step; ``None`` elsewhere.
        in_place: the result may be written into the memory of the gradient.
        reads_device: the engine carries arrays that are on a device.
        sparse: the ``mean`` of an outcome may be a flat :class:`Sparse`.
        learning_rate: that of the optimizer's next step of this tensor; ``None`` if unknown.

    >>> context = Context(name="fc.weight", rank=1, size=4, step=7)
    >>> context._replace(rank=2).rank, context.epoch
    (2, None)
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
    scratch: dict[str, Any] | None = None
    in_place: bool = False
    reads_device: bool = False
    sparse: bool = False
    learning_rate: Any = None


Exchange = Generator[Request, Any, Outcome]


class Tensors(NamedTuple):
    """The tensors of a bucket in one step.

    Attributes:
        gradients: as they were given.
        states: in which there may be other entries, too; and what stands in front of the keys there
            (``prefix``).
        momenta: of the optimizer.
        flat: flat arrays that are exchanged instead of the gradients; ``None``: the gradients as
            they are, which :meth:`Plan.takes` has allowed.
    """

    gradients: Sequence[Array]
    states: Sequence[Mapping[str, Array]]
    prefix: str
    momenta: Sequence[float]
    flat: Sequence[Array] | None = None


class Averages(NamedTuple):
    """The result of the exchange of a bucket.

    Attributes:
        directions: of the optimizer's step, arrays like the gradients or ``Sparse``.
        states: by tensor, those that are not written where the old ones are.
        counts: how many elements were sent of each tensor, where :attr:`Plan.counts` does not say.
    """

    directions: Sequence[Array | Sparse]
    states: Mapping[int, State]
    counts: Any = None


class Spec(NamedTuple):
    """A tensor as a plan is made for it: name, shape, the weight of its place, and an array of the
    kind that is exchanged."""

    name: str
    shape: tuple[int, ...]
    weight: int
    x: Array


class Plan(abc.ABC):
    """The exchange of a bucket: it is made once, and runs in every step until the bucket's tensors
    or their places are others.

    Attributes:
        form: what has made it.
        rank, size: of the step that it was made in.
        names, shapes, weights: of the tensors, by the last of which they share bytes.
        counts: how many elements are sent of each tensor; ``None`` if only the sender knows.
        additive: see :class:`Outcome`.
    """

    counts: Sequence[int | None]
    additive: bool = True

    def __init__(self, form: Form, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        self.form, self._key = form, key
        self.rank, self.size = step.rank, step.size
        self.names = tuple(spec.name for spec in specs)
        self.shapes = [spec.shape for spec in specs]
        self.weights = [spec.weight for spec in specs]

    def is_for(self, form: Form, specs: Sequence[Spec], key: Hashable, step: Context) -> bool:
        """Return whether this is the plan of these tensors in this step."""
        if form is not self.form or key != self._key:
            return False
        if (step.rank, step.size) != (self.rank, self.size):
            return False
        own = zip(self.names, self.shapes, self.weights, strict=True)
        return [spec[:3] for spec in specs] == [*own]

    @abc.abstractmethod
    def takes(self, tensors: Tensors) -> bool:
        """Return whether gradients and states are of the kinds that the plan was made for.  Then
        none of them has to be looked at one by one.

        This is asked in every step of every bucket, so it calls no function for each tensor.
        """

    @abc.abstractmethod
    def exchange(self, tensors: Tensors, step: Context) -> Generator[Request, Any, Averages]:
        """Exchange the bucket; ``step`` describes the step, and no tensor.

        Directions may be written into the gradients if ``step.in_place``.  If all is finite, an
        entry of a state that its owner replaces meanwhile stays as it was put.
        """


class Form(Protocol):
    """A method for whole buckets; see :mod:`hvd_compress.fused`."""

    def place(self, gradient: Array, context: Context) -> Place | None:
        """Return the place of a tensor; ``None`` if it is exchanged by itself, for instance because
        the form does not take its kind of arrays."""

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> Plan:
        """Return the plan of a bucket of these tensors, which have one key."""


class Place(NamedTuple):
    """The place of a tensor in the exchange of a bucket.

    Attributes:
        form: makes the plan; tensors of one form and key are exchanged together.
        weight: the bytes of common messages are counted to tensors in proportion to it, from 1.
        key: tensors that differ in it have plans of their own, for instance their dtype.
        x: the gradient as it is exchanged, flat.
        kind: of the exchange, as text; ranks of other kinds cannot take part.
    """

    form: Form
    weight: int
    key: Hashable
    x: Array
    kind: str = "joint work"


class Compressor(Configurable, abc.ABC, kind="method"):
    """A compression method with its options.

    Subclasses are frozen dataclasses: options are fields, so that equality, ``repr`` and JSON need
    no code; everything that changes from step to step is state.

    >>> method, gradient = TopK(density=0.5), np.zeros((2, 3), np.float32)
    >>> method.init(gradient), method.per_rank(gradient)
    ({'residual': array([0., 0., 0., 0., 0., 0.], dtype=float32)}, frozenset({'residual'}))
    >>> method.to_config()["density"], method.takes_momentum, method.reference
    (0.5, False, 'Aji and Heafield, EMNLP 2017')
    """

    #: the paper that describes the method
    reference: ClassVar[str] = ""
    #: options under one name, which stands for them in texts such as "dgc:compact"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: but for schedules, exchanges of a tensor request the same in every step, so that a reducer
    #: may leave out what it has seen in the step before
    is_steady: ClassVar[bool] = False
    #: the momentum and Nesterov flag that a method that takes momentum applies; ``None`` means the
    #: optimizer's.  Methods have these as options
    momentum: float | None = None
    nesterov: bool | None = None
    #: how such a method applies weight decay, "separate" or "gradient"; ``None``: it does not
    weight_decay: str | None = None
    #: how rows of sparse gradients (of embeddings) are sent, see :mod:`hvd_compress.methods.rows`;
    #: an option of some methods
    rows: str = "whole"
    #: the transforms of a method that is a chain, applied to a gradient before the exchange
    transforms: tuple[Any, ...] = ()
    #: the name of the optimizer class that the method needs, if its result is not a gradient
    partner: ClassVar[str | None] = None
    #: the names of the kinds of steps, if the method has several
    phases: ClassVar[tuple[str, ...]] = ()
    #: the method is none itself, but says how one is chosen in the first steps: see :meth:`decide`
    is_chosen_later: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, gradient: Array) -> State:
        """Return the state before the first exchange of a tensor of the shape, dtype and device of
        ``gradient``."""

    def common(self, gradient: Array) -> State:
        """Return the entries that this tensor shares with others, as they are before the first
        exchange.

        Tensors for which this returns arrays of the same keys, dtypes, shapes and device share
        them.  They are not in :meth:`init`, and are equal on all ranks.  One tensor, their home,
        has them in its state; their owner passes them to the exchange of every tensor that shares
        them.
        """
        return {}

    @abc.abstractmethod
    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        """Average ``gradient`` over the ranks; see the module's docstring."""

    def place(self, gradient: Array, context: Context) -> Place | None:
        """Return the place of this tensor in the exchange of a bucket; ``None``: it has an exchange
        of its own.  The bucket gives the same bits as :meth:`exchange` of each of its tensors."""
        return None

    def encode(self, gradient: Array, state: State, context: Context) -> Encoded:
        """Return this rank's contribution as a message that stands alone, for a server or a
        transport of one's own, which :meth:`decode` reads.

        Receivers read what was sent.  If the ranks of a method gather or sum messages, that is the
        result of :meth:`exchange` on a single rank, bit for bit.  In a step that is not finite,
        neither is the value that arrives, and the state stays as it was.

        Raises:
            UnsupportedError: it takes several ranks to know what is sent, or a receiver that keeps
                a state.
        """
        raise UnsupportedError(f"{self.name} takes all ranks to know what is sent")

    def decode(self, message: Array, like: Array, context: Context) -> Array:
        """Return what a message of :meth:`encode` holds, an array like ``like``; ``context`` is the
        sender's.
        """
        raise UnsupportedError(f"{self.name} takes all ranks to know what is sent")

    @abc.abstractmethod
    def per_rank(self, gradient: Array) -> frozenset[str]:
        """Return the keys of the state under which ranks differ; checkpoints average these."""

    def chain(self, gradient: Array, context: Context) -> Compressor:
        """Return the :class:`~hvd_compress.chain.Chain` that this exchange of the tensor runs, if
        the method is made of chains, else the method itself.  Two methods that return equal chains
        do the same to a tensor."""
        return self

    def template(self, gradient: Array) -> Compressor:
        """Return a chain that keeps the same state as those of all exchanges of the tensor, or the
        method itself."""
        return self

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> Compressor:
        """Return the method for a tensor of this name and shape: the method itself, unless it is a
        composition.  This is called before all other methods."""
        return self

    def momentum_inside(self, momentum: float, nesterov: bool) -> tuple[float, bool]:
        """Return the (momentum, nesterov) that act inside the exchange of a method that takes
        momentum: its own, and else the optimizer's."""
        own = self.momentum, self.nesterov
        return momentum if own[0] is None else own[0], nesterov if own[1] is None else own[1]

    def rows_at(self, context: Context) -> str:
        """Return how rows are sent in a step: ``rows``, unless the method is a composition."""
        return self.rows

    def decide(
        self,
        reducer: Any,
        backward: Sequence[float],
        gradients: Mapping[str, Array],
        directions: Mapping[str, Array],
    ) -> tuple[str, str] | None:
        """Return the method for all further steps as a text, and the reason, where
        ``is_chosen_later``; ``None``: ask again after the next step.  This is a collective.

        Args:
            reducer: a :class:`hvd_compress.reduce.Reducer` between two steps.
            backward: the seconds of each step on this rank since the ranks last changed, without
                those of exchanges.
            gradients: of the last step; their memory may hold anything by now.
            directions: the averages of the last step, equal on all ranks.
        """
        return None

    def repaired(self, gradient: Array, state: State) -> State:
        """Return a consistent state after a checkpoint was loaded.  Entries that differ between
        ranks may have been averaged then, or be missing on some ranks."""
        return state

    def phase_index(self, step: Array) -> Array:
        """Return the index into ``phases`` (int32) of a step; ``step`` counts from 1, and may be a
        symbol."""
        raise UnsupportedError(f"{self.name} does the same in every step: it has no phases")

    def __reduce__(self) -> tuple[Any, ...]:
        return from_config, (self.to_config(),)  # a copy is not bound to anything

    # Runtime: a compressor knows the optimizers that it was passed to.

    def bind(self, optimizer_side: Any) -> None:
        """Bind the method to the object that keeps the statistics and the epoch; framework bindings
        call this."""
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
        """Return the exact number of bytes so far, the density, the norm of residuals and the time
        that exchanges took; see :class:`hvd_compress.stats.Stats`."""
        return self._only_bound().stats()

    def reset_stats(self) -> None:
        """Begin at zero with all that :meth:`stats` counts."""
        self._only_bound().reset_stats()

    def set_epoch(self, epoch: float) -> None:
        """Announce the epoch, which may be fractional such as 2.5, for schedules by epoch."""
        self._only_bound().set_epoch(epoch)

    @classmethod
    def compress(cls, *_: Any, **__: Any) -> Any:
        """Raise ``UnboundError``: Horovod's own interface, which a method with state cannot
        serve."""
        raise UnboundError(
            f"{cls.__name__} knows neither the optimizer nor the parameters. Import "
            "hvd_compress.torch before you take DistributedOptimizer from Horovod, and write "
            "hvd.DistributedOptimizer(optimizer, named_parameters=..., "
            f"compression={cls.__name__}). A single hvd.allreduce takes hvd.NoCompression and "
            "hvd.FP16"
        )

    decompress = compress

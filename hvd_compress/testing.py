"""The law kit: what every compression method must obey, checked for any method.

There is no special case by method: a method of another package is checked like the ones here.  The
laws stand in :mod:`hvd_compress.base`; each ``_check_*`` function below is one of them.  ``make``
turns a NumPy array into an array of the framework under test, for instance ``torch.from_numpy``;
its results are then also compared with NumPy's.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import hvd_compress
import hvd_compress.blocks
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Context, Sparse, State
from hvd_compress.chain import Chain
from hvd_compress.config import from_config
from hvd_compress.engines.lockstep import World, run
from hvd_compress.errors import PayloadError, UnsupportedError
from hvd_compress.requests import Gather

#: scalar, empty, one element, vectors, small and larger matrices, and one beyond the size from
#: which selection works on a sample
SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (0,), (3, 0), (1,), (1, 1), (7,), (2, 3, 4), (33, 40), (130, 130)),
)

WentIn = Callable[[Array, State, Context], Array]


@dataclasses.dataclass
class _Case:
    """A world of ranks with one tensor, and the inputs of its next steps."""

    compressor: Compressor
    make: Callable[[np.ndarray], Array]
    size: int
    dtype: str
    shape: tuple[int, ...]
    tolerance: float
    agreement: float
    went_in: WentIn
    seed: int
    context: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.compressor = self.compressor.for_tensor("tensor", self.shape)
        self.world = World(self.compressor, self.size, self.seed)
        self.random = np.random.default_rng(self.seed)

    def require(self, condition: bool, law: str) -> None:
        if not condition:
            raise AssertionError(
                f"{self.compressor!r} breaks a law: {law} ({self.size} ranks, shape {self.shape}, "
                f"{self.dtype}, step {self.step})"
            )

    @property
    def step(self) -> int:
        return self.world.steps.get("tensor", 0)

    def numbers(self) -> list[np.ndarray]:
        """Return a gradient per rank; every other element is a multiple of 1/4, so that there are
        ties."""
        gradients = []
        for _ in range(self.size):
            x = np.asarray(self.random.normal(size=self.shape), np.float32).copy()
            flat = x.reshape(-1)
            flat[::2] = np.round(4 * flat[::2]) / 4
            gradients.append(x)
        return gradients

    def arrays(self, numbers: Sequence[np.ndarray]) -> list[Array]:
        made = [self.make(x) for x in numbers]
        return [backend_of(x).cast(x, self.dtype) for x in made]

    def exchange(self, gradients: Sequence[Array]) -> list[Any]:
        return self.world.exchange(gradients, epoch=self.step, **self.context)

    def rank_context(self, rank: int) -> Context:
        common = Context("tensor", rank, self.size, self.step, self.step, self.seed)
        return common._replace(**self.context)

    def states(self, gradients: Sequence[Array]) -> list[State]:
        fresh = [self.compressor.init(gradient) for gradient in gradients]
        return self.world.states.get("tensor", fresh)


def check_laws(
    compressor: Compressor,
    *,
    make: Callable[[np.ndarray], Array] = np.asarray,
    sizes: Sequence[int] = (1, 2, 3, 4),
    dtypes: Sequence[str] = ("float16", "float32", "float64"),
    shapes: Iterable[tuple[int, ...]] = SHAPES,
    steps: int = 3,
    tolerance: float = 0.0,
    agreement: float = 1e-6,
    went_in: WentIn | None = None,
    encodes: bool | None = None,
    namespace: Mapping[str, Any] | None = None,
    seed: int = 0,
    **context: Any,
) -> None:
    """Raise ``AssertionError`` with the broken law unless ``compressor`` obeys all of them.

    Args:
        compressor: the method, with its options.
        make: NumPy array to framework array.
        sizes: numbers of ranks.  All ``dtypes`` are tried with the last number of ranks, the
            others with float32 only.
        dtypes: of gradients, by NumPy's names and "bfloat16" where the framework has it.
        shapes: of gradients.
        steps: exchanges in a row.
        tolerance: the largest distance of ``mean`` from the average of what was sent, relative to
            the tensor's largest average magnitude.  It is the rounding error of the type in which
            sums are sent: 2**-11 for float16 and 2**-8 for bfloat16 at most.  Zero for sums in full
            precision: the rounding of the gradient's own dtype is always allowed.
        agreement: largest relative difference between a framework and NumPy.
        went_in: ``(gradient, old state, context) -> flat array`` that was sent or remains; needed
            only for a method with a "residual" that is no chain and no plain error feedback.
        encodes: whether ``encode`` makes a message in every step for the largest of the ``shapes``.
            ``False``: it refuses in one at least; ``None``: either is right.
        namespace: names beyond this package's in which ``repr`` can be evaluated.
        seed: of the gradients, and of the random numbers that ranks share.
        context: further fields of :class:`hvd_compress.Context`: ``momentum=0.9``.

    >>> check_laws(TopK(density=0.1), sizes=(1, 2), dtypes=("float32",), shapes=((3, 5),))
    """
    _check_options(
        compressor, {**vars(hvd_compress), **vars(hvd_compress.blocks), **(namespace or {})}
    )
    went_in = went_in or _reported_by_transforms(compressor)
    shapes = tuple(shapes)
    largest = max(shapes, key=math.prod)
    for shape in shapes:
        for size in sizes:
            for dtype in dtypes if size == sizes[-1] else ("float32",):
                common = (compressor, make, size, dtype, shape, tolerance, agreement, went_in)
                _check_steps(_Case(*common, seed, context), steps)
                _check_frameworks_agree(_Case(*common, seed, context), steps)
                _check_nonfinite_steps(_Case(*common, seed, context))
                _check_zeros(_Case(*common, seed, context))
                _check_strides(_Case(*common, seed, context))
                if size == sizes[0]:
                    must = encodes if shape == largest else None
                    _check_messages(_Case(*common, seed, context), steps, must)
                # Laws of magnitudes, which have nothing to do with the number of ranks.
                if size != sizes[-1]:
                    continue
                if shape == largest:
                    _check_recovery(_Case(*common, seed, context))
                if compressor.homogeneous:
                    _check_homogeneous(lambda: _Case(*common, seed, context), steps)  # noqa: B023
    _check_integers(compressor, make)


def _reported_by_transforms(compressor: Compressor) -> WentIn:
    def went_in(gradient: Array, state: State, context: Context) -> Array:
        xp = backend_of(gradient)
        x, method = xp.widen(gradient), compressor.for_tensor("tensor", xp.shape(gradient))
        found = method.chain(gradient, context)
        if not isinstance(found, Chain):
            return x + state["residual"]
        for transform in found.transforms:
            x, _ = transform.update(x, {key: state[key] for key in transform.keys}, context)
        return x

    return went_in


def _check_options(compressor: Compressor, names: dict[str, Any]) -> None:
    copies = {
        "config -> JSON -> config": from_config(json.loads(json.dumps(compressor.to_config()))),
        "eval(repr(...))": eval(
            repr(compressor), {type(compressor).__name__: type(compressor)} | names
        ),
        "pickle": pickle.loads(pickle.dumps(compressor)),
        "deepcopy": copy.deepcopy(compressor),
    }
    for way, other in copies.items():
        if other != compressor or type(other) is not type(compressor):
            raise AssertionError(f"{compressor!r} became {other!r} through {way}")


def _check_steps(case: _Case, steps: int) -> None:
    for _ in range(steps):
        gradients = case.arrays(case.numbers())
        untouched = [_bits(x) for x in gradients]
        old = case.states(gradients)
        _check_abandoned(case, gradients, old)
        entered = [
            _numbers(case.went_in(gradient, state, case.rank_context(rank)))
            for rank, (gradient, state) in enumerate(zip(gradients, old, strict=True))
            if "residual" in state
        ]
        outcomes = case.exchange(gradients)
        case.require([_bits(x) for x in gradients] == untouched, "gradients are not modified")
        first = outcomes[0]
        for outcome in outcomes:
            for result in (outcome.mean, outcome.direction):
                _check_looks_like(case, result, gradients[0])
            case.require(_bits(outcome.mean) == _bits(first.mean), "mean is the same on all ranks")
            case.require(
                _bits(outcome.direction) == _bits(first.direction),
                "update is the same on all ranks",
            )
        sent = [_dense(outcome.sent, gradients[0]) for outcome in outcomes]
        sent += [_owned(state) for state in old]
        sent += [-_owned(outcome.state) for outcome in outcomes]
        _check_mean(case, _numbers(first.mean).reshape(-1), sent)
        for there, own, outcome in zip(entered, sent, outcomes, strict=False):
            remains = outcome.state["residual"]
            # The subtraction x - sent is rounded once, except where nothing or all of x was sent.
            rounding = np.finfo(backend_of(remains).dtype(remains)).eps
            error = np.abs(own + _numbers(remains) - there)
            partly = (own != 0) & (own != there)
            case.require(
                bool((error <= partly * rounding * (np.abs(there) + np.abs(own))).all()),
                "what went in = what was sent + what remains, exactly",
            )
        _check_states(case, gradients[0], old, [outcome.state for outcome in outcomes])


def _check_abandoned(case: _Case, gradients: Sequence[Array], states: Sequence[State]) -> None:
    """Check that an exchange that breaks off (a rank dies) can be started again from the old
    state."""
    before = [_state_bits(state) for state in states]
    requests: list[Any] = []
    for rank, (gradient, state) in enumerate(zip(gradients, states, strict=True)):
        exchange = case.compressor.exchange(gradient, state, case.rank_context(rank))
        requests.append(next(exchange, None))
        exchange.close()
    after = [_state_bits(state) for state in states]
    case.require(before == after, "an exchange that breaks off leaves the state as it was")
    if isinstance(requests[0], Gather):
        payloads = [request.payload for request in requests]
        for payload in payloads:
            xp = backend_of(payload)
            flat_bytes = len(xp.shape(payload)) == 1 and xp.dtype(payload) == "uint8"
            case.require(flat_bytes, "payloads are one-dimensional uint8")
        if any(request.equal_sizes for request in requests):
            sizes = {backend_of(payload).size(payload) for payload in payloads}
            case.require(len(sizes) == 1, "payloads that promise equal_sizes have equal sizes")


def _check_looks_like(case: _Case, result: Array, gradient: Array) -> None:
    xp = backend_of(gradient)
    case.require(isinstance(result, type(gradient)), "results have the gradient's type")
    case.require(xp.shape(result) == xp.shape(gradient), "the shape of the gradient is kept")
    case.require(xp.dtype(result) == xp.dtype(gradient), "the dtype of the gradient is kept")
    there, here = getattr(result, "device", None), getattr(gradient, "device", None)
    case.require(there == here, "the device of the gradient is kept")


def _owned(state: State) -> np.ndarray:
    return _numbers(state["owner_residual"]) if "owner_residual" in state else np.zeros(1)


def _check_mean(case: _Case, mean: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    # Errors of a sum are relative to the magnitudes that are added, not to their sum.
    magnitude = sum(map(np.abs, parts)) / case.size
    own = _rounding(case.dtype)
    adding = _rounding("float64" if case.dtype == "float64" else "float32")
    # Half-precision sums are sent in their dtype, and rounded on the wire as well as in the result.
    roundings = 2 if case.dtype in ("float16", "bfloat16") else 1
    allowed = (roundings * own + (case.size + 2) * adding) * magnitude
    # Those of a product of factors are relative to its terms, which may cancel in an element.
    allowed += case.tolerance * np.max(magnitude, initial=0.0)
    allowed += _smallest(case.dtype)
    error = np.abs(mean - sum(parts) / case.size)
    case.require(
        bool(np.all(error <= allowed)),
        "mean is the average of what the ranks sent, less what stays with the owners of shards; "
        f"off by {error.max(initial=0.0):.3g}",
    )


def _check_states(case: _Case, gradient: Array, old: Sequence[State], new: Sequence[State]) -> None:
    per_rank = case.compressor.per_rank(gradient)
    case.require(per_rank <= new[0].keys(), "per_rank names keys of the state")
    for state in new:
        own = state.keys() - case.compressor.common(gradient).keys()
        case.require(own == set(case.compressor.init(gradient)), "the state keeps its keys")
        for key in state.keys() - per_rank:
            case.require(
                _bits(state[key]) == _bits(new[0][key]),
                f"{key!r}, which per_rank does not name, is equal on all ranks",
            )


def _check_frameworks_agree(case: _Case, steps: int) -> None:
    if isinstance(case.make(np.zeros(1, np.float32)), np.ndarray):
        return
    # NumPy has no bfloat16, but the same numbers in float32: what the framework rounds on the wire,
    # in the result and once more in momentum, NumPy does not.
    own = "float32" if case.dtype == "bfloat16" else case.dtype
    reference = dataclasses.replace(case, make=np.asarray, dtype=own)
    near = case.agreement + (4 * _rounding("bfloat16") if case.dtype == "bfloat16" else 0.0)
    for _ in range(steps):
        gradients = case.arrays(case.numbers())
        ours = case.exchange(gradients)
        theirs = reference.exchange([_numbers(x).astype(own) for x in gradients])
        for a, b in zip(ours, theirs, strict=True):
            pairs = [
                ("mean", a.mean, b.mean),
                ("update", a.direction, b.direction),
                *((f"state {key!r}", a.state[key], b.state[key]) for key in b.state),
            ]
            for what, x, y in pairs:
                x, y = _numbers(x), _numbers(y)
                error = np.abs(x - y).max(initial=0.0)
                case.require(
                    bool(error <= near * np.abs(y).max(initial=0.0)),
                    f"{what} agrees with NumPy; off by {error:.3g}",
                )


def _check_nonfinite_steps(case: _Case) -> None:
    """Check that NaN and Inf on one rank reach the result of all, and the state of none."""
    if 0 in case.shape:
        return
    case.exchange(case.arrays(case.numbers()))
    for bad, rank in ((np.nan, 0), (np.inf, case.size - 1), (-np.inf, case.size // 2)):
        before = [_state_bits(state) for state in case.world.states["tensor"]]
        numbers = case.numbers()
        flat = numbers[rank].reshape(-1)
        flat[case.random.integers(flat.size)] = bad
        for outcome in case.exchange(case.arrays(numbers)):
            case.require(
                not np.isfinite(_numbers(outcome.mean)).all(),
                f"{bad} on rank {rank} makes mean non-finite on every rank",
            )
        after = [_state_bits(state) for state in case.world.states["tensor"]]
        case.require(before == after, f"{bad} on rank {rank} leaves all states as they were")
    for outcome in case.exchange(case.arrays(case.numbers())):
        case.require(
            bool(np.isfinite(_numbers(outcome.mean)).all()), "a non-finite step is forgotten"
        )


#: gradients so many times the usual, by dtype: far beyond it, and nearly out of range
_HUGE = {
    "float16": (1e2, 3e3),
    "bfloat16": (1e19, 1e37),
    "float32": (1e19, 1e37),
    "float64": (1e19, 1e150),  # norms square
}


def _check_recovery(case: _Case) -> None:
    """Check that a step of gradients that are finite, but huge, leaves later results finite."""
    for factor in _HUGE[case.dtype]:
        case.world = World(case.compressor, case.size, case.seed)
        finite = []
        for huge in (False, True, *6 * (False,)):
            numbers = case.numbers()
            if huge:
                numbers = [np.asarray(x * np.float64(factor)) for x in numbers]
            with np.errstate(over="ignore", invalid="ignore"):
                outcomes = case.exchange(case.arrays(numbers))
            results = (_numbers(x) for o in outcomes for x in (o.mean, o.direction))
            finite.append(all(np.isfinite(x).all() for x in results))
        # A step in which the state itself leaves the range is given up; it must be the only one.
        case.require(
            any(finite[-2:]),
            f"some steps after gradients {factor:g} times the usual, results are finite",
        )


def _check_zeros(case: _Case) -> None:
    for _ in range(2):
        zeros = [np.zeros(case.shape, np.float32) for _ in range(case.size)]
        for outcome in case.exchange(case.arrays(zeros)):
            case.require(bool(np.isfinite(_numbers(outcome.mean)).all()), "zeros stay finite")


def _check_strides(case: _Case) -> None:
    """Check that every other element of a larger array has the result of an array of its own."""
    if not case.shape:
        return
    numbers = case.numbers()
    apart = [np.repeat(x, 2, axis=-1) for x in numbers]
    strided = [x[..., ::2] for x in case.arrays(apart)]
    together = dataclasses.replace(case).exchange(case.arrays(numbers))
    for a, b in zip(together, case.exchange(strided), strict=True):
        case.require(_bits(a.mean) == _bits(b.mean), "strides do not matter")


def _check_messages(case: _Case, steps: int, must: bool | None) -> None:
    """Check the messages of a method that stand alone: what arrives is what was sent.  ``must``:
    whether those of all steps do; ``None`` if either is right."""
    (gradient,) = case.arrays(case.numbers()[:1])
    state = dict(case.compressor.init(gradient)) | dict(case.compressor.common(gradient))
    if math.prod(case.shape) == 0:
        return
    for step in range(steps + 1):
        numbers = case.numbers()[0]
        if is_bad := step == steps:
            numbers.reshape(-1)[case.random.integers(numbers.size)] = np.nan
        (gradient,) = case.arrays([numbers])
        xp = backend_of(gradient)
        context = case.rank_context(2)._replace(size=4, step=step, epoch=step)
        if case.compressor.needs_gradient_norm:
            context = context._replace(gradient_norm=xp.norm(gradient))
        before = _bits(gradient), _state_bits(state)
        try:
            message, sent, new = case.compressor.encode(gradient, state, context)
        except UnsupportedError:
            case.require(not must, "messages stand alone: encode makes one in every step")
            return
        case.require((_bits(gradient), _state_bits(state)) == before, "encode changes no array")
        case.require(
            xp.dtype(message) == "uint8" and len(xp.shape(message)) == 1, "a message is bytes"
        )
        arrived = case.compressor.decode(message, gradient, context)
        _check_looks_like(case, arrived, gradient)
        flat = xp.from_numpy(_dense(sent, gradient), gradient)
        wide = xp.cast(flat, xp.dtype(xp.widen(gradient)))
        case.require(
            np.array_equal(_numbers(arrived), _numbers(xp.restore(wide, gradient)), equal_nan=True),
            "what arrives is what was sent",
        )
        if is_bad:
            case.require(not np.isfinite(_numbers(arrived)).all(), "NaN arrives")
            case.require(_state_bits(new) == _state_bits(state), "NaN changes no state")
        damaged = xp.to_numpy(message).copy()
        damaged[case.random.integers(damaged.size)] ^= 1 << int(case.random.integers(8))
        try:
            case.compressor.decode(xp.from_numpy(damaged, message), gradient, context)
        except PayloadError:
            state = new
        else:
            case.require(False, "a damaged message is noticed")
    case.require(must is not False, "encode refuses, as encodes=False says")


def _check_homogeneous(fresh: Callable[[], _Case], steps: int) -> None:
    """Check that results are multiplied with gradients.  With powers of two nothing is rounded
    differently, but at the ends of half precisions."""
    case = fresh()
    is_numpy = isinstance(case.make(np.zeros(1, np.float32)), np.ndarray)
    # Other frameworks agree with NumPy's results, so that one factor is enough there; half
    # precisions lose the most to a large one.
    every = (0.5, 2, 512) if case.dtype == "float32" else (512,)
    others = {factor: fresh() for factor in (every if is_numpy else (2,))}
    for _ in range(steps):
        numbers = case.numbers()
        ours = case.exchange(case.arrays(numbers))
        for factor, other in others.items():
            theirs = other.exchange(other.arrays([np.asarray(factor * x) for x in numbers]))
            for one, scaled in zip(ours, theirs, strict=True):
                for x, y in ((one.mean, scaled.mean), (one.direction, scaled.direction)):
                    x, y = factor * _numbers(x), _numbers(y)
                    allowed = (case.agreement + case.tolerance) * np.abs(x).max(initial=0.0)
                    error = np.abs(x - y).max(initial=0.0)
                    case.require(
                        bool(error <= allowed + factor * _smallest(case.dtype)),
                        f"who claims homogeneous makes {factor} times as much of {factor} times "
                        f"the gradient; off by {error:.3g}",
                    )


def _check_integers(compressor: Compressor, make: Callable[[np.ndarray], Array]) -> None:
    gradient = make(np.arange(6).reshape(2, 3))
    compressor = compressor.for_tensor("tensor", (2, 3))
    try:
        run([compressor.exchange(gradient, compressor.init(gradient), Context(epoch=0))])
    except UnsupportedError:
        return
    raise AssertionError(f"{compressor!r} took integers for a gradient: raise UnsupportedError")


def _numbers(x: Array) -> np.ndarray:
    xp = backend_of(x)
    return np.asarray(xp.to_numpy(xp.cast(x, "float64")))


def _bits(x: Array) -> bytes:
    return _numbers(x).tobytes()


def _state_bits(state: State) -> dict[str, bytes]:
    return {key: _bits(value) for key, value in state.items()}


def _dense(sent: Array | Sparse, gradient: Array) -> np.ndarray:
    if not isinstance(sent, Sparse):
        return _numbers(sent).reshape(-1)
    xp = backend_of(gradient)
    result = np.zeros(xp.size(gradient))
    result[xp.to_numpy(sent.indices)] = _numbers(sent.values)
    return result


def _rounding(dtype: str) -> float:
    return 2.0**-8 if dtype == "bfloat16" else float(np.finfo(dtype).eps) / 2


def _smallest(dtype: str) -> float:
    return 2.0**-133 if dtype == "bfloat16" else float(np.finfo(dtype).smallest_subnormal)

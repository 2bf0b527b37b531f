"""The law kit over the table of methods, in every framework; and over methods that cheat."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvd_compress import LGC, Context, Gather, Outcome, SignSGD, Sum, TopK, UnsupportedError
from hvd_compress.backends import backend_of
from hvd_compress.base import Compressor
from hvd_compress.blocks import chain
from hvd_compress.chain import Aggregated, Aggregator, Transform
from hvd_compress.engines.lockstep import World
from hvd_compress.methods import method_names
from hvd_compress.testing import check_laws
from tests.method_table import ROWS

USUAL = ((7,), (33, 40))
#: LGC trains a network in each exchange: by default in fewer shapes
TRAINING = {name for name, row in ROWS.items() if isinstance(row.method, LGC)}
#: other options of a method whose first row goes through more dtypes and shapes in the frameworks;
#: of chains each has blocks of its own
METHODS = [row.method.name for row in ROWS.values()]
VARIANTS = {
    name
    for number, (name, method) in enumerate(zip(ROWS, METHODS, strict=True))
    if method in METHODS[:number] and method != "chain"
}
# LGC has nothing to learn from the numbers that are drawn here.
pytestmark = pytest.mark.filterwarnings("ignore::hvd_compress.PoorFit")


def test_the_table_has_every_method():
    here = {row.method.name for row in ROWS.values()}
    assert here >= {name for name in method_names() if not name.startswith("test-")}


def test_a_method_that_no_longer_encodes_is_noticed():
    """Nor does one pass that is said not to, and does."""
    options = {"shapes": USUAL, "sizes": (1,), "dtypes": ("float32",)}
    with pytest.raises(AssertionError, match="messages stand alone"):
        check_laws(SignSGD(), encodes=True, **options)
    with pytest.raises(AssertionError, match="encode refuses"):
        check_laws(TopK(density=0.1), encodes=False, **options)


@pytest.mark.parametrize("name", ROWS)
def test_laws_in_numpy(name):
    # All shapes, and all dtypes; other numbers and shapes in each are among those drawn below.
    row = ROWS[name]
    few = {"shapes": USUAL} if name in TRAINING else {}
    check_laws(row.method, sizes=(3,), dtypes=("float32",), **row.options, **few)
    others = {"sizes": (1, 4), "dtypes": ("float16", "float64")}
    check_laws(row.method, shapes=USUAL[1:], **others, **row.options)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_laws_in_numpy_for_all_dtypes_in_all_shapes(row):
    check_laws(row.method, sizes=(3,), **row.options)


class Extent(NamedTuple):
    """Fewer steps than in NumPy, with which all results are compared: these shapes in float32, and
    these dtypes in one of them."""

    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float64")
    shapes: tuple[tuple[int, ...], ...] = (*USUAL, (), (3, 0), (130, 130))
    ranks: int = 3


def to_tensorflow(x):
    import tensorflow as tf  # takes longer than the laws of many methods: `make check` goes without

    return tf.convert_to_tensor(x)


def cases_of_frameworks():
    """TensorFlow takes four times as long as torch: by default two dtypes and two shapes, and of
    variants one dtype."""
    short = Extent(("float16",), USUAL, 2)
    frameworks = (("torch", torch.from_numpy, Extent()), ("tensorflow", to_tensorflow, short))
    for name, row in ROWS.items():
        for framework, make, usual in frameworks:
            extent = short if name in TRAINING | VARIANTS else usual
            if framework == "tensorflow" and name in VARIANTS:
                extent = short._replace(dtypes=())
            yield pytest.param(row, make, extent, id=f"{name}-{framework}")
            if extent != Extent():
                full = {"id": f"{name}-{framework}-all", "marks": pytest.mark.full}
                yield pytest.param(row, make, Extent(), **full)


@pytest.mark.parametrize(("row", "make", "extent"), [*cases_of_frameworks()])
def test_laws_in_frameworks(row, make, extent):
    options = {"make": make, "sizes": (extent.ranks,), "steps": 2, **row.options}
    if extent.dtypes:
        check_laws(row.method, dtypes=extent.dtypes, shapes=USUAL[1:], **options)
    check_laws(row.method, dtypes=("float32",), shapes=extent.shapes, **options)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@settings(max_examples=8)
@given(
    size=st.integers(1, 5),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
    dtype=st.sampled_from(("float16", "float32", "float64")),
    seed=st.integers(0, 2**32 - 1),
)
def test_laws_for_drawn_shapes(row, size, shape, dtype, seed):
    check_laws(
        row.method,
        sizes=(size,),
        shapes=(shape,),
        dtypes=(dtype,),
        steps=2,
        seed=seed,
        **{**row.options, "encodes": None},  # small tensors are sent in other ways
    )


PLAIN = {
    key: row.method
    for key, row in ROWS.items()
    if row.method.for_tensor("tensor", (2, 2)).init(np.zeros((2, 2), np.float32)).keys()
    == {"residual"}
}


@pytest.mark.parametrize("method", PLAIN.values(), ids=PLAIN)
@settings(max_examples=20)
@given(
    gradients=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 40)),
        elements=st.floats(-65504, 65504, width=32),
    ),
)
def test_nothing_is_lost_for_drawn_values(method, gradients):
    world = World(method, len(gradients))
    for _ in range(2):
        old = [state["residual"].copy() for state in world.states.get("tensor", ())]
        outcomes = world.exchange(list(gradients))
        if not np.isfinite(outcomes[0].mean).all():  # the sum is too large for float16
            break
        for rank, (gradient, outcome) in enumerate(zip(gradients, outcomes, strict=True)):
            entered = gradient.reshape(-1) + (old[rank] if old else 0)
            sent = outcome.sent
            if not isinstance(sent, np.ndarray):
                sent = np.zeros_like(entered)
                sent[outcome.sent.indices] = outcome.sent.values
            # Differences of numbers within a factor of two are exact, others are rounded once.
            near = (entered <= 2 * sent) & (sent <= 2 * entered)
            near |= (entered >= 2 * sent) & (sent >= 2 * entered)
            size = np.abs(entered.astype(float)) + np.abs(sent)
            allowed = np.where(near | (sent == 0), 0, np.finfo(np.float32).eps * size)
            error = outcome.state["residual"].astype(float) + sent - entered
            assert (np.abs(error) <= allowed).all()


def test_bfloat16_of_torch_travels_through_numpy_frames():
    x = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    mean = World(ROWS["topk-half"].method, 2).exchange([x, x])[0].mean
    assert mean.dtype == torch.bfloat16
    assert mean.tolist() == [[0, 0, 0, 0], [4, 5, 6, 7]]


# Methods that break one law each: the kit must see it.


class Cheat(Compressor):
    """An honest average to begin with."""

    def init(self, gradient):
        return {"residual": backend_of(gradient).zeros(gradient.size, gradient)}

    def per_rank(self, gradient):
        return frozenset({"residual"})

    def exchange(self, gradient, state, context):
        backend_of(gradient).check_gradient(gradient)
        x = gradient.reshape(-1).astype(np.float32)
        total = yield Sum(x)
        return self.outcome(gradient, x, total / context.size, state, context)

    def outcome(self, gradient, x, mean, state, context):
        return Outcome(mean.reshape(gradient.shape).astype(gradient.dtype), x, state)


@dataclasses.dataclass(frozen=True)
class Honest(Cheat, name="test-honest"):
    pass


@dataclasses.dataclass(frozen=True)
class WrongMean(Cheat, name="test-wrong-mean"):
    def outcome(self, gradient, x, mean, state, context):
        return super().outcome(gradient, x, mean * 1.0001, state, context)


@dataclasses.dataclass(frozen=True)
class OtherMeanOnLastRank(Cheat, name="test-other-mean"):
    def outcome(self, gradient, x, mean, state, context):
        mean = np.nextafter(mean, np.float32(9)) if context.rank else mean
        return super().outcome(gradient, x, mean, state, context)


@dataclasses.dataclass(frozen=True)
class OtherUpdate(Cheat, name="test-other-update"):
    def outcome(self, gradient, x, mean, state, context):
        honest = super().outcome(gradient, x, mean, state, context)
        return honest._replace(update=honest.mean + gradient.dtype.type(context.rank))


@dataclasses.dataclass(frozen=True)
class WrongShape(Cheat, name="test-wrong-shape"):
    def outcome(self, gradient, x, mean, state, context):
        return Outcome(mean.astype(gradient.dtype), x, state)


@dataclasses.dataclass(frozen=True)
class WrongDtype(Cheat, name="test-wrong-dtype"):
    def outcome(self, gradient, x, mean, state, context):
        return Outcome(mean.reshape(gradient.shape), x, state)


@dataclasses.dataclass(frozen=True)
class Leaky(Cheat, name="test-leaky"):
    def outcome(self, gradient, x, mean, state, context):
        honest = super().outcome(gradient, x, mean, state, context)
        return honest._replace(state={"residual": 0.001 * x})


@dataclasses.dataclass(frozen=True)
class ChangesGradient(Cheat, name="test-changes-gradient"):
    def outcome(self, gradient, x, mean, state, context):
        honest = super().outcome(gradient, x, mean, state, context)
        gradient += 1
        return honest


@dataclasses.dataclass(frozen=True)
class HidesNaN(Cheat, name="test-hides-nan"):
    def exchange(self, gradient, state, context):
        return (yield from super().exchange(np.nan_to_num(gradient), state, context))


@dataclasses.dataclass(frozen=True)
class CountsNonfiniteSteps(Cheat, name="test-counts-spoilt-steps"):
    def init(self, gradient):
        return {"steps": np.zeros(1)}

    def per_rank(self, gradient):
        return frozenset()

    def outcome(self, gradient, x, mean, state, context):
        honest = super().outcome(gradient, x, mean, state, context)
        return honest._replace(state={"steps": state["steps"] + 1})


@dataclasses.dataclass(frozen=True)
class KeepsRankSecret(CountsNonfiniteSteps, name="test-keeps-rank-secret"):
    def outcome(self, gradient, x, mean, state, context):
        honest = super().outcome(gradient, x, mean, state, context)
        return honest._replace(state={"steps": np.full(1, context.rank)})


@dataclasses.dataclass(frozen=True)
class EatsOldState(Cheat, name="test-eats-old-state"):
    def exchange(self, gradient, state, context):
        state["residual"] += 1
        return (yield from super().exchange(gradient, state, context))


@dataclasses.dataclass(frozen=True)
class TakesIntegers(Cheat, name="test-takes-integers"):
    def exchange(self, gradient, state, context):
        total = yield Sum(gradient.reshape(-1).astype(np.float32))
        return self.outcome(gradient, gradient.reshape(-1), total / context.size, state, context)


@dataclasses.dataclass(frozen=True)
class Gathers(Cheat, name="test-gathers"):
    def payload(self, x, context):
        return x[context.rank :].view(np.uint8)

    def exchange(self, gradient, state, context):
        x = gradient.reshape(-1).astype(np.float32)
        yield Gather(self.payload(x, context), equal_sizes=True)
        return (yield from super().exchange(gradient, state, context))


@dataclasses.dataclass(frozen=True)
class GathersFloats(Gathers, name="test-gathers-floats"):
    def payload(self, x, context):
        return x


@dataclasses.dataclass(frozen=True)
class LosesOption(Cheat, name="test-loses-option"):
    option: int = 1

    def to_config(self):
        return {"method": self.name}


@dataclasses.dataclass(frozen=True)
class HasAScale(Cheat, name="test-has-a-scale"):
    def exchange(self, gradient, state, context):
        large = np.where(abs(gradient) <= 1, gradient.dtype.type(0), gradient)
        return (yield from super().exchange(large, state, context))

    def init(self, gradient):
        return {}

    def per_rank(self, gradient):
        return frozenset()


@dataclasses.dataclass(frozen=True)
class OddRepr(Cheat, name="test-odd-repr"):
    option: int = 1

    def __repr__(self):
        return "OddRepr()"


def check(cheat, **options):
    dtypes = ("float16", "float32")
    check_laws(cheat, shapes=((4, 5),), sizes=(1, 2), dtypes=dtypes, **options)


def test_the_kit_accepts_what_is_honest():
    check(Honest())


@pytest.mark.parametrize(
    ("cheat", "law"),
    [
        (WrongMean(), "mean is the average"),
        (OtherMeanOnLastRank(), "mean is the same on all ranks"),
        (OtherUpdate(), "update is the same on all ranks"),
        (WrongShape(), "shape"),
        (WrongDtype(), "dtype"),
        (Leaky(), "what went in"),
        (ChangesGradient(), "not modified"),
        (HidesNaN(), "non-finite on every rank"),
        (CountsNonfiniteSteps(), "leaves all states"),
        (KeepsRankSecret(), "equal on all ranks"),
        (EatsOldState(), "breaks off"),
        (TakesIntegers(), "integers"),
        (Gathers(), "equal sizes"),
        (GathersFloats(), "one-dimensional uint8"),
        (LosesOption(option=2), "JSON"),
        (OddRepr(option=2), "repr"),
        (HasAScale(), "claims homogeneous"),
    ],
    ids=lambda value: value.name if isinstance(value, Compressor) else "",
)
def test_the_kit_catches(cheat, law):
    with pytest.raises(AssertionError, match=law):
        check(cheat)


@dataclasses.dataclass(frozen=True)
class half_of_it(Transform, name="test-half-of-it"):
    """A transform that keeps half for later and says so, in different places in the frameworks."""

    keys = ("residual",)

    def update(self, x, state, context):
        if not isinstance(x, np.ndarray):
            x = x * 1.00001
        return x, {"residual": x}

    def settle(self, sent, state, context):
        return {"residual": state["residual"] - sent}


@dataclasses.dataclass(frozen=True)
class plain_sum(Aggregator, name="test-plain-sum"):
    def aggregate(self, x, state, context):
        total = yield Sum(x)
        mean = total / context.size
        return Aggregated(mean, x, backend_of(x).all_finite(mean))


def test_the_kit_catches_a_framework_that_disagrees_with_numpy():
    method = chain(half_of_it(), via=plain_sum())
    check_laws(method, shapes=((4, 5),), namespace=globals())
    with pytest.raises(AssertionError, match="agrees with NumPy"):
        check_laws(method, make=torch.from_numpy, shapes=((4, 5),), namespace=globals())


@dataclasses.dataclass(frozen=True)
class by_hand(Compressor, name="test-by-hand"):
    """Error feedback that is no chain, and gathers something else than frames."""

    def init(self, gradient):
        return {"residual": np.zeros(gradient.size, np.float32)}

    def per_rank(self, gradient):
        return frozenset({"residual"})

    def exchange(self, gradient, state, context):
        backend_of(gradient).check_gradient(gradient)
        x = gradient.reshape(-1).astype(np.float32) + state["residual"]
        sent = x.astype(np.float16)
        payloads = yield Gather(sent.view(np.uint8), equal_sizes=True)
        total = np.zeros_like(x)
        for payload in payloads:
            total += payload.view(np.float16)
        mean = (total / context.size).reshape(gradient.shape).astype(gradient.dtype)
        kept = state if not np.isfinite(mean).all() else {"residual": x - sent}
        return Outcome(mean, sent, kept)


def test_a_method_that_is_no_chain():
    check_laws(by_hand(), dtypes=("float16", "float32"))
    with pytest.raises(AssertionError, match="what went in"):
        check_laws(by_hand(), went_in=lambda x, state, context: x.reshape(-1) + 1)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    "gradient",
    [np.zeros((2, 2), np.int64), np.zeros((2, 2), complex), torch.zeros(2, 2).to_sparse()],
    ids=["int64", "complex128", "sparse"],
)
def test_what_is_no_gradient_is_refused(row, gradient):
    like = np.zeros((2, 2), np.float32) if isinstance(gradient, np.ndarray) else torch.zeros(2, 2)
    method = row.method.for_tensor("tensor", (2, 2))
    state = method.init(like)
    with pytest.raises(UnsupportedError, match="cannot compress"):
        next(method.exchange(gradient, state, Context(epoch=0)))

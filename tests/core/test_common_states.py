"""State that tensors have in common, and who keeps it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hvd_compress import LGC, Compressor, ConfigError, Outcome, partition
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import World
from hvd_compress.reduce import Reducer
from hvd_compress.requests import Joint
from tests.mutations import same


@dataclasses.dataclass(frozen=True)
class Counting(Compressor, name="test-counting"):
    """All tensors add their sizes to one number, from the second step on, and have one each."""

    since: int = 0

    def init(self, gradient):
        return {"own": np.zeros(1)}

    def common(self, gradient):
        return {"total": np.zeros(1, gradient.dtype)}

    def per_rank(self, gradient):
        return frozenset()

    def exchange(self, gradient, state, context):
        common = {}
        if context.step >= self.since:
            part = context.name, gradient.size, state.get("total")
            common = yield Joint(self.counted, part, key=gradient.dtype)
        return Outcome(gradient, gradient.ravel(), {"own": state["own"] + 1} | common)

    @staticmethod
    def counted(parts):
        """The exchange of one step; the first by name returns it."""
        old = next((total for _, _, total in parts if total is not None), np.zeros(1))
        first = min(name for name, _, _ in parts)
        new = {"total": old + sum(size for _, size, _ in parts)}
        return [new if name == first else {} for name, _, _ in parts]
        yield


def reducer(method=None, **options):
    return Reducer(method or Counting(), LocalEngine(), **options)


def of(*names, size=1, dtype="float64"):
    return {name: np.ones(size, dtype) for name in names}


def totals(own):
    return {
        name: state["total"].tolist()
        for name, state in own.store.states.items()
        if "total" in state
    }


def test_one_tensor_keeps_it():
    own = reducer()
    for step in (1, 2, 3):
        own.reduce(of("c", "b", "d"))
        assert totals(own) == {"b": [3 * step]}
        assert {name: state["own"].tolist() for name, state in own.store.states.items()} == {
            name: [step] for name in "bcd"
        }


def test_its_home_need_not_have_a_gradient():
    own = reducer()
    own.reduce(of("b", "c"))
    own.reduce(of("c"))
    own.reduce(of("a", "d"))  # those that come later, too
    own.reduce(of("b", "d"))
    assert totals(own) == {"b": [2 + 1 + 2 + 2]}
    assert own.store.states["b"]["own"] == [2]


def test_one_of_each_dtype():
    own = reducer()
    for _ in range(2):
        own.reduce(of("a", "b", dtype="float32") | of("c", "d"))
    assert totals(own) == {"a": [4], "c": [4]}


@pytest.mark.parametrize("options", [{}, {"groups": [["a", "b"], ["d"]]}, {"bucket_bytes": 1}])
@pytest.mark.parametrize("since", [0, 1, 2])
def test_all_tensors_are_in_one_exchange(options, since):
    """In the first step of it as well, whose buckets were planned for another one."""
    own = reducer(Counting(since), **options)
    for step in range(4):
        for name in "dbca":
            own.start(name, np.ones(1))
        own.finish()
        assert totals(own) == ({"a": [4 * (step - since + 1)]} if step >= since else {})


def test_a_tensor_that_comes_later_is_alone_in_its_first_step():
    """Its bucket is not planned yet, so there are two exchanges; what the first returns counts."""
    own = reducer()
    own.reduce(of("b", "c"))
    own.reduce(of("b", "c") | of("a", size=100))
    assert totals(own) == {"b": [4]}
    own.reduce(of("b", "c") | of("a", size=100))
    assert totals(own) == {"b": [4 + 102]}


def test_it_goes_on_from_a_checkpoint_wherever_it_is():
    own, other = reducer(), reducer()
    own.reduce(of("b", "c"))
    other.load_state_dict(own.state_dict())
    for each in (own, other):
        each.reduce(of("c", "d"))
        each.reduce(of("a", "b"))
        assert totals(each) == {"b": [6]}
    late = reducer()
    late.reduce(of("a", "b", "c", "d"))  # its home is another one
    late.load_state_dict(other.state_dict())
    late.reduce(of("a", "b", "c", "d"))
    assert totals(late) == {"b": [10]}


def test_two_homes_are_refused():
    own = reducer()
    own.reduce(of("a", "b"))
    merged = own.state_dict()
    merged["states"]["b"]["total"] = np.ones(1)
    own.load_state_dict(merged)
    with pytest.raises(ConfigError, match=r"'a' and 'b' both have \['total'\], of which a model"):
        own.reduce(of("a", "b"))


@pytest.mark.parametrize("total", [np.zeros(2), np.zeros(1, np.float32)])
def test_another_methods_entries_are_refused(total):
    own = reducer()
    own.reduce(of("a", "b"))
    damaged = own.state_dict()
    damaged["states"]["a"]["total"] = total
    with pytest.raises(ConfigError, match=r"there is \['own', 'total'\] where \['own'\]"):
        own.load_state_dict(damaged)
    fresh = reducer()
    fresh.load_state_dict(damaged)
    with pytest.raises(ConfigError, match=r"'total' is float.* instead of float64\[1\]"):
        fresh.reduce(of("a"))


# -- the autoencoder of LGC --------------------------------------------------------------------

SHAPES = {"first": (40, 30), "second": (64, 8), "third": (9, 9), "bias": (64,)}
LEARNED = LGC(density=0.05, learn=1, code=4, min_size=4, momentum=0.9)


def gradients(step, rank=0, shapes=SHAPES):
    random = np.random.default_rng([step, rank])
    return {name: random.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


pytestmark = pytest.mark.filterwarnings("ignore::hvd_compress.PoorFit")


@pytest.mark.parametrize("via", ["allreduce", "server"])
def test_a_training_goes_on_bit_by_bit(via):
    """From a checkpoint of each step, with tensors that come in another order."""
    method = dataclasses.replace(LEARNED, via=via)
    own = reducer(method)
    saved, directions = [], []
    for step in range(9):
        saved.append(own.state_dict())
        directions.append(own.reduce(gradients(step)))
    homes = [name for name, state in own.store.states.items() if "autoencoder" in state]
    assert homes == ["first"]
    for start, state in enumerate(saved):
        other = reducer(method)
        other.load_state_dict(state)
        for step in range(start, 9):
            found = other.reduce(dict(reversed(gradients(step).items())))
            assert same(found, directions[step])


def world_steps(method, steps, size=3):
    """The world after so many steps, and the outcomes of the last one."""
    world = World(method, size)
    for step in range(steps):
        outcomes = world.exchange_all([gradients(step, rank) for rank in range(size)])
    return world, outcomes


def test_too_few_elements_are_summed():
    """In all tensors 30 elements are selected: the mean is exact, and there is no autoencoder."""
    method = dataclasses.replace(LEARNED, density=0.01)
    shapes = {"first": (40, 30), "second": (42, 40), "bias": (64,)}
    world = World(method, 2)
    for step in range(6):
        everyones = [gradients(step, rank, shapes) for rank in range(2)]
        old = {n: [s.get("velocity", 0) for s in world.states.get(n, [{}] * 2)] for n in shapes}
        outcomes = world.exchange_all(everyones)
        assert old
        for name in ("first", "second"):
            sent = [outcome[name].sent for outcome in outcomes]
            if step >= 1:
                places = sent[0].indices
                assert places.size == {"first": 12, "second": 17}[name]
                mean = (sent[0].values + sent[1].values) / np.float32(2)
                np.testing.assert_array_equal(outcomes[0][name].mean.ravel()[places], mean)
            assert world.states[name][0].keys() == {"velocity", "memory"}


def test_methods_that_share_must_agree():
    other = dataclasses.replace(LEARNED, rate=0.01)
    for method, is_fine in (
        (partition(("first", dataclasses.replace(LEARNED, density=0.1)), otherwise=LEARNED), True),
        (partition(("first", other), otherwise=LEARNED), False),
    ):
        if is_fine:
            world_steps(method, 6)
        else:
            with pytest.raises(ConfigError, match="first and second share an autoencoder"):
                world_steps(method, 6)

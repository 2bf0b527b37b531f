"""Collectives, which the optimizer of TensorFlow's graphs must leave alone: it takes a collective
for a function of its input, which may be computed early, once for two, or not at all."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from hvd_compress import DGC, FP16, NoCompression, OneBit, StagedWarmup, TopK, switch
from hvd_compress.base import Compressor, Outcome
from hvd_compress.blocks import allgather, chain, error_feedback, top_k
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.requests import Alltoall, Broadcast, Gather, Max, Neighbors, Sum
from tests.scenarios import applies, horovod_only
from tests.scenarios.driver import assert_close, raises
from tests.scenarios.driver_tensorflow import hvd
from tests.stateless import Stateless

SCHEDULE = StagedWarmup(densities=(1.0, 0.25, 0.05))


@horovod_only
def single_tensors_do_not_stand_in_the_way_of_join() -> None:
    """Before there is anything else in this process that does."""
    for _ in range(2):
        hvd.allreduce(tf.ones([100]), name="joining", compression=TopK(density=0.1))
    assert hvd.join() in range(hvd.size())
    variable = tf.Variable(tf.zeros([40]))
    compression = hvd.bind(TopK, [variable])
    with raises(UnsupportedError, "join"):
        hvd.join()
    del compression, variable
    assert hvd.join() in range(hvd.size())


@applies(least=3)
def bindings_of_some_ranks_are_counted_by_these() -> None:
    """The number of a binding is part of the names of its collectives."""
    some = hvd.add_process_set([0, 1])
    for ranks in (some, hvd.global_process_set):
        binding = hvd.bind(FP16, [tf.Variable(tf.zeros([20]))], process_set=ranks)
        (found,) = binding.reduce([tf.fill([20], float(hvd.rank()))])
        mean = (ranks.size() - 1) / 2 if ranks.included() else hvd.rank()
        np.testing.assert_array_equal(found, np.full(20, mean))
    hvd.remove_process_set(some)


def feedback_in_units_of_the_step_needs_a_learning_rate() -> None:
    """Which the steps of a graph do not tell: an error when it is traced, on every rank."""
    method = chain(error_feedback(units="step"), via=allgather(top_k(0.05)))
    with raises(ConfigError, "learning rate"):
        hvd.bind(method, [tf.Variable(tf.zeros([40]))]).reduce([tf.ones([40])])


def what_is_divided_before_the_sum_fits_16_bits() -> None:
    """The mean fits, and the sum would not."""
    size, mean = hvd.size(), [40000.0, -60000.0, 3.0]
    for method, dtype in ((FP16(), "float32"), (FP16(), "float16"), (NoCompression(), "float16")):
        variable = tf.Variable(tf.zeros([3], dtype))

        def gradient(variable=variable, method=method):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * tf.constant(mean, variable.dtype))
            tape = hvd.DistributedGradientTape(
                tape, compression=method, gradient_predivide_factor=float(size)
            )
            return tape.gradient(loss, [variable])[0]

        for call in (gradient, tf.function(gradient, autograph=False)):
            np.testing.assert_allclose(tf.cast(call(), "float32"), mean, 2e-3)


def one_bucket_wherever_the_exchange_is() -> None:
    """Flat gradients and others are put on the device that is asked for."""
    gradients, calls = [tf.ones([40, 30]), tf.ones([700])], []
    for device in ("", "CPU:0"):
        variables = [tf.Variable(tf.zeros_like(x)) for x in gradients]
        compression = hvd.bind(OneBit, variables, device_dense=device)
        average = tf.function(lambda *own, given=compression: given.reduce(own), autograph=False)
        np.testing.assert_array_equal(average(*gradients)[1], gradients[1])
        kinds = [x.type for x in average.get_concrete_function(*gradients).graph.get_operations()]
        calls.append(kinds.count("PyFuncStateless"))
    assert calls[0] == calls[1] >= 3, calls


@dataclasses.dataclass(frozen=True)
class _Deaf(Stateless, name="test-deaf"):
    """Each kind of request; rank 0 reads the first reply only, and has no partner."""

    def exchange(self, gradient, state, context):
        total = yield Sum(gradient)
        payload = tf.reshape(tf.bitcast(gradient, tf.uint8), [-1])
        partners = {1: (2,), 2: (1,)}.get(context.rank, ())
        for request in (
            Max(gradient),
            Sum(gradient, "bfloat16"),
            Gather(payload),
            Gather(payload, equal_sizes=True),
            Alltoall([payload] * context.size),
            Neighbors(payload, partners, partners),
            Neighbors(payload[: context.rank], partners, partners, equal_sizes=False),
            Broadcast(gradient, 1),
        ):
            reply = yield request
            if context.rank:
                heard = [tf.reduce_max(tf.cast(x, tf.float32)) for x in tf.nest.flatten(reply)]
                total += tf.minimum(tf.abs(sum(heard)), 0)
        return Outcome(total / context.size, total, state)


def replies_that_one_rank_does_not_read() -> None:
    variable = tf.Variable(tf.zeros([5]))
    compression = hvd.bind(_Deaf(), [variable])
    average = tf.function(lambda x: compression.reduce([x])[0])
    for step in range(3):
        own = tf.fill([5], float(step + hvd.rank()))
        np.testing.assert_allclose(average(own), step + (hvd.size() - 1) / 2)


def constant_gradients_on_some_ranks() -> None:
    """In branches that are taken in turn."""
    lengths = (4, 300)
    variables = [tf.Variable(tf.zeros([n]), name=f"v{n}") for n in lengths]
    for method in (switch("none", TopK(density=1.0), 2), TopK(SCHEDULE)):
        compression = hvd.bind(method, variables)

        @tf.function
        def averages(x: tf.Tensor, compression=compression) -> list[tf.Tensor]:
            own = hvd.rank() == 0
            return compression.reduce(
                [tf.fill(tf.shape(v), x) if own else tf.zeros_like(v) for v in variables]
            )

        for _ in range(5):
            means = averages(tf.constant(float(hvd.size())))
            for n, mean in zip(lengths, means, strict=True):
                assert mean.shape == (n,)
                if method != TopK(SCHEDULE):
                    assert_close({"mean": mean.numpy()}, {"mean": np.ones(n, np.float32)})


SHAPES = {"a": (40, 30), "b": (7,), "c": (300, 7), "d": (1,), "e": (9, 8, 5)}
SPARSE = DGC(density=0.05, min_size=0)
#: with the loops in graphs, and with dense sums
FUSED = (
    DGC(density=0.05, min_size=1500, nesterov=True, indices="packed"),
    *(TopK(SCHEDULE, values="float16"), FP16()),
)


def _gradients(step: int, rank: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Integers, whose sums are the same in any order, and divisible by the number of ranks: a
    graph may multiply by the inverse instead.  In one step there are a NaN and an Inf."""
    random = np.random.default_rng([step, rank])
    own = {
        key: (hvd.size() * random.integers(-99, 100, shape)).astype(dtype)
        for key, shape in SHAPES.items()
    }
    if step == 2 and rank == 0:
        own["c"][0, 0], own["b"][0] = np.nan, np.inf
    return own


def buckets_are_what_their_tensors_are() -> None:
    """Bit for bit, against blocks in NumPy, tensor after tensor."""
    for method, dtype in (*((method, "float32") for method in FUSED), (SPARSE, "float64")):
        momentum = 0.5 if method.takes_momentum else 0.0
        variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES.values()]
        compression = hvd.bind(method, variables, momentum=momentum)
        average = tf.function(compression.reduce)
        world = World(method, hvd.size())
        for step in range(6):
            gradients = [_gradients(step, rank, dtype) for rank in range(hvd.size())]
            expected = world.exchange_all(gradients, momentum=momentum)[hvd.rank()]
            found = average([tf.constant(x) for x in gradients[hvd.rank()].values()])
            for own, other in zip(found, expected.values(), strict=True):
                np.testing.assert_array_equal(own.numpy(), other.direction)
            states = compression.store.states.values()
            for state, other in zip(states, expected.values(), strict=True):
                assert state.keys() == other.state.keys()
                for key, x in other.state.items():
                    np.testing.assert_array_equal(state[key].numpy(), x)


def graphs_have_a_subgraph_for_each_bucket() -> None:
    # Each rank looks at some methods: nothing runs, and so none waits for another.
    kinds = ("HorovodAllgather", "HorovodAllreduce", "PyFuncStateless", "If", "StatelessIf")

    def counts(method: object, tensors: int) -> list[int]:
        variables = [tf.Variable(tf.zeros([50, 40])) for _ in range(tensors)]
        compression = hvd.bind(method, variables, **momentum)
        assert compression.number >= 0  # which all ranks count
        if FUSED.index(method) % hvd.size() != hvd.rank():
            return []
        average = tf.function(compression.reduce)
        graph = average.get_concrete_function([v.value() for v in variables]).graph
        found = [node.type for node in graph.get_operations()]
        return [found.count(kind) for kind in kinds]

    for method in FUSED:
        momentum = {"momentum": 0.5} if method.takes_momentum else {}
        assert counts(method, 2) == counts(method, 9), method


def a_step_is_traced_once() -> None:
    """Although the state of the method is made while the first step is traced."""

    def traces_of(method: Compressor) -> int:
        variable, traces = tf.Variable(tf.ones([300])), []
        momentum = {"momentum": 0.9} if method.takes_momentum else {}

        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            traces.append(x)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * x)
            compression = hvd.bind(method, [variable], **momentum)
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            return tape.gradient(loss, variable)

        for number in range(3):
            step(tf.fill([300], float(number)))
        return len(traces)

    assert traces_of(FP16()) == 1
    assert traces_of(DGC(density=0.05)) == 1


def memory_is_used_again_unless_somebody_looks_at_it() -> None:
    variable = tf.Variable(tf.zeros([300, 7]))
    compression = hvd.bind(SPARSE, [variable], momentum=0.5)
    average = tf.function(compression.reduce)
    memory, kept, sizes, places = compression.store.scratch, [], [], set()
    for step in range(30):
        (mean,) = average([tf.constant(_gradients(step % 2, hvd.rank())["c"])])
        if step < 4:
            _, saved = compression.kept()
            tensors = [mean, *saved.values()]
            kept += [(tensor, tensor.numpy().copy()) for tensor in tensors]
        states = compression.store.states["0"].values()
        places.add(tuple(x.value().__array__().ctypes.data for x in states))
        sizes.append(memory["memory"].nbytes)
    for tensor, before in kept:
        np.testing.assert_array_equal(tensor.numpy(), before)
    assert len(places) == 1, "states are written in place"
    assert sizes[-1] == sizes[15]
    assert sizes[-1] <= 15 * 4 * (300 * 7 + 16)

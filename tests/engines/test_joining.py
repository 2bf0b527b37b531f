"""Buckets: one exchange for several tensors, and what they cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import Broadcast, Context, Gather, Neighbors, Outcome, PowerSGD, Sparse, Sum
from hvd_compress.backends import backend_of
from hvd_compress.engines.joining import TensorExchange, joined
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import World, run
from hvd_compress.errors import PayloadError
from hvd_compress.meetings.factors import orthonormal_rows
from hvd_compress.reduce.buckets import Buckets
from hvd_compress.requests import Batch, Joint
from hvd_compress.stats import Record
from tests.method_table import ROWS

MAKERS = {"numpy": np.asarray, "torch": torch.tensor, "tensorflow": tf.constant}


def in_flight(exchange, name="tensor"):
    return TensorExchange(name, exchange, Record())


def doubling(calls):
    def double(xp, stack):
        calls.append(tuple(stack.shape))
        return stack * 2

    return double


def asking(function, x):
    return in_flight((lambda: (yield Batch(function, (x,))))())


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_equal_shapes_are_one_stack(framework):
    calls, make = [], MAKERS[framework]
    double, other = doubling(calls), doubling(calls)
    values = [np.full(shape, i, np.float32) for i, shape in enumerate([(2, 3), (4,), (2, 3)])]
    members = [asking(double, make(value)) for value in values]
    members += [asking(other, make(values[0])), asking(double, make(values[0].astype(float)))]
    run([joined(members, 0, 1)])
    assert sorted(calls) == [(1, 2, 3), (1, 2, 3), (1, 4), (2, 2, 3)]
    for member, value in zip(members, [*values, values[0], values[0]], strict=True):
        np.testing.assert_array_equal(np.asarray(member.outcome), 2 * value)


def test_numpys_arrays_stay_alone():
    calls = []
    double = doubling(calls)
    run([joined([asking(double, np.ones((2, 2))) for _ in range(3)], 0, 1)])
    assert calls == [(1, 2, 2)] * 3


@pytest.mark.parametrize("framework", MAKERS)
def test_stacks_are_orthonormalised_like_matrices(framework):
    make = MAKERS[framework]
    matrices = np.random.default_rng(0).standard_normal((5, 3, 8))
    requests = [Batch(orthonormal_rows, (make(matrix),)) for matrix in matrices]
    for q, matrix in zip(Batch.answers(requests), matrices, strict=True):
        expected = orthonormal_rows(backend_of(matrix), matrix)
        np.testing.assert_allclose(np.asarray(q), expected, atol=1e-12)
        np.testing.assert_allclose(np.asarray(q) @ np.asarray(q).T, np.eye(3), atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"orthogonalise": "qr"}, {"alternate": True}])
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_many_matrices_are_one_after_the_other(framework, options):
    """Layers of two shapes, in steps of one rank."""
    method = PowerSGD(rank=2, start=0, min_compression_rate=1, **options)
    random = np.random.default_rng(1)
    shapes = {"a": (12, 10), "b": (12, 10), "c": (9, 20), "d": (12, 10), "e": (300, 200)}
    world = World(method, 1)
    states = {n: method.init(MAKERS[framework](np.zeros(s))) for n, s in shapes.items()}
    for step in range(4):
        gradients = {name: random.standard_normal(shape) for name, shape in shapes.items()}
        members = {}
        for name, gradient in gradients.items():
            gradient = MAKERS[framework](gradient)
            exchange = method.exchange(gradient, states[name], Context(name=name, step=step))
            members[name] = in_flight(exchange, name)
        run([joined(list(members.values()), 0, 1)])
        for name, member in members.items():
            states[name] = member.outcome.state
            expected = world.exchange([gradients[name]], name)[0].mean
            np.testing.assert_allclose(np.asarray(member.outcome.mean), expected, atol=1e-10)


# -- joined exchanges ----------------------------------------------------------------------------


def exchanged(methods, gradients, buckets, step, states):
    """The results of the exchanges of ``gradients[rank][name]``, joined in ``buckets``, come to:
    for each rank and name bytes of the outcome and what was counted; and the states."""
    size = len(gradients)
    members, records = [], []
    for rank, own in enumerate(gradients):
        members.append({})
        records.append({name: Record() for name in own})
        for name, gradient in own.items():
            method = methods[name].for_tensor(name, gradient.shape)
            state = states[rank][name] if states else method.init(gradient)
            state = {key: x.copy() for key, x in state.items()}
            context = Context(
                name=name,
                rank=rank,
                size=size,
                step=step,
                epoch=step,
                momentum=0.9,
                gradient_norm=3.0,
                phase=method.phases[step % len(method.phases)] if method.phases else "",
            )
            exchange = method.exchange(gradient.copy(), state, context)
            members[rank][name] = TensorExchange(name, exchange, records[rank][name])
    found, new = [{} for _ in gradients], [{} for _ in gradients]
    for bucket in with_what_belongs_together(buckets, members[0]):
        exchanges = [joined([own[n] for n in bucket], r, size) for r, own in enumerate(members)]
        for rank, outcomes in enumerate(run(exchanges)):
            assert list(outcomes) == list(bucket)
            for name, outcome in outcomes.items():
                found[rank][name] = as_bytes(outcome), records[rank][name]
                new[rank][name] = outcome.state
    return found, new


def with_what_belongs_together(buckets, members):
    """The buckets, but tensors whose requests promise to be together are in one for each kind."""
    kinds = {name: member.look.kind for name, member in members.items() if member.look.together}
    together = {}
    for name, kind in kinds.items():
        together.setdefault(kind, []).append(name)
    rest = [[name for name in bucket if name not in kinds] for bucket in buckets]
    return [*filter(None, rest), *together.values()]


def as_bytes(outcome):
    sent = outcome.sent if isinstance(outcome.sent, Sparse) else (outcome.sent,)
    arrays = [outcome.mean, outcome.direction, *sent]
    arrays += [outcome.state[key] for key in sorted(outcome.state)]
    return [np.ascontiguousarray(x).tobytes() for x in arrays]


SHAPES = [(40, 30), (7,), (), (0,), (1,), (64, 8), (3, 5, 7), (130,)]


@pytest.mark.filterwarnings("ignore::hvd_compress.PoorFit")
@settings(max_examples=80)
@given(data=st.data())
def test_results_do_not_depend_on_the_buckets(data):
    """Whatever the methods: bit for bit, and byte for byte in what is counted."""
    rows = data.draw(st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=3))
    size = data.draw(st.sampled_from([1, 2, 3, 4, 5]))
    names = [f"t{i}" for i in range(data.draw(st.integers(1, 7)))]
    shapes = {name: data.draw(st.sampled_from(SHAPES)) for name in names}
    dtypes = {name: data.draw(st.sampled_from(["float16", "float32", "float64"])) for name in names}
    methods = {name: ROWS[data.draw(st.sampled_from(rows))].method for name in names}
    random = np.random.default_rng(data.draw(st.integers(0, 100)))
    order = data.draw(st.permutations(names))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names)))) | {0, len(names)})
    buckets = [order[a:b] for a, b in itertools.pairwise(cuts)]
    alone, together = None, None
    for step in range(3):
        gradients = [
            {n: np.asarray(random.standard_normal(shapes[n]), dtypes[n]) for n in names}
            for _ in range(size)
        ]
        one, alone = exchanged(methods, gradients, [[n] for n in names], step, alone)
        other, together = exchanged(methods, gradients, buckets, step, together)
        assert one == other


def gathers(n, *, equal=False):
    parts = yield Gather(np.full(n, n, np.uint8), equal_sizes=equal)
    return Outcome(np.concatenate(parts), parts[0], {})


def test_one_message_for_a_bucket():
    """Payloads of open sizes have a table of all sizes but the last."""
    records = [Record() for _ in range(4)]
    members = [
        TensorExchange(str(n), gathers(n, equal=n > 3), record)
        for n, record in zip([2, 5, 3, 4], records, strict=True)
    ]
    bucket = joined(members, 0, 2)
    request = bucket.send(None)
    table = np.array([2], "<i8").view(np.uint8)
    own = np.concatenate([table, [2] * 2, [5] * 5, [3] * 3, [4] * 4])
    np.testing.assert_array_equal(request.payload, own)
    assert not request.equal_sizes
    table = np.array([1], "<i8").view(np.uint8)
    theirs = np.concatenate([table, [9], [5] * 5, [4] * 4]).astype(np.uint8)
    with pytest.raises(StopIteration) as stop:
        bucket.send([request.payload, theirs])
    outcomes = stop.value.value
    assert outcomes["2"].mean.tolist() == [2, 2, 9]
    assert outcomes["5"].mean.tolist() == [5] * 10
    assert outcomes["3"].mean.tolist() == [3, 3, 3]  # the other rank has nothing
    # The length of the whole message is the entry that the table lacks.
    assert sum(record.bytes_sent for record in records) == request.payload.nbytes + 8
    assert [record.bytes_received for record in records] == [1 + 8, 5, 8, 4]


def exchanges(n, *, equal, targets=(1,), sources=(1,)):
    theirs = yield Neighbors(np.full(n, n, np.uint8), targets, sources, equal)
    return Outcome(theirs, n, {})


def test_neighbours_with_equal_and_with_open_sizes():
    """The former are end to end, the latter have a table; each kind has a message of its own."""
    records = [Record() for _ in range(4)]
    members = [
        TensorExchange(str(n), exchanges(n, equal=n > 3, targets=(1, 2)), record)
        for n, record in zip([2, 5, 3, 4], records, strict=True)
    ]
    bucket = joined(members, 0, 3)
    request = bucket.send(None)
    assert not request.equal_sizes
    assert request.targets == (1, 2)
    table = np.array([2], "<i8").view(np.uint8)
    own = np.concatenate([table, [2] * 2, [3] * 3])
    np.testing.assert_array_equal(request.payload, own)
    table = np.array([0], "<i8").view(np.uint8)
    request = bucket.send([np.concatenate([table, [7]]).astype(np.uint8)])
    assert request.equal_sizes
    np.testing.assert_array_equal(request.payload, [5] * 5 + [4] * 4)
    with pytest.raises(StopIteration) as stop:
        bucket.send([np.arange(9, dtype=np.uint8)])
    outcomes = stop.value.value.items()
    found = {name: [x.tolist() for x in outcome.mean] for name, outcome in outcomes}
    assert found == {"2": [[]], "3": [[7]], "5": [[0, 1, 2, 3, 4]], "4": [[5, 6, 7, 8]]}
    # Each payload goes to two ranks, and one comes.
    assert [record.bytes_sent for record in records] == [2 * (2 + 8), 10, 2 * (3 + 8), 8]
    assert [record.bytes_received for record in records] == [0 + 8, 5, 1 + 8, 4]


@pytest.mark.parametrize("equal", [True, False])
def test_a_rank_without_neighbours(equal):
    records = [Record(), Record()]
    members = [
        TensorExchange(str(n), exchanges(n, equal=equal, targets=(), sources=()), record)
        for n, record in enumerate(records, 2)
    ]
    bucket = joined(members, 0, 3)
    assert bucket.send(None).sources == ()
    with pytest.raises(StopIteration) as stop:
        bucket.send([])
    assert all(outcome.mean == [] for outcome in stop.value.value.values())
    assert [(record.bytes_sent, record.bytes_received) for record in records] == [(0, 0)] * 2


def broadcasts(array, root):
    array = yield Broadcast(array, root)
    return Outcome(array, array, {})


@pytest.mark.parametrize("rank", [0, 1])
def test_broadcasts_of_one_root_are_one(rank):
    arrays = {"a": np.ones((2, 3)), "b": np.zeros(4), "c": np.zeros(2, np.float32), "d": np.ones(1)}
    roots = {"a": 1, "b": 1, "c": 1, "d": 0}
    records = {name: Record() for name in arrays}
    bucket = joined(
        [
            TensorExchange(name, broadcasts(arrays[name], roots[name]), records[name])
            for name in arrays
        ],
        rank,
        2,
    )
    request, seen = bucket.send(None), []
    for _ in range(2):
        seen.append((request.root, request.array.size, request.array.dtype.name))
        request = bucket.send(np.arange(request.array.size, dtype=request.array.dtype))
    seen.append((request.root, request.array.size, request.array.dtype.name))
    with pytest.raises(StopIteration) as stop:
        bucket.send(np.zeros(1))
    assert seen == [(1, 10, "float64"), (1, 2, "float32"), (0, 1, "float64")]
    outcomes = stop.value.value
    assert outcomes["a"].mean.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert outcomes["b"].mean.tolist() == [6, 7, 8, 9]
    nbytes = [arrays[name].nbytes for name in arrays]
    is_root = [roots[name] == rank for name in arrays]
    sent = [n if root else 0 for n, root in zip(nbytes, is_root, strict=True)]
    assert [record.bytes_sent for record in records.values()] == sent
    received = [n - own for n, own in zip(nbytes, sent, strict=True)]
    assert [record.bytes_received for record in records.values()] == received


@pytest.mark.parametrize("damage", ["nothing", "cut", "table", "negative"])
def test_a_damaged_bucket_is_an_error(damage):
    bucket = joined([TensorExchange(str(i), gathers(10), Record()) for i in range(3)], 0, 2)
    message = bucket.send(None).payload
    damaged = message.copy()
    sizes = damaged[:16].view("<i8")
    if damage == "table":
        sizes[:] = 20, 30
    elif damage == "negative":
        sizes[:] = -10, 20
    else:
        damaged = damaged[: 0 if damage == "nothing" else 30]
    with pytest.raises(PayloadError, match="rank 1"):
        bucket.send([message, damaged])


# -- joint work ------------------------------------------------------------------------------------


def summed_at_once(arrays):
    """One sum of all arrays end to end, for arguments of any number of tensors."""
    total = yield Sum(np.concatenate(arrays))
    return np.split(total, np.cumsum([x.size for x in arrays])[:-1])


def jointly(x, **options):
    total = yield Joint(summed_at_once, x, **options)
    return Outcome(total, x, {})


def test_joint_work_is_one_exchange():
    """Tensors of one function and key share messages, and their bytes."""
    records = [Record() for _ in range(3)]
    exchanges = [jointly(np.ones(n), weight=n) for n in (3, 1)]
    exchanges.append(jointly(np.full(2, 5.0), weight=2, key="other"))
    members = [
        TensorExchange(str(i), e, r)
        for i, (e, r) in enumerate(zip(exchanges, records, strict=True))
    ]
    assert members[0].look.kind == members[1].look.kind != members[2].look.kind
    bucket = joined(members, 0, 2)
    assert bucket.send(None).array.tolist() == [1, 1, 1, 1]
    assert bucket.send(np.array([2.0, 3, 4, 5])).array.tolist() == [5, 5]
    with pytest.raises(StopIteration) as stop:
        bucket.send(np.array([7.0, 8]))
    outcomes = stop.value.value
    assert [outcomes[str(i)].mean.tolist() for i in range(3)] == [[2, 3, 4], [5], [7, 8]]
    assert [record.bytes_sent for record in records] == [24, 8, 16]
    assert [record.bytes_received for record in records] == [24, 8, 16]


def test_joint_work_of_one_tensor_runs_on_its_own():
    outcomes = run([jointly(np.full(2, rank)) for rank in (1.0, 2.0)])
    assert [outcome.mean.tolist() for outcome in outcomes] == [[3, 3], [3, 3]]


def apart(x):
    return Outcome((yield Sum(x)), x, {})


@pytest.mark.parametrize(("exchange", "expected"), [(jointly, 1), (apart, 3)])
def test_what_belongs_together_is_one_bucket(exchange, expected):
    engine = LocalEngine()
    buckets = Buckets(
        lambda: engine,
        lambda names: [TensorExchange(name, exchange(np.ones(2)), Record(), 16) for name in names],
        lambda members: joined(members, 0, 1),
        nbytes=8,
        same_order=True,
    )
    buckets.start(["a", "b", "c"])
    buckets.finish(np.empty(0))
    assert len(buckets.plan) == expected

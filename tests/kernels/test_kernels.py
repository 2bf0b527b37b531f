"""The compiled loops against their NumPy reference, bit for bit."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import kernels
from hvd_compress.kernels import Column, Steps, reference

SIZES = st.one_of(st.integers(1, 300), st.sampled_from([511, 4096, 65_536, 65_537, 100_000]))
#: of elements that sizes alone would seldom meet
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32
)


def drawn(random, n, kind):
    """Elements of one kind: without ties, with many, few that are not zero, special ones, all
    equal."""
    if kind == "normal":
        return random.standard_normal(n).astype(np.float32)
    if kind == "ties":
        return random.integers(-2, 3, n).astype(np.float32)
    if kind == "zeros":
        return np.zeros(n, np.float32)
    if kind == "few":
        x = random.choice(np.array([0.0, -0.0], np.float32), n)
        places = random.integers(0, n, 1 + n // 2000)
        x[places] = random.standard_normal(places.size)
        return x
    finite = SPECIAL[:8] if kind == "finite" else SPECIAL
    return random.choice(finite, n)


def unaligned(x, offset):
    """The same elements, at an address that is off by so many."""
    space = np.zeros(x.size + offset, x.dtype)
    space[offset:] = x
    return space[offset:]


def steps_of(random, sizes, kind, offset, *, momentum):
    rows = []
    for n in sizes:
        arrays = [unaligned(drawn(random, n, kind), offset) for _ in range(3)]
        new = [unaligned(np.full(n, 7.0, np.float32), offset) for _ in range(2)]
        velocities = (arrays[2], new[1]) if momentum else ()
        rows.append((arrays[0], arrays[1], new[0], *velocities))
    return Steps.of(rows)


def in_place(steps):
    """The same, with the new state in the place of the old one."""
    return Steps(steps.gradients, *(2 * [steps.residuals]), *(2 * [steps.velocities]))


def copied(steps):
    made = {}  # an array that is written in place stays one
    for column in filter(None, steps):
        if id(column) not in made:
            made[id(column)] = Column([x.copy() for x in column.arrays])
    return Steps(*(c and made[id(c)] for c in steps))


def bits(x):
    return None if x is None else np.ascontiguousarray(x).view(np.uint8).tolist()


@pytest.fixture(autouse=True)
def compiled():
    assert kernels.is_compiled(), "make setup builds the loops"


def assert_selects(
    fast, plain, steps, theirs, random, momentum, nesterov, same=np.testing.assert_array_equal
):
    """Two selections of elements agree in what they find in a step, and in what they leave."""
    own = fast.select(steps, momentum, nesterov)
    expected = plain.select(theirs, momentum, nesterov)
    np.testing.assert_array_equal(own.indices, expected.indices)
    np.testing.assert_array_equal(own.finite, expected.finite)
    same(own.values, expected.values)
    remaining = random.standard_normal(own.indices.size).astype(np.float32)
    masking = momentum is not None and bool(random.integers(2))
    finite = own.finite & random.integers(0, 4, own.finite.size).astype(bool)  # of all ranks
    fast.settle(steps, own.indices, remaining, masking, finite)
    plain.settle(theirs, own.indices, remaining, masking, finite)
    for ours, other in zip(steps.rows(), theirs.rows(), strict=True):
        for x, y in zip(ours, other, strict=True):
            if x is not None:
                same(x, y)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    kinds=st.lists(
        st.sampled_from(["normal", "ties", "zeros", "few", "finite", "special"]),
        min_size=1,
        max_size=4,
    ),
    momentum=st.sampled_from([None, 0.0, 0.9]),
    nesterov=st.booleans(),
    density=st.sampled_from([0.001, 0.1, 1.0]),
    offset=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_selections_are_those_of_numpy(sizes, kinds, momentum, nesterov, density, offset, seed):
    """Over several steps, in which thresholds are predicted, and elements are of one kind or
    another."""
    random = np.random.default_rng(seed)
    counts = [max(1, int(n * density)) for n in sizes]
    fast, plain = kernels.TopKSelection(sizes, counts), reference.Selection(sizes, counts)
    for step in range(4):
        kind = kinds[step % len(kinds)]
        steps = steps_of(random, sizes, kind, offset, momentum=momentum is not None)
        if step % 2:
            steps = in_place(steps)
        theirs = copied(steps)
        assert_selects(fast, plain, steps, theirs, random, momentum, nesterov)
        for ours, other in zip(steps.rows(), theirs.rows(), strict=True):
            assert bits(ours[0]) == bits(other[0])


@pytest.mark.parametrize("kind", ["normal", "ties", "few", "zeros", "special"])
def test_elements_of_arrays_as_they_are(kind):
    """Without momentum and residuals."""
    random, sizes = np.random.default_rng(0), [70_000, 300]
    loops = kernels.TopKSelection(sizes, [40, 7]), reference.Selection(sizes, [40, 7])
    for _ in range(3):
        steps = Steps(Column([drawn(random, n, kind) for n in sizes]))
        own, expected = (selection.select(steps, None, False) for selection in loops)
        np.testing.assert_equal(own, expected)


@settings(max_examples=60, deadline=None)
@given(
    scales=st.lists(st.sampled_from([1e-3, 0.5, 1.0, 1.01, 2.0, 1e4]), min_size=3, max_size=8),
    n=st.sampled_from([1000, 70_000]),
    seed=st.integers(0, 100),
)
def test_a_wrong_prediction_changes_nothing(scales, n, seed):
    """Gradients that grow and shrink from step to step."""
    random = np.random.default_rng(seed)
    k = n // 100
    fast = kernels.TopKSelection([n], [k])
    for scale in scales:
        steps = steps_of(random, [n], "normal", 0, momentum=False)
        ((gradient, residual, *_),) = steps.rows()
        gradient[:] *= np.float32(scale)
        residual[:] = 0
        own = fast.select(steps, None)
        expected = np.sort(np.argsort(-np.abs(gradient), kind="stable")[:k])
        np.testing.assert_array_equal(own.indices, expected)


@pytest.mark.parametrize("others", [0, 50])
def test_zeros_are_never_listed(others):
    """Neither those of a parameter without gradient, nor those beside fewer others than are sent:
    a list of all would take many times as long as the search, and its memory is kept."""
    n, k = 4_000_000, 100
    gradient, residual, new = (np.full(n, x, np.float32) for x in (0, 0, 7))
    gradient[1::70_000][:others] = 3
    selection = kernels.TopKSelection([n], [k])
    before = resident()
    for _ in range(2):
        found = selection.select(Steps.of([(gradient, residual, new)]), None)
        # A list of all has four bytes and more for each; the allocator rounds up what is taken.
        assert resident() - before < 3 * n
    expected = np.sort(np.argsort(-gradient, kind="stable")[:k])
    np.testing.assert_array_equal(found.indices, expected)


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("variables", "cores", "expected"),
    [
        ({}, 8, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1, 1),  # bound to a core
        ({"MPI_LOCALNRANKS": "100"}, 8, 1),
        ({"HOROVOD_LOCAL_SIZE": "2", "OMP_NUM_THREADS": "3,1"}, 8, 3),
    ],
    ids=str,
)
def test_ranks_of_a_machine_share_its_cores(variables, cores, expected, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in (*kernels._RANKS_HERE, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    kernels._cores_of_a_rank.cache_clear()
    try:
        assert kernels.threads() == expected
    finally:
        kernels._cores_of_a_rank.cache_clear()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_change_nothing(threads, monkeypatch):
    found = []
    for number in (1, threads):
        monkeypatch.setattr(kernels, "threads", lambda number=number: number)
        random = np.random.default_rng(3)
        sizes = [200_000, 70_000, 5, 300_000]
        selection = kernels.TopKSelection(sizes, [50, 700, 1, 300_000])
        for _ in range(3):
            steps = steps_of(random, sizes, "ties", 0, momentum=True)
            own = selection.select(steps, 0.9)
            selection.settle(steps, own.indices, -own.values, True, own.finite)
            found.append([bits(x) for x in own] + [bits(x) for row in steps.rows() for x in row])
    assert found[:3] == found[3:]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=5),
    ranks=st.integers(1, 5),
    kind=st.sampled_from(["normal", "ties", "finite", "special"]),
    density=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    size=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_sums_are_those_of_numpy(sizes, ranks, kind, density, size, seed):
    random = np.random.default_rng(seed)
    total = sum(sizes)
    indices = [np.flatnonzero(random.random(total) < density) for _ in range(ranks)]
    values = [drawn(random, own.size, kind) for own in indices]
    out = [np.full(n, 9.0, np.float32) for n in sizes]
    expected = [x.copy() for x in out]
    kernels.add_up(Column(out), indices, values, size)
    reference.add_up(Column(expected), indices, values, size)
    np.testing.assert_equal(out, expected)


@given(
    st.integers(0, 3000),
    st.integers(1, 6),
    st.sampled_from(["normal", "ties", "zeros", "finite", "special"]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.integers(1, 6),
    st.integers(0, 10**6),
)
def test_merged_vectors_are_those_of_numpy_and_of_dense_sums(n, ranks, kind, density, size, seed):
    random = np.random.default_rng(seed)
    indices = [np.flatnonzero(random.random(n) < density) for _ in range(ranks)]
    values = [drawn(random, own.size, kind) for own in indices]
    places, mean = kernels.loops().merge(indices, values, size)
    expected = reference.merge(indices, values, size)
    np.testing.assert_array_equal(places, expected[0])
    np.testing.assert_array_equal(mean, expected[1])
    dense = [np.empty(n, np.float32)]
    reference.add_up(Column(dense), indices, values, size)
    np.testing.assert_array_equal(mean, dense[0][places])
    assert not np.delete(dense[0], places).any()


@pytest.mark.parametrize("wrong", [[3, 2], [2, 2], [-1, 2], [2, 10]])
def test_indices_are_checked_before_they_are_used(wrong):
    out = [np.zeros(6, np.float32), np.zeros(4, np.float32)]
    with pytest.raises(ValueError, match="ascending"):
        kernels.add_up(Column(out), [np.array(wrong)], [np.ones(2, np.float32)], 2)


@settings(max_examples=150, deadline=None)
@given(
    n=st.sampled_from([1, 2, 50, 5000, 10**6, 2**40]),
    count=st.integers(1, 300),
    b=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_rice_codes_are_those_of_numpy(n, count, b, seed):
    random = np.random.default_rng(seed)
    if n > 2**20 and b < 20:
        b += 24
    places = np.unique(random.integers(0, n, count))
    gaps = np.diff(places, prepend=-1) - 1
    room = (gaps.size * b + 7) // 8 + (int((gaps >> b).sum()) + gaps.size + 7) // 8
    own, expected = np.zeros(room + 3, np.uint8), np.zeros(room + 3, np.uint8)
    assert kernels.loops().quotients(gaps, b) == reference.quotients(gaps, b)
    kernels.loops().rice_pack(gaps, b, own)
    reference.rice_pack(gaps, b, expected)
    np.testing.assert_array_equal(own, expected)
    for unpack in (kernels.loops().rice_unpack, reference.rice_unpack):
        np.testing.assert_array_equal(unpack(own, places.size, b, n), places)
        for damaged in (places.size + 1, max(1, places.size - 1)):
            if damaged != places.size:
                with pytest.raises(ValueError, match=r"indices|\d"):
                    unpack(own, damaged, b, n)


def test_without_a_compiler_numpy_serves_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "native", None)
    kernels.is_compiled.cache_clear()
    try:
        with caplog.at_level("WARNING", "hvd_compress"):
            for _ in range(2):
                selection = kernels.TopKSelection([6], [2])
                x = np.array([1, -5, 2, 0, 4, 3], np.float32)
                found = selection.select(Steps.of([(x, np.zeros_like(x), x.copy())]), None)
        (record,) = caplog.records
        assert "install a C++ compiler" in record.getMessage()
        assert found.indices.tolist() == [1, 4]
        out = [np.empty(6, np.float32)]
        kernels.add_up(Column(out), [found.indices], [found.values], 1)
        assert out[0].tolist() == [0, -5, 0, 0, 4, 0]
        code = np.zeros(8, np.uint8)
        kernels.loops().rice_pack(np.array([1, 2]), 1, code)
        assert kernels.loops().quotients(np.array([1, 2]), 1) == 1
        assert kernels.loops().rice_unpack(code[:2], 2, 1, 6).tolist() == [1, 4]
    finally:
        kernels.is_compiled.cache_clear()

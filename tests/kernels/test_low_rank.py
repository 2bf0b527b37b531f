"""The loops of low-rank methods, compiled for each set of instructions, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import kernels
from hvd_compress.kernels import Column, low_rank
from hvd_compress.kernels.low_rank import Matrices

pytestmark = pytest.mark.skipif(kernels.native is None, reason="nothing is compiled")
#: NumPy, and the compiled sets of instructions
WAYS = (None, 0, 1, 2)


@st.composite
def matrices(draw):
    """Shapes, ranks and a generator of random numbers; rows, columns and ranks around the widths
    of vectors, sums and pieces."""
    rows = st.sampled_from([1, 2, 5, 63, 255, 256, 259, 700])
    columns = st.sampled_from([1, 3, 15, 16, 17, 64, 147, 1000, 2049, 4096, 4500, 8200])
    shapes = draw(st.lists(st.tuples(rows, columns), min_size=1, max_size=3))
    rank = draw(st.integers(1, 9))
    random = np.random.default_rng(draw(st.integers(0, 100)))
    return shapes, [min(*shape, rank) for shape in shapes], random


def by(way, monkeypatch, function):
    """The result of ``function`` if that way is taken; ``None`` if the machine has not got it."""
    with monkeypatch.context() as patch:
        patch.setattr(low_rank, "is_compiled", lambda: way is not None)
        if way is not None and not kernels.native.low_rank.use_instructions(way):
            return None
        try:
            return function()
        finally:
            kernels.native.low_rank.use_instructions(-1)


def step(shapes, ranks, x, y, q, *, sends, finite):
    """All that a step computes of these matrices."""
    all_ = Matrices(shapes, ranks)
    x, y = [a.copy() for a in x], None if y is None else [a.copy() for a in y]
    residuals, made = None if y is None else Column(y), Column(x)
    added = () if residuals is None else (residuals, made)
    start, rows = np.empty_like(q), np.empty(all_.of_p, np.float32)
    all_.unit(q, start)
    fine = all_.left(made, start, rows, *added)
    p, own = rows.copy(), np.empty_like(q)
    all_.orthonormal(p)
    all_.right(made, p, own)
    sent = [np.empty_like(a) for a in x]
    to = Column(sent) if sends else None
    all_.settle(made, residuals, p, start, own, out=made, sent=to, finite=finite)
    return [start, fine, rows, p, own, *x, *(y or []), *(sent if sends else [])]


@settings(max_examples=30, deadline=None)
@given(matrices(), st.data())
def test_all_ways_have_the_same_bits(drawn, data):
    """Also where an element is not finite, or products overflow."""
    shapes, ranks, random = drawn
    monkeypatch = pytest.MonkeyPatch()
    normal = lambda n: random.standard_normal(n).astype(np.float32)  # noqa: E731
    x, y = ([normal(n * m) for n, m in shapes] for _ in "xy")
    q = normal(Matrices(shapes, ranks).of_q)
    if data.draw(st.booleans()):
        bad = data.draw(st.sampled_from([np.nan, np.inf, 3e38]))
        x[0][random.integers(x[0].size, size=3)] = bad
    given_y = y if data.draw(st.booleans()) else None
    options = {
        "sends": data.draw(st.booleans()),
        "finite": random.random(len(shapes)) < 0.7,
    }
    run = lambda: step(shapes, ranks, x, given_y, q, **options)  # noqa: E731
    expected, *found = (by(way, monkeypatch, run) for way in WAYS)
    for own in found:
        np.testing.assert_equal(own or expected, expected)


def test_they_are_products():
    random = np.random.default_rng(0)
    shapes, ranks = [(300, 5000), (7, 40)], [3, 3]
    x, y = ([random.standard_normal(n * m).astype("f4") for n, m in shapes] for _ in "xy")
    q = random.standard_normal(3 * 5040).astype(np.float32)
    before = [a.copy() for a in y]
    finite = np.array([True, False])
    start, _, rows, p, own, *rest = step(shapes, ranks, x, y, q, sends=True, finite=finite)
    at_p = at_q = 0
    for i, (n, m) in enumerate(shapes):
        matrix = (x[i] + before[i]).reshape(n, m)
        of_p, of_q = slice(at_p, at_p + 3 * n), slice(at_q, at_q + 3 * m)
        at_p, at_q = of_p.stop, of_q.stop
        its_p, its_start = p[of_p].reshape(3, n), start[of_q].reshape(3, m)
        lengths = np.linalg.norm(its_start, axis=1)
        np.testing.assert_allclose(lengths, 1, rtol=1e-6)
        np.testing.assert_allclose(rows[of_p].reshape(3, n), its_start @ matrix.T, atol=1e-4)
        np.testing.assert_allclose(its_p @ its_p.T, np.eye(3), atol=1e-6)
        its_own = own[of_q].reshape(3, m)
        np.testing.assert_allclose(its_own, its_p @ matrix, atol=1e-4)
        mean, residual, sent = (part[i].reshape(n, m) for part in (rest[:2], rest[2:4], rest[4:]))
        np.testing.assert_allclose(mean, its_p.T @ its_start, atol=1e-5)
        np.testing.assert_allclose(sent, its_p.T @ its_own, atol=1e-4)
        expected = matrix - sent if finite[i] else before[i].reshape(n, m)
        np.testing.assert_array_equal(residual, expected)


def test_results_go_around_the_caches():
    """Those of many elements, whose rows are aligned or not."""
    random, found = np.random.default_rng(0), []
    shapes, ranks = [(300, 2048), (300, 2049)], [2, 5]
    monkeypatch = pytest.MonkeyPatch()
    x, y = ([random.standard_normal(n * m).astype("f4") for n, m in shapes] for _ in "xy")
    q = random.standard_normal(Matrices(shapes, ranks).of_q).astype(np.float32)
    options = {"sends": False, "finite": np.ones(2, bool)}
    for way in WAYS:
        own = by(way, monkeypatch, lambda: step(shapes, ranks, x, y, q, **options))
        found += [] if own is None else [own]
    np.testing.assert_equal(found, [found[0]] * len(found))


def test_arrays_that_do_not_fit_are_an_error():
    all_, x = Matrices([(4, 5)], [2]), Column([np.ones(20, np.float32)])
    with pytest.raises(ValueError, match="another size"):
        all_.left(x, np.ones(9, np.float32), np.ones(8, np.float32))
    with pytest.raises(ValueError, match="another size"):
        all_.orthonormal(np.ones(9, np.float32))
    parts = np.ones(8, np.float32), *2 * [np.ones(10, np.float32)]
    with pytest.raises(ValueError, match="one flag"):
        all_.settle(x, None, *parts, out=x, sent=None, finite=np.ones(2, bool))

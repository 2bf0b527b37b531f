"""gTop-k: merging in pairs, against a merge in dictionaries and against the rule of the paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from hvd_compress import ConfigError, Context, GTopK, Neighbors, TopK
from hvd_compress.blocks import chain, error_feedback, gtop_k
from hvd_compress.codecs.frame import coded_size
from hvd_compress.codecs.plus_minus import plus_minus
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import PayloadError
from hvd_compress.wire import sparse_size


def residuals(outcomes):
    return [outcome.state["residual"].tolist() for outcome in outcomes]


def test_two_ranks_by_hand():
    """The largest of the sums, (3, 4), is at 1; but nobody's first choice was there together."""
    world = World(GTopK(density=0.5), 2)
    outcomes = world.exchange([np.array([3.0, 2]), np.array([0.0, 2])])
    assert outcomes[0].mean.tolist() == [1.5, 0]
    assert residuals(outcomes) == [[0, 2], [0, 2]]
    assert world.exchange([np.zeros(2), np.zeros(2)])[1].mean.tolist() == [0, 2]


def test_three_ranks_by_hand():
    """Ranks 0 and 2 merge first: {0: 5, 1: 0} and {0: -1, 2: 4} become {0: 4, 2: 4}.  With {0: 9,
    1: 3} of rank 1 that is {0: 13, 2: 4}."""
    gradients = [np.array([5.0, 0, 0]), np.array([9.0, 3, 0]), np.array([-1.0, 0, 4])]
    outcomes = World(GTopK(density=0.6), 3).exchange(gradients)
    assert outcomes[2].mean.tolist() == [13 / 3, 0, 4 / 3]
    assert residuals(outcomes) == [[0, 0, 0], [0, 3, 0], [0, 0, 0]]


def test_four_ranks_by_hand():
    """Ranks 0 and 1 drop {1: 3}, ranks 2 and 3 send {1: 5}: the place is in the result, and the 3
    of rank 1 is not.  The paper's rule would lose it."""
    gradients = [[4.0, 0, 0], [0, 3.0, 0], [0, 5.0, 0], [0, 0, 2.0]]
    outcomes = World(GTopK(density=0.3), 4).exchange(list(map(np.array, gradients)))
    assert outcomes[3].mean.tolist() == [0, 5 / 4, 0]
    assert residuals(outcomes) == [[4, 0, 0], [0, 3, 0], [0, 0, 0], [0, 0, 2]]


def test_a_place_that_is_small_everywhere_is_dropped():
    gradients = [np.array([2.0, 3, 0]), np.array([2.0, 0, 4]), np.array([2.0, 0, 0])]
    outcomes = World(GTopK(density=0.3), 3).exchange(gradients)
    assert outcomes[0].mean.tolist() == [0, 0, pytest.approx(4 / 3)]


def merged_by_recursion(choices, k):
    """By place the sum, and the ranks whose values are in it; ``choices`` alike."""
    if len(choices) == 1:
        return choices[0]
    half = 1 << ((len(choices) - 1).bit_length() - 1)
    if len(choices) < 2 * half:  # those beyond a power of two come first
        pairs = [merged_by_recursion(choices[i::half], k) for i in range(half)]
        return merged_by_recursion(pairs, k)
    total = dict(merged_by_recursion(choices[:half], k))
    for place, (value, ranks) in merged_by_recursion(choices[half:], k).items():
        other, more = total.get(place, (0, set()))
        total[place] = other + value, ranks | more
    best = sorted(total, key=lambda place: (-abs(total[place][0]), place))[:k]
    return {place: total[place] for place in best}


@given(st.integers(1, 33), st.integers(0, 2**32), st.integers(2, 60), st.integers(0, 9))
def test_what_is_sent_is_what_survived_every_merge(size, seed, n, largest):
    """Whole numbers, so that sums are exact, with ties and zeros."""
    random = np.random.default_rng(seed)
    k = int(random.integers(1, n))
    world = World(chain(error_feedback(), via=gtop_k((k - 0.5) / n)), size)
    waiting = np.zeros((size, n))
    for _ in range(2):
        gradients = random.integers(-largest, largest + 1, (size, n)).astype(float)
        came = gradients + waiting
        outcomes = world.exchange(list(gradients))

        choices, own = [], []
        for rank, x in enumerate(came):
            own.append(np.argsort(-np.abs(x), kind="stable")[:k])
            choices.append({int(place): (x[place], {rank}) for place in own[-1]})
        result = merged_by_recursion(choices, k)
        expected, sent = np.zeros(n), np.zeros((size, n))
        for place, (value, ranks) in result.items():
            expected[place] = value / size
            sent[list(ranks), place] = came[list(ranks), place]
        waiting = np.array([outcome.state["residual"] for outcome in outcomes])
        for rank, outcome in enumerate(outcomes):
            np.testing.assert_array_equal(outcome.mean, expected)
            places = outcome.sent.indices
            assert set(places) == {place for place in result if rank in result[place][1]}
            np.testing.assert_array_equal(outcome.sent.values, came[rank, places])
            # Nothing of other ranks: what changed was chosen here.
            assert set(np.flatnonzero(waiting[rank] != came[rank])) <= set(own[rank])
        np.testing.assert_array_equal(waiting, came - sent)
        np.testing.assert_array_equal(sent.sum(0) / size, expected)


@given(st.integers(1, 33), st.integers(0, 2**32), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_reaches_all_and_waits_nowhere(size, seed, spoilt):
    random = np.random.default_rng(seed)
    world = World(GTopK(density=0.1), size)
    before = world.exchange(list(random.normal(size=(size, 40))))
    gradients = random.normal(size=(size, 40))
    gradients[random.integers(size), random.integers(40)] = spoilt
    for old, outcome in zip(before, world.exchange(list(gradients)), strict=True):
        assert not np.isfinite(outcome.mean).all()
        np.testing.assert_array_equal(outcome.state["residual"], old.state["residual"])


def test_alone_it_is_top_k():
    gradient = np.random.default_rng(0).normal(size=100).astype(np.float32)
    ours, theirs = (World(m(density=0.1), 1).exchange([gradient])[0] for m in (GTopK, TopK))
    np.testing.assert_array_equal(ours.mean, theirs.mean)


def test_bytes_do_not_grow_with_the_number_of_ranks_but_for_its_logarithm():
    gradient, k = np.random.default_rng(0).normal(size=1000), 10
    frame, bits = sparse_size(k, 1000, "float64"), coded_size(plus_minus(1.0), k, gradient.dtype)
    for size, pairs in ((1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (16, 4), (64, 6)):
        exchange = gtop_k(0.01, indices="int32").aggregate(gradient, {}, Context(rank=0, size=size))
        seen, reply = [], None
        try:
            while True:
                request = exchange.send(reply)
                assert isinstance(request, Neighbors)
                seen.append(request.payload.size)
                reply = [request.payload] * len(request.sources)
        except StopIteration:
            two_more = size & (size - 1) > 0
            assert seen == [frame] * (pairs + two_more) + [frame + bits] * two_more


@pytest.mark.parametrize("size", [2, 5])
def test_packed_indices_change_nothing_but_the_bytes(size):
    random = np.random.default_rng(0)
    worlds = [World(GTopK(density=0.01, indices=indices), size) for indices in ("int32", "packed")]
    for _ in range(3):
        gradients = [random.standard_normal(3000) for _ in range(size)]
        plain, packed = (world.exchange(gradients) for world in worlds)
        for ours, theirs in zip(packed, plain, strict=True):
            np.testing.assert_array_equal(ours.mean, theirs.mean)
            np.testing.assert_array_equal(ours.state["residual"], theirs.state["residual"])
    first = [
        next(gtop_k(0.01, indices=indices).aggregate(gradients[0], {}, Context(size=size)))
        for indices in ("int32", "packed")
    ]
    assert [request.equal_sizes for request in first] == [True, False]
    assert first[1].payload.size < 0.85 * first[0].payload.size


def test_damage_is_noticed():
    exchange = gtop_k(0.1).aggregate(np.arange(100.0), {}, Context(size=2))
    payload = next(exchange).payload.copy()
    payload[30] ^= 4
    with pytest.raises(PayloadError, match="rank 1"):
        exchange.send([payload])


@pytest.mark.parametrize("where", [30, -2])
def test_damage_of_what_comes_back_is_noticed(where):
    """In the entries, and in the bits behind them."""
    exchange = gtop_k(0.1).aggregate(np.arange(100.0), {}, Context(rank=2, size=3))
    frame = next(exchange).payload
    assert exchange.send([frame]).sources == ()
    result = exchange.send([]).payload.copy()
    result[where] ^= 4
    with pytest.raises(PayloadError, match="rank 0"):
        exchange.send([result])


def test_bad_options():
    for make in (GTopK, gtop_k):
        with pytest.raises(ConfigError, match="density must be"):
            make(density=0)
        with pytest.raises(ConfigError, match=r"indices.*packed"):
            make(indices="rice")


# -- training ----------------------------------------------------------------------------------


class PapersRule:
    """Shi et al., Algorithm 4: a rank forgets what it sent where the place is in the result."""

    def __init__(self, size, density):
        self.size, self.density, self.residuals = size, density, {}

    def average(self, name, gradients):
        shape, n = gradients[0].shape, gradients[0].size
        k = int(np.ceil(self.density * n))
        waiting = self.residuals.get(name, [0] * self.size)
        came = [gradient.ravel() + left for gradient, left in zip(gradients, waiting, strict=True)]
        chosen = merging = [self.largest(x, k) for x in came]
        while len(merging) > 1:
            pairs = zip(merging[::2], merging[1::2], strict=True)
            merging = [self.largest(one + other, k) for one, other in pairs]
        forget = merging[0] != 0
        self.residuals[name] = [x - v * forget for x, v in zip(came, chosen, strict=True)]
        return merging[0].reshape(shape) / np.float32(self.size)

    @staticmethod
    def largest(x, k):
        kept = np.zeros_like(x)
        best = np.argsort(-np.abs(x), kind="stable")[:k]
        kept[best] = x[best]
        return kept


class OurRule:
    def __init__(self, size, density):
        self.world = World(GTopK(density), size)

    def average(self, name, gradients):
        return self.world.exchange(gradients, name)[0].mean


def accuracy(rule, size, steps, seed):
    """Of a network with one hidden layer on all scans; momentum SGD, at a learning rate of 0.1 that
    falls in the second half.  Biases are averaged whole."""
    x, labels = load_digits(return_X_y=True)
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    random = np.random.default_rng(seed)
    weights = {
        "matrix1": np.float32(random.normal(size=(64, 128)) * np.sqrt(2 / 64)),
        "matrix2": np.float32(random.normal(size=(128, 10)) * np.sqrt(2 / 128)),
        "bias1": np.zeros(128, np.float32),
        "bias2": np.zeros(10, np.float32),
    }
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}

    def forward(x):
        hidden = np.maximum(x @ weights["matrix1"] + weights["bias1"], 0)
        return hidden, hidden @ weights["matrix2"] + weights["bias2"]

    def gradients(x, labels):
        hidden, z = forward(x)
        d = np.exp(z - z.max(1, keepdims=True))
        d /= d.sum(1, keepdims=True)
        d[np.arange(len(labels)), labels] -= 1
        d /= np.float32(len(labels))
        inner = d @ weights["matrix2"].T * (hidden > 0)
        found = [x.T @ inner, hidden.T @ d, inner.sum(0), d.sum(0)]
        return dict(zip(weights, found, strict=True))

    for step in range(steps):
        lr = np.float32(0.1 * min(1, 2 - 2 * step / steps))
        batches = random.choice(len(labels), (size, 8))
        found = [gradients(x[batch], labels[batch]) for batch in batches]
        for name in weights:
            parts = [g[name] for g in found]
            whole = name.startswith("bias")
            mean = sum(parts) / np.float32(size) if whole else rule.average(name, parts)
            velocity[name] = np.float32(0.9) * velocity[name] + mean
            weights[name] = weights[name] - lr * velocity[name]
    return (forward(x)[1].argmax(1) == labels).mean()


@pytest.mark.parametrize(
    ("size", "steps"), [(4, 600), pytest.param(16, 200, marks=pytest.mark.full)]
)
def test_it_trains_like_the_rule_of_the_paper(size, steps):
    """At the default density: 9 elements of the first matrix, 2 of the second."""
    found = {}
    for rule in (OurRule, PapersRule):
        runs = [accuracy(rule(size, GTopK().density), size, steps, seed) for seed in (2, 3)]
        found[rule] = np.mean(runs)
    print({rule.__name__: f"{100 * mean:.1f} %" for rule, mean in found.items()})
    assert found[OurRule] > found[PapersRule] - 0.03
    assert found[PapersRule] > 0.93

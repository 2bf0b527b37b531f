"""LGC: the network in every framework, and the protocol."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_compress import LGC, After, ConfigError, Context, Gather, PoorFit, Sum
from hvd_compress.blocks import chain, top_k
from hvd_compress.engines.joining import TensorExchange, alone, joined
from hvd_compress.engines.lockstep import World, run
from hvd_compress.errors import PayloadError
from hvd_compress.learned import learned_allreduce, learned_server
from hvd_compress.meetings.leader_top_k import LeaderSelection, leaders_choice
from hvd_compress.methods import lgc_numpy_network as numpy_network
from hvd_compress.methods.lgc_layout import (
    DECODER,
    ENCODER,
    first_weights,
    last_layer,
    latent_size,
    lengths,
)
from hvd_compress.stats import Record
from hvd_compress.tensorflow import autoencoder as tensorflow_network
from hvd_compress.torch import autoencoder as torch_network

MAKE = {"torch": (torch_network, torch.from_numpy), "tensorflow": (tensorflow_network, tf.constant)}
WAYS = {"allreduce": learned_allreduce, "server": learned_server}
pytestmark = pytest.mark.filterwarnings("ignore::hvd_compress.PoorFit")
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def parameters(layers):
    return sum(x.width * x.inputs * x.outputs + x.outputs for x in layers)


def batch(n, ranks=4, seed=0):
    """Values in [-1, 1], and the largest two of each row as innovations."""
    values = np.random.default_rng(seed).normal(size=(ranks, n))
    values /= np.abs(values).max()
    threshold = np.sort(np.abs(values))[:, -2:-1]
    return values, np.where(np.abs(values) >= threshold, values, 0)


def alike(step, n=2000, ranks=3, noise=0.3):
    """Gradients that are mostly common, and alike over runs of neighbours."""
    common = np.random.default_rng(step).normal(size=n // 50).repeat(50)
    own = np.random.default_rng(1000 + step).normal(size=(ranks, n))
    return list((common + noise * own).astype(np.float32).reshape(ranks, 20, n // 20))


# -- the network -------------------------------------------------------------------------------


def test_numbers_of_the_autoencoder_and_its_moments():
    common = LGC().common(np.zeros((40, 50), np.float32))
    assert (common["autoencoder"].size, sum(x.size for x in common.values())) == (216677, 650034)


def test_lengths_by_hand():
    assert lengths(1024) == [1024, 511, 255, 127, 63, 63]
    assert latent_size(1024) == 252
    assert lengths(31)[-1] == 1


def test_numbers_of_weights_by_hand():
    assert parameters(ENCODER) == 172_996
    assert parameters(DECODER) == 43_648
    assert parameters([last_layer(innovation=True)]) == 34
    assert first_weights(1, False).size == 172_996 + 43_648 + 33
    assert first_weights(4, True).size == 172_996 + 4 * (43_648 + 34)


@pytest.mark.parametrize("innovates", [False, True])
def test_derivatives_are_quotients_of_differences(innovates):
    weights = first_weights(2, innovates).astype(np.float64)
    values, innovations = batch(40)
    innovations = innovations if innovates else None

    def loss(weights):
        latents = numpy_network.encode(weights, values)
        if innovations is None:
            decoded = numpy_network.decode(weights, latents.mean(0, keepdims=True), 40, None)
            return np.square(decoded - values.mean(0)).mean()
        decoded = numpy_network.decode(weights, latents[[1, 1, 1, 1]], 40, innovations)
        pairs = [np.square(a - b).mean() for a in latents for b in latents]
        return (np.square(decoded - values).mean(1).sum() + sum(pairs)) / 2

    gradient, _ = numpy_network.gradient(weights, values, innovations, 1)
    largest = np.argsort(-np.abs(gradient))[:5]
    for place in (*largest, 0, 172_995, 172_996, weights.size - 1):
        up, down = weights.copy(), weights.copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        slope = (loss(up) - loss(down)) / 2e-6
        assert gradient[place] == pytest.approx(slope, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("framework", MAKE)
@pytest.mark.parametrize("innovates", [False, True])
@pytest.mark.parametrize("decoders", [1, 2, 4])
@pytest.mark.parametrize("n", [31, 32, 33, 34, 100, 1024])
def test_frameworks_have_the_same_network(framework, innovates, decoders, n):
    network, make = MAKE[framework]
    weights = first_weights(decoders, innovates).astype(np.float64)
    values, innovations = batch(n)
    innovations = innovations if innovates else None
    theirs = None if innovations is None else make(innovations)

    def check(found, expected):
        found = np.asarray(found)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-9 * np.abs(expected).max())

    for found, expected in zip(
        network.gradient(make(weights), make(values), theirs, 2),
        numpy_network.gradient(weights, values, innovations, 2),
        strict=True,
    ):
        check(found, expected)
    latents = numpy_network.encode(weights, values)
    assert latents.shape == (4, latent_size(n))
    check(network.encode(make(weights), make(values)), latents)


def test_equal_values_are_encoded_and_decoded_equally():
    """The similarity term is zero then: the derivative is that of decoding alone."""
    weights = first_weights(1, True).astype(np.float64)
    values, innovations = (np.repeat(x[:1], 4, 0) for x in batch(64))
    first, decoded = numpy_network.gradient(weights, values, innovations, 0)
    other, _ = numpy_network.gradient(weights, values, innovations, 3)
    np.testing.assert_allclose(first, other)
    assert (decoded == decoded[0]).all()


# -- the protocol ------------------------------------------------------------------------------


class Linear:
    """Means of four neighbours: an autoencoder that is linear."""

    @staticmethod
    def encode(weights, values):
        return values.reshape(len(values), -1, 4).mean(2)

    @staticmethod
    def decode(weights, latents, n, innovations, first=0):
        return latents.repeat(4, axis=1)


@pytest.fixture
def linear(monkeypatch):
    monkeypatch.setattr("hvd_compress.methods.lgc_aggregators.network_of", lambda x: Linear)
    monkeypatch.setattr("hvd_compress.methods.lgc_aggregators.numpy_network", Linear)


@pytest.mark.usefixtures("linear")
def test_a_linear_network_decodes_the_mean_to_the_mean():
    method = chain(via=learned_allreduce(0.04, start=0))
    gradients = [x.astype(np.float64) for x in alike(0)]
    outcome = World(method, 3).exchange(gradients)[0]
    places = outcome.sent.indices
    assert places.tolist() == np.sort(np.argsort(-np.abs(gradients[0].ravel()))[:80]).tolist()
    values = np.stack([x.ravel()[places] for x in gradients])
    mean_of_decoded = np.mean(
        [Linear.decode(0, Linear.encode(0, v[None]), 80, 0) for v in values], 0
    )
    np.testing.assert_allclose(outcome.mean.ravel()[places], mean_of_decoded[0])
    assert np.count_nonzero(outcome.mean) == 80


@each_way
@pytest.mark.parametrize("seed", range(5))
def test_no_error_is_larger_than_what_went_in(way, seed):
    """Untrained, and over values like nothing that an autoencoder can have seen."""
    method = chain(via=way(0.05, start=0))
    random = np.random.default_rng(seed)
    gradients = list(random.standard_t(1.5, size=(3, 2000)))
    outcomes = World(method, 3).exchange(gradients)
    places = outcomes[0].sent.indices
    values = np.stack([x[places] for x in gradients])
    if way is learned_server:
        for own, outcome in zip(values, outcomes, strict=True):
            assert np.linalg.norm(own - outcome.sent.values) <= np.linalg.norm(own)
    error = np.linalg.norm(values.mean(0) - outcomes[0].mean[places])
    bound = np.linalg.norm(values.mean(0) if way is learned_allreduce else values)
    assert error <= bound * (1 + 1e-12)


def lost_share(world, step):
    """The lost part of the energy of the mean of the selected values, by decoding."""
    gradients = alike(step)
    places = np.sort(np.argsort(-np.abs(gradients[step % 3].ravel()))[:200])
    wanted = np.mean([x.ravel()[places] for x in gradients], 0)
    mean = world.exchange(gradients)[0].mean.ravel()[places]
    return np.square(mean - wanted).sum() / np.square(wanted).sum()


@each_way
def test_training_helps(way):
    untrained = World(chain(via=way(0.1, start=0)), 3)
    trained = World(chain(via=way(0.1, start=60)), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PoorFit)
        for step in range(60):
            trained.exchange(alike(step))
        after = np.mean([lost_share(trained, step) for step in range(60, 66)])
    before = np.mean([lost_share(untrained, step) for step in range(6)])
    cosine, lost, steps = trained.states["tensor"][0]["quality"]
    assert after < 0.5 < before
    assert lost < 0.5
    assert cosine > 0.7
    assert steps == 0  # reported


def test_training_sends_the_values_as_they_are():
    world = World(LGC(0.05, learn=0, code=100, momentum=0.0, min_size=0), 3)
    gradients = alike(0)
    outcomes = world.exchange(gradients)
    for gradient, outcome in zip(gradients, outcomes, strict=True):
        places = outcome.sent.indices
        np.testing.assert_array_equal(outcome.sent.values, gradient.ravel()[places])
        rest = gradient.ravel().copy()
        rest[places] = 0
        np.testing.assert_array_equal(outcome.state["memory"], rest)


def requests_of(method, step, ranks=3, rank=0):
    """The requests of a rank in one step, and its bytes."""
    found, exchanges = [], []

    def note(request, reply):
        sent = request.payload if isinstance(request, Gather) else request.array
        found.append((type(request), sent.nbytes))

    for i, gradient in enumerate(alike(step)):
        context = Context(rank=i, size=ranks, step=step, momentum=0.9)
        exchange = method.exchange(gradient, method.init(gradient), context)
        exchanges.append(alone(exchange, *[note] * (i == rank)))
    run(exchanges)
    return found


def test_phases_and_their_bytes():
    n, k = 2000, 100
    method = LGC(0.05, learn=3, code=6, min_size=0)
    assert requests_of(method, 2) == [(Sum, 4 * n)]
    (first, indices), (second, values) = requests_of(method, 3)
    assert (first, second) == (Gather, Gather)
    assert 16 < indices <= 16 + k  # packed, and shorter where indices stand together
    assert values == 16 + 4 * k
    weights = (Sum, 4 * (172_996 + 43_648 + 33))
    assert [requests_of(method, step)[0] == weights for step in range(5, 10)] == [
        *(False, True, True, True, False)
    ]
    (_, indices), *rest = requests_of(method, 9)
    latent = 4 * latent_size(k)
    assert latent == 4 * 4 * 5
    assert rest == [(Sum, latent), (Sum, 4)]
    assert indices <= 16 + k + (16 + 8)  # with the scale
    assert requests_of(method, 10)[0] == (Gather, 0)  # another rank leads


def test_bytes_of_the_server():
    k, m = 100, 4
    method = LGC(0.05, learn=0, code=1, via="server", innovation=0.04, min_size=0)
    own = 16 + 8 * m + 16 + 8
    assert requests_of(method, 4) == [(Gather, 0), (Gather, own)]
    (_, leader), (_, other) = requests_of(method, 6)
    assert other == own
    assert leader <= 16 + k + 16 + 4 * latent_size(k)


@each_way
def test_all_ranks_take_over_the_weights_of_rank_0(way):
    """Frameworks may have trained them to other last bits; and a NaN may undo the first step."""
    world = World(chain(via=way(0.1, start=2)), 3)
    for step in range(2):
        world.exchange(alike(step))
    states = world.states["tensor"]
    expected = states[0]["autoencoder"].copy()
    for rank in (1, 2):
        states[rank]["autoencoder"] = expected * np.float32(1 + 0.001 * rank)
    spoilt = alike(2)
    spoilt[1][:] = np.nan
    for gradients in (spoilt, alike(3)):
        outcomes = world.exchange(gradients)
        for outcome in outcomes:
            np.testing.assert_array_equal(outcome.mean, outcomes[0].mean)
    for outcome in outcomes:
        np.testing.assert_array_equal(outcome.state["autoencoder"], expected)


def test_by_epochs():
    method = LGC(0.05, learn=After("epoch", 1), code=After("epoch", 2), min_size=0)
    assert method.needs_epoch
    world = World(method, 3)
    steps = []
    for epoch in (0, 0, 1, 1):
        world.exchange(alike(len(steps)), epoch=epoch)
        steps.append(int(world.states["tensor"][0].get("quality", [0, 0, 0])[2]))
    assert steps == [0, 0, 1, 2]


def test_what_is_too_small_has_no_autoencoder():
    method = LGC(0.01, learn=0, code=1, min_size=10)
    for shape, keys in (
        ((2000,), {"velocity"}),
        ((3, 3), {"velocity"}),
        ((30, 40), {"velocity", "memory"}),
    ):
        assert method.init(np.zeros(shape, np.float32)).keys() == keys


# -- one autoencoder for all tensors -------------------------------------------------------------


def two_tensors(step, ranks=3, dtype=np.float64):
    """The second one's gradients are a thousand times as large."""
    first, second = alike(step, 400, ranks), alike(100 + step, 600, ranks)
    return [
        {"b": x.astype(dtype), "a": 1000 * y.astype(dtype)}
        for x, y in zip(first, second, strict=True)
    ]


@pytest.mark.usefixtures("linear")
def test_one_network_for_two_tensors_by_hand():
    method = chain(via=learned_allreduce(0.04, start=0))
    world = World(method, 3)
    for step in (0, 1):
        everyones = two_tensors(step)
        outcomes = world.exchange_all(everyones)
        places, scales, rows = {}, {}, []
        for name in "ab":  # end to end, in the order of names
            leaders = everyones[step][name].ravel()
            k = leaders.size * 4 // 100
            places[name] = np.sort(np.argsort(-np.abs(leaders))[:k])
            scales[name] = np.abs(leaders).max()
            rows.append([own[name].ravel()[places[name]] / scales[name] for own in everyones])
        rows = np.concatenate(rows, axis=1)
        assert rows.shape == (3, 24 + 16)
        decoded = rows.reshape(3, 10, 4).mean((0, 2)).repeat(4)
        for name, part in (("a", slice(0, 24)), ("b", slice(24, 40))):
            wanted, given = rows.mean(0)[part], decoded[part]
            expected = scales[name] * given * (wanted @ given) / (given @ given)
            for outcome in outcomes:
                assert outcome[name].sent.indices.tolist() == places[name].tolist()
                found = outcome[name].mean.ravel()
                np.testing.assert_allclose(found[places[name]], expected)
                assert np.count_nonzero(found) == expected.size
                assert found.tobytes() == outcomes[0][name].mean.tobytes()


def bytes_of_a_step(method, step):
    """The bytes that rank 0 passes to each collective, and what is counted to the tensors."""
    everyones, buckets, records = two_tensors(step, dtype=np.float32), [], []
    for rank, own in enumerate(everyones):
        records.append({name: Record() for name in own})
        context = Context(rank=rank, size=3, step=step, momentum=0.9)
        members = [
            TensorExchange(
                name,
                method.exchange(x, method.init(x), context._replace(name=name)),
                records[rank][name],
            )
            for name, x in own.items()
        ]
        buckets.append(joined(members, rank, 3))
    sizes = []
    run([alone(buckets[0], lambda request, _: sizes.append(request.nbytes)), *buckets[1:]])
    return sizes, {name: record.bytes_sent for name, record in records[0].items()}


def test_bytes_of_one_network_for_two_tensors():
    k, open_size = 40, 8
    method = LGC(0.04, learn=0, code=3, min_size=0)
    (indices, values), counted = bytes_of_a_step(method, 0)
    assert open_size + 16 + k * 3 / 8 < indices <= open_size + 16 + k
    assert values == 16 + 4 * k
    assert sum(counted.values()) == indices + values
    assert counted["a"] == pytest.approx((indices + values) * 24 / 40, abs=1)
    (indices, latent, products), counted = bytes_of_a_step(method, 9)
    assert indices <= open_size + 16 + k + (16 + 2 * 4)  # with two scales
    assert latent == 4 * latent_size(k) < 4 * k
    assert products == 2 * 4
    assert sum(counted.values()) == indices + latent + products
    server = LGC(0.04, learn=0, code=3, via="server", innovation=0.05, min_size=0)
    (_, own), counted = bytes_of_a_step(server, 7)
    assert own == 16 + 2 * 8 + 16 + 2 * 4  # two innovations, two factors


@pytest.mark.parametrize("via", WAYS)
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("step", [2, 6])
def test_a_nonfinite_tensor_leaves_what_is_common(via, name, step):
    """Whether its own state has the autoencoder or not."""
    world = World(LGC(0.04, learn=0, code=4, via=via, min_size=0, momentum=0.9, keep=1.0), 3)
    for number in range(step):
        world.exchange_all(two_tensors(number))
    before = [world.states["a"][rank] for rank in range(3)]
    everyones = two_tensors(step)
    everyones[1][name][0] = np.nan
    outcomes = world.exchange_all(everyones)
    assert "autoencoder" not in world.states["b"][0]
    for rank, old in enumerate(before):
        assert np.isnan(outcomes[rank][name].mean).any()
        new = world.states["a"][rank]
        for key in ("autoencoder", "first_moment", "second_moment"):
            np.testing.assert_array_equal(new[key], old[key])
        if step < 4:  # nothing of such a step is kept, of no tensor
            assert all(np.isnan(outcomes[rank][n].mean).any() for n in "ab")
            np.testing.assert_array_equal(new["quality"], old["quality"])


def test_another_tensors_indices_are_noticed():
    """In 40 indices, as many as expected, one more is in the first tensor."""
    selections = [
        LeaderSelection(top_k(0.04), np.arange(n, dtype=np.float32), k, Context(size=2))
        for n, k in ((600, 24), (400, 16))
    ]
    wrong = [selections[0]._replace(k=25), selections[1]._replace(k=15)]
    with pytest.raises(PayloadError, match=r"rank 0: it has not \[24, 16\] indices into tensors"):
        run(
            [
                leaders_choice(wrong),
                leaders_choice([s._replace(context=Context(rank=1, size=2)) for s in selections]),
            ]
        )


# -- what may go wrong -------------------------------------------------------------------------


def test_gradients_that_have_nothing_in_common_are_noticed():
    method = LGC(0.05, learn=0, code=20, momentum=0.0, min_size=0)
    world = World(method, 4)
    random = np.random.default_rng(0)
    for _ in range(20):
        world.exchange(list(random.normal(size=(4, 40, 50)).astype(np.float32)))
    world.states["layer"], world.steps["layer"] = world.states["tensor"], 20
    with pytest.warns(PoorFit, match=r"of layer: .*hardly alike.*or DGC") as found:
        world.exchange(list(random.normal(size=(4, 40, 50)).astype(np.float32)), "layer")
    assert len(found) == 1  # one rank says so, once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.exchange(list(random.normal(size=(4, 40, 50)).astype(np.float32)), "layer")


def test_an_autoencoder_that_has_not_learnt_is_noticed():
    world = World(LGC(0.05, learn=0, code=3, rate=1e-6, min_size=0), 3)
    for step in range(3):
        world.exchange(alike(step))
    with pytest.warns(PoorFit, match="after 3 steps of training .* still loses"):
        world.exchange(alike(3))


def test_an_autoencoder_that_was_not_taken_over_is_noticed():
    world = World(LGC(0.05, learn=0, code=3, min_size=0), 3)
    for step in range(3):
        world.exchange(alike(step))
    for step in range(3, 6):
        spoilt = alike(step)
        spoilt[1][0] = np.nan
        assert np.isnan(world.exchange(spoilt)[0].mean).any()
    with pytest.warns(PoorFit, match="take over rank 0's"):
        world.exchange(alike(6))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_rate_that_leads_nowhere_keeps_the_weights_finite():
    world = World(chain(via=learned_allreduce(0.1, start=20, rate=1.0)), 3)
    for step in range(24):
        outcome = world.exchange(alike(step))[0]
        assert np.isfinite(outcome.mean).all()
        assert np.isfinite(outcome.state["autoencoder"]).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LGC(learn=100, code=50), "let code be greater than learn"),
        (lambda: LGC(learn=100, code=0), "let code be greater than learn"),
        (lambda: learned_allreduce(1.0).init(np.zeros(10), (10,)), "takes 10 of 10 elements"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ConfigError, match=message):
        make()

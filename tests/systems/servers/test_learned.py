"""LGC on a parameter server: by hand in NumPy, and what is conserved, lost or damaged."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hvd_compress import LGC, After, ConfigError, PayloadError, PoorFit
from hvd_compress.autoencoder import latent_size, numpy_network
from hvd_compress.autoencoder.layout import DECODER, ENCODER, last_layer, weights_of
from hvd_compress.systems.servers import SGD, Rules, Server, Simulation
from hvd_compress.systems.servers.learned import Phase
from tests.systems.servers import Recorder

WORKERS, N, K, M = 3, 1200, 60, 3
SHAPES = {"b": (7,), "w10": (10, 20), "w9": (20, 50)}  # w9 is before w10, by its number
METHOD = LGC(0.05, learn=2, code=5, innovation=0.05, min_size=0)


def alike(worker, step, noise=0.3):
    """Gradients that are mostly common, and alike over runs of neighbours."""
    common, own = np.random.default_rng(step), np.random.default_rng([step, worker])
    found = {}
    for name, shape in SHAPES.items():
        n = int(np.prod(shape))
        runs = common.normal(size=n // 25 + 1).repeat(25)[:n]
        found[name] = (runs + noise * own.normal(size=n)).reshape(shape).astype(np.float32)
    return found


def simulated(method=METHOD, gradient=alike, momentum=0.0, workers=WORKERS):
    start = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    rules = Rules(compression=method)
    return Simulation(
        start, lambda w, x, s: gradient(w, s), workers, rules, Recorder, momentum=momentum
    )


def run(sim, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoorFit)
        for _ in range(steps):
            sim.run(range(len(sim.links)))


def ordered(x):
    return np.concatenate([x["w9"].ravel(), x["w10"].ravel()])


def largest(x, k):
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def of_both(flat, k9, k10):
    return np.concatenate([largest(flat[:1000], k9), 1000 + largest(flat[1000:], k10)])


def test_every_phase_by_its_formula():
    """Momentum 0.9; until step 2 all is sent, until 5 values, then what the decoders make."""
    sim = simulated(momentum=0.9)
    (server,) = sim.servers
    u, v = np.zeros((2, WORKERS, N))
    velocity = np.zeros((WORKERS, 7))
    for step in range(9):
        gradients = [alike(w, step) for w in range(WORKERS)]
        velocity = 0.9 * velocity + [g["b"] for g in gradients]
        u = 0.9 * u + [ordered(g) for g in gradients]
        v = v + u
        weights, common = server.way.learned["autoencoder"].copy(), step - 2  # whose turn it is
        if step < 2:
            sent, masked = v, np.zeros_like(v, bool)
        else:
            common = step % WORKERS
            assert server.way.common == common
            places = of_both(v[common], 50, 10)
            sent, masked = np.zeros_like(v), np.zeros_like(v, bool)
            scales = np.abs(v[common][places])
            scales = np.repeat([scales[:50].max(), scales[50:].max()], [50, 10])
            latent = numpy_network.encode(weights, (v[common][places] / scales)[None])
            for worker in range(WORKERS):
                own = of_both(v[worker], 3, 1)
                innovation = np.zeros(N)
                innovation[own] = v[worker][own]
                values = v[worker][places]
                if step >= 5:
                    row = numpy_network.decode(
                        weights, latent, K, (innovation[places] / scales)[None], worker
                    )[0]
                    row = row * scales
                    for part in (slice(0, 50), slice(50, 60)):
                        row[part] *= values[part] @ row[part] / (row[part] @ row[part])
                    assert np.linalg.norm(values - row) <= np.linalg.norm(values)
                    values = row
                sent[worker][places] = values
                sent[worker][own] = v[worker][own]
                masked[worker][places] = masked[worker][own] = True
        v = np.where(masked, 0.5 * (v - sent), v - sent)
        u = np.where(masked, 0, u)
        run(sim, 1)
        used = server.optimizer.steps[step]
        np.testing.assert_allclose(ordered(used), sent.mean(0), rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(used["b"], velocity.mean(0), rtol=1e-5)
        for worker in range(WORKERS):
            states = sim.links[worker][0].states
            memory = ordered({name: states[name]["memory"] for name in ("w9", "w10")})
            np.testing.assert_allclose(memory, v[worker], atol=2e-3)
            assert states["b"].keys() == {"velocity"}
        trains = 2 <= step < 5
        assert (server.way.learned["autoencoder"] != weights).any() == trains
    assert server.way.phase is Phase.LATENT


def test_shapes_and_the_encoder_that_is_shipped():
    sim = simulated()
    (server,) = sim.servers
    one_decoder = weights_of((*DECODER, last_layer(innovation=True)))
    assert server.way.learned["autoencoder"].shape == (172_996 + WORKERS * one_decoder,)
    assert one_decoder == 43_648 + 34
    assert latent_size(K) == 4 * 2  # of 60, 29, 14, 6, 2
    run(sim, 4)
    untrained = sim.links[0][0].way.encoder
    run(sim, 1)
    for (link,) in sim.links:
        assert link.way.encoder.shape == (weights_of(ENCODER),)
        assert (link.way.encoder != untrained).any()
        np.testing.assert_array_equal(link.way.encoder, server.way.learned["autoencoder"][:172_996])


def test_equal_gradients_are_decoded_equally():
    """With decoders that begin alike they stay so; and the latents are the same for all."""
    sim = simulated(gradient=lambda worker, step: alike(0, step))
    (server,) = sim.servers
    weights = server.way.learned["autoencoder"]
    one = weights[172_996 : 172_996 + 43_682]
    server.way.learned["autoencoder"] = np.concatenate([weights[:172_996], *[one] * WORKERS])
    run(sim, 5)
    decoders = server.way.learned["autoencoder"][172_996:].reshape(WORKERS, -1)
    assert (decoders == decoders[0]).all()
    assert (decoders[0] != one).any()
    assert server.way.learned["quality"][0] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoorFit)
        links = [own[0] for own in sim.links]
        for worker in range(WORKERS):
            for to, frame in server.receive(worker, links[worker].push(alike(0, 5))):
                links[to].receive(frame)
    rows = [server.way._rows[worker] for worker in range(WORKERS)]
    answers = [link.answer for link in links]
    assert all((row == rows[0]).all() for row in rows)
    assert all((answer == answers[0]).all() for answer in answers)


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_nothing_is_lost(steps):
    """What went in = what the server has used + memory, with keep=1 and without momentum."""
    sim = simulated(LGC(0.05, learn=2, code=5, innovation=0.05, min_size=0, keep=1.0))
    run(sim, steps)
    used = sum(ordered(g) for g in sim.servers[0].optimizer.steps) * WORKERS
    went_in = sum(ordered(alike(w, s)) for w in range(WORKERS) for s in range(steps))
    left = sum(
        ordered({n: link.states[n]["memory"] for n in ("w9", "w10")}) for (link,) in sim.links
    )
    np.testing.assert_allclose(used + left, went_in, atol=2e-5 * steps)
    assert (np.abs(left).max() > 0.1) == (steps > 2)


def test_training_helps():
    """Runs of equal numbers can be told from the values of one worker; noise cannot."""

    def lost(code):
        method = LGC(0.1, learn=0, code=code, innovation=0.02, min_size=0, keep=0.0)
        sim = simulated(method, lambda w, s: alike(w, s, 0.1))
        run(sim, code)
        found = []
        (server,) = sim.servers
        for step in range(code, code + 6):
            links = [own[0] for own in sim.links]
            for worker, link in enumerate(links):
                for to, frame in server.receive(worker, link.push(alike(worker, step, 0.1))):
                    links[to].receive(frame)
            for worker, link in enumerate(links):
                values = link.way._flat[server.way._where]
                sent = server.way._layout.each(np.array([1.0, 1.0])) * server.way._rows[worker]
                a = values @ sent / (sent @ sent)
                found.append(np.square(values - a * sent).sum() / np.square(values).sum())
            for worker, link in enumerate(links):
                for to, frame in server.receive(worker, link.answer):
                    links[to].receive(frame)
        return np.mean(found)

    assert lost(80) < 0.75 * lost(0)


def padded(size):
    return size + -size % 8


def test_bytes_by_hand():
    """Of a worker that is not the common one, by phase; and of the server's replies."""
    sim, header = simulated(), 28 + 4
    link = sim.links[0][0]

    def sizes(parts):
        return header - 8 + 8 * len(parts) + sum(map(padded, parts))

    before, received = 0, 0
    parameters = [28, 800, 4000]
    for step in range(9):
        run(sim, 1)
        up, down = link.bytes_sent - before, link.bytes_received - received
        before, received = link.bytes_sent, link.bytes_received
        news = [4 * 172_996] if step == 4 else []
        reply = sizes([32, *news, *parameters])
        if step < 2:
            assert up == sizes([8, *parameters])
            assert down == reply
            continue
        own = 16 + 4 * 4 + 4 * 4  # places and values, packed if that is shorter
        asked, codes = down - reply, step >= 5
        choice = asked - sizes([0] + [4 * K] * codes)
        assert 16 < choice <= 16 + K + 8, "packed: less than 8 bits a place"
        answer = sizes([2 * 4 if codes else 4 * K])
        push = up - answer
        if step % WORKERS == 0:
            push -= choice + 8 + codes * (8 + padded(4 * (2 + latent_size(K))))
        assert push <= sizes([8, 28, own])
        assert push >= sizes([8, 28, own - 8])
    stats = sim.servers[0].stats
    assert stats.bytes_up == sum(each.bytes_sent for (each,) in sim.links)
    assert stats.bytes_down == sum(each.bytes_received for (each,) in sim.links)
    assert stats.pushes == 9 * WORKERS


# -- those who leave, NaN, damage ----------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 7])
@pytest.mark.parametrize("is_common", [True, False])
def test_nan_is_not_used(at, is_common):
    """Of the common worker it ends the step for all, of another one only its own part."""
    bad = at % WORKERS if is_common else (at + 1) % WORKERS

    def gradient(worker, step):
        found = alike(worker, step)
        if (worker, step) == (bad, at):
            found["w9"][0, 0] = np.nan
        return found

    sim = simulated(gradient=gradient)
    run(sim, at)
    before = [dict(link.states) for (link,) in sim.links]
    old = sim.parameters
    run(sim, 1)
    (server,) = sim.servers
    assert server.stats.non_finite == 1
    assert server.stats.dropped.total() == (WORKERS - 1 if is_common else 0)
    assert (sim.parameters["w9"] == old["w9"]).all() == is_common
    for worker, (link,) in enumerate(sim.links):
        assert link.taken == (worker != bad and not is_common)
        if not link.taken:
            for name, state in before[worker].items():
                assert link.states[name] is state
    run(sim, 6)
    assert all(np.isfinite(x).all() for x in sim.parameters.values())
    assert server.stats.updates == at + 7 - is_common


@pytest.mark.parametrize("at", [3, 7])
def test_the_others_go_on_without_a_worker(at):
    """It may be lost before or after the server has asked, and come back."""
    sim = simulated()
    run(sim, at)
    (server,) = sim.servers
    common = server.way.common
    other = (common + 1) % WORKERS
    sim.run(w for w in range(WORKERS) if w != common)
    assert server.stats.updates == at
    sim.lose(common)  # whose choice the others wait for
    assert not any(map(sim.is_waiting, range(WORKERS)))
    assert server.stats.updates == at
    sim.run([common])  # is back, with what nobody needs any more
    assert server.stats.returned == [common]
    run(sim, 1)
    assert server.stats.updates == at + 1

    common = server.way.common
    links = [own[0] for own in sim.links]
    replies = []
    other = (common + 1) % WORKERS
    for worker, link in enumerate(links):
        replies += server.receive(worker, link.push(alike(worker, 50)))
    for to, frame in replies:
        links[to].receive(frame)
    for worker, link in enumerate(links):
        if worker != other:
            assert server.receive(worker, link.answer) == []
    due = server.lose(other)
    assert sorted(to for to, _ in due) == sorted({*range(WORKERS)} - {other})
    assert server.stats.updates == at + 2
    for to, frame in due:
        links[to].receive(frame)
    (late,) = server.receive(other, links[other].answer)
    links[other].receive(late.frame)
    assert not links[other].taken
    run(sim, 4)
    assert server.stats.updates == at + 6


def test_a_worker_that_comes_back_while_others_are_asked_waits_for_the_next_step():
    sim = simulated()
    run(sim, 3)
    (server,), links = sim.servers, [own[0] for own in sim.links]
    away = (server.way.common + 1) % WORKERS
    sim.lose(away)
    asked = []
    for worker in {*range(WORKERS)} - {away}:
        asked += server.receive(worker, links[worker].push(alike(worker, 3)))
    old = links[away].push(alike(away, 3))
    for _ in range(2):
        (reply,) = server.receive(away, old)
        assert links[away].receive(reply.frame)
        assert not links[away].taken
        old = links[away].push(alike(away, 3))
    assert server.stats.dropped == {away: 2}
    for to, frame in asked:
        links[to].receive(frame)
    done = [r for to, _ in asked for r in server.receive(to, links[to].answer)]
    assert server.stats.updates == 4
    assert {to for to, _ in done} == {*range(WORKERS)} - {away}


def test_workers_may_all_leave_in_the_midst_of_a_step():
    sim = simulated()
    run(sim, 3)
    (server,), links = sim.servers, [own[0] for own in sim.links]
    for worker, link in enumerate(links):
        server.receive(worker, link.push(alike(worker, 3)))
    for worker in range(WORKERS):
        server.lose(worker)
    assert server.is_over
    assert server.stats.updates == 3


def test_damage_is_noticed():
    sim = simulated()
    run(sim, 6)
    (server,), link = sim.servers, sim.links[0][0]
    frame = link.push(alike(0, 6))
    for i in range(0, frame.size, 3):
        damaged = frame.copy()
        damaged[i] ^= 4
        with pytest.raises(PayloadError, match="worker 0"):
            server.receive(0, damaged)
    fewer = Server(
        {"b": np.zeros(7, np.float32), "w9": np.zeros((20, 50), np.float32)},
        SGD(),
        range(WORKERS),
        server.rules,
    )
    fewer._version = fewer.way.step = 6
    fewer._base = dict.fromkeys(range(WORKERS), 6)
    with pytest.raises(PayloadError, match="worker 0"):
        fewer.receive(0, frame)


def test_what_is_too_little_for_an_autoencoder_is_sent_as_it_is():
    sim = simulated(LGC(0.01, learn=0, code=1, min_size=0))
    run(sim, 4)
    assert sim.servers[0].way.phase is Phase.VALUES
    assert sim.servers[0].stats.updates == 4


@pytest.mark.parametrize("servers", [1, 2])
def test_several_servers_have_autoencoders_of_their_own(servers):
    start = {"w": np.full((40, 40), 3, np.float32)}
    rules = Rules(compression=LGC(0.1, learn=2, code=12, min_size=0))
    sim = Simulation(start, lambda w, x, s: x, 3, rules, lambda: SGD(lr=0.1), servers=servers)
    run(sim, 60)
    assert np.abs(sim.parameters["w"]).mean() < 1
    assert {each.way.phase for each in sim.servers} == {Phase.LATENT}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "async"}, "needs mode='sync', backup=0; for others .*'dgc:small=sparse'"),
        ({"mode": "bounded", "staleness": 1}, "needs mode='sync'"),
        ({"backup": 1}, "needs mode='sync', backup=0"),
        ({"compression": LGC(learn=After("epoch", 1), code=After("epoch", 2))}, "a server counts"),
        ({"compression": "lgc:autoencoder=per_tensor"}, "write autoencoder='shared'"),
        ({"compression": "lgc:decoders=2"}, "one for each worker; leave it out"),
        ({"compression": "none", "compression_down": "lgc"}, "compression_down='topk"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(ConfigError, match=words):
        Rules(**{"compression": "lgc", **options})


def test_one_worker_is_too_few():
    with pytest.raises(ConfigError, match="there is 1 worker: start more ranks, or use"):
        simulated(workers=1)

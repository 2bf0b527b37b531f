"""Training methods in every framework, beside all ranks in NumPy; the laws of systems have what
holds whatever carries the messages."""

from __future__ import annotations

import warnings

import numpy as np

from hvd_compress.systems import graphs, rounds
from tests.scenarios import applies, oracle
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    everything,
    hvd,
    make,
    mismatch,
    over,
    raises,
    set_rate,
    train,
    turned,
)

RATES = [oracle.LR] * 9
#: a scheduler's
HALVED = [oracle.LR] * 4 + [oracle.LR / 2] * 5
LEADERS = {"local_every": 2, "global_every": 4}
METHODS = (
    rounds.LocalSGD(sync_every=2, compression="topk:density=0.25"),
    rounds.LocalSGD(sync_every=2, compression="onebit:via=allgather", unsent="stays"),
    rounds.DiLoCo(sync_every=4, fragments=2, delay=1, mix=0.5),
    rounds.LeaderSGD(**LEADERS, groups=2),
    rounds.EASGD(sync_every=2),
    graphs.ExactDiffusion("complete"),
    rounds.LocalSGD(sync_every=3, start=2),
    rounds.DiLoCo(sync_every=6, fragments=2, delay=2, compression="dgc:density=0.1"),
    *(rounds.LeaderSGD(**LEADERS), rounds.EASGD(sync_every=2, compression="topk:density=0.2")),
    *(graphs.DGD("complete"), graphs.LEAD("cycle"), graphs.GradientTracking("one_peer")),
)


def training_follows_the_lockstep_world() -> None:
    momentum = 0.875  # Keras rounds it to float32
    is_short = over == "tensorflow" and not everything
    rows = [(method, momentum, RATES) for method in (METHODS[:6] if is_short else METHODS)]
    # Keras's momentum has the rate in it, and goes on with that of before.
    proximal = graphs.ExactDiffusion("complete", prox=graphs.l1(0.05))
    rows.append((proximal, 0.0, HALVED))
    for method, momentum, rates in rows:
        run = make(None, method=method, dtype="float64", momentum=momentum)
        names = run.framework_names
        for step, rate in enumerate(rates):
            set_rate(run, rate)
            run.step(step)
        world, ranks = oracle.trained(method, rates, hvd.size(), names, turned, momentum)
        training = run.optimizer.training

        def assert_follows(expected, run=run, names=names):
            mine = [turned(key, w) for key, w in run.weights().items()]
            assert_close(dict(zip(names, mine, strict=True)), expected[hvd.rank()], 1e-6, 1e-8)

        assert_follows(ranks)
        assert training.step == len(rates)
        assert training.exchanges == world.exchanges
        assert training.stats().total.bytes_sent > 0 or hvd.size() == 1
        with run.optimizer.synchronized_parameters():
            assert_follows(world.consensus(ranks))
            assert_same_everywhere(run.weights())
        assert training.exchanges == world.exchanges, "what is tested is no exchange of training"
        assert_follows(ranks)


def nan_on_a_rank_is_gone_after_an_exchange() -> None:
    """With momentum, which would lead there again; and later rounds are not lost."""
    methods = [
        rounds.EASGD(sync_every=2),
        rounds.DiLoCo(sync_every=2, outer=rounds.OuterSGD(1.0, 0.0, False)),
    ]
    if everything and hvd.size() > 1:
        methods.append(rounds.LeaderSGD(local_every=2, global_every=2, groups=1))
    for method in methods:
        run, found = make(None, method=method), []
        for step in range(8):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if step == 3 else "error")
                run.step(step, spoilt=step == 2 and hvd.rank() == hvd.size() - 1)
            found.append(run.weights())
        if isinstance(method, rounds.DiLoCo):
            assert_close(found[3], found[1], 0, 0)
            assert not np.array_equal(found[5]["kernel0"], found[3]["kernel0"])
        assert all(np.isfinite(w).all() for w in found[7].values()), method


@applies(least=2)  # one rank agrees with itself
def ranks_that_differ_say_so() -> None:
    """In their options, or in where they begin, at the first exchange."""
    sync_every = 3 if hvd.rank() == 1 else 2
    with raises(mismatch, "training", "sync_every=3"):
        train(make(None, method=rounds.LocalSGD(sync_every=sync_every)), range(3))
    run = make(None, method=rounds.DiLoCo(sync_every=2))
    run.set_weights({name: w + hvd.rank() for name, w in run.weights().items()})
    with raises(mismatch, "weights at the start", "broadcast", "BroadcastGlobalVariablesCallback"):
        train(run, range(2))

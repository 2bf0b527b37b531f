"""Local SGD and DiLoCo, in NumPy and lockstep."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hvd_compress import RandomK, TopK
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError, NeedsTuning
from hvd_compress.systems import Coordinator, Ranks
from hvd_compress.systems.local_steps import cuts
from hvd_compress.systems.rounds import EASGD, DiLoCo, LocalSGD, OuterSGD, SparseLoCo
from tests.systems.quadratics import Quadratics

PLAIN = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)


def after_rounds(method, rounds, **options):
    """The common x after each round of two steps from 1, with minima at 0 and 4."""
    ranks = Quadratics(method, (1, 1), b=(0, 4), **options)
    found = []
    for _ in range(rounds):
        ranks.run(2)
        assert ranks.values[0] == ranks.values[1]
        found.append(ranks.values[0])
    return found


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (LocalSGD(sync_every=2), (1.19, 1.3439, 1.468559)),
        (LocalSGD(sync_every=2, compression="topk:density=1.0"), (1.19, 1.3439, 1.468559)),
        (DiLoCo(sync_every=2), (1.2527, 1.549273, 1.840635)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_three_rounds_by_hand(method, expected):
    assert after_rounds(method, 3) == pytest.approx(expected, abs=5e-7)


def test_local_steps_move_the_fixed_point():
    """Sum of c_i b_i over sum of c_i, with c_i = 1 - (1 - eta h_i)^H; the optimum is 3."""
    ranks = Quadratics(LocalSGD(sync_every=2), (0, 0), h=(1, 3), b=(0, 4))
    assert ranks.run(400) == pytest.approx([2.914286] * 2, abs=1e-6)
    exact = Quadratics(LocalSGD(sync_every=1), (0, 0), h=(1, 3), b=(0, 4))
    assert exact.run(400) == pytest.approx([3.0] * 2, abs=1e-9)


def synchronous(steps, lr=0.1, h=(1, 3), b=(0, 4), start=1.0):
    x = start
    for _ in range(steps):
        x -= lr * np.mean([hi * (x - bi) for hi, bi in zip(h, b, strict=True)])
    return x


@pytest.mark.parametrize("method", [LocalSGD(sync_every=1), DiLoCo(PLAIN, sync_every=1)])
def test_an_exchange_after_every_step_is_synchronous_sgd(method):
    ranks = Quadratics(method, (1, 1), h=(1, 3), b=(0, 4))
    assert ranks.run(7) == pytest.approx([synchronous(7)] * 2, rel=1e-12)


def test_post_local_sgd():
    ranks = Quadratics(LocalSGD(sync_every=4, start=3), (1, 1), h=(1, 3), b=(0, 4))
    equal = []
    for _ in range(11):
        ranks.step()
        equal.append(ranks.values[0] == ranks.values[1])
    assert [i for i, same in enumerate(equal, 1) if same] == [1, 2, 3, 7, 11]
    assert ranks.world.exchanges == 5


def vectors(method, steps, size=3, tensors=4, lr=0.1, seed=0):
    """Ranks whose minima differ, of several tensors; every rank's parameters after each step."""
    rng = np.random.default_rng(seed)
    names = [f"t{i}" for i in range(tensors)]
    targets = [{n: rng.normal(size=5) for n in names} for _ in range(size)]
    world, x = Ranks(method, size), [{n: np.zeros(5) for n in names} for _ in range(size)]
    found = []
    for _ in range(steps):
        gradients = [
            {n: own[n] - target[n] for n in names} for own, target in zip(x, targets, strict=True)
        ]
        x = world.before_step(x, rates=dict.fromkeys(names, lr))
        x = [{n: own[n] - lr * g[n] for n in names} for own, g in zip(x, gradients, strict=True)]
        x = world.after_step(x)
        found.append(x)
    return world, found


def test_fragments_are_exchanged_in_turn():
    world, found = vectors(DiLoCo(sync_every=4, fragments=2), 12)
    equal = [
        [(own[0]["t0"] == own[1]["t0"]).all(), (own[0]["t3"] == own[1]["t3"]).all()]
        for own in found
    ]
    assert [i for i, same in enumerate(equal, 1) if same[0]] == [2, 6, 10]
    assert [i for i, same in enumerate(equal, 1) if same[1]] == [4, 8, 12]
    assert world.exchanges == 6
    _, whole = vectors(DiLoCo(sync_every=4), 12)
    assert (whole[-1][0]["t3"] == found[-1][0]["t3"]).all(), "parameters are apart here"


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_a_delayed_exchange_by_hand(mix):
    """x0 = 1, gradient -1 everywhere: after 4 steps of 0.1 the difference is -0.4; it is applied
    after two more."""
    ranks = Quadratics(
        DiLoCo(PLAIN, sync_every=4, delay=2, mix=mix), (1, 1), gradient=lambda x: -np.ones(1)
    )
    assert ranks.run(5) == pytest.approx([1.5] * 2)
    assert ranks.run(1) == pytest.approx([(1 - mix) * 1.4 + mix * 1.6] * 2)
    assert ranks.world.states[0]["anchor"]["x"] == pytest.approx([1.4])


def test_what_is_compressed_arrives_in_later_rounds():
    """Error feedback between outer steps: one of five elements a tensor, and on average over the
    steps the parameters are those of the dense run."""
    method = DiLoCo(PLAIN, sync_every=2, compression="topk:density=0.05")
    assert method.compression == TopK(density=0.05)
    world, compressed = vectors(method, 600)
    dense_world, dense = vectors(DiLoCo(PLAIN, sync_every=2), 600)
    for n in dense[-1][0]:
        mean = np.mean([own[0][n] for own in compressed[201::2]], axis=0)
        assert mean == pytest.approx(dense[-1][0][n], abs=0.03)
    assert (compressed[-1][0]["t0"] == compressed[-1][2]["t0"]).all()
    assert world.exchanges == dense_world.exchanges == 300


@pytest.mark.parametrize(
    "method",
    [DiLoCo(sync_every=2), LocalSGD(sync_every=2, compression="topk")],
    ids=lambda x: x.name,
)
def test_a_round_with_nan_is_lost_on_all_ranks(method):
    ranks = Quadratics(method, (1, 1), b=(0, 4))
    ranks.run(3)
    before = {key: own["x"].copy() for key, own in ranks.world.states[0].items()}
    ranks.x[1] = {"x": np.array([np.nan])}
    with pytest.warns(RuntimeWarning, match="ends with step 4 is lost"):
        ranks.run(1)
    assert ranks.values[0] == ranks.values[1] == before["anchor"][0]
    for key, x in before.items():
        assert (ranks.world.states[0][key]["x"] == x).all()
    assert np.isfinite(ranks.run(4)).all()


@pytest.mark.parametrize(
    "method",
    [
        LocalSGD(1, compression="topk:density=0.5"),
        LocalSGD(1, compression="topk:density=0.5", unsent="stays"),
        DiLoCo(PLAIN, sync_every=1, compression="topk:density=0.5"),
        SparseLoCo(sync_every=1, density=0.5),
        EASGD(sync_every=2, compression="topk:density=0.5"),
    ],
    ids=repr,
)
def test_nothing_of_a_lost_round_waits(method):
    """A parameter that has grown beyond bounds, beside one that is NaN."""
    ranks, alone = Ranks(method, 2), Coordinator(method, LocalEngine())
    x = [{name: np.zeros((1, 4)) for name in "ab"} for _ in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            x = [*ranks.before_step(x[:2]), alone.before_step(x[2])]
            x = [{name: own[name] + np.arange(1, 5) for name in own} for own in x]
            if step == 2:
                x[1:] = [{"a": own["a"] * np.nan, "b": own["b"] + 1e20} for own in x[1:]]
            x = [*ranks.after_step(x[:2]), alone.after_step(x[2])]
    assert ["lost" in str(each.message) for each in caught] == [True] * 3
    assert all(0 < own[name].max() < 100 for own in x for name in own)


def test_a_checkpoint_says_where_the_rest_is():
    """If it stays in the weights, to send what waits as well would count it twice."""
    owners = [
        Coordinator(LocalSGD(2, compression="topk", unsent=unsent), LocalEngine())
        for unsent in ("waits", "stays")
    ]
    for owner, other in (owners, owners[::-1]):
        with pytest.raises(ConfigError, match=r"it has unsent=.*make the LocalSGD as it was"):
            owner.load_state_dict(other.state_dict())
        owner.load_state_dict(owner.state_dict())


@pytest.mark.parametrize(("delay", "mix"), [(0, 0.0), (1, 0.0), (0, 0.5)])
def test_nan_in_all_fragments_is_lost_at_once(delay, mix):
    """Or each fragment would make the others NaN again before it is their turn."""
    method = DiLoCo(PLAIN, sync_every=4, fragments=2, delay=delay, mix=mix)
    names, world = ("a", "b"), Ranks(method, 2)
    x, lost = [{n: np.zeros(3) for n in names} for _ in range(2)], []
    for step in range(16):
        x = world.before_step(x, rates=dict.fromkeys(names, 0.1))
        # Each gradient depends on all parameters, as those of a network do.
        x = [{n: own[n] + 0.1 + 0 * sum(map(np.sum, own.values())) for n in names} for own in x]
        if step == 4:
            x[1] = {n: np.full(3, np.nan) for n in names}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x = world.after_step(x)
        lost += [step] * bool(caught)
    # With a delay the other fragment was on its way already.
    assert lost == [5 + delay]
    assert all(np.isfinite(own[n]).all() and (own[n] > 0).all() for own in x for n in names)


@pytest.mark.parametrize("make", ["SGD", "AdamW"])
def test_momentum_that_is_nan_is_lost_with_its_round(make):
    """Or all later rounds would be lost, too."""
    torch = pytest.importorskip("torch")
    from hvd_compress.torch.optimizers.local_steps import train_locally

    p = torch.nn.Parameter(torch.ones(3))
    options = {"momentum": 0.9} if make == "SGD" else {"weight_decay": 0.0}
    inner = getattr(torch.optim, make)([p], 0.1, **options)
    optimizer = train_locally(lambda _: LocalEngine(), inner, DiLoCo(PLAIN, sync_every=2))
    found = []
    for step in range(8):
        p.grad = torch.full((3,), float("nan") if step == 2 else 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if step > 3 else "ignore")
            optimizer.step()
        found.append(p.detach().clone())
    assert torch.equal(found[3], found[1])
    torch.testing.assert_close(found[5] - found[3], found[1] - 1)  # a first round again
    assert (found[7] < found[5]).all()


@pytest.mark.parametrize(
    ("unsent", "first", "second"),
    [
        ("waits", [(2, -1), (2, -1)], (2.5, -0.5)),
        ("stays", [(2, 0), (3, -1)], (2.5, -0.5)),
    ],
)
def test_what_was_not_sent_by_hand(unsent, first, second):
    """Rank 0 goes from 0 to (4, 1) and sends 4; rank 1 goes to (1, -2) and sends -2.  Then both
    stand still, and send the rest."""
    method = LocalSGD(sync_every=1, compression="topk:density=0.5", unsent=unsent)
    ranks, starts = Ranks(method, 2), [{"x": np.zeros((1, 2))} for _ in range(2)]
    ranks.before_step(starts)
    moved = [{"x": np.array([[4.0, 1.0]])}, {"x": np.array([[1.0, -2.0]])}]
    x = ranks.after_step(moved)
    assert [tuple(own["x"][0]) for own in x] == first
    assert ranks.states[0]["anchor"]["x"].tolist() == [[2, -1]]
    x = ranks.after_step(ranks.before_step(x))
    assert [tuple(own["x"][0]) for own in x] == [second] * 2


def test_half_precision_loses_nothing_of_what_stays():
    """Weights of float16 are rounded; their differences from the anchor, in float32, are not."""
    method = LocalSGD(sync_every=1, compression="topk:density=0.5", unsent="stays")
    ranks, x = Ranks(method, 2), [{"x": np.ones(4, np.float16)} for _ in range(2)]
    for _ in range(40):
        x = ranks.before_step(x)
        x = [{"x": own["x"] + np.arange(1, 5, dtype=np.float16) / 1024} for own in x]
        x = ranks.after_step(x)
    mean = np.mean([own["x"].astype(float) for own in x], 0)
    assert x[0]["x"].dtype == np.float16
    assert mean == pytest.approx(1 + 40 * np.arange(1, 5) / 1024, abs=2 / 1024)


def test_what_stays_needs_error_feedback():
    with pytest.raises(ConfigError, match="'none' cannot be combined"):
        LocalSGD(unsent="stays")
    ranks = Quadratics(LocalSGD(1, compression="fp16", unsent="stays"), (1, 1), b=(0, 4))
    with pytest.raises(ConfigError, match="'fp16' cannot be combined"):
        ranks.step()


def test_what_was_not_sent_is_forgotten_with_the_rest():
    coordinator = Coordinator(LocalSGD(sync_every=1, compression="topk:density=0.5"), LocalEngine())
    x = coordinator.before_step({"x": np.zeros(4)})
    coordinator.after_step({"x": x["x"] + np.arange(1.0, 5.0)})
    residual = coordinator.reducer.store.states["x"]["residual"]
    assert residual.tolist() == [-1, -2, 0, 0]
    coordinator.restart()
    assert not coordinator.reducer.store.states["x"]["residual"].any()


def _stepped(coordinator, x):
    x = coordinator.before_step({"x": x})
    return coordinator.after_step({"x": x["x"] + 1})["x"]


def test_what_travels_when_a_method_begins_anew_is_not_awaited():
    coordinator, x = Coordinator(DiLoCo(PLAIN, sync_every=3, delay=2), LocalEngine()), np.zeros(2)
    for step in range(8):
        if step == 4:
            coordinator.restart()
        x = _stepped(coordinator, x)
    assert (x == 6).all(), "back to what left with step 6: local steps 7 and 8 come behind"


def test_a_checkpoint_goes_on_with_a_longer_delay():
    """Then nothing is under way where the new options expect something."""
    first, x = Coordinator(DiLoCo(PLAIN, sync_every=3), LocalEngine()), np.zeros(2)
    for _ in range(3):
        x = _stepped(first, x)
    second = Coordinator(DiLoCo(PLAIN, sync_every=3, delay=2), LocalEngine())
    second.load_state_dict(first.state_dict())
    for _ in range(5):
        x = _stepped(second, x)
    assert (x == 6).all()


def test_an_exchange_that_cannot_begin_leaves_room_for_the_next():
    method = DiLoCo(PLAIN, sync_every=1, compression="topk:density=1.0")
    coordinator, x = Coordinator(method, LocalEngine()), np.zeros(2, np.float32)
    x = _stepped(coordinator, x)
    with pytest.raises(ConfigError, match="float64"):
        _stepped(coordinator, x.astype(np.float64))
    assert (_stepped(coordinator, x) == 2).all()


@pytest.mark.parametrize("losses", [[None], ["x"], [np.zeros(2)]])
def test_losses_that_are_no_numbers_are_refused(losses):
    coordinator = Coordinator(LocalSGD(sync_every=2), LocalEngine())
    with pytest.raises(ConfigError, match="'losses' is"):
        coordinator.load_state_dict({**coordinator.state_dict(), "losses": losses})


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_are_kept_and_half_precisions_add_up_in_more(dtype):
    world = Ranks(DiLoCo(sync_every=1), 2)
    x = [{"w": np.full(3, 1, dtype)} for _ in range(2)]
    x = world.after_step(world.before_step(x))
    assert x[0]["w"].dtype == dtype
    assert world.states[0]["anchor"]["w"].dtype == np.float32


def test_parameters_may_be_changed_in_place():
    world = Ranks(DiLoCo(sync_every=1), 1)
    x = world.after_step(world.before_step([{"w": np.ones(2)}]))
    anchor = world.states[0]["anchor"]["w"].copy()
    x[0]["w"] += 1
    assert (world.states[0]["anchor"]["w"] == anchor).all()


def test_a_parameter_that_was_frozen_begins_anew():
    coordinator = Coordinator(DiLoCo(PLAIN, sync_every=2, compression="topk"), LocalEngine())
    x = {"a": np.zeros(2), "b": np.zeros(2)}
    for _ in range(3):
        x = coordinator.before_step(x)
        x = coordinator.after_step({name: own + 1 for name, own in x.items()})
    assert (coordinator.state["anchor"]["a"] == [2, 0]).all(), "top-k has sent one element"
    residual = coordinator.reducer.store.states["a"]["residual"]
    assert np.abs(residual).sum() == 2
    frozen = coordinator.freeze({"a": x.pop("a")})
    assert coordinator.state.keys() == {"anchor"}
    assert coordinator.state["anchor"].keys() == {"b"}
    assert not coordinator.reducer.store.states["a"]["residual"].any()
    x = coordinator.after_step(coordinator.before_step(x))
    x = coordinator.before_step({"a": frozen["a"] + 5, **x})
    assert (coordinator.state["anchor"]["a"] == frozen["a"] + 5).all()


def test_cuts():
    assert cuts([1, 1, 1, 1], 2) == [0, 2, 4]
    assert cuts([10, 1, 1, 1], 3) == [0, 1, 2, 4]
    assert cuts([1, 1, 1, 10], 3) == [0, 2, 3, 4]
    with pytest.raises(ConfigError, match="only 2 parameters"):
        cuts([1, 1], 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DiLoCo(sync_every=10, fragments=4), "multiple of fragments=4"),
        (lambda: DiLoCo(sync_every=8, fragments=4, delay=2), "less than sync_every / fragments"),
        (lambda: DiLoCo(compression="onebit_adam:freeze_step=5"), "hands out the momenta"),
    ],
)
def test_errors_name_the_option(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_sparse_rounds_with_a_long_momentum_are_warned_of():
    """A residual that waits for longer than momentum remembers makes weights grow."""
    for compression in ("topk:density=0.01", "dgc:density=0.05"):
        with pytest.warns(NeedsTuning, match="SparseLoCo"):
            DiLoCo(compression=compression)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for compression in ("topk:density=0.1", "linear", RandomK(0.01, error_feedback=False)):
            DiLoCo(compression=compression)
        DiLoCo(OuterSGD(1.0, momentum=0.0), compression="topk:density=0.01")

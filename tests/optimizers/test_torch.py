"""SAM, ASAM, warm-up and the noise scale in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, MultiStepLR

import hvd_compress.torch as hvd
from hvd_compress import optimizers
from hvd_compress.errors import ConfigError


def test_bad_options_are_errors():
    model, p = torch.nn.Linear(2, 2), [torch.nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ConfigError, match="rho must be greater than 0"):
        hvd.SAM(model, rho=0)
    with pytest.raises(ConfigError, match="eta must be 0 or more"):
        hvd.ASAM(model, eta=-1.0)
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module"):
        hvd.SAM(torch.optim.SGD(p, 0.1))
    with pytest.raises(ConfigError, match=r"average=hvd.allreduce"):
        hvd.SAM(model, average=True)
    with pytest.raises(ConfigError, match="steps must be"):
        hvd.scaled_warmup(torch.optim.SGD(p, 0.1), batch_size=8, reference_batch_size=4, steps=-1)


def test_schedules_change_radius_and_floor():
    sam = hvd.ASAM(torch.nn.Linear(2, 2), rho=0.5)
    sam.rho, sam.eta = 0.1, 0.02
    assert sam.formula == optimizers.ASAM(0.1, 0.02)
    with pytest.raises(ConfigError, match="rho must be greater than 0"):
        sam.rho = -1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_without_gradients_stay_finite_in_half_precision(dtype):
    p = torch.nn.Parameter(torch.ones(3, 4, dtype=dtype))
    p.grad = torch.ones_like(p)
    p.grad[0] = 0
    hvd.LAMB([p], lr=0.1, betas=(0.99, 0.999)).step()
    assert torch.isfinite(p).all()
    assert (p[0] == 1).all()


def test_parameters_may_get_another_dtype():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.LAMB([p], lr=0.1)
    for dtype in (torch.float32, torch.bfloat16):
        p.data, p.grad = p.data.to(dtype), torch.ones(3, dtype=dtype)
        optimizer.step()
    assert p.dtype == torch.bfloat16
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


class Quadratic(torch.nn.Module):
    """The sum of h w^2 / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return (torch.tensor([4.0, 1.0]) * self.weight.square()).sum() / 2


@pytest.mark.parametrize(
    ("make", "eps"),
    [(hvd.SAM, (0.0485071, 0.0121268)), (hvd.ASAM, (0.489922, 0.122480))],
)
def test_sharpness_by_hand(make, eps):
    model = Quadratic()
    loss = make(model).backward(model)
    assert loss.item() == 2.5
    assert not loss.requires_grad
    expected = [4 * (1 + eps[0]), 1 + eps[1]]
    np.testing.assert_allclose(model.weight.grad.numpy(), expected, atol=1e-5)
    assert model.weight.tolist() == [1.0, 1.0]
    assert model.unused.grad is None


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )


@pytest.mark.parametrize("kind", ["sam", "asam"])
def test_a_networks_gradient_is_that_at_the_formulas_point(kind):
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    model, reference = network(), network()

    def loss_of(m):
        return torch.nn.functional.cross_entropy(m(x), y)

    sam = hvd.SAM(model, rho=0.1) if kind == "sam" else hvd.ASAM(model, rho=0.3)
    sam.backward(lambda: loss_of(model))
    loss_of(reference).backward()
    found = [p.grad.numpy() for p in reference.parameters()]
    formula = optimizers.SAM(0.1) if kind == "sam" else optimizers.ASAM(0.3)
    weights = [p.detach().numpy() for p in reference.parameters()]
    steps = formula.ascent(weights, found, [name for name, _ in reference.named_parameters()])
    statistics = [b.clone() for b in reference.buffers()]
    with torch.no_grad():
        for p, eps in zip(reference.parameters(), steps, strict=True):
            p.add_(torch.from_numpy(eps))
    reference.zero_grad()
    loss_of(reference).backward()
    for p, q, start in zip(
        model.parameters(), reference.parameters(), network().parameters(), strict=True
    ):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
        assert torch.equal(p, start), "weights are what they were, bit for bit"
    for b, once in zip(model.buffers(), statistics, strict=True):
        assert torch.equal(b, once), "statistics of one pass"


@pytest.mark.parametrize("average", [None, lambda x, name: x], ids=["own", "averaged"])
@pytest.mark.parametrize("kind", ["sam", "asam"])
def test_float64_climbs_in_float64(kind, average):
    x = torch.randn(4, 3, dtype=torch.float64)
    model, reference = torch.nn.Linear(3, 2).double(), torch.nn.Linear(3, 2).double()
    reference.load_state_dict(model.state_dict())
    make = {"sam": hvd.SAM, "asam": hvd.ASAM}[kind]
    make(model, rho=0.3, average=average).backward(lambda: model(x).square().sum())
    reference(x).square().sum().backward()
    found = [p.grad.numpy() for p in reference.parameters()]
    weights = [p.detach().numpy() for p in reference.parameters()]
    formula = {"sam": optimizers.SAM, "asam": optimizers.ASAM}[kind](0.3)
    with torch.no_grad():
        steps = formula.ascent(weights, found, ["weight", "bias"])
        for p, eps in zip(reference.parameters(), steps, strict=True):
            p.add_(torch.from_numpy(eps))
    reference.zero_grad()
    reference(x).square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-13, atol=1e-13)


def test_asam_knows_biases_of_all_layers():
    model = torch.nn.ModuleDict(
        {
            "lstm": torch.nn.LSTM(2, 3, num_layers=2, bidirectional=True, proj_size=2),
            "attention": torch.nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "bias": torch.nn.Linear(2, 3),
        }
    )
    named = dict(model.named_parameters())
    formula = hvd.ASAM(model).formula
    scaled = [name for name, p in named.items() if formula.stretch(p, name) is not None]
    assert scaled == [name for name in named if "weight" in name.rpartition(".")[2]]
    assert len(scaled) == 3 * 4 + 2 + 1


def test_errors_and_nan_leave_weights_as_they_are():
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def fails_the_second_time():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("second")
        return model(torch.ones(4, 6)).sum()

    with pytest.raises(RuntimeError, match="second"):
        hvd.SAM(model).backward(fails_the_second_time)
    hvd.SAM(model).backward(lambda: model(torch.full((4, 6), torch.nan)).sum())
    for p, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, kept)
    assert model[0].weight.grad.isnan().all(), "the others, and loss scaling, must learn of it"


def test_half_precision_sees_the_perturbed_weights():
    """Autocast keeps copies of weights for as long as it lasts."""
    model, outside = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    outside.load_state_dict(model.state_dict())
    x = torch.randn(8, 6)

    def loss_of(m):
        return m(x).float().square().sum()

    with torch.autocast("cpu", torch.bfloat16):
        hvd.SAM(model, rho=1.0).backward(lambda: loss_of(model))

    def in_a_context_of_its_own():
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(outside)

    hvd.SAM(outside, rho=1.0).backward(in_a_context_of_its_own)
    assert torch.equal(model.weight.grad, outside.weight.grad)


def test_scaled_warmup_is_goyals():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [p]}], lr=0.1)
    warmup = hvd.scaled_warmup(optimizer, batch_size=8192, reference_batch_size=256, steps=5 * 156)
    schedule = ChainedScheduler([warmup, MultiStepLR(optimizer, [30 * 156, 60 * 156])])
    for t in range(60 * 156 + 1):
        lr = optimizer.param_groups[0]["lr"]
        if t <= 5 * 156:
            assert lr == pytest.approx(0.1 + 3.1 * t / (5 * 156))
        else:
            assert lr == pytest.approx(3.2 / 10 ** ((t >= 30 * 156) + (t >= 60 * 156)))
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("batch", "steps", "rates"), [(16, 0, [0.4] * 3), (2, 2, [0.05] * 3)])
def test_warmups_without_steps_or_to_less(batch, steps, rates):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    warmup = hvd.scaled_warmup(optimizer, batch_size=batch, reference_batch_size=4, steps=steps)
    found = []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        warmup.step()
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(hvd.LARS, 0.3), (hvd.LAMB, 300.0), (hvd.OneBitLAMB, 10.0)],  # the last one clips
)
def test_norms_beyond_the_largest_half(make, expected):
    """||w|| is 90000, and the largest number of float16 65504."""
    p = torch.nn.Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    options = {"momentum": 0.0} if make is hvd.LARS else {"eps": 1e-3}
    make([p], lr=1.0, **options).step()
    torch.testing.assert_close(
        300 - p.detach().float(), torch.full((300, 300), expected), rtol=2e-2, atol=0.06
    )


@pytest.mark.parametrize("make", [hvd.SAM, hvd.ASAM])
def test_sparse_gradients_climb_as_dense_ones_do(make):
    found = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(9, 4, sparse=is_sparse), torch.nn.Linear(4, 1)
        )
        sam = make(model, average=lambda x, name: x)
        sam.backward(lambda model=model: model(torch.tensor([1, 2, 2])).square().sum())
        found.append(model[0].weight.grad.to_dense())
    torch.testing.assert_close(*found)


def test_a_loss_of_something_else_is_an_error():
    sam, other = hvd.SAM(torch.nn.Linear(2, 1)), torch.ones((), requires_grad=True)
    with pytest.raises(ConfigError, match="found no gradient"):
        sam.backward(lambda: 2 * other)

"""SAM and warm-up in PyTorch, beside a reference in this process; all optimizers for large batches
with compression."""

from __future__ import annotations

import torch

from hvd_compress import NoCompression
from tests.scenarios import horovod_only
from tests.scenarios.common import (
    LR,
    assert_close,
    assert_same_everywhere,
    dense_reference,
    distribute,
    loss_of,
    make_model,
    sgd,
    train,
)
from tests.scenarios.driver import hvd

STEPS = 6


def _train(model, optimizer, sam, steps, passes: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            number = step * passes + i
            sam.backward(lambda number=number: loss_of(model, hvd.rank(), number))
        optimizer.step()


def _sam_reference(model, make, steps, passes: int = 1) -> None:
    """Every rank's own eps, one rank after the other; then a step along the mean gradient."""
    optimizer, sam = sgd(model), make(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            for i in range(passes):
                number = step * passes + i
                sam.backward(lambda r=rank, n=number: loss_of(model, r, n) / hvd.size())
        optimizer.step()


def each_rank_climbs_on_its_own_and_one_gradient_travels() -> None:
    model, reference, plain = make_model(), make_model(), make_model()
    optimizer = distribute(sgd(model), model, NoCompression())
    _train(model, optimizer, hvd.SAM(model, rho=0.1), STEPS)
    _sam_reference(reference, lambda m: hvd.SAM(m, rho=0.1), STEPS)
    assert_close(model, reference)
    assert_same_everywhere(model)
    beside = distribute(sgd(plain), plain, NoCompression())
    train(plain, beside, range(STEPS))
    sent = [o.compression.stats().total.bytes_sent for o in (optimizer, beside)]
    assert sent[0] == sent[1]
    assert any(map(_differ, model.parameters(), plain.parameters()))


def _differ(p, q) -> bool:
    return not torch.allclose(p, q)


def passes_climb_on_their_own() -> None:
    model, reference = make_model(), make_model()
    optimizer = distribute(sgd(model), model, NoCompression(), backward_passes_per_step=2)
    _train(model, optimizer, hvd.SAM(model, rho=0.1), STEPS, passes=2)
    _sam_reference(reference, lambda m: hvd.SAM(m, rho=0.1), STEPS, passes=2)
    assert_close(model, reference)


def averaged_first_it_is_that_of_the_whole_batch() -> None:
    model, reference = make_model(), make_model()
    optimizer = distribute(sgd(model), model, NoCompression())
    _train(model, optimizer, hvd.SAM(model, rho=0.1, average=hvd.allreduce), STEPS)
    alone, sam = sgd(reference), hvd.SAM(reference, rho=0.1)
    for step in range(STEPS):
        alone.zero_grad()
        sam.backward(
            lambda step=step: (
                sum(loss_of(reference, r, step) for r in range(hvd.size())) / hvd.size()
            )
        )
        alone.step()
    assert_close(model, reference)
    assert_same_everywhere(model)


def all_optimizers_train_with_compression() -> None:
    """Ranks stay equal bit for bit, and the loss falls."""
    for method in ("topk:density=0.1", "dgc:density=0.1"):
        for kind in ("lars", "lamb", "sam"):
            model = make_model()
            if kind == "lars":
                local = hvd.LARS(model.parameters(), lr=0.3, trust_coefficient=0.02)
            elif kind == "lamb":
                local = hvd.LAMB(model.parameters(), lr=0.02)
            else:
                local = sgd(model)
            takes = method.startswith("dgc") and kind in ("lars", "lamb")
            # These have a momentum of their own, beside which DGC needs none.
            text = f"{method},momentum=0.0" if takes else method
            optimizer = distribute(local, model, text)
            before = _mean_loss(model)
            if kind == "sam":
                _train(model, optimizer, hvd.SAM(model), 15)
            else:
                train(model, optimizer, range(15))
            assert_same_everywhere(model)
            assert _mean_loss(model) < 0.95 * before, (method, kind)


def _mean_loss(model) -> float:
    with torch.no_grad():
        ranks, steps = range(hvd.size()), range(15)
        return sum(loss_of(model, r, s).item() for r in ranks for s in steps) / 15 / hvd.size()


def a_loss_scale_changes_nothing() -> None:
    model, reference = make_model(), make_model()
    optimizer = distribute(sgd(model), model, NoCompression())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    sam = hvd.SAM(model, rho=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        sam.backward(lambda step=step: scaler.scale(loss_of(model, hvd.rank(), step)))
        scaler.step(optimizer)
        scaler.update()
    _sam_reference(reference, lambda m: hvd.SAM(m, rho=0.1), STEPS)
    assert_close(model, reference)


def nan_on_one_rank_reaches_all_and_is_skipped() -> None:
    model = make_model()
    optimizer = distribute(sgd(model), model, NoCompression())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    factor = float("nan") if hvd.rank() == 0 else 1.0
    hvd.SAM(model).backward(lambda: scaler.scale(factor * loss_of(model, hvd.rank(), 0)))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def a_warm_up_raises_the_rate_of_a_distributed_optimizer() -> None:
    model = make_model()
    optimizer = distribute(sgd(model, lr=LR), model, "topk:density=0.2")
    warmup = hvd.scaled_warmup(optimizer, batch_size=64, reference_batch_size=16, steps=4)
    rates = []
    for step in range(6):
        rates.append(optimizer.param_groups[0]["lr"] / LR)
        train(model, optimizer, [step])
        warmup.step()
    torch.testing.assert_close(torch.tensor(rates), torch.tensor([1, 1.75, 2.5, 3.25, 4, 4]))
    assert_same_everywhere(model)


@horovod_only
def horovods_own_optimizer_takes_them_too() -> None:
    model, reference = make_model(), make_model()
    optimizer = distribute(sgd(model), model, hvd.Compression.none)
    assert not hasattr(optimizer, "compression")
    _train(model, optimizer, hvd.SAM(model, rho=0.1), STEPS)
    _sam_reference(reference, lambda m: hvd.SAM(m, rho=0.1), STEPS)
    assert_close(model, reference)
    for make in (
        lambda m: hvd.LARS(m.parameters(), lr=2.0, trust_coefficient=0.01),
        lambda m: hvd.LAMB(m.parameters(), lr=0.01),
    ):
        model, reference = make_model(), make_model()
        train(model, distribute(make(model), model, hvd.Compression.none), range(STEPS))
        dense_reference(reference, make(reference), range(STEPS))
        assert_close(model, reference)

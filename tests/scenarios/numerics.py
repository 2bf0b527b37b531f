"""NaN and Inf, loss scaling, damaged messages, sparse gradients."""

from __future__ import annotations

import torch

import hvd_compress.torch as hvd
from hvd_compress.torch import DGC, NoCompression, PayloadError, TopK
from scenarios.common import (
    assert_close,
    assert_same_everywhere,
    dense_reference,
    distribute,
    loss_of,
    make_model,
    raises,
    sgd,
    train,
)

SPARSE = DGC(density=0.05)


def _states(optimizer) -> list[torch.Tensor]:
    binding = optimizer.compression
    return [
        x.clone()
        for group in optimizer.param_groups
        for p in group["params"]
        for x in binding.state_of(p).values()
    ]


def not_a_number_reaches_every_rank_and_no_residual() -> None:
    for method in (
        SPARSE,
        TopK(density=0.05),
        NoCompression(),
        DGC(density=0.05, values="float16"),
    ):
        for poison in (float("nan"), float("inf"), -float("inf")):
            model = make_model()
            optimizer = distribute(sgd(model), model, method)
            train(model, optimizer, range(3))
            before = _states(optimizer)
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), 3).backward()
            optimizer.synchronize()
            clean = _states(optimizer)
            assert method == NoCompression() or any(
                not torch.equal(a, b) for a, b in zip(before, clean, strict=True)
            )
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), 4)
            if hvd.rank() == hvd.size() - 1:
                loss = loss * poison
            loss.backward()
            optimizer.synchronize()
            for p in model.parameters():
                assert not torch.isfinite(p.grad).all()
            for a, b in zip(clean, _states(optimizer), strict=True):
                assert torch.equal(a, b)


def overflow_under_a_grad_scaler() -> None:
    """A step that one rank spoils is skipped on all, and leaves no trace: the run equals one that
    never saw it. Scales are powers of two, so scaling changes no bit."""
    for method in (SPARSE, DGC(density=1.0), TopK(density=0.05)):
        model, reference = make_model(), make_model()
        optimizer = distribute(sgd(model, weight_decay=0.01), model, method)
        plain = distribute(sgd(reference, weight_decay=0.01), reference, method)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        scales = set()
        for step in range(10):
            spoilt = step in (2, 6)
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), step)
            if spoilt and hvd.rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scales.add(scaler.get_scale())
            if step % 2:  # both ways of writing it
                scaler.step(optimizer)
            else:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            scaler.update()
            if not spoilt:
                plain.compression.step = optimizer.compression.step - 1
                train(reference, plain, [step])
        assert len(scales) > 1, scales
        assert_same_everywhere(model)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p, q)
        for a, b in zip(_states(optimizer), _states(plain), strict=True):
            assert torch.equal(a, b)


def two_optimizers_one_of_them_scaled() -> None:
    scaled, unscaled, reference = make_model(), make_model(), make_model()
    a, b = distribute(sgd(scaled), scaled, SPARSE), distribute(sgd(unscaled), unscaled, SPARSE)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(6):
        a.zero_grad()
        scaler.scale(loss_of(scaled, hvd.rank(), step)).backward()
        scaler.step(a)
        scaler.update()
        train(unscaled, b, [step])
    train(reference, distribute(sgd(reference), reference, SPARSE), range(6))
    for model in (scaled, unscaled):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def fused_optimizers_under_a_grad_scaler() -> None:
    fused, plain = make_model(), make_model()
    optimizer = distribute(sgd(fused, fused=True), fused, SPARSE)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(fused, hvd.rank(), step)).backward()
        scaler.step(optimizer)
        scaler.update()
    train(plain, distribute(sgd(plain), plain, SPARSE), range(4))
    assert_close(fused, plain)


def a_damaged_message_raises() -> None:
    if hvd.size() == 1:
        return  # alone, nothing travels
    import hvd_compress.torch.engine as engine

    model = make_model()
    optimizer = distribute(sgd(model), model, SPARSE)
    train(model, optimizer, range(2))
    honest = engine.HorovodEngine._launch

    def damage(self, kind, ops):
        ops[0].tensor[-1] ^= 16
        return honest(self, kind, ops)

    optimizer.zero_grad()
    loss_of(model, hvd.rank(), 2).backward(inputs=[model[0].bias])
    if hvd.rank() == 1:
        engine.HorovodEngine._launch = damage
    try:
        model[0].weight.grad = torch.randn(64, 40)
        optimizer.compression.start([model[0].weight])
    finally:
        engine.HorovodEngine._launch = honest
    with raises(PayloadError, "rank 1", "checksum"):
        optimizer.compression.finish()
    optimizer.compression.abandon()


def different_options_on_different_ranks_raise() -> None:
    if hvd.size() == 1:
        return  # one rank has nobody to differ from
    model = make_model()
    density = 0.05 if hvd.rank() else 0.06
    optimizer = distribute(sgd(model), model, DGC(density=density))
    model[0].weight.grad = torch.randn(64, 40)
    optimizer.compression.start([model[0].weight])
    with raises(PayloadError, "same compression options"):
        optimizer.compression.finish()
    optimizer.compression.abandon()


def _embedding(sparse: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(50, 30, sparse=sparse), torch.nn.Linear(30, 5))


def _train_words(model, optimizer, steps, ranks) -> None:
    for step in steps:
        optimizer.zero_grad()
        losses = []
        for rank in ranks:
            generator = torch.Generator().manual_seed(100 * rank + step)
            words = torch.randint(0, 50, (12,), generator=generator)
            losses.append(torch.nn.functional.cross_entropy(model(words), words % 5))
        (sum(losses) / len(losses)).backward()
        optimizer.step()


def sparse_gradients() -> None:
    everyone = range(hvd.size())
    for momentum in (0.0, 0.9):
        for options in ({}, {"sparse_as_dense": True}):
            for method in (DGC(density=1.0), NoCompression()):
                model, reference = _embedding(True), _embedding(False)
                optimizer = distribute(sgd(model, momentum=momentum), model, method, **options)
                _train_words(model, optimizer, range(6), [hvd.rank()])
                _train_words(reference, sgd(reference, momentum=momentum), range(6), everyone)
                assert_same_everywhere(model)
                assert_close(model, reference)


def sparse_gradients_stay_sparse_for_sparse_adam() -> None:
    for options in ({}, {"sparse_as_dense": True}):
        model, reference = _embedding(True), _embedding(True)
        for m, ranks, wrap in ((model, [hvd.rank()], True), (reference, range(hvd.size()), False)):
            inner = torch.optim.SparseAdam(m[0].parameters(), lr=0.01)
            optimizer = inner
            if wrap:
                optimizer = hvd.DistributedOptimizer(inner, compression="none", **options)
            for step in range(4):
                m[1].zero_grad()
                _train_words(m, optimizer, [step], ranks)
        assert_close(model, reference, rtol=1e-3)


def a_rank_without_words_sends_no_rows() -> None:
    model = _embedding(True)
    optimizer = distribute(sgd(model, momentum=0.0), model, DGC(density=1.0))
    _train_words(model, optimizer, range(1), [hvd.rank()])
    optimizer.zero_grad()
    if hvd.rank() == 0:
        _train_words_backward(model)
    optimizer.step()
    assert_same_everywhere(model)
    assert model[0].weight.grad.is_sparse
    assert model[0].weight.grad.coalesce().indices().numel() == 4


def _train_words_backward(model) -> None:
    words = torch.tensor([3, 3, 7, 9, 11])
    torch.nn.functional.cross_entropy(model(words), words % 5).backward()


def dense_reference_is_not_the_same_code() -> None:
    """The references would notice a missing exchange: without one, ranks differ."""
    if hvd.size() == 1:
        return  # alone there is nothing to miss
    model, reference = make_model(), make_model()
    train(model, sgd(model), range(3))
    dense_reference(reference, sgd(reference), range(3))
    with raises(AssertionError, "not close|Tensor-likes"):
        assert_close(model, reference)

"""NaN and Inf, loss scaling, damaged messages, sparse gradients."""

from __future__ import annotations

import torch
from torch.amp import GradScaler

from hvd_compress.base import Exchange
from hvd_compress.blocks import (
    allgather,
    allreduce,
    chain,
    clip_by_local_norm,
    contraction,
    error_feedback,
    plus_minus,
    rounding,
    threshold,
    top_k,
)
from hvd_compress.errors import CompressionError, MismatchError
from hvd_compress.requests import Gather
from hvd_compress.torch import (
    DGC,
    FP16,
    ConfigError,
    NoCompression,
    PayloadError,
    PowerSGD,
    SignSGD,
    Signum,
    TopK,
)
from tests.scenarios import applies, horovod_only
from tests.scenarios.common import (
    User,
    as_plain,
    assert_close,
    assert_equal,
    assert_equal_states,
    assert_same_everywhere,
    begin,
    dense_reference,
    loss_of,
    make_model,
    sgd,
    states_of,
    train,
    train_scaled,
    trains_as_plain,
    words_loss_of,
    words_model,
)
from tests.scenarios.driver import hvd, raises

SPARSE = DGC(density=0.05)


def what_has_a_scale_of_its_own_does_not_depend_on_the_loss_scale() -> None:
    levels = rounding(levels=(0.001, 0.01, 0.1, 1.0, 10.0))
    for method in (
        *(SignSGD(), Signum()),
        chain(via=allgather(threshold(0.02))),
        chain(via=allgather(threshold(0.02), plus_minus(0.02))),
        chain(via=allgather(levels)),
        chain(via=allgather(contraction(levels))),
        chain(clip_by_local_norm(0.1), via=allreduce()),
    ):
        (model, optimizer), (reference, plain) = begin(method), begin(method)
        train(reference, plain, range(3))
        train_scaled(model, optimizer, GradScaler("cpu", init_scale=2.0**12), range(3))
        assert_equal(model, reference)


def overflow_under_a_grad_scaler() -> None:
    """A step that one rank spoils is skipped on all, and leaves no trace: the run equals one that
    never saw it. Scales are powers of two, so scaling changes no bit.  A fused optimizer unscales
    itself."""
    for method, fused in ((SPARSE, False), (DGC(density=1.0), False), (TopK(density=0.05), True)):
        options = {"weight_decay": 0.01, "fused": fused}
        (model, optimizer), (reference, plain) = begin(method, **options), begin(method, **options)
        scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
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
                plain.compression.reducer.step = optimizer.compression.step - 1
                train(reference, plain, [step])
        assert len(scales) > 1, scales
        assert_same_everywhere(model)
        assert_equal(model, reference)
        assert_equal_states(states_of(optimizer), states_of(plain))


def a_grad_scaler_steps_an_optimizer_that_others_wrap() -> None:
    """Without a warning, which is an error here, of averages that are there already."""

    class Wrapper:
        def __init__(self, inner) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self) -> None:
            self.inner.step()

    (model, optimizer), reference = begin(TopK(density=0.5)), begin(TopK(density=0.5))
    train(*reference, range(2))
    scaler = GradScaler("cpu", init_scale=1.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, hvd.rank(), step)).backward()
        optimizer.synchronize()
        scaler.step(Wrapper(optimizer))
        scaler.update()
    assert_equal(model, reference[0])


def a_scaler_that_is_not_ours_or_not_for_ever() -> None:
    """Which backward pass is scaled is known, not guessed."""
    foreign, (model, optimizer), reference = (begin(SPARSE) for _ in range(3))
    train(*reference, range(12))
    train(model, optimizer, range(3))
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(3, 6):  # another optimizer's scaler turns up
        train_scaled(*foreign, scaler, [step])
        train(model, optimizer, [step])
    train_scaled(model, optimizer, scaler, range(6, 8))  # it becomes ours
    second = GradScaler("cpu", init_scale=2.0**4)
    train_scaled(model, optimizer, second, range(8, 10))  # a second one replaces it
    train(model, optimizer, range(10, 12))  # and scaling ends, while both are alive
    assert_close(model, reference[0], rtol=1e-6)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, hvd.rank(), 12)).backward()
    with raises(ConfigError, "one torch.amp.GradScaler per optimizer"):
        second.unscale_(optimizer)


def a_rank_without_gradients_under_a_grad_scaler() -> None:
    """It knows no loss scale, and steps are those of a run without one."""
    for explicit in (True, False):
        for method in (SPARSE, "fp16"):
            (model, optimizer), (twin, other) = begin(method), begin(method)
            train(model, optimizer, range(1))
            train(twin, other, range(1))
            scaler = GradScaler("cpu", init_scale=2.0**8)
            for step in range(1, 5):
                optimizer.zero_grad()
                other.zero_grad()
                loss = scaler.scale(loss_of(model, hvd.rank(), step))
                if hvd.rank() == 0 or step == 2:
                    loss.backward()
                    loss_of(twin, hvd.rank(), step).backward()
                if explicit:
                    optimizer.synchronize()
                scaler.step(optimizer)
                scaler.update()
                other.step()
            assert_same_everywhere(model)
            if method is SPARSE:  # others are rounded at another scale
                assert_equal(model, twin)


def loss_scaling_keeps_half_precision_from_underflow() -> None:
    p = torch.nn.Parameter(torch.zeros(40, 40))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression="fp16")
    scaler = GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((1e-8 * p).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(p.detach(), torch.full_like(p, -1e-8), rtol=1e-2, atol=0)


def a_step_that_was_skipped_by_hand() -> None:
    """A gradient after a synchronize() without a step() is exchanged all the same."""
    for compression in (SPARSE, NoCompression()):
        model, optimizer = begin(compression)
        loss_of(model, hvd.rank(), 0).backward()
        optimizer.synchronize()
        model.zero_grad()
        if hvd.rank() == 0:  # the others have an empty batch
            loss_of(model, hvd.rank(), 1).backward()
        optimizer.step()
        assert_same_everywhere(model)
        optimizer.synchronize()
        for p in model.parameters():
            p.grad = torch.full_like(p, float(hvd.rank()))
        if isinstance(compression, NoCompression):
            optimizer.synchronize()
            assert model[0].weight.grad.mean() == (hvd.size() - 1) / 2


@horovod_only
@applies(least=2)  # alone, nothing travels
def a_damaged_message_raises() -> None:
    """The message has elements, or rows."""
    import hvd_compress.torch.engine as engine

    honest = engine.HorovodEngine._launch

    def damage(self, op):
        if op.kind == "gather":
            op.tensor[-12] ^= 16  # behind the length and the header
        return honest(self, op)

    for gradient in (torch.randn(50, 30), torch.eye(50)[:, :30].to_sparse(1)):
        model, optimizer = begin(SPARSE, words_model(sparse=gradient.is_sparse))
        train(model, optimizer, range(2), words_loss_of)
        optimizer.zero_grad()
        words = torch.arange(12)
        torch.nn.functional.cross_entropy(model(words), words % 5).backward(inputs=[model[1].bias])
        if hvd.rank() == 1:
            engine.HorovodEngine._launch = damage
        try:
            model[0].weight.grad = gradient
            optimizer.compression.exchange_gradients([optimizer._watched[id(model[0].weight)]])
            with raises(PayloadError, "rank 1", "checksum"):
                optimizer.compression.finish()
        finally:
            engine.HorovodEngine._launch = honest
        optimizer.compression.abandon()


@applies(least=2)
def models_that_differ_are_errors() -> None:
    """By the name of a parameter, by its shape, by what is frozen."""
    odd = hvd.rank() == 1
    for what, change in (
        ("other", lambda name, p: (name + ".other" * odd, p)),
        (r"\[4, 3\]", lambda name, p: (name, torch.nn.Parameter(torch.zeros(3 + odd, 3)))),
        ("frozen", lambda name, p: (name, p.requires_grad_(not odd))),
    ):
        named = [change("alone", torch.nn.Parameter(torch.zeros(3, 3)))]
        named.append(("second", torch.nn.Parameter(torch.zeros(2))))
        with raises(MismatchError, "parameters", what):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([p for _, p in named], 0.1),
                named_parameters=named,
                compression=NoCompression,
            )
            optimizer.synchronize()


@horovod_only
@applies(least=2)  # over MPI sizes are known
def a_payload_of_another_size_accuses_nobody() -> None:
    """An allgather does not tell who sent how much."""
    own = torch.zeros(24 + 8 * (hvd.rank() == 1), dtype=torch.uint8)
    binding = begin(TopK)[1].compression

    def unequal() -> Exchange:
        yield Gather(own, equal_sizes=True)

    binding.engine.start("unequal", unequal())
    with raises(PayloadError, f"has {own.numel()} bytes", f"{24 * hvd.size() + 8}"):
        binding.engine.finish()
    binding.abandon()


def sparse_gradients() -> None:
    def program(user, method, options):
        model = words_model(sparse=user.distributes)
        optimizer = user.begin(model, method, **options)
        user.train(model, optimizer, range(6), words_loss_of)
        return model

    for method in (DGC(density=1.0), NoCompression()):
        for momentum in (0.0, 0.9):
            for options in ({}, {"sparse_as_dense": True}):
                trains_as_plain(program, method, {"momentum": momentum, **options})
    # All momentum is the method's, and decay.
    for options in (
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ):
        for decay in ("separate", "gradient"):
            trains_as_plain(program, DGC(density=1.0, weight_decay=decay), options)


def sparse_gradients_stay_sparse_for_sparse_adam() -> None:
    def program(user, options):
        model = words_model(sparse=True)
        optimizer = torch.optim.SparseAdam(model[0].parameters(), lr=0.01)
        optimizer = user.distribute(optimizer, None, "none", **options)
        for step in range(4):
            model[1].zero_grad()
            user.train(model, optimizer, [step], words_loss_of)
        return model[0]

    for options in ({}, {"sparse_as_dense": True}):
        trains_as_plain(program, options, rtol=1e-3)


def rows_get_momentum_and_clipping_of_the_method() -> None:
    model = words_model(sparse=True)
    _, optimizer = begin(DGC(density=1.0, momentum=0.9), model, momentum=0.0)
    train(model, optimizer, range(5), words_loss_of)
    reference = words_model(sparse=False)
    as_plain(User.train, reference, sgd(reference), range(5), words_loss_of)
    assert_close(model, reference)
    model, before = words_model(sparse=True), words_model(sparse=True)
    method = DGC(density=1.0, momentum=0.0, clip_norm=1e-3)
    train(*begin(method, model, momentum=0.0, lr=1.0), range(1), words_loss_of)
    moved = [p.detach() - q for p, q in zip(model.parameters(), before.parameters(), strict=True)]
    assert 0 < torch.cat([m.view(-1) for m in moved]).norm() <= 1.001e-3 * hvd.size() ** 0.5
    assert moved[0].norm() > 0


def gradients_that_are_sparse_now_and_dense_then() -> None:
    for momentum in (0.0, 0.9):
        model, optimizer = begin(SPARSE, words_model(sparse=True), momentum=momentum)
        train(model, optimizer, range(2), words_loss_of)
        for _ in range(3):
            # With momentum the gradient was left dense, and stays so.
            optimizer.zero_grad(set_to_none=False)
            _train_words_backward(model)
            optimizer.step()
        assert_same_everywhere(model)


@applies(least=2)  # one rank agrees with itself
def sparse_here_and_dense_there_is_an_error() -> None:
    for method in (
        NoCompression(),
        PowerSGD(min_compression_rate=1),
        DGC(density=0.05, min_size=0),
    ):
        model, optimizer = begin(method, words_model(sparse=True), momentum=0.0)
        if hvd.rank() == 0:
            _train_words_backward(model)
        with raises(CompressionError, "sparse_as_dense=True"):
            optimizer.step()
        optimizer.compression.abandon()


def a_rank_without_words_sends_no_rows() -> None:
    model, optimizer = begin(DGC(density=1.0), words_model(sparse=True), momentum=0.0)
    train(model, optimizer, range(1), words_loss_of)
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


def feedback_in_units_of_the_step_keeps_the_virtual_iterate() -> None:
    """Parameters less the mean residual go where plain SGD would take them from the gradients at
    the parameters, while the learning rate rises and falls."""
    model, reference = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    method = chain(error_feedback(units="step"), via=allgather(top_k(0.05)))
    _, optimizer = begin(method, model, momentum=0.0)
    virtual = [p.detach().clone() for p in model.parameters()]
    for step, rate in enumerate((0.05, 0.05, 0.2, 0.01, 0.0, 0.1)):
        optimizer.param_groups[0]["lr"] = rate
        reference.load_state_dict(model.state_dict())
        reference.zero_grad()
        sum(loss_of(reference, rank, step) for rank in range(hvd.size())).backward()
        train(model, optimizer, [step])
        for i, (p, q) in enumerate(zip(model.parameters(), reference.parameters(), strict=True)):
            virtual[i] -= rate * q.grad / hvd.size()  # not in the loss, which is float32
            residual = optimizer.compression.store.state_of(p)["residual"].view_as(p)
            owed = hvd.allreduce(residual, name=f"owed.{step}.{i}", op=hvd.Average)
            torch.testing.assert_close(p.detach() - owed, virtual[i], rtol=0, atol=1e-12)
    assert_same_everywhere(model)


@applies(least=2)  # there is no sum of one
def what_is_divided_before_the_sum_fits_16_bits() -> None:
    """The mean fits, the sum does not; and what one rank cannot send is Inf on all."""
    size = hvd.size()
    values, spoilt = [40000.0, -60000.0, 3.0], [1e5 if hvd.rank() == 0 else 0.0, 3.0]
    for method, dtype in ((FP16(), "float32"), (FP16(), "float16"), (NoCompression(), "float16")):
        cases = [(values, values)]
        if dtype == "float32":  # in 16 bits it is Inf from the start
            cases.append((spoilt, [float("inf"), 3.0]))
        for own, mean in cases:
            w = torch.nn.Parameter(torch.zeros(len(own), dtype=getattr(torch, dtype)))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([w], lr=0.1), [("w", w)], method, gradient_predivide_factor=2 * size
            )
            w.backward(torch.tensor(own).to(w.dtype))
            optimizer.synchronize()
            found = w.grad.float()
            torch.testing.assert_close(found, torch.tensor(mean), rtol=2e-3, atol=0)


@applies(least=2)  # alone there is nothing to miss
def dense_reference_is_not_the_same_code() -> None:
    """The references would notice a missing exchange: without one, ranks differ."""
    model, reference = make_model(), make_model()
    train(model, sgd(model), range(3))
    dense_reference(reference, sgd(reference), range(3))
    with raises(AssertionError, "not close|Tensor-likes"):
        assert_close(model, reference)

"""Every option of Horovod's optimizer is honoured, or refused with the way out."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings

import horovod.torch
import torch

from hvd_compress.blocks import allgather, chain, error_feedback, momentum_correction, top_k
from hvd_compress.integrations.environment import compared
from hvd_compress.torch import (
    DGC,
    FP16,
    ConfigError,
    MismatchError,
    NoCompression,
    TopK,
    UnboundError,
    UnsupportedError,
)
from tests.devices import DEVICE
from tests.scenarios import applies, horovod_only, refused
from tests.scenarios.common import (
    as_distributed,
    assert_close,
    assert_equal,
    assert_same_everywhere,
    backward,
    batch,
    begin,
    distribute,
    loss_of,
    make_model,
    sgd,
    train,
    trains_as_plain,
    warned,
)
from tests.scenarios.driver import hvd, over, raises
from tests.scenarios.environment import assert_said, environment

DENSE = DGC(density=1.0)  # momentum SGD, through all of DGC's machinery
SPARSE = DGC(density=0.05)


def op_sum_does_not_multiply_weight_decay() -> None:
    def program(user, method):
        model = make_model()
        optimizer = user.begin(model, method, op=hvd.Sum, lr=0.01, weight_decay=0.1)
        user.train(model, optimizer, range(5), lambda *args: len(user.ranks) * loss_of(*args))
        return model

    for decay in ("separate", "gradient"):
        trains_as_plain(program, DGC(density=1.0, weight_decay=decay))


def parameters_added_later() -> None:
    def program(user, options):
        model = make_model()
        inner = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
        optimizer = user.distribute(inner, None, DENSE, **options)
        user.train(model, optimizer, range(3))
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})
        user.train(model, optimizer, range(3, 8))
        assert not user.distributes or "added.1.0" in optimizer.compression.stats().layers
        return model

    for options in ({}, {"groups": 2}):
        trains_as_plain(program, options)


def frozen_and_unfrozen_parameters() -> None:
    """Also as members of groups."""

    def program(user, groups):
        model = make_model()
        first, second = model[0].weight, model[2].weight
        first.requires_grad_(False)
        optimizer = user.begin(model, DENSE, groups=groups, weight_decay=0.01)
        for frozen, steps in ((first, range(3)), (second, range(3, 6))):
            before = frozen.clone()
            user.train(model, optimizer, steps)
            assert torch.equal(frozen, before)
            first.requires_grad_(True)
            second.requires_grad_(False)
            second.grad = None
        return model

    for groups in (None, 1, 2):
        trains_as_plain(program, groups)


def tied_weights() -> None:
    def loss(model, rank, step):
        return model(batch(rank, step)[0]).square().mean()

    def program(user, duplicates):
        torch.manual_seed(0)
        layers = torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40)
        model = torch.nn.Sequential(*layers)
        model[2].weight = model[0].weight
        optimizer = sgd(model.to(DEVICE))
        named = model.named_parameters(remove_duplicate=not duplicates)
        optimizer = user.distribute(optimizer, None, DENSE, named_parameters=named)
        user.train(model, optimizer, range(5), loss)
        return model

    for duplicates in (True, False):
        trains_as_plain(program, duplicates)


def synchronize_clip_and_skip() -> None:
    def program(user, method):
        model = make_model()
        # Momentum acts before the clipping here and after it in plain SGD, hence without.
        optimizer = user.begin(model, method, momentum=0.0)
        for step in range(5):
            optimizer.zero_grad()
            user.loss(model, step).backward()
            if user.distributes:
                optimizer.synchronize()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
            with optimizer.skip_synchronize() if user.distributes else contextlib.nullcontext():
                optimizer.step()
            total = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
            torch.testing.assert_close(total.cpu(), torch.tensor(0.05))
        return model

    trains_as_plain(program, DENSE)
    assert_same_everywhere(as_distributed(program, SPARSE))


def sparse_steps_are_those_along_dense_gradients() -> None:
    for method in (DGC(density=0.05), DGC.compact(density=0.05, nesterov=True)):
        runs = begin(method), begin(method, sparse_step=True)
        (dense, _), (sparse, _) = runs
        for step in range(6):
            for model, optimizer in runs:
                backward(model, optimizer, step)
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            gradient = sparse[0].weight.grad
            assert gradient.is_sparse
            assert gradient._nnz() <= hvd.size() * 128
            torch.testing.assert_close(gradient.to_dense(), dense[0].weight.grad)
            assert_close(sparse, dense)
        assert_same_everywhere(sparse)
        small = sparse[0].bias.grad  # is sent whole by the first method
        assert small.is_sparse == (method.small == "sparse")


def sparse_steps_are_refused_where_they_would_differ() -> None:
    adam = torch.optim.Adam(make_model().parameters())
    refused(
        ConfigError,
        (lambda: begin(SPARSE, sparse_step=True, weight_decay=1e-4), "sparse_step", "=0.0001"),
        (lambda: begin(SPARSE, sparse_step=True, fused=True), "sparse_step", "fused"),
        (lambda: begin(TopK(density=0.05), sparse_step=True), "momentum=0.9", "topk"),
        (lambda: distribute(adam, None, SPARSE, sparse_step=True), "torch.optim.SGD", "Adam"),
    )
    model, optimizer = begin(SPARSE, sparse_step=True)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with raises(ConfigError, "weight_decay=0.1"):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    with raises(ConfigError, "cannot scale"):
        scaler.scale(loss_of(model, hvd.rank(), 0)).backward()


def a_second_synchronize_changes_nothing() -> None:
    model, optimizer = begin(SPARSE)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.synchronize()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.synchronize()
    with warned() as said:
        optimizer.step()  # Horovod would average the averages
    [warning] = said
    assert "without optimizer.skip_synchronize()" in warning
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


def zero_grad() -> None:
    def program(user, set_to_none):
        model = make_model()
        optimizer = user.begin(model, DENSE)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            user.loss(model, step).backward()
            optimizer.step()
        if user.distributes:
            user.loss(model, 9).backward()
            for words in ("zero_grad", r"requires_grad_\(False\)", r"compression\.discard\(\)"):
                with raises(AssertionError, words):
                    optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.synchronize()
        return model

    for set_to_none in (True, False):
        trains_as_plain(program, set_to_none)


def closures() -> None:
    def program(user):
        model = make_model()
        optimizer = user.begin(model, DENSE)
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = user.loss(model, step)
                loss.backward()
                return loss

            expected = user.loss(model, step).item()
            assert abs(optimizer.step(closure).item() - expected) < 1e-6
        return model

    trains_as_plain(program)


def non_contiguous_gradients() -> None:
    for compression in (DENSE, SPARSE):
        torch.manual_seed(0)
        plain = torch.nn.Conv2d(8, 16, 3)
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        for model in (plain, last):
            _, optimizer = begin(compression, model, weight_decay=0.01)
            for step in range(4):
                batches = torch.Generator().manual_seed(hvd.rank() + 10 * step)
                x = torch.randn(2, 8, 6, 6, generator=batches)
                optimizer.zero_grad()
                model(x.contiguous(memory_format=torch.channels_last)).square().mean().backward()
                optimizer.step()
        assert not last.weight.grad.is_contiguous()
        assert_same_everywhere(last)
        assert_close(last, plain)


def half_and_double_precision_parameters() -> None:
    def program(user, method, dtype):
        model = make_model(dtype=dtype)
        optimizer = user.begin(model, method)
        user.train(model, optimizer, range(4))
        assert all(p.grad.dtype == dtype for p in model.parameters())
        if user.distributes:
            residual = optimizer.compression.store.state_of(model[0].weight).get("residual")
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            assert residual is None or residual.dtype == wide
        return model

    for dtype, near in ((torch.float16, 3e-2), (torch.bfloat16, 2e-1), (torch.float64, 1e-6)):
        for method in (DENSE, NoCompression()):
            trains_as_plain(program, method, dtype, rtol=near, atol=near)
        assert_same_everywhere(as_distributed(program, SPARSE, dtype))


def learning_rate_schedulers() -> None:
    def scheduler(optimizer, kind):
        if kind == "one cycle":  # moves momentum as well as the learning rate
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def program(user, kind, momenta):
        model = make_model()
        inner = sgd(model)
        before = scheduler(inner, kind) if kind == "made before" else None
        optimizer = user.distribute(inner, model, DENSE)
        schedule = before or scheduler(optimizer, kind)
        for step in range(9):
            user.train(model, optimizer, [step])
            with warned():  # one that was made before watches the inner one
                schedule.step()
            momenta.append(optimizer.param_groups[0]["momentum"])
        return model

    for kind in ("steps", "one cycle", "made before"):
        momenta: list[float] = []
        trains_as_plain(program, kind, momenta)
        assert momenta[:9] == momenta[9:]


@horovod_only
def join_is_refused_as_long_as_an_optimizer_is_in_use() -> None:
    """On all ranks alike: one that nobody needs any more may wait for the garbage collector, and
    which rank it has come to is chance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what PyTorch itself imports
        torch._dynamo.reset()  # it keeps models that were compiled, and they keep optimizers
    gc.disable()
    try:
        model, optimizer = begin(DGC)
        train(model, optimizer, range(1))
        for module in (hvd, horovod.torch):
            with raises(UnsupportedError, "join", "drop_last"):
                module.join()
        del model, optimizer
        if hvd.rank() == 0:
            gc.collect()
        hvd.join()
        assert hvd.allreduce(torch.ones(3), name="afterwards").tolist() == [1, 1, 1]
    finally:
        gc.enable()


def single_tensors_take_methods_without_state() -> None:
    x = torch.tensor([1.0, -2.0, 70000.0]) * (hvd.rank() + 1)
    mean = torch.tensor([1.0, -2.0, 70000.0]) * (hvd.size() + 1) / 2
    for method in (NoCompression, NoCompression(), "none", hvd.Compression.none):
        torch.testing.assert_close(hvd.allreduce(x, name="x", compression=method), mean)
    for method in (FP16, FP16(), "fp16", hvd.Compression.fp16):
        found = hvd.allreduce(x, compression=method, name="x", op=hvd.Sum)
        assert found.dtype == torch.float32
        assert found.tolist()[:2] == (mean * hvd.size()).tolist()[:2]
        assert torch.isinf(found[2]), "it travelled in half precision"
    for method in (DGC, DGC(), TopK(density=0.5), "bf16", "qsgd", "natural"):
        with raises(UnboundError, "DistributedOptimizer", "named_parameters", "hvd.FP16"):
            hvd.allreduce(x, compression=method)
    with raises(UnboundError, "DistributedOptimizer"):
        DGC().stats()


@horovod_only
def groups_and_parts_of_single_tensors_too() -> None:
    """With names: those that Horovod makes count calls, and a rank outside of a set made fewer."""
    x = torch.ones(2 * hvd.size(), 3)
    for method in (FP16, "fp16", NoCompression()):
        for module in (hvd, horovod.torch):
            for y in module.grouped_allreduce([x, 2 * x], compression=method, name="both")[:1]:
                assert torch.equal(y, x)
            y = module.reducescatter(x, compression=method, name="part", op=hvd.Sum)
            assert torch.equal(y, hvd.size() * x[:2])
            y, _ = module.grouped_reducescatter([x, x], compression=method, name="parts")
            assert torch.equal(y, x[:2])


def a_broadcast_before_the_first_step_leaves_gradients_of_zero() -> None:
    for method in (NoCompression, TopK(density=0.1), SPARSE):
        (model, optimizer), (reference, other) = begin(method), begin(method)
        model[0].weight.requires_grad_(False)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert model[0].weight.grad is None
        model[0].weight.requires_grad_(True)
        for p in model[1:].parameters():
            assert torch.equal(p.grad, torch.zeros_like(p))
        for m, o in ((model, optimizer), (reference, other)):
            loss_of(m, hvd.rank(), 0).backward()
            o.step()
            m.zero_grad()
            train(m, o, range(1, 3))
        assert_equal(model, reference)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        model.zero_grad()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(p.grad is None for p in model.parameters()), "only before the first step"
    words = torch.nn.Embedding(5, 3, sparse=True)
    _, optimizer = begin(NoCompression, words, momentum=0.0)
    hvd.broadcast_optimizer_state(optimizer, 0, words)
    words(torch.tensor([hvd.rank()])).sum().backward()
    assert words.weight.grad.is_sparse
    optimizer.step()
    assert_same_everywhere(words)
    optimizer.state[words.weight]["rows"] = torch.ones(2).to_sparse()
    with raises(UnsupportedError, "rank 0 has a Tensor", "sparse", "no bytes to send"):
        hvd.broadcast_optimizer_state(optimizer, 0)


@horovod_only
def an_environment_of_some_ranks_only_is_an_error_on_all() -> None:
    """Rank 0 would wait in an exchange of which the others know nothing."""
    text = "topk:density=0.05" if hvd.rank() == 0 else None
    for module in (hvd, horovod.torch):
        compared.clear()
        with (
            environment(text),
            raises(MismatchError, "rank 0: 'topk:density=0.05'", "1", "not set", "-x HVD_COMPR"),
        ):
            module.DistributedOptimizer(sgd(make_model()))
    with environment(text):
        run = begin(TopK(density=0.1))
    train(*run, range(1))
    hvd.DistributedOptimizer(sgd(make_model()))


@horovod_only
@applies(least=2)
def a_compression_that_some_ranks_name_is_an_error_on_all() -> None:
    """Ranks that name none have Horovod's own optimizer, which knows nothing of exchanges."""
    for theirs, words in (({}, "not set"), ({"compression": hvd.Compression.fp16}, "of Horovod")):
        compared.clear()
        with raises(MismatchError, "rank 0: .*one of hvd_compress", f"1.*: .*{words}"):
            if hvd.rank() == 0:
                train(*begin(TopK(density=0.1)), range(1))
            else:
                hvd.DistributedOptimizer(sgd(make_model()), **theirs)


def the_environment_names_a_method_for_scripts_that_say_none() -> None:
    modules = [hvd] if over == "mpi" else [hvd, horovod.torch]
    with environment("topk:density=0.05") as lines:
        for options in ({}, {"compression": hvd.Compression.none}):
            for module in modules:
                model = make_model()
                optimizer = module.DistributedOptimizer(sgd(model), **options)
                assert optimizer.compression.method == TopK(density=0.05)
                train(model, optimizer, range(2))
                assert_same_everywhere(model)
        assert begin(NoCompression)[1].compression.method == NoCompression()
        x = torch.ones(3)
        assert torch.equal(hvd.allreduce(x, name="x", compression=hvd.Compression.none), x)
    variable = "HVD_COMPRESSION=topk:density=0.05"
    assert_said(
        lines,
        hvd.rank(),
        f"{variable} names the compression, since the script names none: TopK(density=0.05",
        f"{variable} is not used, since the script names compression=<class",
    )
    with environment("dcg"), raises(ConfigError, "HVD_COMPRESSION=dcg"):
        hvd.DistributedOptimizer(sgd(make_model()))
    _, plain = begin(hvd.Compression.none)
    is_horovods = not hasattr(plain, "compression")
    assert is_horovods or plain.compression.method == NoCompression()


def what_cannot_work_says_what_to_write() -> None:
    model, optimizer = begin(DGC)
    later = distribute(sgd(model[0]), None, DGC)
    rmsprop = torch.optim.RMSprop(make_model().parameters(), momentum=0.9)
    other = chain(momentum_correction(0.5), error_feedback(), via=allgather(top_k(0.1)))
    added = {"params": model[2].parameters(), "dampening": 0.5}
    refused(
        ConfigError,
        (lambda: distribute(optimizer, model, DGC), "distributed already"),
        (lambda: begin(DGC, dampening=0.1), "dampening"),
        (lambda: distribute(rmsprop, None, DGC(momentum=0.5)), "two momenta"),
        (lambda: later.add_param_group(added), "dampening"),
        (lambda: begin(other), "two momenta: 0.9", "0.5"),
    )
    model, by_epoch = begin(DGC(density=hvd.warmup_to(0.01, epochs=4)))
    with raises(ConfigError, "set_epoch"):
        loss_of(model, hvd.rank(), 0).backward()
    by_epoch.compression.set_epoch(0)
    train(model, by_epoch, range(1))  # and then it works
    model, bad = begin(DGC, torch.nn.Linear(4, 4, dtype=torch.complex64))
    model.weight.grad = torch.zeros_like(model.weight)
    with raises(UnsupportedError, "complex64"):
        bad.compression.exchange_gradients([bad._watched[id(model.weight)]])


@horovod_only
def optimizers_may_be_made_in_another_order_or_on_one_rank_alone() -> None:
    """Over Horovod, where making one is no collective: the order of their use counts."""
    order = (3, 2, 0, 1) if hvd.rank() == 0 else range(3)
    made = {number: begin(TopK(density=0.1), seed=number) for number in order}
    for number in range(3):
        train(*made[number], range(2))
        assert_same_everywhere(made[number][0])


def one_backward_for_two_optimizers_of_which_a_rank_has_gradients_of_one() -> None:
    """Nobody waits in backward, where the last rank is at the other optimizer."""

    def loss(models, rank, step):
        has_both = rank < max(1, hvd.size() - 1)
        return sum(loss_of(model, rank, step) for model in models[: 1 + has_both])

    def program(user):
        models = torch.nn.ModuleList(make_model(seed) for seed in range(2))
        optimizers = [user.begin(model, NoCompression()) for model in models]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            user.loss(models, step, loss).backward()
            for optimizer in optimizers:
                optimizer.step()
        return models

    trains_as_plain(program)


def empty_parameters() -> None:
    for compression in (DGC(density=0.5, min_size=0), TopK(density=0.5), NoCompression(), "bf16"):
        model = torch.nn.ParameterList([torch.zeros(0, 3), torch.zeros(()), torch.zeros(1, 1)])
        _, optimizer = begin(compression, model, momentum=0.0, lr=1.0)
        optimizer.zero_grad()
        sum(((hvd.rank() + 1) * p).sum() for p in model).backward()
        optimizer.step()
        expected = -(hvd.size() + 1) / 2
        assert model[1].item() == expected
        assert model[2].item() == expected


def number_of_groups() -> None:
    model = make_model()
    a, b, c, d, e, f = model.parameters()
    options = {"compression": SPARSE}
    alone = hvd.DistributedOptimizer(sgd(model), **options)
    assert alone._groups is None
    for groups, expected in (
        (1, [(a, b, c, d, e, f)]),
        (4, [(a, b), (c, d), (e,), (f,)]),  # as Horovod divides them
        (100, [(a,), (b,), (c,), (d,), (e,), (f,)]),
        ([[f, a], [torch.zeros(1)], [c]], [(f, a), (c,), (b,), (d,), (e,)]),
    ):
        optimizer = hvd.DistributedOptimizer(sgd(model), groups=groups, **options)
        more = torch.nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [more]})
        found = optimizer._groups
        for members, wanted in zip(found, [*expected, (more,)], strict=True):
            assert [id(p) for p in members] == [id(p) for p in wanted]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        older = hvd.DistributedOptimizer(sgd(model), num_groups=2, **options)
        both = hvd.DistributedOptimizer(sgd(model), num_groups=2, groups=3, **options)
    assert [w.category for w in caught] == [DeprecationWarning] * 2
    assert caught[0].filename == __file__
    assert len(older._groups) == 2
    assert len(both._groups) == 3


def a_change_of_backward_passes_counts_from_there() -> None:
    def program(user):
        model = make_model()
        optimizer = user.begin(model, DENSE)
        for first, passes in ((0, 1), (1, 3), (4, 2)):
            if user.distributes:
                optimizer.set_backward_passes_per_step(passes)
            optimizer.zero_grad()
            for part in range(first, first + passes):
                user.loss(model, part).backward()
            optimizer.step()
        return model

    trains_as_plain(program)
    model, optimizer = begin(DENSE, backward_passes_per_step=2)
    loss_of(model, hvd.rank(), 0).backward()
    with raises(ConfigError, "backward_passes_per_step=0"):
        optimizer.set_backward_passes_per_step(0)
    optimizer.set_backward_passes_per_step(3)  # what has been added up is still there
    with raises(AssertionError, "zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    assert_same_everywhere(p.grad for p in model.parameters())


def too_many_backward_passes() -> None:
    model, optimizer = begin(DENSE, backward_passes_per_step=2)
    for part in (0, 1):
        loss_of(model, hvd.rank(), part).backward()
    with raises(AssertionError, "backward_passes_per_step"):
        loss_of(model, hvd.rank(), 2).backward()
    optimizer.synchronize()
    # And before a group is complete: the last layer's gradients are still to come.
    model, optimizer = begin(SPARSE, groups=1)
    for p in list(model.parameters())[:2]:
        p.requires_grad_(False)
    x, _ = batch(hvd.rank(), 0)
    model[:4](x).sum().backward()
    with raises(AssertionError, "backward_passes_per_step"):
        model[:4](x).sum().backward()
    optimizer.synchronize()


def gradients_with_a_graph_are_refused() -> None:
    model, optimizer = begin(SPARSE)
    with raises(AssertionError, "create_graph"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about reference cycles
        loss_of(model, hvd.rank(), 0).backward(create_graph=True)
    for p in model.parameters():
        p.grad = None
    train(model, optimizer, range(1))

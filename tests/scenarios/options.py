"""Every option of Horovod's optimizer is honoured, or refused with the way out."""

from __future__ import annotations

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
from tests.scenarios import applies, horovod_only
from tests.scenarios.common import (
    assert_close,
    assert_same_everywhere,
    batch,
    dense_reference,
    distribute,
    loss_of,
    make_model,
    sgd,
    train,
)
from tests.scenarios.driver import hvd, over, raises
from tests.scenarios.environment import assert_said, environment

DENSE = DGC(density=1.0)  # momentum SGD, through all of DGC's machinery
SPARSE = DGC(density=0.05)


def op_sum_does_not_multiply_weight_decay() -> None:
    for decay in ("separate", "gradient"):
        model, reference = make_model(), make_model()
        options = {"lr": 0.01, "weight_decay": 0.1}
        method = DGC(density=1.0, weight_decay=decay)
        train(model, distribute(sgd(model, **options), model, method, op=hvd.Sum), range(5))
        inner = sgd(reference, **options)
        for step in range(5):
            inner.zero_grad()
            sum(loss_of(reference, rank, step) for rank in range(hvd.size())).backward()
            inner.step()
        assert_close(model, reference)


def parameters_added_later() -> None:
    for options in ({}, {"groups": 2}):
        model, reference = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9),
            compression=DENSE,
            **options,
        )
        inner = torch.optim.SGD(reference[0].parameters(), lr=0.05, momentum=0.9)
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})
                inner.add_param_group({"params": reference[2].parameters(), "lr": 0.02})
            train(model, optimizer, [step])
            dense_reference(reference, inner, [step])
        assert_close(model, reference)
        assert "added.1.0" in optimizer.compression.stats().layers


def frozen_and_unfrozen_parameters() -> None:
    """Also as members of groups."""
    for groups in (None, 1, 2):
        model, reference = make_model(), make_model()
        for m in (model, reference):
            m[0].weight.requires_grad_(False)
        optimizer = distribute(sgd(model, weight_decay=0.01), model, DENSE, groups=groups)
        inner = sgd(reference, weight_decay=0.01)
        before = model[0].weight.clone()
        train(model, optimizer, range(3))
        dense_reference(reference, inner, range(3))
        assert torch.equal(model[0].weight, before)
        for m in (model, reference):
            m[0].weight.requires_grad_(True)
            m[2].weight.requires_grad_(False)
            m[2].weight.grad = None
        before = model[2].weight.clone()
        train(model, optimizer, range(3, 6))
        dense_reference(reference, inner, range(3, 6))
        assert torch.equal(model[2].weight, before)
        assert_close(model, reference)


def tied_weights() -> None:
    def tied():
        torch.manual_seed(0)
        m = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40))
        m[2].weight = m[0].weight
        return m.to(DEVICE)

    for duplicates in (True, False):
        model, reference = tied(), tied()
        named = model.named_parameters(remove_duplicate=not duplicates)
        optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=named, compression=DENSE)
        inner = sgd(reference)
        for step in range(5):
            for m, o, ranks in (
                (model, optimizer, [hvd.rank()]),
                (reference, inner, range(hvd.size())),
            ):
                o.zero_grad()
                (sum(m(batch(r, step)[0]).square().mean() for r in ranks) / len(ranks)).backward()
                o.step()
        assert_close(model, reference)


def synchronize_clip_and_skip() -> None:
    for compression in (DENSE, SPARSE):
        model, reference = make_model(), make_model()
        # Momentum acts before the clipping here and after it in plain SGD, hence without.
        optimizer, inner = (
            distribute(sgd(model, momentum=0.0), model, compression),
            sgd(reference, momentum=0.0),
        )
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert norm > 0.05
            with optimizer.skip_synchronize():
                optimizer.step()
            total = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
            torch.testing.assert_close(total.cpu(), torch.tensor(0.05))
            dense_reference_step(reference, inner, step)
        assert_same_everywhere(model)
        if compression is DENSE:
            assert_close(model, reference)


def dense_reference_step(reference, inner, step, clip=0.05):
    inner.zero_grad()
    (sum(loss_of(reference, r, step) for r in range(hvd.size())) / hvd.size()).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
    inner.step()


def sparse_steps_are_those_along_dense_gradients() -> None:
    for method in (DGC(density=0.05), DGC.compact(density=0.05, nesterov=True)):
        dense, sparse = make_model(), make_model()
        optimizers = [
            distribute(sgd(dense), dense, method),
            distribute(sgd(sparse), sparse, method, sparse_step=True),
        ]
        for step in range(6):
            for model, optimizer in zip((dense, sparse), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, hvd.rank(), step).backward()
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
    model = make_model()
    for options, words in (
        ({"weight_decay": 1e-4}, "weight_decay=0.0001"),
        ({"fused": True}, "fused"),
    ):
        with raises(ConfigError, "sparse_step", words):
            distribute(sgd(model, **options), model, SPARSE, sparse_step=True)
    with raises(ConfigError, "momentum=0.9", "topk"):
        distribute(sgd(model), model, TopK(density=0.05), sparse_step=True)
    with raises(ConfigError, "torch.optim.SGD", "Adam"):
        distribute(torch.optim.Adam(model.parameters()), model, SPARSE, sparse_step=True)
    optimizer = distribute(sgd(model), model, SPARSE, sparse_step=True)
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
    model = make_model()
    optimizer = distribute(sgd(model), model, SPARSE)
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.synchronize()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()  # Horovod would average the averages
    [warning] = caught
    assert "without optimizer.skip_synchronize()" in str(warning.message)
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


def zero_grad() -> None:
    for set_to_none in (True, False):
        model, reference = make_model(), make_model()
        optimizer, inner = distribute(sgd(model), model, DENSE), sgd(reference)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        dense_reference(reference, inner, range(4))
        assert_close(model, reference)
        loss_of(model, hvd.rank(), 9).backward()
        with raises(AssertionError, "zero_grad"):
            optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.synchronize()


def closures() -> None:
    model, reference = make_model(), make_model()
    optimizer, inner = distribute(sgd(model), model, DENSE), sgd(reference)
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), step)
            loss.backward()
            return loss

        expected = loss_of(model, hvd.rank(), step).item()
        assert abs(optimizer.step(closure).item() - expected) < 1e-6
    dense_reference(reference, inner, range(4))
    assert_close(model, reference)


def non_contiguous_gradients() -> None:
    for compression in (DENSE, SPARSE):
        torch.manual_seed(0)
        plain = torch.nn.Conv2d(8, 16, 3)
        last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
        for model in (plain, last):
            optimizer = distribute(sgd(model, weight_decay=0.01), model, compression)
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
    for dtype, tolerance in ((torch.float16, 3e-2), (torch.bfloat16, 2e-1), (torch.float64, 1e-6)):
        for compression in (DENSE, SPARSE, NoCompression()):
            model, reference = make_model(dtype=dtype), make_model(dtype=dtype)
            optimizer = distribute(sgd(model), model, compression)
            train(model, optimizer, range(4))
            assert all(p.grad.dtype == dtype for p in model.parameters())
            assert_same_everywhere(model)
            if compression != SPARSE:
                dense_reference(reference, sgd(reference), range(4))
                assert_close(model, reference, rtol=tolerance, atol=tolerance)
            residual = optimizer.compression.store.state_of(model[0].weight).get("residual")
            half = dtype in (torch.float16, torch.bfloat16)
            assert residual is None or residual.dtype == (torch.float32 if half else dtype)


def learning_rate_schedulers() -> None:
    def scheduler(optimizer, kind):
        if kind == "one cycle":  # moves momentum as well as the learning rate
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    for kind in ("steps", "one cycle", "made before"):
        model, reference = make_model(), make_model()
        own, inner = sgd(model), sgd(reference)
        mine = scheduler(own, kind) if kind == "made before" else None
        optimizer = distribute(own, model, DENSE)
        mine, theirs = mine or scheduler(optimizer, kind), scheduler(inner, kind)
        for step in range(9):
            train(model, optimizer, [step])
            dense_reference(reference, inner, [step])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one that was made before watches the inner one
                mine.step()
                theirs.step()
            assert optimizer.param_groups[0]["momentum"] == inner.param_groups[0]["momentum"]
        assert_close(model, reference)


@horovod_only
def join_is_refused_as_long_as_an_optimizer_is_in_use() -> None:
    """On all ranks alike: one that nobody needs any more may wait for the garbage collector, and
    which rank it has come to is chance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what PyTorch itself imports
        torch._dynamo.reset()  # it keeps models that were compiled, and they keep optimizers
    gc.disable()
    try:
        model = make_model()
        optimizer = distribute(sgd(model), model, DGC)
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
    for method in (DGC, TopK(density=0.5), "bf16", "qsgd", "natural"):
        with raises(UnboundError, "hvd.FP16"):
            hvd.allreduce(x, compression=method)


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
        model, reference = make_model(), make_model()
        model[0].weight.requires_grad_(False)
        optimizer = distribute(sgd(model), model, method)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert model[0].weight.grad is None
        model[0].weight.requires_grad_(True)
        for p in model[1:].parameters():
            assert torch.equal(p.grad, torch.zeros_like(p))
        other = distribute(sgd(reference), reference, method)
        for m, o in ((model, optimizer), (reference, other)):
            loss_of(m, hvd.rank(), 0).backward()
            o.step()
            m.zero_grad()
            train(m, o, range(1, 3))
        assert_close(model, reference, rtol=0, atol=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        model.zero_grad()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(p.grad is None for p in model.parameters()), "only before the first step"
    words = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(sgd(words, momentum=0.0), compression=NoCompression)
    hvd.broadcast_optimizer_state(optimizer, 0, words)
    words(torch.tensor([hvd.rank()])).sum().backward()
    assert words.weight.grad.is_sparse
    optimizer.step()
    assert_same_everywhere(words)
    optimizer.state[words.weight]["rows"] = torch.ones(2).to_sparse()
    with raises(UnsupportedError, "rank 0 has a Tensor", "sparse", "no bytes to send"):
        hvd.broadcast_optimizer_state(optimizer, 0)


@horovod_only
def options_of_ours_beside_horovods_own_compression() -> None:
    model = make_model()
    fp16 = hvd.Compression.fp16
    optimizer = hvd.DistributedOptimizer(sgd(model), compression=fp16, seed=1, sparse_step=False)
    assert not hasattr(optimizer, "compression")
    train(model, optimizer, range(1))
    with raises(ConfigError, "sparse_step=True", "TopK"):
        hvd.DistributedOptimizer(sgd(make_model()), compression=fp16, sparse_step=True)


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
    model = make_model()
    with environment(text):
        optimizer = distribute(sgd(model), model, TopK(density=0.1))
    train(model, optimizer, range(1))
    hvd.DistributedOptimizer(sgd(model))


@horovod_only
@applies(least=2)
def a_compression_that_some_ranks_name_is_an_error_on_all() -> None:
    """Ranks that name none have Horovod's own optimizer, which knows nothing of exchanges."""
    for theirs, words in (({}, "not set"), ({"compression": hvd.Compression.fp16}, "of Horovod")):
        compared.clear()
        model = make_model()
        with raises(MismatchError, "rank 0: .*one of hvd_compress", f"1.*: .*{words}"):
            if hvd.rank() == 0:
                train(model, distribute(sgd(model), model, TopK(density=0.1)), range(1))
            else:
                hvd.DistributedOptimizer(sgd(model), **theirs)


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
        model = make_model()
        assert distribute(sgd(model), model, NoCompression).compression.method == NoCompression()
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
    model = make_model()
    plain = hvd.DistributedOptimizer(sgd(model), compression=hvd.Compression.none)
    is_horovods = not hasattr(plain, "compression")
    assert is_horovods or plain.compression.method == NoCompression()


def what_cannot_work_says_what_to_write() -> None:
    model = make_model()
    for call in (
        lambda: hvd.allreduce(torch.ones(3), compression=DGC),
        lambda: hvd.allreduce(torch.ones(3), compression=DGC()),
    ):
        with raises(UnboundError, "DistributedOptimizer", "named_parameters"):
            call()
    with raises(UnboundError, "DistributedOptimizer"):
        DGC().stats()
    optimizer = distribute(sgd(model), model, DGC)
    with raises(ConfigError, "distributed already"):
        distribute(optimizer, model, DGC)
    with raises(ConfigError, "dampening"):
        distribute(sgd(model, dampening=0.1), model, DGC)
    rmsprop = torch.optim.RMSprop(model.parameters(), momentum=0.9)
    with raises(ConfigError, "two momenta"):
        distribute(rmsprop, model, DGC(momentum=0.5))
    later = hvd.DistributedOptimizer(sgd(model[0]), compression=DGC)
    with raises(ConfigError, "dampening"):
        later.add_param_group({"params": model[2].parameters(), "dampening": 0.5})
    other = chain(momentum_correction(0.5), error_feedback(), via=allgather(top_k(0.1)))
    with raises(ConfigError, "two momenta: 0.9", "0.5"):
        distribute(sgd(model), model, other)
    model = make_model()
    by_epoch = distribute(sgd(model), model, DGC(density=hvd.warmup_to(0.01, epochs=4)))
    with raises(ConfigError, "set_epoch"):
        loss_of(model, hvd.rank(), 0).backward()
    by_epoch.compression.set_epoch(0)
    train(model, by_epoch, range(1))  # and then it works
    del optimizer
    complex_model = torch.nn.Linear(4, 4, dtype=torch.complex64)
    bad = distribute(sgd(complex_model), complex_model, DGC)
    complex_model.weight.grad = torch.zeros_like(complex_model.weight)
    with raises(UnsupportedError, "complex64"):
        bad.compression.exchange_gradients([bad._watched[id(complex_model.weight)]])


@horovod_only
def optimizers_may_be_made_in_another_order_or_on_one_rank_alone() -> None:
    """Over Horovod, where making one is no collective: the order of their use counts."""
    models = [make_model(seed) for seed in range(4)]
    order = (3, 2, 0, 1) if hvd.rank() == 0 else range(3)
    made = {n: distribute(sgd(models[n]), models[n], TopK(density=0.1)) for n in order}
    for number in range(3):
        train(models[number], made[number], range(2))
        assert_same_everywhere(models[number])


def one_backward_for_two_optimizers_of_which_a_rank_has_gradients_of_one() -> None:
    """Nobody waits in backward, where the last rank is at the other optimizer."""
    models = [make_model(seed) for seed in range(2)]
    ranks = {0: range(hvd.size()), 1: range(max(1, hvd.size() - 1))}  # that have gradients
    optimizers = [distribute(sgd(model), model, NoCompression()) for model in models]
    references = [make_model(seed) for seed in range(2)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        here = [models[n] for n in ranks if hvd.rank() in ranks[n]]
        sum(loss_of(model, hvd.rank(), step) for model in here).backward()
        for optimizer in optimizers:
            optimizer.step()
    for n, reference in enumerate(references):
        plain = sgd(reference)
        for step in range(3):
            plain.zero_grad()
            losses = [loss_of(reference, rank, step) for rank in ranks[n]]
            (sum(losses) / hvd.size()).backward()
            plain.step()
        assert_close(models[n], reference)
        assert_same_everywhere(models[n])


@applies(least=2)
def groups_that_differ_are_an_error() -> None:
    """Each rank would wait for a bucket that others do not make."""
    model = make_model()
    groups = [list(model.parameters())[:2]] if hvd.rank() else None
    optimizers = []
    with raises(MismatchError, "groups", "rank 0: nothing", "1.*: .*0.weight, 0.bias"):
        optimizers.append(distribute(sgd(model), model, SPARSE, groups=groups))
        train(model, optimizers[0], range(1))


def empty_parameters() -> None:
    for compression in (DGC(density=0.5, min_size=0), TopK(density=0.5), NoCompression(), "bf16"):
        model = torch.nn.ParameterList([torch.zeros(0, 3), torch.zeros(()), torch.zeros(1, 1)])
        optimizer = distribute(sgd(model, momentum=0.0, lr=1.0), model, compression)
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
    model, reference = make_model(), make_model()
    optimizer, inner = distribute(sgd(model), model, DENSE), sgd(reference)
    for first, passes in ((0, 1), (1, 3), (4, 2)):
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        inner.zero_grad()
        for part in range(first, first + passes):
            loss_of(model, hvd.rank(), part).backward()
            (sum(loss_of(reference, r, part) for r in range(hvd.size())) / hvd.size()).backward()
        optimizer.step()
        inner.step()
    assert_close(model, reference)
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), 0).backward()
    with raises(ConfigError, "backward_passes_per_step=0"):
        optimizer.set_backward_passes_per_step(0)
    optimizer.set_backward_passes_per_step(3)  # what has been added up is still there
    with raises(AssertionError, "zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    assert_same_everywhere(p.grad for p in model.parameters())


def too_many_backward_passes() -> None:
    model = make_model()
    optimizer = distribute(sgd(model), model, DENSE, backward_passes_per_step=2)
    for part in (0, 1):
        loss_of(model, hvd.rank(), part).backward()
    with raises(AssertionError, "backward_passes_per_step"):
        loss_of(model, hvd.rank(), 2).backward()
    optimizer.synchronize()
    # And before a group is complete: the last layer's gradients are still to come.
    model = make_model()
    optimizer = distribute(sgd(model), model, SPARSE, groups=1)
    for p in list(model.parameters())[:2]:
        p.requires_grad_(False)
    x, _ = batch(hvd.rank(), 0)
    model[:4](x).sum().backward()
    with raises(AssertionError, "backward_passes_per_step"):
        model[:4](x).sum().backward()
    optimizer.synchronize()


def gradients_with_a_graph_are_refused() -> None:
    model = make_model()
    optimizer = distribute(sgd(model), model, SPARSE)
    with raises(AssertionError, "create_graph"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about reference cycles
        loss_of(model, hvd.rank(), 0).backward(create_graph=True)
    for p in model.parameters():
        p.grad = None
    train(model, optimizer, range(1))


@horovod_only
def only_public_collectives_of_horovod_are_used() -> None:
    """Its own class serves its own compressors, and never ours."""
    for module in (hvd, horovod.torch):
        model, other = make_model(), make_model()
        ours = module.DistributedOptimizer(sgd(model), compression=SPARSE)
        theirs = module.DistributedOptimizer(sgd(other), compression=module.Compression.fp16)
        assert not any("horovod" in cls.__module__ for cls in type(ours).__mro__)
        assert type(theirs).__module__ == "horovod.torch.optimizer"
        assert not vars(ours).keys() & {"_handles", "_allreduce_delay", "_grad_accs"}
        with raises(ConfigError, "distributed already"):
            module.DistributedOptimizer(theirs, compression=SPARSE)
        train(other, theirs, range(2))
        assert_same_everywhere(other)

"""The laws over MPI without Horovod, beside all that holds with it."""

from __future__ import annotations

import numpy as np
import torch

from hvd_compress.errors import (
    CollectiveTimeout,
    CompressionError,
    ConfigError,
    MismatchError,
    PayloadError,
    SetupError,
    UnsupportedError,
)
from hvd_compress.mpi.engine import CARRIERS
from hvd_compress.requests import Gather
from hvd_compress.torch import BF16, DGC, FP16, NoCompression, RandomK, TopK
from tests.scenarios import applies, refused
from tests.scenarios.common import (
    assert_equal,
    assert_same_everywhere,
    backward,
    begin,
    lockstep_reference,
    loss_of,
    make_model,
    train,
)
from tests.scenarios.driver import hvd, raises


def same_bits_as_the_lockstep_world() -> None:
    for method in (
        NoCompression(),
        FP16(),
        BF16(),
        TopK(density=0.05),
        RandomK(density=0.1),
        DGC(density=0.05),
        DGC(density=0.05, values="float16", min_size=0),
    ):
        momentum = 0.9 if isinstance(method, DGC) else 0.0
        (model, optimizer), reference = begin(method, momentum=momentum), make_model()
        train(model, optimizer, range(6))
        lockstep_reference(reference, method, 6, momentum=momentum)
        assert_equal(model, reference)


@applies(least=2)  # alone, nothing leaves
def buckets_leave_while_backward_goes_on() -> None:
    model, optimizer = begin(TopK(density=0.05))
    optimizer.compression.reducer.buckets.nbytes = 1
    train(model, optimizer, range(2))  # the first step finds out who comes when
    backward(model, optimizer, 2)
    engine = optimizer.compression.engine
    assert len(engine._in_flight) == 6, "one bucket a parameter, and all have left"
    order = list(engine._in_flight)
    assert order[0].startswith("4."), "the last layer's gradients are ready first"
    optimizer.step()
    assert_same_everywhere(model)


@applies(least=2)  # alone, nothing travels
def a_damaged_message_ends_the_use_of_the_optimizer() -> None:
    """Others may not have noticed, and what they send must not meet what is sent later."""
    model, optimizer = begin(TopK(density=0.05))
    train(model, optimizer, range(2))
    honest = CARRIERS[Gather]

    def damage(request, *options):
        request.payload[-1] ^= 16
        return honest(request, *options)

    if hvd.rank() == 0:
        CARRIERS[Gather] = damage
    try:
        optimizer.zero_grad()
        with raises(PayloadError, "rank 0", "checksum"):
            loss_of(model, hvd.rank(), 2).backward()  # already here, if the bucket was fast
            optimizer.step()
    finally:
        CARRIERS[Gather] = honest
    optimizer.zero_grad()
    with raises(CollectiveTimeout, "broken", "abandoned"):
        train(model, optimizer, range(3, 4))
    optimizer.compression.engine.close()


@applies(least=2)  # one rank agrees with itself
def arrays_that_differ_are_errors() -> None:
    """shared.py has what optimizers are given."""
    with raises(MismatchError, "allgather"):
        hvd.allgather(torch.ones(2, 3 if hvd.rank() == 1 else 2))


def handles_may_be_finished_in_any_order_or_dropped() -> None:
    x = torch.arange(50_000.0) + hvd.rank()
    handles = [hvd.allreduce_async(x + i, op=hvd.Sum) for i in range(6)]
    hvd.allreduce_async(x)  # nobody waits for it
    total = hvd.size() * torch.arange(50_000.0) + sum(range(hvd.size()))
    order = range(6) if hvd.rank() % 2 else reversed(range(6))
    for i in order:
        assert torch.equal(hvd.synchronize(handles[i]), total + hvd.size() * i)
    hvd.barrier()


def functions_of_horovod() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.full((2, 3), float(rank))
    total = size * (size - 1) / 2
    assert torch.equal(hvd.allreduce(x), torch.full((2, 3), total / size))
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum), torch.full((2, 3), total))
    assert torch.equal(hvd.allreduce(x, op=hvd.Max), torch.full((2, 3), float(size - 1)))
    half = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    assert torch.equal(half, torch.full((2, 3), total))
    scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    assert torch.equal(scaled, torch.full((2, 3), total / 2))
    assert torch.equal(hvd.allreduce_(x.clone(), op=hvd.Sum), torch.full((2, 3), total))
    assert torch.equal(hvd.allreduce(x, False), torch.full((2, 3), total))
    many = torch.full((2,), 3001, dtype=torch.int32)
    summed = hvd.allreduce(many, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert summed.tolist() == [3001 * size] * 2
    handles = [hvd.allreduce_async(x + i, name=f"x{i}", op=hvd.Sum) for i in range(3)]
    for i, handle in enumerate(handles):
        assert torch.equal(hvd.synchronize(handle), torch.full((2, 3), total + size * i))
    gathered = hvd.allgather(torch.full((rank, 2), rank, dtype=torch.int64))
    assert gathered.tolist() == [[r, r] for r in range(size) for _ in range(r)]
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    for root in {0, size - 1}:
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
            sent = torch.tensor([[1, 0], [rank, 1]]).to(dtype)
            got = hvd.broadcast(sent, root)
            assert torch.equal(got, torch.tensor([[1, 0], [root, 1]]).to(dtype))
        assert hvd.broadcast_object([rank, "text"], root) == [root, "text"]
    model = make_model(seed=rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_same_everywhere(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0 + rank)
    train(model, optimizer, range(2))
    hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
    assert optimizer.param_groups[0]["lr"] == size
    assert_same_everywhere([optimizer.state[p]["exp_avg"] for p in model.parameters()])
    assert 0 <= hvd.local_rank() < hvd.local_size() <= size


def what_is_not_there_says_so() -> None:
    one = torch.ones(1)
    refused(
        UnsupportedError,
        (lambda: hvd.join(), "join", "Horovod"),
        (lambda: hvd.allreduce(one, op=hvd.Adasum), "adasum", "Average"),
    )
    with raises(AttributeError, "nonsense"):
        hvd.nonsense()
    if hvd.size() > 1:
        others = hvd.add_process_set([0])
        if hvd.rank():
            with raises(SetupError, "not in the process set"):
                hvd.allreduce(one, process_set=others)
        hvd.remove_process_set(others)


def process_sets_are_made_at_the_beginning() -> None:
    """``init`` may be called again, and then makes what is not there yet."""
    first, last = hvd.ProcessSet([0]), hvd.ProcessSet([hvd.size() - 1])
    if hvd.size() > 1:
        with raises(SetupError, "not there yet", "init\\(process_sets="):
            first.rank()
    hvd.init(process_sets=[first, last, hvd.global_process_set])
    for each, member in ((first, 0), (last, hvd.size() - 1)):
        assert each.included() == (hvd.rank() == member)
        if each.included():
            assert (each.rank(), each.size()) == (0, 1)
            x = torch.tensor([hvd.rank() + 2.0])
            assert torch.equal(hvd.allreduce(x, op=hvd.Sum, process_set=each), x)
    made = first.comm
    hvd.init(process_sets=[first])
    assert first.comm is made
    hvd.init(process_sets="dynamic")
    assert [hvd.remove_process_set(each) for each in (first, last, last)] == [True, True, False]
    for wrong in ("static", 5, [[0]], [None], first):
        with raises(ConfigError, "process_sets=", "hvd.ProcessSet"):
            hvd.init(process_sets=wrong)
    for wrong in (3, "01", ["a"], [0.5]):
        with raises(ConfigError, "ranks_or_comm=", "hvd.ProcessSet"):
            hvd.ProcessSet(wrong)
    with raises(CompressionError, "there are ranks 0 to"):
        hvd.add_process_set([hvd.size()])


def what_cannot_be_sent_is_named_on_all_ranks() -> None:
    """Also after the first calls, which ranks compare; one rank may be the only one to know."""
    for _ in range(20):
        hvd.barrier()
        hvd.allreduce(torch.ones(1))
    odd = hvd.rank() == hvd.size() - 1
    one = torch.ones(1)
    for entry, error, *words in (
        (one.to_sparse(), UnsupportedError, "'b'", "sparse_coo"),
        ({"step": 1}, UnsupportedError, "'b'", "a dict"),
        (torch.empty(2, device="meta") if odd else one, CompressionError, "'b'", "meta"),
        *([] if hvd.size() == 1 else [(torch.ones(1 + odd), MismatchError, "'b'")]),
    ):
        with raises(error, *words):
            hvd.broadcast_parameters({"a": torch.ones(2), "b": entry}, root_rank=0)
    for wrong in (one, torch.nn.Linear(1, 1), [1]):
        with raises(ConfigError, "broadcast_parameters takes model.parameters"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    with raises(UnsupportedError, "rank 0 cannot send", "'f'", "function"):
        hvd.broadcast_object({"f": lambda: 0}, root_rank=0)
    with raises(UnsupportedError, f"rank {hvd.size() - 1} cannot send", "\\[1\\]"):
        hvd.allgather_object([0, (lambda: 0) if odd else 0])
    values = torch.full((2, 1), 1.0 + hvd.rank()), torch.full((2,), 1.0 + hvd.rank())
    hvd.broadcast_parameters(iter(values), root_rank=hvd.size() - 1)
    assert all((x == hvd.size()).all() for x in values)
    views = torch.tensor([1 + 2j, 3j]).conj(), torch.tensor([1 + 2j, 3j]).conj().imag
    for view in views:  # marked as conjugate or negative: what is in memory is something else
        torch.testing.assert_close(hvd.broadcast(view, root_rank=0), view)


def wrong_arguments_are_named() -> None:
    one = torch.ones(1)
    nowhere = {"process_set": None}
    refused(
        CompressionError,
        (lambda: hvd.allreduce([1.0]), "tensor=", "torch.as_tensor"),
        (lambda: hvd.allreduce_(1), "tensor="),
        (lambda: hvd.allreduce_async(1), "tensor="),
        (lambda: hvd.allreduce(one, prescale_factor="2"), "prescale_factor"),
        (lambda: hvd.allreduce(one, "name"), "average="),
        (lambda: hvd.synchronize(one), "handle=", "allreduce_async"),
        (lambda: hvd.allgather([1]), "allgather", "a list"),
        (lambda: hvd.allgather(torch.ones(2, 0)), "allgather", "element"),
        (lambda: hvd.broadcast([1], 0), "tensor="),
        (lambda: hvd.broadcast(one, None), "root_rank=None"),
        (lambda: hvd.broadcast_(one, hvd.size()), "root_rank="),
        (lambda: hvd.barrier(1), "process_set="),
        (lambda: hvd.remove_process_set(None), "process_set="),
        (lambda: hvd.broadcast_optimizer_state(torch.nn.Linear(1, 1), 0), "optimizer="),
        (lambda: hvd.allreduce(one, **nowhere), "process_set=None: pass hvd.global_process_set"),
        (lambda: hvd.allgather(one, **nowhere), "process_set=None: pass hvd.global_process_set"),
        (lambda: hvd.allreduce_async(one, **nowhere), "process_set=None: pass"),
    )


def numpy_random_state_is_left_alone() -> None:
    """Training does not touch the user's generators."""
    torch.manual_seed(0)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    model = torch.nn.Linear(3, 2)
    torch.set_rng_state(torch.tensor(before[1], dtype=torch.uint8))
    _, optimizer = begin(RandomK(density=0.5), model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before

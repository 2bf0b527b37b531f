"""Gradients that pass through collectives: the numbers are those of Horovod's own functions."""

from __future__ import annotations

import warnings

import torch

from hvd_compress.errors import UnsupportedError
from tests.devices import DEVICE
from tests.scenarios import applies
from tests.scenarios.driver import hvd, over, raises


def _leaf(values: object, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE, requires_grad=True)


def _total() -> float:
    """The sum of r + 1 over the ranks, each of which weighs its result by that."""
    return hvd.size() * (hvd.size() + 1) / 2


def _backward(loss: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Parameter `average`")  # Horovod's own gradients pass it
        loss.backward()


def _assert_is(found: torch.Tensor | None, expected: object) -> None:
    assert found is not None
    torch.testing.assert_close(found.cpu(), torch.as_tensor(expected, dtype=found.dtype))


def allreduce_sums_or_averages_gradients_as_it_does_tensors() -> None:
    weight = torch.tensor([1.0, -2.0, 0.5], device=DEVICE)
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
        for factors in ({}, {"prescale_factor": 2.0, "postscale_factor": 0.25}):
            x = _leaf([hvd.rank() + 1.0, 2.0, 3.0])
            y = hvd.allreduce(x, op=op, **factors)
            _assert_is(
                y,
                torch.tensor([_total(), 2.0 * hvd.size(), 3.0 * hvd.size()])
                / divisor
                / (2 if factors else 1),
            )
            _backward(((hvd.rank() + 1) * weight * y).sum())
            expected = _total() / divisor * weight.cpu() / (2 if factors else 1)
            _assert_is(x.grad, expected)


def gradients_of_half_precision_are_sent_in_it() -> None:
    x = _leaf([1.0, 2.0], torch.float32)
    weight = (hvd.rank() + 1) * (1 + 2.0**-13)  # in half precision the rank's number
    y = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    _backward((weight * y).sum())
    assert x.grad.dtype == torch.float32
    assert x.grad.tolist() == [_total(), _total()]


def a_gradient_that_depends_on_the_result() -> None:
    """And the gradient of the gradient, for which all ranks meet again."""
    size = hvd.size()
    x = _leaf([hvd.rank() + 1.0])
    loss = (hvd.allreduce(x, op=hvd.Sum) ** 2 / 2).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    _assert_is(first, [size * _total()])
    (second,) = torch.autograd.grad(first.sum(), x)
    _assert_is(second, [float(size**2)])


def allgather_returns_each_rank_the_mean_of_its_rows() -> None:
    """Ranks have as many rows as their number says, the first one none."""
    rank, size = hvd.rank(), hvd.size()
    rows = size * (size - 1) // 2
    x = torch.full((rank, 2), float(rank), device=DEVICE, requires_grad=True)
    y = hvd.allgather(x)
    assert y.tolist() == [[r, r] for r in range(size) for _ in range(r)]
    weight = torch.arange(2.0 * rows, device=DEVICE).view(rows, 2)
    _backward(((rank + 1) * weight * y).sum())
    first = rank * (rank - 1) // 2
    _assert_is(x.grad, (size + 1) / 2 * weight[first : first + rank].cpu())


def broadcast_returns_the_root_the_mean() -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in {0, size - 1}:
        x = _leaf([rank + 1.0, 5.0])
        y = hvd.broadcast(x, root)
        assert y.tolist() == [root + 1, 5]
        _backward(((rank + 1) * torch.tensor([1.0, 3.0], device=DEVICE) * y).sum())
        mean = (size + 1) / 2 * torch.tensor([1.0, 3.0])
        _assert_is(x.grad, mean if rank == root else torch.zeros(2))


@applies(least=2)  # a set needs somebody outside; sizes 2 and more run this
def gradients_stay_in_the_process_set() -> None:
    """All but the last rank, and the last: Horovod counts calls that have no name, so all ranks
    make as many."""
    last = hvd.size() - 1
    sets = [hvd.add_process_set(ranks) for ranks in (list(range(last)), [last])]
    subset = sets[hvd.rank() == last]
    rank, size = subset.rank(), subset.size()
    total = size * (size + 1) / 2
    for op, expected in ((hvd.Sum, total), (hvd.Average, total / size)):
        x = _leaf([1.0])
        _backward(((rank + 1) * hvd.allreduce(x, op=op, process_set=subset)).sum())
        _assert_is(x.grad, [expected])
    x = torch.ones((rank + 1, 1), device=DEVICE, requires_grad=True)
    y = hvd.allgather(x, process_set=subset)
    weight = torch.arange(total, device=DEVICE)[:, None]
    _backward(((rank + 1) * weight * y).sum())
    first = rank * (rank + 1) // 2
    _assert_is(x.grad, total / size * weight[first : first + rank + 1].cpu())
    x, root = _leaf([1.0]), hvd.rank() - rank + size - 1
    _backward(((rank + 1) * hvd.broadcast(x, root, process_set=subset)).sum())
    _assert_is(x.grad, [total / size if hvd.rank() == root else 0.0])
    for each in sets:
        hvd.remove_process_set(each)


def a_contrastive_loss_over_all_ranks_trains_as_in_one_process() -> None:
    """The mean of the ranks' gradients is that of the mean of their losses."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    images, texts = torch.randn(2, size, 3, 4).double().to(DEVICE)
    weight = torch.randn(4, 4).double().to(DEVICE).requires_grad_()

    def loss(r: int, projected: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(3 * r, 3 * r + 3, device=DEVICE)
        return torch.nn.functional.cross_entropy(texts[r] @ projected.T, labels)

    _backward(loss(rank, hvd.allgather(images[rank] @ weight)))
    # Gathered gradients are averages, of which each rank has its rows: their mean over the ranks is
    # 1 / size of the gradient of the mean.
    found = hvd.allreduce(weight.grad, op=hvd.Sum)
    reference = weight.detach().clone().requires_grad_()
    whole = images.view(-1, 4) @ reference
    (sum(loss(r, whole) for r in range(size)) / size).backward()
    torch.testing.assert_close(found, reference.grad)


def functions_with_collectives_may_be_compiled() -> None:
    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor) -> torch.Tensor:
        summed = hvd.allreduce(2 * x, op=hvd.Sum) + 3 * hvd.broadcast(x, 0)
        return (1.0 * summed).sum() + (1.0 * hvd.allgather(x)).sum()

    x = _leaf([1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo says where it breaks the graph
        _backward(loss(x))
    _assert_is(x.grad, [2.0 * hvd.size() + 3 * (hvd.rank() == 0) + 1] * 2)


def the_maximum_has_no_gradient() -> None:
    """Horovod's is the largest of the gradients, which is not that of the maximum."""
    x = _leaf([hvd.rank() + 1.0])
    y = hvd.allreduce(x, op=hvd.Max)
    assert y.tolist() == [hvd.size()]
    if over == "mpi":
        with raises(UnsupportedError, "op=hvd.Max has no gradient", "detach"):
            _backward(y.sum())
    else:
        _backward(((hvd.rank() + 1) * y).sum())
        _assert_is(x.grad, [float(hvd.size())])


def what_writes_into_a_tensor_is_not_seen_by_autograd() -> None:
    x = _leaf([hvd.rank() + 1.0])
    y = 3 * x
    assert hvd.allreduce_(y, op=hvd.Sum) is y
    assert y.tolist() == [3 * _total()]
    _backward(y.sum())
    _assert_is(x.grad, [3.0])
    parameter = torch.nn.Parameter(torch.tensor([hvd.rank() + 1.0], device=DEVICE))
    hvd.broadcast_(parameter, hvd.size() - 1)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.tolist() == [hvd.size()]
    found = hvd.synchronize(hvd.allreduce_async(parameter, op=hvd.Sum))
    assert not found.requires_grad
    assert found.tolist() == [hvd.size() ** 2]


def integers_and_constants_need_no_gradient() -> None:
    for dtype in (torch.int64, torch.int32, torch.float64):
        x = torch.tensor([hvd.rank() + 1], dtype=dtype, device=DEVICE)
        for y, expected in (
            (hvd.allreduce(x, op=hvd.Sum), [_total()]),
            (hvd.allgather(x), [r + 1 for r in range(hvd.size())]),
            (hvd.broadcast(x, 0), [1]),
        ):
            assert (y.dtype, y.requires_grad, y.tolist()) == (dtype, False, expected)

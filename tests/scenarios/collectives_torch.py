"""Gradients that pass through collectives in PyTorch: beside what all frameworks share."""

from __future__ import annotations

import warnings

import torch

from tests.devices import DEVICE
from tests.scenarios import applies
from tests.scenarios.collectives import TOTAL
from tests.scenarios.driver import hvd
from tests.scenarios.driver_torch import backward


def a_contrastive_loss_over_all_ranks_trains_as_in_one_process() -> None:
    """The mean of the ranks' gradients is that of the mean of their losses."""
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    images, texts = torch.randn(2, size, 3, 4).double().to(DEVICE)
    weight = torch.randn(4, 4).double().to(DEVICE).requires_grad_()

    def loss(r: int, projected: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(3 * r, 3 * r + 3, device=DEVICE)
        return torch.nn.functional.cross_entropy(texts[r] @ projected.T, labels)

    backward(loss(rank, hvd.allgather(images[rank] @ weight)))
    # Gathered gradients are averages, of which each rank has its rows: their mean over the ranks is
    # 1 / size of the gradient of the mean.
    found = hvd.allreduce(weight.grad, op=hvd.Sum)
    reference = weight.detach().clone().requires_grad_()
    whole = images.view(-1, 4) @ reference
    (sum(loss(r, whole) for r in range(size)) / size).backward()
    torch.testing.assert_close(found, reference.grad)


@applies(over=("mpi",))  # over Horovod its own functions are compiled
def functions_with_collectives_may_be_compiled() -> None:
    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor) -> torch.Tensor:
        summed = hvd.allreduce(2 * x, op=hvd.Sum) + 3 * hvd.broadcast(x, 0)
        return (1.0 * summed).sum() + (1.0 * hvd.allgather(x)).sum()

    x = torch.tensor([1.0, 2.0], device=DEVICE, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo says where it breaks the graph
        backward(loss(x))
    assert x.grad.tolist() == [2.0 * hvd.size() + 3 * (hvd.rank() == 0) + 1] * 2


def what_writes_into_a_tensor_is_not_seen_by_autograd() -> None:
    x = torch.tensor([hvd.rank() + 1.0], device=DEVICE, requires_grad=True)
    y = 3 * x
    assert hvd.allreduce_(y, op=hvd.Sum) is y
    assert y.tolist() == [3 * TOTAL]
    backward(y.sum())
    assert x.grad.tolist() == [3.0]
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
            (hvd.allreduce(x, op=hvd.Sum), [TOTAL]),
            (hvd.allgather(x), [r + 1 for r in range(hvd.size())]),
            (hvd.broadcast(x, 0), [1]),
        ):
            assert (y.dtype, y.requires_grad, y.tolist()) == (dtype, False, expected)

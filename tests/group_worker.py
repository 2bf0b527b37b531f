"""Parts of programs that run scenarios on the ranks of a process group, and of their tests."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hvd_compress.errors import ConfigError
from tests.devices import DEVICE, start_process_group
from tests.scenarios import run_all

Tensors = torch.nn.Module | Iterable[torch.Tensor]


def tensors_of(x: Tensors) -> list[torch.Tensor]:
    """The parameters of a model; of those that are sharded, this rank's parts."""
    given = x.parameters() if isinstance(x, torch.nn.Module) else x
    return [p.to_local().detach() if hasattr(p, "to_local") else p.detach() for p in given]


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    """That of eight examples with 40 inputs, in five classes."""
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * rank + step)).to(DEVICE)
    return torch.nn.functional.cross_entropy(model(x), (x[:, :5] + 0.5 * x[:, 5:10]).argmax(1))


def sgd(model: torch.nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def train(model: Any, steps: Iterable[int], optimizer: Any = None) -> list[float]:
    """This rank's losses."""
    optimizer, losses = optimizer or sgd(model), []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])


def from_rank_0(x: Any) -> Any:
    found = [x]
    dist.broadcast_object_list(found)
    return found[0]


def assert_same_everywhere(x: Tensors, group: Any = None) -> None:
    """All ranks of a group have the same bits."""
    mine = torch.cat([p.reshape(-1) for p in tensors_of(x)])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    assert all(torch.equal(theirs, mine) for theirs in everyones)


def assert_equal(x: Tensors, other: Tensors) -> None:
    for p, q in zip(tensors_of(x), tensors_of(other), strict=True):
        assert torch.equal(p, q), f"they differ by {(p - q).abs().max().item()}"


def assert_close(x: Tensors, other: Tensors, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for p, q in zip(tensors_of(x), tensors_of(other), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


def states_of(holder: Any) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of all that a hook or an exchange keeps."""
    states = holder.reducer.store.states
    return {name: {key: x.clone() for key, x in own.items()} for name, own in states.items()}


def assert_same_states(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_no_trace_of_discarded(made: Callable[[Any], Any], method: Any) -> None:
    """A pass is discarded in a training of what ``made(method)`` returns: a model and what
    exchanges its gradients."""
    (model, state), (twin, its_state) = made(method), made(method)
    state.keep_undo()
    for each in (model, twin):
        train(each, range(2))
    model.zero_grad()
    (100 * loss_of(model, dist.get_rank(), 50)).backward()
    state.discard()
    for each in (model, twin):
        train(each, range(2, 4))
    assert_equal(model, twin)
    assert_same_states(states_of(state), states_of(its_state))
    assert state.reducer.step == its_state.reducer.step == 4


def assert_refuses_loss_scale(loss: torch.Tensor, words: str = "") -> None:
    scaled = torch.amp.GradScaler("cpu", init_scale=2.0**10).scale(loss)
    with pytest.raises(ConfigError, match=rf"{words}.*train in bfloat16"):
        scaled.backward()


def main(
    scenarios: Mapping[str, Callable[[], None]],
    begin: Callable[[], object] = lambda: None,
    ignored: Sequence[type[Warning]] = (),
) -> None:
    """Run them in a process group, after ``begin``; the program's argument is their folder."""
    warnings.simplefilter("error")
    for category in ignored:
        warnings.filterwarnings("ignore", category=category)
    torch.set_num_threads(1)
    start_process_group()
    begin()
    run_all(sys.argv[1], dist.get_rank(), scenarios, dist.barrier)
    dist.destroy_process_group()

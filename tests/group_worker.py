"""Parts of programs that run scenarios on the ranks of a process group, and of their tests."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

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

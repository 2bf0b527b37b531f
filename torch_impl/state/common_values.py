"""Values that ranks must have in common, and each computes by itself: the optimizer's numbers, and
the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvd_compress.agreement import OPTIMIZER, SAMPLED_EVERY, Terms, sampled_weights

#: options of optimizers that say how a step is computed, not what it is
_WAYS = {"foreach", "fused", "capturable", "differentiable"}
_TENSORS, _ELEMENTS = 8, 2


def numbers_of(optimizer: torch.optim.Optimizer) -> Terms:
    """Return the options of each parameter group that decide about steps, as text: learning rate,
    weight decay, momentum, betas and others.  Floats have 9 digits, and tensors in a GPU's memory
    are left out, for which the host would have to wait."""
    keys = sorted(optimizer.defaults.keys() - _WAYS)
    texts = [{key: _text(group.get(key)) for key in keys} for group in optimizer.param_groups]
    return {OPTIMIZER: [", ".join(f"{key}={x}" for key, x in own.items() if x) for own in texts]}


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and value.device.type == "cpu" else ...
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    return str(value) if value is None or isinstance(value, bool | int | str) else ""


def sample_of(parameters: Iterable[tuple[str, torch.Tensor]], step: int) -> Terms:
    """Return some elements of some trained parameters, others each time, as a term that ranks
    compare; nothing after most steps.

    Args:
        parameters: with their names, in the same order on all ranks.
        step: the number of steps so far.
    """
    if step % SAMPLED_EVERY != 1:
        return {}
    trained = [(n, p.detach()) for n, p in parameters if p.requires_grad and p.numel()]
    if not trained:
        return {}
    first = step // SAMPLED_EVERY * _TENSORS
    chosen = [trained[(first + i) % len(trained)] for i in range(min(_TENSORS, len(trained)))]
    places = [(n, p, i * (p.numel() - 1)) for n, p in chosen for i in range(_ELEMENTS)]
    values = _values([p[_index(p, place)] for _, p, place in places])
    return sampled_weights((n, i, x) for (n, _, i), x in zip(places, values, strict=True))


def _index(p: torch.Tensor, place: int) -> tuple[int, ...]:
    index = []
    for length in reversed(p.shape):
        place, here = divmod(place, length)
        index.append(here)
    return tuple(reversed(index))


def _values(elements: Sequence[torch.Tensor]) -> list[float]:
    wide = [x.abs() if x.is_complex() else x for x in elements]
    device = wide[0].device
    found: list[float] = torch.stack([x.double().to(device) for x in wide]).tolist()
    return found

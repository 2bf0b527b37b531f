"""Loss scales: of the backward pass that runs, and of no other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hvd_compress.torch import amp
from hvd_compress.torch.amp import forget_scale, note_scale, running_scale


def scales_seen(scale: float | None, meet=lambda: None) -> list[float | None]:
    """The gradient that a parameter's hook sees in a backward pass with a loss of this scale."""
    seen: list[float | None] = []
    p = torch.nn.Parameter(torch.ones(3))

    def hook(_: torch.Tensor) -> None:
        meet()
        seen.append(running_scale())

    p.register_hook(hook)
    loss = (p * 2).sum()
    (loss if scale is None else note_scale(loss, scale)).backward()
    return seen


def test_threads_have_scales_of_their_own():
    """They are all in the middle of their backward passes at once; one has no scale."""
    barrier, scales = threading.Barrier(3), (8.0, 1024.0, None)
    seen: dict[float | None, list[float | None]] = {}

    def run(scale: float | None) -> None:
        seen[scale] = scales_seen(scale, barrier.wait)

    with ThreadPoolExecutor(len(scales)) as pool:
        list(pool.map(run, scales))
    assert seen == {scale: [scale] for scale in scales}
    assert running_scale() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    """Some run a backward pass inside of the pass."""
    seen = []
    p = torch.nn.Parameter(torch.ones(3))
    p.register_hook(lambda _: seen.append(running_scale()))
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(lambda x: x * p, x, use_reentrant=reentrant)
    note_scale(y.sum(), 16.0).backward()
    assert seen == [16.0]


def test_a_pass_that_ended_with_an_error_leaves_no_scale():
    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        scales_seen(4.0, fail)
    assert running_scale() is None
    forget_scale()
    assert scales_seen(None) == [None]


def test_a_pass_that_failed_on_a_thread_of_its_own_leaves_no_scale():
    """As a GPU's thread does: whoever has scaled the loss forgets it."""
    p = torch.nn.Parameter(torch.ones(3))

    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    p.register_hook(fail)
    loss = note_scale((p * 2).sum(), 64.0)
    seen: list[float | None] = []

    def run() -> None:
        with pytest.raises(MemoryError):
            loss.backward()
        forgotten.wait()
        seen.extend(scales_seen(None))

    forgotten, thread = threading.Event(), threading.Thread(target=run)
    thread.start()
    while not amp.scaled_passes:
        pass
    forget_scale()
    forgotten.set()
    thread.join(60)
    assert seen == [None]

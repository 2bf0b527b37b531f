"""A small model, data that differ by rank, and two references that know nothing of Horovod."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from hvd_compress.engines.lockstep import World
from tests.devices import DEVICE
from tests.scenarios import driver
from tests.scenarios.driver import hvd

Model = torch.nn.Module
LR = 0.05
#: of all optimizers that are distributed, unless a scenario says otherwise
OPTIONS = {"nodes": int(nodes)} if (nodes := os.environ.get("SCENARIOS_NODES")) else {}
#: options of :func:`sgd`, apart from those of ``DistributedOptimizer``
OF_SGD = {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "fused"}


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 5),
    )
    return model.to(DEVICE, dtype)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 40, generator=generator)
    return x.to(DEVICE), (x[:, :5] + 0.5 * x[:, 5:10]).argmax(1).to(DEVICE)


def loss_of(model: Model, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    dtype = next(model.parameters()).dtype
    return torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y)


def words_model(sparse: bool) -> Model:
    """An embedding, whose gradients are ``sparse`` or not, and a layer."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(50, 30, sparse=sparse), torch.nn.Linear(30, 5))


def words_loss_of(model: Model, rank: int, step: int) -> torch.Tensor:
    words = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(100 * rank + step))
    return torch.nn.functional.cross_entropy(model(words), words % 5)


def sgd(model: Model, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": LR, "momentum": 0.9, **options})


def distribute(optimizer: Any, model: Model | None, compression: Any, **options: Any) -> Any:
    """``model`` ``None``: without names of parameters."""
    if model is not None:
        options["named_parameters"] = model.named_parameters()
    return hvd.DistributedOptimizer(optimizer, compression=compression, **(OPTIONS | options))


def begin(
    compression: Any, model: Model | None = None, seed: int = 0, **options: Any
) -> tuple[Model, Any]:
    """A model and its distributed optimizer, which is SGD.

    Args:
        model: a new one of :func:`make_model` with ``seed`` unless given.
        options: those in ``OF_SGD`` are SGD's, all others go to ``DistributedOptimizer``.
    """
    model = make_model(seed) if model is None else model
    own = {name: options.pop(name) for name in OF_SGD & options.keys()}
    return model, distribute(sgd(model, **own), model, compression, **options)


def backward(model: Model, optimizer: Any, step: int) -> None:
    """The pass of a step, which is not finished."""
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), step).backward()


def train_scaled(
    model: Model,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    steps: Iterable[int],
    spoilt: Collection[int] = (),
) -> None:
    """Train under loss scaling; in steps that are ``spoilt``, the loss of rank 0 is Inf or NaN."""
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if step in spoilt and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@dataclasses.dataclass
class User:
    """Someone who writes a program: distributed, with the batches of this rank, or plain, with
    those of all ranks in this process alone."""

    ranks: Collection[int]
    distributes: bool

    def distribute(
        self, optimizer: Any, model: Model | None, compression: Any, **options: Any
    ) -> Any:
        if not self.distributes:
            return optimizer
        return distribute(optimizer, model, compression, **options)

    def begin(self, model: Model, compression: Any, **options: Any) -> Any:
        """Return the optimizer of :func:`begin`, or plain SGD."""
        if self.distributes:
            return begin(compression, model, **options)[1]
        return sgd(model, **{name: options[name] for name in OF_SGD & options.keys()})

    def loss(self, model: Model, step: int, of_rank: Callable[..., Any] = loss_of) -> torch.Tensor:
        """Return the mean over the ranks."""
        return sum(of_rank(model, rank, step) for rank in self.ranks) / len(self.ranks)

    def train(
        self,
        model: Model,
        optimizer: Any,
        steps: Iterable[int],
        of_rank: Callable[..., Any] = loss_of,
    ) -> None:
        for step in steps:
            optimizer.zero_grad()
            self.loss(model, step, of_rank).backward()
            optimizer.step()


def as_distributed(program: Callable[..., Any], *args: Any) -> Any:
    return program(User([hvd.rank()], distributes=True), *args)


def as_plain(program: Callable[..., Any], *args: Any) -> Any:
    return program(User(range(hvd.size()), distributes=False), *args)


def train(*args: Any) -> None:
    """:meth:`User.train` on this rank."""
    as_distributed(User.train, *args)


def trains_as_plain(
    program: Callable[..., Model], *args: Any, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """``program(user, *args)`` returns the same model, distributed and plain; and all ranks have
    the same bits."""
    model = as_distributed(program, *args)
    assert_same_everywhere(model)
    assert_close(model, as_plain(program, *args), rtol, atol)


def goes_on_from_a_checkpoint(
    start: Callable[[int], tuple[Model, Any]],
    steps: int,
    more: int = 4,
    train: Callable[..., None] = train,
) -> list[str]:
    """Each rank saves a run of ``start(seed)``: another one that loads it takes the same steps.
    Returns the warnings that came with saving."""
    model, optimizer = start(0)
    train(model, optimizer, range(steps))
    file = io.BytesIO()
    with warned() as said:
        torch.save([model.state_dict(), optimizer.state_dict()], file)
    again, resumed = start(1)
    file.seek(0)
    weights, state = torch.load(file)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    owner = resumed.training if hasattr(resumed, "training") else resumed.compression
    assert owner.step == steps
    for run in ((model, optimizer), (again, resumed)):
        train(*run, range(steps, steps + more))
    assert_equal(again, model)
    return said


def dense_reference(model: Model, optimizer: Any, steps: Iterable[int]) -> None:
    """Plain training in this process alone, on the average of all ranks' gradients."""
    as_plain(User.train, model, optimizer, steps)


def lockstep_reference(
    model: Model,
    compressor: Any,
    steps: int,
    *,
    direction: Callable[[str, torch.nn.Parameter, torch.Tensor], torch.Tensor] = lambda n, p, g: g,
    **options: Any,
) -> None:
    """Compressed training of all ranks in this process: exchanges in the lockstep world, with
    momentum 0.9 unless given, and ``w = w - lr * direction``."""
    world = World(compressor, hvd.size())
    for step in range(steps):
        gradients = []
        for rank in range(hvd.size()):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        outcomes = world.exchange_all(gradients, **{"momentum": 0.9, **options})[hvd.rank()]
        for name, p in model.named_parameters():
            with torch.no_grad():
                p.add_(direction(name, p, outcomes[name].direction), alpha=-LR)  # as SGD rounds


def assert_close(model: Model, other: Model, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(model: Model, other: Model) -> None:
    """They hold the same bits."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def states_of(optimizer: Any) -> dict[str, Mapping[str, torch.Tensor]]:
    """A copy of all that the compression keeps, by parameter."""
    store = optimizer.compression.store
    return {name: {k: x.clone() for k, x in store.get(name).items()} for name in store.names()}


def assert_equal_states(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@contextlib.contextmanager
def warned(*words: str) -> Iterator[list[str]]:
    """The warnings of the block that have one of these words, of all unless there are any."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    texts = [str(each.message) for each in caught]
    found += [text for text in texts if not words or any(word in text for word in words)]


def assert_same_everywhere(
    tensors: Model | Iterable[torch.Tensor], process_set: Any = None
) -> None:
    """All ranks hold the same bits."""
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.parameters()
    found = (t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for t in tensors)
    driver.assert_same_everywhere({str(i): x for i, x in enumerate(found)}, process_set)

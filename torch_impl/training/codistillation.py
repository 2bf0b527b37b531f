"""``hvd.Codistillation(model, ...)`` for PyTorch, over Horovod or MPI; see
:mod:`hvd_compress.training.codistillation`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hvd_compress import training
from hvd_compress.engines.base import Engine
from hvd_compress.errors import ConfigError
from hvd_compress.stats import Stats
from hvd_compress.training import Codistiller, CoordinatedSampler
from hvd_compress.training.codistillation.losses import Loss, target

_MORE = """

    Give it the model before the first step::

        codistillation = hvd.Codistillation(model, every=50, burn_in=500)
        for x, y in batches:
            logits = model(x)
            loss = codistillation.loss(cross_entropy(logits, y), logits, x)
            ...

    Making one is a collective.  Beside the options it takes:

        model: this rank's, or its group's; all have the same parameters by name and shape, and
            begin with other values, or see other data.
        process_set: the ranks that take part; ``None`` for all.

    Attributes: ``weight``, alpha of this step; ``step``; ``exchanges``; ``method``, the options.
"""


def _class_dim(z: torch.Tensor) -> int:
    """Return the dimension of classes, as ``cross_entropy`` of torch has it."""
    return 1 if z.dim() > 1 else 0


def _probabilities(z: torch.Tensor) -> torch.Tensor:
    return functional.softmax(z, _class_dim(z))


def _log_probabilities(z: torch.Tensor) -> torch.Tensor:
    return functional.log_softmax(z, _class_dim(z))


def _mean(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x.sum(_class_dim(z)).mean()


#: those of :data:`hvd_compress.training.codistillation.losses.LOSSES`
LOSSES = {
    "cross_entropy": Loss(_probabilities, lambda z, p: _mean(-p * _log_probabilities(z), z)),
    "kl": Loss(
        _probabilities, lambda z, p: _mean(torch.xlogy(p, p) - p * _log_probabilities(z), z)
    ),
    "reverse_kl": Loss(
        _log_probabilities,
        lambda z, mean: _mean(_probabilities(z) * (_log_probabilities(z) - mean), z),
    ),
    "mse": Loss(lambda z: z, functional.mse_loss),
}


class Codistillation:
    """A model with its teachers; see :func:`codistillation_over`."""

    def __init__(self, model: torch.nn.Module, codistiller: Codistiller) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        self.model = model
        self._codistiller = codistiller
        self._teacher: torch.nn.Module | None = None

    @property
    def method(self) -> training.Codistillation:
        return self._codistiller.method

    @property
    def step(self) -> int:
        return self._codistiller.step

    @property
    def weight(self) -> float:
        return self._codistiller.weight

    @property
    def exchanges(self) -> int:
        return self._codistiller.exchanges

    def loss(
        self, task: torch.Tensor, logits: torch.Tensor, *inputs: Any, **named: Any
    ) -> torch.Tensor:
        """Return the task's loss and the weighted distillation loss.  Call it once in every step,
        on all ranks; a step with an exchange is a collective.

        Args:
            task: the loss of this batch, a tensor of one element.
            logits: the model's outputs; classes are the dimension that ``cross_entropy`` of torch
                takes them from, and outputs of half precision are computed with in float32.
            inputs, named: what the model was called with: teachers are called with it as well.
                With ``exchange="predictions"`` ranks compare tensors among it, and nothing if it
                is left out.

        Raises:
            ConfigError: teachers need the inputs, and there are none.
            MismatchError: the ranks differ in options, step or model; or, with
                ``exchange="predictions"``, in the batch.
        """
        codistiller = self._codistiller
        codistiller.next_step()
        z = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        outputs = self._outputs(z, inputs, named)
        if not (outputs and codistiller.weight):
            return task
        loss = LOSSES[self.method.loss]
        return task + codistiller.weight * loss.distance(z, target(loss.view, outputs))

    @torch.no_grad()
    def _outputs(
        self, z: torch.Tensor, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> list[torch.Tensor]:
        codistiller = self._codistiller
        if self.method.exchange == "predictions":
            tensors = [x for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor)]
            return codistiller.predictions(z.detach(), [_bits(x) for x in tensors])
        if not inputs and not named:
            raise ConfigError(
                "teachers predict on this rank's batch: write codistillation.loss(task, logits, x)"
            )
        teachers = codistiller.checkpoints(self._arrays, self._changing)
        if not (teachers and codistiller.weight):
            return []
        teacher = self._for_teachers()
        found = []
        for arrays in teachers:
            outputs = torch.func.functional_call(teacher, arrays, inputs, named)
            found.append(outputs.to(z.dtype))
        return codistiller.usable(found)

    def _for_teachers(self) -> torch.nn.Module:
        """Return a copy of the model in inference mode, for arrays of others."""
        if self._teacher is None:
            self._teacher = copy.deepcopy(self.model).eval()
            self._teacher.requires_grad_(False)
        return self._teacher

    def _arrays(self) -> dict[str, torch.Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: x.detach() for name, x in named if x.is_floating_point()}

    def _changing(self) -> list[str]:
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        return [
            *trained,
            *(name for name, x in self.model.named_buffers() if x.is_floating_point()),
        ]

    def sampler(
        self, examples: Sized | int, *, seed: int = 0, shuffle: bool = True
    ) -> CoordinatedSampler:
        """Return a sampler that gives the same examples to ranks that exchange predictions, and
        shares them in a group."""
        _, _, place, places = self._codistiller.counterparts
        return CoordinatedSampler(examples, seed=seed, place=place, places=places, shuffle=shuffle)

    def stats(self) -> Stats:
        """Return the exact bytes that this rank sent and received so far."""
        return self._codistiller.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step and teachers.  It waits for an exchange that is under way."""
        return self._codistiller.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank; of what another rank returned, the
        step alone: there are no teachers then until the next exchange.

        Raises:
            ConfigError: it belongs to another model, or it is damaged; then nothing has changed.
        """
        own = self._arrays()
        self._codistiller.load_state_dict(state_dict, own)
        for arrays in self._codistiller.teachers:
            for name, x in arrays.items():
                arrays[name] = x.to(own[name].device)


def _bits(x: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor, of which NumPy has not every dtype."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def codistillation_over(make_engine: Callable[[Any], Engine], module: str) -> type[Codistillation]:
    """Return the class over the engines that ``make_engine`` makes of process sets; it belongs to
    ``module``."""

    def __init__(  # noqa: N807
        self: Codistillation,
        model: torch.nn.Module,
        *args: Any,
        process_set: Any = None,
        **options: Any,
    ) -> None:
        method = training.Codistillation(*args, **options)
        codistiller = Codistiller(method, make_engine(process_set), like=torch.empty(0))
        Codistillation.__init__(self, model, codistiller)

    kinds = inspect.Parameter
    own = inspect.signature(training.Codistillation).parameters.values()
    signature = inspect.Signature(
        [
            kinds("model", kinds.POSITIONAL_OR_KEYWORD),
            *own,
            kinds("process_set", kinds.KEYWORD_ONLY, default=None),
        ]
    )
    doc = (training.Codistillation.__doc__ or "") + _MORE
    entries = {
        "__init__": __init__,
        "__signature__": signature,
        "__doc__": doc,
        "__module__": module,
    }
    return type("Codistillation", (Codistillation,), entries)

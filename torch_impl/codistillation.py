"""``hvd.Codistillation(model, ...)`` for PyTorch, over Horovod or MPI; see
:mod:`hvd_compress.systems.teachers`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from hvd_compress.errors import ConfigError
from hvd_compress.systems.distillation import Functions, losses_over, target
from hvd_compress.systems.teachers import Codistillation, Codistiller

from . import backend
from .parameters import moved


def _class_dim(z: torch.Tensor) -> int:
    """Return the dimension of classes, as ``cross_entropy`` of torch has it."""
    return 1 if z.dim() > 1 else 0


#: those of :mod:`hvd_compress.systems.distillation`
LOSSES = losses_over(
    Functions(
        log_softmax=lambda z: functional.log_softmax(z, _class_dim(z)),
        exp=torch.exp,
        log=lambda p: torch.where(p > 0, p, 1).log(),
        sums=lambda x: x.sum(_class_dim(x)).mean(),
        mean=torch.mean,
    )
)


class TorchCodistiller(Codistiller):
    make_engine: Any

    def __init__(
        self, model: torch.nn.Module, *args: Any, process_set: Any = None, **options: Any
    ) -> None:
        method = Codistillation(*args, **options)
        engine = self.make_engine(process_set)
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        super().__init__(method, engine, like=torch.empty(0))
        self.model = model
        self._teacher: torch.nn.Module | None = None

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
        self.next_step()
        z = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        outputs = self._outputs(z, inputs, named)
        if not (outputs and self.weight):
            return task
        loss = LOSSES[self.method.loss]
        return task + self.weight * loss.distance(z, target(loss.view, outputs))

    def set_weight_decay(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer the weight decay of this step, in those of its groups that began with
        one.

        Raises:
            ConfigError: there is no schedule, ``weight_decay=WeightDecay(...)``.
        """
        decay = self.weight_decay
        for group in optimizer.param_groups:
            # Kept in checkpoints, as torch's schedulers keep "initial_lr".
            if group.setdefault("initial_weight_decay", group["weight_decay"]):
                group["weight_decay"] = decay

    @torch.no_grad()
    def _outputs(
        self, z: torch.Tensor, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> list[torch.Tensor]:
        if self.method.exchange == "predictions":
            tensors = [x for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor)]
            # Bytes, since NumPy has not every dtype.
            own = [backend.to_numpy(backend.to_bytes(x.detach())) for x in tensors]
            return self.predictions(z.detach(), own)
        if not inputs and not named:
            raise ConfigError(
                "teachers predict on this rank's batch: write codistillation.loss(task, logits, x)"
            )
        teachers = self.checkpoints()
        if not (teachers and self.weight):
            return []
        if self._teacher is None:  # a copy in inference mode, for the arrays of others
            self._teacher = copy.deepcopy(self.model).eval()
            self._teacher.requires_grad_(False)
        found = []
        for arrays in teachers:
            outputs = torch.func.functional_call(self._teacher, arrays, inputs, named)
            found.append(outputs.to(z.dtype))
        return self.usable(found)

    def arrays(self) -> dict[str, torch.Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: x.detach() for name, x in named if x.is_floating_point()}

    def changing(self) -> list[str]:
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        return [
            *trained,
            *(name for name, x in self.model.named_buffers() if x.is_floating_point()),
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        devices = {name: x.device for name, x in self.arrays().items()}
        super().load_state_dict(moved(state_dict, devices))

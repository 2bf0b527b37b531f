"""Transformers' Trainer with compressed gradients::

    trainer = CompressedTrainer(model, args, train_dataset=..., compression="topk:density=0.01")

Trainer has no argument for communication hooks of DistributedDataParallel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import torch

from hvd_compress.errors import SetupError

from .amp import refuse_scale
from .ddp.hook import STATE_OPTIONS, DDPState, ddp_hook

try:
    import transformers
    from accelerate.utils import DistributedDataParallelKwargs
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise SetupError(
        "hvd_compress.torch.transformers needs Transformers and Accelerate: pip install "
        "'hvd_compress[transformers]', or transformers accelerate"
    ) from error

__all__ = ["CompressedGradients", "CompressedTrainer"]
#: in the folder of a checkpoint
FILE = "hvd_compress.pt"
#: methods of Trainer, where the state is saved and loaded
_PLACES = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")


class CompressedGradients:
    """The part that :class:`CompressedTrainer` adds to ``Trainer``, for trainers of your own or of
    another library: ``class Mine(CompressedGradients, SFTTrainer)``.

    The folder of a checkpoint has the state in a file of its own, "hvd_compress.pt".  Schedules by
    epoch follow Trainer's epochs.

    Args:
        arguments, options: those of the trainer.
        compression, momentum, nesterov, seed, residuals, nodes: as for
            :class:`~hvd_compress.torch.DDPState`, which is made with the model.

    Raises:
        SetupError: this version of Transformers saves its checkpoints in another way.
        ConfigError: ``fp16=True`` and a method with residuals; its loss scale changes.

    >>> import tempfile, transformers
    >>> class Mine(CompressedGradients, transformers.Trainer):
    ...     pass
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     args = transformers.TrainingArguments(folder)
    ...     trainer = Mine(torch.nn.Linear(2, 1), args, compression=hvd.TopK(density=0.01))
    >>> print(trainer.compression)  # a DDPState, once train() has distributed the model
    None
    """

    def __init__(self, *arguments: Any, compression: Any, **options: Any) -> None:
        if missing := [name for name in _PLACES if not hasattr(Trainer, name)]:
            raise SetupError(
                f"Transformers {transformers.__version__} has no Trainer.{missing[0]}, where the "
                "state is saved: pip install 'hvd_compress[transformers]'"
            )
        ours = {name: options.pop(name) for name in STATE_OPTIONS & options.keys()}
        self._make: Any = functools.partial(DDPState, compression, **ours)
        #: statistics and state; ``None`` until the model is distributed
        self.compression: DDPState | None = None
        super().__init__(*arguments, **options)
        self.add_callback(_Epochs(self))  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        register = self._register

        class Handler(DistributedDataParallelKwargs):
            def register_comm_hook(self, model: Any) -> None:
                register(model)

        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        old = accelerator.ddp_handler or DistributedDataParallelKwargs()
        fields = {field.name: getattr(old, field.name) for field in dataclasses.fields(old)}
        accelerator.ddp_handler = Handler(**fields)

    def _register(self, model: Any) -> None:
        self.compression = self._make(model)
        scaler = self.accelerator.scaler  # type: ignore[attr-defined]
        refuse_scale(self.compression.reducer.method, scaler is not None, "bf16=True")
        model.register_comm_hook(self.compression, ddp_hook)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.compression is not None:
            saved = self.compression.state_dict()
            if self.args.should_save:  # type: ignore[attr-defined]
                torch.save(saved, Path(output_dir, FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self.compression is None or checkpoint is None:
            return
        file = Path(checkpoint, FILE)
        if file.exists():  # else of a dense run
            saved = torch.load(file, map_location="cpu", weights_only=True)
            self.compression.load_state_dict(saved)


class _Epochs(TrainerCallback):
    """Tells schedules the epoch."""

    def __init__(self, trainer: CompressedGradients) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer.compression is not None:
            # Sums of parts of epochs are rounded; a run that resumes inside of one is in it.
            self._trainer.compression.set_epoch(math.floor((state.epoch or 0) + 1e-6))


class CompressedTrainer(CompressedGradients, Trainer):
    """Transformers' ``Trainer`` with compressed gradients::

        trainer = CompressedTrainer(model, args, compression="powersgd:rank=4", train_dataset=data)

    Args:
        arguments, options: those of ``Trainer``.
        compression, momentum, nesterov, seed, residuals, nodes: as for
            :class:`~hvd_compress.torch.DDPState`.

    Raises: the errors of :class:`CompressedGradients`.

    >>> import tempfile, transformers
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     args = transformers.TrainingArguments(folder)
    ...     trainer = CompressedTrainer(torch.nn.Linear(2, 1), args, compression="powersgd:rank=4")
    >>> isinstance(trainer, transformers.Trainer)
    True
    """

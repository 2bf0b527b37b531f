"""The systems that all_systems.py compares: what travels in each, and how it is made.

Nothing here starts MPI.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hvd_compress import DGC, Compressor, warmup_to
from hvd_compress.blocks import (
    allgather,
    chain,
    error_feedback,
    natural_dithering,
    scaled_sign,
    top_k,
)

#: local steps between exchanges, density, and bits of those who have few
EVERY, DENSITY, BITS = 8, 0.01, 2


@dataclasses.dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        travels: in words.
        family: who makes it, see :data:`FAMILIES`.
        what: the compression or a function that gives it for a number of steps, the name of the
            method or of the optimizer, or options.
        lr: the highest learning rate.
        batches: so many at a time, in one step of the optimizer.
    """

    travels: str
    family: str
    what: Any
    lr: float = 0.05
    batches: int = 1

    @property
    def differs(self) -> bool:
        """Whether ranks begin, and end, with models of their own."""
        return self.family in ("codistillation", "alone")


#: and how points of the picture are called
FAMILIES = {
    "compression": "gradients, compressed",
    "adam": "1-bit Adam and 1-bit LAMB",
    "large": "large batch",
    "local": "local steps",
    "graph": "neighbours of a graph",
    "codistillation": "models that teach each other",
    "server": "parameter server",
    "alone": "ranks alone",
}


def _feedback(*codec: Any) -> Compressor:
    return chain(error_feedback(), via=allgather(*codec))


def _warmed_up(make: Callable[..., Compressor]) -> Callable[[int], Compressor]:
    return lambda steps: make(density=warmup_to(0.001, steps=max(steps // 4, 1)))


SYSTEMS = {
    "dense": System("gradients, float32", "compression", "none"),
    "fp16": System("gradients, 16 bits", "compression", "fp16"),
    "dgc": System("largest 0.1 % after a warm-up, float32", "compression", _warmed_up(DGC)),
    "dgc_compact": System("largest 0.1 %, 4 bits", "compression", _warmed_up(DGC.compact)),
    "onebit": System("signs and means of columns", "compression", "onebit"),
    "powersgd": System("two factors of rank 2", "compression", "powersgd:rank=2"),
    "topk": System("largest 1 %, float32", "compression", f"topk:density={DENSITY}"),
    "topk_dithering": System(
        "largest 1 %, dithered to powers of 2",
        "compression",
        _feedback(top_k(DENSITY), natural_dithering()),
    ),
    "scaled_sign": System("signs, one magnitude a tensor", "compression", _feedback(scaled_sign())),
    "ef21": System(
        "largest 1 % of what is new in the gradient", "compression", f"ef21:density={DENSITY}"
    ),
    "oktopk": System("largest 1 % of the sum", "compression", f"oktopk:density={DENSITY}"),
    "lgc": System(
        "dense, then largest 1 %, then their code",
        "compression",
        lambda steps: f"lgc:density={DENSITY},learn={steps // 8},code={steps * 2 // 3}",
    ),
    "onebit_adam": System("dense, then signs of the momentum", "adam", "OneBitAdam", 1e-3),
    "onebit_lamb": System("the same", "adam", "OneBitLAMB", 0.01),
    "zero_one_adam": System("the same at ever fewer steps", "adam", "ZeroOneAdam", 1e-3),
    "large_batch": System("gradients of 4 batches", "large", "SGD", 0.1, 4),
    "lars": System("gradients of 4 batches", "large", "LARS", 0.4, 4),
    "lamb": System("gradients of 4 batches", "large", "LAMB", 0.05, 4),
    "local_sgd": System("parameters, every 8 steps", "local", "local_sgd"),
    "post_local_sgd": System("gradients, later as local_sgd", "local", "post_local_sgd"),
    "slowmo": System("parameters, every 8 steps", "local", "slowmo"),
    "diloco": System("changes of parameters, every 8 steps", "local", "diloco"),
    "diloco+dgc": System("largest 1 % of these changes", "local", "diloco+dgc"),
    "streaming_diloco": System("the same, a half every 4 steps", "local", "streaming_diloco"),
    "easgd": System("distances from the centre, every 8 steps", "local", "easgd"),
    "leader_sgd": System("the leader's parameters, every 8 steps", "local", "leader_sgd"),
    "leader_sgd_groups": System(
        "the same in groups of 2, among all every 16", "local", "leader_sgd_groups"
    ),
    "diffusion": System("parameters, to 2 neighbours", "graph", "diffusion"),
    "exact_diffusion": System("corrected parameters, to 2 neighbours", "graph", "exact_diffusion"),
    "gradient_tracking": System(
        "parameters and tracked gradients, to 2 neighbours", "graph", "gradient_tracking"
    ),
    "choco_sgd": System("changes in 2 bits, to 2 neighbours", "graph", "choco_sgd"),
    "lead": System("changes in 2 bits, to 2 neighbours", "graph", "lead"),
    "prox_lead": System("the same; weights shrink towards 0", "graph", "prox_lead"),
    "codistilled_models": System(
        "whole models to all, every 8 steps", "codistillation", {"every": EVERY}
    ),
    "codistilled_predictions": System(
        "predictions of 16 images", "codistillation", {"exchange": "predictions"}
    ),
    "server": System("gradients up, parameters down", "server", {}),
    "server_backup": System("the same; the last one is dropped", "server", {"backup": 1}),
    "server_async": System("the same, nobody waits", "server", {"mode": "async"}, 0.02),
    "alone": System("nothing", "alone", None),
}

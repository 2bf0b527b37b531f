"""Ways to train by name, which several examples have in common: an optimizer around SGD.

Only ranks import this: it imports MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvd_compress.torch.mpi as hvd
from hvd_compress.systems.graphs import blockwise, l1


def wrapped(
    method: str, sgd: torch.optim.Optimizer, steps: int, every: int, density: float, **dgc: Any
) -> torch.optim.Optimizer:
    """The optimizer of a method.

    Args:
        sgd: the optimizer of each rank.
        steps: so many in all.
        every: local steps between exchanges.
        density: of dgc and topk.
        dgc: further options of DGC where gradients go through it.
    """
    one = {"local_every": every, "global_every": every, "local_pull": 0.0, "local_drift": 0.0}
    makers: dict[str, Callable[[], Any]] = {
        "dense": lambda: hvd.DistributedOptimizer(sgd, compression="none"),
        "dgc": lambda: hvd.DistributedOptimizer(sgd, compression=hvd.DGC(density, **dgc)),
        "local_sgd": lambda: hvd.LocalSGD(sgd, every),
        "post_local_sgd": lambda: hvd.LocalSGD(sgd, every, start=steps // 4),
        "slowmo": lambda: hvd.SlowMo(sgd, every, momentum=0.5),
        "diloco": lambda: hvd.DiLoCo(sgd, sync_every=every),
        "diloco+topk": lambda: hvd.DiLoCo(
            sgd, sync_every=every, compression=f"topk:density={density}"
        ),
        "diloco+dgc": lambda: hvd.DiLoCo(
            sgd, sync_every=every, compression=f"dgc:density={density}"
        ),
        "streaming_diloco": lambda: hvd.DiLoCo(sgd, sync_every=every, fragments=2, delay=1),
        "sparse_loco": lambda: hvd.SparseLoCo(sgd, every, density),
        "easgd": lambda: hvd.EASGD(sgd, every),
        "leader_sgd": lambda: hvd.LeaderSGD(sgd, **one),
        "leader_sgd_groups": lambda: hvd.LeaderSGD(
            sgd, local_every=every, global_every=2 * every, groups=2
        ),
    }
    return makers[method]()


def over_a_graph(
    method: str, sgd: torch.optim.Optimizer, graph: str, bits: int
) -> torch.optim.Optimizer:
    """The optimizer of a method in which ranks exchange with their neighbours only.

    Args:
        sgd: the optimizer of each rank.
        graph: who is whose neighbour, such as "cycle".
        bits: an element, of methods that compress.
    """
    codec = blockwise(bits)
    makers: dict[str, Callable[[], Any]] = {
        "diffusion": lambda: hvd.Diffusion(graph),
        "exact_diffusion": lambda: hvd.ExactDiffusion(graph),
        "extra": lambda: hvd.EXTRA(graph),
        "gradient_tracking": lambda: hvd.GradientTracking(graph),
        "choco_sgd": lambda: hvd.ChocoSGD(graph, codec),
        "lead": lambda: hvd.LEAD(graph, codec),
        "prox_lead": lambda: hvd.LEAD(graph, codec, prox=l1(1e-4)),
    }
    return hvd.DistributedOptimizer(sgd, method=makers[method]())

"""The costs of a method, found by running it: bits on the wire, collectives, memory.

This takes up to some seconds for a method.  The costs of this package's methods with their defaults
are kept in ``costs.json``; ``python -m hvd_compress.advisor.costs`` writes it again.

>>> from hvd_compress import TopK
>>> costs(TopK(density=0.01))
MethodCosts(sent=0.4, received=1.6, collectives=('gather',), memory={'residual': 1.0})
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress import methods
from hvd_compress.base import Compressor, Context
from hvd_compress.config import lookup
from hvd_compress.engines import lockstep
from hvd_compress.engines.joining import alone
from hvd_compress.errors import NeedsTuning
from hvd_compress.requests import Collective

#: a fully connected layer in float32
SHAPE, RANKS = (512, 2000), 4
#: as many steps as ranks, since these may take turns
_LATE = range(250_000, 250_000 + RANKS)
_FILE = Path(__file__).with_suffix(".json")


@dataclasses.dataclass(frozen=True)
class MethodCosts:
    """Costs of the exchanges of a matrix of 512 x 2000 float32 between 4 ranks, for rank 0.

    Attributes:
        sent: the bits per element that a rank hands to the collectives.
        received: the bits per element that it gets, its own included; a sum is counted once.
        collectives: the kinds of requests, in order.
        memory: the size of each entry of the state, in units of the gradient's.
    """

    sent: float
    received: float
    collectives: tuple[str, ...]
    memory: dict[str, float]


@functools.cache
def costs(method: Compressor) -> MethodCosts:
    """Return average costs over late steps, after the dense steps that some methods begin with."""
    method = method.for_tensor("weight", SHAPE)
    random = np.random.default_rng(0)
    gradients = [random.standard_normal(SHAPE, np.float32) for _ in range(RANKS)]
    states = [method.init(gradient) for gradient in gradients]
    total: list[Any] = []
    for step in (0, 1, *_LATE):
        seen: list[Any] = []

        def note(request: Collective, reply: Any, seen: list[Any] = seen) -> None:
            """Append the kind of a request, and the bytes handed over and received."""
            sent = request.nbytes
            parts = reply if isinstance(reply, list) else None
            received = sent if parts is None else sum(part.nbytes for part in parts)
            seen.append((type(request).__name__.lower(), sent, received))

        exchanges = [
            method.exchange(
                gradient, state, Context("weight", rank, RANKS, step, epoch=step, momentum=0.9)
            )
            for rank, (gradient, state) in enumerate(zip(gradients, states, strict=True))
        ]
        outcomes = lockstep.run([alone(exchanges[0], note), *exchanges[1:]])
        states = [outcome.state for outcome in outcomes]
        total += seen if step in _LATE else []
    n, size = len(_LATE) * gradients[0].size, gradients[0].nbytes
    return MethodCosts(
        sent=round(8 * sum(sent for _, sent, _ in total) / n, 2),
        received=round(8 * sum(received for _, _, received in total) / n, 2),
        collectives=tuple(kind for kind, _, _ in seen),
        memory={key: round(array.nbytes / size, 3) for key, array in states[0].items()},
    )


def costs_of_defaults(name: str) -> MethodCosts:
    """Return the costs of the method of this name with its defaults, which are kept in a file, or
    measured now."""
    return _kept().get(name) or costs(lookup("method", name)())


@functools.cache
def _kept() -> dict[str, MethodCosts]:
    rows = json.loads(_FILE.read_text())
    return {
        name: MethodCosts(**row | {"collectives": tuple(row["collectives"])})
        for name, row in rows.items()
    }


def _keep() -> None:
    warnings.simplefilter("ignore", NeedsTuning)  # nothing is trained here
    rows = {name: costs(lookup("method", name)()) for name in methods.method_names()}
    lines = [f'"{name}": {json.dumps(dataclasses.asdict(row))}' for name, row in rows.items()]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _keep()

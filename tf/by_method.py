"""``DistributedOptimizer(..., method=...)``: local steps, and a training method around them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from hvd_compress.systems.rounds.factories import check_left_out


def distribute_by_method(
    module: str, signature: inspect.Signature, options: Mapping[str, Any]
) -> Any:
    """Return what ``local_steps(optimizer, method)`` does.

    Args:
        module: ours for Keras; what it has of training is imported now, with Keras 3.
        signature: that of ``DistributedOptimizer``, with the defaults.
        options: all of them; those that are about gradients do not travel here.

    Raises:
        ConfigError: one of the last is not left out.
    """
    of_gradients = dict(options)
    own = {name: of_gradients.pop(name, None) for name in ("process_set", "seed")}
    optimizer, method = of_gradients.pop("optimizer"), of_gradients.pop("method")
    check_left_out(of_gradients, signature, method)
    training = importlib.import_module(f"{module}.training")
    return training.local_steps(optimizer, method, **own)

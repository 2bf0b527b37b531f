"""Asynchronous elastic averaging (Zhang, Choromanska, LeCun; 2015) on a parameter server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_compress.config import check_whole
from hvd_compress.errors import ConfigError


def check_elastic(sync_every: int, alpha: float) -> None:
    """Raise ``ConfigError`` unless the options can be honoured."""
    check_whole("sync_every", sync_every, 1)
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha={alpha!r} must be between 0 and 1, for instance 0.1")


@dataclasses.dataclass
class ElasticCentre:
    """The optimizer of a server whose parameters are the centre c, and whose workers send x where
    others send gradients: c = c + alpha (x - c)."""

    alpha: float

    def step(
        self,
        parameters: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        rates: Sequence[float],
        scale: float = 1.0,
    ) -> None:
        for name, x in gradients.items():
            parameters[name][...] += self.alpha * (x - parameters[name])


def moved(x: np.ndarray, centre: np.ndarray, alpha: float) -> np.ndarray:
    """Return x - alpha (x - c) with the centre c of before the meeting, given that of after it,
    c' = c + alpha (x - c): x - c = (x - c') / (1 - alpha)."""
    return x - alpha / (1 - alpha) * (x - centre)

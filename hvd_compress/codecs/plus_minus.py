"""One bit an element: the sign of a number that all ranks know."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.codecs.sign import _Signs
from hvd_compress.kernels.codecs import Signs
from hvd_compress.operators.threshold import check_tau


@dataclasses.dataclass(frozen=True)
class plus_minus(_Signs, name="plus_minus"):
    """``tau`` or ``-tau``; zeros count as positive.  ``tau`` itself is not sent, since the
    ranks' options are the same.

    Options:
        tau: a positive number.
    """

    tau: float

    homogeneous = False

    def __post_init__(self) -> None:
        check_tau(self.tau)

    @property
    def _loops(self) -> Signs:
        return Signs(float(self.tau))

    def _from_bytes(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        return super()._from_bytes(code, n, dtype) * dtype.type(self.tau)

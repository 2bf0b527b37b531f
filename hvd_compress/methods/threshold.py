"""Threshold compression (Strom, Interspeech 2015)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import codecs, operators
from hvd_compress.aggregators import allgather
from hvd_compress.chain import Chain, chain
from hvd_compress.config import check_choice
from hvd_compress.methods._chained import OneChain
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class Threshold(OneChain, name="threshold"):
    """Send what has grown beyond ``tau``, keep the rest for later::

        x = gradient + residual;  where |x| > tau send tau sign(x);  residual = x - sent

    An element that is many times ``tau`` is sent at as many steps.  The number of elements differs
    between steps, tensors and ranks; a tensor whose gradients are small sends nothing for long.

    State: ``residual``.  Sent: a packed index and one bit an element, or, with ``send="value"``,
    an index and the value.

    Options:
        tau: in units of the gradient; what suits differs from model to model.
        send: "sign", the paper's, or "value", what was picked as it is, so nothing of it remains.

    Differs from the paper in: sign and index are not put into one word.
    """

    reference = "Strom, Interspeech 2015"

    tau: float = 0.01
    send: str = "value"

    def __post_init__(self) -> None:
        check_choice("send", self.send, ("sign", "value"))
        super().__post_init__()

    @functools.cached_property
    def _chain(self) -> Chain:
        values = codecs.plus_minus(self.tau) if self.send == "sign" else "float32"
        return chain(error_feedback(), via=allgather(operators.threshold(self.tau), values))

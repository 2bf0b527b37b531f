"""Threshold compression (Strom, Interspeech 2015)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress import codecs, operators
from hvd_compress.chain import Chain, chain
from hvd_compress.config import check_choice
from hvd_compress.meetings import allgather
from hvd_compress.methods.chained import Chained
from hvd_compress.transforms import error_feedback


@dataclasses.dataclass(frozen=True)
class Threshold(Chained, name="threshold"):
    """Send what has grown beyond ``tau``, keep the rest for later::

        x = gradient + residual;  where |x| > tau send x;  residual = x - sent

    The number of elements differs between steps, tensors and ranks; a tensor whose gradients are
    small sends nothing for long.

    State: ``residual``.  Sent: an index and the value, or, with ``send="sign"``, a packed index and
    one bit an element.

    Options:
        tau: in units of the gradient; what suits differs from model to model.
        send: "value", what was picked as it is, or "sign", the paper's: ``tau sign(x)``.  Then an
            element of many times ``tau`` is sent at as many steps, and where gradients stay larger
            than ``tau`` residuals grow without end: it must be above nearly all gradients.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".

    Reference: Strom, Interspeech 2015.  Differs from it in: values by default; sign and index are
    not put into one word.

    What is below ``tau`` adds up until it is above:

    >>> world, gradient = World(Threshold(tau=1.0), size=1), np.array([4.0, 0.75, 0.125])
    >>> [world.exchange([gradient])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0, 0.0], [4.0, 1.5, 0.0]]
    """

    reference = "Strom, Interspeech 2015"

    tau: float = 0.01
    send: str = "value"
    indices: str = "packed"

    def __post_init__(self) -> None:
        check_choice("send", self.send, ("sign", "value"))
        super().__post_init__()

    @functools.cached_property
    def blocks(self) -> Chain:
        values = codecs.plus_minus(self.tau) if self.send == "sign" else "float32"
        select = operators.threshold(self.tau)
        return chain(error_feedback(), via=allgather(select, values, indices=self.indices))

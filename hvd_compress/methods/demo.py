"""The exchange of DeMo (Peng, Quesnelle, Kingma; 2024, arXiv 2411.19870)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.chain import Chain, Transform, chain
from hvd_compress.config import check_choice
from hvd_compress.meetings import dct_top_k
from hvd_compress.methods.chained import Chained
from hvd_compress.transforms import majority_vote, momentum_feedback


@dataclasses.dataclass(frozen=True)
class DeMoCompression(Chained, name="demo"):
    """Send the largest cosine coefficients of each rank's momentum, and step along the sign of what
    comes back.

    Half of decoupled momentum optimization: the other half is the optimizer, ``DeMo`` of
    ``hvd_compress.torch`` and of ``hvd_compress.tensorflow.keras``, whose ``compressor()`` makes
    this with the options that fit.  For chunks of a tensor, at most ``chunk`` x ``chunk``
    elements, and their orthonormal cosine transform DCT::

        x_i = decay m_i + g_i                                      on each rank
        sent_i = DCT^-1 of the top_k largest of DCT x_i
        m_i = x_i - sent_i
        q = DCT^-1 of each coefficient's mean over its senders     on all ranks
        the optimizer steps along sign(q)

    Slow changes that ranks have in common are few large coefficients; what is not sent stays in
    the momentum of its rank, which differs from rank to rank.

    Sent: ``top_k`` values and packed indices a chunk, 32 of 4096 with the defaults; small tensors
    whole.  State: ``momentum`` m.

    Options:
        decay: what is left of momentum after a step, in [0, 1).
        chunk: the longest side of a chunk, in elements.
        top_k: coefficients of a chunk that are sent.
        values: on the wire, "float32" or "float16".
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".
        sign: False steps along q itself, whose magnitude is about that of momentum.

    Reference: Peng, Quesnelle, Kingma, arXiv 2411.19870.  Differs from the released code in:
    momentum is in units of the gradient, not of the step; see ``dct_top_k`` and
    ``momentum_feedback``.

    >>> world = World(DeMoCompression(chunk=8, top_k=1), size=2)
    >>> gradients = [np.full((8, 8), 3.0), np.full((8, 8), -2.0)]
    >>> np.unique(world.exchange(gradients)[0].direction).tolist()
    [1.0]
    """

    reference = "Peng et al., arXiv 2411.19870"

    decay: float = 0.999
    chunk: int = 64
    top_k: int = 32
    sign: bool = True
    values: str = "float32"
    indices: str = "packed"

    partner = "DeMo"

    @functools.cached_property
    def blocks(self) -> Chain:
        check_choice("sign", self.sign, (True, False))
        signs: tuple[Transform, ...] = (majority_vote(),) if self.sign else ()
        via = dct_top_k(self.chunk, self.top_k, self.values, self.indices)
        return chain(momentum_feedback(self.decay), *signs, via=via)

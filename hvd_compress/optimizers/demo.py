"""DeMo, the optimizer (Peng et al., 2024, arXiv 2411.19870); its messages: ``methods/demo.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hvd_compress.backends import Array, backend_of
from hvd_compress.methods.demo import DeMoCompression
from hvd_compress.optimizers.base import Formula, Now, State


@dataclasses.dataclass(frozen=True)
class DeMo(Formula):
    """Steps along the sign of what is large and slow in the momenta of all ranks::

        w = w (1 - lr weight_decay) - lr sign(q)

    Momentum lives in the compression, one on each rank, which returns sign(q) in place of the
    gradient; see :class:`~hvd_compress.DeMoCompression`.  So the optimizer takes no step without
    it, but does on a single rank.  Every weight moves by the whole learning rate in every step, so
    it should be about that of Adam, and fall towards the end.

    No state but the compression's ``momentum``, which differs between ranks.

    Options:
        lr: length of the step of each weight.
        decay: what is left of momentum after a step, in [0, 1).
        chunk: the longest side of the chunks that the cosine transform is made of.
        top_k: coefficients that a rank sends of each chunk.
        sign: False steps along q, whose magnitude is about that of momentum.
        weight_decay: decoupled from the gradient, as in AdamW.

    Reference: Peng, Quesnelle, Kingma, arXiv 2411.19870.  Differs from the released code in: see
    :class:`~hvd_compress.DeMoCompression`.

    >>> from hvd_compress.engines.lockstep import World
    >>> demo, w = DeMo(lr=0.1), np.array([1.0, 1.0])
    >>> sign = World(demo.compressor(), size=1).exchange([np.array([4.0, -0.1])])[0].direction
    >>> demo.step(w, sign, {}, Now(step=1))[0]
    array([0.9, 1.1])
    """

    method = DeMoCompression
    schedule = ("decay", "chunk", "top_k", "sign")

    decay: float = 0.999
    chunk: int = 64
    top_k: int = 32
    sign: bool = True
    weight_decay: float = 0.0

    def check(self, names: Mapping[str, str]) -> None:
        self.check_not_negative(names, "lr", "weight_decay")
        self.compressor()  # checks the rest

    def update(self, w: Array, g: Array, state: State, now: Now) -> tuple[Array, State]:
        xp = backend_of(w)
        if self.weight_decay:
            w = xp.affine(w, 1 - self.lr * self.weight_decay)
        return xp.add_scaled(w, g, -self.lr), {}


#: what hosts say without its compression
NO_MOMENTUM = (
    "DeMo has its momentum in its compression, and takes no step without it: write demo = "
    "hvd.DeMo(...) and hvd.DistributedOptimizer(demo, compression=demo.compressor())"
)
NO_ROWS = (
    "DeMo transforms whole tensors, and sparse gradients have no momentum: pass "
    "sparse_as_dense=True to hvd.DistributedOptimizer"
)

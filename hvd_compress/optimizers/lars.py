"""LARS (You, Gitman and Ginsburg, 2017, arXiv 1708.03888)."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import Array, backend_of
from hvd_compress.optimizers.base import Formula, Now, Slot, State, quotient


@dataclasses.dataclass(frozen=True)
class LARS(Formula):
    """SGD with momentum whose learning rate follows the norms of each layer::

        l = trust_coefficient ||w|| / (||g|| + wd ||w||)        1 if either norm is 0
        v = m v + lr l (g + wd w);   w = w - v

    A layer whose gradient is large beside its weights would diverge first at large rates.  Tensors
    of one dimension, biases and scales, take plain steps: l = 1 and no weight decay.

    State of a parameter: ``velocity`` v, which contains the learning rate.

    Options:
        lr: global learning rate; LARS is tuned with large ones, such as 1 to 30.
        momentum: m.
        weight_decay: wd, inside the step and inside of l.
        trust_coefficient: length of a step beside the weights, at lr 1.

    Reference: You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017,
    arXiv 1708.03888.

    >>> w, g = np.array([[3.0, 4.0]]), np.array([[0.6, 0.8]])  # of norms 5 and 1: l = 0.1 * 5 / 1
    >>> LARS(trust_coefficient=0.1).step(w, g, {}, Now(step=1))[0]
    array([[2.7, 3.6]])
    """

    not_negative = ("lr", "momentum", "weight_decay", "trust_coefficient")
    slots = (Slot("velocity"),)

    lr: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust_coefficient: float = 0.001

    def update(self, w: Array, g: Array, state: State, now: Now) -> tuple[Array, State]:
        xp, rate, decay = backend_of(w), self.lr, 0.0
        if len(xp.shape(w)) > 1:
            decay, norm_w, norm_g = self.weight_decay, xp.vector_norm([w]), xp.vector_norm([g])
            most = self.trust_coefficient * norm_w
            rate = rate * quotient(xp, most, norm_g + decay * norm_w, norm_w, norm_g)
        v = xp.add_scaled(xp.affine(state["velocity"], self.momentum), g, rate)
        if decay:
            v = xp.add_scaled(v, w, rate * decay)
        return xp.add_scaled(w, v, -1), {"velocity": v}

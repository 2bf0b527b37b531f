"""The points at which sharpness-aware minimisation takes the gradient: SAM and ASAM."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress.backends import Array, backend_of
from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.base import check_not_negative, check_positive

#: added to norms, which may be zero
TINY = 1e-16


def option(name: str) -> Any:
    """Return an attribute that is an option of ``self.formula``, which schedules may change."""

    def get(host: Any) -> Any:
        return getattr(host.formula, name)

    def put(host: Any, value: Any) -> None:
        host.formula = dataclasses.replace(host.formula, **{name: value})

    return property(get, put, doc=f"The option ``{name}``, which may be changed at any time.")


@dataclasses.dataclass(frozen=True)
class SAM:
    """SAM's eps = rho g / ||g||, with the norm over all tensors.

    The step is taken from w, along the gradient at w + eps: where the loss is largest, to first
    order, in a ball of radius rho.

    Options:
        rho: radius of the ball in which the worst weights are looked for, in units of the weights.

    Raises:
        ConfigError: an option makes no sense.

    Reference: Foret, Kleiner, Mobahi and Neyshabur, ICLR 2021, arXiv 2010.01412.

    >>> w, g = np.array([1.0, 1.0]), np.array([3.0, 4.0])
    >>> SAM(rho=0.5).ascent([w], [g], ["weight"])[0].round(6)
    array([0.3, 0.4])
    """

    rho: float = 0.05

    def __post_init__(self) -> None:
        check_positive(rho=self.rho)

    def stretch(self, w: Array, name: str) -> Array | None:
        """Return T, by which the ball is stretched along a tensor, ``None`` for 1."""
        return None

    def ascent(
        self, weights: Sequence[Array], gradients: Sequence[Array | None], names: Sequence[str]
    ) -> list[Array | None]:
        """Return eps for each tensor, like its weights; ``None`` where there is no gradient.

        Args:
            names: of the tensors; those of biases look like it.

        Raises:
            ConfigError: there is no gradient at all.
        """
        found = [
            (w, *self._stretched(w, g, name)) if g is not None else None
            for w, g, name in zip(weights, gradients, names, strict=True)
        ]
        scaled = [entry[2] for entry in found if entry is not None]
        if not scaled:
            raise ConfigError(
                "SAM found no gradient: loss_of must compute the loss from these parameters"
            )
        scale = self.rho / (backend_of(scaled[0]).vector_norm(scaled) + TINY)
        return [None if entry is None else _eps(*entry, scale) for entry in found]

    def _stretched(self, w: Array, g: Array, name: str) -> tuple[Array | None, Array]:
        g, size = backend_of(g).widen(g), self.stretch(w, name)
        return size, g if size is None else size * g


@dataclasses.dataclass(frozen=True)
class ASAM(SAM):
    """ASAM's eps = rho T^2 g / ||T g||, with T = |w| + eta for weights and 1 for biases.

    The ball follows the scale of each weight, so that scaling a layer up and the next one down,
    which leaves the function as it is, leaves its sharpness as it is too (for eta = 0).

    Biases are tensors with the word ``bias`` or ``beta`` in their name; see :func:`is_bias`.

    Options:
        rho: radius of the ball, in units of the weights.
        eta: keeps T from zero.

    Reference: Kwon, Kim, Park and Choi, ICML 2021, arXiv 2102.11600.

    A weight that is ten times as large is moved by a hundred times as much:

    >>> w, g = np.array([1.0, 10.0]), np.array([1.0, 1.0])
    >>> ASAM(rho=0.5, eta=0.0).ascent([w], [g], ["weight"])[0].round(4)
    array([0.0498, 4.9752])
    """

    rho: float = 0.5
    eta: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(eta=self.eta)

    def stretch(self, w: Array, name: str) -> Array | None:
        xp = backend_of(w)
        return None if is_bias(name) else xp.abs(xp.widen(w)) + self.eta


def is_bias(name: str) -> bool:
    """Return whether a parameter is a bias by its name: "bias", "bias_ih_l0" of an LSTM,
    "in_proj_bias" of attention, "beta" of normalisation in Keras.

    >>> [is_bias(name) for name in ("0.bias", "lstm.bias_hh_l1", "attention.in_proj_bias")]
    [True, True, True]
    >>> [is_bias(name) for name in ("0.weight", "bias.weight", "unbiased")]
    [False, False, False]
    """
    words = re.split(r"[._/]", name.rpartition(".")[2].rpartition("/")[2])
    return not {"bias", "beta"}.isdisjoint(words)


def averaged(
    weights: Sequence[Array],
    gradients: Sequence[Array | None],
    average: Callable[[Array], Array],
) -> list[Array]:
    """Return averages over the ranks, of one message; what has no gradient here has zeros, since it
    may have one elsewhere."""
    xp = backend_of(weights[0])
    parts = [
        xp.widen(xp.full_like(w, 0.0) if g is None else g)
        for w, g in zip(weights, gradients, strict=True)
    ]
    dtype = "float64" if "float64" in map(xp.dtype, parts) else "float32"
    mean = average(xp.concat([xp.cast(part, dtype) for part in parts]))
    means = xp.split(mean, [xp.size(w) for w in weights])
    return [xp.reshape(part, xp.shape(w)) for part, w in zip(means, weights, strict=True)]


def _eps(w: Array, size: Array | None, scaled: Array, scale: Any) -> Array:
    xp = backend_of(scaled)
    return xp.restore(xp.scale(scaled if size is None else size * scaled, scale), w)

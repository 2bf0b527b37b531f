"""Studies in PyTorch, which explain rather than train: the gradient noise scale, and ``measures``
of generalisation.  No other package imports it."""

from .noise_scale import GradientNoiseScale

__all__ = ["GradientNoiseScale"]

"""What explains rather than trains, in PyTorch: the gradient noise scale, and ``measures`` of
generalisation.  No other package imports it."""

from .noise_scale import GradientNoiseScale

__all__ = ["GradientNoiseScale"]

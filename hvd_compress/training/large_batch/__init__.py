"""How large a batch is worth its examples."""

from .noise import NoiseScale, gradient_moments

__all__ = ["NoiseScale", "gradient_moments"]

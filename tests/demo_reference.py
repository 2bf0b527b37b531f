"""DeMo in NumPy, chunk by chunk and from the formulas: nothing of the package is used."""

from __future__ import annotations

import numpy as np


def cosine_basis(n: int) -> np.ndarray:
    """The orthonormal functions of the DCT-II, one a row."""
    rows = [[np.cos(np.pi * j * (2 * i + 1) / (2 * n)) for i in range(n)] for j in range(n)]
    return np.array([np.array(row) / np.linalg.norm(row) for row in rows])


def largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def top(x: np.ndarray, k: int) -> np.ndarray:
    """A mask of the k largest magnitudes."""
    return np.abs(x) >= np.sort(np.abs(x), axis=None)[-k] if k < x.size else np.ones(x.shape, bool)


class DeMo:
    """One matrix or vector on all ranks."""

    def __init__(
        self,
        shape: tuple[int, ...],
        ranks: int,
        *,
        decay: float = 0.999,
        chunk: int = 64,
        top_k: int = 32,
        sign: bool = True,
    ) -> None:
        self.shape = shape
        n, m = shape if len(shape) == 2 else (1, *shape)
        self.momenta = [np.zeros((n, m)) for _ in range(ranks)]
        self.height, self.width = largest_divisor(n, chunk), largest_divisor(m, chunk)
        self.decay, self.top_k, self.sign = decay, top_k, sign

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        """The direction of the step, of the tensor's shape."""
        for m, g in zip(self.momenta, gradients, strict=True):
            m[:] = self.decay * m + g.reshape(m.shape)
        down, across = cosine_basis(self.height), cosine_basis(self.width)
        result = np.zeros_like(self.momenta[0])
        for i in range(0, result.shape[0], self.height):
            for j in range(0, result.shape[1], self.width):
                here = np.s_[i : i + self.height, j : j + self.width]
                total, senders = np.zeros((2, self.height, self.width))
                for m in self.momenta:
                    found = down @ m[here] @ across.T
                    mask = top(found, self.top_k)
                    sent = np.where(mask, found.astype(np.float32), 0.0)  # as on the wire
                    m[here] -= down.T @ sent @ across
                    total, senders = total + sent, senders + mask
                result[here] = down.T @ (total / np.maximum(senders, 1)) @ across
        result = np.sign(result) if self.sign else result
        return result.reshape(self.shape)

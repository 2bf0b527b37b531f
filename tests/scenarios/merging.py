"""Merging in pairs where there are ranks without a partner."""

from __future__ import annotations

from hvd_compress import GTopK, UnsupportedError
from scenarios.driver import make, raises, train


def three_ranks_are_refused() -> None:
    with raises(UnsupportedError, "3 ranks", "power of two", "topk"):
        train(make(GTopK(density=0.05)), range(1))

"""What checkpoints of one rank mean for others.

Residuals differ between ranks, and users save rank 0 only.  What matters for training is the mean
over the ranks of what waits; a checkpoint that holds the mean serves any number of ranks.  One that
holds a single rank's own state serves that rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def unconsolidated(call: str) -> str:
    """A warning for those who save what is one rank's own."""
    return (
        f"this state holds the residuals of this rank only. Call {call} on every rank before "
        "rank 0 saves; or save every rank's own and load it on the same rank"
    )


def share(engine: Any, saved: Mapping[str, Any]) -> float:
    """What becomes of saved residuals on this rank, so that nothing is counted twice: a factor.

    Args:
        saved: "consolidated", and the "rank" and "size" of those who saved; empty if unknown.
    """
    if not saved or saved["consolidated"] or saved["size"] == 1:
        return 1.0
    if saved["size"] == engine.size and saved["rank"] == engine.rank:
        return 1.0
    warnings.warn(
        f"this state holds what waited on rank {saved['rank']} of {saved['size']} only; the "
        "residuals of the other ranks are lost. Before saving on one rank, consolidate on every "
        "rank: optimizer.consolidate_state_dict() in PyTorch, optimizer.compression.consolidate() "
        "in Keras",
        UserWarning,
        stacklevel=4,
    )
    return engine.size / saved["size"] if engine.rank == saved["rank"] else 0.0

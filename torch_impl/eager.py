"""What ``torch.compile`` leaves as it is.

Exchanges wait for other ranks and work on arrays that PyTorch does not know, so nothing of them can
become a graph.  The public calls of optimizers, and the hooks that PyTorch calls, are therefore
breaks in the graph of a training step that is compiled as a whole.
"""

from __future__ import annotations

from typing import Any

import torch


def run_eagerly(cls: type[Any], *methods: str) -> None:
    """Keep ``torch.compile`` out of methods of a class.

    It imports the compiler, which takes seconds, so it comes when optimizers are made, which import
    it themselves.
    """
    for name in methods:
        method = getattr(cls, name)
        if not hasattr(method, "_torchdynamo_disable"):  # of a base, or of an optimizer before
            setattr(cls, name, torch.compiler.disable(method))

"""A clear error for ``jit_compile=True``: XLA cannot compile Horovod's collectives or Python."""

from __future__ import annotations

import sys

from hvd_compress.errors import UnsupportedError


def refuse_xla() -> None:
    """Raise if what is being traced will be compiled by XLA.

    TensorFlow tells a traced function nothing of that, but the function that traces it knows.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if getattr(owner, "_jit_compile", None) is True and hasattr(owner, "python_function"):
            raise UnsupportedError(
                "gradients cannot be exchanged inside a function that XLA compiles: leave "
                "jit_compile=True out of tf.function, or write model.compile(..., "
                "jit_compile=False)"
            )
        frame = frame.f_back  # type: ignore[assignment]

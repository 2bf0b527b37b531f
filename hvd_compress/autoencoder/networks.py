"""The network for arrays of a kind: NumPy's, or the framework's that the arrays belong to."""

from __future__ import annotations

import importlib
from typing import Any

from hvd_compress.autoencoder.layout import Array
from hvd_compress.backends.base import library_of

_MODULES = {
    "numpy": "hvd_compress.autoencoder.numpy_network",
    "torch": "hvd_compress.torch.autoencoder",
    "tensorflow": "hvd_compress.tensorflow.autoencoder",
}


def network_of(x: Array) -> Any:
    """Return the module with the functions of :class:`~hvd_compress.autoencoder.Network` for arrays
    such as ``x``."""
    return importlib.import_module(_MODULES[library_of(type(x))])

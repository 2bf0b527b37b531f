"""Drop-in for ``horovod.tensorflow`` with gradient compression::

    import hvd_compress.tensorflow as hvd

    tape = hvd.DistributedGradientTape(tape, compression=hvd.DGC(momentum=0.9))

Everything of ``horovod.tensorflow`` is here.  Horovod's own import line works as well, if this
package is imported too: ``import horovod.tensorflow as hvd``, ``import hvd_compress.tensorflow``.
For Keras see ``hvd_compress.tensorflow.keras``.
"""

from __future__ import annotations

import functools
from typing import Any

try:
    import tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError("hvd_compress.tensorflow needs TensorFlow: pip install tensorflow") from error

from hvd_compress.integrations.exports import *  # noqa: F403
from hvd_compress.integrations.exports import __all__ as _common
from hvd_compress.integrations.horovod import load_horovod, names_of, rest_of, show_log

__all__ = [*_common]


def _register(horovod_tensorflow: Any) -> None:
    from .registration import register

    register(horovod_tensorflow)


show_log()
_horovod = load_horovod("horovod.tensorflow", "TensorFlow", _register)
if not isinstance(_horovod, ImportError):
    from . import keras  # registers with Horovod, too
    from .distribute import wrap_optimizer
    from .engine import runtime
    from .registration import bind

    horovods = _horovod.DistributedOptimizer
    DistributedOptimizer = wrap_optimizer(runtime, horovods, keras.horovods_optimizer)
    __all__ += ["DistributedOptimizer", "bind"]


def __getattr__(name: str) -> Any:
    """Return a name of ``horovod.tensorflow`` that this package does not replace."""
    return rest_of(_horovod, name, __name__, "TensorFlow")


__dir__ = functools.partial(names_of, _horovod, __all__)

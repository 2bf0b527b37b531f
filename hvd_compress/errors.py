"""Everything that this package raises on purpose; each message says what to write instead."""

__all__ = [
    "CollectiveTimeout",
    "CompressionError",
    "ConfigError",
    "MismatchError",
    "NeedsTuning",
    "PayloadError",
    "PoorFit",
    "SetupError",
    "UnboundError",
    "UnsupportedError",
]


class CompressionError(Exception):
    """Base class: ``except CompressionError`` catches all errors of this package."""

    # What TensorFlow looks for before it raises an error of a traced function again, as it was.
    __init__ = Exception.__init__


class ConfigError(CompressionError, ValueError):
    """An option has a value that cannot be honoured, alone or beside another option."""


class UnsupportedError(CompressionError, TypeError):
    """A dtype, an optimizer or a feature of the framework that compression cannot work with."""


class UnboundError(CompressionError, RuntimeError):
    """A compressor was handed to code that knows neither the optimizer nor the parameters."""


class PayloadError(CompressionError, ValueError):
    """Bytes that came from another rank are not a valid payload."""


class PoorFit(UserWarning):
    """Gradients have not got what a method counts on; training goes on."""


class NeedsTuning(UserWarning):
    """A method trains only with a learning rate unlike that of others; the message says which.
    Ignore the category where the rate is chosen."""


class SetupError(CompressionError, RuntimeError):
    """Something outside this package is missing: a compiler, Horovod, MPI."""


class MismatchError(CompressionError, ValueError):
    """Ranks make different calls, or the same call with arrays that do not fit together."""


class CollectiveTimeout(CompressionError, TimeoutError):  # noqa: N818
    """Another rank did not answer in time; the communicator cannot be used any more."""

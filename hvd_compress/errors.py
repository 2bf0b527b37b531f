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
    """Base class: ``except CompressionError`` catches all errors of this package.

    >>> try:
    ...     hvd.as_compressor("topk:density=2")
    ... except CompressionError as error:
    ...     print(f"{type(error).__name__}: {error}")
    ConfigError: density must be in (0, 1], for instance density=0.001; got 2
    """

    # What TensorFlow looks for before it raises an error of a traced function again, as it was.
    __init__ = Exception.__init__


class ConfigError(CompressionError, ValueError):
    """An option has a value that cannot be honoured, alone or beside another option.  The message
    names it, and says what it may be.

    >>> hvd.as_compressor("topk:desity=0.01")
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: topk has no option 'desity'; it has density, values,
    error_feedback, algorithm, indices, rows; did you mean 'density'?
    """


class UnsupportedError(CompressionError, TypeError):
    """A dtype, an optimizer or a feature of the framework that compression cannot work with.  The
    message says what to write instead.

    >>> World(hvd.TopK(), size=1).exchange([np.array([1, 2, 3])])
    Traceback (most recent call last):
        ...
    hvd_compress.errors.UnsupportedError: cannot compress an array of int64: gradients must be
    float16, float32 or float64 in this machine's byte order; convert it with .astype('float32')
    """


class UnboundError(CompressionError, RuntimeError):
    """A compressor was asked for what only its optimizer knows, or was handed to code that knows
    neither the optimizer nor the parameters.

    >>> hvd.TopK().stats()
    Traceback (most recent call last):
        ...
    hvd_compress.errors.UnboundError: TopK is bound to 0 optimizers: pass it to one
    hvd.DistributedOptimizer(..., compression=...), or ask optimizer.compression
    """


class PayloadError(CompressionError, ValueError):
    """Bytes that came from another rank are not a valid payload: nothing of them was used.

    >>> method, gradient = hvd.TopK(density=0.5), np.ones(4)
    >>> message, *_ = method.encode(gradient, method.init(gradient), hvd.Context())
    >>> method.decode(message[:-8], gradient, hvd.Context())
    Traceback (most recent call last):
        ...
    hvd_compress.errors.PayloadError: bad payload from rank 0: its checksum does not match.
    Either the message was damaged on its way, or the ranks do not run the same version with the
    same compression options, or a gradient is sparse on some ranks and dense on others
    (sparse_as_dense=True)
    """


class PoorFit(UserWarning):
    """Gradients have not got what a method counts on; training goes on.

    Here the gradients of the ranks have opposite signs, so that one code cannot stand for both:

    >>> import warnings
    >>> world = World(hvd.LGC(density=0.2, learn=0, code=2, min_size=1), size=2)
    >>> gradient = np.random.default_rng(0).normal(size=(20, 20))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = [world.exchange([gradient, -gradient]) for step in range(3)]
    >>> print(caught[0].message)
    learned compression of tensor: the gradients of different ranks are hardly alike (mean
    cosine -1.00 over the selected elements), and one latent cannot stand for all: take larger
    batches, or DGC
    """


class NeedsTuning(UserWarning):
    """A method trains only with a learning rate unlike that of others, or with another option than
    the usual one; the message says which.  Ignore the category where it is chosen.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     method = hvd.SignSGD()
    >>> print(caught[0].message)
    signsgd moves every weight by the whole learning rate in every step. Use one some hundred
    times smaller than SGD's: lr=0.0002 instead of 0.05, falling towards the end. Then silence
    this by warnings.simplefilter('ignore', hvd_compress.NeedsTuning). efsignsgd trains with
    SGD's own learning rate
    """


class SetupError(CompressionError, RuntimeError):
    """Something outside this package is missing: Horovod, MPI, another package.  The
    message says how to install it.

    >>> from hvd_compress.integrations.horovod import rest_of
    >>> rest_of(ImportError("no horovod"), "join", "hvd_compress.torch", "PyTorch")
    Traceback (most recent call last):
        ...
    hvd_compress.errors.SetupError: hvd.join needs Horovod with PyTorch (no horovod); run
    `hvd-compress-horovod`, and `hvd-compress doctor` to see what is there
    """


class MismatchError(CompressionError, ValueError):
    """Ranks make different calls, or the same call with arrays that do not fit together.  The
    message shows what each of them has.

    >>> from hvd_compress.agreement import agreement
    >>> from hvd_compress.engines.lockstep import run
    >>> run([agreement({"method": f"TopK(density={d})"}, np.zeros(1)) for d in (0.01, 0.1)])
    Traceback (most recent call last):
        ...
    hvd_compress.errors.MismatchError: the ranks differ in what must be the same:
      method
        rank 0: TopK(density=0.01)
        rank 1: TopK(density=0.1)
    Make the optimizer with the same model and options on all ranks. Load a checkpoint on all
    ranks; or load it on one and broadcast it, in PyTorch by broadcast_optimizer_state(), in
    Keras by BroadcastGlobalVariablesCallback
    """


class CollectiveTimeout(CompressionError, TimeoutError):  # noqa: N818
    """Another rank did not answer in time; the communicator cannot be used any more.

    Over MPI the message says which rank is waited for, and in which call, over Horovod for which
    collective.  The time is 600 seconds, or that of ``HVD_COMPRESS_TIMEOUT`` or
    ``Communicator(timeout=...)``.  It can be caught as a time-out of Python:

    >>> issubclass(CollectiveTimeout, TimeoutError)
    True
    """

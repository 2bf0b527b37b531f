"""Functions shared by the drop-ins for Horovod's modules: ``hvd_compress.torch`` and others."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import Any

from hvd_compress import blocks
from hvd_compress.base import Compressor
from hvd_compress.errors import SetupError, UnsupportedError
from hvd_compress.integrations.environment import Gather, chosen, compare, is_named
from hvd_compress.launch import finding_mpi, starting_mpi
from hvd_compress.methods import FP16, NoCompression, as_compressor


def show_log() -> None:
    """Show the package's log lines on the screen, unless the user has set up logging."""
    logger = logging.getLogger("hvd_compress")
    if not logging.getLogger().handlers and not logger.handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def load_horovod(
    module: str, framework: str, register: Callable[[ModuleType], None]
) -> ModuleType | ImportError:
    """Return Horovod's ``module`` with our wrappers in it, or the error of its import."""
    if "PMI_RANK" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        # Started by MPICH, and Horovod may be built with Open MPI: the MPI that is loaded first is
        # the one that mpi4py uses, and with the wrong one every process is rank 0 of 1.
        with finding_mpi(), contextlib.suppress(ImportError, RuntimeError):
            import mpi4py.MPI  # noqa: F401
    try:
        horovod: Any = importlib.import_module(module)
    except ImportError as error:
        return error
    if not hasattr(horovod, "DistributedOptimizer"):
        return ImportError(f"Horovod is installed, but it was built without {framework}")
    register(horovod)
    horovod.init = starting_mpi(horovod.init)
    return horovod


def with_options(factory: Callable[..., Any], **defaults: Any) -> inspect.Signature:
    """Return Horovod's signature with more options for this package's methods, such as ``seed``."""
    signature = inspect.signature(factory)
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=type(value)
        )
        for name, value in defaults.items()
        if name not in signature.parameters  # wrapped before
    ]
    return signature.replace(parameters=[*signature.parameters.values(), *more])


def in_place_of(horovods: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """As ``functools.wraps``, but ``help`` shows the description of the function first, which is
    about what it has beyond Horovod's, and then Horovod's."""

    def decorate(function: Callable[..., Any]) -> Any:
        own, theirs = inspect.getdoc(function), inspect.getdoc(inspect.unwrap(horovods))
        wrapped = functools.wraps(horovods)(function)
        wrapped.__doc__ = f"{own}\n\nAll else:\n\n{theirs}"
        return wrapped

    return decorate


def bind_call(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hvd: Any,
    gather: Gather,
) -> inspect.BoundArguments:
    """Return all arguments of a call; if it names no compression, the environment may name one.

    Args:
        hvd: the module of Horovod.
        gather: a collective of it.
    """
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    given, none = call.arguments["compression"], signature.parameters["compression"].default
    if not is_named(given, none):
        compare(hvd, call.arguments.get("process_set", hvd.global_process_set), gather)
    call.arguments["compression"] = chosen(given, none, hvd.rank)
    return call


def hand_on(factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Call Horovod's factory with those of the options that it has."""
    known = inspect.signature(factory).parameters.keys() & options.keys()
    return factory(**{name: options[name] for name in known})


def refuse_nodes(options: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedError`` if ``nodes`` is given, an option of PyTorch alone."""
    if "nodes" in options:
        raise UnsupportedError(
            f"nodes={options['nodes']!r}: only in PyTorch ranks share an exchange; leave nodes out"
        )


def checked_join(join: Callable[..., Any], users: Collection[Any], advice: str) -> Any:
    """Return Horovod's ``join``, which raises as long as ``users`` of compression exist."""

    @functools.wraps(join)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # Optimizers are parts of reference cycles: unused ones may still exist on some ranks, and a
        # call that only some ranks refuse leaves the others waiting.
        gc.collect()
        if users:
            raise UnsupportedError(
                "hvd.join() cannot be used with compressed gradients: Horovod's allgather does not "
                f"support it. Give every rank the same number of batches{advice}"
            )
        return join(*args, **kwargs)

    return checked


def is_ours(compression: Any) -> bool:
    """Return whether a value for ``compression=`` means one of this package's methods."""
    if isinstance(compression, type):
        return issubclass(compression, Compressor)
    return isinstance(compression, Compressor | str)


def without_state(compression: Any) -> str:
    """Return the name of a method that needs no optimizer: "none" or "fp16".

    Raises:
        UnboundError: the method needs an optimizer.
    """
    method = as_compressor(compression)
    if not isinstance(method, NoCompression | FP16):
        method.compress()  # which says so
    return method.name


def take_stateless(function: Callable[..., Any], horovods: Any) -> Callable[..., Any]:
    """Return Horovod's ``allreduce``, or a function like it, such that it also takes
    ``NoCompression`` and ``FP16`` by class, instance and name.

    Args:
        horovods: ``hvd.Compression``.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if is_ours(compression := call.arguments.get("compression")):
            call.arguments["compression"] = getattr(horovods, without_state(compression))
        return function(*call.args, **call.kwargs)

    return wrapped


def rest_of(horovod: ModuleType | ImportError, name: str, package: str, framework: str) -> Any:
    """Return ``package.name`` from Horovod's module, which alone has it."""
    if name.startswith("__") or _is_submodule(package, name):
        raise AttributeError(name)
    check_server(name)
    if isinstance(horovod, ImportError):
        raise SetupError(
            f"hvd.{name} needs Horovod with {framework} ({horovod}); run "
            "`hvd-compress-horovod`, and `hvd-compress doctor` to see what is there"
        ) from horovod
    if not hasattr(horovod, name):
        where = "; building blocks are in hvd_compress.blocks" if hasattr(blocks, name) else ""
        raise AttributeError(f"{package} and {horovod.__name__} have no {name!r}{where}")
    return getattr(horovod, name)


class _NotHereError(UnsupportedError, AttributeError):
    """For ``hasattr``, to which the name is not there, and for users, who are told where it is."""


def check_server(name: str) -> None:
    """Raise ``UnsupportedError`` for a name that is of parameter servers: these are for PyTorch and
    NumPy, over MPI alone."""
    if name in {"parameter_server", "ParameterServer", "AsynchronousLeaderSGD"}:
        there = "ParameterServer" if name == "parameter_server" else name
        raise _NotHereError(
            f"hvd.{name} is there over MPI alone, for PyTorch (import hvd_compress.torch.mpi as "
            f"hvd) and for NumPy arrays (hvd_compress.mpi.{there}). In TensorFlow and Keras "
            "hvd.DistributedOptimizer takes method=hvd.LocalSGD(sync_every=8) for ranks that "
            "seldom meet"
        )


@functools.cache  # scripts ask for hvd.rank at every step
def _is_submodule(package: str, name: str) -> bool:
    """Whether there is a module ``package.name``, which may not be imported yet: ``from package
    import name`` asks the package first, and imports it only after an ``AttributeError``."""
    if not hasattr(sys.modules[package], "__path__"):
        return False
    return importlib.util.find_spec(f"{package}.{name}") is not None


#: submodules of Horovod that users name
_SUBMODULES = {"callbacks", "elastic", "keras"}


def names_of(horovod: ModuleType | ImportError, own: Iterable[str]) -> list[str]:
    """Return the names for ``dir()`` of a drop-in: its ``own``, and those of Horovod's module.
    Names that the module imports for its own use are left out."""
    if isinstance(horovod, ImportError):
        return sorted(own)
    return sorted({*own, *(name for name in dir(horovod) if _is_public(horovod, name))})


def _is_public(horovod: ModuleType, name: str) -> bool:
    value = getattr(horovod, name)
    if name.startswith("_"):
        return False
    if isinstance(value, int):  # Average, Sum and others
        return True
    if isinstance(value, ModuleType):
        return name in _SUBMODULES and value.__name__.startswith(("horovod.", "hvd_compress."))
    home = getattr(value, "__module__", "")
    is_helper = home.endswith(".util") or ".gradient_aggregation" in home
    return home.startswith(("horovod.", "hvd_compress.")) and not is_helper

"""What the drop-ins for Horovod's modules have in common: ``hvd_compress.torch`` and others."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hvd_compress
from hvd_compress.errors import SetupError
from hvd_compress.methods import VARIABLE, from_environment

_log = logging.getLogger("hvd_compress")


def show_log() -> None:
    """What moves where is worth a line on the screen, unless the user has set up logging."""
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
    """Horovod's ``module`` with our wrappers in it, or why it is not there."""
    if "PMI_RANK" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        # Started by MPICH, and Horovod may be built with Open MPI: who loads its MPI first decides
        # which one mpi4py talks to, and with the wrong one every process is a world of its own.
        with contextlib.suppress(ImportError, RuntimeError):
            import mpi4py.MPI  # noqa: F401
    try:
        horovod = importlib.import_module(module)
    except ImportError as error:
        return error
    if not hasattr(horovod, "DistributedOptimizer"):
        return ImportError(f"Horovod is installed, but it was built without {framework}")
    register(horovod)
    return horovod


def bind_call(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: Callable[[], int],
) -> inspect.BoundArguments:
    """All arguments of a call; where it names no compression, the environment may."""
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    none = signature.parameters["compression"].default
    call.arguments["compression"] = chosen(call.arguments["compression"], none, rank)
    return call


_said: set[str] = set()


def chosen(compression: Any, none: Any, rank: Callable[[], int]) -> Any:
    """What a script names; or what ``HVD_COMPRESSION`` does, if the script names nothing or
    ``none``, which is what Horovod's examples say.  Rank 0 logs once which of the two it is."""
    method = from_environment()
    if method is None:
        return compression
    named = compression is not None and compression is not none
    if named:
        message = f"is not used, since the script names compression={compression!r}"
    else:
        message = f"names the compression, since the script names none: {method!r}"
    if message not in _said and rank() == 0:
        _said.add(message)
        _log.info("%s=%s %s", VARIABLE, os.environ[VARIABLE], message)
    return compression if named else method


def rest_of(horovod: ModuleType | ImportError, name: str, package: str, framework: str) -> Any:
    """``package.name``, where only Horovod's module has it."""
    if name.startswith("__"):
        raise AttributeError(name)
    if isinstance(horovod, ImportError):
        raise SetupError(
            f"hvd.{name} needs Horovod with {framework} ({horovod}); run `hvd-compress "
            "install-horovod`, and `hvd-compress doctor` to see what is there"
        ) from horovod
    if not hasattr(horovod, name):
        where = "; building blocks are in hvd_compress" if hasattr(hvd_compress, name) else ""
        raise AttributeError(f"{package} and {horovod.__name__} have no {name!r}{where}")
    return getattr(horovod, name)


def names_of(horovod: ModuleType | ImportError, own: dict[str, Any]) -> list[str]:
    """For ``dir()``."""
    public = [name for name in dir(horovod) if not name.startswith("_")]
    return sorted({*own, *public})

"""``dir()`` of a module shows what its users type, and nothing that it imports for itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import GenericAlias, ModuleType

import pytest

MODULES = (
    "hvd_compress",
    "hvd_compress.blocks",
    "hvd_compress.mpi",
    "hvd_compress.torch",
    "hvd_compress.torch.mpi",
    "hvd_compress.tensorflow",
    "hvd_compress.tensorflow.keras",
    "hvd_compress.tensorflow.mpi",
    "hvd_compress.tensorflow.keras.mpi",
)
#: what is shown as a module
SUBMODULES = {"blocks", "callbacks", "elastic", "errors", "keras", "mpi", "tensorflow", "testing"}
SUBMODULES |= {"torch"}


def leaks(module):
    """Names in ``dir(module)`` that belong to somebody else, or to the inside of the package."""
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("__"):
            continue
        home = getattr(value, "__module__", "hvd_compress")
        if name.startswith("_"):
            yield name
        elif isinstance(value, ModuleType):
            is_own = value.__name__.startswith(("hvd_compress.", "horovod."))
            if not is_own or name not in SUBMODULES:
                yield name
        elif not (home.startswith(("hvd_compress", "horovod"))) or home.endswith(".util"):
            yield name


@pytest.mark.parametrize("name", MODULES)
def test_what_is_shown_is_what_users_type(name):
    module = importlib.import_module(name)
    assert list(leaks(module)) == []
    assert set(module.__all__) <= set(dir(module))
    assert len(module.__all__) == len(set(module.__all__))


@pytest.mark.parametrize("name", MODULES)
def test_a_star_import_gives_what_is_listed(name):
    scope = {}
    exec(f"from {name} import *", scope)
    assert set(importlib.import_module(name).__all__) == scope.keys() - {"__builtins__"}


@pytest.mark.parametrize("name", MODULES)
def test_whoever_can_meet_an_error_can_catch_it(name):
    """By the name that the module it imports gives it."""
    errors = importlib.import_module("hvd_compress.errors")
    raised = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert {e.__name__ for e in raised} == set(errors.__all__)
    if name != "hvd_compress.blocks":  # which raise at once, where they are written
        assert set(errors.__all__) <= set(importlib.import_module(name).__all__)


def test_who_writes_an_exchange_finds_every_request_beside_the_others():
    requests, front = (importlib.import_module(f"hvd_compress{name}") for name in (".requests", ""))
    found = {
        name
        for file in Path(requests.__file__).parent.glob("[!_]*.py")
        for name, x in vars(importlib.import_module(f"hvd_compress.requests.{file.stem}")).items()
        if type(x) is not GenericAlias and isinstance(x, type) and issubclass(x, requests.Request)
    }
    assert len(found) > 8
    assert found <= set(front.__all__)


def test_drop_ins_show_what_is_horovods():
    import hvd_compress.tensorflow as tf_drop_in
    import hvd_compress.torch as torch_drop_in

    for module in (torch_drop_in, tf_drop_in):
        assert {"Average", "DistributedOptimizer", "ProcessSet", "allreduce", "elastic"} <= set(
            dir(module)
        )
        assert {"global_process_set", "init", "rank"} <= set(dir(module))


def test_this_test_would_notice():
    module = ModuleType("leaking")
    module.Any, module.importlib, module._private = pytest.Item, importlib, 1
    module.__dir__ = lambda: ["Any", "importlib", "_private"]
    assert list(leaks(module)) == ["Any", "_private", "importlib"]


def test_who_looks_for_a_building_block_is_told_where_it_is():
    """``hvd.allgather`` is Horovod's, so blocks are not among the names of the drop-ins."""
    import hvd_compress.torch as hvd

    with pytest.raises(
        AttributeError, match=r"'top_k'; building blocks are in hvd_compress\.blocks"
    ):
        hvd.top_k  # noqa: B018
    with pytest.raises(AttributeError, match=r"'no_such_name'$"):
        hvd.no_such_name  # noqa: B018

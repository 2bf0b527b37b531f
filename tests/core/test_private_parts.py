"""Horovod's private parts that the package reads or replaces: docs/design.md has the list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hvd_compress

ROOT = Path(hvd_compress.__file__).parent.parent
#: what Horovod's modules are called in this package, where they are not imported under a name
CALLED = {"hvd", "horovod", "impl", "_horovod", "_hvd"}
PRIVATE = re.compile(r"\b(horovod[\w.]*\._(?!_)\w+)")


def private_parts(source):
    """The private attributes of Horovod in a module, with the modules that are private."""
    tree = ast.parse(source)
    known, found = set(CALLED), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
            known |= {alias.asname or alias.name for alias in node.names}
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if PRIVATE.search(name)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if PRIVATE.search(alias.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & set(PRIVATE.findall(node.value))
    for node in ast.walk(tree):
        is_private = isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr)
        if is_private and node.attr not in CALLED and known & set(names_in(node.value)):
            found.add(f"horovod.{node.attr}")
    return found


def names_in(node):
    """The names of a chain such as ``self._hvd.mpi_ops``."""
    while isinstance(node, ast.Attribute):
        yield node.attr
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def test_the_page_lists_all():
    folders = ("hvd_compress", "torch_impl", "tf")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    used = set().union(*(private_parts(path.read_text()) for path in files))
    page = (ROOT / "docs/design.md").read_text()
    (paragraph,) = re.findall(r"^.*private module of Horovod.*\n.*$", page, re.MULTILINE)
    assert set(PRIVATE.findall(paragraph)) == used


def test_this_test_would_notice():
    assert private_parts("from horovod.torch import mpi_ops as m\nm._basics._size()") == {
        "horovod._basics",
        "horovod._size",
    }
    assert private_parts("self._hvd.mpi_ops._allreduce(x)") == {"horovod._allreduce"}
    assert private_parts("from horovod.common import _x") == {"horovod.common._x"}
    assert private_parts("import_module('horovod._keras')") == {"horovod._keras"}
    assert private_parts("self._set.size()\nhvd.allreduce(x)") == set()

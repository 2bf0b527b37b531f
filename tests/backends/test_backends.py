"""Every backend has the protocol's primitives, with parameters of the same names in the same order.

The type checker compares their types; it does not compare names, by which callers may pass them.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hvd_compress

ROOT = Path(hvd_compress.__file__).parent.parent
BACKENDS = {
    "hvd_compress/backends/numpy.py": "EagerBackend",
    "torch_impl/backend.py": "EagerBackend",
    "tf/backend.py": "TracingBackend",
}


def primitives(body):
    """Parameters without defaults' values, by the name of a public function."""
    return {
        node.name: [(a.arg, a.kind) for a in parameters(node)]
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def parameters(node):
    for place, argument in enumerate(node.args.args):
        argument.kind = place >= len(node.args.args) - len(node.args.defaults)
        if argument.arg != "self":
            yield argument


def protocol(name):
    source = ast.parse((ROOT / "hvd_compress/backends/base.py").read_text())
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    return primitives(classes["Backend"].body) | primitives(classes[name].body)


def differences(expected, found):
    return {
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    }


@pytest.mark.parametrize("path", BACKENDS)
def test_primitives_are_those_of_the_protocol(path):
    found = primitives(ast.parse((ROOT / path).read_text()).body)
    if path.startswith("tf"):
        selection = primitives(ast.parse((ROOT / "tf/selection.py").read_text()).body)
        found["top_k"] = selection["top_k"]
    expected = protocol(BACKENDS[path])
    assert len(expected) > 30
    assert differences(expected, found) == set()


def test_this_test_would_notice():
    source = "def put(x, y): ...\ndef add(x, y=1): ...\ndef take(x): ...\n"
    other = "def put(y, x): ...\ndef add(x, y): ...\ndef _take(x): ...\n"
    found = [primitives(ast.parse(text).body) for text in (source, other)]
    assert differences(*found) == {"put", "add", "take"}

"""Every backend has the protocol's primitives, with parameters of the same names in the same order.

The type checker compares their types; it does not compare names, by which callers may pass them.
Parameters that go by place alone have no names to compare: there a library's own function will do.
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
    """Parameters without defaults' values, by the name of a public function; ``None`` if they go by
    place alone."""
    return {
        node.name: None if node.args.posonlyargs else [(a.arg, a.kind) for a in parameters(node)]
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def assigned(body):
    """The names to which a module gives a value, such as another module's function."""
    targets = (node.targets[0] for node in body if isinstance(node, ast.Assign))
    return {target.id for target in targets if isinstance(target, ast.Name)}


def parameters(node):
    for place, argument in enumerate(node.args.args):
        argument.kind = place >= len(node.args.args) - len(node.args.defaults)
        if argument.arg != "self":
            yield argument


def protocol(name):
    source = ast.parse((ROOT / "hvd_compress/backends/base.py").read_text())
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    return primitives(classes["Backend"].body) | primitives(classes[name].body)


def differences(expected, body):
    """The primitives that are missing or too many, or whose parameters have other names."""
    found = primitives(body)
    by_place = {name for name, of in expected.items() if of is None}
    there = found.keys() | (by_place & assigned(body))
    named = expected.keys() - by_place
    return expected.keys() ^ there | {n for n in named if expected[n] != found.get(n)}


@pytest.mark.parametrize("path", BACKENDS)
def test_primitives_are_those_of_the_protocol(path):
    body = ast.parse((ROOT / path).read_text()).body
    if path.startswith("tf"):
        body += ast.parse((ROOT / "tf/selection.py").read_text()).body
    expected = protocol(BACKENDS[path])
    assert len(expected) > 30
    assert differences(expected, body) == set()


def test_this_test_would_notice():
    source = "def put(x, y): ...\ndef add(x, y=1): ...\ndef take(x): ...\ndef abs(x, /): ...\n"
    other = "def put(y, x): ...\nadd = f\ndef _take(x): ...\nabs = f\n"
    expected = primitives(ast.parse(source).body)
    assert differences(expected, ast.parse(other).body) == {"put", "add", "take"}

"""docs/guarantees.md promises nothing that no test holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/guarantees.md").read_text()
#: an entry of the list with its comment
PROMISES = re.findall(r"^- (.*?)(?=^- |^\n?[A-Z#])", PAGE, re.MULTILINE | re.DOTALL)


def laws_of(promise):
    return re.findall(r"tests/[\w/]+\.py::\w+", "".join(re.findall(r"<!--(.*?)-->", promise)))


def is_there(law):
    path, name = law.split("::")
    tree = ast.parse((ROOT / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def test_every_sentence_is_an_entry_of_its_own():
    assert len(PROMISES) == PAGE.count("\n- ") >= 15
    for promise in PROMISES:
        text = re.sub(r"<!--.*?-->|\(\[.*?\)\)?", "", promise, flags=re.DOTALL).strip()
        assert not re.search(r"[.!?] [A-Z]", text), text


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[:50])
def test_a_promise_has_laws_that_exist(promise):
    laws = laws_of(promise)
    assert laws
    assert [law for law in laws if not is_there(law)] == []


def test_this_test_would_notice():
    assert laws_of("A promise. <!-- none -->") == []
    assert not is_there("tests/core/test_laws.py::test_what_nobody_wrote")

"""Docstrings name what can be given, and have examples that print what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import hvd_compress
from tests.docs.test_site import ROOT, script

api = script("api")
PACKAGES = {"hvd_compress": "hvd_compress", "torch_impl": "hvd_compress.torch"}
PACKAGES |= {"tf": "hvd_compress.tensorflow"}


@pytest.fixture(scope="module")
def written():
    return api.pages()


def by_page(test):
    return pytest.mark.parametrize("page", api.PAGES, ids=lambda page: page.file)(test)


def public(page) -> Iterator[tuple[str, Any]]:
    """The callables of a page, by name."""
    for path in page.modules:
        module = importlib.import_module(path)
        for name in api.names_of(module):
            if callable(of := api.thing(module, name)):
                yield f"{path}.{name}", of


@by_page
def test_every_parameter_is_named(page):
    """In the docstring, or in that of a class whose options these are, too."""
    for name, of in public(page):
        of_class = api.is_class(of)
        bases = [base for cls in of.__mro__ for base in (cls, cls.__init__)] if of_class else [of]
        said = "\n".join(inspect.getdoc(base) or "" for base in bases)
        try:
            wanted = inspect.signature(of).parameters.keys() - {"self", "args", "kwargs"}
        except ValueError:  # of what is Python's own, such as making an exception
            continue
        missing = [each for each in wanted if not re.search(rf"\b{each}\b", said)]
        assert not missing, f"the docstring of {name} says nothing of {missing}"


@by_page
def test_every_class_has_an_example(page):
    without = {
        name
        for name, of in public(page)
        if api.is_class(of) and not re.search(r"^\s*>>> ", api.documented(of), re.MULTILINE)
    }
    assert not without


def test_docstrings_are_short():
    """A page of the documentation has the rest."""
    for folder in PACKAGES:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                    first = node.body[0]
                    lines = first.end_lineno - first.lineno + 1
                    most = 25 if isinstance(node, ast.ClassDef) else 30
                    assert lines <= most, f"{file}: {node.name} has {lines}, at most {most}"


def test_methods_begin_with_what_users_write():
    """``compression=...``, which makes a method, and mostly the one of that name."""
    [page] = [page for page in api.PAGES if page.file == "methods"]
    for name, of in public(page):
        written = re.findall(
            r"^ +compression=(.*(?:\n {8}.*)*(?:\n {4}\))?)$", of.__doc__, re.MULTILINE
        )
        is_method = api.is_class(of) and issubclass(of, hvd_compress.Compressor)
        assert written or not is_method, f"{name} has no example compression=..."
        for text in written:
            if not text.startswith("adam."):
                method = hvd_compress.methods.as_compressor(eval(text, {"hvd": hvd_compress}))
                assert not is_method or type(method) is of, text


def run(example: doctest.DocTest) -> None:
    """Raise ``AssertionError`` with all that is not as the example says."""
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(example, out=said.append)
    assert not said, "".join(said)


@by_page
def test_examples_print_what_they_say(page, written):
    """The examples under one heading go on with the same names."""
    names: dict[str, Any] = {}
    exec(page.begin, names)
    parts = re.split(r"^#{2,4} (.*)$", written[f"{page.file}.md"], flags=re.MULTILINE)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        blocks = re.findall(r"^```pycon\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        run(doctest.DocTestParser().get_doctest("\n".join(blocks), {**names}, heading, None, 0))


def test_examples_of_what_is_not_public_run_in_their_modules(written):
    pages = "\n".join(written.values())
    for folder, package in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in file.read_text():
                path = file.relative_to(ROOT / folder).with_suffix("").parts
                module = ".".join([package, *path]).removesuffix(".__init__")
                for example in doctest.DocTestFinder().find(importlib.import_module(module)):
                    shown = ["\n... ".join(each.source.splitlines()) for each in example.examples]
                    if shown and f">>> {shown[-1]}\n" not in pages:
                        run(example)

"""Options are checked where they are given, with and without ``python -O``."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

from hvd_compress import ConfigError, NeedsTuning
from hvd_compress.config import lookup, names
from hvd_compress.methods.composed import rule
from hvd_compress.systems.graphs import Weights
from tests.method_table import ROWS

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("method", "block", "schedule", "training", "graph", "proximal", "parameter server")
KINDS += ("outer optimizer", "codistillation", "distillation weight")
PACKAGES = ("hvd_compress", "torch_impl", "tf")


class Odd:
    """Nothing that any option could be."""


def parts_of(thing):
    return [thing, *(found for part in thing.parts for found in parts_of(part))]


def things():
    """One of each class that has options and is registered under a name: those of the table of
    methods, with all that they are made of, and those that can be made without a word."""
    found: dict[type, object] = {Weights: Weights([[0.5, 0.5], [0.5, 0.5]])}
    found |= {type(part): part for row in ROWS.values() for part in parts_of(row.method)}
    for kind in KINDS:
        for cls in (lookup(kind, name) for name in names(kind) if not name.startswith("test-")):
            if cls not in found:
                with contextlib.suppress(TypeError):  # an option has no default
                    found[cls] = cls()
    return found.values()


def test_no_option_takes_what_it_cannot_be():
    taken = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedsTuning)
        for thing in things():
            for field in dataclasses.fields(thing):
                values = (
                    (Odd(),) if (type(thing), field.name) == (rule, "names") else (Odd(), "odd")
                )
                for value in values:
                    # Operators of which sums mean nothing are an error of types.
                    errors = (ConfigError, TypeError) if field.name == "select" else ConfigError
                    with contextlib.suppress(errors):
                        taken.append(dataclasses.replace(thing, **{field.name: value}))
    assert taken == []
    assert len(things()) > 75


def test_options_are_checked_under_python_minus_o():
    """In a Python in which ``assert`` does nothing."""
    command = [sys.executable, "-O", "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-q"]
    names = "no_option or bad_configs or mistyped"
    done = subprocess.run(
        [*command, "-k", names, __file__, ROOT / "tests" / "core" / "test_config.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_asserts_only_tell_types():
    """An ``assert`` is for the type checker: it says that something is there, or of what type it
    is, and runs nothing.  Users' options are checked by what raises ``ConfigError``."""
    wrong = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            tree = ast.parse(file.read_text())
            constructors = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__")
            ]
            at_start = {inner for node in constructors for inner in ast.walk(node)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Assert) and (
                    node in at_start or not tells_a_type(node.test)
                ):
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def tells_a_type(test):
    match test:
        case ast.Compare(left, [ast.IsNot()], [ast.Constant(None)]):
            return is_a_name(left)
        case ast.Call(ast.Name("isinstance"), [what, _]):
            return is_a_name(what)
    return False


def is_a_name(what):
    """``a``, or ``a.b.c``."""
    return isinstance(what, ast.Name) or (isinstance(what, ast.Attribute) and is_a_name(what.value))

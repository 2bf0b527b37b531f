"""Options are checked where they are given, with and without ``python -O``."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hvd_compress import (
    DGC,
    EF21,
    LGC,
    ConfigError,
    ExponentialWarmup,
    NeedsTuning,
    OkTopk,
    OneBitAdamCompression,
    PowerSGD,
    RandomK,
    ScaleCom,
    StagedWarmup,
    Threshold,
    ZeroOneAdamCompression,
    blocks,
)
from hvd_compress.config import lookup, names
from hvd_compress.methods.composed import rule
from hvd_compress.systems import graphs, rounds, servers, teachers
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


DENSITIES = {"density": (0, -1, 1.1, math.nan, None, "0.1", True)}
#: values of the right type that an option cannot have; those that contradict another option stand
#: with the tests of their classes
REFUSED = {
    DGC: {
        **{"density": (0, 1.5, "0.1", True), "momentum": (1.0, -0.1, "0.9")},
        **{"clip_norm": (0, math.nan, "1"), "values": ("int8",), "min_size": (-1, 0.5)},
    },
    EF21: {"density": (2,), "values": ("int8",), "average": (1.0,), "start": (-1,)},
    ExponentialWarmup: {"density": (0,), "stages": (-1, 0.5)},
    LGC: {
        **{"density": (2,), "rate": (0,), "via": ("ring",), "keep": (1.5,), "min_size": (-1,)},
        **{"decoders": (0,), "innovation": (0,)},
    },
    OkTopk: {
        **{"density": (2,), "threshold_every": (0,), "indices": ("rice",)},
        **{"values": ("bfloat16",)},
    },
    OneBitAdamCompression: {"freeze_step": (0, 2.5), "norm": ("max",), "min_size": (-1,)},
    PowerSGD: {"rank": (0, 1.5), "start": (-1,), "min_compression_rate": (0.5,)},
    RandomK: {"shared": ("no",)},
    ScaleCom: {"density": (0,)},
    StagedWarmup: {
        **{"unit": ("batch",), "stage_length": (0, -1.5, "2")},
        **{"densities": ((), (0.5, 0.0), (25, 6.25))},
    },
    Threshold: {"tau": (0, True), "send": ("bits",)},
    ZeroOneAdamCompression: {
        **{"local_step_clipper": (True,), "norm": ("max",), "min_size": (0.5,)},
    },
    blocks.averaged_momentum: {"beta": (1.0, None)},
    blocks.column_means: {"column": (0,)},
    blocks.error_feedback: {"units": ("rate",)},
    blocks.exponential_dithering: {"base": (1,), "levels": (200,)},
    blocks.fading_memory: {"keep": (-1,)},
    blocks.float8: {"format": ("e3m4",)},
    blocks.linear: {"bits": (1, 9), "column": (0,)},
    blocks.logarithmic: {"bits": (2, 9)},
    blocks.plus_minus: {"tau": (-1,)},
    blocks.random_k: DENSITIES,
    blocks.rounding: {
        "base": (1.0, True),
        "levels": ((1,), (1, 1), (0, 1), (1, math.inf)),
        "biased": (2,),
    },
    blocks.scaled_sign: {"norm": ("max",)},
    blocks.ternary: {"clip": (0,)},
    blocks.threshold: {"tau": (math.nan,)},
    blocks.top_k: DENSITIES,
    blocks.uniform_dithering: {"levels": (0,), "bucket": (0,), "norm": ("l1",)},
    graphs.EXTRA: {"prox": (3,)},
    graphs.ExactDiffusion: {"prox": (3,)},
    graphs.LEAD: {"alpha": (2.0,), "gamma": (0.0,), "codec": ("topk",), "prox": (3,)},
    rounds.DiLoCo: {"outer": (0.7,)},
    rounds.EASGD: {"beta": (-1,), "sync_every": (0,)},
    rounds.LeaderSGD: {
        **{"local_every": (0,), "global_every": (0,), "groups": (0,)},
        **{"local_pull": (2,), "global_pull": (2.0,), "local_drift": (-1.0,)},
    },
    rounds.LocalSGD: {"sync_every": (0,)},
    rounds.OuterSGD: {"lr": (-1,)},
    servers.Rules: {"mode": ("synchronous",), "backup": (-1,)},
    teachers.Codistillation: {
        **{"exchange": ("gradients",), "every": (0,), "burn_in": (-1,), "weight": (-1.0, "ramp")},
        **{"loss": ("l2",), "values": ("int8",), "groups": (0,), "weight_decay": (5e-4,)},
    },
    teachers.Ramp: {"steps": (0,), "to": (-1,)},
}


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_an_option_names_itself_where_it_refuses_a_value(cls):
    for option, values in REFUSED[cls].items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"\b{option}\b"):
                cls(**{option: value})


def test_options_are_checked_under_python_minus_o():
    """In a Python in which ``assert`` does nothing."""
    command = [sys.executable, "-O", "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-q"]
    names = "no_option or names_itself or bad_configs or mistyped"
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

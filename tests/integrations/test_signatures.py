"""Whatever a script passes to Horovod, it can pass to the drop-ins.

Horovod's signatures are read in a process of its own, where nothing is registered with it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re

import pytest

from tests import jobs

READ = r"""
import importlib, inspect, json, re, sys

def plain(x):
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))

def of(value):
    if isinstance(value, (int, float)):
        return value
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        [p.name, int(p.kind), None if p.default is p.empty else plain(p.default)]
        for p in parameters
    ]

found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    found[name] = {}
    for key, value in vars(module).items():
        where = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        own = isinstance(value, int) or (where or "").startswith("horovod")
        if own and not key.startswith("_"):
            found[name][key] = of(value)
print(json.dumps(found))
"""

DROP_INS = {
    "horovod.torch": "hvd_compress.torch",
    "horovod.torch.elastic": "hvd_compress.torch.elastic",
    "horovod.tensorflow": "hvd_compress.tensorflow",
    "horovod.tensorflow.elastic": "hvd_compress.tensorflow.elastic",
    "horovod.tensorflow.keras": "hvd_compress.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "hvd_compress.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "hvd_compress.tensorflow.keras.elastic",
    "horovod.keras": "hvd_compress.tensorflow.keras",
    "horovod.keras.callbacks": "hvd_compress.tensorflow.keras.callbacks",
    "horovod.keras.elastic": "hvd_compress.tensorflow.keras.elastic",
}
#: where Horovod's two modules for Keras differ, the drop-in is like ``horovod.tensorflow.keras``
DIFFERENT = {
    ("horovod.keras", "DistributedOptimizer"): {"num_groups", "groups"},  # further behind
    ("horovod.keras", "allreduce"): {"average"},  # None is True
    ("horovod.keras.callbacks", "BestModelCheckpoint"): {"mode", "save_freq"},  # further behind
}


@pytest.fixture(scope="module")
def horovods():
    command = [jobs.python("tensorflow"), "-c", READ, *DROP_INS]
    _, output = jobs.run(command, timeout=100)
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def plain(x):
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def look_up(path):
    """A module, or an attribute of one that stands for a module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        package, _, name = path.rpartition(".")
        return getattr(importlib.import_module(package), name)


def refused(theirs, ours):
    """The parameters of Horovod's that ours would not take as Horovod's does."""
    own = list(inspect.signature(ours).parameters.values())
    positional = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name: p for p in own}
    for place, (name, kind, default) in enumerate(theirs):
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if not any(p.kind == kind for p in own):
                yield name
        elif positional[place : place + 1] != [name]:
            yield name
        else:
            own_default = plain(by_name[name].default)
            if default not in (None, own_default):
                yield name


@pytest.mark.parametrize("registered", [False, True], ids=["drop-in", "horovods-own-import"])
@pytest.mark.parametrize("module", DROP_INS)
def test_ours_takes_what_horovods_takes(horovods, module, registered):
    look_up(DROP_INS[module])
    ours = look_up(module if registered else DROP_INS[module])
    problems = {}
    assert len(horovods[module]) >= 5
    for name, theirs in horovods[module].items():
        if not hasattr(ours, name):
            problems[name] = "missing"
        elif not isinstance(theirs, list):
            if theirs is not None and theirs != getattr(ours, name):
                problems[name] = f"{getattr(ours, name)} instead of {theirs}"
        elif found := set(refused(theirs, getattr(ours, name))):
            problems[name] = found
    expected = {} if registered else {n: p for (m, n), p in DIFFERENT.items() if m == module}
    assert problems == expected


def undescribed(function):
    """The parameters that ``help(function)`` does not describe."""
    text = inspect.getdoc(function)
    names = inspect.signature(function).parameters
    return {name for name in names if not re.search(rf"^ +.*\b{name}\b.*:", text, re.MULTILINE)}


@pytest.mark.parametrize("module", sorted(set(DROP_INS.values())))
def test_help_shows_our_options_before_horovods(module):
    ours, seen = look_up(module), []
    for name in dir(ours):
        function = getattr(ours, name)
        if "All else:" in (text := getattr(function, "__doc__", None) or ""):
            own, theirs = text.split("All else:")
            more = set(inspect.signature(function).parameters)
            more -= set(inspect.signature(inspect.unwrap(function)).parameters)
            assert undescribed(function) & (more | {"compression"}) == set(), name
            assert "compression:" in own, name
            assert inspect.getdoc(inspect.unwrap(function)) in inspect.cleandoc(theirs), name
            seen.append(name)
    factories = {"DistributedOptimizer", "DistributedGradientTape", "PartialDistributedOptimizer"}
    wrapped = factories & {
        name for name in dir(ours) if hasattr(getattr(ours, name), "__wrapped__")
    }
    assert wrapped <= set(seen)


@pytest.mark.parametrize("name", ["hvd_compress.torch.mpi", "hvd_compress.tensorflow.mpi"])
def test_functions_over_mpi_name_their_options(name):
    module = importlib.import_module(name)
    for function in ("allreduce", "DistributedOptimizer"):
        found = inspect.signature(getattr(module, function)).parameters
        assert {"compression", "op", "process_set"} <= found.keys()
    if hasattr(module, "allreduce_"):
        in_place = inspect.signature(module.allreduce_).parameters
        assert in_place.keys() == inspect.signature(module.allreduce).parameters.keys()


@pytest.mark.parametrize("library", ["torch", "tensorflow"])
def test_functions_over_mpi_take_horovods_arguments_in_their_places(horovods, library):
    """But that optimizers of TensorFlow take those of ``horovod.keras``, and partial tapes hand on
    what they get."""
    ours, problems = importlib.import_module(f"hvd_compress.{library}.mpi"), {}
    theirs = horovods[f"horovod.{library}"]
    shared = {name for name in theirs.keys() & set(ours.__all__) if isinstance(theirs[name], list)}
    assert len(shared) >= 15
    others = {"DistributedOptimizer", "PartialDistributedGradientTape"}
    for name in shared - (others if library == "tensorflow" else set()):
        named = [
            (name, kind, None)
            for name, kind, _ in theirs[name]
            if kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
        if found := set(refused(named, getattr(ours, name))):
            problems[name] = found
    assert problems == {}
    assert list(inspect.signature(ours.init).parameters) == ["comm", "process_sets"]


def test_every_option_of_the_factories_arrives():
    """Factories hand Horovod's options on by name, and a training method to ``local_steps``."""
    import hvd_compress.tensorflow as hvd
    import hvd_compress.tensorflow.keras as hvd_keras
    from hvd_compress.integrations.options import HorovodOptions
    from hvd_compress.tensorflow.distribute import distribute

    known = {field.name for field in dataclasses.fields(HorovodOptions)}
    known |= set(inspect.signature(distribute).parameters)
    for factory in (
        hvd.DistributedOptimizer,
        hvd_keras.DistributedOptimizer,
        hvd_keras.PartialDistributedOptimizer,
    ):
        assert set(inspect.signature(factory).parameters) - {"use_locking", "method"} <= known


@pytest.mark.parametrize(
    ("theirs", "ours", "problems"),
    [
        ("(a, b=1)", lambda a, b=1, c=2: None, set()),
        ("(a, b=1)", lambda a, b: None, {"b"}),
        ("(a, b=1)", lambda a, b=2: None, {"b"}),
        ("(a, b=1)", lambda b=1, a=1: None, {"a", "b"}),
        ("(a, b=1)", lambda a, *, b=1: None, {"b"}),
        ("(a, b=1)", lambda a, **more: None, {"b"}),
        ("(a, **more)", lambda a: None, {"more"}),
    ],
)
def test_this_test_would_notice(theirs, ours, problems):
    scope = {}
    exec(f"{READ.split('found = ')[0]}\ndef f{theirs}: ...\nread = of(f)", scope)
    assert set(refused(scope["read"], ours)) == problems

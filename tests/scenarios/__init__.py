"""The laws of a real multi-rank job: functions that every rank runs.

``python -m tests.scenarios FOLDER MODULE ...`` is started by ``mpirun`` or ``horovodrun``, runs the
scenarios of the modules one after the other, and leaves a line per scenario in ``FOLDER/RANK``.
``SCENARIOS_OVER`` says over what; see ``driver.py``.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import inspect
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Errors = type[BaseException] | tuple[type[BaseException], ...]


def horovod_only(function: Callable[[], None]) -> Callable[[], None]:
    """A scenario about Horovod itself, and not about an optimizer over whatever."""
    return function


def applies(
    *, least: int = 1, most: int | None = None, over: Sequence[str] = ()
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The jobs in which a scenario says something: elsewhere it is not run, and is no test.

    Args:
        least, most: numbers of ranks.
        over: beginnings of ``SCENARIOS_OVER``; all if empty.
    """
    return lambda function: function


def scenarios(
    module: str, package: str = "scenarios", *, over: str = "horovod", ranks: int | None = None
) -> dict[str, Callable[[], None]]:
    """The public functions that a module defines and that take no arguments, in their order, by
    names like "module.function".  For "module.function" only that one.

    Those are left out that do not apply with so many ``ranks``, or over that.  ``over`` "mpi", or
    anything that ends so, leaves out what is about Horovod itself.
    """
    loaded = importlib.import_module(f"tests.{package}.{module.partition('.')[0]}")
    found = names(module, package, over=over, ranks=ranks)
    return {name: getattr(loaded, name.partition(".")[2]) for name in found}


def names(
    module: str,
    package: str = "scenarios",
    *,
    over: str | None = "horovod",
    ranks: int | None = None,
) -> list[str]:
    """Their names, without an import of the module and of its framework.  ``None``: whatever it
    is."""
    module, _, only = module.partition(".")
    return [
        f"{module}.{name}"
        for name, decorators in _functions(package, module).items()
        if only in ("", name) and all(_applies(decorator, over, ranks) for decorator in decorators)
    ]


@functools.cache
def _functions(package: str, module: str) -> dict[str, list[dict[str, Any] | None]]:
    """The conditions that ``applies`` is given for each function, those of ``APPLIES``, which are
    the module's, and ``None`` for ``horovod_only``."""
    source = (Path(__file__).parent.parent / package / f"{module}.py").read_text()
    found: dict[str, list[dict[str, Any] | None]] = {}
    of_all: list[dict[str, Any] | None] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "APPLIES":
            of_all = [ast.literal_eval(node.value)]
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.args.args:
            continue
        decorators = found[node.name] = [*of_all]
        for decorator in node.decorator_list:
            if ast.unparse(decorator) == "horovod_only":
                decorators.append(None)
            elif isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "applies":
                words = decorator.keywords
                decorators.append({str(word.arg): ast.literal_eval(word.value) for word in words})
    return found


def _applies(given: dict[str, Any] | None, over: str | None, ranks: int | None) -> bool:
    if given is None:
        return not (over and over.endswith("mpi"))
    if ranks is not None and not given.get("least", 1) <= ranks <= (given.get("most") or ranks):
        return False
    return over is None or over.partition("-")[0] in (given.get("over") or over)


def raises(error: Errors, *words: str) -> Any:
    """``with raises(ConfigError, "dampening")``: the message must contain the words."""
    import pytest

    return pytest.raises(error, match="(?s)" + ".*".join(words))


def refused(error: Errors, *rows: tuple[Any, ...]) -> None:
    """Each row is a call without arguments, and words of the error that it must raise."""
    for call, *words in rows:
        try:
            call()
        except error as found:
            text = str(found)
        else:
            raise AssertionError(f"no error with the words {words}")
        if not re.search("(?s)" + ".*".join(words), text):
            raise AssertionError(f"{words} are not in: {text}")


def of_program(module: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """The public functions that a module defines itself, of which one may be its ``main``, by
    their names; ``module`` are its ``globals()``."""
    return {
        name: function
        for name, function in module.items()
        if inspect.isfunction(function)
        and function.__module__ == module["__name__"]
        and not name.startswith("_")
        and name != "main"
    }


def run_all(
    folder: str,
    rank: int,
    functions: Mapping[str, Callable[[], None]],
    barrier: Callable[[], None],
) -> None:
    """Run them one after the other, and write what this rank found: a line of JSON for each,
    with its seconds."""
    gc.freeze()  # frameworks stay, and the collector need not look through them each time
    gc.set_threshold(50_000, 20, 20)  # tracing makes many objects, of which few are garbage
    with (Path(folder) / str(rank)).open("a") as log:
        for name, function in functions.items():
            problem, began = None, time.perf_counter()
            try:
                function()
                barrier()
            except Exception:
                problem = traceback.format_exc()
            seconds = round(time.perf_counter() - began, 2)
            print(json.dumps([name, problem, seconds]), file=log, flush=True)
            if problem:
                print(problem, file=sys.stderr, flush=True)
                os._exit(1)  # the others wait for messages that will not come


def read(folder: Path, rank: int, names: Sequence[str]) -> dict[str, str | None]:
    """The findings of a rank of a job: a problem or ``None`` by scenario name.  ``folder/failure``,
    if it is there, says how the job ended."""
    log, failure = folder / str(rank), folder / "failure"
    lines = log.read_text().splitlines() if log.exists() else []
    found = {name: problem for name, problem, _ in map(json.loads, lines)}
    culprits = [name for name, problem in found.items() if problem]
    if culprits:
        ended = f"not run, since {culprits[0]} failed"
    else:
        ended = failure.read_text() if failure.exists() else "the job ended early"
    if failure.exists() and found.keys() >= set(names) and not culprits:
        found[names[-1]] = ended  # all scenarios passed, and then the job ended badly
    return {name: found.get(name, ended) for name in names}

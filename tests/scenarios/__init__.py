"""What must hold in a real multi-rank job: functions that every rank runs.

``python -m scenarios FOLDER MODULE ...`` is started by ``mpirun`` or ``horovodrun``, runs the
scenarios of the modules one after the other, and leaves a line per scenario in ``FOLDER/RANK``.
With ``SCENARIOS_OVER=mpi`` the optimizers are those of ``hvd_compress.torch.mpi``.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path


def horovod_only(function: Callable[[], None]) -> Callable[[], None]:
    """What is about Horovod itself, and not about an optimizer over whatever."""
    function.horovod_only = True  # type: ignore[attr-defined]
    return function


def scenarios(
    module: str, package: str = "scenarios", *, over: str = "horovod"
) -> dict[str, Callable[[], None]]:
    """The public functions that a module defines and that take no arguments, in their order.

    ``over`` "mpi" leaves out what is about Horovod itself.
    """
    loaded = importlib.import_module(f"{package}.{module}")
    return {
        name: function
        for name, function in vars(loaded).items()
        if inspect.isfunction(function)
        and function.__module__ == loaded.__name__
        and not name.startswith("_")
        and not inspect.signature(function).parameters
        and (over == "horovod" or not hasattr(function, "horovod_only"))
    }


def read(folder: Path, rank: int, names: Sequence[str]) -> dict[str, str | None]:
    """What a rank of a job found: a problem or ``None`` by scenario name.  ``folder/failure``, if
    it is there, says how the job ended."""
    log, failure = folder / str(rank), folder / "failure"
    found = dict(map(json.loads, log.read_text().splitlines())) if log.exists() else {}
    culprits = [name for name, problem in found.items() if problem]
    if culprits:
        ended = f"not run, since {culprits[0]} failed"
    else:
        ended = failure.read_text() if failure.exists() else "the job ended early"
    if failure.exists() and found.keys() >= set(names) and not culprits:
        found[names[-1]] = ended  # all scenarios passed, and then the job ended badly
    return {name: found.get(name, ended) for name in names}

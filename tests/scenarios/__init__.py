"""What must hold in a real multi-rank job: functions that every rank runs.

``python -m scenarios FOLDER MODULE ...`` is started by ``mpirun`` or ``horovodrun``, runs the
scenarios of the modules one after the other, and leaves a line per scenario in ``FOLDER/RANK``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable


def scenarios(module: str) -> dict[str, Callable[[], None]]:
    """The public functions that a module defines and that take no arguments, in their order."""
    loaded = importlib.import_module(f"scenarios.{module}")
    return {
        name: function
        for name, function in vars(loaded).items()
        if inspect.isfunction(function)
        and function.__module__ == loaded.__name__
        and not name.startswith("_")
        and not inspect.signature(function).parameters
    }

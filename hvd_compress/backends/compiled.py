"""The compiled module of :mod:`hvd_compress.kernels`, if there is one, and how many threads it
takes."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

#: of what is called in the compiled module, and how; common.h has the same number
INTERFACE = 7


def load() -> tuple[Any, str]:
    """Return the compiled module, or ``None`` and why there is none."""
    try:
        module = importlib.import_module("hvd_compress.kernels.native")
    except ImportError as error:
        return None, str(error)
    if (found := getattr(module, "INTERFACE", None)) != INTERFACE:
        problem = f"{module.__file__} is of another version (interface {found}, not {INTERFACE})"
        return None, problem
    return module, ""


loaded = functools.cache(load)


def threads() -> int:
    if (torch := sys.modules.get("torch")) and hasattr(torch, "get_num_threads"):
        return torch.get_num_threads()
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdecimal() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

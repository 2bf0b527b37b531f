"""Programs in turn in one process, of which each needs what takes seconds to import.

The argument is a JSON list of ``[module or script, arguments...]``.  After each, a line of JSON
says its exit status, what it printed, and whether it has started MPI.  A program that becomes
another one, as those do that start their ranks, is the last.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path


def outcome(program: str, arguments: list[str]) -> tuple[int, str, bool]:
    sys.argv, printed, status = [program, *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            if program.endswith(".py"):
                sys.path.insert(0, str(Path(program).parent))  # as Python does
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
    return status, printed.getvalue(), "mpi4py.MPI" in sys.modules


if __name__ == "__main__":
    for program, *arguments in json.loads(sys.argv[1]):
        print(json.dumps(outcome(program, arguments)), flush=True)

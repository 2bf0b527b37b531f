"""Horovod's own tests without and with the drop-in, which must pass all that Horovod passes::

    git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod /tmp/horovod
    pip install mock parameterized
    python -m tests.horovods_own /tmp/horovod

The drop-in is taken as users take it: by another import line, in a copy of the files.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests import jobs

#: files in ``test/parallel``, and the variables of their jobs
SUITES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "torch": (("test_torch.py",), {}),
    "tf_keras": (("test_tensorflow2_keras.py",), {"TF_USE_LEGACY_KERAS": "1"}),
}
IMPORTS = {
    "import horovod.torch as": "import hvd_compress.torch as",
    "import horovod.tensorflow as": "import hvd_compress.tensorflow as",
    "import horovod.tensorflow.keras as": "import hvd_compress.tensorflow.keras as",
    "import horovod.keras as": "import hvd_compress.tensorflow.keras as",
}
OF_A_SUITE, OF_A_TEST = 1800, 300  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Horovod's own tests, plain and with the drop-in.")
    parser.add_argument("sources", type=Path, help="a checkout of Horovod")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-k", dest="only", default="", help="as for pytest")
    options = parser.parse_args()
    worse = 0
    for suite in options.suites:
        plain, ours = (run(options, suite, drop_in) for drop_in in (False, True))
        for name, outcomes in (("Horovod", plain), ("the drop-in", ours)):
            counts = collections.Counter(outcomes.values())
            found = ", ".join(f"{n} {' / '.join(words)}" for words, n in sorted(counts.items()))
            print(f"{suite}, {name}: {found}", flush=True)
        for test in sorted(plain.keys() | ours.keys()):
            if plain.get(test) != ours.get(test):
                worse += plain.get(test) == ("passed",)
                print(
                    f"  {test}: {plain.get(test)} with Horovod, {ours.get(test)} with the drop-in"
                )
    return min(worse, 1)


def run(options: argparse.Namespace, suite: str, drop_in: bool) -> dict[str, tuple[str, ...]]:
    """Return what became of each test on each rank; on one word if all agree."""
    names, variables = SUITES[suite]
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder, "test")
        shutil.copytree(options.sources / "test", tests)
        files = [tests / "parallel" / name for name in names]
        for file in files if drop_in else ():
            file.write_text(rewritten(file.read_text()))
        command = [*jobs.launcher(options.ranks, "mpirun"), sys.executable, "-m"]
        command += ["tests.horovods_own", "--as-rank", folder, options.only, *map(str, files)]
        paths = f"{jobs.ROOT}:{tests / 'utils'}"
        _, output = jobs.run(command, OF_A_SUITE, check=False, PYTHONPATH=paths, **variables)
        reports = [Path(folder, f"{rank}.xml") for rank in range(options.ranks)]
        if not all(report.exists() for report in reports):
            raise SystemExit(f"a rank ended without a report:\n{output[-4000:]}")
        each = [outcomes_in(report) for report in reports]
    return {
        test: tuple(sorted({own.get(test, "missing") for own in each}))
        for test in {test for own in each for test in own}
    }


def rewritten(text: str) -> str:
    """The test with the drop-in's import lines, of which there must be one at least."""
    pattern = "|".join(f"{re.escape(line)}(?= )" for line in IMPORTS)
    changed, count = re.subn(pattern, lambda found: IMPORTS[found[0]], text)
    assert count, "no import of Horovod"
    return changed


def outcomes_in(report: Path) -> dict[str, str]:
    cases: Any = ElementTree.parse(report).getroot().iter("testcase")
    return {
        f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": next(
            (kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None),
            "passed",
        )
        for case in cases
    }


def as_rank(folder: str, only: str, *files: str) -> int:
    report = Path(folder, f"{os.environ['OMPI_COMM_WORLD_RANK']}.xml")
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", f"--junitxml={report}"]
    pytest.main([*options, f"--timeout={OF_A_TEST}", "-k", only, *files])
    return 0  # what failed is in the report, and mpirun would end the other ranks


if __name__ == "__main__":
    is_rank = sys.argv[1:2] == ["--as-rank"]
    raise SystemExit(as_rank(*sys.argv[2:]) if is_rank else main())

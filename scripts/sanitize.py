"""Run tests of the compiled loops under the compiler's sanitizers: what ``make sanitize`` does.

Each set of sanitizers builds the loops into a folder of its own under ``build/sanitize``.  Every
Python that the tests start takes them from there.
"""

from __future__ import annotations

import importlib.machinery
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
#: Python imports it at its start, before anything can import the usual module
SITE = """import importlib.util, pathlib, sys

name = "hvd_compress.kernels.native"
file = pathlib.Path(__file__).parent / "MODULE"
spec = importlib.util.spec_from_file_location(name, file)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
"""


class Kind(NamedTuple):
    """Sanitizers that go together.

    Attributes:
        flags: of the compiler.
        library: which must be loaded before all others.
        options: environment variables.
        tests: files and folders.
        keyword: of the tests in them, pytest's -k.
    """

    flags: str
    library: str
    options: dict[str, str]
    tests: str
    keyword: str


KINDS = {
    "address": Kind(
        "-fsanitize=address,undefined -fno-sanitize-recover=all",
        "libasan.so",
        # Python and its packages end with memory that they have not given back.
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        "tests/kernels tests/codecs tests/wire tests/backends",
        # It bounds resident memory, and a sanitizer keeps for a while what is given back.
        "not zeros_are_never_listed",
    ),
    "thread": Kind(
        "-fsanitize=thread",
        "libtsan.so",
        {"TSAN_OPTIONS": "halt_on_error=1 report_signal_unsafe=0"},
        "tests/kernels/test_kernels.py tests/kernels/test_codecs.py",
        "threads",
    ),
}


def main() -> None:
    for name, kind in KINDS.items():
        print(f"sanitize: {kind.flags}", flush=True)
        folder = build(name, kind.flags)
        where = "from hvd_compress.kernels import native; print(native.__file__)"
        told = python(name, kind, folder, "-c", where, stdout=subprocess.PIPE, text=True).stdout
        if not Path(told.strip()).is_relative_to(folder):
            sys.exit(f"sanitize: error: Python does not take the loops from {folder}")
        # Reports are written past Python, which must not keep them.
        options = ["-q", "-n", "logical", "--maxprocesses", "8", "--capture=sys"]
        options += ["-k", kind.keyword]
        tests = kind.tests.split()
        if status := python(name, kind, folder, "-m", "pytest", *options, *tests).returncode:
            sys.exit(
                f"sanitize: error: pytest ended with status {status}: {kind.flags} found something "
                "where there is a report above, else a test failed"
            )


def python(name: str, kind: Kind, folder: Path, *arguments: str, **options: Any) -> Any:
    """Run Python with the loops of a folder; return what ``subprocess.run`` does."""
    # Python is not C++: without its library the first one does not know how to throw.
    libraries = library(kind.library), library("libstdc++.so")
    environment = {
        **os.environ,
        **kind.options,
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": str(folder),
        "PYTHONMALLOC": "malloc",
    }
    # Where a program lies differs from start to start, which one of them cannot always take.
    fixed = ["setarch", platform.machine(), "-R"] if name == "thread" else []
    command = [*fixed, sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, **options)


def library(name: str) -> str:
    """Return where a library of the compiler is."""
    command = [*COMPILER, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(
            f"sanitize: error: {COMPILER[0]} has no {name}: install what belongs to its version "
            "(apt install libasan8 libtsan2), or set CXX to another g++"
        )
    return found


def build(name: str, flags: str) -> Path:
    """Build the loops with these flags; return the folder that Python has to look into."""
    folder = BUILD / name
    environment = {**os.environ, "CC": shlex.join(COMPILER), "CFLAGS": f"{flags} -g"}
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(folder), "--build-temp", str(folder / "objects")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    # Without the module installations go on, and so does this command.
    module = f"hvd_compress/kernels/native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    sources = (ROOT / "hvd_compress" / "kernels").iterdir()
    changed = max(x.stat().st_mtime for x in sources if x.suffix in (".cpp", ".h"))
    made = folder / module
    if not made.exists() or made.stat().st_mtime < changed:
        sys.exit(f"sanitize: error: {made} could not be built")
    (folder / "sitecustomize.py").write_text(SITE.replace("MODULE", module))
    return folder


if __name__ == "__main__":
    main()

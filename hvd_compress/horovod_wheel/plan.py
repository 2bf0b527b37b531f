"""The plan of a build: its parts, its tools, and the place of the wheel.

A build takes minutes, so the wheel is cached.  Pip's own cache would pass a wheel built for PyTorch
alone to an environment that has TensorFlow as well.  Ours is keyed by all that the wheel depends on
(:func:`key_inputs`), and its wheels work in any environment with the same key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import stat
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hvd_compress.horovod_wheel import environment as env
from hvd_compress.horovod_wheel.environment import BuildError

VERSION = "0.28.1"
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
#: the first PyTorch whose headers want C++20
FIRST_CPP20 = "2.14"
#: the first PyTorch with which no build has been tried: where the extra ``horovod`` ends
FIRST_UNTRIED = "2.16"
RECIPE = 1  # goes into the key: raise it whenever the wheel comes out different
FRAMEWORKS = ("torch", "tensorflow")
GPU = ("none", "nccl", "mpi")
BUILD_NEEDS = {"pip": "pip", "setuptools": "setuptools", "wheel": "wheel"}
RUN_NEEDS = {
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "setuptools": "setuptools",  # horovodrun imports distutils, which Python 3.12 took away
}
# Variables of the user that Horovod's build reads.
BUILD_VARIABLES = re.compile(
    r"HOROVOD_(WITH|BUILD|GPU|NCCL|CUDA|CPU_OPERATIONS|ROCM|ALLOW_MIXED)|(C|CXX|CPP|LD)FLAGS$|MPI_"
)


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """The build of a wheel: its parts, its tools, and the place where it is kept."""

    compiler: list[str]
    gpu: str
    jobs: int
    inputs: dict[str, Any]
    folder: Path

    @property
    def standard(self) -> int:
        """The standard of C++ in which all is compiled."""
        return standard_of(self.inputs["torch"] and self.inputs["torch"]["version"])

    @property
    def nccl(self) -> Path | None:
        """The folder of PyTorch's own NCCL, if it is what moves GPU tensors."""
        return nccl_of_torch() if "nccl" in self.inputs else None

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def cached(self) -> Path | None:
        """The wheel in the cache, if there is one."""
        return next(iter(sorted(self.folder.glob("horovod-*.whl"))), None)

    @property
    def wheel(self) -> Path | None:
        """The same, if it is still what was built."""
        wheel = self.cached
        if wheel is None or not record_of(wheel).exists():
            return None
        return wheel if record_of(wheel).read_text() == digest_of(wheel) else None

    def describe(self, rebuild: bool = False) -> str:
        frameworks = [f"{name} {self.inputs[name]['version']}" for name in self.frameworks]
        if self.wheel and not rebuild:
            work = "install the cached wheel, some seconds"
        else:
            work = f"build with {self.jobs} jobs, about {1 + round(7 / self.jobs)} minutes"
            if self.cached and not rebuild:
                work += "; the cached wheel is damaged, or has no recorded hash"
        rows = {
            "frameworks": ", ".join(frameworks),
            "MPI": self.inputs["mpi"]["version"],
            "compiler": self.inputs["compiler"],
            "gpu": self.gpu + " (the library of PyTorch)" * ("nccl" in self.inputs),
            "cache": str(self.folder),
            "work": work,
        }
        lines = [f"  {name:<10} {text}" for name, text in rows.items()]
        return "\n".join([f"Horovod {VERSION} for {sys.prefix}", *lines])

    @property
    def frameworks(self) -> list[str]:
        return [name for name in FRAMEWORKS if self.inputs[name]]


def standard_of(torch: str | None) -> int:
    """Return the standard of C++ that the headers of that version of PyTorch want."""
    return 20 if torch and _release(torch) >= _release(FIRST_CPP20) else 17


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def untried(torch: str | None) -> str | None:
    """Return what is to be known of a build with a PyTorch that is newer than those tried."""
    if torch is None or _release(torch) < _release(FIRST_UNTRIED):
        return None
    return f"Horovod {VERSION} has not been built with PyTorch {torch} yet"


def record_of(wheel: Path) -> Path:
    """Return the file in which the hash of a wheel in the cache is kept."""
    return wheel.with_name(f"{wheel.name}.sha256")


def digest_of(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def make_plan(gpu: str = "none", jobs: int | None = None) -> BuildPlan:
    """Look at the environment; raise :class:`BuildError` for the first thing missing."""
    if not any(importlib.util.find_spec(name) for name in FRAMEWORKS):
        raise BuildError(
            "neither torch nor tensorflow is installed: pip install torch (or tensorflow-cpu) first"
        )
    env.require_packages(BUILD_NEEDS, "building Horovod")
    env.require_packages(RUN_NEEDS, "Horovod")
    compiler = env.compiler(standard_of(env.version_of("torch")))
    if "HOROVOD_CMAKE" not in os.environ:
        env.require_tool("cmake", "install CMake 3.13 or newer: pip install cmake")
    env.require_tool("make", "install make (Debian, Ubuntu: apt install make)")
    env.require_tool("mpicxx", env.INSTALL_MPI)
    env.require_tool("mpirun", env.INSTALL_MPI)
    if gpu != "none":
        home = env.cuda_home()
        if home is None:
            raise BuildError(
                f"--gpu {gpu} needs the CUDA toolkit, but nvcc is neither on PATH nor in "
                "/usr/local/cuda/bin: install it, or set HOROVOD_CUDA_HOME"
            )
        headers = [home / "include" / "nccl.h", Path("/usr/include/nccl.h")]
        found = _names_nccl() or nccl_of_torch() or any(header.exists() for header in headers)
        if gpu == "nccl" and not found:
            raise BuildError(
                "--gpu nccl needs NCCL, but PyTorch brings none along, and nccl.h is neither in "
                f"{home}/include nor in /usr/include: install libnccl-dev, or set HOROVOD_NCCL_HOME"
            )
    inputs = key_inputs(compiler, gpu)
    if gpu != "none" and inputs["torch"] and not inputs["torch"]["cuda"]:
        raise BuildError(
            f"--gpu {gpu} needs PyTorch with CUDA, but {inputs['torch']['version']} has none"
        )
    if gpu == "none" and inputs["torch"] and inputs["torch"]["cuda"]:
        check_toolkit_of(
            inputs["torch"],
            env.ask_python(
                "import json\n"
                "from torch.utils.cpp_extension import CUDA_HOME\n"
                "print(json.dumps(CUDA_HOME))"
            ),
        )
    folder = cache_root() / f"horovod-{VERSION}-{key_of(inputs)}"
    check_private(folder)
    if jobs is None:  # as many as this process may use, where the system tells
        here = hasattr(os, "sched_getaffinity")
        jobs = len(os.sched_getaffinity(0)) if here else os.cpu_count() or 1
    return BuildPlan(compiler, gpu, jobs, inputs, folder)


def _names_nccl() -> bool:
    return bool({"HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE"} & set(os.environ))


def nccl_of_torch() -> Path | None:
    """Return the folder of the NCCL that PyTorch's wheels for CUDA bring along.  PyTorch loads it,
    and a process should not have two."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    places = map(Path, (spec and spec.submodule_search_locations) or [])
    needed = ("include/nccl.h", "lib/libnccl.so.2")
    return next((p for p in places if all((p / name).exists() for name in needed)), None)


def check_toolkit_of(torch: dict[str, Any], home: str | None) -> None:
    """Raise unless ``home`` is a CUDA toolkit, or nothing.

    If PyTorch is built for CUDA and thinks that the toolkit is there, Horovod's build takes it,
    whatever moves GPU tensors.
    """
    if home is None:
        return
    # A compiler alone may be left of another installation.
    for needed in ("bin/nvcc", "include/cuda_runtime.h"):
        if not Path(home, needed).exists():
            raise BuildError(
                f"PyTorch {torch['version']} is built for CUDA {torch['cuda']} and looks for the "
                f"toolkit in {home}, so that Horovod's build wants it there, but {home}/{needed} "
                f"is missing: install the toolkit of CUDA {torch['cuda']}, set CUDA_HOME to its "
                "folder, or install PyTorch's build for CPUs: https://pytorch.org/get-started/locally"
            )


def check_private(folder: Path) -> None:
    """Raise if anybody else, but for root, could have put a wheel into a folder of the cache.

    Its hash lies next to it, so whoever can write there writes both.
    """
    for path in (cache_root(), folder, *folder.glob("horovod-*.whl*")):
        if not path.exists():
            continue
        found = path.stat()
        others = found.st_mode & 0o022
        if path == cache_root() and found.st_mode & stat.S_ISVTX:
            others = 0  # nobody replaces what others have put into it
        if found.st_uid not in (0, os.geteuid()):
            problem, cure = "belongs to somebody else", ""
        elif others:
            problem, cure = "can be written by others", f"chmod go-w {shlex.quote(str(path))}, or "
        else:
            continue
        raise BuildError(
            f"{path} {problem}, and what is in the cache of wheels is installed: {cure}set "
            "HVD_COMPRESS_CACHE to a folder of your own"
        )


def cache_root() -> Path:
    """Return HVD_COMPRESS_CACHE, or hvd_compress in the user's cache folder."""
    if named := os.environ.get("HVD_COMPRESS_CACHE"):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_compress"


def key_inputs(compiler: list[str], gpu: str) -> dict[str, Any]:
    """Return everything that the wheel depends on.

    Places inside the environment are written relative to it, as the wheel's RUNPATH is.
    """
    cuda = env.cuda_home() if gpu != "none" else None
    own = nccl_of_torch() if gpu == "nccl" and not _names_nccl() else None
    chosen = {k: v for k, v in sorted(os.environ.items()) if BUILD_VARIABLES.match(k)}
    installed: dict[str, dict[str, Any] | None] = {}
    for name in FRAMEWORKS:
        spec = importlib.util.find_spec(name)
        installed[name] = None
        if spec is not None:
            installed[name] = {"version": env.version_of(name), "where": _relative(spec.origin)}
    if torch := installed["torch"]:
        abi = env.ask_python(
            "import json, torch\n"
            "print(json.dumps([torch.compiled_with_cxx11_abi(), torch.version.cuda]))"
        )
        if abi is None:
            raise BuildError(
                f"PyTorch {torch['version']} is installed but cannot be imported; "
                'see what `python -c "import torch"` says'
            )
        torch.update(cxx11_abi=abi[0], cuda=abi[1])
    return {
        "horovod": VERSION,
        "recipe": RECIPE,
        "python": sysconfig.get_config_var("SOABI"),
        "platform": [sysconfig.get_platform(), *platform.libc_ver()],
        "layout": up_to_prefix(),
        **installed,
        "mpi": {"version": env.mpi_version(), "mpicxx": _relative(env.find_tool("mpicxx"))},
        "compiler": env.compiler_version(compiler),
        "gpu": gpu,
        "cuda": env.output_of([str(cuda / "bin" / "nvcc"), "--version"]) if cuda else None,
        "variables": {name: _relative(value) for name, value in chosen.items()},
        **({"nccl": _relative(str(own))} if own else {}),
    }


def key_of(inputs: dict[str, Any]) -> str:
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _relative(text: str | None) -> str | None:
    return text and text.replace(sys.prefix + os.sep, "{prefix}" + os.sep)


def up_to_prefix() -> str:
    """Return the relative path from the folder of Horovod's libraries up to the environment."""
    folder = Path(sysconfig.get_path("platlib"), "horovod", "torch")
    return os.path.relpath(sys.prefix, folder)

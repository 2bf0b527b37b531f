"""``hvd-compress doctor``: what is installed, how Horovod was built, problems and their fixes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvd_compress import kernels
from hvd_compress.horovod_wheel import environment as env
from hvd_compress.horovod_wheel.build import built_with
from hvd_compress.horovod_wheel.plan import (
    FIRST_UNTRIED,
    FRAMEWORKS,
    RUN_NEEDS,
    standard_of,
    untried,
)

#: what one may want to work: the module that it begins with, and how to get that
WANTED = {
    "torch": ("torch", "pip install torch"),
    "tensorflow": ("tensorflow", "pip install tensorflow-cpu"),
    "mpi": ("mpi4py", env.INSTALL_MPI),
}
ROOT = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
# One rank prints: mpirun may mix the lines of two.
COUNT_RANKS = """from mpi4py import MPI
size = MPI.COMM_WORLD.allreduce(1)
if MPI.COMM_WORLD.rank == 0:
    print(size)"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report.  ``mark``: "ok", "problem", "note" (works, but ...) or "-" (absent)."""

    mark: str
    name: str
    text: str
    fix: str = ""


def doctor(wanted: Sequence[str] = (), as_json: bool = False) -> int:
    """Print the report, and return 1 if there is a problem, else 0.

    Args:
        wanted: of ``WANTED``, what has to work; if empty, all that is installed, or else PyTorch.
        as_json: print one object, when all is known, instead of lines.
    """
    goal = Goal(wanted)
    sections = [("Packages", _packages), ("Horovod", _horovod), ("MPI", _mpi)]
    if goal.frameworks:
        sections.append(("To build Horovod", _build_tools))
    findings = []
    for title, section in sections:
        if not as_json:
            print(title, flush=True)
        for finding in section(goal):
            findings.append({"section": title, **dataclasses.asdict(finding)})
            if as_json:
                continue
            print(f"  {finding.mark:<8} {finding.name:<18} {finding.text}".rstrip(), flush=True)
            if finding.fix:
                print(f"  {'':<8} {'':<18} -> {finding.fix}")
    problems = sum(finding["mark"] == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"for": goal.names, "problems": problems, "findings": findings}, indent=2))
        return 1 if problems else 0
    verdict = f"{problems} problem{'s' * (problems != 1)}" if problems else "all is well"
    print(f"{verdict} for {', '.join(goal.names)}")
    return 1 if problems else 0


class Goal:
    """The parts that have to work: ``names`` of ``WANTED``, and the ``frameworks`` among them."""

    def __init__(self, wanted: Sequence[str]) -> None:
        installed = [name for name, (module, _) in WANTED.items() if env.version_of(module)]
        self.names = [name for name in WANTED if name in wanted] or installed or ["torch"]
        self.frameworks = [name for name in FRAMEWORKS if name in self.names]
        # PyTorch trains over MPI and under DistributedDataParallel as well.
        self.can_do_without_horovod = not wanted and self.names == ["torch", "mpi"]


def _packages(goal: Goal) -> Iterator[Finding]:
    yield Finding("ok", "Python", f"{platform.python_version()}  {sys.executable}")
    cures = dict(WANTED[name] for name in goal.names)
    for module in ("hvd_compress", "numpy", *FRAMEWORKS, "keras", "mpi4py"):
        version, providers = env.version_of(module), env.providers(module)
        if len(providers) > 1:
            text = f"{' and '.join(providers)} are installed over each other"
            one = f"pip uninstall -y {' '.join(providers)} && pip install {min(providers, key=len)}"
            yield Finding("problem", module, text, one)
        elif version:
            yield Finding("ok", module, version)
        else:
            mark = "problem" if module in cures else "-"
            yield Finding(mark, module, "not installed", cures.get(module, ""))
    if kernels.native is not None:
        yield Finding("ok", "loops", "compiled")
    else:
        text = f"not compiled ({kernels.problem}): NumPy serves, several times as slow"
        yield Finding("note", "loops", text, kernels.INSTALL)


def _horovod(goal: Goal) -> Iterator[Finding]:
    version, torch = env.version_of("horovod"), env.version_of("torch")
    is_new = "torch" in goal.frameworks and _built_against().get("pytorch") != torch
    if is_new and (text := untried(torch)):
        yield Finding("note", "torch", text, f'pip install "torch<{FIRST_UNTRIED}"')
    if version is None:
        if not goal.frameworks:
            yield Finding("-", "horovod", "not installed")
        elif goal.can_do_without_horovod:
            text = "not installed: hvd_compress.torch.mpi and ddp_hook do without it"
            yield Finding("note", "horovod", text, env.COMMAND)
        else:
            yield Finding("problem", "horovod", "not installed", env.COMMAND)
        return
    yield Finding("ok", "horovod", version)
    try:
        env.require_packages(RUN_NEEDS, "Horovod")
    except env.BuildError as problem:
        text, _, fix = str(problem).partition(": ")
        yield Finding("problem", "requirements", text, fix)
    frameworks = [name for name in goal.frameworks if env.version_of(name)]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(built_with, frameworks)
        for name, answer in zip(frameworks, answers, strict=True):
            yield _binding(name, answer)


def _binding(framework: str, answer: dict[str, bool] | None) -> Finding:
    name, version = f"horovod.{framework}", env.version_of(framework)
    known = _built_against().get({"torch": "pytorch"}.get(framework, framework))
    if known is None:
        return Finding("problem", name, "not built", env.COMMAND)
    if known != version:
        text = f"built against {framework} {known}, but {version} is installed"
        return Finding("problem", name, text, env.COMMAND)
    if answer is None:
        return Finding("problem", name, "cannot be imported", f"{env.COMMAND} --rebuild")
    labels = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "cuda": "CUDA", "rocm": "ROCm"}
    built = ", ".join(f"{label} {'yes' if answer[k] else 'no'}" for k, label in labels.items())
    if not (answer["mpi"] or answer["gloo"]):
        return Finding("problem", name, built, f"{env.COMMAND} --rebuild")
    return Finding("ok", name, built)


def _built_against() -> dict[str, str]:
    """Return the versions of frameworks that Horovod noted when it was built."""
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder, "metadata.json")
        if file.exists():
            return dict(json.loads(file.read_text()))
    return {}


def _mpi(goal: Goal) -> Iterator[Finding]:
    version, path = env.mpi_version(), env.find_tool("mpirun")
    if path is None:
        yield Finding("problem", "mpirun", "not found", env.INSTALL_MPI)
        return
    if version is None:
        yield Finding("problem", "mpirun", f"{path} does not run", _prefix_advice())
        return
    if goal.frameworks and env.too_new_for_horovodrun(version):
        text = f"{version}  {path}: horovodrun does not work with it"
        yield Finding("problem", "mpirun", text, env.INSTALL_MPI)
    else:
        yield Finding("ok", "mpirun", f"{version}  {path}")
    if version.startswith("Open MPI"):
        text = env.output_of(["ompi_info", "--parsable", "--all"]) or ""
        found = re.search(r"built_with_cuda_support:value:(\w+)", text)
        aware = "no (Horovod copies GPU tensors to the host for MPI)"
        if not found:
            aware = "unknown (ompi_info does not say)"
        elif found[1] == "true":
            aware = "yes"
        yield Finding("ok", "CUDA-aware", aware)
    if env.version_of("mpi4py"):
        yield from _mpi4py(version)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= set(os.environ)
    if version.startswith("Open MPI") and hasattr(os, "geteuid") and os.geteuid() == 0:
        if allowed:
            yield Finding("ok", "root", "mpirun may run as root")
        else:
            text = "mpirun refuses to run as root, unless horovodrun starts it"
            yield Finding("note", "root", text, ROOT)


def _mpi4py(mpirun: str) -> Iterator[Finding]:
    library = env.ask_python(
        "import json, mpi4py\n"
        "mpi4py.rc.initialize = mpi4py.rc.finalize = False\n"
        "from mpi4py import MPI\n"
        "print(json.dumps(MPI.Get_library_version().split(',')[0]))"
    )
    if library is None:
        yield Finding("problem", "mpi4py", "cannot load an MPI library", env.INSTALL_MPI)
        return
    if library.replace(" v", " ").startswith("Open MPI") and library.replace(" v", " ") != mpirun:
        text = f"uses {library}, but mpirun is {mpirun}: ranks will not find each other"
        yield Finding("problem", "mpi4py", text, "put one MPI first on PATH and LD_LIBRARY_PATH")
        return
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launch = ["mpirun", "-np", "2"] + ["--oversubscribe"] * mpirun.startswith("Open MPI")
    answer = env.output_of([*launch, sys.executable, "-c", COUNT_RANKS], **as_root)
    if (answer or "").strip() != "2":
        yield Finding("problem", "two ranks", "an allreduce under mpirun failed", _prefix_advice())
        return
    yield Finding("ok", "two ranks", f"an allreduce under mpirun works ({library})")
    ours = f"import hvd_compress.mpi\n{COUNT_RANKS}"
    if env.output_of([sys.executable, "-c", COUNT_RANKS]) is not None:
        yield Finding("ok", "one process", "MPI starts without mpirun")
    elif env.output_of([sys.executable, "-c", ours]) is not None:
        text = "MPI starts without mpirun behind `import hvd_compress.mpi`, .torch or .tensorflow"
        yield Finding("ok", "one process", text, "other programs: mpirun -n 1 python ...")
    else:
        text = "MPI does not start without mpirun"
        yield Finding("note", "one process", text, _prefix_advice())


def _prefix_advice() -> str:
    if "OPAL_PREFIX" in os.environ:
        return f"OPAL_PREFIX is {os.environ['OPAL_PREFIX']}; try: unset OPAL_PREFIX"
    return "see what it says: mpirun -n 2 hostname"


def _build_tools(goal: Goal) -> Iterator[Finding]:
    absent: dict[str, Any] = {"mark": "-", "text": "not found (needed only to build Horovod)"}
    standard = standard_of(env.version_of("torch"))
    name = f"C++{standard} compiler"
    try:
        yield Finding("ok", name, env.compiler_version(env.compiler(standard)))
    except env.BuildError as problem:
        yield Finding("-", name, str(problem))
    for name in ("cmake", "make"):
        version = (env.output_of([name, "--version"]) or "").partition("\n")[0]
        yield Finding("ok", name, version) if version else Finding(name=name, **absent)
    home = env.cuda_home()
    nvcc = f"{home}/bin/nvcc" if home else "not found (needed only for --gpu)"
    yield Finding("ok" if home else "-", "CUDA toolkit", nvcc)

"""Make .venv: what ``make setup`` runs, on the standard library alone.

The steps are skipped as long as nothing they depend on has changed.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MPICH = VENV / "mpich"
TRITON = VENV / "triton"
ZENSICAL = VENV / "docs"
STAMP = VENV / "setup.stamp"
LOG = VENV / "setup.log"
OLDEST, NEWEST = (3, 10), (3, 13)
#: files, and patterns of files, that the environment depends on
INPUTS = [
    "pyproject.toml",
    "setup.py",
    "hvd_compress/kernels/*.cpp",
    "hvd_compress/kernels/*.h",
    "constraints.txt",
    "constraints-docs.txt",
    "constraints-mpich.txt",
    "constraints-triton.txt",
    "scripts/setup.py",
    "hvd_compress/horovod_wheel/*.py",
]


def main() -> None:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        fail(f"Python 3.10 to 3.13 is needed, this is {sys.version.split()[0]}: make PYTHON=...")
    # A second start must be quick, and an environment that was moved is broken: its scripts hold
    # its path.  The stamp tells.
    stamp = f"{ROOT}\n{digest_of_inputs()}\n"
    written = STAMP.read_text() if STAMP.exists() else f"{ROOT}\n"
    usable = written.startswith(f"{ROOT}\n") and version_of(PYTHON) == version()
    if usable and written == stamp:
        return
    # What takes no time to find out should not be found out after minutes.
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(shlex.split(name)[0]) for name in compilers):
        fail("no C++ compiler: install g++ 9 or newer (apt install g++), or set CXX")
    if not shutil.which("cmake"):
        fail("cmake is missing: install CMake 3.13 or newer (pip install cmake, or apt)")

    if not usable:
        base = getattr(sys, "_base_executable", sys.executable)
        say("1/8", f".venv for Python {version()}")
        done = subprocess.run([base, "-m", "venv", "--clear", str(VENV)], capture_output=True)
        if done.returncode:
            fail("no virtual environment: install python3-venv, or another Python: make PYTHON=...")
    LOG.write_text("")
    pip = [str(PYTHON), "-m", "pip"]
    install = [*pip, "install", "--disable-pip-version-check"]
    pinned = ["--require-hashes", "--no-deps", "--requirement"]
    if not is_installed("torch", "constraints.txt", VENV):
        install_pytorch(pip, install)
    logged("3/8", "the other pinned packages", [*install, *pinned, "constraints.txt"])
    # What it needs is there, but for the libraries of a CUDA build of PyTorch.
    extras = "torch,tensorflow-cpu,horovod,integrations,examples,dev"
    ours = ["--no-build-isolation", "--editable", f".[{extras}]"]
    logged("4/8", "hvd_compress", [*install, *ours])
    if not is_installed("mpich", "constraints-mpich.txt", MPICH):
        # In a folder of its own: the programs of both MPIs have the same names.  pip would only
        # lay a new version over the old one there.
        shutil.rmtree(MPICH, ignore_errors=True)
        apart = ["--ignore-installed", "--prefix", str(MPICH)]
        command = [*install, *apart, *pinned, "constraints-mpich.txt"]
        logged("5/8", "MPICH beside Open MPI, for the tests", command)
    if not is_installed("triton", "constraints-triton.txt", TRITON, ""):
        # Its LLVM and TensorFlow's end a process that loads both in the wrong order: torch imports
        # Triton wherever it finds it.
        shutil.rmtree(TRITON, ignore_errors=True)
        command = [*install, "--target", str(TRITON), *pinned, "constraints-triton.txt"]
        logged("6/8", "Triton apart, for the tests", command)
    if not is_installed("zensical", "constraints-docs.txt", ZENSICAL, ""):
        install_zensical([*install, "--target", str(ZENSICAL), *pinned])
    say("8/8", "Horovod")
    if subprocess.run([str(VENV / "bin" / "hvd-compress-horovod")], cwd=ROOT).returncode:
        sys.exit(1)
    STAMP.write_text(stamp)


def install_zensical(install: list) -> None:
    """Install the builder of the site into a folder of its own, since TensorBoard wants some of the
    same packages.  Only `make docs` and its test need it."""
    if sys.version_info < (3, 11):
        say("7/8", "no Zensical for the site, which needs Python 3.11")
        return
    shutil.rmtree(ZENSICAL, ignore_errors=True)
    command = [*install, "constraints-docs.txt"]
    logged("7/8", "Zensical apart, for the site", command, is_needed=False)


def install_pytorch(pip: list, install: list) -> None:
    """The wheel that pip finds for the pinned version, if its hash is recorded.

    Builds for the CPU and for each CUDA have the same version, in indexes of their own.  Asked for
    hashes, pip would take that of the common index, whatever index it is told to prefer.
    """
    with tempfile.TemporaryDirectory(dir=VENV) as folder:
        download = [*pip, "download", "--disable-pip-version-check", "--no-deps", "--dest", folder]
        name = f"torch=={pinned_version('torch', 'constraints.txt')}"
        logged("2/8", "PyTorch, download", [*download, name])
        [wheel] = Path(folder).iterdir()
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest not in (ROOT / "constraints.txt").read_text():
            if "+" not in wheel.name:
                fail(f"{wheel.name} is not the published file: look at `pip config list`")
            say("2/8", f"no hash is recorded for {wheel.name}, which is from an index of its own")
        logged("2/8", "PyTorch", [*install, "--no-deps", str(wheel)])


def digest_of_inputs() -> str:
    digest = hashlib.sha256(version().encode())
    for pattern in INPUTS:
        files = sorted(ROOT.glob(pattern))
        if not files:
            fail(f"{pattern} is missing: the checkout is not whole")
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def pinned_version(name: str, pins: str) -> str:
    return re.search(rf"^{name}==(\S+)", (ROOT / pins).read_text(), re.MULTILINE)[1]


def is_installed(
    name: str, pins: str, prefix: Path, packages: str = "lib/python*/site-packages/"
) -> bool:
    """The pinned version is there, to its last file; jobs may be running on it."""
    folder = f"{name}-{pinned_version(name, pins)}*.dist-info"
    return any(prefix.glob(f"{packages}{folder}/RECORD"))


def version() -> str:
    return "{}.{}".format(*sys.version_info[:2])


def version_of(python: Path) -> str:
    """Version of the interpreter of an environment that is whole, else an empty text."""
    code = "import pip, sys; print('{}.{}'.format(*sys.version_info[:2]))"
    if not python.exists():
        return ""
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True).stdout.strip()


def logged(step: str, what: str, command: list, is_needed: bool = True) -> bool:
    """Run a command with its output in the log, and return whether it has succeeded.  If it fails
    and is needed, show the end of the log and end."""
    say(step, what, end=" ... ")
    start = time.monotonic()
    with LOG.open("a") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    print(f"{time.monotonic() - start:.0f} s" if done.returncode == 0 else "failed", flush=True)
    if done.returncode and is_needed:
        print("\n".join(LOG.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
        fail(f"{what} could not be installed; the whole log: {LOG}")
    return done.returncode == 0


def say(step: str, what: str, end: str = "\n") -> None:
    print(f"setup {step}: {what}", end=end, flush=True)


def fail(message: str) -> None:
    sys.exit(f"setup: error: {message}")


if __name__ == "__main__":
    main()

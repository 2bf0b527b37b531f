"""A release is whole: an sdist, and the wheel that is built from it, with a compiler and
without one, installed where nothing else is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest

from hvd_compress.kernels import native
from tests.project import PROJECT

ROOT = Path(__file__).resolve().parents[2]
#: folders of the repository, and the packages that they are installed as
HOMES = {
    "hvd_compress": "hvd_compress",
    "torch_impl": "hvd_compress/torch",
    "tf": "hvd_compress/tensorflow",
}
#: endings of what packages have beside Python files
DATA = {".cpp", ".h", ".json", ".typed"}
VERSION: str = PROJECT["version"]
SNIPPET = """
import numpy as np
import hvd_compress
from hvd_compress import kernels
from hvd_compress.engines.local import LocalEngine
from hvd_compress.reduce import Reducer

gradient = np.arange(100, dtype=np.float32)
average = Reducer("topk:density=0.02", LocalEngine()).reduce({"w": gradient})["w"]
print(np.flatnonzero(average).tolist(), kernels.is_compiled(), hvd_compress.__version__)
print(hvd_compress.__file__)
"""


def files() -> dict[str, str]:
    """The files of packages: paths in the repository, and in what is installed."""
    return {
        f"{folder}/{file.relative_to(ROOT / folder)}": f"{home}/{file.relative_to(ROOT / folder)}"
        for folder, home in HOMES.items()
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", *DATA} and "__pycache__" not in file.parts
    }


def run(command: list, folder: Path, **env: str) -> subprocess.CompletedProcess:
    """A command, with none of this process's variables but these."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "CCACHE_DIR") if key in os.environ}
    command = list(map(str, command))
    done = subprocess.run(command, cwd=folder, env=kept | env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
#: what is installed is built from what lies here
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    skip = ignore_patterns(
        ".venv", ".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    source = copytree(ROOT, folder / "source", ignore=skip)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", code], source)
    return folder / f"hvd_compress-{VERSION}.tar.gz"


#: of the sources in the sdist it says whether they are whole; what they make is there
IN_PLACE_OF_A_COMPILER = """#!/bin/sh
case " $* " in
*" -c "*) exec c++ "$@" -E ;;
esac
while [ "$1" != -o ]; do shift; done
exec cp "{loops}" "$2"
"""
#: to optimise takes most of a minute, and nothing here asks for speed, or for symbols
WITHOUT_OPTIMISING = '#!/bin/sh\nexec c++ "$@" -O0 -g0\n'


@pytest.fixture(scope="module")
def wheel(sdist, request):
    """With --full it is compiled; otherwise its loops are those that ``make setup`` has compiled
    of the same sources."""
    compiler = sdist.parent / "compiler"
    if native is None or request.config.getoption("--full"):
        compiler.write_text(WITHOUT_OPTIMISING)
    else:
        compiler.write_text(IN_PLACE_OF_A_COMPILER.format(loops=native.__file__))
    compiler.chmod(0o755)
    env = {"CC": str(compiler), "CXX": str(compiler)}
    run([*PIP, "wheel", sdist, *OFFLINE, "--wheel-dir", sdist.parent], sdist.parent, **env)
    [wheel] = sdist.parent.glob("hvd_compress-*.whl")
    return wheel


class Empty:
    """An environment that has NumPy and nothing else."""

    def __init__(self, folder: Path) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
        [self.site] = folder.glob("lib/python*/site-packages")
        of_numpy = Path(np.__file__).parent
        for part in of_numpy.parent.glob("numpy*"):  # with its libraries
            (self.site / part.name).symlink_to(part)
        self.folder, self.python = folder, folder / "bin" / "python"

    def files(self) -> set[str]:
        return {str(file.relative_to(self.folder)) for file in self.folder.rglob("*")}

    def pip(self, *arguments: object) -> subprocess.CompletedProcess:
        return run([*PIP, "--python", self.python, *arguments], self.folder.parent)

    def run(self, *arguments: object) -> subprocess.CompletedProcess:
        return run([self.python, *arguments], self.folder.parent)


def an_sdist_has_what_a_build_needs_and_no_more(sdist, wheel, folder):
    with tarfile.open(sdist) as archive:
        packed = {each.name.partition("/")[2] for each in archive if each.isfile()}
    packed = {name for name in packed if not name.startswith("hvd_compress.egg-info")}
    beside = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"}
    beside |= {"SECURITY.md", "pyproject.toml", "setup.cfg", "setup.py"}
    assert packed == files().keys() | beside


def a_wheel_in_an_empty_environment(sdist, wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    about = f"hvd_compress-{VERSION}.dist-info/"
    [loops] = [name for name in packed if name.endswith(".so")]
    assert loops.startswith("hvd_compress/kernels/native.")
    # Nothing that runs at every start of Python, no tests, and nothing beside the package.
    assert {name for name in packed if not name.startswith(about)} == {*files().values(), loops}
    assert f"{about}licenses/LICENSE" in packed
    empty = Empty(folder / "empty")
    before = empty.files()
    empty.pip("install", "--no-deps", "--no-index", wheel)
    done = empty.run("-c", SNIPPET)
    assert done.stdout.splitlines()[0] == f"[98, 99] True {VERSION}"
    assert Path(done.stdout.splitlines()[1]).is_relative_to(empty.site)
    assert not done.stderr
    command = [empty.folder / "bin" / "hvd-compress"]
    assert run([*command, "--version"], folder).stdout.split()[-1] == VERSION
    # Both read files that are no modules.
    assert "powersgd" in run([*command, "methods"], folder).stdout
    advice = ["advise", "--model", "resnet50", "--ranks", "4", "--bandwidth", "1gbit"]
    assert "Is the network your bottleneck? Yes" in run([*command, *advice], folder).stdout
    empty.pip("uninstall", "--yes", "hvd_compress")
    assert {name for name in empty.files() - before if "numpy" not in name} == set()


def without_a_compiler_numpy_serves_and_says_so(sdist, wheel, folder):
    run([*PIP, "wheel", sdist, *OFFLINE, "-w", folder], folder, CC="false", CXX="false")
    [wheel] = folder.glob("*.whl")  # another one
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    empty = Empty(folder / "empty")
    empty.pip("install", "--no-deps", "--no-index", wheel)
    done = empty.run("-c", SNIPPET)
    assert done.stdout.splitlines()[0] == f"[98, 99] False {VERSION}"
    assert "NumPy serves" in done.stderr
    assert "install a C++ compiler" in done.stderr
    found = empty.run("-m", "hvd_compress", "methods").stdout
    assert "powersgd" in found


def the_drop_ins_are_in_the_wheel(sdist, wheel, folder):
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import hvd_compress.torch as h, hvd_compress, torch\n"
        "print(h.__file__, hvd_compress.__file__, h.DGC())"
    )
    alone = ["-P"] if sys.version_info >= (3, 11) else []
    done = run([sys.executable, *alone, "-c", code], folder, PYTHONPATH=str(site))
    for file in done.stdout.split()[:2]:
        assert Path(file).is_relative_to(site)


RELEASED = (
    an_sdist_has_what_a_build_needs_and_no_more,
    a_wheel_in_an_empty_environment,
    without_a_compiler_numpy_serves_and_says_so,
    the_drop_ins_are_in_the_wheel,
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "holds", [pytest.param(each, id=f"released@{each.__name__}") for each in RELEASED]
)
def test_what_is_released(sdist, wheel, tmp_path, holds):
    """In one process, which builds it once."""
    holds(sdist, wheel, tmp_path)


def test_the_version_is_that_of_pyproject_everywhere():
    assert re.search(rf"^version: {re.escape(VERSION)}$", citation(), re.MULTILINE)
    [first, *_] = re.findall(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == VERSION


def citation() -> str:
    return (ROOT / "CITATION.cff").read_text()

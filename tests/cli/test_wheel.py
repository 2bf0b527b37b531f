"""The built wheel is whole: it holds the packages that live elsewhere in the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).resolve().parents[2]


def copy_of_the_sources(folder: Path) -> Path:
    skip = ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", ".*_cache")
    return copytree(ROOT, folder / "source", ignore=skip)


@pytest.mark.timeout(200)
def test_the_wheel_works_from_another_folder(tmp_path):
    source, wheels, site = copy_of_the_sources(tmp_path), tmp_path / "wheels", tmp_path / "site"
    build = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-index"]
    subprocess.run(
        [*build, "--no-build-isolation", "-w", str(wheels), "-q"], check=True, timeout=150
    )
    [wheel] = wheels.glob("hvd_compress-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        archive.extractall(site)
    homes = {
        "hvd_compress": "hvd_compress",
        "torch_impl": "hvd_compress/torch",
        "tf": "hvd_compress/tensorflow",
    }
    for folder, package in homes.items():
        for file in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{file.relative_to(ROOT / folder)}" in packed
    assert "hvd_compress/py.typed" in packed
    # Nothing that runs at every start of Python, whatever that is started for.
    assert not [name for name in packed if name.endswith(".pth")]
    code = (
        "import hvd_compress.torch as h, hvd_compress, torch\n"
        "print(h.__file__, hvd_compress.__file__, h.DGC())"
    )
    command = (
        [sys.executable, "-P", "-c", code]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-c", code]
    )
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, *_ = done.stdout.split()
    assert Path(first).is_relative_to(site)
    assert Path(second).is_relative_to(site)

"""The command ``hvd-compress``, run as its users run it."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy
import pytest

import hvd_compress
from hvd_compress import config, environment, methods
from hvd_compress.cli import main

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def command(*arguments, python=sys.executable, **variables):
    return subprocess.run(
        [python, "-m", "hvd_compress", *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The Python of an environment that has NumPy and this package, nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in Path(numpy.__file__).parents[1].glob("numpy*"):
        (site / entry.name).symlink_to(entry)
    (site / "checkout.pth").write_text(str(Path(hvd_compress.__file__).parents[1]))
    return folder / "bin" / "python"


def test_methods_lists_every_method():
    done = command("methods")  # a process of its own: tests register methods too
    assert (done.returncode, done.stderr) == (0, "")
    lines = filter(None, done.stdout.splitlines())
    rows = {name: columns for name, *columns in map(str.split, lines)}
    for name in methods.method_names():
        cls = config.lookup("method", name)
        if cls.__module__.startswith("hvd_compress"):
            assert rows[name][0] == cls.__name__
    assert rows["onebit"][1:5] == ["1.29", "2.06", "alltoall,", "gather"]
    assert rows["powersgd"][1:5] == ["0.08", "0.08", "sum,", "sum"]
    assert rows["topk"][4:6] == ["residual", "1"]


def test_methods_describes_one(capsys):
    assert main(["methods", "dgc"]) == 0
    text = capsys.readouterr().out
    assert "momentum factor masking" in text
    assert "density=0.001" in text
    assert main(["methods", "dcg"]) == 1
    assert "dgc" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert hvd_compress.__version__ in capsys.readouterr().out


def test_error_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert main(["install-horovod", "--dry-run"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hvd-compress: error: no C++ compiler")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", [[], ["no-such"], ["install-horovod", "--jobs", "0"], ["install-horovod", "--gpu=x"]]
)
def test_wrong_usage(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
    assert "usage: hvd-compress" in capsys.readouterr().err


def test_loads_no_framework():
    code = (
        "import hvd_compress.cli, sys; print({'torch', 'tensorflow', 'horovod'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_doctor_finds_all_well():
    done = command("doctor", **AS_ROOT)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("all is well\n")
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if len(line.split()) > 2}
    for name in ("torch", "tensorflow"):
        if environment.version_of(name):
            assert "MPI yes, Gloo yes" in rows[f"horovod.{name}"]
            assert environment.version_of(name) in rows[name]
    assert "an allreduce under mpirun works" in done.stdout


def test_doctor_names_cures(bare):
    done = command("doctor", python=bare, PATH="/usr/bin:/bin")
    assert done.returncode == 1
    lines = [line.strip() for line in done.stdout.splitlines()]
    for cure in ("pip install torch", "hvd-compress install-horovod"):
        assert f"-> {cure}" in lines
    assert lines[-1].endswith(("problem", "problems"))


def test_doctor_notices_a_wrong_prefix_of_open_mpi(tmp_path):
    done = command("doctor", **AS_ROOT, OPAL_PREFIX=str(tmp_path))
    assert (
        f"-> export OPAL_PREFIX={sys.prefix}" in done.stdout or "unset OPAL_PREFIX" in done.stdout
    )


def test_horovod_needs_a_framework(bare):
    done = command("install-horovod", python=bare)
    assert done.returncode == 1
    assert "neither torch nor tensorflow is installed" in done.stderr
    assert done.stderr.count("\n") == 1

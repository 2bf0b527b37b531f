"""The command ``hvd-compress``, run as its users run it."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import venv
from argparse import ArgumentTypeError
from pathlib import Path

import mpi4py
import numpy
import pytest

import hvd_compress
from hvd_compress import config, launch, methods
from hvd_compress.cli.main import main
from hvd_compress.cli.options import picture_file
from hvd_compress.horovod_wheel import environment
from tests import jobs

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
    # A process of its own: tests register methods too.
    done = command("methods")
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


def test_methods_answers_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command("methods")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Without the kept figures it computes for ten seconds and more.  Of the processor, not of the
    # clock: a busy machine takes longer.
    assert after.ru_utime - before.ru_utime < 3


def test_methods_describes_one(capsys):
    assert main(["methods", "dgc"]) == 0
    text = capsys.readouterr().out
    assert "momentum factor masking" in text
    assert "density=0.001" in text
    assert main(["methods", "dcg"]) == 2
    assert "dgc" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_it_quietly():
    """``hvd-compress methods | head``"""
    end, pipe = os.pipe()
    os.close(end)
    arguments = [sys.executable, "-m", "hvd_compress", "methods"]
    done = subprocess.run(arguments, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_methods_for_scripts(capsys):
    # A process of its own: tests register methods too.
    found = {method["name"]: method for method in json.loads(command("methods", "--json").stdout)}
    for name in methods.method_names():
        is_ours = config.lookup("method", name).__module__.startswith("hvd_compress")
        assert is_ours == (name in found)
    assert found["onebit"]["bits_sent"] == pytest.approx(1.29)
    assert found["topk"]["state"] == {"residual": 1}
    for name, method in found.items():
        build = {"method": name, **method["options"]}
        assert config.from_config(build) == config.lookup("method", name)()
    assert main(["methods", "--json", "dgc"]) == 0
    [dgc] = json.loads(capsys.readouterr().out)
    assert dgc == found["dgc"]


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert hvd_compress.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["no-such"],
        ["stragglers", "--picture", "/no/such/folder/a.png"],
        ["stragglers", "--picture", "a.bmpp"],
    ],
    ids=" ".join,
)
def test_wrong_usage(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
    text = capsys.readouterr().err
    assert "usage: hvd-compress" in text
    assert "_positive" not in text


def test_only_the_first_rank_looks_at_the_folder_of_a_picture(tmp_path, monkeypatch):
    """Others may be on other hosts."""
    missing = str(tmp_path / "missing" / "a.png")
    for name in launch.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for rank in (None, "0", "1"):
        if rank is not None:
            monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        if rank == "1":
            assert picture_file(missing) == Path(missing)
        else:
            with pytest.raises(ArgumentTypeError, match="there is no folder"):
                picture_file(missing)
    assert picture_file(str(tmp_path / "a.SVG")) == tmp_path / "a.SVG"


def test_loads_no_framework():
    code = "import hvd_compress.cli.main, sys; print({'torch', 'tensorflow', 'horovod'} "
    code += "& {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"


def doctor_with_all(**variables):
    """In a fork, and with forks, of a process that has imported what it asks for."""
    variables |= jobs.settings(**jobs.sleeping_waits())
    return command("doctor", python=jobs.python("tensorflow"), **AS_ROOT | variables)


def test_doctor_finds_all_well():
    done = doctor_with_all()
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("all is well for torch, tensorflow, mpi\n")
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if len(line.split()) > 2}
    for name in ("torch", "tensorflow"):
        if environment.version_of(name):
            assert "MPI yes, Gloo yes" in rows[f"horovod.{name}"]
            assert environment.version_of(name) in rows[name]
    assert "an allreduce under mpirun works" in done.stdout
    assert "MPI starts without mpirun" in done.stdout


def test_doctor_for_scripts(bare):
    done = command("doctor", "--json", python=bare, PATH="/usr/bin:/bin")
    report = json.loads(done.stdout)
    assert (done.returncode, report["for"]) == (1, ["torch"])
    problems = [row for row in report["findings"] if row["mark"] == "problem"]
    assert report["problems"] == len(problems)
    assert {"section", "mark", "name", "text", "fix"} == problems[0].keys()
    assert "pip install torch" in [row["fix"] for row in problems]


def test_doctor_names_cures(bare):
    done = command("doctor", python=bare, PATH="/usr/bin:/bin")
    assert done.returncode == 1
    lines = [line.strip() for line in done.stdout.splitlines()]
    for cure in ("pip install torch", "hvd-compress-horovod"):
        assert f"-> {cure}" in lines
    assert re.fullmatch(r"\d problems for torch", lines[-1])


@pytest.fixture
def mpi_only(bare, tmp_path):
    """A Python that has mpi4py beside NumPy, but no framework and no Horovod."""
    shutil.copytree(bare.parents[1], tmp_path / "env", symlinks=True)
    (site,) = tmp_path.glob("env/lib/python*/site-packages")
    for entry in Path(mpi4py.__file__).parents[1].glob("mpi4py*"):
        (site / entry.name).symlink_to(entry)
    return tmp_path / "env" / "bin" / "python"


def test_doctor_judges_by_what_is_wanted(mpi_only):
    def problems(*options):
        library = str(Path(sys.prefix, "lib", "libmpi.so.40"))
        done = command("doctor", *options, python=mpi_only, **AS_ROOT, MPI4PY_LIBMPI=library)
        *lines, verdict = done.stdout.splitlines()
        found = [line.split()[1] for line in lines if line.startswith("  problem")]
        assert done.returncode == bool(found)
        return found, verdict

    for options in ([], ["--for", "mpi"]):
        assert problems(*options) == ([], "all is well for mpi")
    without = ["torch", "horovod"]
    assert problems("--for", "torch", "mpi") == (without, "2 problems for torch, mpi")
    assert problems("--for", "tensorflow")[0] == ["tensorflow", "horovod"]


def test_doctor_notices_a_wrong_prefix_of_open_mpi(tmp_path):
    done = doctor_with_all(OPAL_PREFIX=str(tmp_path))
    assert f"-> OPAL_PREFIX is {tmp_path}; try: unset OPAL_PREFIX" in done.stdout

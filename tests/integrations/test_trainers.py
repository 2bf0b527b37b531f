"""Lightning, Accelerate, Transformers and Ray train with our compression, in two processes of the
real packages: scenarios, and the examples."""

from __future__ import annotations

import ast
import re
import sys

import pytest

from tests import jobs

#: packages by the part of this project that needs them
COMMANDS = {
    **dict.fromkeys(("lightning", "accelerate", "transformers"), "make setup"),
    "ray": "pip install -e '.[ray]' (0.5 GB, so `make setup` leaves it out)",
}


def need(name):
    if problem := jobs.package_missing(name, COMMANDS[name]):
        pytest.skip(problem)


def scenarios(name):
    """The functions of a file, without an import, for which a package may be missing."""
    tree = ast.parse((jobs.TESTS / "trainers" / f"{name}_scenarios.py").read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return tuple(each for each in functions if not each.startswith("_"))


JOBS = [
    jobs.Torchrun(name, 2, scenarios(name), ("-m", "tests.trainers"), (name,))
    for name in ("lightning", "accelerate", "transformers")
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("job", "name"), jobs.cases(JOBS))
def test_scenario(passes, job, name):
    need(job.label)
    passes(job, name)


@pytest.mark.timeout(250)
def test_workers_of_ray_that_take_over_have_the_same_bits(tmp_path):
    need("ray")
    command = [sys.executable, "-m", "tests.trainers.ray_job", str(tmp_path)]
    _, output = jobs.run(command, timeout=240)
    assert "the same bits" in output


#: Accelerate shards by FSDP2 on accelerators only: there the example runs as it is
ON_CPU = [*jobs.torchrun(2), str(jobs.TESTS / "trainers" / "on_cpu.py")]
#: what starts an example, the least accuracy, and the least ratio of bytes
EXAMPLES = {
    "lightning": (jobs.torchrun(2), 75, 70),
    "accelerate": (jobs.torchrun(2), 75, 70),
    "transformers": (jobs.torchrun(2), 80, 15),
    "fsdp": (jobs.torchrun(2), 75, 3.5),
    "hsdp topk:density=0.05": (jobs.torchrun(4), 85, 16.9),
    "lightning_fsdp": (jobs.torchrun(2), 75, 3.5),
    "accelerate_fsdp": (ON_CPU, 75, 3.5),
    "transformers_fsdp": (ON_CPU, 75, 3.5),
    "ray": ([sys.executable], 75, 70),
    "ray_horovod": ([sys.executable], 75, 30),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("example", EXAMPLES)
def test_example(tmp_path, monkeypatch, example):
    name, *method = example.split()
    if name.partition("_")[0] not in ("fsdp", "hsdp"):
        need(name.partition("_")[0])
    launcher, accuracy, ratio = EXAMPLES[example]
    file = jobs.ROOT / "mpi_examples" / f"train_{name}.py"
    assert len([line for line in file.read_text().splitlines() if line]) <= 40
    monkeypatch.chdir(tmp_path)  # where it writes its checkpoints
    _, output = jobs.run([*launcher, str(file), *method], timeout=180)
    found = re.search(r"test accuracy ([\d.]+)%\n.*ratio of bytes ([\d.]+)", output)
    assert found, output[-3000:]
    assert float(found[1]) > accuracy
    assert float(found[2]) > ratio


@pytest.mark.parametrize(
    ("module", "hides", "says"),
    [
        ("lightning", "'lightning', 'pytorch_lightning'", "hvd_compress[lightning]"),
        ("transformers", "'transformers'", "hvd_compress[transformers]"),
    ],
)
def test_what_is_missing_is_said(module, hides, says):
    code = f"import sys\nfor name in ({hides},): sys.modules[name] = None\n"
    command = [jobs.python(), "-c", code + f"import hvd_compress.torch.{module}"]
    status, output = jobs.run(command, timeout=240, check=False)
    last = output.splitlines()[-1]
    assert status == 1
    assert says in last
    assert "SetupError" in last

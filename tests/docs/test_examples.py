"""The examples and benchmarks run, by themselves and under a starter, and say what they should."""

from __future__ import annotations

import pickle
import re
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np
import pytest

from hvd_compress import method_names
from hvd_compress.config import lookup
from tests import jobs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "mpi_examples"
full = pytest.mark.full
PNG = b"\x89PNG"


def program(example: str) -> list[str]:
    return [sys.executable, "-m", f"mpi_examples.{example}"]


def fake_cifar10(folder: Path) -> Path:
    """CIFAR-10's files with a few random images in them."""
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {
            b"data": random.integers(0, 256, (20, 3072), dtype=np.uint8),
            b"labels": [int(label) for label in np.arange(20) % 10],
        }
        (folder / name).write_bytes(pickle.dumps(batch))
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "example", ["train_digits", pytest.param("train_digits_keras", marks=full)]
)
def test_digits(tmp_path, example):
    picture = tmp_path / "new folder" / "digits.png"
    options = ["--ranks", "2", "--epochs", "2", "--seeds", "1", "--warmup-epochs", "1"]
    options += ["--compression", "none", "dgc:values=float16", "topk", "randomk", "bf16"]
    command = [*program(example), *options]
    _, output = jobs.run([*command, "--output", str(picture)], timeout=380)
    assert picture.read_bytes().startswith(PNG)
    assert str(picture.resolve()) in output
    rows = {line.split()[0]: line for line in output.splitlines() if line.endswith(" ms")}
    assert {"none", "dgc:values=float16", "topk", "randomk", "bf16"} <= rows.keys()
    assert "1.0x" in rows["none"]
    assert "2.0x" in rows["bf16"]
    assert "4.0x" in rows["randomk"]
    assert "The warm-up was not over" not in output


@full
@pytest.mark.timeout(300)
def test_every_method_trains(tmp_path):
    picture = tmp_path / "all.png"
    command = [*program("train_digits"), "--compression", "all"]
    command += ["--ranks", "2", "--epochs", "1", "--seeds", "1", "--output", str(picture)]
    _, output = jobs.run(command, timeout=280)
    assert picture.read_bytes().startswith(PNG)
    rows = {line.split()[0].split(":")[0] for line in output.splitlines() if line.endswith(" ms")}
    # Other tests register methods of their own.
    ours = [n for n in method_names() if lookup("method", n).__module__.startswith("hvd_compress.")]
    assert rows == set(ours)


SCRIPTS = [
    script
    for folder in (EXAMPLES, ROOT / "benchmarks")
    for script in sorted(folder.glob("*.py"))
    if re.search("^options = |parse_args", script.read_text(), re.MULTILINE)
    and script.stem != "demo"
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_starts_neither_ranks_nor_mpi(script):
    is_example = script.parent == EXAMPLES
    command = program(script.stem) if is_example else [sys.executable, str(script)]
    _, output = jobs.run([*command, "--help"], timeout=60, OPAL_PREFIX="/nowhere")
    assert output.startswith(f"usage: {script.name}")


@pytest.mark.parametrize(
    ("example", "option", "value", "words"),
    [
        ("train_digits", "--compression", "dcg", "method must be one of"),
        ("train_digits_keras", "--model", "vgg", "invalid choice"),
        pytest.param("train_digits", "--epochs", "0", "--epochs must be 1", marks=full),
        ("train_digits", "--data-dir", "/no/such/folder", "/no/such/folder has no data_batch_1"),
        pytest.param(
            *("train_digits_keras", "--data-dir", "/no/such/folder", "has no data_batch_1"),
            marks=full,
        ),
        pytest.param(
            "train_digits_mpi", "--compression", "dcg", "method must be one of", marks=full
        ),
        ("train_digits_mpi", "--density", "7", "density must be"),
        pytest.param("train_digits_mpi", "--framework", "tensorflow", "invalid choice", marks=full),
        pytest.param("allreduce_steps", "--algorithms", "rong", "invalid choice", marks=full),
        ("allreduce_steps", "--ranks", "0", "--ranks must be 1 to 32"),
        ("sparse_allgather", "--density", "1.5", "--density must be 0 to 1"),
        pytest.param(
            "biased_compression", "--rates", "-1", "--l2 and --rates must be positive", marks=full
        ),
        ("biased_compression", "--density", "0", "--density must be in"),
        ("cost_model", "--bytes", "0", "--bytes and --predict must be 4"),
    ],
)
def test_bad_options_are_refused_before_ranks_start(example, option, value, words):
    command = [*program(example), option, value]
    status, output = jobs.run(command, timeout=60, check=False)
    assert status == 2
    assert words in output
    assert not output.startswith("$"), "ranks were started"


@full
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("example", "model"), [("train_digits", "resnet20"), ("train_digits_keras", "cnn")]
)
def test_cifar10(tmp_path, example, model):
    command = program(example)
    command += ["--data-dir", str(fake_cifar10(tmp_path)), "--model", model]
    command += ["--compression", "dgc", "--batch-size", "10", "--ranks", "2", "--epochs", "1"]
    command += ["--seeds", "1", "--output", str(tmp_path / "cifar.png"), "--controller", "gloo"]
    _, output = jobs.run(command, timeout=180)
    assert re.search(f"{model} on CIFAR-10( with Keras)?, 2 ranks", output)


def test_cifar10_in_part(tmp_path):
    from mpi_examples import data

    (tmp_path / "cifar-10-batches-py").mkdir()
    folder = fake_cifar10(tmp_path / "cifar-10-batches-py")
    assert data.cifar10_folder(str(tmp_path)) == data.cifar10_folder(str(folder)) == folder
    (folder / "data_batch_3").unlink()
    with pytest.raises(ArgumentTypeError, match="has no data_batch_3: --data-dir wants the folder"):
        data.cifar10_folder(str(tmp_path))


def test_resnet20_is_of_the_papers_size():
    from mpi_examples import models, models_keras

    assert models.MODELS.keys() == models_keras.MODELS.keys()
    parameters = models.MODELS["resnet20"]((3, 32, 32), 10).parameters()
    variables = models_keras.MODELS["resnet20"]((3, 32, 32), 10).trainable_variables
    # 0.27 million in the paper, without the projections where channels double.
    assert sum(p.numel() for p in parameters) == 272_474
    assert sum(int(np.prod(v.shape)) for v in variables) == 276_650


@full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_benchmark(framework):
    script = ROOT / "benchmarks" / "sync_resnet50.py"
    command = [sys.executable, str(script), "--ranks", "2", "--rounds", "1", "--warmup", "1"]
    command += ["--framework", framework, "--methods", "Horovod fp16", "fp16", "dgc"]
    _, output = jobs.run(command, timeout=180)
    rows = [line for line in output.splitlines() if re.search(r"kB +[\d.]+x", line)]
    # The last row is "plain top-k".  In a graph each tensor has a header of its own.
    assert len(rows) == (4 if framework == "torch" else 3)
    kilobytes = "420.9 kB" if framework == "torch" else "421.6 kB"
    assert any(row.startswith("dgc ") and kilobytes in row for row in rows), output


def test_local_step():
    script = ROOT / "benchmarks" / "local_step.py"
    _, output = jobs.run([sys.executable, str(script), "--rounds", "3"], timeout=60)
    assert re.search(r"25,502,912 elements, threads 1: step [\d.]+ ms, stream", output)


def test_small_matrices():
    script = ROOT / "benchmarks" / "small_matrices.py"
    command = [sys.executable, str(script), "--matrices", "4", "--shape", "6", "5", "--rounds", "2"]
    _, output = jobs.run([*command, "--ranks", "1", "2"], timeout=60)
    assert re.findall(r"rank (\d): [\d.]+ ms alone, [\d.]+ ms stacked", output) == ["1", "2"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "dense_allreduce",
            "--bytes 4000 --small 8 --rounds 1 --small-rounds 1",
            "8 bytes, 2 ranks",
        ),
        pytest.param(
            *("scaling", "--elements 100000 --rounds 1 --predict 8", "measured on 2 ranks"),
            marks=full,
        ),
        pytest.param(
            *("sparse_allreduce", "--elements 100000 --rounds 1", "chosen on each of 2 ranks"),
            marks=full,
        ),
    ],
)
def test_benchmarks_of_collectives_start_their_ranks(name, options, words):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--ranks", "2"]
    _, output = jobs.run([*command, *options.split()], timeout=180)
    assert output.startswith("$ ")
    assert words in output


def start(
    example: str, *options: str, launcher: str = "alone", ranks: int = 0, timeout: float = 100
) -> str:
    """What an example prints; ``alone`` it starts its ranks by itself."""
    command = [*jobs.launcher(ranks, launcher), *program(example)]
    _, output = jobs.run([*command, *options], timeout=timeout, **jobs.variables(launcher))
    return output


ALGORITHMS = ["ring", "halving_doubling", "fold", "direct"]
SUMMARIES = {  # by the number of ranks, in the order of the algorithms
    4: [
        "6 rounds, 24 messages; every rank sent 192 bytes",
        "4 rounds, 16 messages; every rank sent 192 bytes",
        "4 rounds, 16 messages; every rank sent 192 bytes",
        "2 rounds, 24 messages; every rank sent 192 bytes",
    ],
    6: [
        "10 rounds, 60 messages; every rank sent 208 to 216 bytes",
        "5 rounds, 28 messages; every rank sent 192 to 224 bytes",  # blocks of 4 and of 2
        "7 rounds, 24 messages; every rank sent 128 to 384 bytes",  # two pairs fold
        "2 rounds, 60 messages; every rank sent 192 to 224 bytes",
    ],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [6, pytest.param(4, marks=full)])
def test_allreduce_steps(tmp_path, ranks):
    picture = tmp_path / "steps.png"
    options = ["--ranks", str(ranks), "--output", str(picture)]
    output = start("allreduce_steps", *options, "--algorithms", *ALGORITHMS)
    assert output.startswith("$ ")
    found = [line for line in output.splitlines() if line.endswith("have the right sum")]
    for line, summary in zip(found, SUMMARIES[ranks], strict=True):
        assert line.startswith(f"{summary}, for a vector of 128")
    assert re.search(r"^ +1 +0 +1 +\d+ +\S+ +0 +ring reduce-scatter$", output, re.MULTILINE)
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["mpich", pytest.param("mpirun", marks=full)])
def test_allreduce_steps_under_a_starter(tmp_path, launcher):
    if launcher == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    output = start(
        "allreduce_steps", "--output", str(tmp_path / "steps.png"), launcher=launcher, ranks=3
    )
    assert "$ " not in output
    assert "4 rounds, 12 messages" in output


@full
@pytest.mark.timeout(120)
def test_an_example_starts_itself_under_mpich(tmp_path):
    if problem := jobs.mpich_missing():
        pytest.skip(problem)
    command = [*program("allreduce_steps"), "--ranks", "3"]
    command += ["--output", str(tmp_path / "steps.png")]
    _, output = jobs.run(command, timeout=100, **jobs.variables("mpich"))
    assert output.startswith(f"$ {jobs.MPICH}")
    assert "4 rounds, 12 messages" in output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(p, marks=full) for p in (2, 4))])
def test_sparse_allgather(ranks):
    output = start("sparse_allgather", "--ranks", str(ranks), "--elements", "48000")
    shown = [line.split()[2:] for line in output.splitlines() if line.startswith("rank ")]
    total = next(line.split()[1:] for line in output.splitlines() if line.startswith("sum "))
    columns = zip(*shown, strict=True)
    sums = [sum(float(value) for value in column if value != ".") for column in columns]
    assert sums == [0.0 if value == "." else float(value) for value in total]
    rows = [line for line in output.splitlines() if line.endswith(("yes", "NO"))]
    assert len(rows) == 7
    assert all(row.endswith("yes") for row in rows)
    sent = [int(re.search(r"([\d,]+) B", row)[1].replace(",", "")) for row in rows]
    assert sent[0] == 2 * 192_000 * (ranks - 1) // ranks
    assert sent[1] == (ranks - 1) * (48 * 8 + 16 + 8)  # a frame, and its length ahead of it
    assert sent[6] < sent[5] < sent[4] < sent[0] / 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_digits_over_mpi(tmp_path, framework):
    picture = tmp_path / "digits.png"
    options = ["--framework", framework, "--ranks", "2", "--epochs", "5", "--warmup-epochs", "2"]
    output = start("train_digits_mpi", *options, "--output", str(picture), timeout=280)
    lines = [line.split() for line in output.splitlines() if line.endswith(" ms")]
    rows = {name: columns for name, *columns in lines}
    assert rows.keys() == {"none", "dgc"}
    for row in rows.values():
        assert float(row[0]) > 90, output
    assert rows["none"][4] == "1.0x"
    assert float(rows["dgc"][7].rstrip("x")) > 250
    assert "same weights, bit for bit" in output
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.timeout(120)
def test_slurm_script(tmp_path):
    """All of it but srun."""
    command = ["bash", str(EXAMPLES / "slurm.sh"), "--framework", "numpy", "--epochs", "1"]
    command += ["--compression", "topk", "--output", str(tmp_path / "digits.png")]
    launcher = " ".join(jobs.launcher(2, "mpirun"))
    _, output = jobs.run(command, timeout=100, START=launcher, SLURM_SUBMIT_DIR=str(ROOT))
    assert "numpy, 2 ranks, 1 epochs" in output


@pytest.mark.timeout(120)
def test_cost_model(tmp_path):
    picture = tmp_path / "cost.png"
    options = ["--ranks", "2", "--bytes", "8", "65536", "--samples", "3"]
    output = start("cost_model", *options, "--output", str(picture))
    rows = [line for line in output.splitlines() if re.search(r"[+-]\d+%", line)]
    assert len(rows) == 2 * 4
    assert sum("fastest" in row for row in rows) == 2
    assert sum("chosen" in row for row in rows) == 2
    assert picture.read_bytes().startswith(PNG)


@full
@pytest.mark.timeout(150)
def test_biased_compression(tmp_path):
    picture = tmp_path / "biased.png"
    options = ["--ranks", "2", "--steps", "60", "--rates", "8", "--output", str(picture)]
    tables = []
    for more in ([], ["--mpi"]):
        command = [*program("biased_compression"), *options, *more]
        _, output = jobs.run(command, timeout=140)
        lines = [line.split() for line in output.splitlines() if re.search(r"\de-\d\d ", line)]
        tables.append({" ".join(line[:-10]): line[-10:] for line in lines})
        assert picture.read_bytes().startswith(PNG)
        picture.unlink()
    assert tables[0] == tables[1], "the same, bit for bit, in lockstep and over MPI"
    rows = tables[0]
    assert len(rows) == 13
    # Bytes a step: a frame is a header of 16 bytes, indices, values, and padding to 8 bytes.
    sent = {name: int(row[1].replace(",", "")) for name, row in rows.items()}
    assert sent["dense"] == 4 * 650
    assert sent["EF top-k"] == 16 + 33 * 8
    assert sent["EF top-k + dithering"] == 16 + 33 * 4 + 28  # norm and 33 digits: 21, padded
    assert sent["EF random-k"] == 33 * 4
    assert sent["random-k, own draws"] == 16 + 33 * 4 + 4
    to_a_hundredth = {name: float(row[2].replace("-", "inf")) for name, row in rows.items()}
    assert to_a_hundredth["EF top-k + dithering"] < to_a_hundredth["EF top-k"]
    assert to_a_hundredth["EF top-k"] < to_a_hundredth["natural compression"]
    assert to_a_hundredth["natural compression"] < to_a_hundredth["dense"]

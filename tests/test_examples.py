"""The examples and benchmarks run, under horovodrun, and say what they should."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

import jobs

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "mpi_examples" / "train_digits.py"


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


@pytest.mark.timeout(200)
def test_digits(tmp_path):
    picture = tmp_path / "new folder" / "digits.png"
    options = ["--ranks", "2", "--epochs", "2", "--seeds", "1", "--warmup-epochs", "1"]
    options += ["--compression", "none", "dgc:values=float16", "topk", "randomk", "bf16"]
    command = [sys.executable, str(DIGITS), *options, "--output", str(picture)]
    _, output = jobs.run(command, timeout=180)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture.resolve()) in output
    rows = {line.split()[0]: line for line in output.splitlines() if line.endswith(" ms")}
    assert {"none", "dgc:values=float16", "topk", "randomk", "bf16"} <= rows.keys()
    assert "1.0x" in rows["none"]
    assert "2.0x" in rows["bf16"]
    assert "100.0x" in rows["randomk"]
    assert "The warm-up was not over" not in output


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("--compression", "dcg", "method must be one of"), ("--epochs", "0", "--epochs must be 1")],
)
def test_bad_options_are_refused_before_ranks_start(option, value, words):
    command = [sys.executable, str(DIGITS), option, value]
    status, output = jobs.run(command, timeout=60, check=False)
    assert status == 2
    assert words in output
    assert "horovodrun" not in output.splitlines()[-1]


@pytest.mark.timeout(200)
def test_cifar10(tmp_path):
    folder = fake_cifar10(tmp_path)
    command = [sys.executable, str(DIGITS), "--data-dir", str(folder), "--model", "resnet20"]
    command += ["--ranks", "2", "--epochs", "1", "--seeds", "1", "--batch-size", "10"]
    command += ["--output", str(tmp_path / "cifar.png"), "--controller", "gloo"]
    _, output = jobs.run(command, timeout=180)
    assert "resnet20 on CIFAR-10, 2 ranks" in output
    (folder / "data_batch_3").unlink()
    status, output = jobs.run(command, timeout=180, check=False)
    assert status != 0
    assert "has no data_batch_3: --data-dir wants the folder" in output


@pytest.mark.timeout(200)
def test_benchmark():
    script = ROOT / "benchmarks" / "sync_resnet50.py"
    command = [sys.executable, str(script), "--ranks", "2", "--rounds", "1", "--warmup", "1"]
    _, output = jobs.run(command, timeout=180)
    rows = [line for line in output.splitlines() if line.rstrip().endswith("x")]
    assert len(rows) == 6
    assert any(row.startswith("dgc ") and "421.6 kB" in row for row in rows), output

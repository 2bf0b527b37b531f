"""The loops in Triton: in its interpreter, in its compiler, and on a GPU where there is one."""

from __future__ import annotations

import sys

import pytest
import torch

from hvd_compress.torch import backend
from tests import jobs

LAWS = jobs.TESTS / "torch_impl" / "triton_laws.py"
PARTS = ["selections", "sums", "prediction", "bucket", "indices", "host"]


def run(part, interpreted):
    if problem := jobs.triton_missing():
        pytest.skip(f"{problem}; its kernels were not tested")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(LAWS)]
    paths = f"{jobs.ROOT}:{jobs.TRITON}"
    _, output = jobs.run(
        [*command, "-k", part], timeout=280, TRITON_INTERPRET=interpreted, PYTHONPATH=paths
    )
    assert " passed" in output


@pytest.mark.parametrize("part", PARTS)
def test_in_the_interpreter(part):
    run(part, "1")


def test_in_the_compiler():
    run("compile", "0")


@pytest.mark.parametrize("part", PARTS)
def test_on_a_gpu(part):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here: Triton's kernels were tested in its interpreter only")
    run(part, "0")


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch was built for GPUs")
def test_what_is_missing_is_said_once(caplog):
    backend._has_triton.cache_clear()
    with caplog.at_level("WARNING", "hvd_compress"):
        for _ in range(2):
            assert not backend._has_triton(torch.device("cuda"))
    (record,) = caplog.records
    assert "need an NVIDIA GPU" in record.getMessage()

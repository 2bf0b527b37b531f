"""The loops in Triton: in its interpreter, in its compiler, and on a GPU where there is one."""

from __future__ import annotations

import sys

import pytest
import torch

from hvd_compress.torch import backend
from tests import jobs

LAWS = ["triton_laws.py", "triton_codec_laws.py", "triton_low_rank_laws.py", "triton_step_laws.py"]
pytestmark = pytest.mark.timeout(900)


def run(files, interpreted, *options):
    if problem := jobs.triton_missing():
        pytest.skip(f"{problem}; its kernels were not tested")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(jobs.TESTS / "torch_impl" / file) for file in files]
    paths = f"{jobs.ROOT}:{jobs.TRITON}"
    variables = {"TRITON_INTERPRET": interpreted, "PYTHONPATH": paths}
    _, output = jobs.run([*command, *options], timeout=850, **variables)
    assert " passed" in output


@pytest.fixture
def all_examples(request):
    return ["--full"] if request.config.getoption("--full") else []


# Two of about the same length, since each begins with imports.
@pytest.mark.parametrize("files", [[LAWS[0], *LAWS[2:]], LAWS[1:2]], ids=" ".join)
def test_in_the_interpreter(files, all_examples):
    run(files, "1", *all_examples)


def test_in_the_compiler(all_examples):
    run(["triton_compile_laws.py"], "0", *all_examples)


def test_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here: Triton's kernels were tested in its interpreter only")
    run(LAWS, "0", "--full")


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch was built for GPUs")
def test_what_is_missing_is_said_once(caplog):
    backend._has_triton.cache_clear()
    with caplog.at_level("WARNING", "hvd_compress"):
        for _ in range(2):
            assert not backend._has_triton(torch.device("cuda"))
    (record,) = caplog.records
    assert "need an NVIDIA GPU" in record.getMessage()

"""What runs on CUDA tensors, where there is a GPU; Triton's kernels: torch_impl/test_triton.py."""

from __future__ import annotations

import sys

import pytest
import torch

from tests import jobs

GPU = jobs.TESTS / "gpu"
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA GPU here: GPU tensors were not tested"
)


@needs_gpu
@pytest.mark.timeout(900)
def test_laws():
    """In a process of its own: this one may have TensorFlow, which must come after Triton."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    _, output = jobs.run([*command, str(GPU / "laws.py")], timeout=800)
    assert " passed" in output


@needs_gpu
@pytest.mark.timeout(200)
@pytest.mark.parametrize("route", ["auto", "0"])
def test_over_mpi(route):
    command = [*jobs.launcher(2, "mpirun"), sys.executable, str(GPU / "over_mpi.py")]
    jobs.run(command, timeout=180, HVD_COMPRESS_CUDA_AWARE=route)

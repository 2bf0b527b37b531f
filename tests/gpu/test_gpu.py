"""Tests on CUDA tensors, if there is a GPU; Triton's kernels: torch_impl/test_triton.py."""

from __future__ import annotations

import sys

import pytest
import torch

from tests import jobs

GPU = jobs.TESTS / "gpu"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA GPU here: GPU tensors were not tested"
)
#: modules of scenarios whose models and batches go where SCENARIOS_DEVICE says
OVER = {
    "mpi": [
        *("parity", "numerics", "optimizers", "optimizers_torch", "systems", "systems_torch"),
        *("rows", "codistillation", "codistillation_torch", "over_mpi", "auto"),
    ],
    "horovod": ["training", "state", "options"],
}


@pytest.mark.timeout(900)
def test_laws():
    """In a process of its own: this one may have TensorFlow, which must come after Triton."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    _, output = jobs.run([*command, str(GPU / "laws.py")], timeout=800)
    assert " passed" in output


@pytest.mark.timeout(200)
def test_over_mpi():
    command = [*jobs.launcher(2, "mpirun"), sys.executable, str(GPU / "over_mpi.py")]
    jobs.run(command, timeout=180)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("over", "module"), [(over, module) for over, modules in OVER.items() for module in modules]
)
def test_scenarios(tmp_path, over, module):
    """The ranks share a GPU."""
    command = [*jobs.launcher(2, "mpirun"), sys.executable, "-m", "tests.scenarios"]
    variables = {"SCENARIOS_OVER": over, "SCENARIOS_DEVICE": "cuda"}
    jobs.run([*command, str(tmp_path), module], timeout=280, **variables)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("worker", "backend", "ranks"),
    [
        ("ddp_worker", "gloo", 2),
        ("ddp_worker", "nccl", 1),
        ("ddp_nodes_worker", "gloo", 4),
        ("fsdp_worker", "gloo", 4),
    ],
)
def test_over_process_groups(tmp_path, worker, backend, ranks):
    """NCCL refuses two ranks on one GPU."""
    command = [*jobs.torchrun(ranks), str(jobs.TESTS / f"{worker}.py"), str(tmp_path)]
    variables = {"SCENARIOS_BACKEND": backend, "SCENARIOS_DEVICE": "cuda"}
    jobs.run(command, timeout=280, **variables)

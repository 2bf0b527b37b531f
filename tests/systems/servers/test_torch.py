"""Parameter servers for models of torch, in one real job."""

import threading

import numpy as np
import pytest
import torch

from tests import jobs


@pytest.mark.jobs
@pytest.mark.timeout(120)
def test_as_one_process_on_the_mean_gradient():
    command = [*jobs.launcher(3, "mpirun"), jobs.python()]
    _, output = jobs.run([*command, str(jobs.TESTS / "parameter_server_torch_job.py")], timeout=100)
    assert output.count("all is well") == 3


def test_a_server_copies_no_frozen_parameters():
    from hvd_compress.torch.mpi.servers import _OnServer

    trained, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5), False)
    group = {"params": [trained, frozen], "note": threading.Lock()}  # which no copy can be made of
    theirs = torch.optim.SGD([group], lr=1.0)
    server = _OnServer(theirs, {trained: "w"})
    arrays = {"w": np.ones(3, np.float32)}
    server.step(arrays, {"w": np.full(3, 0.5, np.float32)}, [])
    assert [p.shape for group in server._copy.param_groups for p in group["params"]] == [(3,)]
    assert arrays["w"].tolist() == [0.5] * 3
    assert trained.tolist() == [1.0] * 3

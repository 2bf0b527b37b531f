"""Parameter servers for models of torch, in one real job."""

import pytest

from tests import jobs


@pytest.mark.jobs
@pytest.mark.timeout(120)
def test_as_one_process_on_the_mean_gradient():
    command = [*jobs.launcher(3, "mpirun"), jobs.python()]
    _, output = jobs.run([*command, str(jobs.TESTS / "parameter_server_torch_job.py")], timeout=100)
    assert output.count("all is well") == 3

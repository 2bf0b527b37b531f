"""How many functions of ours a step enters, polls not counted, and in how many files: what grows
with tensors is the hooks' alone."""

from __future__ import annotations

import json

import pytest

from tests import jobs

WORKER = jobs.TESTS / "calls_worker.py"
#: whose messages of many tensors go through MPI in many blocks
DENSE = ["none", "fp16"]
COMPRESSED = ["topk:density=0.01", "dgc:density=0.01,min_size=1", "powersgd:rank=2"]
COMPRESSED += ["onebit", "fp8", "linear"]
#: whose plans do all tensors of a bucket at once
METHODS = DENSE + COMPRESSED


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Functions that a steady step enters, by method and model."""
    file = tmp_path_factory.mktemp("calls") / "calls.json"
    command = [*jobs.launcher(2, "mpirun"), jobs.python(), str(WORKER), str(file)]
    command += [*DENSE, "--", *COMPRESSED]
    jobs.run(command, timeout=550, HVD_COMPRESS_CHECKS="3")
    return json.loads(file.read_text())


@pytest.mark.timeout(580)
@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_more_is_one_call_more(calls, method):
    """Its hook."""
    few, many = (calls[method][str(tensors)] for tensors in (10, 40))
    grown = {name: many[name] - few.get(name, 0) for name in many}
    assert [name for name, more in grown.items() if more > 30] == []
    assert sum(more for more in grown.values() if more >= 15) <= 30, grown


@pytest.mark.timeout(580)
@pytest.mark.parametrize("method", METHODS)
def test_a_bucket_is_not_many(calls, method):
    assert sum(calls[method]["40"].values()) <= 420


@pytest.mark.timeout(580)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_in_few_files(calls, method):
    """ResNet-50's small tensors are sent another way, by a plan of its own."""
    for model in calls[method].keys() - {"10"}:
        files = {name.split(":")[0] for name in calls[method][model]}
        assert len(files) <= 25, sorted(files)


@pytest.mark.timeout(580)
@pytest.mark.parametrize("method", COMPRESSED)
def test_a_step_of_resnet_50_is_not_many(calls, method):
    assert sum(calls[method]["resnet50"].values()) <= 1500

"""The loops in Triton: in its interpreter, in its compiler, and on a GPU where there is one."""

from __future__ import annotations

import sys

import pytest
import torch

from hvd_compress.torch import backend
from tests import jobs

#: files of laws, and the parts that are run each in a process of its own
LAWS = {
    "triton_laws.py": ["selections", "sums", "prediction", "bucket", "indices", "host"],
    "triton_codec_laws.py": [
        *("codes", "damaged", "orders or streams", "places or frames", "exchanges", "waits")
    ],
}
PARTS = [(file, part) for file, parts in LAWS.items() for part in parts]


def run(file, part, interpreted):
    if problem := jobs.triton_missing():
        pytest.skip(f"{problem}; its kernels were not tested")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    paths = f"{jobs.ROOT}:{jobs.TRITON}"
    _, output = jobs.run(
        [*command, str(jobs.TESTS / "torch_impl" / file), "-k", part],
        timeout=280,
        TRITON_INTERPRET=interpreted,
        PYTHONPATH=paths,
    )
    assert " passed" in output


@pytest.mark.parametrize(("file", "part"), PARTS)
def test_in_the_interpreter(file, part):
    run(file, part, "1")


@pytest.mark.parametrize("file", LAWS)
def test_in_the_compiler(file):
    run(file, "compile", "0")


@pytest.mark.parametrize(("file", "part"), PARTS)
def test_on_a_gpu(file, part):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here: Triton's kernels were tested in its interpreter only")
    run(file, part, "0")


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch was built for GPUs")
def test_what_is_missing_is_said_once(caplog):
    backend._has_triton.cache_clear()
    with caplog.at_level("WARNING", "hvd_compress"):
        for _ in range(2):
            assert not backend._has_triton(torch.device("cuda"))
    (record,) = caplog.records
    assert "need an NVIDIA GPU" in record.getMessage()

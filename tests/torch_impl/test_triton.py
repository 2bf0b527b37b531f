"""The loops in Triton: in its interpreter, on a GPU where there is one, and in its compiler."""

from __future__ import annotations

import sys

import pytest
import torch

from tests import jobs

triton = pytest.importorskip("triton", reason="no Triton here: its kernels were not tested")
LAWS = jobs.TESTS / "torch_impl" / "triton_laws.py"


@pytest.mark.parametrize("part", ["selections", "sums", "prediction", "bucket", "host"])
@pytest.mark.parametrize("where", ["interpreter", "gpu"])
def test_laws(where, part):
    if where == "gpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here: Triton's kernels were tested in its interpreter only")
    interpreted = "1" if where == "interpreter" else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(LAWS)]
    _, output = jobs.run([*command, "-k", part], timeout=280, TRITON_INTERPRET=interpreted)
    assert " passed" in output


_TYPES = {
    "*i64": "addresses tensors owners order above_ends equal_ends",
    "*i32": "thresholds found largest counts kept prefixes missing histograms above equal places "
    "most",
    "*fp32": "values remaining",
    "fp32": "momentum size",
    "i32": "entries vectors",
}
_FORM = {"width": 4096, "room": 256}
KERNELS = [
    *(("accumulate", {"kind": kind, "aligned": True, **_FORM}) for kind in range(3)),
    ("accumulate", {"kind": 1, "aligned": False, **_FORM}),
    *(("count_digits", {"shift": s, "digits": d, **_FORM}) for s, d in ((20, 11), (10, 10))),
    *(("decide_digit", {"shift": shift, "is_first": shift == 20}) for shift in (20, 0)),
    ("count_selected", _FORM),
    ("write_selected", _FORM),
    ("settle", {"masking": True, "width": 1024}),
    ("add_sorted", {"width": 1024}),
    ("stream", {"width": 4096}),
]


@pytest.mark.parametrize(("name", "constants"), KERNELS, ids=str)
def test_kernels_compile_for_gpus_and_round_as_numpy_does(name, constants, tmp_path, monkeypatch):
    """No product and sum are contracted, and quotients are rounded correctly; no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hvd_compress.torch import triton_kernels

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = getattr(triton_kernels, name)
    kinds = {argument: kind for kind, names in _TYPES.items() for argument in names.split()}
    signature = {arg: "constexpr" if arg in constants else kinds[arg] for arg in kernel.arg_names}
    source = ASTSource(
        kernel, signature, {(kernel.arg_names.index(arg),): x for arg, x in constants.items()}
    )
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        code = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]
        assert "fma" not in code
        assert "div.full" not in code
        assert ("div.rn.f32" in code) is (name == "add_sorted")

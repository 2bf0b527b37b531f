"""Kernels in Triton, compiled for GPUs as steps launch them; no GPU is needed, nor Triton's
interpreter.  test_triton.py runs it.

A launch is noted, and does nothing: the kernel, the types of its arguments, and the values of those
that are constant.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import jit

from hvd_compress import Context
from hvd_compress.codecs import linear
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.engines.local import LocalEngine
from hvd_compress.kernels import Column
from hvd_compress.reduce import Reducer
from hvd_compress.torch import backend
from hvd_compress.torch.ddp.fsdp import ShardedParameter
from hvd_compress.torch.ddp.shard_hops import Hop
from hvd_compress.torch.triton import loops, low_rank
from hvd_compress.torch.triton.codecs import Codes
from tests.torch_impl.triton_codec_laws import BUCKETS, CODECS

FULL = "--full" in sys.argv
KINDS = {torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.uint8: "u8"}
KINDS |= {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
#: in which quotients are rounded; of matrices, those that are made of products
DIVIDE = {"kernels.average", "dense_kernels.look", "dense_kernels.settle"}
BY_PRODUCTS = {"unit", "orthonormal", "decide"}


def name_of(kernel):
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def type_of(x):
    if isinstance(x, torch.Tensor):
        return f"*{KINDS[x.dtype]}"
    return "fp32" if isinstance(x, float) else "i32" if abs(x) < 2**31 else "i64"


@pytest.fixture
def launched(monkeypatch):
    """The launches, each once: a kernel, its signature, its constants and options."""
    found = {}

    def noting(kernel, grid):
        def launch(*args, **options):
            given = dict(zip(kernel.arg_names, args, strict=False)) | options
            signature, constants = {}, {}
            for parameter in kernel.params:
                x = given.pop(parameter.name)
                if parameter.is_constexpr:
                    x = constants[parameter.name] = getattr(x, "value", x)
                signature[parameter.name] = "constexpr" if parameter.is_constexpr else type_of(x)
            launch = kernel, signature, constants, given
            found[repr((name_of(kernel), *launch[1:]))] = launch

        return launch

    monkeypatch.setattr(jit.KernelInterface, "__getitem__", noting)
    monkeypatch.setattr(backend, "loops", lambda x: "hvd_compress.torch.triton.loops")
    return found


def compiled(launch, folder, capability=90):
    kernel, signature, constants, options = launch
    places = {(kernel.arg_names.index(name),): x for name, x in constants.items()}
    source, target = ASTSource(kernel, signature, places), GPUTarget("cuda", capability, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.cache, "dir", str(folder))
        return triton.compile(source, target=target, options=options).asm


#: what would contract a product and a sum, round quotients and roots in another way, or lose small
#: numbers
INEXACT = ("fma", "div.full", "approx", ".ftz")


def entries_of_all_kinds():
    for values, momentum, nesterov, offset in (
        *(("float32", None, False, 0), ("float16", 0.9, False, 1)),
        *(("float32", 0.9, True, 0), ("float16", None, False, 0)),
    ):
        columns = [[torch.zeros(7000 + offset)[offset:]] for _ in range(3 - (momentum is None))]
        columns = [Column(x) for x in (columns[0], *columns)]
        step = loops.TopKStep([7000], [70], values, columns[0].arrays[0])
        message = step.encode(columns, momentum, nesterov)
        for dtypes in ([], [["float16"]]):
            step.settle(columns, message, 1, momentum is not None, *dtypes)


def sums_of_all_kinds():
    for momentum, nesterov in ((None, False), (0.9, False), (0.9, True)):
        columns = [Column([torch.zeros(500)]) for _ in range(2 + (momentum is not None))]
        step = loops.SumStep([500], torch.empty(0))
        step.settle(columns, step.joined(columns), 1, momentum, nesterov)


def codes_of_all_kinds():
    for codec in CODECS:
        x, size = torch.zeros(5000), codec.size(5000, np.dtype("float32"))
        codes = Codes([codec], [slice(0, 5000)], x, [0])
        whole = torch.zeros(size + -size % 4, dtype=torch.uint8)
        codes.encode(x, [own_generator(Context())], whole)
        codes.read(whole, x, codec == CODECS[-1])


def buckets_of_all_kinds():
    for method in BUCKETS:
        reducer = Reducer(method, LocalEngine(), in_place=True)
        reducer.reduce({"a": torch.zeros(70, 60), "b": torch.zeros(30)})


def hops_of_shards(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    parts = [ShardedParameter("a", None, 700, False), ShardedParameter("b", None, 33, True)]
    hop = Hop(parts, linear(4, 512), torch.float32, None, 1, torch.empty(0), 0.8)
    hop.settle(hop(torch.zeros(1, 733))[1])


def test_kernels_compile_for_gpus_and_round_as_numpy_does(
    launched, messages, monkeypatch, tmp_path
):
    entries_of_all_kinds()
    sums_of_all_kinds()
    codes_of_all_kinds()
    buckets_of_all_kinds()
    hops_of_shards(monkeypatch)
    assert {name_of(kernel) for kernel, *_ in launched.values()} >= DIVIDE
    assert len(launched) > 80
    for launch, capability in itertools.product(launched.values(), (80, 90) if FULL else (90,)):
        code, name = compiled(launch, tmp_path, capability)["ptx"], name_of(launch[0])
        assert [word for word in INEXACT if word in code] == [], launch
        assert "div.rn.f32" in code or name not in DIVIDE


@pytest.mark.parametrize(
    ("rank", "capability"),
    itertools.product((1, 2, 4, 8, 16), (80, 90)) if FULL else [(3, 90), (16, 80)],
)
def test_kernels_of_matrices_spill_nothing(launched, tmp_path, rank, capability):
    """Registers suffice for large ones."""
    shape = 2500, 33_000
    step = low_rank.PowerStepOnGPU([shape], [rank], 2, torch.empty(0))
    x, factor = torch.empty(shape), torch.empty(rank * shape[1])
    columns = [Column(own) for own in ([x], [x], [factor], [x])]
    step.left(columns)
    step.right(columns, step.rows)
    step.settle(columns, step.own)
    assert len(launched) == 8
    for launch in launched.values():
        asm, name = compiled(launch, tmp_path, capability), launch[0].fn.__name__
        assert [word for word in INEXACT if word in asm["ptx"]] == [], name
        file = tmp_path / "kernel.cubin"
        file.write_bytes(asm["cubin"])
        usage = said([knobs.nvidia.cuobjdump.path, "-res-usage", str(file)])
        assert re.findall(r"STACK:(\d+)", usage) == ["0"], name
        code = said([knobs.nvidia.nvdisasm.path, "-c", str(file)])
        assert ("FFMA" in code) is (name in BY_PRODUCTS), name


def said(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

"""The calls that the compiled module refuses, and what becomes of problems in it."""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import subprocess
import sys

import numpy as np
import pytest

from hvd_compress import DGC, NoCompression, PowerSGD, TopK, kernels
from hvd_compress.codecs import linear
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import UnsupportedError
from hvd_compress.kernels import native
from hvd_compress.reduce import Reducer

#: with every amount of memory that is left to a process: what comes out, each with how often
WITH_LITTLE_MEMORY = """
import json, resource, sys
from collections import Counter
import numpy as np
from hvd_compress.kernels import native

length = 1 << 18  # what a thread takes at a time, for which it needs a byte an element
rule = native.codecs.Rule(0, 255, 127, length, False, 0.0, 0, 0, [])
code = native.codecs.Digits(rule, [], 127, 1.0)
x = np.random.default_rng(0).standard_normal(8 * length).astype(np.float32)
out = np.empty(8 * 4 + x.size, np.uint8)
native.codecs.encode(code, x, None, out, 1)
expected, found = out.copy(), Counter()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
step, limits = 1 << 17, resource.getrlimit(resource.RLIMIT_AS)
for room in range(0, 40 << 20, step):
    out[:] = 0
    resource.setrlimit(resource.RLIMIT_AS, (used + room, limits[1]))
    try:
        native.codecs.encode(code, x, None, out, 8)
        outcome = "same" if (out == expected).all() else "other"
    except MemoryError:
        outcome = "MemoryError"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    found[outcome] += 1
json.dump(found, sys.stdout)
"""


def test_threads_that_cannot_be_had_and_memory_that_runs_out_end_no_process():
    """Others do what is to be done, and what happens in a thread is this one's exception."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "LD_PRELOAD": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE_MEMORY],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"same", "MemoryError"}
    assert min(found.values()) > 10


def test_a_module_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(kernels, "INTERFACE", kernels.INTERFACE + 1)
    module, problem = kernels._load()
    assert module is None
    assert problem.startswith(f"{native.__file__} is of another version")


def test_a_change_of_what_is_called_has_a_new_number():
    """Otherwise a module that was built before it would be used, and fail somewhere in training."""
    modules = (native, native.codecs, native.halves, native.low_rank)
    places = [*modules, *(x for m in modules for x in vars(m).values() if isinstance(x, type))]
    # Numbers and texts have those of their classes, which change with Python.
    texts = [x.__doc__ for place in places for x in vars(place).values() if callable(x)]
    signatures = "\n".join(sorted(text for text in texts if text and "->" in text))
    digest = hashlib.sha256(signatures.encode()).hexdigest()[:16]
    assert (kernels.INTERFACE, digest) == (7, "7077c1c69899b71e"), (
        "add 1 to INTERFACE of kernels/__init__.py and kInterface of common.h, and write both here"
    )


def test_what_keeps_the_module_from_being_imported_is_said(monkeypatch, tmp_path, caplog):
    broken = tmp_path / f"native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    broken.write_text("no library")
    monkeypatch.delitem(sys.modules, native.__name__)
    monkeypatch.setattr(kernels, "__path__", [str(tmp_path)])
    module, problem = kernels._load()
    assert module is None
    assert str(broken) in problem
    monkeypatch.setattr(kernels, "native", None)
    monkeypatch.setattr(kernels, "problem", problem)
    kernels.is_compiled.cache_clear()
    try:
        with caplog.at_level("WARNING", "hvd_compress"):
            assert not kernels.is_compiled()
    finally:
        kernels.is_compiled.cache_clear()
    assert problem in caplog.text


def test_arrays_at_addresses_that_no_float_has_are_refused():
    """By the loops; exchanges take the way of blocks, whose bits are the same."""
    x = np.random.default_rng(0).standard_normal(3001).astype(np.float32)
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32)
    odd[:] = x
    assert not odd.flags.aligned
    table, sizes = np.full((1, 5), odd.ctypes.data, np.int64), np.full((1, 5), odd.size)
    with pytest.raises(ValueError, match="address"):
        native.Selection([odd.size], [3]).select(table, sizes, 0, 0.0, 1)
    with pytest.raises(ValueError, match="address"):
        native.add_up(table[:, 0].copy(), [odd.size], [], [], 1.0, 1)
    with pytest.raises(ValueError, match="aligned"):
        linear().decode_to(linear().encode(x, np.random.default_rng(0)), odd)
    reducers = [Reducer(TopK(density=0.01), LocalEngine(), in_place=True) for _ in "01"]
    for _ in range(3):
        odd[:] = x
        even, found = (
            r.reduce({"x": own}) for r, own in zip(reducers, (x.copy(), odd), strict=True)
        )
        np.testing.assert_array_equal(even["x"], found["x"])


@pytest.mark.parametrize("place", range(7))
def test_arrays_of_another_size_than_their_tensor_are_refused(place):
    """By the loops themselves, which get sizes beside addresses."""
    arrays = [np.zeros(3001, np.float32) for _ in range(7)]
    table = np.array([[x.ctypes.data for x in arrays]])
    table[0, 3:5] = table[0, 1:3]  # in place, since old states are kept
    sizes = np.full((1, 7), 3001)
    selection, nothing = native.Selection([3001], [3]), np.zeros(3, np.float32)
    selection.select(table, sizes, 1, 0.9, 1)
    selection.settle(table, sizes, np.arange(3), nothing, True, np.ones(1, bool), 1)
    sizes[0, place] = 3000
    with pytest.raises(ValueError, match="3000 elements where a tensor has 3001"):
        selection.select(table, sizes, 1, 0.9, 1)
    with pytest.raises(ValueError, match="3000 elements where a tensor has 3001"):
        selection.settle(table, sizes, np.arange(3), nothing, True, np.ones(1, bool), 1)


def test_old_states_are_kept_only_where_new_ones_take_their_place():
    arrays = [np.zeros(3001, np.float32) for _ in range(7)]
    table, sizes = np.array([[x.ctypes.data for x in arrays]]), np.full((1, 7), 3001)
    with pytest.raises(ValueError, match="where new ones take their place"):
        native.Selection([3001], [3]).select(table, sizes, 1, 0.9, 1)


@pytest.mark.parametrize("method", [TopK(density=0.01), DGC(), PowerSGD(), NoCompression()])
def test_results_are_never_written_into_an_array_that_is_read_only(method, tmp_path):
    """Nor when the first steps' were not."""
    n = 3000
    np.ones(n, np.float32).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r")
    for steps_before in (0, 3):
        reducer = Reducer(method, LocalEngine(), in_place=True)
        for _ in range(steps_before):
            reducer.reduce({"x": np.ones(n, np.float32)})
        with pytest.raises(UnsupportedError, match=r"in_place=True .* read-only"):
            reducer.reduce({"x": mapped})
        assert (mapped == 1).all()
    found = Reducer(method, LocalEngine()).reduce({"x": mapped})
    assert found["x"].shape == mapped.shape


@pytest.mark.parametrize("method", [TopK(density=0.01), DGC(), PowerSGD(), NoCompression()])
def test_numbers_of_another_byte_order_are_refused(method):
    x = np.ones(3000, np.dtype(np.float32).newbyteorder())
    for in_place, steps_before in ((False, 0), (True, 0), (True, 3)):
        reducer = Reducer(method, LocalEngine(), in_place=in_place)
        for _ in range(steps_before):
            reducer.reduce({"x": np.ones(3000, np.float32)})
        with pytest.raises(UnsupportedError, match=r"byte order; .*astype\('float32'\)"):
            reducer.reduce({"x": x})


def test_codecs_take_any_byte_order_and_return_this_machines():
    codec, x = linear(), np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    code, own = np.empty((2, codec.size(x.size, x.dtype)), np.uint8)
    codec.encode_to(x, np.random.default_rng(0), code)
    swapped = x.astype(x.dtype.newbyteorder())
    codec.encode_to(swapped, np.random.default_rng(0), own)
    np.testing.assert_array_equal(own, code)
    with pytest.raises(ValueError, match="float32 or float64"):
        codec.decode_to(code, swapped)


def test_what_is_written_to_is_never_a_copy():
    gaps, x, natural = np.arange(50), np.ones(50, np.float32), native.codecs.Natural(False)
    for out in (np.zeros(200, np.int8), np.zeros(400, np.uint8)[::2]):
        for call in (
            lambda out=out: native.rice_pack(gaps, 2, out),
            lambda out=out: native.elias_pack(gaps, False, out),
            lambda out=out: native.codecs.signs(x, out[:7], 1),
        ):
            with pytest.raises(TypeError):
                call()
        assert not out.any()
    with pytest.raises(ValueError, match="sizes"):  # draws that would have to be converted
        native.codecs.encode(natural, x, np.ones(50, np.float16), np.zeros(57, np.uint8), 1)


@pytest.mark.parametrize(
    "gaps", [[2**40, -(2**40)], [0, -1], [2**62, 2**62, 2**62], [2**63 - 1, 2**63 - 1, 2]]
)
def test_gaps_that_no_indices_have_are_refused_before_they_are_used(gaps):
    """Their sum, which sizes the code, may be small, or overflow."""
    gaps = np.array(gaps)
    room = np.zeros(64, np.uint8)
    for b in (0, 20):
        with pytest.raises(ValueError, match=r"ascending|no room"):
            native.rice_pack(gaps, b, room[:32])
    for nested in (False, True):
        if (gaps < 0).any():
            with pytest.raises(ValueError, match="ascending"):
                native.elias_pack(gaps, nested, room)
            with pytest.raises(ValueError, match="ascending"):
                native.index_bits(gaps, 3)
            with pytest.raises(ValueError, match="ascending"):
                native.quotients(gaps, 3)
    assert not room[32:].any()

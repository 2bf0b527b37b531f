"""The loops in Triton against their NumPy reference, bit for bit.

``TRITON_INTERPRET=1 pytest tests/torch_impl/triton_laws.py`` runs them in Triton's interpreter, on
tensors in host memory; without the variable they run on a GPU.  test_triton.py does both, in
processes of their own, since Triton has to be imported for the one or the other.  With ``--full``,
and on a GPU, examples are drawn beside those that are written out.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_compress import DGC, Outcome, TopK
from hvd_compress.kernels import Column, Steps, reference
from hvd_compress.torch import backend
from tests.kernels.buckets import Ranks, assert_equal, one_by_one
from tests.kernels.test_kernels import assert_selects, drawn, steps_of, unaligned

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: the interpreter takes a second for what a GPU does in a millisecond
FEW = "--full" not in sys.argv
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
#: elements of a block, and candidates that it has room for
FORMS = [(64, 8), (64, 64), (256, 16), (4096, 256)]
SIZES = st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 256, 1000]))
KINDS = ["normal", "ties", "zeros", "finite", "special"]

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def patch_once():
    """The interpreter puts its functions into Triton's modules anew in each call of one kernel by
    another, which takes a third of its time; where they are, they stay until the launch ends."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_lang(function):
        modules = (language, language.core)
        used = [x for x in function.__globals__.values() if any(x is known for known in modules)]
        if any(language.core.is_builtin(module.load) for module in used):
            return patch(function)
        return interpreter._LangPatchScope()

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = patch_lang


if INTERPRETED:
    patch_once()


@pytest.fixture(scope="module")
def loops():
    from hvd_compress.torch.triton import loops

    return loops


def drawn_too(number):
    """So many examples beside those that are written out, where there is time for them."""
    phases = [Phase.explicit] if INTERPRETED and FEW else list(Phase)
    return settings(max_examples=number, phases=phases)


def on_device(x, offset=0):
    """At an address that is off by so many elements."""
    space = torch.tensor(unaligned(x, offset), device=DEVICE)
    whole = torch.empty(offset + space.numel(), device=DEVICE)
    whole[offset:] = space
    return whole[offset:]


def bits(x):
    x = x.cpu().numpy() if isinstance(x, torch.Tensor) else x
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32)


def assert_same(own, expected):
    """To the bit, the sign of zero included; one NaN is as good as another."""
    np.testing.assert_array_equal(bits(own), bits(expected))


@drawn_too(25)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=3),
    form=st.sampled_from(FORMS),
    kind=st.sampled_from(KINDS),
    momentum=st.sampled_from([None, 0.0, 0.9]),
    nesterov=st.booleans(),
    density=st.sampled_from([0.001, 0.1, 1.0]),
    offset=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
@example([63, 1, 65], FORMS[0], "normal", 0.9, False, 0.1, 1, 0)
@example([200, 64], FORMS[0], "normal", None, False, 1.0, 0, 1)  # more than there is room for
@example([200], FORMS[1], "ties", 0.9, True, 0.1, 2, 2)
@example([130, 65], FORMS[1], "zeros", 0.9, False, 0.1, 0, 3)
@example([256, 300], FORMS[2], "special", None, False, 0.1, 3, 4)
@example([257, 7], FORMS[2], "finite", 0.0, True, 0.001, 5, 5)
@example([1000, 9], FORMS[3], "special", 0.9, True, 0.1, 4, 6)
def test_selections_are_those_of_numpy(
    loops, sizes, form, kind, momentum, nesterov, density, offset, seed
):
    """Over several steps, in which thresholds are predicted."""
    random = np.random.default_rng(seed)
    counts = [max(1, int(n * density)) for n in sizes]
    fast, plain = loops.Selection(sizes, counts, *form), reference.Selection(sizes, counts)
    for _ in range(3):
        theirs = steps_of(random, sizes, kind, 0, momentum=momentum is not None)
        steps = Steps(*(c and Column([on_device(x, offset) for x in c.arrays]) for c in theirs))
        assert_selects(fast, plain, steps, theirs, random, momentum, nesterov, assert_same)


@drawn_too(8)
@given(
    scales=st.lists(st.sampled_from([1e-3, 0.5, 1.0, 1.01, 2.0, 1e4]), min_size=3, max_size=4),
    form=st.sampled_from(FORMS[:3]),
    n=st.sampled_from([300, 1000]),
    seed=st.integers(0, 100),
)
@example([1.0, 1e4, 1e-3], FORMS[0], 300, 0)
@example([2.0, 0.5, 1.01, 1.0], FORMS[1], 300, 1)
@example([1e-3, 1.0, 1.01, 0.5], FORMS[2], 1000, 2)
def test_a_wrong_prediction_changes_nothing(loops, scales, form, n, seed):
    """Gradients that grow and shrink from step to step."""
    random = np.random.default_rng(seed)
    k = n // 100
    fast = loops.Selection([n], [k], *form)
    for scale in scales:
        gradient = random.standard_normal(n).astype(np.float32) * np.float32(scale)
        x = on_device(gradient)
        own = fast.select(Steps.of([(x, torch.zeros_like(x), torch.empty_like(x))]), None)
        expected = np.sort(np.argsort(-np.abs(gradient), kind="stable")[:k])
        np.testing.assert_array_equal(own.indices, expected)


def test_predictions_are_met(loops):
    """In the second of two like steps, fewer elements are candidates than half of all, and enough
    of them."""
    random = np.random.default_rng(0)
    selection = loops.Selection([2000], [20], 64, 16)
    for _ in range(2):
        x = on_device(random.standard_normal(2000).astype(np.float32))
        selection.select(Steps.of([(x, torch.zeros_like(x), torch.empty_like(x))]), None)
    assert 20 <= selection._memory.found[0].item() < 1000


@settings(max_examples=40)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    ranks=st.integers(1, 4),
    kind=st.sampled_from(KINDS),
    density=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    size=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_sums_are_those_of_numpy(loops, sizes, ranks, kind, density, size, seed):
    random = np.random.default_rng(seed)
    total = sum(sizes)
    indices = [np.flatnonzero(random.random(total) < density) for _ in range(ranks)]
    values = [drawn(random, own.size, kind) for own in indices]
    expected = [np.full(n, 9.0, np.float32) for n in sizes]
    out = [on_device(x) for x in expected]
    loops.add_up(Column(out), indices, values, size)
    reference.add_up(Column(expected), indices, values, size)
    for own, theirs in zip(out, expected, strict=True):
        assert_same(own, theirs)


@pytest.mark.parametrize("wrong", [[3, 2], [2, 2], [-1, 2], [2, 10]])
def test_indices_are_checked_before_they_are_used(loops, wrong):
    out = [torch.zeros(n, device=DEVICE) for n in (6, 4)]
    with pytest.raises(ValueError, match="ascending"):
        loops.add_up(Column(out), [np.array(wrong)], [np.ones(2, np.float32)], 2)


METHODS = [
    DGC(density=0.05, min_size=0, indices="int32"),
    DGC(density=0.05, min_size=0, nesterov=True, values="float16", indices="packed"),
    DGC(density=0.1, min_size=0, masking=False, clip_norm=1.0),
    TopK(density=0.02),
]


def moved(outcome, device):
    state = {key: x.to(device) for key, x in outcome.state.items()}
    return Outcome(outcome.mean.to(device), None, state)


@pytest.fixture
def by_triton(monkeypatch):
    if INTERPRETED:  # else the device says so
        monkeypatch.setattr(backend, "loops", lambda x: "hvd_compress.torch.triton.loops")


BUCKETS = [
    (method, in_place)
    for number, method in enumerate(METHODS)
    for in_place in (False, True)
    if not (INTERPRETED and FEW) or number == 0 or in_place is (number == 2)
]


@pytest.mark.parametrize(("method", "in_place"), BUCKETS, ids=repr)
def test_a_bucket_is_what_its_tensors_are(loops, by_triton, method, in_place):
    """The whole exchange, against the blocks of the chain in NumPy; also over a step with a NaN."""
    shapes, random = {"a": (40, 30), "b": (64, 8), "c": (300, 7)}, np.random.default_rng(1)
    ranks, expected = Ranks(method, shapes, 2, in_place=in_place), one_by_one(method, 2)
    for step in range(4):
        gradients = [
            {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
            for _ in "ab"
        ]
        if step == 2:
            gradients[1]["b"][3, 3] = np.nan
        ours = [{n: torch.tensor(x, device=DEVICE) for n, x in g.items()} for g in gradients]
        given_ = copy.deepcopy(ours)
        found = ranks.exchange(ours)
        for rank, (own, other) in enumerate(zip(found, expected(gradients), strict=True)):
            for name in shapes:
                assert own[name].mean.device.type == DEVICE.type
                assert_equal(moved(own[name], "cpu"), other[name])
                shared = own[name].mean.data_ptr() == ours[rank][name].data_ptr()
                clipped = method.to_config().get("clip_norm")  # which makes another array
                assert shared is (in_place and clipped is None)
                if not in_place:
                    assert torch.equal(
                        ours[rank][name].nan_to_num(), given_[rank][name].nan_to_num()
                    )


def test_selections_are_checked_before_they_are_used(loops, monkeypatch):
    from hvd_compress.torch.triton import check

    assert check.problem_of(DEVICE) is None

    class Wrong(loops.Selection):
        def select(self, *args):
            found = super().select(*args)
            found.values.view(np.int32)[0] ^= 1
            return found

    class Failing(loops.Selection):
        def select(self, *args):
            raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(loops, "Selection", Wrong)
    assert "other bits" in check.problem_of(DEVICE)
    monkeypatch.setattr(loops, "Selection", Failing)
    problem = check.problem_of(DEVICE)
    assert problem.endswith("(RuntimeError: no kernel image is available)")


def test_the_host_waits_once_for_what_it_looks_at():
    """Whatever it is made of."""
    if INTERPRETED:
        pytest.skip("tensors in host memory are not copied")
    arrays = [on_device(np.arange(n, dtype=np.float32)) for n in (3, 5, 7)]
    outputs = [("float32", n) for n in (3, 5, 7)]
    found = backend.on_host(lambda *given: [x + 1 for x in given], arrays, outputs, arrays[0])
    for own, x in zip(found, arrays, strict=True):
        assert torch.equal(own, x + 1)
    assert waits_of(lambda: backend.on_host(lambda *x: list(x), arrays, outputs, arrays[0])) <= 1


class Waits(TorchDispatchMode):
    """Counts operations for which the host would wait, were the tensors on a GPU."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        # The interpreter copies arguments onto themselves.
        copies = name == "copy_" and args[0].data_ptr() != args[1].data_ptr()
        self.number += copies or name in ("_to_copy", "_local_scalar_dense", "nonzero", "equal")
        return function(*args, **(kwargs or {}))


def waits_of(call):
    if INTERPRETED:
        with Waits() as waits:
            call()
        return waits.number
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def test_the_host_waits_once_for_a_bucket(loops):
    """For the selected entries."""
    sizes, random = [500, 70], np.random.default_rng(0)
    selection = loops.Selection(sizes, [5, 1])
    gradients = [on_device(random.standard_normal(n).astype(np.float32)) for n in sizes]
    steps = Steps.of((x, *(torch.zeros_like(x) for _ in range(4))) for x in gradients)

    def select():
        own = selection.select(steps, 0.9)
        selection.settle(steps, own.indices, np.zeros_like(own.values), True, own.finite)
        return own

    own = select()  # which makes the memory
    assert waits_of(select) == 1
    out, entries = Column(gradients), ([own.indices] * 2, [own.values] * 2)
    assert waits_of(lambda: loops.add_up(out, *entries, 2)) == 0


_TYPES = {
    "*i64": "addresses tensors owners order above_ends equal_ends fine",
    "*i32": "thresholds found largest counts kept prefixes missing histograms above equal places "
    "most",
    "*fp32": "values remaining momenta",
    "fp32": "size",
    "i32": "entries vectors",
}
_FORM = {"width": 4096, "room": 256}
KERNELS = [
    *(("search", {"kind": kind, "aligned": True, **_FORM}) for kind in range(3)),
    ("search", {"kind": 1, "aligned": False, **_FORM}),
    *(("move", {"kind": kind, "aligned": True, "width": 4096}) for kind in range(3)),
    *(
        ("count_digits", {"kind": 1, "shift": s, "digits": d, **_FORM})
        for s, d in ((20, 11), (10, 10))
    ),
    *(("decide_digit", {"shift": shift, "is_first": shift == 20}) for shift in (20, 0)),
    ("count_selected", {"kind": 1, **_FORM}),
    ("write_selected", {"kind": 2, **_FORM}),
    ("settle", {"masking": True, "width": 1024}),
    ("add_sorted", {"width": 1024}),
    ("stream", {"width": 4096}),
]


@pytest.mark.skipif(INTERPRETED, reason="compiles nothing")
@pytest.mark.parametrize(("name", "constants"), KERNELS, ids=str)
def test_kernels_compile_for_gpus_and_round_as_numpy_does(name, constants, tmp_path):
    """No product and sum are contracted, and quotients are rounded correctly; no GPU is needed."""
    from hvd_compress.torch.triton import kernels

    kernel = getattr(kernels, name)
    kinds = {argument: kind for kind, names in _TYPES.items() for argument in names.split()}
    signature = ["constexpr" if arg in constants else kinds[arg] for arg in kernel.arg_names]
    values = [constants.get(arg) for arg in kernel.arg_names]
    for asm in compiled_for_gpus(kernel, signature, values, tmp_path):
        code = asm["ptx"]
        assert "fma" not in code
        assert "div.full" not in code
        assert ("div.rn.f32" in code) is (name == "add_sorted")


def compiled_for_gpus(
    kernel, signature, constants, folder, capabilities=(90,) if FEW else (80, 90), **options
):
    """The results of compiling a kernel for compute capabilities, by the types of its arguments
    and the values of those that are constant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict(zip(kernel.arg_names, signature, strict=True))
    known = {(i,): x for i, x in enumerate(constants) if signature[i] == "constexpr"}
    source = ASTSource(kernel, types, known)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(folder))
        for capability in capabilities:
            target = GPUTarget("cuda", capability, 32)
            options = {"enable_fp_fusion": False, **options}
            yield triton.compile(source, target=target, options=options).asm

"""The loops in Triton against their NumPy reference, bit for bit.

``TRITON_INTERPRET=1 pytest tests/torch_impl/triton_laws.py`` runs them in Triton's interpreter, on
tensors in host memory; without the variable they run on a GPU.  test_triton.py does both, in
processes of their own, since Triton has to be imported for the one or the other.  With ``--full``,
and on a GPU, examples are drawn beside those that are written out.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_compress import DGC, NoCompression, Outcome, TopK
from hvd_compress.chain import in_range
from hvd_compress.kernels import Column, Steps, reference
from hvd_compress.torch import backend
from hvd_compress.transforms.momentum import heavy_ball
from tests.kernels.buckets import (
    Ranks,
    assert_all_equal,
    assert_equal,
    gradients_of,
    made,
    one_by_one,
)
from tests.kernels.test_kernels import drawn, unaligned

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
    another, which takes a third of its time; where they are, they stay until the launch ends.  It
    makes a table of dtypes whenever it looks one up, which takes a tenth."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def used_by(function):
        modules = (language, language.core)
        return [x for x in function.__globals__.values() if any(x is known for known in modules)]

    def patch_lang(function):
        if any(language.core.is_builtin(module.load) for module in used_by(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = patch_lang
    if hasattr(interpreter, "_get_np_dtype"):
        of_type, of_scalar = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

        def np_dtype(kind):
            kind = kind.element_ty if kind.is_block() else kind
            return of_type(kind) if kind.is_ptr() else of_scalar(kind)

        interpreter._get_np_dtype = np_dtype


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


def columns_of(random, sizes, kind, momentum, offset=0):
    """Arrays of a rank in NumPy, by the name of their column, and the same on the device."""
    names = ["gradients", "residuals", *(["velocities"] if momentum is not None else [])]
    plain = {name: [drawn(random, n, kind) for n in sizes] for name in names}
    return plain, {name: [on_device(x, offset) for x in own] for name, own in plain.items()}


def as_columns(arrays, out=None):
    """Those of a step, whose results are in the memory of the gradients."""
    first, *states = (Column(own) for own in arrays.values())
    return [first, first if out is None else Column(out), *states]


def entries_of(step, message):
    """Indices into all tensors end to end, and values, of a message, one after the other."""
    layout, whole = step.layout, message.cpu().numpy()
    heads = whole[layout.heads].view(np.int32)[4:]
    values = whole[layout.values].view(np.float16 if layout.header.first else np.float32)
    places = whole[layout.places].view(np.int16)
    tensors = step._tensors.cpu().numpy()  # elements, entries, first block, first entry
    starts = np.cumsum([0, *tensors[:-1, 0]])
    firsts = [*heads[len(tensors) :].tolist(), len(values)]
    found = []
    for block, tensor in enumerate(step._owners.cpu().numpy()):
        at = starts[tensor] + (block - tensors[tensor, 2]) * step._width
        found += [at + place for place in places[firsts[block] : firsts[block + 1]]]
    return np.array(found, np.int64), values.astype(np.float32)


def numpys(plain, sizes, counts, momentum, nesterov, masking, half):
    """Return the messages of the ranks; writes results and states of all in NumPy."""
    selections, sent = [reference.Selection(sizes, counts) for _ in plain], []
    steps, lefts, finite = [], [], np.ones(len(sizes), bool)
    for own, selection in zip(plain, selections, strict=True):
        residuals, velocities = own["residuals"], own.get("velocities", [None] * len(sizes))
        rows = zip(own["gradients"], residuals, residuals, velocities, velocities, strict=True)
        columns = [Column(x) if x[0] is not None else None for x in zip(*rows, strict=True)]
        steps.append(Steps(*columns))
        indices, values, fine = selection.select(steps[-1], momentum, nesterov)
        received = np.clip(values, -65504, 65504).astype(np.float16) if half else values
        sent.append((indices, received.astype(np.float32)))
        lefts.append(values - sent[-1][1])
        finite &= fine
    for step, selection, (indices, _), left in zip(steps, selections, sent, lefts, strict=True):
        selection.settle(step, indices, left, masking, finite)
    for own in plain:
        for i in np.flatnonzero(~finite):
            for name in own.keys() - {"gradients"}:
                own[name][i] = in_range({"x": own[name][i]})["x"]
        reference.add_up(Column(own["gradients"]), *zip(*sent, strict=True), len(plain))
    return sent


@drawn_too(25)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=3),
    form=st.sampled_from(FORMS),
    kind=st.sampled_from(KINDS),
    momentum=st.sampled_from([None, 0.0, 0.9]),
    nesterov=st.booleans(),
    density=st.sampled_from([0.001, 0.1, 1.0]),
    values=st.sampled_from(["float32", "float16"]),
    ranks=st.integers(1, 3),
    offset=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
@example([63, 1, 65], FORMS[0], "normal", 0.9, False, 0.1, "float32", 3, 1, 0)
# More than there is room for, and all values.
@example([200, 64], FORMS[0], "normal", None, False, 1.0, "float16", 2, 0, 1)
@example([200], FORMS[1], "ties", 0.9, True, 0.1, "float32", 2, 2, 2)
@example([130, 65], FORMS[1], "zeros", 0.9, False, 0.1, "float32", 1, 0, 3)
@example([256, 300], FORMS[2], "special", None, False, 0.1, "float16", 2, 3, 4)
@example([257, 7], FORMS[2], "finite", 0.0, True, 0.001, "float32", 1, 5, 5)
@example([1000, 9], FORMS[3], "special", 0.9, True, 0.1, "float32", 2, 4, 6)
@example([5000, 9], FORMS[3], "normal", 0.9, True, 0.01, "float16", 2, 0, 7)
def test_steps_are_those_of_numpy(
    loops, sizes, form, kind, momentum, nesterov, density, values, ranks, offset, seed
):
    """Messages, results and states, over several steps, in which thresholds are predicted."""
    random, masking = np.random.default_rng(seed), bool(seed % 2)
    counts = [max(1, int(n * density)) for n in sizes]
    like = torch.empty(0, device=DEVICE)
    steps = [loops.TopKStep(sizes, counts, values, like, *form) for _ in range(ranks)]
    for _ in range(2 if INTERPRETED and FEW else 3):
        arrays = [columns_of(random, sizes, kind, momentum, offset) for _ in steps]
        plain = [own for own, _ in arrays]
        columns = [as_columns(own) for _, own in arrays]
        rows = zip(steps, columns, strict=True)
        messages = [step.encode(own, momentum, nesterov) for step, own in rows]
        with np.errstate(over="ignore"):
            half, is_moving = values == "float16", momentum is not None
            sent = numpys(plain, sizes, counts, momentum, nesterov, masking and is_moving, half)
        for step, message, (indices, what) in zip(steps, messages, sent, strict=True):
            found = entries_of(step, message)
            np.testing.assert_array_equal(found[0], indices)
            assert_same(found[1], what)
        everything = torch.cat(messages)
        for step, own in zip(steps, columns, strict=True):
            step.settle(own, everything, ranks, masking and momentum is not None)
        for own, theirs in arrays:
            for name, found in theirs.items():
                for x, expected in zip(found, own[name], strict=True):
                    assert_same(x, expected)


def select(step, *gradients):
    """The message of gradients without residuals."""
    own = {"gradients": gradients, "residuals": [torch.zeros_like(x) for x in gradients]}
    return step.encode(as_columns(own))


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
    step = loops.TopKStep([n], [k], "float32", torch.empty(0, device=DEVICE), *form)
    for scale in scales:
        gradient = random.standard_normal(n).astype(np.float32) * np.float32(scale)
        indices, _ = entries_of(step, select(step, on_device(gradient)))
        expected = np.sort(np.argsort(-np.abs(gradient), kind="stable")[:k])
        np.testing.assert_array_equal(indices, expected)


def test_predictions_are_met(loops):
    """In the second of two like steps, fewer elements are candidates than half of all, and enough
    of them."""
    random = np.random.default_rng(0)
    step = loops.TopKStep([2000], [20], "float32", torch.empty(0, device=DEVICE), 64, 16)
    for _ in range(2):
        select(step, on_device(random.standard_normal(2000).astype(np.float32)))
    assert 20 <= step._memory.found[0].item() < 1000


@pytest.mark.parametrize("seed", range(3))
def test_whatever_arrives_is_written_within_the_results_and_states(loops, seed):
    """A message that was damaged, where no checksum is looked at."""
    random, sizes = np.random.default_rng(seed), [70, 300]
    step = loops.TopKStep(sizes, [7, 30], "float32", torch.empty(0, device=DEVICE), 64, 16)
    space = torch.full((3, 1000), 9.0, device=DEVICE)
    gradients, residuals, velocities = ([row[100:170], row[400:700]] for row in space)
    own = {"gradients": gradients, "residuals": residuals, "velocities": velocities}
    step.encode(as_columns(own), 0.9)
    damaged = torch.tensor(random.integers(0, 256, 2 * step.layout.nbytes, dtype=np.uint8))
    step.settle(as_columns(own), damaged.to(DEVICE), 2, masking=True)
    for row in space:
        assert torch.equal(torch.cat([row[:100], row[170:400], row[700:]]), torch.full((630,), 9.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_means_without_room_in_their_dtype_leave_states_as_they_are(loops, dtype):
    """The limit is where rounding gives infinity; and what is sent of others counts."""
    limit = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119}[dtype]
    below = np.nextafter(np.float32(limit), np.float32(0))
    assert torch.tensor(limit).to(getattr(torch, dtype)).isinf()
    assert torch.tensor(below).to(getattr(torch, dtype)).isfinite()
    gradients = [on_device(np.array([x, 1.0, 2.0], np.float32)) for x in (limit, below, limit)]
    residuals, out = ([torch.zeros_like(x) for x in gradients] for _ in "ro")
    columns = as_columns({"gradients": gradients, "residuals": residuals}, out)
    step = loops.TopKStep([3] * 3, [1] * 3, "float32", torch.empty(0, device=DEVICE))
    step.settle(columns, step.encode(columns), 1, False, [dtype, dtype, "float32"])
    assert [x.tolist() for x in residuals] == [[0, 0, 0], [0, 1, 2], [0, 1, 2]]
    assert [x.tolist() for x in out] == [[limit, 0, 0], [float(below), 0, 0], [limit, 0, 0]]


@pytest.mark.parametrize("kind", ["normal", "special"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(None, False), (0.9, False), (0.9, True)])
def test_sums_are_those_of_numpy(loops, kind, momentum, nesterov):
    """Messages of two ranks, averages, directions and velocities."""
    random, sizes = np.random.default_rng(3), [1500, 1, 70]
    steps = [loops.SumStep(sizes, torch.empty(0, device=DEVICE)) for _ in "ab"]
    for _ in range(3):
        arrays = [columns_of(random, sizes, "normal", None) for _ in steps]
        gradients, velocities = zip(*(its.values() for its, _ in arrays), strict=True)
        on_gpu = [[*own.values()] for _, own in arrays]
        if kind == "special":
            gradients[1][2][5] = on_gpu[1][0][2][5] = np.nan
            gradients[0][0][7] = on_gpu[0][0][0][7] = 3e38  # with the next the sum is infinite
            gradients[1][0][7] = on_gpu[1][0][0][7] = 3e38
        if momentum is None:
            on_gpu = [own[:1] for own in on_gpu]
        columns = [[Column(x), Column(x), *map(Column, u)] for x, *u in on_gpu]
        sent = [step.joined(own) for step, own in zip(steps, columns, strict=True)]
        for found, own in zip(sent, gradients, strict=True):
            all_or_none = [x if np.isfinite(x).all() else np.full_like(x, np.nan) for x in own]
            assert_same(found, np.concatenate(all_or_none))
        total = sent[0] + sent[1]
        for step, own, old, its in zip(steps, columns, velocities, on_gpu, strict=True):
            step.settle(own, total, 2, momentum, nesterov)
            with np.errstate(invalid="ignore", over="ignore"):
                means = np.split(total.cpu().numpy() / np.float32(2), np.cumsum(sizes)[:-1])
                for i, (mean, u) in enumerate(zip(means, old, strict=True)):
                    direction, velocity = mean, in_range({"u": u})["u"]
                    if momentum is not None and np.isfinite(mean).all():
                        direction, velocity = heavy_ball(mean, u, np.float32(momentum), nesterov)
                    assert_same(its[0][i], direction)
                    if momentum is not None:
                        assert_same(its[1][i], velocity)


METHODS = [
    DGC(density=0.05, min_size=0, indices="int32"),
    DGC(density=0.05, min_size=0, nesterov=True, values="float16", indices="packed"),
    DGC(density=0.1, min_size=0, masking=False, clip_norm=1.0),
    TopK(density=0.02),
    DGC(density=0.05, min_size=600, nesterov=True),  # "b" is averaged whole
    NoCompression(),
]


def moved(outcome, device):
    state = {key: x.to(device) for key, x in outcome.state.items()}
    return Outcome(outcome.mean.to(device), None, state)


def moved_to_host(outcomes):
    return [{name: moved(each, "cpu") for name, each in own.items()} for own in outcomes]


def at_device(x):
    return torch.tensor(x, device=DEVICE)


#: the step with a NaN, before the last
NAN_IN = 1 if INTERPRETED and FEW else 2
BUCKETS = [
    (method, in_place)
    for number, method in enumerate(METHODS)
    for in_place in (False, True)
    if not (INTERPRETED and FEW) or number == 0 or in_place is (number in (2, 4))
]


@pytest.mark.parametrize(("method", "in_place"), BUCKETS, ids=repr)
def test_a_bucket_is_what_its_tensors_are(loops, by_triton, method, in_place):
    """The whole exchange, against the blocks of the chain in NumPy; also over a step with a NaN.
    Messages go by the host, or stay on the device."""
    shapes, random = {"a": (40, 30), "b": (64, 8), "c": (160, 7)}, np.random.default_rng(1)
    ranks, expected = Ranks(method, shapes, 2, in_place=in_place), one_by_one(method, 2)
    ranks.reads_device = in_place
    for step in range(NAN_IN + 2):
        gradients = gradients_of(random, shapes, 2)
        if step == NAN_IN:
            gradients[1]["b"][3, 3] = np.nan
        ours = made(gradients, at_device)
        given_ = copy.deepcopy(ours)
        found = ranks.exchange(ours)
        assert_all_equal(moved_to_host(found), expected(gradients))
        for rank, own in enumerate(found):
            for name in shapes:
                assert own[name].mean.device.type == DEVICE.type
                shared = own[name].mean.data_ptr() == ours[rank][name].data_ptr()
                clipped = method.to_config().get("clip_norm")  # which makes another array
                assert shared is (in_place and clipped is None)
                if not in_place:
                    assert torch.equal(
                        ours[rank][name].nan_to_num(), given_[rank][name].nan_to_num()
                    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_as_in_host_memory(loops, dtype):
    """Also where an average of residuals has no room in the gradients' dtype."""
    random, shapes = np.random.default_rng(2), {"a": (40, 30), "b": (64, 8)}
    on_host, on_gpu = (Ranks(TopK(density=0.05), shapes, 2, in_place=True) for _ in "hg")
    largest = float(torch.finfo(dtype).max)
    for _ in range(3):
        drawn_ = [{n: random.standard_normal(s) for n, s in shapes.items()} for _ in "ab"]
        for own in drawn_:
            own["b"][0] = 0.7 * largest  # what is left of it is too large with the next
        gradients = [{n: torch.tensor(x).to(dtype) for n, x in own.items()} for own in drawn_]
        expected = on_host.exchange(copy.deepcopy(gradients))
        with pytest.MonkeyPatch.context() as patch:
            if INTERPRETED:
                patch.setattr(backend, "loops", lambda x: "hvd_compress.torch.triton.loops")
            found = on_gpu.exchange(made(gradients, lambda x: x.to(DEVICE)))
        for its, theirs in zip(found, expected, strict=True):
            for name in shapes:
                assert its[name].mean.dtype == dtype
                assert_equal(_wide(moved(its[name], "cpu")), _wide(theirs[name]))


def _wide(outcome):
    return outcome._replace(mean=outcome.mean.float())


def test_steps_are_checked_before_gradients_rely_on_them(loops, monkeypatch):
    from hvd_compress.torch.triton import check

    assert check.problem_of(DEVICE) is None

    class Wrong(loops.TopKStep):
        def settle(self, columns, *args, **options):
            super().settle(columns, *args, **options)
            columns[0].arrays[0].view(torch.int32)[0] ^= 1

    class Failing(loops.TopKStep):
        def encode(self, *args):
            raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(loops, "TopKStep", Wrong)
    assert "other bits" in check.problem_of(DEVICE)
    monkeypatch.setattr(loops, "TopKStep", Failing)
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


def test_the_host_never_waits_for_a_step_of_a_bucket(loops):
    """If messages stay on the device, and tensors where they are."""
    sizes, random = [500, 70], np.random.default_rng(0)
    step = loops.TopKStep(sizes, [5, 1], "float32", torch.empty(0, device=DEVICE))
    _, arrays = columns_of(random, sizes, "normal", 0.9)
    columns = as_columns(arrays)

    def run():
        step.settle(columns, torch.cat([step.encode(columns, 0.9)] * 2), 2, True)

    run()  # which tells the device where tensors are
    assert waits_of(run) == 0

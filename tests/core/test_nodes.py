"""How the ranks of a node divide gradients, all in one process."""

import numpy as np
import pytest
import torch

from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import run
from hvd_compress.errors import ConfigError
from hvd_compress.reduce.nodes import Node, Sharing, table_of

SHAPES = ((4, 3, 5, 2), (9, 4), (16, 3), (2, 50), (8,), (5,), (1, 1), (0, 3), (9, 0), ())


class _Inside(LocalEngine):
    """Says where a rank is, and never runs anything."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


def _sharing(place, ranks, gradients, in_place=True):
    taken = []
    node = Node(LocalEngine(), _Inside(place, ranks), None)
    sharing = Sharing(node, gradients, taken.append, in_place)
    return sharing, sharing._scatter(sharing._enter(gradients)), taken


def _gradients(rank, library, dtype):
    generator = np.random.default_rng(rank)
    arrays = {str(i): generator.normal(size=shape) for i, shape in enumerate(SHAPES)}
    if library == "numpy":
        return {name: x.astype(dtype) for name, x in arrays.items()}
    tensors = {name: torch.tensor(x, dtype=getattr(torch, dtype)) for name, x in arrays.items()}
    tensors["last"] = tensors["0"].contiguous(memory_format=torch.channels_last)
    return tensors


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float32"), ("torch", "float64"), ("torch", "float16"), ("torch", "bfloat16")],
)
def test_the_ranks_of_a_node_have_all_of_a_bucket_once(library, dtype, in_place, ranks):
    everyones = [_gradients(rank, library, dtype) for rank in range(ranks)]
    seen = [_sharing(place, ranks, own, in_place) for place, own in enumerate(everyones)]
    wide = {"float32": np.float32, "float64": np.float64}.get(dtype, np.float32)
    before = [{n: np.array(x.tolist(), wide) for n, x in own.items()} for own in everyones]
    run([scatter for _, scatter, _ in seen])
    parts = [taken[0] for *_, taken in seen]
    means = {}
    for name, x in everyones[0].items():
        total = before[0][name]
        for other in before[1:]:  # in the order of the ranks
            total = total + other[name]
        expected = total / ranks
        if library == "torch":
            expected = torch.from_numpy(np.asarray(expected)).to(x.dtype).to(torch.float64).numpy()
        means[name] = expected
        own = [np.array(part[name].tolist(), wide) for part in parts if name in part]
        if not expected.size:
            assert not own
            continue
        np.testing.assert_array_equal(np.concatenate([x.ravel() for x in own]), expected.ravel())
        by_rows = len(x.shape) > 1 and x.shape[0] >= ranks
        assert {part.shape[1:] for part in own} == {tuple(x.shape[1:]) if by_rows else ()}
        assert max(map(len, own)) - min(map(len, own)) <= 1
    doubled = [{name: 2 * x for name, x in own.items()} for own in parts]
    gathers = [sharing._divided[0](own) for (sharing, *_), own in zip(seen, doubled, strict=True)]
    for own, results in zip(everyones, run(gathers), strict=True):
        for name, x in results.items():
            assert x.shape == own[name].shape
            np.testing.assert_array_equal(np.array(x.tolist(), wide), 2 * means[name])
            is_contiguous = library == "numpy" or own[name].is_contiguous()
            assert (x is own[name]) == (in_place and is_contiguous)


def test_results_go_where_gradients_are_by_then():
    """Users may give tensors other memory between backward and step."""
    everyones = [_gradients(rank, "torch", "float32") for rank in range(2)]
    seen = [_sharing(place, 2, own) for place, own in enumerate(everyones)]
    run([scatter for _, scatter, _ in seen])
    for x in everyones[1].values():
        x.data = torch.full_like(x, 7)
    first, second = run([sharing._divided[0](taken[0]) for sharing, _, taken in seen])
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    assert all(second[name] is x for name, x in everyones[1].items() if x.is_contiguous())


def test_a_bucket_may_have_several_dtypes():
    kinds = (torch.float16, torch.float64)
    everyones = [{str(kind): torch.arange(5).to(kind) + i for kind in kinds} for i in range(2)]
    seen = [_sharing(place, 2, own) for place, own in enumerate(everyones)]
    run([scatter for _, scatter, _ in seen])
    for sharing, _, taken in seen:
        assert [x.dtype for parts in taken for x in parts.values()] == [*kinds]
        assert len(sharing._divided) == 2
    for i in range(2):
        for found in run([sharing._divided[i](taken[i]) for sharing, _, taken in seen]):
            assert all(x.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5] for x in found.values())


def test_sums_of_16_bits_do_not_overflow():
    large = [{"w": torch.full((8,), 60000.0, dtype=torch.float16)} for _ in range(3)]
    seen = [_sharing(place, 3, own) for place, own in enumerate(large)]
    run([scatter for _, scatter, _ in seen])
    assert all((taken[0]["w"] == 60000.0).all() for *_, taken in seen)


def test_nothing_waits_for_a_device_on_the_way_through_a_node():
    """On "meta" whatever asked for a number would raise."""
    for dtype in ("float32", "float16"):
        gradients = {name: x.to("meta") for name, x in _gradients(0, "torch", dtype).items()}
        sharing, scatter, taken = _sharing(1, 3, gradients)
        request = next(scatter)
        with pytest.raises(StopIteration):
            scatter.send([request.payloads[1]] * 3)
        assert taken[0]["1"].shape == (3, 4)
        gather = sharing._divided[0](taken[0])
        with pytest.raises(StopIteration):
            gather.send([next(gather).payload] * 3)


def test_nodes_are_found_by_their_hosts():
    assert table_of(2, range(6), []) == [[0, 1, 2], [3, 4, 5]]
    assert table_of("auto", [4, 1, 3, 2], ["a", "b", "a", "b"]) == [[3, 4], [1, 2]]
    with pytest.raises(ConfigError, match=r"nodes of 1 and 3 ranks.*as many ranks on every node"):
        table_of("auto", range(4), [0, 1, 1, 1])

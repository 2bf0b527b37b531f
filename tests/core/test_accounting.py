"""The shapes of models with a name, and the bytes that a rank sends of their gradients."""

import math

import numpy as np
import pytest

from hvd_compress import DGC, Context, Gather
from hvd_compress.advisor.shapes import mobilenet_v2, ptb_lstm, resnet50
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.lockstep import reply_to
from hvd_compress.reduce import Reducer
from hvd_compress.wire import sparse_size


def elements(shapes, matrices):
    return sum(math.prod(shape) for shape in shapes.values() if (len(shape) > 1) == matrices)


@pytest.mark.parametrize(
    ("shapes", "tensors", "in_matrices", "in_vectors"),
    [
        (resnet50(), 161, 25_502_912, 54_120),
        (mobilenet_v2(), 158, 3_469_760, 35_112),
        (ptb_lstm(), 10, 51_000_000, 34_000),
    ],
    ids=["resnet50", "mobilenet-v2", "ptb-lstm"],
)
def test_shapes(shapes, tensors, in_matrices, in_vectors):
    assert len(shapes) == tensors
    assert elements(shapes, matrices=True) == in_matrices
    assert elements(shapes, matrices=False) == in_vectors


def test_some_of_resnet50s_tensors():
    shapes = resnet50()
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer2.0.conv1.weight"] == (128, 256, 1, 1)
    assert shapes["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert shapes["layer4.2.bn3.bias"] == (2048,)
    assert shapes["fc.weight"] == (1000, 2048)
    assert list(shapes)[-2:] == ["fc.weight", "fc.bias"]
    assert sum("downsample" in name for name in shapes) == 4 * 3


@pytest.mark.parametrize(
    ("shapes", "published"), [(resnet50(), 277), (ptb_lstm(), 462)], ids=["resnet50", "ptb-lstm"]
)
def test_the_papers_ratios(shapes, published):
    """By 48 bits an element of 0.1 %, and 1-D tensors whole."""
    matrices, vectors = elements(shapes, matrices=True), elements(shapes, matrices=False)
    ratio = 4 * (matrices + vectors) / (0.001 * 6 * matrices + 4 * vectors)
    assert ratio == pytest.approx(published, abs=0.5)


def bytes_sent(method, gradients):
    """By one rank, counted from what it hands over; all ranks' must be the same."""
    contexts = [Context(rank=rank, size=len(gradients)) for rank in range(len(gradients))]
    exchanges = [
        method.exchange(gradient, method.init(gradient), context)
        for gradient, context in zip(gradients, contexts, strict=True)
    ]
    requests = [next(exchange) for exchange in exchanges]
    (sent,) = {r.payload.nbytes if isinstance(r, Gather) else r.array.nbytes for r in requests}
    for exchange in exchanges:
        with pytest.raises(StopIteration):  # one round, so that this was all
            exchange.send(reply_to(requests))
    return sent


@pytest.mark.parametrize(("values", "in_all"), [("float32", 421_608), ("float16", 370_704)])
def test_what_we_send_for_resnet50(values, in_all):
    random = np.random.default_rng(0)
    method = DGC(density=0.001, momentum=0.9, values=values, indices="int32")
    shapes = resnet50()
    total = 0
    for name, shape in shapes.items():
        n = math.prod(shape)
        gradients = [random.standard_normal(shape, np.float32) for _ in range(2)]
        sent = bytes_sent(method, gradients)
        expected = sparse_size(math.ceil(n / 1000), n, values) if len(shape) > 1 else 4 * n
        assert sent == expected, name
        total += sent
    assert total == in_all


@pytest.mark.parametrize(
    ("options", "kilobytes"),
    [
        ({"indices": "int32"}, 420.8),
        ({}, 355.4),
        ({"values": "float16"}, 304.3),
        ({"small": "float16"}, 247.1),
        ({"small": "int8"}, 193.6),
        ({"small": "sparse"}, 139.5),
        ({"small": "sparse", "values": "float16"}, 88.3),
        (DGC.presets["compact"], 51.1),
    ],
)
def test_what_buckets_send_for_resnet50(options, kilobytes):
    """Messages with one header each."""
    random = np.random.default_rng(0)
    reducer = Reducer(DGC(density=0.001, **options), LocalEngine(), momentum=0.9, in_place=True)
    reducer.reduce({k: random.standard_normal(s, np.float32) for k, s in resnet50().items()})
    assert reducer.stats().total.bytes_sent / 1000 == pytest.approx(kilobytes, abs=0.5)

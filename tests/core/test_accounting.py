"""The shapes of models with a name, and the ratios that a paper has of them."""

import math

import pytest

from hvd_compress.advisor.shapes import mobilenet_v2, ptb_lstm, resnet50


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

"""The parameters of well-known models, by name and shape: what sizes and ratios are computed for.

>>> import math
>>> shapes = resnet50()
>>> len(shapes), sum(map(math.prod, shapes.values()))
(161, 25557032)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

Shapes = dict[str, tuple[int, ...]]


def norm(name: str, channels: int) -> Shapes:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def resnet50() -> Shapes:
    """ResNet-50 (He et al., CVPR 2016), with torchvision's names."""
    shapes: Shapes = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            at, outputs = f"layer{stage}.{block}", 4 * width
            kernels = ((width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1))
            for i, kernel in enumerate(kernels, start=1):
                shapes[f"{at}.conv{i}.weight"] = kernel
                shapes |= norm(f"{at}.bn{i}", kernel[0])
            if block == 0:
                shapes[f"{at}.downsample.0.weight"] = (outputs, inputs, 1, 1)
                shapes |= norm(f"{at}.downsample.1", outputs)
            inputs = outputs
    return shapes | linear("fc", 1000, inputs)


def mobilenet_v2() -> Shapes:
    """MobileNetV2 (Sandler et al., CVPR 2018), of width 1."""

    def convolution(name: str, outputs: int, inputs: int, size: int) -> Shapes:
        weight = {f"{name}.weight": (outputs, inputs, size, size)}
        return weight | norm(f"{name}.norm", outputs)

    shapes, inputs, block = convolution("first", 32, 3, 3), 32, 0
    for expansion, outputs, blocks in (
        *((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4)),
        *((6, 96, 3), (6, 160, 3), (6, 320, 1)),
    ):
        for _ in range(blocks):
            at, width = f"block{block}", expansion * inputs
            if expansion > 1:
                shapes |= convolution(f"{at}.expand", width, inputs, 1)
            shapes |= convolution(f"{at}.depthwise", width, 1, 3)
            shapes |= convolution(f"{at}.project", outputs, width, 1)
            inputs, block = outputs, block + 1
    return shapes | convolution("last", 1280, inputs, 1) | linear("fc", 1000, 1280)


def ptb_lstm(vocabulary: int = 10_000, width: int = 1500, layers: int = 2) -> Shapes:
    """The word model of Lin et al. (2018) for the Penn Treebank.

    It has LSTM layers of 1500 units with two bias vectors each, and a decoder that shares the
    embedding's matrix.  That of Vogels et al. (2019) for WikiText-2 is ``ptb_lstm(28_869, 650,
    3)``.
    """
    shapes: Shapes = {"encoder.weight": (vocabulary, width)}
    for layer in range(layers):
        for side in ("ih", "hh"):
            shapes[f"rnn.weight_{side}_l{layer}"] = (4 * width, width)
            shapes[f"rnn.bias_{side}_l{layer}"] = (4 * width,)
    return shapes | {"decoder.bias": (vocabulary,)}


def vgg16() -> Shapes:
    """VGG-16 (Simonyan and Zisserman, ICLR 2015), of which most is one fully connected layer."""
    shapes: Shapes = {}
    inputs = 3
    for i, width in enumerate((64, 64, 128, 128, 256, 256, 256, *6 * (512,))):
        shapes |= {f"conv{i}.weight": (width, inputs, 3, 3), f"conv{i}.bias": (width,)}
        inputs = width
    shapes |= linear("fc1", 4096, 512 * 7 * 7) | linear("fc2", 4096, 4096)
    return shapes | linear("fc3", 1000, 4096)


def transformer(vocabulary: int, positions: int, width: int, layers: int) -> Shapes:
    """Layers of attention and a perceptron between two normalisations each (Vaswani et al., NeurIPS
    2017).

    Embeddings of tokens and positions come before them; the output shares the tokens' matrix.
    """
    shapes: Shapes = {"tokens.weight": (vocabulary, width), "positions.weight": (positions, width)}
    for layer in range(layers):
        at = f"layer{layer}"
        shapes |= norm(f"{at}.norm1", width) | linear(f"{at}.qkv", 3 * width, width)
        shapes |= linear(f"{at}.out", width, width) | norm(f"{at}.norm2", width)
        shapes |= linear(f"{at}.fc1", 4 * width, width) | linear(f"{at}.fc2", width, 4 * width)
    return shapes | norm("norm", width)


#: models by the names that users write
MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    # For texts of 256 bytes: 10.8 million parameters.
    "small_transformer": functools.partial(transformer, 256, 256, 384, 6),
    "ptb_lstm": ptb_lstm,
    "vgg16": vgg16,
    # BERT-base (Devlin et al., NAACL 2019), without its pooler and heads.
    "bert_base": functools.partial(transformer, 30_522, 512, 768, 12),
}


def elements_of(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))

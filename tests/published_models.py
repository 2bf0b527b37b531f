"""The parameters of models whose ratios papers have published, by name and shape."""

from __future__ import annotations

from hvd_compress.advisor.shapes import Shapes, linear, norm


def resnet18_cifar(classes: int = 10) -> Shapes:
    """ResNet-18 for images of 32 x 32 pixels, as in experiments on CIFAR-10: a first convolution of
    3 x 3, and no pooling behind it."""
    shapes: Shapes = {"conv1.weight": (64, 3, 3, 3), **norm("bn1", 64)}
    inputs = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            at = f"layer{stage}.{block}"
            for i, channels in enumerate((inputs, width), start=1):
                shapes[f"{at}.conv{i}.weight"] = (width, channels, 3, 3)
                shapes |= norm(f"{at}.bn{i}", width)
            if inputs != width:
                shapes[f"{at}.shortcut.0.weight"] = (width, inputs, 1, 1)
                shapes |= norm(f"{at}.shortcut.1", width)
            inputs = width
    return shapes | linear("linear", classes, inputs)


def alexnet(classes: int = 1000) -> Shapes:
    """AlexNet (Krizhevsky et al., NeurIPS 2012) with two groups in conv2, conv4 and conv5."""
    convolutions = (
        (96, 3, 11, 11),
        (256, 48, 5, 5),
        (384, 256, 3, 3),
        (384, 192, 3, 3),
        (256, 192, 3, 3),
    )
    shapes: Shapes = {}
    for i, kernel in enumerate(convolutions, start=1):
        shapes |= {f"conv{i}.weight": kernel, f"conv{i}.bias": kernel[:1]}
    for name, outputs, inputs in (
        ("fc6", 4096, 256 * 6 * 6),
        ("fc7", 4096, 4096),
        ("fc8", classes, 4096),
    ):
        shapes |= linear(name, outputs, inputs)
    return shapes


def deep_speech(outputs: int = 29, width: int = 1500, layers: int = 5) -> Shapes:
    """The speech model of Lin et al. (2018) for LibriSpeech, after Deep Speech 2: two convolutions
    over spectrograms of 161 frequencies, five bidirectional GRU layers of 1500 units whose
    directions are added up, and 29 characters.

    The paper says no more than the number, kind and size of the layers.  Assumed: kernels of
    41 x 11 and 21 x 11 with 32 channels, strides of 2 over the frequencies and no padding; batch
    normalisation behind the convolutions, before each GRU but the first and before the last layer;
    two bias vectors a gate; a last layer without bias.  The gradient then has 488.08 MiB, where the
    paper has 488 MB.
    """
    shapes: Shapes = {"conv1.weight": (32, 1, 41, 11), "conv1.bias": (32,), **norm("bn1", 32)}
    shapes |= {"conv2.weight": (32, 32, 21, 11), "conv2.bias": (32,), **norm("bn2", 32)}
    inputs = 32 * 21  # channels times the frequencies that are left
    for layer in range(layers):
        if layer:
            shapes |= norm(f"rnn{layer}.norm", width)
        for name in (f"rnn{layer}", f"rnn{layer}.reverse"):
            for side, columns in (("ih", inputs), ("hh", width)):
                shapes[f"{name}.weight_{side}"] = (3 * width, columns)
                shapes[f"{name}.bias_{side}"] = (3 * width,)
        inputs = width
    return shapes | norm("fc.norm", width) | {"fc.weight": (outputs, width)}

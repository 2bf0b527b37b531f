"""Models for the examples, of images and of texts."""

from __future__ import annotations

import itertools

import torch
from torch import nn


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Two convolutions and two linear layers; 1.08 million parameters on 8 x 8 digits."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 2) * (width // 2), 1024),
        nn.ReLU(),
        nn.Linear(1024, classes),
    )


def mlp(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Three linear layers of 1024; 1.13 million parameters on 8 x 8 digits."""
    return perceptron(shape[0] * shape[1] * shape[2], 1024, 1024, classes)


def perceptron(*widths: int) -> nn.Module:
    """A small network: linear layers of these widths, from inputs to classes."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Percent of the images whose labels the model finds."""
    return 100 * (model.eval()(x).argmax(1) == y).float().mean().item()


# -- language models: each gives logits for the next word, and its state --------------------------

State = tuple[torch.Tensor, ...] | None


class LSTM(nn.Module):
    """Two layers, and one matrix to read and to write words with (Press and Wolf, 2017)."""

    def __init__(self, words: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.output = _tied(words, width)
        self.layers = nn.LSTM(width, width, 2, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Logits for words of shape (length, batch); gradients do not reach the state before."""
        if state is not None:
            state = tuple(part.detach() for part in state)
        hidden, state = self.layers(self.dropout(self.embedding(words)), state)
        return self.output(self.dropout(hidden)), state


class Transformer(nn.Module):
    """Layers with normalisation before each part; it has no state from text to text."""

    def __init__(
        self, words: int, width: int, length: int, dropout: float, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding, self.output = _tied(words, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, norm_first=True)
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), False)

    def forward(self, words: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Logits for words of shape (length, batch)."""
        length = len(words)
        hidden = self.embedding(words) + self.position[:length]
        hidden = self.layers(hidden, self.mask[:length, :length], is_causal=True)
        return self.output(hidden), None


def _tied(words: int, width: int) -> tuple[nn.Embedding, nn.Linear]:
    embedding, output = nn.Embedding(words, width), nn.Linear(width, words)
    nn.init.uniform_(embedding.weight, -0.1, 0.1)
    output.weight = embedding.weight
    return embedding, output


TEXT_MODELS = {"lstm": LSTM, "transformer": Transformer}

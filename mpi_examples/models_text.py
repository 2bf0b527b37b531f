"""Language models for train_text.py: each gives logits for the next word, and its state."""

from __future__ import annotations

import torch
from torch import nn

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
    """Two layers with normalisation before each part; it has no state from text to text."""

    def __init__(self, words: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.output = _tied(words, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, norm_first=True)
        self.layers = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False
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


MODELS = {"lstm": LSTM, "transformer": Transformer}

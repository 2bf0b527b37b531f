"""Models for the examples."""

from __future__ import annotations

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
    inputs = shape[0] * shape[1] * shape[2]
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, classes),
    )


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Percent of the images whose labels the model finds."""
    return 100 * (model.eval()(x).argmax(1) == y).float().mean().item()


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet20(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The small ResNet of He et al. (2016) for CIFAR-10; 0.27 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    width = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            layers.append(_Block(width, outputs, stride if block == 0 else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


MODELS = {"cnn": cnn, "mlp": mlp, "resnet20": resnet20}

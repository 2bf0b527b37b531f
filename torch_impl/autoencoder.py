"""The autoencoder of LGC in PyTorch, on the device of its weights; see
:mod:`hvd_compress.methods.lgc_numpy_network`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn import functional

from hvd_compress.methods import lgc_network as network
from hvd_compress.methods.lgc_layout import SLOPE

Tensor = torch.Tensor


def encode(weights: Tensor, values: Tensor) -> Tensor:
    with _plain(weights):
        return network.encoded(_LAYERS, weights, values)


def gradient(
    weights: Tensor, values: Tensor, innovations: Tensor | None, leader: int
) -> tuple[Tensor, Tensor]:
    with _plain(weights), torch.enable_grad():
        weights = weights.detach().requires_grad_()
        loss, decoded = network.loss(_LAYERS, weights, values, innovations, leader)
        (found,) = torch.autograd.grad(loss, weights)
        return found, decoded.detach()


@contextlib.contextmanager
def _plain(weights: Tensor) -> Iterator[None]:
    """Compute without autocast, and with those algorithms of cuDNN that have the same bits each
    time.  All ranks learn from the same numbers, and their autoencoders must stay equal."""
    reproducible = torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False
    )
    with torch.autocast(weights.device.type, enabled=False), reproducible:
        yield


def _convolve(x: Tensor, kernel: Tensor, bias: Tensor, stride: int) -> Tensor:
    y = functional.conv1d(x.mT, kernel.permute(2, 1, 0), bias, stride)
    return functional.leaky_relu(y, SLOPE).mT


def _spread(x: Tensor, kernel: Tensor, bias: Tensor, stride: int) -> Tensor:
    y = functional.conv_transpose1d(x.mT, kernel.permute(1, 2, 0), bias, stride)
    return functional.leaky_relu(y, SLOPE).mT


_LAYERS = network.Layers(
    _convolve,
    _spread,
    take=lambda x, places: x[:, torch.from_numpy(places).to(x.device)],
    mean=lambda x, axis: x.mean() if axis is None else x.mean(axis),
)

"""The autoencoder of LGC in PyTorch, on the device of its weights; see
:class:`hvd_compress.autoencoder.Network`."""

from __future__ import annotations

import torch
from torch.nn import functional

from hvd_compress.autoencoder import DECODER, ENCODER, SLOPE, stretched, unpacked
from hvd_compress.autoencoder.layout import Weights

Tensor = torch.Tensor
Parameters = list[tuple[Tensor, Tensor]]


def encode(weights: Tensor, values: Tensor) -> Tensor:
    with _plain(weights):
        return _encoded(_unpacked(weights, innovation=False).encoder, values)


def gradient(
    weights: Tensor, values: Tensor, innovations: Tensor | None, leader: int
) -> tuple[Tensor, Tensor]:
    with _plain(weights), torch.enable_grad():
        weights = weights.detach().requires_grad_()
        encoder, decoders = _unpacked(weights, innovations is not None)
        ranks, n = values.shape
        latents = _encoded(encoder, values)
        if innovations is None:
            decoded = _decoded(decoders, latents.mean(0, keepdim=True), n, None)
            loss = (decoded - values.mean(0)).square().mean()
        else:
            same = latents[leader].expand(ranks, -1)
            decoded = _decoded(decoders, same, n, innovations)
            apart = latents[:, None] - latents[None]
            loss = (decoded - values).square().mean(1).sum() + apart.square().mean(2).sum()
            loss = loss / 2
        (found,) = torch.autograd.grad(loss, weights)
        return found, decoded.detach()


def _plain(weights: Tensor) -> torch.autocast:
    """Return a context in which autocast is off, so that training in half precision ends here."""
    return torch.autocast(weights.device.type, enabled=False)


def _unpacked(weights: Tensor, innovation: bool) -> Weights:
    return unpacked(weights, weights.numel(), innovation, Tensor.reshape)


def _encoded(parameters: Parameters, values: Tensor) -> Tensor:
    x = values[:, None]
    for layer, (kernel, bias) in zip(ENCODER, parameters, strict=True):
        x = functional.conv1d(x, kernel.permute(2, 1, 0), bias, layer.stride)
        x = functional.leaky_relu(x, SLOPE)
    return x.transpose(1, 2).flatten(1)


def _decoded(
    decoders: list[Parameters],
    latents: Tensor,
    n: int,
    innovations: Tensor | None,
) -> Tensor:
    where = torch.from_numpy(stretched(n)).to(latents.device)
    rows = []
    for row, latent in enumerate(latents):
        parameters = decoders[row % len(decoders)]
        x = latent.reshape(1, -1, DECODER[0].inputs).transpose(1, 2)
        for layer, (kernel, bias) in zip(DECODER, parameters[:-1], strict=True):
            x = functional.conv_transpose1d(x, kernel.permute(1, 2, 0), bias, layer.stride)
            x = functional.leaky_relu(x, SLOPE)
        x = x[:, :, where]
        if innovations is not None:
            x = torch.cat([x, innovations[row][None, None]], 1)
        kernel, bias = parameters[-1]
        rows.append(functional.conv1d(x, kernel.permute(2, 1, 0), bias)[0])
    return torch.cat(rows)

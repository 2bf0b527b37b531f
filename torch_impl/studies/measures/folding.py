"""Which weights count."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from hvd_compress.errors import UnsupportedError


def folded(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` in evaluation mode that computes the same, without batch
    normalisation.

    Raises:
        UnsupportedError: a batch normalisation does not stand behind a convolution or a linear
            layer of the same ``Sequential``.
    """
    model = copy.deepcopy(model).eval()
    for container in model.modules():
        if not isinstance(container, nn.Sequential):
            continue
        for i in range(len(container) - 1):
            layer, norm = container[i], container[i + 1]
            if not isinstance(norm, _BatchNorm):
                continue
            if isinstance(layer, nn.Linear):
                container[i], container[i + 1] = fuse_linear_bn_eval(layer, norm), nn.Identity()
            elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                container[i], container[i + 1] = fuse_conv_bn_eval(layer, norm), nn.Identity()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise UnsupportedError(
                f"{name} cannot be folded: put it right behind its layer, in the same nn.Sequential"
            )
    return model


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of ``model`` by name: parameters of two dimensions or more, which leaves
    out biases."""
    return {name: p for name, p in model.named_parameters() if p.ndim > 1}

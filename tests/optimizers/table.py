"""Optimizers with options, and one interface to them in NumPy, PyTorch and Keras.

An optimizer's row is all that it takes for the laws of ``test_laws.py``, in one process, and of the
scenarios ``optimizers*.py``, on several ranks.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

import hvd_compress.tensorflow.keras as hvd_keras
import hvd_compress.torch as hvd_torch
from hvd_compress import optimizers
from hvd_compress.optimizers import Formula, Now

FREEZE = 4
#: options by the name of a row; the class is the part of the name before the colon
ROWS: dict[str, dict[str, Any]] = {
    "LARS": {"lr": 2.0, "weight_decay": 0.01, "trust_coefficient": 0.02},
    "LARS:plain": {"lr": 0.5, "momentum": 0.5},
    "LAMB": {"lr": 0.01, "weight_decay": 0.1},
    "LAMB:plain": {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-4},
    "OneBitAdam": {"lr": 0.01, "weight_decay": 0.1, "freeze_step": FREEZE},
    "OneBitAdam:raw": {"lr": 0.01, "freeze_step": FREEZE, "bias_correction": False},
    "OneBitLAMB": {"lr": 0.01, "weight_decay": 0.1, "freeze_step": FREEZE},
    "OneBitLAMB:raw": {"lr": 0.01, "freeze_step": FREEZE, "bias_correction": False},
    "ZeroOneAdam": {"lr": 0.01, "weight_decay": 0.1, "var_update_scaler": 2},
}
#: options that make no sense, by the class; with the names of PyTorch and of the formulas
BAD: dict[str, list[tuple[str, Any]]] = {
    "LARS": [("lr", -1.0), ("momentum", -1.0), ("weight_decay", -0.1), ("trust_coefficient", -1)],
    "LAMB": [("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9)), ("eps", -1.0), ("weight_decay", None)],
    "OneBitAdam": [
        *[("lr", -1.0), ("eps", -1.0), ("weight_decay", -0.1), ("betas", (0.9, 1.0))],
        *[("freeze_step", 0), ("freeze_step", True), ("freeze_step", 1.5)],
    ],
    "OneBitLAMB": [
        *[("freeze_step", 0), ("coefficient_range", (0.0, 1.0)), ("factor_range", (2.0, 1.0))],
        *[("coefficient_beta", 1.0), ("factor_threshold", 0.0), ("eps", -1.0)],
    ],
    "ZeroOneAdam": [
        *[("local_step_clipper", 1.5), ("betas", (1.0, 0.9)), ("eps", -1.0)],
        *[(f"{name}", 0) for name in optimizers.ZeroOneAdam.schedule],
    ],
}


def formula_of(row: str) -> Formula:
    return getattr(optimizers, row.partition(":")[0])(**ROWS[row])


class InNumPy:
    """The formula, called as it is, and what a host tells it."""

    def __init__(self, row: str, weights: Sequence[np.ndarray]) -> None:
        self.formula, self.arrays = formula_of(row), list(weights)
        self.states: list[dict[str, Any]] = [{} for _ in weights]
        self.step_number = self.variance_steps = 0

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        frozen, self.step_number = self._is_frozen(), self.step_number + 1
        self.variance_steps += not frozen
        now = Now(self.step_number, max(1, self.variance_steps), frozen)
        for i, g in enumerate(gradients):
            self.arrays[i], self.states[i] = self.formula.step(
                self.arrays[i], g, self.states[i], now
            )

    def _is_frozen(self) -> bool:
        if isinstance(self.formula, optimizers.ZeroOneAdam):
            return self.formula.phases.phase(self.step_number + 1) != "variance"
        return self.step_number >= getattr(self.formula, "freeze_step", np.inf)

    def weights(self) -> list[np.ndarray]:
        return self.arrays


class InTorch:
    def __init__(self, row: str, weights: Sequence[np.ndarray], **more: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.tensor(w)) for w in weights]
        cls = getattr(hvd_torch, row.partition(":")[0])
        self.optimizer = cls(self.parameters, **{**ROWS[row], **more})

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = torch.tensor(g, dtype=p.dtype)
        self.optimizer.step()

    def weights(self) -> list[np.ndarray]:
        return [p.detach().numpy().copy() for p in self.parameters]

    def saved_and_loaded(self, row: str) -> InTorch:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        other = type(self)(row, self.weights(), lr=123.0)
        other.optimizer.load_state_dict(torch.load(file))
        return other

    @staticmethod
    def with_option(name: str, option: str, value: Any) -> Any:
        return getattr(hvd_torch, name)([torch.nn.Parameter(torch.ones(2))], **{option: value})


KERAS_NAMES = {"lr": "learning_rate", "eps": "epsilon"}


def keras_options(options: dict[str, Any]) -> dict[str, Any]:
    found = {KERAS_NAMES.get(name, name): value for name, value in options.items()}
    if betas := found.pop("betas", None):
        found["beta_1"], found["beta_2"] = betas
    return found


class InKeras:
    def __init__(self, row: str, weights: Sequence[np.ndarray], in_graph: bool = False) -> None:
        self.in_graph = in_graph
        self.variables = [keras.Variable(w, dtype=w.dtype.name) for w in weights]
        cls = getattr(hvd_keras, row.partition(":")[0])
        self.optimizer = cls(**keras_options(ROWS[row]))
        self.optimizer.build(self.variables)
        # A rate is a variable of float32, and would round that of the formula.
        self.optimizer._learning_rate = tf.Variable(ROWS[row]["lr"], dtype=tf.float64)
        self.graph = tf.function(self._apply) if in_graph else self._apply

    def _apply(self, gradients: Sequence[Any]) -> None:
        self.optimizer.apply(gradients, self.variables)

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        pairs = zip(gradients, self.variables, strict=True)
        self.graph([tf.constant(g, v.dtype) for g, v in pairs])

    def weights(self) -> list[np.ndarray]:
        return [v.numpy() for v in self.variables]

    def saved_and_loaded(self, row: str) -> InKeras:
        other = type(self)(row, self.weights(), in_graph=self.in_graph)
        store: dict[str, Any] = {}
        self.optimizer.save_own_variables(store)
        other.optimizer = type(self.optimizer).from_config(self.optimizer.get_config())
        other.optimizer.build(other.variables)
        other.optimizer.load_own_variables(store)
        other.optimizer._learning_rate = self.optimizer._learning_rate
        return other

    @staticmethod
    def with_option(name: str, option: str, value: Any) -> Any:
        return getattr(hvd_keras, name)(**keras_options({option: value}))


FRAMEWORKS = {
    "torch": InTorch,
    "keras": InKeras,
    "keras-graph": functools.partial(InKeras, in_graph=True),
}

"""Data sets for the examples: scikit-learn's digits, which need no download, and CIFAR-10."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

if TYPE_CHECKING:  # examples in NumPy do without
    from torch.utils.data import TensorDataset


def digit_arrays(seed: int) -> list[np.ndarray]:
    """Images to train on and to test with, then their labels: 1797 scanned digits of 8 x 8 grey
    pixels, of which a fifth, stratified, is for testing."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """:func:`digit_arrays`, standardised."""
    import torch
    from torch.utils.data import TensorDataset

    x_train, x_test, y_train, y_test = map(torch.from_numpy, digit_arrays(seed))
    mean, std = x_train.mean(), x_train.std()
    return (
        TensorDataset((x_train - mean) / std, y_train),
        TensorDataset((x_test - mean) / std, y_test),
    )


def cifar10(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """CIFAR-10 from its usual files: ``data_batch_1`` to ``_5`` and ``test_batch``."""
    import torch
    from torch.utils.data import TensorDataset

    inner = folder / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else folder
    names = [f"data_batch_{i}" for i in range(1, 6)]
    missing = [name for name in [*names, "test_batch"] if not (folder / name).is_file()]
    if missing:
        raise SystemExit(
            f"{folder} has no {missing[0]}: --data-dir wants the folder that the Python version of "
            "CIFAR-10 unpacks to, with data_batch_1 to data_batch_5 and test_batch in it"
        )

    def read(name: str) -> tuple[np.ndarray, list[int]]:
        batch = pickle.loads((folder / name).read_bytes(), encoding="bytes")
        return batch[b"data"], batch[b"labels"]

    def dataset(names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        batches = [read(name) for name in names]
        pixels = np.concatenate([images for images, _ in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([labels for _, labels in batches])
        return torch.from_numpy(pixels).float() / 255, torch.from_numpy(labels).long()

    x, y = dataset(names)
    x_test, y_test = dataset(["test_batch"])
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return TensorDataset((x - mean) / std, y), TensorDataset((x_test - mean) / std, y_test)

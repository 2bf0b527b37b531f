"""Data sets for the examples: scikit-learn's digits, which need no download, and CIFAR-10.

Each gives images to train on and to test with, then their labels: float32 arrays of shape (n,
channels, height, width), standardised over the images to train on, and int64.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
#: files of CIFAR-10
TRAINING, TEST = [f"data_batch_{i}" for i in range(1, 6)], "test_batch"


def digits(seed: int) -> Arrays:
    """1797 scanned digits of 8 x 8 grey pixels, of which a fifth, stratified, is for testing."""
    # Here, since a second would pass before a process starts its ranks, or shows its help.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    x, x_test, y, y_test = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=seed
    )
    return (x - x.mean()) / x.std(), (x_test - x.mean()) / x.std(), y, y_test


def cifar10_folder(text: str) -> Path:
    """The folder with CIFAR-10's files, of a command line; checked there, before ranks start."""
    outer = Path(text).expanduser()
    inner = outer / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else outer
    missing = [name for name in [*TRAINING, TEST] if not (folder / name).is_file()]
    if missing:
        raise argparse.ArgumentTypeError(
            f"{folder} has no {missing[0]}: --data-dir wants the folder that the Python version of "
            "CIFAR-10 unpacks to, with data_batch_1 to data_batch_5 and test_batch in it"
        )
    return folder


def cifar10(folder: Path) -> Arrays:
    """CIFAR-10 from its usual files: ``data_batch_1`` to ``_5`` and ``test_batch``."""

    def read(name: str) -> tuple[np.ndarray, list[int]]:
        batch = pickle.loads((folder / name).read_bytes(), encoding="bytes")
        return batch[b"data"], batch[b"labels"]

    def arrays(names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        batches = [read(name) for name in names]
        pixels = np.concatenate([images for images, _ in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([labels for _, labels in batches])
        return pixels.astype(np.float32) / 255, labels.astype(np.int64)

    (x, y), (x_test, y_test) = arrays(TRAINING), arrays([TEST])
    mean, std = x.mean((0, 2, 3), keepdims=True), x.std((0, 2, 3), keepdims=True)
    return (x - mean) / std, (x_test - mean) / std, y, y_test

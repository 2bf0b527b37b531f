"""Data sets for the examples: scikit-learn's digits, which need no download, MNIST and CIFAR-10.

Each gives images to train on and to test with, then their labels: float32 arrays of shape (n,
channels, height, width), standardised over the images to train on, and int64.
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import pickle
from pathlib import Path

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
#: files of CIFAR-10
TRAINING, TEST = [f"data_batch_{i}" for i in range(1, 6)], "test_batch"
#: files of MNIST, compressed or not
MNIST = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


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


def share(images: int, seed: int, epoch: int, rank: int, size: int, batch_size: int) -> np.ndarray:
    """The numbers of the images of one rank in each step of an epoch, of shape (steps, batch)."""
    steps = images // size // batch_size
    if not steps:
        raise SystemExit("no full batch for each rank: use a smaller --batch-size")
    order = np.random.default_rng([seed, epoch]).permutation(images)
    return order[rank::size][: steps * batch_size].reshape(steps, batch_size)


def mnist_cache() -> Path:
    """The folder that ``python -m benchmarks.fetch_mnist`` puts MNIST's files in."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hvd_compress" / "mnist"


def mnist_folder(text: str) -> Path:
    """The folder with MNIST's files, of a command line."""
    folder = Path(text).expanduser()
    for name in MNIST:
        if not any((folder / file).is_file() for file in (name, f"{name}.gz")):
            raise argparse.ArgumentTypeError(
                f"{folder} has no {name} or {name}.gz: `python -m benchmarks.fetch_mnist {folder}` "
                "downloads MNIST's four files to it"
            )
    return folder


def idx(file: Path) -> np.ndarray:
    """The bytes of an idx file, uint8, in the shape that it names.

    Raises:
        ValueError: it holds something else than bytes, or fewer or more than it names.
    """
    data = file.read_bytes()
    if file.suffix == ".gz":
        data = gzip.decompress(data)
    dimensions = data[3] if len(data) > 3 else 0
    header = 4 + 4 * dimensions
    if data[:3] != b"\0\0\x08" or len(data) < header:
        raise ValueError(f"{file} is no idx file of bytes")
    shape = tuple(np.frombuffer(data[4:header], ">u4").tolist())
    if len(data) != header + math.prod(shape):
        raise ValueError(f"{file} has {len(data) - header} bytes for a shape of {shape}")
    return np.frombuffer(data[header:], np.uint8).reshape(shape)


def mnist(folder: Path) -> Arrays:
    """MNIST from its usual files: 60,000 images of 28 x 28 to train on, 10,000 to test with."""

    def read(name: str) -> np.ndarray:
        packed = folder / f"{name}.gz"
        return idx(packed if packed.is_file() else folder / name)

    x, y, x_test, y_test = map(read, MNIST)
    x, x_test = (a[:, None].astype(np.float32) / 255 for a in (x, x_test))
    mean, std = x.mean(), x.std()
    return (x - mean) / std, (x_test - mean) / std, y.astype(np.int64), y_test.astype(np.int64)


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

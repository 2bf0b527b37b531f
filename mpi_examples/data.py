"""Data for the examples: scikit-learn's digits, which need no download, MNIST, and texts.

Data sets of images are those to train on and to test with, then their labels: float32 arrays of
shape (n, channels, height, width), standardised over the images to train on, and int64.  Texts are
numbers of words: Penn Treebank from its usual files, and Python's standard library, which is there
wherever Python is.
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
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


#: files of Penn Treebank
PTB = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
#: of the standard library's words, so many are known; all others are ``<unk>``
WORDS = 1000
_WORD = re.compile(r"\w+|\n *|[^\w\s]")  # the end of a line with the indentation of the next


class Corpus(NamedTuple):
    """Numbers of words, int64 arrays of shape (n,), all below ``words``."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    words: int


def ptb_folder(text: str) -> Path:
    """The folder with Penn Treebank's files, of a command line; checked there, before ranks
    start."""
    folder = Path(text).expanduser()
    for name in PTB:
        if not (folder / name).is_file():
            raise argparse.ArgumentTypeError(
                f"{folder} has no {name}: --data wants the folder with {', '.join(PTB)} in it"
            )
    return folder


def penn_treebank(folder: Path) -> Corpus:
    """Words between blanks; the end of a line is the word ``<eos>``.  All words of the training
    text are known."""
    texts = [(folder / name).read_text("utf-8").replace("\n", " <eos> ") for name in PTB]
    return numbered([text.split() for text in texts])


def standard_library(words: int = WORDS) -> Corpus:
    """The modules at the top of this Python's library: every eighth to train on, and of the others
    one in 32 to validate and one to test with.  So many words are known."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if len(files) < 20:
        raise SystemExit("this Python has no sources of its library: name a text with --data")
    return numbered([_words(files[0::8]), _words(files[1::32]), _words(files[2::32])], words)


def _words(files: list[Path]) -> Iterable[str]:
    for file in files:
        # Nothing can be learnt from a blank line.
        yield from _WORD.findall(re.sub(r"\n\s*\n", "\n", file.read_text("utf-8")))


def numbered(texts: list[Iterable[str]], most: int | None = None) -> Corpus:
    """Training, validation and test text.  The ``most`` frequent words of the first are numbered
    from 1, with words of equal count in the order of their first appearance; 0 are all others."""
    train, valid, test = map(list, texts)
    known = [word for word, _ in Counter(train).most_common(most) if word != "<unk>"]
    numbers = {word: number for number, word in enumerate(known, start=1)}
    found = (np.array([numbers.get(w, 0) for w in text], np.int64) for text in (train, valid, test))
    return Corpus(*found, words=1 + len(known))


def columns(text: np.ndarray, batch: int, rank: int, size: int) -> torch.Tensor:
    """A rank's part, shape (words, batch): each column is a piece of the text."""
    import torch

    count = size * batch
    length = len(text) // count
    if length < 2:
        raise SystemExit(f"{len(text)} words are too few for {count} columns: --batch-size")
    pieces = text[: count * length].reshape(count, length)[rank::size]
    return torch.from_numpy(pieces.T.copy())


def segments(text: torch.Tensor, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the words that are read between two steps, and the word after each."""
    for at in range(0, len(text) - 1, length):
        following = text[at + 1 : at + 1 + length]
        yield text[at : at + len(following)], following


class Regression:
    """A convex problem of several ranks: softmax regression on the digits with an L2 term.

    Args:
        ranks: each has as many images.
        split: "shuffled", or "labels" for few kinds of digits on a rank.
        l2: weight of the regulariser, which is also mu.

    Attributes:
        smoothness: L of the mean of the ranks' functions.
        own_smoothness: the root of the mean square of the L of the ranks' functions.
        largest_smoothness: the largest of them.
        least, most: the minimum, and the value at ``start``.
    """

    def __init__(self, ranks: int, split: str = "shuffled", l2: float = 0.05) -> None:
        from scipy.optimize import minimize
        from sklearn.datasets import load_digits

        x, labels = load_digits(return_X_y=True)
        x = (x - x.mean()) / x.std()
        x = np.column_stack([x, np.ones(len(x))])
        order = np.random.default_rng(0).permutation(len(x))
        if split == "labels":
            order = np.argsort(labels, kind="stable")
        order = order[: len(x) // ranks * ranks]
        self.ranks, self.l2 = ranks, l2
        self.x = x[order].reshape(ranks, -1, 65)
        self.y = np.eye(10)[labels[order]].reshape(ranks, -1, 10)
        # The Hessian of the softmax is at most 1/2.
        grams = np.einsum("rna,rnb->rab", self.x, self.x) / self.x.shape[1]
        own = np.linalg.eigvalsh(grams)[:, -1] / 2 + l2
        self.own_smoothness = math.sqrt(np.mean(own**2))
        self.largest_smoothness = float(own.max())
        self.smoothness = float(np.linalg.eigvalsh(grams.mean(0))[-1]) / 2 + l2
        self.d = 650
        self.start = np.zeros(self.d)
        found = minimize(
            lambda w: (self.value(w), self.mean_gradient(w)),
            self.start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-10},
        )
        self.least, self.most = found.fun, self.value(self.start)

    def value(self, w: np.ndarray) -> float:
        z = self.x @ w.reshape(65, 10)
        top = z.max(2)
        log_sum = np.log(np.exp(z - top[..., None]).sum(2)) + top
        return float((log_sum - (z * self.y).sum(2)).mean() + self.l2 / 2 * w @ w)

    def gradient(self, w: np.ndarray, rank: int, images: slice = slice(None)) -> np.ndarray:
        """Return the gradient of one rank's part, or of some of its images."""
        x, y = self.x[rank, images], self.y[rank, images]
        z = x @ w.reshape(65, 10)
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return (x.T @ (p - y) / len(x)).reshape(-1) + self.l2 * w

    def mean_gradient(self, w: np.ndarray) -> np.ndarray:
        return np.mean([self.gradient(w, rank) for rank in range(self.ranks)], axis=0)

    def error(self, w: np.ndarray) -> float:
        """How much of f(start) - f(best) is left."""
        return (self.value(w) - self.least) / (self.most - self.least)

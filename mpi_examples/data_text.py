"""Texts for train_text.py, as numbers of words: Penn Treebank from its usual files, and Python's
standard library, which is there wherever Python is."""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

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
        # Of a blank line nothing can be learnt.
        yield from _WORD.findall(re.sub(r"\n\s*\n", "\n", file.read_text("utf-8")))


def numbered(texts: list[Iterable[str]], most: int | None = None) -> Corpus:
    """Training, validation and test text.  The ``most`` frequent words of the first are numbered
    from 1, with words of equal count in the order of their first appearance; 0 are all others."""
    train, valid, test = map(list, texts)
    known = [word for word, _ in Counter(train).most_common(most) if word != "<unk>"]
    numbers = {word: number for number, word in enumerate(known, start=1)}
    found = (np.array([numbers.get(w, 0) for w in text], np.int64) for text in (train, valid, test))
    return Corpus(*found, words=1 + len(known))


def share(text: np.ndarray, batch: int, rank: int, size: int) -> torch.Tensor:
    """A rank's part, shape (words, batch): each column is a piece of the text."""
    columns = size * batch
    length = len(text) // columns
    if length < 2:
        raise SystemExit(f"{len(text)} words are too few for {columns} columns: --batch-size")
    pieces = text[: columns * length].reshape(columns, length)[rank::size]
    return torch.from_numpy(pieces.T.copy())


def segments(text: torch.Tensor, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What is read between two steps, and each word's following one."""
    for at in range(0, len(text) - 1, length):
        following = text[at + 1 : at + 1 + length]
        yield text[at : at + len(following)], following

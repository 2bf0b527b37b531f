"""The campaigns of damage: to frames, and to what ranks send in exchanges."""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import random
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from hvd_compress.errors import PayloadError
from tests.frames import sealed

#: cases between two looks at the bar
CHUNK = 100
#: bytes of a frame of the corpus, at most
SHORT = 256
#: what comes of a case
NOTICED, UNCHANGED = "PayloadError", "no byte changed"
HARMLESS, CHANGED_NOTHING = "right checksum, in range", "same result"


def spoil(frame: np.ndarray, others: Sequence[np.ndarray], draw: random.Random) -> np.ndarray:
    """Return a damaged copy of a frame (1-D, uint8)."""
    way = draw.choice(("flip", "overwrite", "cut", "stretch", "swap", "mix"))
    raw, size = bytearray(frame.tobytes()), draw.choice((1, 4, 8, 16, draw.randrange(1, 65)))
    if way == "stretch" or not raw:
        tail = draw.choice((bytes(size), draw.randbytes(size), bytes(raw[-size:])))
        at = draw.choice((len(raw), draw.randrange(len(raw) + 1)))
        raw[at:at] = tail
    elif way == "overwrite":
        start = draw.randrange(draw.choice((min(32, len(raw)), len(raw))))  # in the header, or not
        end = min(len(raw), start + size)
        raw[start:end] = draw.choice((bytes, draw.randbytes))(end - start)
    elif way == "cut":
        at = draw.randrange(len(raw))
        raw = raw[:at] if draw.random() < 0.7 else raw[at:]
    elif way == "swap" and len(raw) >= 2 * size:
        one = draw.randrange(len(raw) - 2 * size + 1)
        two = draw.randrange(one + size, len(raw) - size + 1)
        raw[one : one + size], raw[two : two + size] = raw[two : two + size], raw[one : one + size]
    elif way == "mix":
        other = draw.choice(others).tobytes()
        at = draw.randrange(max(1, min(len(raw), len(other))))
        mixed = other[:at] + raw[at:]
        # A whole frame of the same layout, which no receiver can know from the right one.
        raw = raw if mixed == other else bytearray(mixed)
    else:
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            bit = draw.randrange(8 * len(raw))
            raw[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(raw), np.uint8).copy()


def run(options: argparse.Namespace) -> list[str]:
    """Run a campaign; return what came out that should not."""
    if getattr(options, "corpus", None):
        found = sorted(corpus(options.seed, options.cases).items())
        lines = ["\t".join([check, name, x.tobytes().hex()]) for (_, check), (name, x) in found]
        options.corpus.write_text("\n".join(lines) + "\n")
        return []
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    start, problems = time.monotonic(), []
    with (
        tqdm(total=options.cases, ncols=90, unit_scale=True) as bar,
        contextlib.suppress(KeyboardInterrupt),  # what was done by then counts
    ):
        for first in range(0, options.cases, CHUNK):
            count = min(CHUNK, options.cases - first)
            found, wrong = chunk_of(options.campaign, options.seed, first, count, options.only)
            counts += found
            problems += wrong
            bar.update(count)
    seconds, total = time.monotonic() - start, counts.total()
    print(f"\n{total:,} cases in {seconds:.0f} s, {60 * total / seconds:,.0f} a minute")
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:16}{count:>12,} {outcome}")
    return problems


def chunk_of(
    campaign: str, seed: int, first: int, count: int, only: Sequence[str] | None = None
) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Run cases of the module with the name of the campaign; return how often what came out of
    each kind, and what should not have."""
    cases = importlib.import_module(f"benchmarks.reliability.{campaign}")
    every = [name for name in cases.names() if any(text in name for text in only or [""])]
    draw, counts, problems = random.Random(f"{seed}-{first}"), collections.Counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(count):
            case = cases.Case(draw.choice(every), draw)
            try:
                outcome = case.outcome()
            except Exception as error:
                outcome = "PROBLEM"
                text = f"{case}: {type(error).__name__}: {error}"
                problems.append(f"--seed {seed}, case {first + i}, {text}")
            counts[case.kind, outcome] += 1
    return counts, problems


def check_of(error: PayloadError) -> str:
    """Return what noticed the damage: the error's message without numbers, options and advice."""
    text = re.sub(r"\([^)]*\)|'[^']*'|[\d.]+", "", str(error)).partition("Either")[0]
    return " ".join(text.split())


def corpus(seed: int, cases: int) -> dict[tuple[str, str], tuple[str, np.ndarray]]:
    """Return a short frame for each check of each kind of frame, by kind and check: the name of the
    frame that was damaged, and the damaged one."""
    from benchmarks.reliability.frames import every

    frames, draw = every(0), random.Random(seed)
    found: dict[tuple[str, str], tuple[str, np.ndarray]] = {}
    for _ in range(cases):
        frame = draw.choice(frames)
        damaged: Any = spoil(frame.frame, [f.frame for f in frames], draw)
        damaged = sealed(damaged) if draw.random() < 0.9 and damaged.size >= 16 else damaged
        try:
            frame.read(damaged)
        except PayloadError as error:
            key = frame.name.split()[0], check_of(error)
            if damaged.size <= SHORT and (key not in found or damaged.size < found[key][1].size):
                found[key] = frame.name, damaged
    return found

"""The campaigns of many short cases: damage to frames and to what ranks send in exchanges, and
orders in which messages arrive."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import multiprocessing
import random
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from hvd_compress.errors import PayloadError

#: cases between two looks at the bar, of frames and of all else
CHUNK, FEW = 2000, 10
#: bytes of a frame of the corpus, at most
SHORT = 256
#: what comes of a case
NOTICED, UNCHANGED = "PayloadError", "no byte changed"
HARMLESS, CHANGED_NOTHING = "right checksum, in range", "same result"


def spoil(frame: np.ndarray, others: Sequence[np.ndarray], draw: random.Random) -> np.ndarray:
    """Return a damaged copy of a frame (1-D, uint8), by one of the ways below."""
    ways = _WAYS if frame.size else [_stretched]
    return draw.choice(ways)(frame, others, draw)


def sealed(frame: np.ndarray) -> np.ndarray:
    """Return a frame with the checksum that belongs to its bytes."""
    raw = frame.tobytes()
    if len(raw) < 16:
        return frame
    crc = zlib.crc32(raw[16:], zlib.crc32(raw[:12]))
    return np.frombuffer(raw[:12] + crc.to_bytes(4, "little") + raw[16:], np.uint8).copy()


def _flipped(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    damaged = frame.copy()
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        bit = draw.randrange(8 * frame.size)
        damaged[bit // 8] ^= 1 << bit % 8
    return damaged


def _flipped_in_header(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    damaged = frame.copy()
    at = draw.randrange(min(32, frame.size))
    damaged[at] = draw.choice((0, 1, 2, 127, 128, 255, draw.randrange(256)))
    return damaged


def _overwritten(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    damaged, start = frame.copy(), draw.randrange(frame.size)
    end = min(frame.size, start + draw.randrange(1, 65))
    damaged[start:end] = np.frombuffer(draw.randbytes(end - start), np.uint8)
    return damaged


def _cut(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    at = draw.randrange(frame.size)
    return (frame[:at] if draw.random() < 0.7 else frame[at:]).copy()


def _stretched(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    more = draw.choice((1, 7, 8, 8, 16, 64, draw.randrange(1, 200)))
    tail = draw.choice((bytes(more), draw.randbytes(more), frame.tobytes()[-more:]))
    at = draw.choice((frame.size, frame.size, draw.randrange(frame.size + 1)))
    raw = frame.tobytes()
    return np.frombuffer(raw[:at] + tail + raw[at:], np.uint8).copy()


def _swapped(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    size = draw.choice((1, 4, 8, draw.randrange(1, 65)))
    if frame.size < 2 * size:
        return _flipped(frame, others, draw)
    damaged = frame.copy()
    one = draw.randrange(frame.size - 2 * size + 1)
    two = draw.randrange(one + size, frame.size - size + 1)
    damaged[one : one + size] = frame[two : two + size]
    damaged[two : two + size] = frame[one : one + size]
    return damaged


def _under_another_header(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    damaged, other = frame.copy(), draw.choice(others)
    size = min(draw.choice((4, 8, 12, 16, 24)), frame.size, other.size)
    damaged[:size] = other[:size]
    return _flipped(frame, others, draw) if size == other.size else damaged


def _begun_with_another(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    other = draw.choice(others)
    at = draw.randrange(min(frame.size, other.size) if other.size else 1)
    damaged = np.concatenate([other[:at], frame[at:]])
    # A whole frame of the same layout, which no receiver can know from the right one.
    return _flipped(frame, others, draw) if np.array_equal(damaged, other) else damaged


def _repeated(frame: np.ndarray, others: Any, draw: random.Random) -> np.ndarray:
    """A run of bytes stands where another should."""
    damaged, size = frame.copy(), draw.randrange(1, 65)
    start, to = draw.randrange(frame.size), draw.randrange(frame.size)
    piece = frame[start : start + size][: frame.size - to]
    damaged[to : to + piece.size] = piece
    return damaged


_WAYS = [
    *(_flipped, _flipped, _flipped_in_header, _overwritten, _cut, _stretched, _swapped),
    *(_under_another_header, _begun_with_another, _repeated),
]


def run(options: argparse.Namespace) -> tuple[Any, list[str]]:
    """Run a campaign; return what was counted, and what came out that should not."""
    if getattr(options, "corpus", None):
        found = sorted(corpus(options.seed, options.cases).items())
        lines = ["\t".join([check, *named, x.tobytes().hex()]) for (_, check), (*named, x) in found]
        options.corpus.write_text("\n".join(lines) + "\n")
        return lines, []
    is_of_frames = options.campaign == "frames"
    campaign = chunk_of_frames if is_of_frames else functools.partial(chunk_of, options.campaign)
    chunk = CHUNK if is_of_frames else FEW
    calls = [
        (options.seed, number, min(chunk, options.cases - chunk * number), options.only or [""])
        for number in range(-(-options.cases // chunk))
    ]
    start, problems = time.monotonic(), []
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with (
        tqdm(total=options.cases, ncols=90, unit_scale=True) as bar,
        contextlib.suppress(KeyboardInterrupt),  # what was done by then counts
    ):
        for found, wrong in _over_processes(campaign, calls, options.jobs):
            for (kind, outcome), count in found.items():
                counts[kind][outcome] += count
                bar.update(count)
            problems += wrong
    seconds = time.monotonic() - start
    total = sum(sum(own.values()) for own in counts.values())
    outcomes = sorted({outcome for own in counts.values() for outcome in own})
    print(f"\n{total:,} cases in {seconds:.0f} s, {60 * total / seconds:,.0f} a minute")
    for kind, own in sorted(counts.items()):
        print(f"{kind:12}" + "".join(f"  {own[outcome]:>9,} {outcome}" for outcome in outcomes))
    found = {"cases": total, "seconds": seconds, "counts": counts, "problems": problems}
    return found, problems


def _over_processes(function: Callable[..., Any], calls: list[Any], jobs: int) -> Iterator[Any]:
    if jobs == 1:
        yield from map(function, calls)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(function, calls)


@functools.cache
def _frames(seed: int) -> list[Any]:
    from benchmarks.reliability.frames import every

    return every(seed)


def judge(frame: Any, damaged: np.ndarray, has_right_checksum: bool) -> str:
    """Return what comes of a damaged frame, one of the words above; raise whatever else its
    reader raises, or ``AssertionError`` for a result that should not be."""
    try:
        found = frame.read(damaged)
    except PayloadError:
        return NOTICED
    if damaged.size == frame.frame.size and (damaged == frame.frame).all():
        return UNCHANGED
    if not has_right_checksum:
        raise AssertionError("damage was not noticed")
    if not frame.is_sane(found):
        raise AssertionError(f"a result out of range: {found}")
    return HARMLESS


def chunk_of_frames(call: tuple[int, int, int, list[str]]) -> tuple[Any, list[str]]:
    """Half of the cases get the checksum that belongs to their damage, as no accident would."""
    seed, number, count, only = call
    frames = [f for f in _frames(seed % 8) if any(text in f.name for text in only)]
    others = [f.frame for f in _frames(seed % 8)]
    draw, counts, problems = random.Random(f"{seed}-{number}"), collections.Counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, about forged numbers
        for i in range(count):
            frame = draw.choice(frames)
            damaged, forged = spoil(frame.frame, others, draw), draw.random() < 0.5
            damaged = sealed(damaged) if forged else damaged
            kind = frame.name.split()[0]
            try:
                counts[kind, judge(frame, damaged, forged)] += 1
            except Exception as error:
                counts[kind, "PROBLEM"] += 1
                problems.append(
                    f"--seed {seed}, case {CHUNK * number + i}, {frame.name}: "
                    f"{type(error).__name__}: {error}; frame {damaged.tobytes().hex()}"
                )
    return counts, problems


def check_of(error: PayloadError) -> str:
    """Return what noticed the damage: the error's message without numbers, options and advice."""
    text = re.sub(r"\([^)]*\)|'[^']*'|[\d.]+", "", str(error)).partition("Either")[0]
    return " ".join(text.split())


def corpus(seed: int, cases: int) -> dict[tuple[str, str], tuple[str, np.ndarray]]:
    """Return a short frame for each check of each kind of frame, by kind and check: the name of the
    frame that was damaged, and the damaged one."""
    frames, draw = _frames(0), random.Random(seed)
    found: dict[tuple[str, str], tuple[str, np.ndarray]] = {}
    for _ in range(cases):
        frame = draw.choice(frames)
        damaged = spoil(frame.frame, [f.frame for f in frames], draw)
        damaged = sealed(damaged) if draw.random() < 0.9 else damaged
        try:
            frame.read(damaged)
        except PayloadError as error:
            if damaged.size > SHORT:
                continue
            key = frame.name.split()[0], check_of(error)
            if key not in found or damaged.size < found[key][1].size:
                found[key] = frame.name, damaged
    return found


def chunk_of(campaign: str, call: tuple[int, int, int, list[str]]) -> tuple[Any, list[str]]:
    """Of the cases of a module with the name of the campaign."""
    cases = importlib.import_module(f"benchmarks.reliability.{campaign}")
    seed, number, count, only = call
    every = [name for name in cases.names() if any(text in name for text in only)]
    draw, counts, problems = random.Random(f"{seed}-{number}"), collections.Counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(count):
            name = draw.choice(every)
            case = cases.Case(name, draw)
            try:
                outcome = case.outcome()
            except Exception as error:
                outcome = "PROBLEM"
                problems.append(
                    f"--seed {seed}, case {FEW * number + i}, {name}, {case}: "
                    f"{type(error).__name__}: {error}"
                )
            counts[name.split("-")[0], outcome] += 1
    return counts, problems

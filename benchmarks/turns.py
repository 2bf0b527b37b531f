"""Helpers of benchmarks: turns, the seconds of the slowest rank, and files of rows."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hvd_compress.launch import is_first


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the number of a round and a name, each name once a round.

    The order is another one each round, and the same on all ranks, so that the machine's load hits
    all alike, and what ran before as well.
    """
    order = random.Random(0)
    with tqdm(total=rounds * len(names), disable=not is_first(), ncols=90) as bar:
        for number in range(rounds):
            for name in order.sample(names, len(names)):
                yield number, name
                bar.update()


def slowest(comm: Any, call: Callable[..., object], *arguments: Any) -> float:
    """Return the seconds from a barrier of an MPI communicator until the last rank is done."""
    comm.Barrier()
    start = time.perf_counter()
    call(*arguments)
    return comm.allreduce(time.perf_counter() - start, max)


def write_rows(rows: Mapping[str, Any], file: Path) -> None:
    """Write JSON whose changes can be read: a line for each row."""
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")

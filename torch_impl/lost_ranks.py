"""The ranks that a collective of a process group waited for in vain.  PyTorch's own error describes
a connection, and names no rank."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hvd_compress.errors import CollectiveTimeout

#: seconds in which ranks that fail as well say so, and for the last of them: it may be the lost
_PATIENCE, _LAST = 2.0, 0.1
_SILENT = "the job's store, which rank 0 or the launcher has, is silent"
_WHAT = (
    "It has ended, is stopped, waits elsewhere, or the network to it is down: look for its own "
    "message, and for what the launcher says of it. A longer time-out: "
    "init_process_group(timeout=...)"
)


@contextlib.contextmanager
def naming_lost_ranks(group: Any) -> Iterator[None]:
    """Add to an error of a collective in this block from which ranks there is no word.

    Every rank that fails tells the others by the job's store.  It needs the rank, or the launcher,
    that keeps it alone.

    Args:
        group: the process group, or ``None`` for the default one.
    """
    try:
        yield
    except RuntimeError as error:
        raise type(error)(f"{error}\n{_words(group)}") from error


def meet(group: Any, call: str) -> None:
    """Wait until all ranks of a group have made a call, as often as this one.

    It needs no collective: a rank that calls alone would begin another one than the others.

    Args:
        group: the process group.
        call: what users call, for the error.

    Raises:
        CollectiveTimeout: ranks have not, in the time-out of the job.
    """
    store: Any = distributed_c10d._get_default_store()
    me, limit = dist.get_rank(), store.timeout.total_seconds()
    keys = {
        rank: f"hvd_compress/calls/{group.group_name}/{call}/{rank}"
        for rank in dist.get_process_group_ranks(group)
    }
    missing, errors = set(keys), list[RuntimeError]()

    def ask() -> None:
        try:
            end = time.monotonic() + limit
            own = store.add(keys[me], 1)
            while missing:
                # First of all, since a store that was stopped may answer after the end.
                if time.monotonic() > end:
                    store.add(keys[me], -1)
                    return
                came = [rank for rank in missing if store.add(keys[rank], 0) >= own]
                missing.difference_update(came)
                if missing:
                    time.sleep(0.01)
        except RuntimeError as error:
            errors.append(error)

    is_answered = _in_time(ask, limit + _PATIENCE)
    if errors:
        raise errors[0]
    if not is_answered:
        raise CollectiveTimeout(f"{call} was called on rank {me}, and {_SILENT}. {_WHAT}")
    if missing:
        ranks = ", ".join(map(str, sorted(missing)))
        raise CollectiveTimeout(
            f"{call} was called on rank {me}, and in {limit:.0f} seconds not on rank {ranks}: call "
            "it on all ranks that share the model, at the same place"
        )


def _in_time(ask: Callable[[], None], seconds: float) -> bool:
    """Run a function that asks the job's store; return whether it has come to its end in time.  A
    thread runs it, since there is no end to the wait for a store whose process is stopped."""
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _words(group: Any) -> str:
    me = dist.get_rank()
    silent = set(dist.get_process_group_ranks(group or dist.group.WORLD)) - {me}
    answers = threading.Event()
    _in_time(functools.partial(_listen, me, silent, answers), _PATIENCE + 1)
    start = f"hvd_compress: a collective failed on rank {me} of {dist.get_world_size()}"
    if not answers.is_set():
        return f"{start}, and {_SILENT}. {_WHAT}"
    if not silent:
        return f"{start}, and on all others"
    names = ", ".join(f"rank {rank}" for rank in sorted(silent))
    return f"{start}; no word from {names}. {_WHAT}"


def _listen(me: int, silent: set[int], answers: threading.Event) -> None:
    """Say that this rank has failed, and take from ``silent`` who says so, too."""
    store = distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # nobody has the store any more
        store.set(f"hvd_compress/failed/{me}", "")
        begin = time.monotonic()
        while silent:
            answered = [rank for rank in silent if store.check([f"hvd_compress/failed/{rank}"])]
            silent.difference_update(answered)
            answers.set()
            if time.monotonic() - begin > (_LAST if len(silent) == 1 else _PATIENCE):
                return
            time.sleep(0.01)

"""The compression that the environment names, where a script leaves the choice to it.

A rank without ``HVD_COMPRESSION`` gets Horovod's own optimizer, which knows nothing of exchanges
that others wait for.  So where the variable decides, ranks compare it first, whatever it says, in
a collective that both ways begin with.  Ranks whose script names a compression take part as well,
in the first step.  With one of Horovod they do so when the optimizer is made.

This is not done in elastic jobs: a worker that joins makes its optimizer while the others train.
All workers of such a job get the environment of the one launcher that starts them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress.agreement import by_rank
from hvd_compress.errors import MismatchError
from hvd_compress.methods.texts import VARIABLE, from_environment
from hvd_compress.wire.content import decode_end_to_end, encode_bytes

_log = logging.getLogger("hvd_compress")

#: gathers bytes of any number over a process set, by name
Gather = Callable[[bytes, str, Any], bytes]

#: process sets whose ranks were found to agree; the same on all of their ranks
compared: set[Any] = set()
_said: set[str] = set()
#: what ranks tell instead of the variable
OURS, HOROVODS = "the script names one of hvd_compress", "the script names one of Horovod"


def chosen(compression: Any, none: Any, rank: Callable[[], int]) -> Any:
    """Return the compression that a script names, or that of ``HVD_COMPRESSION`` if the script
    names nothing or ``none``, as Horovod's examples do.  Rank 0 logs once which of the two it
    is."""
    method = from_environment()
    if method is None:
        return compression
    if is_named(compression, none):
        message = f"is not used, since the script names compression={compression!r}"
    else:
        message = f"names the compression, since the script names none: {method!r}"
    if message not in _said and rank() == 0:
        _said.add(message)
        _log.info("%s=%s %s", VARIABLE, os.environ[VARIABLE], message)
    return compression if is_named(compression, none) else method


def is_named(compression: Any, none: Any) -> bool:
    return compression is not None and compression is not none


def compare(hvd: Any, process_set: Any, gather: Gather, named: str = "") -> None:
    """Compare the variable over the ranks, the first time that it decides for a process set.

    Args:
        hvd: a module of Horovod.
        named: what the script has named here, ``OURS`` or ``HOROVODS``; ranks where it is another
            would wait for this one.

    Raises:
        MismatchError: on every rank, if it is not the same.
    """
    if not hvd.is_initialized() or os.environ.get("HOROVOD_ELASTIC", "0") == "1":
        return
    if not process_set.included() or process_set.process_set_id is None:
        return  # Horovod says so, if this is wrong
    # Numbers may be given again, to sets of others.
    key = hvd.__name__, process_set.process_set_id, tuple(process_set.ranks)
    if key in compared or process_set.size() == 1:
        return
    own = named or os.environ.get(VARIABLE, "").strip()
    frame = encode_bytes(own.encode(), VARIABLE)
    frames = gather(frame.tobytes(), "hvd_compress.environment", process_set)
    everyones = decode_end_to_end(np.frombuffer(frames, np.uint8), VARIABLE)
    texts = [text.decode() for text in everyones]
    if len(set(texts)) > 1:
        lines = by_rank(
            text if text in (OURS, HOROVODS) else repr(text) if text else "not set"
            for text in texts
        )
        raise MismatchError(
            "\n".join(
                [
                    f"the ranks differ in the compression that the script names, or {VARIABLE}:",
                    *lines,
                    f"Set it on all ranks; mpirun of Open MPI hands it to other hosts only with "
                    f"-x {VARIABLE}. Or name the compression in the script",
                ]
            )
        )
    if not named:
        compared.add(key)

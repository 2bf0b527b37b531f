"""The message of a bucket's codes: a header, a byte for each tensor, and the codes end to end."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.base import Context
from hvd_compress.codecs import Codec
from hvd_compress.operators.at_random import own_generator
from hvd_compress.sharding import shards_of
from hvd_compress.wire.header import START, Header, Kind, failing, opened, padded

_FLOAT32 = np.dtype(np.float32)
#: of a tensor in a message: its codes mean numbers; there are none, since the sender's values were
#: not finite; they mean what is not finite
FINE, NOT_FINITE, OVERFLOWS = 0, 1, 2
#: messages of all ranks may be as long as the longest where that is so little more
_LITTLE = 1.1
CAUSES = "the ranks do not run the same version with the same compression options"


class Part(NamedTuple):
    """The codes of a run of elements of a tensor, ``own``, at ``codes`` of a message."""

    tensor: int
    own: slice
    codes: slice


class Message:
    """The layout of a message: a header, a byte for each tensor, codes.

    In the header::

        offset  field
        3       kind: 6 = coded, of several tensors
        6       the lowest bits of the CRC-32 of the codecs' reprs: options must be the same
        8       the number of values

    Args:
        codecs: of all tensors.
        runs: of each tensor, the elements that are sent.
        size: at least so many bytes.
    """

    def __init__(self, codecs: Sequence[Codec], runs: Sequence[slice], size: int = 0) -> None:
        self.parts: list[Part] = []
        at = START + len(runs) + -len(runs) % 8
        for i, (codec, run) in enumerate(zip(codecs, runs, strict=True)):
            codes = codec.size(run.stop - run.start, _FLOAT32)
            self.parts.append(Part(i, run, slice(at, at + codes)))
            at += codes
        self.size = max(padded(at - START), size)
        tag = zlib.crc32(" ".join(map(repr, codecs)).encode()) & 0xFFFF
        count = sum(run.stop - run.start for run in runs)
        self._header = Header(Kind.BUCKET, 0, 0, tag, count % 2**32)
        self._flags = slice(START, START + len(runs))

    def flags(self, frame: np.ndarray) -> np.ndarray:
        """Return the byte of each tensor, a view."""
        return frame[self._flags]

    def seal(self, frame: np.ndarray) -> np.ndarray:
        return self._header.seal(frame)

    def opened(self, frame: np.ndarray, sender: int) -> np.ndarray:
        """Return the bytes of the tensors in a message that arrived.

        Raises:
            PayloadError: it is damaged, or was made with other options than this rank's.
        """
        fail = failing(f"rank {sender}", CAUSES)
        header = opened(frame, Kind.BUCKET, fail=fail)
        if frame.size != self.size:
            raise fail(f"{frame.size} bytes where {self.size} were expected")
        flags = self.flags(frame)
        if header != self._header or flags.max(initial=0) > OVERFLOWS:
            raise fail(f"no header of {self._header.number} values of {len(flags)} tensors")
        return flags


def message_of_all(codecs: Sequence[Codec], sizes: Sequence[int], fed_back: bool) -> Message:
    """Return the message of whole tensors; what their codes leave out may be fed back.

    Raises:
        ConfigError: that would not converge.
    """
    if fed_back:
        for codec, n in zip(codecs, sizes, strict=True):
            codec.check_feedback(n)
    return Message(codecs, [slice(0, n) for n in sizes])


def random_of(codec: Codec, name: str, step: Context, turn: int) -> np.random.Generator | None:
    """Return the random numbers of a tensor in a turn of a step, if its codec takes any."""
    return own_generator(step._replace(name=name), turn) if codec.draws else None


class Division:
    """Which rank adds up which shard of each tensor, and the messages for that.

    Attributes:
        shards: by tensor and rank.
        owners: of each tensor, the ranks whose shards of it are not empty.
        messages: to each rank, the codes of its shards.
        replies: of each rank, the codes of what these add up to; as long as the longest one where
            that is little more, which ``has_equal_replies``.
    """

    def __init__(self, codecs: Sequence[Codec], sizes: Sequence[int], ranks: int) -> None:
        pairs = zip(codecs, sizes, strict=True)
        self.shards = [shards_of(n, ranks, codec.unit(n)) for codec, n in pairs]
        # Owners feed back what they leave out, whether a transform does or not.
        for codec, own in zip(codecs, self.shards, strict=True):
            codec.check_feedback(max(shard.stop - shard.start for shard in own))
        self.owners = [[r for r, x in enumerate(own) if x.stop > x.start] for own in self.shards]
        columns = list(zip(*self.shards, strict=True))
        self.messages = [Message(codecs, column) for column in columns]
        lengths = [message.size for message in self.messages]
        self.has_equal_replies = max(lengths) * ranks <= _LITTLE * sum(lengths)
        self.replies = self.messages
        if self.has_equal_replies:
            self.replies = [Message(codecs, column, max(lengths)) for column in columns]

    def own(self, rank: int) -> list[slice]:
        """Return the shard of each tensor that a rank adds up."""
        return [shards[rank] for shards in self.shards]

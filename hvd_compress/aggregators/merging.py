"""Ranks merge sparse vectors in pairs, and keep the k largest sums: what gTop-k is made of.

Two ranks exchange their vectors, add them up and keep the k largest sums; then two pairs, and so
on: after log2 N rounds all ranks have the same k.  Partners compute the same, so a rank sees every
merge that its own entries go through, and knows which of them are in the result: those whose place
survived all of these merges.  That a place is in the result does not say so: it may have been
dropped here, and have come back from other ranks without this rank's value.

N need not be a power of two.  Each rank beyond the largest power p within N first merges with the
rank p below.  That one goes on for both, and at the end sends the result back, with a bit for each
entry that says whether the two have a part in it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Sparse
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_coded
from hvd_compress.codecs.plus_minus import plus_minus
from hvd_compress.coding.sparse_vectors import add_up, contains, largest, pick
from hvd_compress.requests import Neighbors
from hvd_compress.wire import decode_sparse, encode_sparse, sparse_size
from hvd_compress.wire.frame import index_dtype

_BITS = plus_minus(1.0)


@dataclasses.dataclass(frozen=True)
class Merging:
    """One rank's part in a merge.  Among equal magnitudes the lower index is kept, and what is not
    finite is larger than all that is.

    Attributes:
        rank, size: this rank, of so many.
        n: elements of the tensor.
        k: entries of a vector, at most.
        dtype: of the values, "float32" or "float64".
        always_k: every vector has k entries.
        codec: of indices on the wire, see ``encode_sparse``.

    The sizes of messages are known beforehand if every vector has k entries and indices are not
    packed; otherwise ranks exchange them.
    """

    rank: int
    size: int
    n: int
    k: int
    dtype: str
    always_k: bool = False
    codec: str = "int32"

    @property
    def pairs(self) -> int:
        """The number of ranks that merge to the end: the largest power of two."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def rounds(self) -> int:
        return self.pairs.bit_length() - 1 + 2 * (self.size > self.pairs)

    @property
    def largest_frame(self) -> int:
        """The bytes of k entries with indices that are not packed."""
        return sparse_size(self.k, self.n, self.dtype)

    @property
    def largest_message(self) -> int:
        """The bytes of a result of k entries that is sent back."""
        return self.largest_frame + self._bytes_of_bits

    def in_pairs(
        self, own: Array, values: Array
    ) -> Generator[Neighbors, Any, tuple[Array, Array, Array, Array]]:
        """Merge this rank's entries, ascending indices and values, with those of all others.

        Returns indices and sums of the result, the same bits on all ranks; then indices and values
        of this rank's entries that are in it.  All ranks' such entries add up to the sums.
        """
        xp, pairs = backend_of(values), self.pairs
        k = self.k if self.always_k else None
        equal = self.always_k and self.codec != "packed"
        frame_size, message_size = (
            (self.largest_frame, self.largest_message) if equal else (None, None)
        )

        def on_host(step: Callable[..., Any], *arrays: Array) -> Any:
            return xp.on_host(step, arrays, [("uint8", frame_size), ("bool", k)], values)

        frame, mask = on_host(self._begin, own, values)
        twin = self.rank ^ pairs if self.rank ^ pairs < self.size else None
        if self.size > pairs:
            theirs = yield _pair(frame, twin, equal)
            if twin is not None:
                frame, mask = on_host(functools.partial(self._unite, twin), frame, *theirs)
        for i in range(pairs.bit_length() - 1):
            partner = self.rank ^ (1 << i) if self.rank < pairs else None
            theirs = yield _pair(frame, partner, equal)
            if partner is not None:
                step = functools.partial(self._merge, partner)
                frame, mask = on_host(step, frame, *theirs, mask)
        if self.size > pairs:
            (message,) = xp.on_host(self._seal, [frame, mask], [("uint8", message_size)], values)
            theirs = yield _pair(message, twin, equal)
            if self.rank >= pairs:
                frame, mask = on_host(self._open, *theirs)
        looks = [(index_dtype(self.n), k), (self.dtype, k), ("int64", None), (self.dtype, None)]
        return xp.on_host(self._settle, [frame, mask, own, values], looks, values)

    # Steps on the host.  A frame comes with a mask of its entries: those that contain values of
    # the ranks that this one goes on for.

    def _begin(self, indices: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
        return self._of_everything(Sparse(indices, values))

    def _unite(self, twin: int, own: np.ndarray, theirs: np.ndarray) -> list[np.ndarray]:
        return self._of_everything(self._largest_sums(own, theirs, twin))

    def _of_everything(self, vector: Sparse) -> list[np.ndarray]:
        return [self._encode(vector), np.ones(vector.indices.size, bool)]

    def _merge(
        self, partner: int, own: np.ndarray, theirs: np.ndarray, mask: np.ndarray
    ) -> list[np.ndarray]:
        total = self._largest_sums(own, theirs, partner)
        survivors = pick(self._decode(own, self.rank), mask)
        return [self._encode(total), contains(survivors, total.indices)]

    def _seal(self, frame: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
        """Return one message of a frame and its mask, with k bits however many entries there
        are."""
        signs = np.full(self.k, -1, self.dtype)
        signs[: mask.size][mask] = 1
        return [np.concatenate([frame, encode_coded(_BITS, signs, np.random.default_rng(0))])]

    def _open(self, message: np.ndarray) -> list[np.ndarray]:
        """Undo the ``_seal`` of the rank p below, or raise ``PayloadError``."""
        below = self.rank - self.pairs
        split = max(0, message.size - self._bytes_of_bits)
        frame, bits, dtype = message[:split], message[split:], np.dtype(self.dtype)
        entries = self._decode(frame, below).indices.size
        _, signs = decode_coded(_BITS, bits, self.k, dtype, sender=f"rank {below}")
        return [frame, signs[:entries] > 0]

    def _settle(
        self, frame: np.ndarray, mask: np.ndarray, own: np.ndarray, values: np.ndarray
    ) -> list[np.ndarray]:
        total = self._decode(frame, self.rank)
        arrived = contains(pick(total, mask), own)
        indices = total.indices.astype(index_dtype(self.n))
        return [indices, total.values, own[arrived].astype(np.int64), values[arrived]]

    def _largest_sums(self, own: np.ndarray, theirs: np.ndarray, partner: int) -> Sparse:
        one, other = self._decode(own, self.rank), self._decode(theirs, partner)
        if self.rank > partner:  # the same order on both, or NaNs might differ in their bits
            one, other = other, one
        total: Any = add_up([one, other], self.n, self.dtype)
        return pick(total, largest(total.values, self.k))

    def _encode(self, vector: Sparse) -> np.ndarray:
        return encode_sparse(vector.indices, vector.values, self.n, self.codec)

    def _decode(self, frame: np.ndarray, sender: int) -> Sparse:
        count = self.k if self.always_k else None
        read = functools.partial(decode_sparse, sender=f"rank {sender}")
        indices, values = read(frame, self.n, self.dtype, count)
        return Sparse(indices.astype(np.int64), values.astype(self.dtype))

    @property
    def _bytes_of_bits(self) -> int:
        return coded_size(_BITS, self.k, np.dtype(self.dtype))


def _pair(payload: Array, partner: int | None, equal_sizes: bool) -> Neighbors:
    """The request of a rank and its partner, or of a rank that has none in this round."""
    ranks = () if partner is None else (partner,)
    return Neighbors(payload, ranks, ranks, equal_sizes)

"""Damage to frames of every kind: an error that says so, and no memory by a number in them."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from hvd_compress.codecs.frame import decode_coded, encode_coded
from hvd_compress.errors import PayloadError
from hvd_compress.systems.servers import messages
from hvd_compress.wire import decode, decode_sparse, encode_dense, encode_sparse
from hvd_compress.wire.rows import decode_rows, encode_rows
from tests.codecs.test_codecs import EVERY, F4
from tests.frames import sealed

X = np.random.default_rng(0).standard_normal(8).astype(F4)
PLACES, N = 30 * np.arange(8) + 7, 245


def coded(codec, **options):
    """A frame by a codec, and what reads it where only the sender knows how much is in it."""
    indices = {} if "n" not in options else {"indices": PLACES[: 8 // options.get("row", 1)]}
    frame = encode_coded(codec, X, np.random.default_rng(0), **indices, **options)
    place = {name: options[name] for name in ("n", "row") if name in options}
    return frame, lambda frame: decode_coded(codec, frame, None, F4, **place)


def frames():
    for codec in EVERY:
        yield pytest.param(*coded(codec), id=f"{codec!r}")
        yield pytest.param(*coded(codec, n=N), id=f"{codec!r}, indices")
        yield pytest.param(*coded(codec, n=N, packed=True), id=f"{codec!r}, packed")
        yield pytest.param(*coded(codec, n=N, row=2), id=f"{codec!r}, rows")
    for kind in ("int32", "packed"):
        frame = encode_sparse(PLACES, X, N, kind)
        yield pytest.param(frame, lambda f: decode_sparse(f, N, "float32"), id=kind)
    yield pytest.param(encode_dense(X), lambda f: decode(f, 8, "float32"), id="dense")
    rows = encode_rows(PLACES, np.zeros(8 * 12, np.uint8), N)
    yield pytest.param(rows, lambda f: decode_rows(f, N, 12), id="rows")
    message = messages.ServerMessage(messages.MessageKind(1), 0, 5, [np.zeros(9, np.uint8)])
    yield pytest.param(
        messages.encode(message, 3), lambda f: messages.decode(f, 3, "a rank"), id="servers"
    )


@pytest.mark.parametrize(("frame", "read"), list(frames()))
def test_no_bit_of_a_frame_may_flip(frame, read):
    """Nor does a number of values that is wrong, behind a checksum that is right, size memory."""
    read(frame)
    counts = [struct.pack("<I", n) for n in (2**16, 2**30, 2**32 - 1)]
    tracemalloc.start()
    try:
        for bit in range(8 * frame.size):
            damaged = frame.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(PayloadError):
                read(damaged)
        for count in counts:
            larger = frame.copy()
            larger[8:12] = np.frombuffer(count, np.uint8)
            with pytest.raises(PayloadError):
                read(sealed(larger))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000

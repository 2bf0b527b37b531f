"""The frame: its bytes, its size, and that no damage to it goes unnoticed."""

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import DGC, Context, Gather, PayloadError, TopK
from hvd_compress.lockstep import reply_to
from hvd_compress.wire import decode_sparse, encode_sparse, sparse_size
from hvd_compress.wire.frame import index_dtype

VALUES = ("float16", "float32", "float64")


def frame_of(indices, values, n, dtype="float32"):
    return encode_sparse(np.array(indices, np.int64), np.array(values, dtype), n)


def test_the_bytes_of_a_small_frame():
    """Written out once, so that the format cannot change by accident."""
    body = bytes.fromhex(
        "01000000 05000000 09000000"  # 1, 5, 9
        "0000803f 000000c0 0000003f"  # 1.0, -2.0, 0.5
    )
    header = (
        b"HC" + bytes.fromhex("01 01 01 01 0000 03000000") + zlib.crc32(body).to_bytes(4, "little")
    )
    frame = frame_of([1, 5, 9], [1.0, -2.0, 0.5], 10)
    assert frame.dtype == np.uint8
    assert frame.tobytes() == header + body
    assert zlib.crc32(body) == 0x9CEBB222


def test_half_precision_values_are_padded():
    frame = frame_of([7], [1.0], 8, "float16").tobytes()
    assert len(frame) == 24
    assert frame[4] == 2
    assert frame[16:] == bytes.fromhex("07000000 003c 0000")


@given(data=st.data(), values=st.sampled_from(VALUES), n=st.integers(0, 200))
def test_round_trip(data, values, n):
    chosen = sorted(data.draw(st.sets(st.integers(0, n - 1)) if n else st.just(set())))
    width = 8 * np.dtype(values).itemsize
    numbers = data.draw(
        st.lists(st.floats(width=width), min_size=len(chosen), max_size=len(chosen))
    )
    frame = frame_of(chosen, numbers, n, values)
    assert frame.size == sparse_size(len(chosen), n, values)
    indices, decoded = decode_sparse(frame, n, values, len(chosen))
    assert indices.tolist() == chosen
    assert decoded.tobytes() == np.array(numbers, values).tobytes()  # NaN and -0.0 too


@pytest.mark.parametrize(
    ("count", "n", "values", "size"),
    [
        (0, 0, "float32", 16),
        (0, 1000, "float16", 16),
        (1, 1000, "float32", 24),
        (1, 1000, "float16", 24),
        (2, 1000, "float16", 32),
        (4, 1000, "float16", 40),
        (1000, 1_000_000, "float32", 8016),
        (1000, 1_000_000, "float16", 6016),
        (1000, 1_000_000, "float64", 12016),
        (1000, 2**31, "float32", 8016),
        (1000, 2**31 + 1, "float32", 12016),
    ],
)
def test_sizes(count, n, values, size):
    assert sparse_size(count, n, values) == size
    assert size % 8 == 0
    assert frame_of(range(count), [0] * count, n, values).size == size


@pytest.mark.parametrize(("n", "dtype"), [(2**31, "int32"), (2**31 + 1, "int64")])
def test_indices_of_huge_tensors(n, dtype):
    indices, _ = decode_sparse(frame_of([0, n - 1], [1, 2], n), n, "float32", 2)
    assert index_dtype(n) == indices.dtype.name == dtype
    assert indices.tolist() == [0, n - 1]


def test_the_last_index_of_a_huge_tensor_is_checked():
    n = 2**31 + 1
    with pytest.raises(PayloadError, match="ascending within"):
        decode_sparse(frame_of([0, n], [1, 2], n), n, "float32", 2)
    with pytest.raises(PayloadError, match="ascending within"):
        decode_sparse(frame_of([0, 2**31 - 1], [1, 2], 2**31), 2**31 - 1, "float32", 2)


@pytest.mark.parametrize("values", VALUES)
def test_every_flipped_bit_is_noticed(values):
    frame = frame_of([1, 5, 9], [1.0, -2.0, 0.5], 10, values)
    decode_sparse(frame, 10, values, 3)
    for bit in range(8 * frame.size):
        damaged = frame.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError, match="bad payload from rank 7"):
            decode_sparse(damaged, 10, values, 3, sender="rank 7")


def test_every_changed_byte_is_noticed():
    frame = frame_of([1, 5], [1.0, -2.0], 10)
    for at in range(frame.size):
        for value in set(range(256)) - {int(frame[at])}:
            damaged = frame.copy()
            damaged[at] = value
            with pytest.raises(PayloadError):
                decode_sparse(damaged, 10, "float32", 2)


def test_frames_of_the_wrong_length():
    frame = frame_of([1, 5, 9], [1.0, -2.0, 0.5], 10)
    for size in range(frame.size):
        with pytest.raises(PayloadError, match="bytes"):
            decode_sparse(frame[:size], 10, "float32", 3)
    for more in range(1, 20):
        longer = np.concatenate([frame, np.zeros(more, np.uint8)])
        with pytest.raises(PayloadError, match="bytes where"):
            decode_sparse(longer, 10, "float32", 3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"count": 2}, "3 entries where 2"),
        ({"count": 4}, "3 entries where 4"),
        ({"values": "float16"}, "another dtype"),
        ({"values": "float64"}, "another dtype"),
        ({"n": 2**31 + 1}, "another dtype"),
        ({"n": 9}, "ascending within 0..8"),
    ],
    ids=str,
)
def test_frames_of_ranks_with_other_options(options, problem):
    frame = frame_of([1, 5, 9], [1.0, -2.0, 0.5], 10)
    expected = {"n": 10, "values": "float32", "count": 3} | options
    with pytest.raises(PayloadError, match=problem):
        decode_sparse(frame, **expected)


@pytest.mark.parametrize(
    "indices",
    [[5, 1, 9], [1, 9, 5], [1, 1, 9], [-1, 5, 9], [1, 5, 10], [1, 5, 2**31 - 1], [-(2**31), 0, 1]],
    ids=str,
)
def test_indices_that_would_write_elsewhere_have_a_valid_checksum(indices):
    frame = frame_of(indices, [1, 2, 3], 10)
    with pytest.raises(PayloadError, match=r"ascending within 0\.\.9"):
        decode_sparse(frame, 10, "float32", 3)


def test_an_entry_count_that_overflows_is_no_trap():
    """The size is computed from this rank's own count, never from the sender's."""
    frame = frame_of([1], [1.0], 10)
    frame[8:12] = np.frombuffer(struct.pack("<I", 2**32 - 1), np.uint8)
    with pytest.raises(PayloadError, match="4294967295 entries where 1"):
        decode_sparse(frame, 10, "float32", 1)


def at_the_gather(methods, gradients):
    """Exchanges that wait for the reply to their first request, and the payloads they sent."""
    exchanges = [
        method.exchange(gradient, method.init(gradient), Context(rank=rank, size=len(gradients)))
        for rank, (method, gradient) in enumerate(zip(methods, gradients, strict=True))
    ]
    requests = [next(exchange) for exchange in exchanges]
    assert all(isinstance(request, Gather) for request in requests)
    return exchanges, reply_to(requests)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("method", [TopK(density=0.1), DGC(density=0.1, min_size=0)], ids=str)
def test_a_damaged_payload_names_the_rank(method, culprit, make):
    gradients = [make(np.random.default_rng(r).normal(size=(8, 9))) for r in range(3)]

    def flip(payload):
        payload = payload.clone() if isinstance(payload, torch.Tensor) else payload.copy()
        payload[20] ^= 4
        return payload

    for damage in (flip, lambda payload: payload[:-8], lambda payload: payload[:0]):
        exchanges, payloads = at_the_gather([method] * 3, gradients)
        payloads[culprit] = damage(payloads[culprit])
        for exchange in exchanges:  # every rank notices
            with pytest.raises(PayloadError, match=f"from rank {culprit}:"):
                exchange.send(payloads)


def test_ranks_with_other_options_notice():
    x = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    exchanges, payloads = at_the_gather([TopK(density=0.01), TopK(density=0.02)], [x, x])
    with pytest.raises(PayloadError, match="rank 1: 40 entries where 20"):
        exchanges[0].send(payloads)
    with pytest.raises(PayloadError, match="rank 0: 20 entries where 40"):
        exchanges[1].send(payloads)

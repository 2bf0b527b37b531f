"""The frame: its bytes, its size, and that no damage to it goes unnoticed."""

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import DGC, ConfigError, Context, Gather, PayloadError, TopK
from hvd_compress.engines.lockstep import reply_to
from hvd_compress.wire import (
    decode,
    decode_sparse,
    dense_is_shorter,
    encode_dense,
    encode_sparse,
    header,
    sparse_size,
)
from hvd_compress.wire.frame import CODECS, index_dtype
from tests.frames import sealed

VALUES = ("float16", "float32", "float64")


def test_the_page_has_the_version_and_the_kinds_of_frames():
    page = (Path(__file__).parents[2] / "docs/wire-format.md").read_text()
    assert re.search(r"version, (\d+)", page)[1] == str(header.VERSION)
    rows = page.partition("\n| kind |")[2].partition("\n\n")[0].splitlines()[2:]
    kinds = [int(kind) for row in rows for kind in re.findall(r"\d", row.split("|")[1])]
    assert kinds == [*header.Kind]


def frame_of(indices, values, n, dtype="float32", codec="int32"):
    return encode_sparse(np.array(indices, np.int64), np.array(values, dtype), n, codec)


def test_the_bytes_of_a_small_frame():
    """Written out once, so that the format cannot change by accident."""
    body = bytes.fromhex(
        "01000000 05000000 09000000"  # 1, 5, 9
        "0000803f 000000c0 0000003f"  # 1.0, -2.0, 0.5
    )
    header = b"HC" + bytes.fromhex("03 01 01 01 0a00 03000000")  # 10 elements
    frame = frame_of([1, 5, 9], [1.0, -2.0, 0.5], 10)
    assert frame.dtype == np.uint8
    assert frame.tobytes() == header + zlib.crc32(header + body).to_bytes(4, "little") + body
    assert zlib.crc32(header + body) == 0x9FB0869B


def test_the_bytes_of_a_small_packed_frame():
    """Before the indices 3, 10, 20, 40 are gaps of 3, 6, 9, 19.  With b = 2 these are 0, 1, 2, 4
    times 4, in unary 1 01 001 00001, and the rests 3, 2, 1, 3, lowest bit first 11 01 10 11."""
    body = bytes.fromhex(
        "02"  # b
        "db"  # 11011011, its first bit the lowest
        "2504"  # 10100100 00100000
        "00000000"  # padding
        "003c 00c0 0038 0000"  # 1.0, -2.0, 0.5, 0.0
    )
    header = b"HC" + bytes.fromhex("03 01 02 03 6400 04000000")  # 100 elements
    frame = frame_of([3, 10, 20, 40], [1.0, -2.0, 0.5, 0.0], 100, "float16", "packed")
    assert frame.tobytes() == header + zlib.crc32(header + body).to_bytes(4, "little") + body
    assert frame.size < sparse_size(4, 100, "float16")


def test_the_bytes_of_a_small_dense_frame():
    header = b"HC" + bytes.fromhex("03 02 03 00 0100 01000000")
    body = bytes.fromhex("000000000000f03f")
    frame = encode_dense(np.array([1.0]))
    assert frame.tobytes() == header + zlib.crc32(header + body).to_bytes(4, "little") + body


def test_half_precision_values_are_padded():
    frame = frame_of([7], [1.0], 8, "float16").tobytes()
    assert len(frame) == 24
    assert frame[4] == 2
    assert frame[16:] == bytes.fromhex("07000000 003c 0000")


@given(
    data=st.data(),
    values=st.sampled_from(VALUES),
    n=st.integers(0, 200),
    codec=st.sampled_from(CODECS),
)
def test_round_trip(data, values, n, codec):
    chosen = sorted(data.draw(st.sets(st.integers(0, n - 1)) if n else st.just(set())))
    width = 8 * np.dtype(values).itemsize
    numbers = data.draw(
        st.lists(st.floats(width=width), min_size=len(chosen), max_size=len(chosen))
    )
    frame = frame_of(chosen, numbers, n, values, codec)
    if codec == "int32":
        assert frame.size == sparse_size(len(chosen), n, values)
    else:
        assert frame.size <= sparse_size(len(chosen), n, values)
    for count in (len(chosen), None):
        indices, decoded = decode_sparse(frame, n, values, count)
        assert indices.tolist() == chosen
        assert decoded.tobytes() == np.array(numbers, values).tobytes()  # NaN and -0.0 too
    again, decoded = decode(frame, n, values)
    assert again.tolist() == chosen


@given(
    n=st.one_of(st.integers(1, 2**40), st.sampled_from([2**31, 2**31 + 1, 2**40])),
    seed=st.integers(0, 2**32),
    count=st.integers(0, 300),
    spread=st.integers(0, 40),
)
def test_packed_indices_come_back(n, seed, count, spread):
    """Evenly spread, in clusters, or all next to each other; from anywhere to the very end."""
    generator = np.random.default_rng(seed)
    centres = generator.integers(0, n, 1 + seed % 5)
    places = generator.choice(centres, count) + generator.integers(0, 1 << spread, count)
    indices = np.unique(np.append(places[places < n], n - 1))
    frame = frame_of(indices, np.ones(indices.size), n, "float16", "packed")
    assert frame.size <= sparse_size(indices.size, n, "float16")
    assert frame.size % 8 == 0
    decoded, _ = decode_sparse(frame, n, "float16")
    np.testing.assert_array_equal(decoded, indices)


def bits_per_index(indices, n):
    """Without header and padding, from above."""
    frame = frame_of(indices, np.ones(len(indices)), n, "float16", "packed")
    assert frame[5] == 3
    return 8 * (frame.size - 16 - 2 * len(indices)) / len(indices)


def test_packed_indices_are_near_the_entropy():
    """log2 C(n, k) / k = 11.40 at k = 1000 of n = 1,000,000."""
    choose = np.random.default_rng(0).choice
    assert 11.35 < bits_per_index(np.sort(choose(1_000_000, 1000, replace=False)), 1_000_000) < 11.6
    n = 25_557_032
    assert 11.4 < bits_per_index(np.sort(choose(n, n // 1000, replace=False)), n) < 11.55
    n, k = 100_000, 10_000  # entropy 4.69
    assert 4.65 < bits_per_index(np.sort(choose(n, k, replace=False)), n) < 4.85
    assert bits_per_index(np.arange(1000), 1000) < 1.1
    assert bits_per_index(np.arange(0, 64_000, 64), 64_000) < 7.1


@pytest.mark.parametrize("n", [1001, 1_000_000, 2**31, 2**40])
def test_packed_indices_never_take_more_than_elias_fano(n):
    """log2(n / k) + 2 bits, wherever they are: one gap may be as long as all others together."""
    k = 1000
    for start in (0, n // 3, n - k):
        frame = frame_of(np.arange(start, start + k), np.ones(k), n, "float16", "packed")
        assert 8 * (frame.size - 16 - 2 * k - 1 - 7) <= k * (np.log2(n / k) + 2)


def test_packing_that_does_not_pay_is_left_out():
    for indices, n in (([], 10), ([5], 10), ([0, 2**31 - 1], 2**31), ([2**39], 2**40)):
        values = np.ones(len(indices), np.float32)
        frame = frame_of(indices, values, n, codec="packed")
        assert frame.size == sparse_size(len(indices), n, "float32")
        np.testing.assert_array_equal(frame, frame_of(indices, values, n))
    packed = frame_of([5], [1], 10, "float16", "packed")  # 16 + 1 + 1 + 2 bytes, padded as well
    assert packed[5] == 1


@given(values=st.sampled_from(VALUES), n=st.integers(0, 50))
def test_dense_frames_come_back(values, n):
    x = np.random.default_rng(n).normal(size=n).astype(values)
    indices, decoded = decode(encode_dense(x), n, values)
    assert indices is None
    assert decoded.tobytes() == x.tobytes()
    with pytest.raises(PayloadError, match="no header of a sparse frame"):
        decode_sparse(encode_dense(x), n, values)
    with pytest.raises(PayloadError, match=f"{n} entries where {n + 1}"):
        decode(encode_dense(x), n + 1, values)


@pytest.mark.parametrize(
    ("count", "n", "values", "codec", "shorter"),
    [
        (500, 1000, "float32", "int32", False),
        (501, 1000, "float32", "int32", True),
        (333, 1000, "float16", "int32", False),
        (334, 1000, "float16", "int32", True),
        (333, 1000, "float32", "packed", False),
        (900, 1000, "float32", "packed", False),
        (950, 1000, "float32", "packed", True),
        (0, 0, "float32", "packed", False),
        (0, 0, "float32", "int32", False),
        (1, 1, "float32", "packed", True),
    ],
)
def test_dense_is_shorter(count, n, values, codec, shorter):
    assert dense_is_shorter(count, n, values, codec) == shorter
    if not shorter and count:  # a bound
        places = np.sort(np.random.default_rng(0).choice(n, count, replace=False))
        frame = frame_of(places, np.ones(count), n, values, codec)
        assert frame.size <= encode_dense(np.ones(n, values)).size + 8


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
    n = 2**31 - 1
    with pytest.raises(PayloadError, match="ascending within"):
        decode_sparse(frame_of([0, n], [1, 2], 2**31), n, "float32", 2, whole=2**31)


@pytest.mark.parametrize("n", [10, 2**31, 2**40])
def test_packed_bytes_are_checked_behind_a_valid_checksum(n):
    """Whatever the bytes say, decoding ends in ascending indices within range, or in the error."""
    good = frame_of([1, 5, 8, 9], [1.0, -2.0, 0.5, 3], n, "float16", "packed")
    refused = 0
    for at in range(16, good.size - 8):
        for value in range(256):
            frame = good.copy()
            frame[at] = value
            try:
                indices, decoded = decode_sparse(sealed(frame), n, "float16")
            except PayloadError:
                refused += 1
            else:
                assert indices.size == decoded.size == 4
                assert (np.diff(indices) > 0).all()
                assert indices[0] >= 0
                assert indices[-1] < n
    assert refused > 1000


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({16: 49}, "without a valid parameter"),
        ({16: 255}, "without a valid parameter"),
        ({16: 48}, "packed indices that are not 4"),
        ({8: 0}, "bytes where 0 packed entries"),
        ({8: 3}, "packed indices that are not 3"),
        ({8: 5}, "packed indices that are not 5"),
        ({8: 40}, "bytes where 40 packed entries"),
        ({11: 255}, "bytes where 4278190084 packed entries"),
        ({4: 1}, "another dtype"),
        ({5: 4}, "another dtype"),
        ({5: 2}, "another dtype"),
        ({3: 3}, "no header"),
        ({6: 1}, "not the 10 elements"),
        ({2: 1}, "no header of a sparse frame, version 3"),
    ],
    ids=str,
)
def test_packed_frames_that_lie(changes, problem):
    frame = frame_of([1, 5, 8, 9], [1.0, -2.0, 0.5, 3], 10, "float16", "packed")
    for at, value in changes.items():
        frame[at] = value
    with pytest.raises(PayloadError, match=problem):
        decode_sparse(sealed(frame), 10, "float16")


def test_packed_indices_beyond_the_tensor():
    frame = frame_of([1, 5, 8, 9], [1.0, -2.0, 0.5, 3], 10, "float16", "packed")
    with pytest.raises(PayloadError, match=r"ascending within 0\.\.8"):
        decode_sparse(frame, 9, "float16", whole=10)
    with pytest.raises(PayloadError, match="not the 9 elements"):
        decode_sparse(frame, 9, "float16")
    with pytest.raises(PayloadError, match="4 entries where 3"):
        decode_sparse(frame, 10, "float16", 3)


def test_what_cannot_be_encoded():
    with pytest.raises(ConfigError, match="codec must be one of 'int32', 'packed'"):
        frame_of([1], [1], 10, codec="elias")
    with pytest.raises(ConfigError, match="ascending"):
        frame_of([5, 1], [1, 2], 10, codec="packed")


def test_frames_of_the_wrong_length():
    frame = frame_of([1, 5, 9], [1.0, -2.0, 0.5], 10)
    for size in range(frame.size):
        with pytest.raises(PayloadError, match=r"less than a header|checksum"):
            decode_sparse(frame[:size], 10, "float32", 3)
    for more in range(1, 20):
        longer = np.concatenate([frame, np.zeros(more, np.uint8)])
        with pytest.raises(PayloadError, match="checksum"):
            decode_sparse(longer, 10, "float32", 3)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"count": 2}, "3 entries where 2"),
        ({"count": 4}, "3 entries where 4"),
        ({"values": "float16"}, "another dtype"),
        ({"values": "float64"}, "another dtype"),
        ({"n": 2**31 + 1}, "another dtype"),
        ({"n": 9, "whole": 10}, "ascending within 0..8"),
        ({"n": 9}, "not the 9 elements"),
        ({"n": 11}, "not the 11 elements"),
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
        decode_sparse(sealed(frame), 10, "float32", 1)


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

"""Records of what was sent: sums, ratios and how they are shown."""

import json

import pytest

from hvd_compress.stats import Record, Stats, human_bytes

SPARSE = Record(
    steps=10,
    bytes_sent=8_000,
    bytes_received=24_000,
    dense_bytes=4_000_000,
    elements=1_000_000,
    elements_sent=1_000,
    residual_norm=3.0,
)
DENSE = Record(10, 4_000, 4_000, 4_000, 1_000, 1_000, 4.0)
STATS = Stats({"layer.weight": SPARSE, "layer.bias": DENSE})


def test_a_record_with_nothing_in_it():
    assert Record().ratio == 1.0
    assert Record().density == 1.0
    assert Stats({}).total == Record()


def test_ratio_and_density():
    assert SPARSE.ratio == 500
    assert SPARSE.density == 0.001
    assert DENSE.ratio == DENSE.density == 1.0


def test_the_total_is_the_sum_of_the_layers():
    assert STATS.total == Record(10, 12_000, 28_000, 4_004_000, 1_001_000, 2_000, 5.0)
    assert STATS.total.ratio == pytest.approx(4_004_000 / 12_000)
    assert SPARSE.plus(DENSE) == DENSE.plus(SPARSE)
    assert SPARSE.plus(Record()) == SPARSE
    assert Record(steps=3).plus(Record(steps=5)).steps == 5  # a tensor without gradient in some


def test_one_line():
    assert STATS.line() == (
        "10 steps, 1.2 KiB sent per step, 391.0 KiB dense (ratio of bytes 333.7, elements sent "
        "0.1998%), 27.3 KiB received in all, residual norm 5"
    )
    assert "0 steps" in Stats({}).line()


def test_all_elements_in_few_bits():
    """A ratio of bytes beside a fraction of elements: the line says which is which."""
    quantised = Record(1, 408, 1_632, 4_000, 1_000, 1_000)
    assert "(ratio of bytes 9.8, elements sent 100.0000%)" in Stats({"w": quantised}).line()


def test_a_table():
    lines = str(STATS).splitlines()
    columns = ["tensor", "steps", "sent", "received", "dense", "dense/sent", "elements", "residual"]
    assert lines[0].split() == columns
    assert [line.split()[0] for line in lines[1:]] == ["layer.weight", "layer.bias", "total"]
    assert "500.0" in lines[1]
    assert len({len(line) for line in lines}) == 1  # aligned


def test_scalars_of_tensors():
    scalars = json.loads(json.dumps(STATS.scalars(tensors=True)))
    assert len(scalars) == 3 * 5
    assert scalars["total/bytes_sent"] == 12_000
    assert scalars["layer.weight/ratio"] == 500
    assert scalars["layer.bias/residual_norm"] == 4.0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**30, "1.0 GiB"),
        (5 * 2**40, "5120.0 GiB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text

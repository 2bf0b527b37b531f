"""Even division, and what it promises."""

from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.sharding import bounds_of, shards_of


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 50))
def test_shards_are_whole_units_and_as_even_as_possible(n, parts, unit):
    shards = shards_of(n, parts, unit)
    assert len(shards) == parts
    assert [i for shard in shards for i in range(n)[shard]] == list(range(n))
    units = [-(-(shard.stop - shard.start) // unit) for shard in shards]
    assert sum(units) == -(-n // unit)
    assert max(units) - min(units) <= 1
    assert all(shard.start % unit == 0 for shard in shards if shard.start < n)
    assert bounds_of(n, parts, unit) == [0, *(shard.stop for shard in shards)]

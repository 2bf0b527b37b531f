"""Ranks compare what they are about to do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import Gather, Max
from hvd_compress.agreement import agreement, digest, encode, listed
from hvd_compress.engines.lockstep import reply_to, run
from hvd_compress.errors import MismatchError

TERMS = {"method": "TopK(density=0.1)", "step": "3", "tensors": ["w [3, 4]", "b [4]"]}
NOTHING = np.empty(0)


def errors_of(all_terms) -> list[str]:
    """The error that each rank raises, when every request is answered as an engine would."""
    exchanges = [agreement(terms, NOTHING) for terms in all_terms]
    requests = [next(exchange) for exchange in exchanges]
    assert all(isinstance(request, Max) for request in requests)
    most = reply_to(requests)
    requests = [exchange.send(most) for exchange in exchanges]
    assert all(isinstance(request, Gather) for request in requests)
    everyone = reply_to(requests)
    messages = []
    for exchange in exchanges:
        with pytest.raises(MismatchError) as caught:
            exchange.send(everyone)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_that_agree_send_sixteen_bytes(size):
    exchange = agreement(TERMS, NOTHING)
    assert next(exchange).array.nbytes == 16
    assert len(run([agreement(dict(TERMS), NOTHING) for _ in range(size)])) == size


@given(
    size=st.integers(2, 6),
    odd=st.integers(0, 5),
    what=st.sampled_from([("method", "DGC()"), ("step", "0"), ("tensors", ["w [3, 4]"])]),
)
def test_every_rank_shows_all_sides(size, odd, what):
    odd, (key, value) = odd % size, what
    messages = errors_of([{**TERMS, key: value} if r == odd else TERMS for r in range(size)])
    assert set(messages) == {messages[0]}
    assert f"  {key}\n" in messages[0]
    assert f"rank {odd}: " in messages[0]
    assert all(f"  {other}\n" not in messages[0] for other in TERMS.keys() - {key})


def test_the_message():
    others = {**TERMS, "step": "0", "tensors": ["w [3, 4]", "c [4]", "d []"]}
    message = errors_of([TERMS, others, TERMS])[1]
    assert message.splitlines()[1:7] == [
        "  step",
        "    rank 0, 2: 3",
        "    rank 1: 0",
        "  tensors",
        "    rank 0, 2: 2: b [4], no more",
        "    rank 1: 3: c [4], d []",
    ]


def test_what_one_rank_does_not_even_know():
    assert (
        "  more\n    rank 0: nothing\n    rank 1: x" in errors_of([TERMS, TERMS | {"more": "x"}])[0]
    )


def test_digests_differ_and_fit():
    assert digest(encode(TERMS)) != digest(encode({**TERMS, "step": "4"}))
    assert 0 <= digest(encode(TERMS)) < 2**63
    assert listed([("w", (3, 4)), ("scalar", ())]) == ["w [3, 4]", "scalar []"]


@pytest.mark.parametrize(
    ("changed", "is_progress"),
    [
        ({"step": "9"}, True),
        ({"step": "9", "epoch": "1.0"}, True),
        ({"step": "9", "method": "DGC()"}, False),
        ({"tensors": ["w [3, 4]"]}, False),
    ],
)
def test_the_way_out_is_that_of_what_differs(changed, is_progress):
    """Ranks at other steps or epochs had other numbers of batches; their model is the same."""
    terms = {**TERMS, "epoch": "0.0"}
    for message in errors_of([terms, {**terms, **changed}]):
        assert ("drop_last=True" in message) == is_progress
        assert ("the same model and options" in message) != is_progress
        assert "broadcast_optimizer_state()" in message

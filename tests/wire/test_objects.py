"""Objects as bytes, and those that cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.errors import UnsupportedError
from hvd_compress.wire.objects import pickled, unpickled


@pytest.mark.parametrize("obj", [None, [1, {"a": (2.0, "text")}], np.float32(3)])
def test_objects_arrive(obj):
    assert unpickled(pickled(obj), "rank 1") == obj


@pytest.mark.parametrize(
    ("make", "entry"),
    [
        (lambda f: f, "object, a function"),
        (lambda f: {"lr": 0.1, "groups": [0, f]}, "object['groups'][1], a function"),
        (lambda f: (1, {2: f}), "object[1][2], a function"),
    ],
)
def test_what_cannot_be_sent_is_named_to_who_waits_for_it(make, entry):
    raw = pickled(make(lambda: None))
    with pytest.raises(UnsupportedError) as raised:
        unpickled(raw, "rank 1")
    assert str(raised.value).startswith(f"rank 1 cannot send {entry}: ")

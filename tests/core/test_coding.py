"""Messages that stand alone: codings of flat arrays, and methods' encode and decode."""

import numpy as np
import pytest

from hvd_compress import DGC, Context, PowerSGD, UnsupportedError
from hvd_compress.backends import backend_of
from hvd_compress.base import Sparse
from hvd_compress.codecs import linear, random_k, threshold, top_k, uniform_dithering
from hvd_compress.engines.lockstep import run
from hvd_compress.errors import PayloadError
from hvd_compress.meetings import codes, drawn, elements, power_sgd, whole
from tests.method_table import ROWS

SHAPE = (12, 10)
CODINGS = {
    "whole": whole(),
    "float16": whole("float16"),
    "bfloat16": whole("bfloat16"),
    "codes": codes(linear(8)),
    "random codes": codes(uniform_dithering(4, 64)),
    "elements": elements(top_k(0.1)),
    "as many as there are": elements(threshold(0.5)),
    "4bit": elements(top_k(0.1), "4bit"),
    "int32": elements(top_k(0.1), "float16", "int32"),
    "drawn": drawn(random_k(0.2), unbiased=True),
    "drawn alike": drawn(random_k(0.2), alike=True, wire="bfloat16"),
    "factors": power_sgd(2, warm_start=False),
}


def dense(sent, n):
    if not isinstance(sent, Sparse):
        return sent
    return backend_of(sent.values).put(np.zeros(n, sent.values.dtype), *sent)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("coding", CODINGS.values(), ids=CODINGS)
def test_what_arrives_is_the_sum_of_what_was_sent(coding, dtype):
    """In the order of the ranks."""
    random, contexts = np.random.default_rng(0), []
    xs = [random.standard_normal(120).astype(dtype) for _ in range(3)]
    contexts = [Context("w", rank, 3, step=5, seed=1, shape=SHAPE) for rank in range(3)]
    sent = [coding.encode(x, {}, c) for x, c in zip(xs, contexts, strict=True)]
    found = coding.decode([each.message for each in sent], xs[0], contexts[1])
    total = sum(dense(each.sent, 120).astype(np.float64) for each in sent)
    close = 1e-14 if dtype is np.float64 else 1e-6
    np.testing.assert_allclose(found.total, total, rtol=0, atol=close * np.abs(total).max())
    assert found.total.dtype == dtype
    assert found.finite
    sizes = {each.message.size for each in sent}
    assert coding.varies(120, contexts[0]) or len(sizes) == 1
    for each in sent:
        assert each.message.dtype == np.uint8
        alone = coding.decode([each.message], xs[0], contexts[0]).total
        if not isinstance(coding, drawn):  # whose places are those of the rank
            np.testing.assert_array_equal(alone, dense(each.sent, 120).astype(dtype))
    broken = [each.message.copy() for each in sent]
    broken[2][-1] ^= 4
    with pytest.raises(PayloadError, match="checksum"):
        coding.decode(broken, xs[0], contexts[0])


def test_elements_by_hand():
    x, context = np.array([0, 3, 0, -4, 1, 0, 0, 0], np.float32), Context()
    coding = elements(top_k(0.25), indices="int32")
    message, sent, _ = coding.encode(x, {}, context)
    assert message.size == 16 + 2 * (4 + 4)
    assert (sent.indices.tolist(), sent.values.tolist()) == ([1, 3], [3, -4])
    total, finite, update = coding.decode([message, message], x, context)
    assert total.tolist() == [0, 6, 0, -8, 0, 0, 0, 0]
    assert finite
    assert update is None


def is_of_one_rank(method):
    """Whether an exchange codes once, and asks nobody: then it is the same as a message."""
    return "alltoall" not in repr(method) and "leader" not in repr(method)


SENDING = {}
for key, row in ROWS.items():
    x = np.ones(SHAPE, np.float32)
    method = row.method.for_tensor("w", SHAPE)
    if method.common(x):
        continue
    try:
        method.encode(x, method.init(x), Context(gradient_norm=1.0, epoch=0))
        SENDING[key] = method
    except UnsupportedError:
        pass


def test_most_methods_have_messages():
    names = {method.name for method in SENDING.values()}
    assert {"topk", "dgc", "powersgd", "qsgd", "terngrad", "scalecom", "onebit", "fp16"} <= names


@pytest.mark.parametrize("key", [k for k, m in SENDING.items() if is_of_one_rank(m)])
def test_a_message_is_the_exchange_of_a_single_rank(key):
    """The same bits arrive, and the same states stay."""
    method, random = SENDING[key], np.random.default_rng(0)
    x = np.zeros(SHAPE, np.float32)
    states = [method.init(x), method.init(x)]
    for step in range(4):
        x = random.standard_normal(SHAPE).astype(np.float32)
        norm = float(np.linalg.norm(x))
        context = Context("w", step=step, epoch=step, gradient_norm=norm)
        message, _, state = method.encode(x, states[0], context)
        (outcome,) = run([method.exchange(x, states[1], context)])
        np.testing.assert_array_equal(method.decode(message, x, context), outcome.mean)
        np.testing.assert_equal(state, outcome.state)
        states = [state, outcome.state]


@pytest.mark.parametrize(
    ("method", "why"),
    [(DGC(), "momentum"), (PowerSGD(alternate=True), "sender's state")],
)
def test_what_does_not_stand_alone_is_refused(method, why):
    x = np.ones(5 if why == "momentum" else SHAPE, np.float32)
    with pytest.raises(UnsupportedError, match=why):
        method.encode(x, method.init(x), Context())

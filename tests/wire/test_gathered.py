"""Every message that ranks gather, of every part of the package, with each of its bytes changed."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
from pathlib import Path

import numpy as np
import pytest

import hvd_compress
from hvd_compress.advisor import meeting
from hvd_compress.agreement import agreement
from hvd_compress.backends import numpy
from hvd_compress.base import Context
from hvd_compress.engines.lockstep import World, replies_to
from hvd_compress.errors import MismatchError, PayloadError
from hvd_compress.fused.on_device import gathered, scattered
from hvd_compress.integrations import environment
from hvd_compress.meetings.averaging import whole
from hvd_compress.methods.rows import as_rows, exchange_rows
from hvd_compress.reduce import buckets
from hvd_compress.requests import Alltoall, Gather, Neighbors
from hvd_compress.systems import counterparts as exchanges
from hvd_compress.systems import graphs, rounds
from hvd_compress.systems.base import StepContext
from hvd_compress.systems.decentralized import mix
from hvd_compress.wire.content import decode_bytes, decode_end_to_end, encode_bytes
from hvd_compress.wire.header import Header, Kind, failing, opened
from tests.core.test_rows import merged
from tests.method_table import ROWS

SIZE = 4
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
ROOT = Path(hvd_compress.__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore::hvd_compress.PoorFit")
#: methods that bring every block that gathers, and the step whose messages are damaged
METHODS = [
    *((name, 0) for name in ("topk-sampled", "dgc-compact", "onebit", "efsignsgd-allgather")),
    *((name, 0) for name in ("oktopk", "scalecom")),
    *(("lgc-server", step) for step in (0, 1)),
]


def of_leaders(rank):
    """Rank 2 leads all, and ranks 0 and 2 their groups."""
    method = rounds.LeaderSGD(local_every=1, global_every=1, groups=2)
    context = StepContext(1, rank, SIZE, [[0.5, 0.7, 0.1, 0.3][rank]])
    return method.before_step({"w": X, "b": X[0].astype("float64")}, {}, context)


def of_teachers(rank):
    peers = exchanges.Counterparts.of(2, rank, SIZE)
    return exchanges.exchange({"w": X, "b": X[0].astype("float64")}, peers, None)


def of_graphs(rank):
    network = graphs.as_topology("cycle").neighborhood(rank, SIZE, 1)
    return mix(X.reshape(-1), network, whole("float16"))


def of_rows(rank, text):
    indices, values = np.array([1, 5, rank + 6]), X[:3]
    waiting = np.zeros_like(values) if as_rows(text).keeps_residual else None
    context = Context(rank=rank, size=SIZE)
    return exchange_rows(
        as_rows(text), indices, values, waiting=waiting, n=40, context=context, merge=merged
    )


def of_device(rank):
    header, context = Header(Kind.BLOCKS, 0, 0, 7, 5), Context(rank=rank, size=SIZE)

    def check(frame, sender):
        assert opened(frame, Kind.BLOCKS, fail=failing(f"rank {sender}", "more")) == header

    frames = [np.full(48, rank + 10 * to, np.uint8) for to in range(SIZE)]
    yield from scattered(frames, [header.seal] * SIZE, check, context)
    yield from gathered(frames[0], header.seal, [check] * SIZE, context)


#: exchanges beside those of methods; errors call their messages by the first word
EXCHANGES = {
    "plan of the buckets": lambda rank: buckets._order_of_rank_0([2, 0, 1], X),
    "terms of a step": lambda rank: agreement({"step": str(rank)}, X),
    "figures for auto": lambda rank: meeting._texts({"seconds": [0.1, rank]}, X),
    "arrays of a teacher": of_teachers,
    "loss|parameters of a leader": of_leaders,
    "payload of a graph": of_graphs,
    "payload of a bucket on a device": of_device,
    "rows as they are": lambda rank: of_rows(rank, "whole"),
    "payload of rows": lambda rank: of_rows(rank, "int8"),
}


def of_method(name, step, fused):
    """A function that begins the exchanges of a method's step, and returns the states of a rank."""
    row, side = ROWS[name], 40 if name.startswith("lgc") else 5
    world, random = World(row.method, SIZE, fused=fused), np.random.default_rng(0)
    world.epoch = 3
    each = [
        {"w": random.normal(size=(side, side)).astype("f"), "b": random.normal(size=3).astype("f")}
        for _ in range(SIZE)
    ]
    for _ in range(step):
        world.exchange_all(each, **row.context)
    for own, x in each[0].items():
        method = world.compressor.for_tensor(own, x.shape)
        world.states.setdefault(own, [method.init(gradients[own]) for gradients in each])

    def begin():
        own = copy.deepcopy(world, {id(numpy): numpy})  # plans name their backend
        exchanges = [own._joined(rank, each[rank], row.context) for rank in range(SIZE)]
        return exchanges, lambda: str(own.states)

    return begin


class Run:
    """All ranks, of which ``sender``'s message of a round is damaged in one byte.

    Attributes:
        messages: ``(round, (sender, receiver))`` of all messages, with their sizes.
        errors: what came of the ranks that ended, by rank.
    """

    def __init__(self, exchanges, damaged=None, sender=0, byte=0):
        self.messages, self.errors, number, replies = {}, {}, 0, [None] * SIZE
        while not self.errors:
            requests = {}
            for rank, exchange in enumerate(exchanges):
                try:
                    requests[rank] = exchange.send(replies[rank])
                except StopIteration:
                    self.errors[rank] = None
                except (PayloadError, MismatchError) as error:
                    self.errors[rank] = error
            if len(requests) < SIZE:
                for exchange in exchanges:  # whoever goes on would wait for the others
                    exchange.close()
                return
            replies = replies_to(list(requests.values()))
            for rank, request in requests.items():
                if not isinstance(request, Gather | Alltoall | Neighbors):
                    continue
                replies[rank] = list(replies[rank])
                sources = getattr(request, "sources", range(SIZE))
                for i, (source, part) in enumerate(zip(sources, replies[rank], strict=True)):
                    self.messages[number, (source, rank)] = part.size
                    if (number, source) == (damaged, sender) and byte < part.size:
                        replies[rank][i] = part.copy()
                        replies[rank][i][byte] ^= 1 << byte % 8
            number += 1


def check(begin, from_rank_0=False):
    """Whoever receives a message with a byte changed raises an error that names its sender, and
    keeps its state."""
    messages = Run(begin()[0]).messages
    assert messages
    for number in {number for number, *_ in messages}:
        sizes = {pair: size for (n, pair), size in messages.items() if n == number}
        longest = max(sizes.values())
        for byte in range(0, longest, 1 + longest // 60):
            senders = [0] if from_rank_0 else sorted({x for (x, _), n in sizes.items() if n > byte})
            sender = senders[byte % len(senders)]
            exchanges, states = begin()
            before, errors = states(), Run(exchanges, number, sender, byte).errors
            for receiver in range(SIZE):
                if byte < sizes.get((sender, receiver), 0):
                    error = errors[receiver]
                    assert isinstance(error, PayloadError), (number, sender, byte, error)
                    assert f"rank {sender}" in str(error), error
            assert states() == before


#: gradients inside a node go as they are, as dense sums do
AS_NUMBERS = {"reduce/nodes.py"}


def noting(cls, found, place):
    def made(*args, **kwargs):
        found.add(place)
        return cls(*args, **kwargs)

    return made


def gathering():
    """The modules that ask for messages of bytes, by their source."""
    return {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if path.parent.name != "requests"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Gather", "Alltoall", "Neighbors")
    }


def of_exchange(name):
    return lambda: ([EXCHANGES[name](rank) for rank in range(SIZE)], lambda: None)


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_changed_byte_is_an_error_with_its_sender(name):
    check(of_exchange(name), from_rank_0=name.startswith("plan"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("name", "step"), METHODS)
def test_a_changed_byte_reaches_no_state(name, step, fused):
    check(of_method(name, step, fused))


def test_every_part_that_gathers_is_tried(monkeypatch):
    found = set()
    for place in gathering():
        module = importlib.import_module(f"hvd_compress.{place[:-3].replace('/', '.')}")
        for kind in ("Gather", "Alltoall", "Neighbors"):
            if (cls := vars(module).get(kind)) is not None:
                monkeypatch.setattr(module, kind, noting(cls, found, place))
    for begin in (
        *map(of_exchange, EXCHANGES),
        *(of_method(name, step, fused) for name, step in METHODS for fused in (False, True)),
    ):
        assert Run(begin()[0]).messages
    assert gathering() - AS_NUMBERS <= found


def test_bytes_of_all_ranks_that_lie_end_to_end():
    """As Horovod's allgather returns them: the variable of the environment, terms, options."""
    texts = [b"", b"dgc", b"topk:density=0.01"]
    frames = np.concatenate([encode_bytes(text, "words") for text in texts])
    assert decode_end_to_end(frames, "words") == texts
    for byte in range(frames.size):
        damaged = frames.copy()
        damaged[byte] ^= 1 << byte % 8
        with pytest.raises(PayloadError, match="bad words from rank"):
            decode_end_to_end(damaged, "words")
    with pytest.raises(
        MismatchError, match="rank 1 sends something else where this rank has: sums"
    ):
        decode_bytes(frames[:16], "sums", sender="rank 1")


def test_a_damaged_variable_of_the_environment(monkeypatch):
    def gather(own, name, process_set):
        return own[:-1] + bytes([own[-1] ^ 1])

    class everyone:  # a process set and the module of Horovod
        process_set_id, ranks = 0, [0, 1]
        included = is_initialized = staticmethod(lambda: True)
        size = staticmethod(lambda: 2)

    monkeypatch.setenv("HVD_COMPRESSION", "topk")
    everyone.__name__ = "damaged"
    with pytest.raises(PayloadError, match="bad HVD_COMPRESSION from rank 0"):
        environment.compare(everyone, everyone, gather)


def test_objects_over_mpi(monkeypatch):
    objects = pytest.importorskip("hvd_compress.mpi.objects")
    frames = [encode_bytes(pickle.dumps(x), "object") for x in ({"a": 1}, [2])]

    class communicator:
        agree = channel = staticmethod(lambda *given: None)
        run = staticmethod(lambda name, algorithm: (frames,))

    monkeypatch.setattr(objects, "communicator_of", lambda process_set: communicator)
    monkeypatch.setattr(objects, "gather", lambda channel, own: None)
    assert objects.allgather_object(None) == [{"a": 1}, [2]]
    whole = frames[1]
    for byte in range(whole.size):
        frames[1] = whole.copy()
        frames[1][byte] ^= 1 << byte % 8
        with pytest.raises(PayloadError, match="bad object from rank 1"):
            objects.allgather_object(None)

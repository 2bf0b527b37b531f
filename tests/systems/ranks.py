"""All ranks of a system in one process, behind one face for the laws.

``Trained`` and ``Taught`` run the real owners, each on a thread of its own; ``Served`` runs the
ends of a parameter server.  Each rank minimises |x - target|^2 / 2 over some tensors, and each
gradient depends on all of them, as those of a network do.
"""

from __future__ import annotations

import copy
import threading

import numpy as np

from hvd_compress.agreement import differences, encode
from hvd_compress.engines.base import Engine
from hvd_compress.engines.joining import alone
from hvd_compress.engines.lockstep import reply_to
from hvd_compress.errors import MismatchError
from hvd_compress.requests import Alltoall, Broadcast, Gather, Neighbors
from hvd_compress.systems import Coordinator
from hvd_compress.systems.servers import SGD
from hvd_compress.systems.teachers import Codistiller
from tests.systems.servers.simulation import Simulation

SIZE, LR = 4, 0.1
NAMES = ("a", "b", "c")
SHAPE = (2, 3)  # a matrix, for what works on those


class Meeting:
    """A place in which threads show each other what they have."""

    def __init__(self, size):
        self.size, self._board = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def meet(self, rank, own, answer):
        """Return ``answer(everybody's)``, found while nobody goes on."""
        self._board[rank] = own
        self._barrier.wait()
        try:
            return answer(self._board)
        finally:
            self._barrier.wait()

    def run(self, function):
        """Return what ``function(rank)`` returns on each thread; raise the first rank's error."""
        found, errors = [None] * self.size, [None] * self.size

        def work(rank):
            try:
                found[rank] = function(rank)
            except Exception as error:
                errors[rank] = error
                self._barrier.abort()  # the others would wait for it

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(filter(None, errors), key=_is_broken):
            raise error
        return found


def _is_broken(error):
    return isinstance(error, threading.BrokenBarrierError)


class ThreadEngine(Engine):
    """The engine of a rank that is a thread; ``sent`` counts the bytes of its requests."""

    rank, size = 0, 1

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.sent, self._flying, self._terms = 0, {}, None

    def start(self, name, exchange):
        self._flying[name] = alone(exchange)

    def abandon(self):
        self._flying = {}

    def agree(self, terms, like, at_once=False):
        self._terms = encode(terms)

    def finish(self):
        if self._terms is not None:
            texts, self._terms = self.meeting.meet(self.rank, self._terms, list), None
            if len(set(texts)) > 1:
                raise MismatchError(differences(texts))
        flying, self._flying = self._flying, {}
        return {name: self._run(exchange) for name, exchange in flying.items()}

    def _run(self, exchange):
        reply = None
        while True:
            try:
                request = exchange.send(reply)
            except StopIteration as stop:
                return stop.value
            self.sent += self._size(request)
            # A copy: a rank that goes on writes its next message where this one stood.
            reply = self.meeting.meet(
                self.rank, request, lambda all_: copy.deepcopy(reply_to(all_, self.rank))
            )

    def _size(self, request):
        if isinstance(request, Neighbors):
            size = request.payload.nbytes + 8 * (not request.equal_sizes)  # which is sent, too
            return size * len(request.targets)
        if isinstance(request, Broadcast):
            return request.array.nbytes * (self.rank == request.root)
        if isinstance(request, Gather):
            return request.payload.nbytes + 8 * (not request.equal_sizes)
        if isinstance(request, Alltoall):
            return request.nbytes
        return request.array.nbytes


class _OnThreads:
    """Subclasses make an owner of an engine, and take a step with it."""

    def __init__(self, method, size=SIZE, names=NAMES, spread=0.0):
        random = np.random.default_rng(0)
        self.method, self.size, self._meeting = method, size, Meeting(size)
        self.engines = [ThreadEngine(self._meeting, rank) for rank in range(size)]
        self.owners = self._meeting.run(lambda rank: self.owner(method, self.engines[rank]))
        self.targets = [{n: random.normal(size=SHAPE) for n in names} for _ in range(size)]
        self.x = [{n: np.full(SHAPE, spread * rank) for n in names} for rank in range(size)]
        self.kept = [{} for _ in range(size)]  # that are frozen

    def run(self, steps):
        def work(rank):
            for _ in range(steps):
                own, target = self.x[rank], self.targets[rank]
                lost = 0 * sum(map(np.sum, own.values()))
                self.step(rank, {n: x - target[n] + lost for n, x in own.items()})

        self._meeting.run(work)
        return self

    def spoil(self, rank):
        self.x[rank]["b"] = np.full(SHAPE, np.nan)

    def freeze(self, *names):
        """Train these no longer, and return what they are at."""
        self.kept = [{n: own.pop(n) for n in names} for own in self.x]
        return self.frozen()

    def frozen(self):
        """Return what those are at that are frozen, by rank."""
        return [dict(own) for own in self.kept]

    def thaw(self):
        for own, kept in zip(self.x, self.kept, strict=True):
            own.update(kept)
        self.kept = [{} for _ in self.x]

    def counted(self):
        """Return what each rank says that it has sent, and what it has."""
        self.bring_in()
        said = [owner.stats().total.bytes_sent for owner in self.owners]
        return said, [engine.sent for engine in self.engines]

    def bring_in(self):
        """Wait for what is in flight."""

    def resumed(self):
        """Return ranks that go on from the checkpoints of these."""
        self.bring_in()
        again = type(self)(self.method, self.size, names=tuple(self.x[0]))

        def work(rank):
            self.load(again.owners[rank], self.owners[rank].state_dict(), self.x[rank])

        again._meeting.run(work)
        again.targets, again.x = self.targets, [dict(own) for own in self.x]
        return again


class Trained(_OnThreads):
    """Rounds and graphs."""

    def owner(self, method, engine):
        return Coordinator(method, engine)

    def step(self, rank, gradients):
        owner = self.owners[rank]
        if self.method.loss_window:
            owner.report(sum(float((g**2).sum()) for g in gradients.values()))
        pulled = owner.before_step(self.x[rank], rates=dict.fromkeys(gradients, LR))
        self.x[rank] = owner.after_step({n: x - LR * gradients[n] for n, x in pulled.items()})

    def freeze(self, *names):
        super().freeze(*names)
        self.kept = self._meeting.run(lambda rank: self.owners[rank].freeze(self.kept[rank]))
        return self.frozen()

    def bring_in(self):
        self._meeting.run(lambda rank: self.owners[rank].bring_in())

    def tested(self):
        """Return what would be tested, by rank."""
        return self._meeting.run(lambda rank: self.owners[rank].consensus(self.x[rank]))

    def load(self, owner, saved, x):
        owner.load_state_dict(saved)


class Model(Codistiller):
    """Its parameters ``x`` are trained, and others are ``kept``."""

    x = kept = {}

    def arrays(self):
        return {**self.x, **self.kept}

    def changing(self):
        return [*self.x]


class Taught(_OnThreads):
    """Codistillation; a model predicts its parameters."""

    def owner(self, method, engine):
        return Model(method, engine)

    def step(self, rank, gradients):
        owner, x = self.owners[rank], self.x[rank]
        owner.x, owner.kept = x, self.kept[rank]
        owner.next_step()
        if self.method.exchange == "predictions":
            found = owner.predictions(np.concatenate([*x.values()]))
        else:
            teachers = owner.checkpoints()
            outputs = [np.concatenate([own[n] for n in x]) for own in teachers]
            found = owner.usable(outputs) if outputs else []
        if found:
            goal = np.split(sum(found) / len(found), len(x))
            pulls = {n: owner.weight * (x[n] - part) for n, part in zip(x, goal, strict=True)}
            gradients = {n: g + pulls[n] for n, g in gradients.items()}
        self.x[rank] = {n: own - LR * gradients[n] for n, own in x.items()}

    def load(self, owner, saved, x):
        owner.x = x
        owner.load_state_dict(saved)


class Served:
    """Workers of a parameter server, who push in turn."""

    def __init__(self, rules, size=SIZE, names=NAMES, spread=0.0):
        random = np.random.default_rng(0)
        self.size, self._bad, self._frozen = size, None, set()
        self.targets = [{n: random.normal(size=SHAPE) for n in names} for _ in range(size)]
        start = {n: np.zeros(SHAPE) for n in names}
        self.sim = Simulation(start, self._gradient, size, rules, SGD(LR))

    def _gradient(self, worker, x, step):
        bad, self._bad = self._bad == worker, self._bad if self._bad != worker else None
        return {
            n: None if n in self._frozen else own - self.targets[worker][n] + (np.nan if bad else 0)
            for n, own in x.items()
        }

    @property
    def x(self):
        return [link.parameters for link in self.sim.links]

    def run(self, steps):
        for _ in range(steps):
            self.sim.run(range(self.size))
        return self

    def spoil(self, rank):
        self._bad = rank

    def freeze(self, *names):
        self._frozen.update(names)
        return self.frozen()

    def frozen(self):
        # Those of the server: workers learn of the last steps with their next replies.
        return [{n: x.copy() for n, x in self.sim.parameters.items() if n in self._frozen}]

    def thaw(self):
        self._frozen.clear()

    def counted(self):
        sent = sum(link.bytes_sent for link in self.sim.links)
        return [sent], [self.sim.server.stats.bytes_up]

"""Without whom the others go on, and when: a clock that is turned by hand."""

from __future__ import annotations

import pytest

from hvd_compress.systems.servers.patience import Patience

TIMEOUT, AT_END = 60.0, 600.0


class Clock:
    """Workers of a server; ``waits``: a frame is not answered at once."""

    def __init__(self, workers=2):
        self.active, self.waiting = set(range(workers)), set()
        self.patience = Patience(self.active, TIMEOUT, AT_END, 0.0)

    def push(self, worker, now, waits=False):
        self.patience.heard(worker, self.active, self.waiting, now)
        if waits:
            self.waiting.add(worker)
        else:
            self.reply(worker, now)

    def reply(self, worker, now):
        self.waiting.discard(worker)
        self.patience.replied(worker, now)

    def leave(self, worker, now):
        self.patience.heard(worker, self.active, self.waiting, now)
        self.active.discard(worker)
        self.patience.left(now)

    def lost(self, now):
        return set(self.patience.lost(self.active, self.waiting, now))


def test_nobody_is_lost_while_all_are_silent():
    assert Clock().lost(10_000.0) == set()
    assert Clock(1).lost(10_000.0) == set()


@pytest.mark.parametrize("waits", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("before", [(0.0, 0.1), (0.0, 0.0), (0.1, 0.0)])
def test_a_pause_of_all_may_end_for_one_after_the_other(waits, before):
    """Also where they have not begun it at once."""
    clock = Clock()
    for worker, now in enumerate(before):
        clock.push(worker, now)
    assert all(clock.lost(now) == set() for now in (59.0, 60.05, 60.2, 90.0))
    clock.push(0, 100.0, waits)
    assert clock.lost(100.1) == clock.lost(159.0) == set()
    clock.push(1, 159.0, waits)
    assert clock.lost(159.1) == set()


def test_the_others_wait_for_so_long_and_no_longer():
    clock = Clock(3)
    clock.push(0, 50.0, waits=True)
    clock.push(2, 55.0, waits=True)
    assert clock.lost(100.0) == set(), "silent for longer, but nobody has waited so long"
    assert clock.patience.lost(clock.active, clock.waiting, 110.5) == {1: 110.5}


def test_who_waits_since_before_the_silence_has_not_waited_for_it():
    """Worker 0 waits; worker 1 sends one after the other."""
    clock = Clock()
    clock.push(0, 1.0, waits=True)
    for now in range(2, 200, 10):
        clock.push(1, float(now))
        assert clock.lost(now + 9.0) == set()
    assert clock.lost(192.0 + 61.0) == {1}


def test_who_waits_for_nobody_goes_on_for_so_long():
    clock = Clock()
    for now in range(1, 62, 5):
        clock.push(0, float(now))
        assert clock.lost(now + 1.0) == ({1} if now > TIMEOUT else set())


def test_workers_that_have_left_wait_longer():
    clock = Clock()
    clock.push(1, 5.0)
    clock.leave(0, 10.0)
    assert clock.lost(500.0) == set()
    assert clock.lost(10.0 + AT_END + 1) == {1}
    clock.push(1, 500.0)
    assert clock.lost(1000.0) == set()

"""Oracle: a reader that tells when its reads begin and holds them until it is told to go on."""

import threading

import pytest

from mlx_moeflux.experts.io import read_pool
from mlx_moeflux.experts.io.read_pool import Fetch, ReadPool, Target
from tests.experts.conftest import BOTH_READ

SEVERAL = range(5), range(5, 7), range(7, 11)


class Held:
    """A reader of blocks of one byte."""

    name = "held"

    def __init__(self):
        self.begun, self.threads, self.go = [], set(), threading.Event()

    def stored_bytes(self, layer):
        return 1

    def read(self, layer, expert, into):
        self.begun.append(expert)
        self.threads.add(threading.get_ident())
        assert self.go.wait(30)
        return 1


@pytest.fixture
def threads():
    found = ReadPool(Held(), 3)
    found.begin_seconds = 60
    yield found
    found.close()


def test_urgent_reads_have_begun_when_they_were_handed_over(threads):
    for count in (1, 2, 3, 5):
        reader = Held()
        batch = Fetch(threads, reader, 0, [Target(e, e) for e in range(count)])
        batch.start(urgent=True)
        assert len(reader.begun) >= min(count, 3) - 1  # the last has begun, and reads soon
        reader.go.set()
        assert batch.wait() is None
        assert sorted(reader.begun) == list(range(count))


def test_a_block_that_was_given_up_before_it_began_is_never_read():
    threads, reader = ReadPool(Held(), 1), Held()
    first, wrong, needed = (Fetch(threads, reader, 0, [Target(e, e)]) for e in range(3))
    for fetch in (first, wrong):
        fetch.start()
    while not reader.begun:
        pass
    wrong.abandon()
    needed.start(urgent=True)
    reader.go.set()
    assert needed.wait() is None
    assert reader.begun == [0, 2]
    wrong.drain()
    assert wrong.arrivals() == []
    assert first.wait() is None
    threads.close()


def test_nobody_waits_for_threads_that_have_other_work(threads):
    first, second = Held(), Held()
    busy = Fetch(threads, first, 0, [Target(e, e) for e in range(5)])
    busy.start(urgent=True)
    while len(first.begun) < 3:
        pass
    batch = Fetch(threads, second, 0, [Target(0, 0)])
    batch.start(urgent=True)
    assert not second.begun
    for reader in (first, second):
        reader.go.set()
    assert busy.wait() is None
    assert batch.wait() is None


@BOTH_READ
def test_small_blocks_are_read_by_the_caller(threads, small_blocks):
    reader = Held()
    reader.go.set()
    batch = Fetch(threads, reader, 0, [Target(e, e) for e in range(4)])
    batch.start(urgent=True)
    assert batch.wait() is None
    assert (reader.threads == {threading.get_ident()}) == (read_pool.SMALL_BYTES > 0)
    assert sorted(reader.begun) == [0, 1, 2, 3]
    assert [a.expert for a in batch.arrivals()] == [0, 1, 2, 3]


def test_the_oldest_batch_is_read_first(threads):
    """All of its reads begin before any of a later batch, whichever thread ends first."""
    reader = Held()
    batches = [Fetch(threads, reader, 0, [Target(e, e) for e in some]) for some in SEVERAL]
    for batch in batches:
        batch.start()
    while len(reader.begun) < threads.count:
        pass
    reader.go.set()
    assert [batch.wait() for batch in batches] == [None] * len(batches)
    assert sorted(reader.begun[:5]) == [0, 1, 2, 3, 4]
    assert set(reader.begun[5:7]) == {5, 6}
    assert sorted(reader.begun[7:]) == [7, 8, 9, 10]

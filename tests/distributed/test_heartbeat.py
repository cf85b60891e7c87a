"""The heartbeat alone, between threads of one process, with short times. Oracle: the reasons."""

from __future__ import annotations

import contextlib
import queue
import socket
import time

import pytest

from mlx_moeflux.distributed.heartbeat import Heartbeat
from mlx_moeflux.errors import DistributedError

LIMIT = 1.0
SHORT = {"beat": LIMIT / 10, "limit": LIMIT}
SECONDS = 20  # that a test waits for what must come


@pytest.fixture
def ranks():
    """Three ranks, and the queues of what each calls a loss."""
    losses = [queue.Queue() for _ in range(3)]
    first = Heartbeat.listening(3, on_loss=losses[0].put, **SHORT)
    where = {"hosts": ["127.0.0.1"], "port": first.port, "token": first.token}
    first.expect()
    others = [Heartbeat.connected(i, 3, **where, on_loss=losses[i].put, **SHORT) for i in (1, 2)]
    every, end = [first, *others], time.monotonic() + SECONDS
    while {peer.rank for peer in first._peers} != {1, 2}:
        assert time.monotonic() < end
        time.sleep(0.01)
    yield every, losses
    for each in every:
        each.end()


def none_for(losses, seconds: float) -> bool:
    time.sleep(seconds)
    return all(each.empty() for each in losses)


@pytest.mark.slow
def test_ranks_that_work_and_end_are_not_lost(ranks):
    every, losses = ranks
    for _ in range(3):
        for each in every:
            with each.collective():
                time.sleep(0.01)
    assert none_for(losses, 2 * LIMIT)
    for each in every:
        each.end()
        each.end()
    assert none_for(losses, LIMIT)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_others_hear_of_a_closed_connection(ranks, rank):
    every, losses = ranks
    for peer in list(every[rank]._peers):
        with contextlib.suppress(OSError):  # its own thread saw the first one and closed this one
            peer.connection.shutdown(socket.SHUT_RDWR)
    for other in {0, 1, 2} - {rank}:
        assert "lost: its connection closed" in losses[other].get(timeout=SECONDS)


def test_the_others_hear_why_a_rank_failed(ranks):
    every, losses = ranks
    every[1].fail("rank 1 failed: the\ndisk is full")
    for other in (0, 2):
        assert losses[other].get(timeout=SECONDS) == "rank 1 failed: the disk is full"
    assert losses[1].empty()


def test_a_rank_that_fails_leaves_the_line_to_the_thread_that_writes_one(ranks):
    every, _ = ranks
    begun, written = queue.Queue(), []

    def leave(reason):
        begun.put(reason)
        time.sleep(LIMIT / 4)
        written.append(reason)

    every[2]._on_loss = leave
    every[1].fail("rank 1 failed")
    begun.get(timeout=SECONDS)
    every[2].fail("a collective failed, too")
    assert written == ["rank 1 failed"]


def test_the_others_hear_all_calls_and_the_end(ranks):
    every, losses = ranks
    texts = [f"step {i} " + i % 7 * "x" for i in range(1000)]
    for text in texts:
        every[0].call(text)
    for other in every[1:]:
        assert [other.called() for _ in texts] == texts
    every[2].end()  # of another rank than 0, which says nothing
    every[0].end()
    assert every[1].called() is None
    assert none_for(losses, 0)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_silent_rank_is_lost(ranks, rank):
    """A stopped process keeps its connections, and says nothing."""
    every, losses = ranks
    every[rank]._send = lambda line: None
    for other in {0, 1, 2} - {rank}:
        assert f"rank {rank} is lost: silent" in losses[other].get(timeout=SECONDS)


@pytest.mark.slow
def test_ranks_that_all_wait_are_lost(ranks):
    """The collectives' own connections are cut."""
    every, losses = ranks
    with every[0].collective(), every[2].collective():
        assert none_for(losses, 2 * LIMIT)  # rank 1 may compute for long
        with every[1].collective():
            for each in losses:
                assert "wait for each other" in each.get(timeout=SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [0, 1])
def test_nobody_waits_for_a_rank_that_has_ended(ranks, ended):
    every, losses = ranks
    every[ended].end()
    waiting = 2
    with every[waiting].collective():
        if ended:
            with every[0].collective():
                assert "wait for each other" in losses[0].get(timeout=SECONDS)
        assert "wait for each other" in losses[waiting].get(timeout=SECONDS)


@pytest.mark.slow
def test_a_rank_that_never_connects_is_lost():
    losses: queue.Queue = queue.Queue()
    first = Heartbeat.listening(2, on_loss=losses.put, **SHORT)
    assert none_for([losses], 1.5 * LIMIT)  # the other may load for long before it hears of us
    first.expect()
    with socket.create_connection(("127.0.0.1", first.port)) as stranger:
        stranger.sendall(b"hello 0123 1\n")
        assert losses.get(timeout=SECONDS).startswith("rank 1 is lost: it does not answer")
    first.end()


def test_an_address_where_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(DistributedError, match="rank 1 cannot connect to rank 0 at port"):
            Heartbeat.connected(1, 2, hosts=["127.0.0.1"], port=port, token="", **SHORT)

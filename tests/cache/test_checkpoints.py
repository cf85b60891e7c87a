"""Oracle: the same tokens without interruption. The cases are those of the predecessors' tests of
checkpoints by position."""

from __future__ import annotations

import copy
import re

import mlx.core as mx
import pytest

from mlx_moeflux.cache import SequenceState
from mlx_moeflux.errors import CacheError
from tests.models_at_hand import model_of, run, same_bits, tokens_of


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid")) as model:
        yield model


@pytest.fixture
def at(hybrid):
    """A state that goes to a position, and the tokens that it reads."""
    state, tokens = hybrid.make_cache(), tokens_of(40)

    def go(position):
        run(hybrid, state, tokens[:, state.position : position])
        return state

    return go


def test_checkpoint_round_trip(hybrid, at):
    tokens = tokens_of(40)
    state = at(5)
    assert state.checkpoint(5) == 5
    expected = run(hybrid, state, tokens[:, 5:9])
    state.restore_to(5)
    assert state.position == 5
    assert same_bits(run(hybrid, state, tokens[:, 5:9]), expected)
    # A predecessor's rewind left the recurrent layers in the future.
    state.restore_to(5)
    run(hybrid, state, tokens_of(7, seed=9))
    state.restore_to(5)
    assert same_bits(run(hybrid, state, tokens[:, 5:9]), expected)


def test_unknown_position_and_wrong_position(at):
    state = at(4)
    state.checkpoint()
    with pytest.raises(CacheError, match=re.escape("no checkpoint at position 3; there are [4]")):
        state.restore_to(3)
    with pytest.raises(CacheError, match="at position 4, not 3"):
        state.checkpoint(3)
    assert state.checkpoints == [4]


def test_restoring_drops_later_checkpoints_only(at):
    state = at(0)
    for position in (0, 2, 4, 6):
        at(position).checkpoint()
    state.restore_to(4)
    assert state.checkpoints == [0, 2, 4]
    at(5).checkpoint()
    assert state.checkpoints == [0, 2, 4, 5]


def test_the_least_recently_used_goes_but_never_0_nor_the_newest(at):
    state = at(0)
    for position in (0, 1, 2, 3):
        at(position).checkpoint()
    at(4).checkpoint()
    assert state.checkpoints == [0, 2, 3, 4]
    at(4).checkpoint()
    assert state.checkpoints == [0, 2, 3, 4]
    state.restore_to(2)
    for position in (3, 4, 5):
        at(position).checkpoint()
    assert state.checkpoints == [0, 3, 4, 5]
    state.max_checkpoints = 1
    assert state.checkpoints == [0, 3, 4, 5]
    at(6).checkpoint()
    assert state.checkpoints == [0, 6]
    state.max_checkpoints = 0
    at(7).checkpoint()
    assert state.checkpoints == [0, 7]


def test_use_keeps_a_checkpoint(at):
    state = at(0)
    state.max_checkpoints = 2
    at(1).checkpoint()
    at(2).checkpoint()
    state.forget(2)
    state.restore_to(1)
    at(3).checkpoint()
    at(4).checkpoint()
    assert state.checkpoints == [3, 4]


def test_overwriting_keeps_one_and_makes_it_the_newest(hybrid, at):
    state = at(0)
    state.max_checkpoints = 2
    at(1).checkpoint()
    at(2).checkpoint()
    state.restore_to(1)
    run(hybrid, state, mx.array([[7]]))
    state.checkpoint()
    assert state.checkpoints == [1, 2]
    expected = run(hybrid, state, mx.array([[8]]))
    state.restore_to(2)
    assert same_bits(run(hybrid, state, mx.array([[8]])), expected)


def test_forget_and_reset(at):
    state = at(3)
    state.checkpoint()
    state.forget(3)
    state.forget(3)
    assert state.checkpoints == []
    assert state.position == 3
    state.checkpoint()
    state.reset()
    assert state.checkpoints == []
    assert state.position == 0
    assert all(entry.empty() and not entry.nbytes for entry in state)
    with pytest.raises(CacheError, match=r"there are \[\]"):
        state.restore_to(3)


def test_a_copy_has_no_checkpoints_and_lives_alone(hybrid, at):
    state = at(3)
    state.checkpoint()
    other = copy.deepcopy(state)
    assert other.checkpoints == []
    assert isinstance(other, SequenceState)
    a = run(hybrid, other, tokens_of(4, seed=5))
    assert state.position == 3
    assert same_bits(run(hybrid, state, tokens_of(4, seed=5)), a)

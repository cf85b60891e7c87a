"""Oracle: the resident store; and, for the plan, a set that plays the bank."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.policies.wave_schedule import (
    READ_AHEAD,
    WaveSchedule,
    begin_early,
    run_waves,
)
from mlx_moeflux.experts.streaming.slots import SlotTable
from mlx_moeflux.experts.streaming.store import StreamedStore
from tests.experts.helpers import (
    FOUR_BIT,
    bank_is_right,
    random_call,
    random_experts,
    same_bits,
    write_experts,
)

MANY = 23


LENGTHS, BANKS = (63, 64, 65, 500), (4, 9, MANY - 1)
# Every length with the smallest bank, every bank with a length beyond a chunk.
USUAL = {(4, n) for n in LENGTHS} | {(9, 65), (MANY - 1, 500)}


@pytest.mark.parametrize(
    ("slots", "n"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in USUAL))
        for case in product(BANKS, LENGTHS)
    ],
)
def test_sweeps_change_no_bit_and_read_each_block_once(tmp_path, slots, n):
    """Waves of at most three reads, so that residents wait and reads run ahead."""
    experts = write_experts(tmp_path, random_experts(FOUR_BIT, num_experts=MANY), "packed")
    resident = experts.resident()
    with StreamedStore(make_reader("pread", experts.refs), slots) as store:
        store.wave_reads = 3
        for seed in range(2):
            before = set(store.residents(3))
            store.stats().reset()
            call = random_call(n, k=4, num_experts=MANY, seed=seed, padding=5)
            assert same_bits(store.experts(3, *call), resident.experts(3, *call))
            stats = store.stats().layers[3]
            assert stats.reads == stats.misses <= stats.lookups == MANY
            # Of the residents, only those that made room for reading ahead are read again.
            assert stats.hits >= len(before) - min(slots, 2 * 3)
            assert bank_is_right(store, experts)


def test_after_a_sweep_the_last_token_finds_its_experts(tmp_path):
    experts = write_experts(tmp_path, random_experts(FOUR_BIT, num_experts=MANY), "packed")
    with StreamedStore(make_reader("pread", experts.refs), 12) as store:
        x, ids, weights = random_call(60, k=4, num_experts=MANY)
        store.experts(3, x, ids, weights)
        # The read-ahead of the highest experts may have taken the slots of the lowest.
        last = np.array(ids)[-2:]
        assert len(set(store.residents(3)) & set(last.ravel().tolist())) > 0


@given(
    slots=st.integers(1, 2 * READ_AHEAD + 8),
    resident=st.sets(st.integers(0, 99)),
    needed=st.sets(st.integers(0, 99), min_size=1),
    early=st.booleans(),
)
@settings(max_examples=100)
def test_a_plan_never_overfills_the_bank(slots, resident, needed, early):
    """Plays a whole sweep: at no time are there more protected experts than slots, every needed
    expert comes once and ascending, and what was resident and kept is not read. early: Waves of
    all experts begin before it is known which are needed."""
    table = SlotTable(slots, 100)
    for expert in sorted(resident)[:slots]:
        table.put(expert, table.take())
    seen, read, begun, following = [], [], [], []

    def begin(full):
        assert full.experts
        assert len(full.missing) <= READ_AHEAD
        assert len(plan.protected) <= slots
        while table.free < len(full.missing):
            table.remove(max(set(table.slot_of) - plan.protected))
        begun.append([(expert, table.take()) for expert in full.missing])
        assert len(begun) <= 2 + early
        read.extend(full.missing)

    def finish():
        for expert, slot in begun.pop(0):
            table.put(expert, slot)

    def compute(full):
        assert all(e in table for e in full.experts)
        # The disk has something to do meanwhile, wherever there is something and room for it.
        assert begun or max(needed) <= full.experts[-1] or slots <= 2
        seen.extend(needed.intersection(full.experts))
        seen.sort()
        assert seen == sorted(needed)[: len(seen)]

    def begin_following():
        assert plan.all_begun
        following.append(len(seen))

    waves = ()
    if early:
        plan = WaveSchedule(table, range(100))
        begin_early(plan, begin)
        waves = plan.begun
        assert 1 <= len(waves) <= 3
        assert [e for wave in waves for e in wave.experts] == list(range(waves[-1].experts[-1] + 1))
    plan = WaveSchedule(table, sorted(needed), begun=waves)
    kept = set(plan.protected).intersection(table.slot_of)
    assert early or plan.room() >= min(slots, 2 * READ_AHEAD)
    run_waves(plan, begin, finish, compute, begin_following)
    assert not begun
    assert not plan.protected
    assert len(following) == 1
    assert following[0] < len(needed) or early
    assert seen == sorted(needed)
    assert len(read) == len(set(read))
    assert not kept & set(read)

"""Plans for several machines. Oracle: the arithmetic by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError, MemoryBudgetError
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.measure.plan import SYSTEM_BYTES, Sizes, plan_model
from mlx_moeflux.measure.plan_machines import Link, mean_of_most, plan_machines

# 10 layers of 100 experts of 10 MB, 4 a token: 10 GB.
SIZES = Sizes(
    model_type="qwen3_moe",
    num_experts=100,
    experts_per_token=4,
    blocks=dict.fromkeys(range(10), 10**7),
    trunk_bytes=10**9,
    embedding_bytes=2 * 10**8,
    state_bytes=10**8,
    context=8192,
    hidden_size=1000,
)
LINK = Link(1e9, latency=1e-3)


def memory(expert_bytes: float) -> int:
    return int((expert_bytes + 1.1e9) / 0.6) + 10


def test_a_token_by_hand():
    plan = plan_machines(
        "m",
        SIZES,
        memories=[memory(1.25e9), memory(3.75e9)],
        link=LINK,
        expert_memory="50%",
        ssd_gbps=2.0,
        memory_gbps=100.0,
    )
    assert [one.experts for one in plan.machines] == [25, 75]
    assert [one.slots for one in plan.machines] == [12, 37]
    assert plan.fits
    trunk = 10 * 0.13e-3 + 0.8e9 / 60e9
    # A sum a layer, and the token's.
    exchange = 10 * 2 * (1e-3 + 4 * 4 * 1000 / 2 / 1e9) + 2 * (1e-3 + 4 / 2 / 1e9)
    held = [12 / 25, 37 / 75]
    # Of the first machine macOS takes all but the bank, of the second it leaves some page cache.
    left = memory(3.75e9) - SYSTEM_BYTES - 1.1e9 - 3.75e9
    assert memory(1.25e9) < SYSTEM_BYTES
    kept = [held[0], held[1] + max(0, left) / 7.5e9]
    costs = tuple(
        1e7 * ((1 - k**0.3) / 2e9 + (1 - h**0.3) / 20e9 + 1 / 60e9)
        for h, k in zip(held, kept, strict=True)
    )
    work = 10 * mean_of_most((25, 75), 4, costs)
    seconds = trunk + exchange + work + 10 * 0.25e-3
    assert plan.slow == pytest.approx(1 / (1.2 * seconds))
    assert plan.fast == pytest.approx(1.2 / seconds)
    text = str(plan)
    assert "rank 0   3.65 GiB: 25 experts a layer, 12 slots (48 %)" in text
    assert "exchange 22.2 ms: 10 x 16 kB at 1 GB/s and 1 ms a message" in text


def test_the_busiest_of_two_machines():
    """4 of 6 experts, 3 on each machine: all choices have equal chances."""
    choices = list(itertools.combinations(range(6), 4))
    most = [max(sum(e < 3 for e in chosen), sum(e >= 3 for e in chosen)) for chosen in choices]
    expected = sum(most) / len(most)
    assert mean_of_most((3, 3), 4, (1.0, 1.0)) == pytest.approx(expected, rel=0.01)
    assert mean_of_most((6,), 4, (2.0,)) == 8.0
    assert mean_of_most((3, 3), 4, (1.0, 0.0)) == pytest.approx(2.0, rel=0.02)


def test_one_machine_exchanges_nothing():
    plan = plan_machines("m", SIZES, memories=[memory(5e9)], link=LINK, expert_memory="50%")
    assert plan.machines[0].slots == 50
    assert "exchange 0.0 ms" in plan.arithmetic[0]


def test_experts_that_all_fit_take_no_turn_of_the_host():
    options = {"ssd_gbps": 2.0, "memory_gbps": 100.0}
    plan = plan_machines("m", SIZES, memories=[memory(6e9)] * 2, link=LINK, **options)
    assert [one.share for one in plan.machines] == [1.0, 1.0]
    compute = 0.8e9 / 60e9 + 10 * mean_of_most((50, 50), 4, (1e7 / 60e9,) * 2)
    exchange = 10 * LINK.seconds(4 * 4 * 1000, 2) + LINK.seconds(4, 2)
    seconds = 10 * 0.13e-3 + compute + exchange
    assert plan.slow == pytest.approx(1 / (1.2 * seconds))
    assert plan.fast == pytest.approx(1.2 / seconds)


def test_slots_are_those_that_loading_plans():
    for memories in (["8GB"], ["16GB"], ["32GB"], ["8GB", "8GB"]):
        plan = plan_machines("m", SIZES, memories=memories, link=LINK)
        for one, amount in zip(plan.machines, memories, strict=True):
            own = replace(SIZES, num_experts=one.experts)
            alone = plan_model("m", own, memory=amount)
            assert (one.slots, one.fits) == (alone.slots, alone.fits)
            assert (one.share == 1) == alone.resident
        if len(memories) == 1:
            assert (plan.slow, plan.fast) == pytest.approx((alone.slow, alone.fast))
    with pytest.raises(MemoryBudgetError, match="do not hold one token's 4 experts"):
        plan_machines("m", SIZES, memories=[memory(5e9)] * 2, link=LINK, expert_memory="1MB")


def test_one_machine_may_be_better():
    quick, slow = Link(1e10, latency=1e-5), Link(1e7, latency=1e-2)
    for link, better in ((quick, False), (slow, True)):
        plan = plan_machines("m", SIZES, memories=[memory(3e9), memory(2e9)], link=link)
        one = plan_machines("m", SIZES, memories=[memory(3e9)], link=link)
        assert plan.alone == (one.slow, one.fast)
        assert (": one machine is better" in str(plan)) == better == (one.fast > plan.fast)
        assert one.alone is None
        assert "alone" not in str(one)
    small = int(1.2e9 / 0.6)  # no machine holds the trunk and a token's experts
    assert plan_machines("m", SIZES, memories=[small] * 4, link=quick).alone is None


def test_more_machines_read_less():
    plans = [
        plan_machines("m", SIZES, memories=[memory(2e9)] * n, link=Link(1e10, latency=1e-5))
        for n in (1, 2, 4)
    ]
    assert plans[0].slow < plans[1].slow < plans[2].slow
    # Half of what 2 GB leave beside 1 GB of spare, for 2.5 GB of experts.
    assert plans[2].machines[0].share == pytest.approx(0.2, abs=0.01)


def test_a_machine_that_holds_no_token():
    plan = plan_machines("m", SIZES, memories=[memory(2e9), 2 * 10**9], link=LINK)
    assert not plan.fits
    assert "does not fit" in str(plan)


def test_the_command_line(capsys):
    path = str(BUNDLED_MODEL)
    arguments = ["plan", path, "--machines", "16GB,32GB", "--link", "2.5GB/s", "--json"]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["experts"] for one in data["machines"]] == [11, 21]
    assert data["fits"]
    for wrong in (
        ["--machines", "16GB"],
        ["--link", "1GB/s"],
        ["--machines", "16GB", "--link", "auto"],
        ["--machines", "16GB,auto", "--link", "1GB/s"],
        ["--machines", "16GB", "--link", "1GB/s", "--memory", "8GB"],
        ["--machines", "16GB", "--link", "quick"],
    ):
        assert main(["plan", path, *wrong]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(InputError, match="ssd_gbps"):
        plan_machines("m", SIZES, memories=[10**10], link=LINK, ssd_gbps=0)
    with pytest.raises(InputError, match="link"):
        plan_machines("m", SIZES, memories=[10**10], link=Link(1e9, latency=-1.0))


def test_a_link_sends_a_part_to_each_neighbour():
    link = Link(1e6, latency=0.5)
    assert link.seconds(1e6, 1) == 0
    assert link.seconds(1e6, 2) == 2 * (0.5 + 0.5)
    assert link.seconds(1e6, 4) == pytest.approx(6 * (0.5 + 0.25))


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_measured_link_takes_what_was_measured(ranks):
    link = Link.measured(ranks, 0.01, nbytes=1e8, large=0.35)
    assert link.seconds(0, ranks) == pytest.approx(0.01)
    assert link.seconds(1e8, ranks) == pytest.approx(0.35)

"""Oracle: made-up costs, of which the better budget and the loss of a trial are known."""

import numpy as np
import pytest

from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.policies.timed_budget import LEAST_STEPS, MOST_TURNS, TimedBudget, Verdict
from tests.experts.policies.made_up_costs import LARGER, SMALLER, budget_trial, drive

SETTLE = TimedBudget.settle
# Steps to the end of the first stretch, and of one after a turn.
FIRST = TimedBudget.warm_up + TimedBudget.stretch
LATER = SETTLE + TimedBudget.stretch


def test_a_gain_is_found_in_three_turns_and_kept():
    timed, kept = budget_trial()
    ways = drive(timed, 2000, 0.75)
    assert timed.turns == 3
    expected = np.zeros(2000, bool)
    expected[FIRST : FIRST + LATER] = expected[FIRST + 2 * LATER :] = True
    assert (ways == expected).all()
    assert kept == [Verdict(True, Cost(1.0, 0.5), Cost(0.75, 0.375))]
    assert timed.over


@pytest.mark.parametrize("smaller", [1.0, 0.97, 1.005])
def test_what_gains_too_little_is_left_after_two_turns(smaller):
    timed, kept = budget_trial()
    ways = drive(timed, 2000, smaller)
    assert timed.turns == 2
    assert ways.sum() == LATER
    assert [verdict.smaller for verdict in kept] == [False]
    assert timed.wanted is LARGER


@pytest.mark.parametrize("disturbed", [False, True])
def test_a_slower_second_stretch_of_the_larger_budget_is_no_gain(disturbed):
    """Between 1 and 1.07 s with the larger budget, 1 s with the smaller is no gain of 5 %."""
    timed, kept = budget_trial()
    if disturbed:
        drive(timed, FIRST + SETTLE + 5, 1.0)
        timed.disturb()
        drive(timed, 2 * LATER, 1.0)
    else:
        drive(timed, FIRST + LATER, 1.0)
    drive(timed, LATER, 1.0, first=1.07)
    assert timed.over
    assert [verdict.smaller for verdict in kept] == [False]


@pytest.mark.parametrize(("again", "smaller", "turns"), [(0.96, True, 3), (1.15, False, 4)])
def test_the_second_stretch_of_the_smaller_budget_decides(again, smaller, turns):
    """With the first it takes 0.88 or 0.975 of the time of the larger one."""
    timed, kept = budget_trial()
    drive(timed, FIRST + 2 * LATER, 0.8)
    assert timed.trying
    drive(timed, 500, again)
    assert [verdict.smaller for verdict in kept] == [smaller]
    assert timed.turns == turns


@pytest.mark.parametrize("sd", [0.1, 0.3])
def test_noise_hides_no_large_difference(sd):
    found = {}
    for cost in (0.7, 1.3):
        trials = [budget_trial()[0] for _ in range(40)]
        for seed, timed in enumerate(trials):
            drive(timed, 500, cost, sd=sd, seed=seed)
        assert all(timed.over and timed.turns <= MOST_TURNS for timed in trials)
        found[cost] = np.mean([timed.wanted is SMALLER for timed in trials])
    assert found[0.7] > 0.85
    assert found[1.3] == 0


def test_a_disturbance_ends_a_stretch_of_the_smaller_budget():
    timed, kept = budget_trial()
    drive(timed, FIRST + SETTLE + 5, 0.8)
    assert timed.trying
    timed.disturb()
    assert timed.wanted is LARGER
    assert not drive(timed, LATER, 0.8).any()
    assert drive(timed, LATER, 0.8).all()
    # Two turns are left, of three that a gain takes.
    assert not drive(timed, 1000, 0.8).any()
    assert timed.turns == MOST_TURNS
    assert not kept
    assert timed.report() == "4 GB: replies are too short to compare it with 2 GB"


def test_a_loss_is_found_after_a_disturbance():
    timed, kept = budget_trial()
    drive(timed, FIRST + SETTLE + 5, 1.02)
    timed.disturb()
    drive(timed, 500, 1.02)
    assert timed.turns == MOST_TURNS
    assert [verdict.smaller for verdict in kept] == [False]


def test_losses_before_a_disturbance_count():
    timed, _ = budget_trial()
    drive(timed, FIRST + SETTLE + LEAST_STEPS - 1, 1.6)
    assert timed.trying
    timed.disturb()
    drive(timed, LATER + SETTLE, 1.6)
    assert timed.trying
    drive(timed, 1, 1.6)
    assert timed.over


def test_a_disturbance_of_the_larger_budget_takes_no_turn():
    timed, kept = budget_trial()
    for steps in (FIRST - 1, LATER - 1, SETTLE):
        drive(timed, steps, 0.8)
        timed.disturb()
    assert timed.turns == 0
    drive(timed, 2 * LATER, 0.8)
    drive(timed, LATER - 1, 0.8)
    timed.disturb()
    assert not drive(timed, LATER, 0.8).any()
    assert drive(timed, 1000, 0.8).all()
    assert timed.turns == 3
    assert [verdict.smaller for verdict in kept] == [True]


def test_short_replies_try_nothing():
    timed, _ = budget_trial()
    for _ in range(100):
        assert not drive(timed, LATER - 1, 0.5).any()
        timed.disturb()


@pytest.mark.parametrize("smaller", [True, False])
def test_an_earlier_verdict_is_kept(smaller):
    timed, kept = budget_trial(verdict=Verdict(smaller, Cost(0.01, 0.005), Cost(0.008, 0.002)))
    ways = drive(timed, 500, 0.5 if not smaller else 2.0)
    timed.disturb()
    assert (ways == smaller).all()
    assert timed.turns == 0
    assert not kept
    assert timed.report() == (
        "2 GB: 8.00 ms (2.00 waiting) a step with it, 10.00 ms (5.00 waiting) with 4 GB, measured "
        "earlier"
        if smaller
        else "4 GB: 10.00 ms (5.00 waiting) a step with it, 8.00 ms (2.00 waiting) with 2 GB, "
        "measured earlier"
    )


def test_the_report_follows_the_trial():
    timed, _ = budget_trial()
    assert timed.report() == "4 GB, not yet compared with 2 GB"
    drive(timed, FIRST, 0.008, first=0.01)
    assert timed.report() == "2 GB, being compared with 4 GB"
    drive(timed, LATER, 0.008, first=0.01)
    assert timed.report() == "4 GB, being compared with 2 GB"
    drive(timed, 2 * LATER, 0.008, first=0.01)
    assert timed.report() == (
        "2 GB: 8.00 ms (4.00 waiting) a step with it, 10.00 ms (5.00 waiting) with 4 GB"
    )

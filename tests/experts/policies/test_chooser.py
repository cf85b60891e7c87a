"""What the deciders between two ways have in common. Oracle: made-up costs, of which the better way
and the loss of a trial are known."""

import numpy as np
import pytest

from mlx_moeflux.experts.policies.chooser import MOST_LOSS, Cost, middle
from mlx_moeflux.experts.policies.timed_budget import LEAST_STEPS, TimedBudget
from mlx_moeflux.experts.policies.timed_switch import TimedSwitch
from tests.experts.policies.made_up_costs import LARGER, budget_trial, drive, second

NAN = float("nan")


def test_a_mean_of_the_middle_half():
    assert middle([100, 1, 3, 2]) == 2.5
    assert middle([7]) == 7
    assert middle([1, 2, 1000]) == pytest.approx(1003 / 3)
    assert middle([-1000, 1, 2, 3, 4, 1000]) == 2.5


@pytest.fixture(params=[TimedSwitch, TimedBudget])
def make(request):
    """A function that makes a decider and a list of its verdicts, of which a switch gives none."""
    return budget_trial if request.param is TimedBudget else lambda: (TimedSwitch(), [])


def choices(decider, kept):
    """The verdicts on the second way, or what a switch chose."""
    if isinstance(decider, TimedBudget):
        return [verdict.smaller for verdict in kept]
    return [decider.chosen]


@pytest.mark.parametrize("loss", [0.03, 0.2, 1.0, 5.0, 100.0])
def test_a_loss_costs_what_the_formula_says(make, loss):
    decider, kept = make()
    ways, steps = drive(decider, 5000, 1 + loss), np.arange(1, 5001)
    assert ways.any()
    if isinstance(decider, TimedBudget):
        # All steps of the smaller budget but those that do not count after the turn.
        lost, most = loss * (ways.cumsum() - decider.settle), LEAST_STEPS * loss
        assert decider.turns == 2
        assert decider.wanted is LARGER
    else:
        lost, most = loss * ways.cumsum(), (decider.stretch + decider.settle) * loss
    assert (lost <= MOST_LOSS * steps + most + 1e-9).all()
    assert choices(decider, kept) == [False]


@pytest.mark.parametrize("seconds", [1e6, 0.0, NAN])
def test_a_pause_in_each_stretch_changes_nothing(make, seconds):
    decider, kept = make()
    for i in range(3000):
        usual = 0.8 if second(decider) else 1.0
        decider.step(4, Cost(seconds if i % 9 == 0 else usual, 0.5))
    assert choices(decider, kept) == [True]


@pytest.mark.parametrize("steps", [1000, 400])
def test_a_drift_is_no_gain(make, steps):
    """Steps get faster by a third: a later stretch is faster, whichever way it runs."""
    decider, kept = make()
    for i in range(steps):
        decider.step(4, Cost(1.5 - i / (2 * steps), 0.5))
    assert choices(decider, kept) == [False]


def test_nothing_is_tried_where_nothing_is_waited_for(make):
    decider, kept = make()
    assert not drive(decider, 500, 0.5, stalled=0.01).any()
    assert not kept  # another text may wait
    if isinstance(decider, TimedBudget):
        assert decider.report() == "4 GB: reads are hardly waited for"
        assert decider.turns == 0
    else:
        assert decider.report() == "off after 500 steps: reads are hardly waited for"
        drive(decider, 500, 0.5)
        assert decider.chosen

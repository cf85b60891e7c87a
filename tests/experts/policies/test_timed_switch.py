"""Oracle: made-up costs, of which the better way and the loss of a trial are known."""

import numpy as np
import pytest

from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.policies.timed_switch import LEAST_TRIALS, DecodeSteps, TimedSwitch
from tests.experts.policies.made_up_costs import drive

STRETCH, SETTLE, WARM_UP = TimedSwitch.stretch, TimedSwitch.settle, TimedSwitch.warm_up
REST = TimedSwitch.rest


def test_a_gain_is_found_after_three_trials_and_kept():
    switch = TimedSwitch()
    ways = drive(switch, 2000, 0.8)
    assert switch.chosen
    # Each trial and the stretch after it; before the first one a stretch.
    first = WARM_UP + STRETCH + LEAST_TRIALS * 2 * (SETTLE + STRETCH)
    assert not ways[: WARM_UP + STRETCH].any()
    assert ways[first:].mean() > 0.98
    # Off again only for a trial in REST steps.
    assert (~ways[first:]).sum() == 3 * (SETTLE + STRETCH)


def test_trials_of_no_difference_end():
    ways = drive(TimedSwitch(), 5000, 1.0)
    assert ways[2000:].mean() < 0.05


@pytest.mark.parametrize("sd", [0.1, 0.3])
def test_noise_hides_no_large_difference(sd):
    def taken(seconds):
        ways = (drive(TimedSwitch(), 3000, seconds, sd=sd, seed=seed) for seed in range(20))
        return [np.where(on, seconds, 1.0).mean() for on in ways]

    gains, losses = taken(0.8), taken(1.25)
    assert np.mean(gains) < 0.8 * 1.03
    assert np.mean(losses) < 1.02
    assert max(losses) < 1.06


def test_what_no_longer_gains_is_left():
    switch = TimedSwitch()
    drive(switch, 800, 0.7)
    assert switch.chosen
    ways = drive(switch, 2 * REST, 1.3)
    assert not switch.chosen
    assert ways[REST:].mean() < 0.1


def test_a_disturbance_ends_a_trial_and_is_paid_for():
    switch = TimedSwitch()
    drive(switch, WARM_UP + STRETCH, 2.0)
    assert switch.on
    switch.disturb()
    assert not switch.on
    assert not switch.chosen
    ways = drive(switch, 50, 2.0)
    assert not ways.any()  # a step was lost, and one in a hundred may be
    assert drive(switch, 100, 2.0).any()
    assert len(switch.trials) == 1


def test_another_number_of_tokens_is_a_disturbance():
    switch = TimedSwitch()
    for i in range(3000):
        # Twice the tokens always take longer; the switch changes nothing.
        pairs = 4 if i // 5 % 2 else 8
        switch.step(pairs, Cost(pairs, pairs / 2))
    assert not switch.trials
    assert not switch.chosen


def test_a_reset_forgets_everything():
    switch = TimedSwitch()
    drive(switch, 500, 0.5)
    assert switch.on
    switch.reset()
    assert vars(switch) == vars(TimedSwitch())
    assert not drive(switch, WARM_UP, 0.5).any()


def test_the_report_has_both_ways():
    switch = TimedSwitch()
    assert switch.report() == "off after 0 steps: not tried yet"
    for _ in range(100):
        switch.step(4, Cost(*((0.008, 0.003) if switch.on else (0.010, 0.006))))
    assert switch.report() == (
        "on after 100 steps: 8.00 ms (3.00 waiting) with it, 10.00 ms (6.00 waiting) without; "
        "-20.0 % in 3 trials"
    )


class Noted(TimedSwitch):
    """Notes what it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def step(self, pairs, cost):
        self.told.append((pairs, cost))

    def disturb(self):
        self.told.append("disturbed")


@pytest.fixture
def noted():
    now, switch = [0.0], Noted()
    steps = DecodeSteps(switch, lambda: Cost(now[0], now[0] / 4), most_pairs=8)

    def call(layer, pairs, seconds=1.0):
        steps.begin(pairs, first=layer == 3)
        now[0] += seconds
        if layer == 9:
            steps.end()

    return steps, switch.told, call, now


def test_a_step_goes_from_its_first_layer_to_its_last(noted):
    _, told, call, now = noted
    for layer in (3, 5, 9):
        call(layer, 4)
    now[0] += 100  # what happens between two steps does not count
    call(3, 8, 2.0)
    call(9, 8, 2.0)
    assert told == [(4, Cost(3.0, 0.75)), (8, Cost(4.0, 1.0))]


def test_what_is_no_decode_step_disturbs(noted):
    steps, told, call, _ = noted
    call(3, 9)
    call(9, 9)  # a prompt
    assert told == ["disturbed"] * 2
    call(3, 4)
    call(9, 5)  # another step came between
    assert told == ["disturbed"] * 3
    call(3, 4)  # it failed, and is repeated
    call(3, 4)
    call(9, 4)
    assert told[3:] == [(4, Cost(2.0, 0.5))]
    call(3, 4)
    steps.disturb()
    call(9, 4)
    assert told[4:] == ["disturbed"]


def test_statistics_that_were_reset_give_no_negative_waiting():
    times = iter([Cost(1.0, 5.0), Cost(2.0, 0.5)])
    switch = Noted()
    steps = DecodeSteps(switch, lambda: next(times), most_pairs=8)
    steps.begin(1, first=True)
    steps.end()
    assert switch.told == [(1, Cost(1.0, 0.0))]

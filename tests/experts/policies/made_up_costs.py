"""Deciders between two ways, and steps of made-up costs for them."""

import numpy as np

from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.policies.timed_budget import Budget, TimedBudget

LARGER, SMALLER = Budget({3: 40, 5: 41}, 4_000_000_000), Budget({3: 20, 5: 20}, 2_000_000_000)
PAIRS = 4


def budget_trial(**options):
    """A trial of a smaller budget, and a list of the verdicts that it keeps."""
    kept = []
    return TimedBudget(LARGER, SMALLER, pairs=PAIRS, keep=kept.append, **options), kept


def second(decider):
    """True if the next step takes the second way: the switch on, the smaller budget."""
    return decider.wanted is SMALLER if isinstance(decider, TimedBudget) else decider.on


def drive(decider, steps, seconds, *, first=1.0, stalled=0.5, sd=0.0, seed=0):
    """Run `steps`, which take `first` or, in the second way, `seconds` and vary by `sd`;
    return for each whether it took the second way."""
    random, ways = np.random.default_rng(seed), []
    for _ in range(steps):
        ways.append(second(decider))
        noisy = (seconds if ways[-1] else first) * random.lognormal(sigma=sd)
        decider.step(PAIRS, Cost(noisy, stalled * noisy))
    return np.array(ways)

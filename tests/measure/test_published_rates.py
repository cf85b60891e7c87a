"""Estimates of ``plan`` against rates that others published of named Macs."""

from __future__ import annotations

from math import exp

import pytest

from mlx_moeflux.checkpoint.catalogue import catalogue
from mlx_moeflux.measure import plan
from mlx_moeflux.measure.rates import CHIPS
from tools.published_rates import FITTED, USES, Rate, read_rates, typical, within

RATES = read_rates()


def some(use: str, *, known: bool) -> list[Rate]:
    return [rate for rate in RATES if (rate.use, rate.known) == (use, known)]


def test_rates_are_facts_of_macs():
    assert len({(r.model, r.mac, r.memory_gb, r.slots, r.source) for r in RATES}) == len(RATES)
    for rate in RATES:
        assert rate.model in catalogue()
        assert rate.low <= rate.high
        assert rate.source
        assert rate.use in USES
        chip = next(c for c in sorted(CHIPS, key=len)[::-1] if f"Apple {rate.mac}".startswith(c))
        assert rate.memory_gbps in {gbps for _, gbps in CHIPS[chip]}


def test_estimates_hold_where_nothing_is_assumed():
    """Four of five within 1.3, and none beyond 2."""
    rates = some("fitted", known=True)
    assert within(rates, 1.3) >= 0.8
    assert within(rates, 2) == 1


def test_estimates_hold_where_the_disk_is_assumed():
    assert within(some("fitted", known=False), 1.5) >= 0.6


def test_estimates_hold_for_macs_that_were_not_fitted():
    resident = [rate for rate in RATES if rate.use != "fitted" and rate.slots == "all"]
    assert within(resident, 1.3) >= 0.8
    assert within(some("later", known=True), 1.3) == 1
    assert within(resident, 2) == 1
    assert within(some("seen", known=False), 1.5) >= 0.6
    # One that reads past the page cache makes half of what its hits, disk and bandwidth allow.
    assert within(RATES, 2.2) == 1


def test_the_middle_is_not_off_to_one_side():
    mean = sum(rate.error() for rate in RATES) / len(RATES)
    assert 1 / 1.1 < exp(mean) < 1.1


@pytest.mark.parametrize("factor", [1 / 4, 4])
@pytest.mark.parametrize("name", [*FITTED, "SYNC_SECONDS", "SYSTEM_BYTES"])
def test_each_constant_is_needed(name, factor, monkeypatch):
    least = typical([rate.error() for rate in RATES])
    monkeypatch.setattr(plan, name, factor * vars(plan)[name])
    assert typical([rate.error() for rate in RATES]) > 1.01 * least

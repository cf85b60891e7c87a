"""Stand-ins for the implementations of an operation, whose first use is watched."""

from __future__ import annotations

import dataclasses
import inspect

import mlx.core as mx

from mlx_moeflux.kernels.registry import OPERATIONS
from mlx_moeflux.kernels.verify import trials, verdicts
from tests.kernels.implementations import IMPLEMENTATIONS

LOGITS = mx.array([[1.0, 3.0, 2.0, 0.0] * 4] * 3)


def reference(operation):
    return OPERATIONS[operation].reference


def stand_in(monkeypatch, name, function):
    implementations = IMPLEMENTATIONS["softmax_top_k"]
    function.__signature__ = inspect.signature(reference("softmax_top_k"))
    monkeypatch.setitem(
        implementations, name, dataclasses.replace(implementations[name], function=function)
    )


def another_process(monkeypatch):
    monkeypatch.setattr(verdicts, "_known", verdicts._Known())
    monkeypatch.setattr(trials, "_warned", set())

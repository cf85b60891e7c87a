"""Tries the implementations of operations, each on a small call, for ``mlx_moeflux check``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from mlx_moeflux.kernels.operation import REFERENCE, Function, Operation
from mlx_moeflux.kernels.registry import OPERATIONS
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.verify import comparison
from mlx_moeflux.kernels.verify.verdicts import Verdict


class Checked(NamedTuple):
    """An implementation, and the verdict on it; None: MLX drives no GPU, and it did not run."""

    operation: str
    implementation: str
    verdict: Verdict | None


def check(dtype: mx.Dtype, operations: Iterable[str]) -> Iterator[Checked]:
    """Try everything that a GPU computes: references, which stand for stock MLX, and what launches
    kernels. A reference on the GPU is compared with the same reference on the CPU."""
    for operation in operations:
        record = OPERATIONS[operation]
        for name, implementation in record.implementations.items():
            if not (implementation.kernels or name == REFERENCE):
                continue
            verdict = None
            if not isinstance(launcher.backend(), launcher.NoBackend):
                verdict = _on_every_form(record, implementation.function, dtype)
            yield Checked(operation, name, verdict)


def _on_every_form(record: Operation, function: Function, dtype: mx.Dtype) -> Verdict:
    """Return the first verdict that refuses, which names the form, or that of the largest error."""
    worst = comparison.on_example(record, function, dtype)
    for form in record.proof.forms:
        if not worst.ok:
            break
        verdict = comparison.on_example(record, function, dtype, form)
        if not verdict.ok:
            worst = replace(verdict, reason=f"{form}: {verdict.reason}")
        elif (verdict.error or 0) > (worst.error or 0):
            worst = verdict
    return worst

"""The record of an operation: all that is known of it, declared once, beside its formula.

:mod:`~mlx_moeflux.kernels.registry` collects the records and calls implementations by them.
Trials, checks and measurements read the :class:`~mlx_moeflux.kernels.proof.Proof` of a record. An
incomplete or contradictory record is an error at import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

REFERENCE = "reference"

Function = Callable[..., Any]


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation, called like its reference.

    kernels: What it launches; with any it needs a GPU.
    on_cpu: It computes while MLX's default device is the CPU alone.
    takes: Whether it computes a call, by the call's arguments, asked where a call is made in parts;
        None: it refuses when it is called.
    pair_bytes: Bank and dtype of x -> bytes of scratch for each pair of a token and an expert;
        None: as many as the reference.
    adds: Adds the terms of some pairs to an array of the host, for a call that is made in parts;
        None: it cannot.
    exchanges: Bank -> whether it takes `exchange` with it; None: it never does.
    mixes_rows: Whether the bits of a row depend on the rows beside it, and on the slots of a bank.
        Nothing takes it but a switch or its name.
    joins: Whether each of up to four rows of a call has the bits of a call by itself, or, by the
        call's arguments, whether it has; see :mod:`~mlx_moeflux.kernels.rows`.
    """

    function: Function
    kernels: tuple[MetalKernel, ...] = ()
    on_cpu: bool = False
    takes: Callable[..., bool] | None = None
    pair_bytes: Callable[..., int] | None = None
    adds: Callable[..., None] | None = None
    exchanges: Callable[..., bool] | None = None
    mixes_rows: bool = False
    joins: bool | Callable[..., bool] = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def implementation(self, *args: Any, **kwargs: Any) -> Implementation:
        """Return itself: it may stand where one is chosen for a call."""
        return self

    def takes_call(self, *args: Any, **kwargs: Any) -> bool:
        """Return False if it says beforehand that it refuses a call with these arguments."""
        return self.takes is None or self.takes(*args, **kwargs)

    def joins_rows(self, *args: Any, **kwargs: Any) -> bool:
        """Return True if each row of a call with these arguments has the bits of one by itself."""
        return self.joins(*args, **kwargs) if callable(self.joins) else self.joins


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What an operation computes, how a call of it is dispatched, and its proof.

    name: As in ``kernels.NAME(...)`` and ``load(kernels={NAME: ...})``.
    reference: Plain MLX, which defines the meaning, for every back end; gradients flow through it.
    others: Name -> implementation, all but the reference.
    proof: How it is tested and timed.
    size: The axes of a call's first argument whose product a row of dispatch.json counts: tokens of
        a sequence, or rows. None: every call counts 1.
    kind: Arguments -> what names calls of the kind, which may have rows of their own, as in
        "sdpa 64". None: there are no kinds.
    tokens: Arguments with tokens, and on which axis. A trial cuts a prompt there, to its first
        tokens, on which nothing later has influence.
    rows: Arguments that have a row for each row of one sequence, on their first axis, where a model
        calls it for several of them. (): those of `tokens`.
    replaces: Operations whose work an implementation does, which the reference takes as `steps`.
        Where one of them is chosen by name, this operation is composed of them. One that another of
        them replaces is in the list too.
    composed: True if the reference consists of nothing but those, which have trials of their own.
    reference_joins: Whether the reference `joins`, as an implementation does.
    equal_rows: False if stock MLX on a GPU promises no row of the reference the same bits in
        another bank and beside other rows.
    implementations: The reference and `others`, by name.
    """

    name: str
    reference: Function
    others: Mapping[str, Implementation]
    proof: Proof
    size: slice | None
    kind: Callable[..., str] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    composed: bool = False
    reference_joins: bool | Callable[..., bool] = False
    equal_rows: bool = True
    implementations: dict[str, Implementation] = field(init=False)

    def __post_init__(self) -> None:
        reference = Implementation(self.reference, joins=self.reference_joins)
        object.__setattr__(self, "implementations", {REFERENCE: reference, **self.others})
        object.__setattr__(self, "rows", self.rows or tuple(self.tokens))
        known, proof = set(inspect.signature(self.reference).parameters), self.proof
        faults = [
            *(
                f"'{name}' is no argument"
                for name in {*self.tokens, *self.rows, *proof.positions, *proof.shrunk} - known
            ),
            *["it has steps and replaces nothing"] * ("steps" in known and not self.replaces),
            *["its reference takes no steps"] * ("steps" not in known and bool(self.replaces)),
            *["it replaces nothing and is composed"] * (self.composed and not self.replaces),
            *["it has no workload"] * (not proof.workloads),
            *["its rows have no axis"] * (proof.by_rows and not self.tokens),
            *["its tokens have no positions"] * (proof.apart and not proof.positions),
            *["its kinds have no names"] * (self.kind is None and set(proof.workloads) != {""}),
            *["another implementation is called 'reference'"] * (REFERENCE in self.others),
            *["stock MLX is timed and may not be taken"]
            * (proof.timed is not None and (bool(self.replaces) or not self.equal_rows)),
        ]
        for name, other in self.others.items():
            given = inspect.signature(other.function).parameters
            missing = known - {"steps"} - set(given)
            faults += [f"'{name}' takes no '{argument}'" for argument in sorted(missing)]
        if faults:
            raise TypeError(f"the record of '{self.name}' is wrong: {'; '.join(faults)}")


def row_name(operation: str, kind: str) -> str:
    """Return the name of a kind of call in dispatch.json."""
    return f"{operation} {kind}" if kind else operation

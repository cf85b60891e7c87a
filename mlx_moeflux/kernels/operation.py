"""The record of an operation: all that is known of it, declared once, beside its formula.

:mod:`~mlx_moeflux.kernels.registry` collects the records and calls implementations by them,
:mod:`~mlx_moeflux.kernels.dispatch` counts sizes by them, and trials, checks and measurements take
their calls from them. An incomplete record is an error at import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.examples import TINY, Arguments, Normal, Sizes, T, normal
from mlx_moeflux.kernels.runtime.launcher import MetalKernel

REFERENCE = "reference"

Function = Callable[..., Any]
# Sizes of a model, tokens of the call, random arrays -> the call's arguments.
Builder = Callable[[Sizes, int, Normal], Arguments]


# Rows of one call that a fused step, or an implementation that joins rows of one sequence, computes
# with the bits of single rows.
STEP_ROWS = 4


def is_prompt(rows: mx.array, *others: Any, **options: Any) -> bool:
    """Return True for a call of more rows than steps have, which stock MLX may compute as well."""
    return rows.shape[0] > STEP_ROWS


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
    """An operation.

    reference: Plain MLX, which defines the meaning, for every back end; gradients flow through it.
    others: Name -> implementation, all but the reference.
    size: The axes of a call's first argument whose product a row of dispatch.json counts: tokens of
        a sequence, or rows. None: every call counts 1.
    kind: Arguments -> what names calls of the kind, which may have rows of their own, as in
        "sdpa 64"; None: there are no kinds.
    tokens: Arguments with tokens, and on which axis. A trial cuts a prompt there, to its first
        tokens, on which nothing later has influence.
    by_rows: True if rows have nothing to do with each other. Rows are then the second to last axis
        of every argument with tokens, and of every result, and a trial computes the truth of some.
    keeps_axes: True if the axes in front of the rows are those of the result, however many.
    positions: Of attention over a cache: arguments with a row for each position, and on which axis;
        `length`, `start`, `mask` and `tail` are then arguments as of ``sdpa``. A trial takes the
        first positions.
    apart: True if besides no token has influence on another: a trial computes the truth of some.
    shrunk: Arguments that a trial makes small: inputs of norms, so that an epsilon shows, and what
        products are added to.
    chooses: True if results are choices, of which two may be as good as equal.
    replaces: Operations whose work an implementation does, which the reference takes as `steps`.
        Where one of them is chosen by name, this operation is composed of them. One that another of
        them replaces is in the list too.
    composed: True if the reference consists of nothing but those, which have trials of their own.
    rows: Arguments that have a row for each row of one sequence, on their first axis, where a model
        calls it for several of them; (): those of `tokens`.
    reference_joins: Whether the reference `joins`, as an implementation does.
    equal_rows: False if stock MLX on a GPU promises no row of the reference the same bits in
        another bank and beside other rows.
    timed: Whether a trial times stock MLX beside an implementation, by the call's arguments, and
        may take it: the bits of stock depend on no neighbour, it allocates little, and nothing else
        computes such calls with the bits of the implementation, as a fused operation or one for
        rows of a sequence does. None: never.
    floor: How many times the usual error of a trial an implementation may have where the reference
        is exact: more than 1 if it rounds where the reference computes in float32.
    example: A small call with every option; example_tokens: Tokens of it.
    forms: Name -> a small call whose arguments are stored in another form, which a check tries too.
    workloads: Kind -> a call as models make it, "" where no kind has its own.
    cases: A small call -> that call, and others like it that a given callable must take, with its
        name; None: only the call.
    unread: Arguments and result of a small call -> the result with 0 where nobody reads it.
    """

    name: str
    reference: Function
    others: Mapping[str, Implementation]
    size: slice | None
    example: Builder
    workloads: Mapping[str, Builder]
    kind: Callable[..., str] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    by_rows: bool = False
    keeps_axes: bool = False
    positions: Mapping[str, int] = field(default_factory=dict)
    apart: bool = False
    shrunk: tuple[str, ...] = ()
    chooses: bool = False
    replaces: tuple[str, ...] = ()
    composed: bool = False
    rows: tuple[str, ...] = ()
    reference_joins: bool | Callable[..., bool] = False
    equal_rows: bool = True
    timed: Callable[..., bool] | None = None
    floor: float = 1.0
    example_tokens: int = T
    forms: Mapping[str, Builder] = field(default_factory=dict)
    cases: Callable[[Arguments], Iterator[tuple[str, Arguments]]] | None = None
    unread: Callable[[Arguments, Any], Any] | None = None
    implementations: dict[str, Implementation] = field(init=False)

    def __post_init__(self) -> None:
        reference = Implementation(self.reference, joins=self.reference_joins)
        object.__setattr__(self, "implementations", {REFERENCE: reference, **self.others})
        object.__setattr__(self, "rows", self.rows or tuple(self.tokens))
        known = set(inspect.signature(self.reference).parameters)
        faults = [
            *(
                f"'{name}' is no argument"
                for name in {*self.tokens, *self.positions, *self.shrunk, *self.rows} - known
            ),
            *["it has steps and replaces nothing"] * ("steps" in known and not self.replaces),
            *["its reference takes no steps"] * ("steps" not in known and bool(self.replaces)),
            *["it replaces nothing and is composed"] * (self.composed and not self.replaces),
            *["it has no workload"] * (not self.workloads),
            *["its rows have no axis"] * (self.by_rows and not self.tokens),
            *["its tokens have no positions"] * (self.apart and not self.positions),
            *["its kinds have no names"] * (self.kind is None and set(self.workloads) != {""}),
            *["another implementation is called 'reference'"] * (REFERENCE in self.others),
            *["stock MLX is timed and may not be taken"]
            * (self.timed is not None and (bool(self.replaces) or not self.equal_rows)),
        ]
        for name, other in self.others.items():
            given = inspect.signature(other.function).parameters
            missing = known - {"steps"} - set(given)
            faults += [f"'{name}' takes no '{argument}'" for argument in sorted(missing)]
        if faults:
            raise TypeError(f"the record of '{self.name}' is wrong: {'; '.join(faults)}")

    def example_call(
        self, dtype: mx.Dtype = mx.float32, *, tokens: int | None = None, form: str | None = None
    ) -> Arguments:
        """Return positional and keyword arguments of the example, or of one of `forms`; activations
        and weights in `dtype`. tokens: Another number of them than the example's own."""
        count = self.example_tokens if tokens is None else tokens
        build = self.example if form is None else self.forms[form]
        return build(TINY, count, normal(dtype))

    def workload(self, kind: str, sizes: Sizes, tokens: int, dtype: mx.Dtype) -> Arguments:
        """Return the arguments of one call of a kind, not evaluated."""
        return self.workloads[kind](sizes, tokens, normal(dtype))

    def small_cases(self) -> Iterator[tuple[str, Arguments]]:
        """Yield the cases on which a given callable is compared with the reference, with their
        names."""
        for what, tokens in (("several tokens", None), ("one token", 1)):
            call = self.example_call(tokens=tokens)
            if self.cases is None:
                yield what, call
                continue
            for more, other in self.cases(call):
                yield f"{what}, {more}", other

    def without_unread(self, call: Arguments, result: Any) -> Any:
        """Return the result of a small case with 0 where nobody reads it."""
        return result if self.unread is None else self.unread(call, result)


def row_name(operation: str, kind: str) -> str:
    """Return the name of a kind of call in dispatch.json."""
    return f"{operation} {kind}" if kind else operation

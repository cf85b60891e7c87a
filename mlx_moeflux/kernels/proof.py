"""How an operation is tested and timed, declared in its record.

Trials, checks and measurements of :mod:`~mlx_moeflux.kernels.verify` read it, and so does the check
of a callable that a user gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_moeflux.kernels.examples import TINY, Arguments, Normal, Sizes, T, normal

# Sizes of a model, tokens of the call, random arrays -> the call's arguments.
Builder = Callable[[Sizes, int, Normal], Arguments]

# Rows of one call that a fused step, or an implementation that joins rows of one sequence, computes
# with the bits of single rows.
STEP_ROWS = 4


def is_prompt(rows: mx.array, *others: Any, **options: Any) -> bool:
    """Return True for a call of more rows than steps have, which stock MLX may compute as well."""
    return rows.shape[0] > STEP_ROWS


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The calls on which an operation is tested and timed, and what a trial may assume of it.

    `tokens` and `kind` are those of the :class:`~mlx_moeflux.kernels.operation.Operation`.

    example: Builds a small call with every option.
    example_tokens: Tokens of the example, where no other number is given.
    workloads: Kind of call -> builds a call as models make it; "" where no kind has its own.
    forms: Name -> builds a small call whose arguments are stored in another form. A check tries
        these too.
    cases: A small call -> that call and others like it, each with a name, all of which a given
        callable must take. None: only the call.
    unread: Arguments and result of a small call -> the result with 0 where nobody reads it. None:
        all of it is read.
    by_rows: True if no row has influence on another. Rows are the second to last axis of every
        argument in `tokens`, and of every result. A trial computes the truth of some rows.
    keeps_axes: True if the axes in front of the rows are those of the result, however many.
    positions: Arguments of attention that are a cache, and on which axis their positions are. A
        trial takes the first positions. `length`, `start`, `mask` and `tail` are then arguments as
        of ``sdpa``.
    apart: True if no token of attention over `positions` has influence on another. A trial
        computes the truth of some tokens.
    shrunk: Arguments that a trial makes small: inputs of norms, so that an epsilon shows, and what
        products are added to.
    chooses: True if results are choices, of which two may be as good as equal. One error, however
        large, then ends no trial.
    floor: How many times the usual error of a trial an implementation may have where the reference
        is exact: more than 1 if it rounds where the reference computes in float32.
    timed: The call's arguments -> whether a trial times stock MLX beside an implementation, and may
        take it. The bits of stock must depend on no neighbour, it must allocate little, and nothing
        else may compute such calls with the bits of the implementation, as a fused operation or one
        for rows of a sequence does. None: never.
    """

    example: Builder
    example_tokens: int = T
    workloads: Mapping[str, Builder]
    forms: Mapping[str, Builder] = field(default_factory=dict)
    cases: Callable[[Arguments], Iterator[tuple[str, Arguments]]] | None = None
    unread: Callable[[Arguments, Any], Any] | None = None
    by_rows: bool = False
    keeps_axes: bool = False
    positions: Mapping[str, int] = field(default_factory=dict)
    apart: bool = False
    shrunk: tuple[str, ...] = ()
    chooses: bool = False
    floor: float = 1.0
    timed: Callable[..., bool] | None = None

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

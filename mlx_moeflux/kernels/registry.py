"""Which implementation computes each operation: one object, chosen by name, replaceable.

A model asks ``kernels.gated_delta(...)`` and never knows which implementation answers. They are
chosen per operation by name or by passing a callable::

    load(path, kernels={"delta_mixer": "reference", "sdpa": my_attention})

or with the environment variable ``MOEFLUX_KERNELS=auto,delta_mixer=reference``, or for one call
with ``kernels.gated_delta(..., use_kernel="reference")``. "auto", which holds where nothing is
chosen, takes what :mod:`mlx_moeflux.kernels.dispatch` names for the back end and the size of the
call. What is known of an operation stands in its record (:mod:`mlx_moeflux.kernels.operation`).

A fused operation does the work of others. Where one of them is chosen by name, a fused operation
on "auto" is composed of them; one that is chosen by name too contradicts it.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import InputError, MoefluxError, ShapeError, UnsupportedError
from mlx_moeflux.kernels import dispatch, rows
from mlx_moeflux.kernels.attention.append import APPEND_ROW
from mlx_moeflux.kernels.attention.attention import SDPA
from mlx_moeflux.kernels.attention.choose_blocks import CHOOSE_BLOCKS
from mlx_moeflux.kernels.attention.chosen_sdpa import CHOSEN_SDPA
from mlx_moeflux.kernels.attention.norm_rope import NORM_ROPE
from mlx_moeflux.kernels.attention.paged_attention import PAGED_SDPA
from mlx_moeflux.kernels.delta.delta_mixer import DELTA_MIXER
from mlx_moeflux.kernels.delta.gated_delta import GATED_DELTA
from mlx_moeflux.kernels.linear.project import PROJECT
from mlx_moeflux.kernels.mla.choose_positions import CHOOSE_POSITIONS
from mlx_moeflux.kernels.mla.chosen_latents import CHOSEN_LATENT_ATTENTION
from mlx_moeflux.kernels.mla.head_product import HEAD_PRODUCT
from mlx_moeflux.kernels.mla.latent_attention import LATENT_ATTENTION
from mlx_moeflux.kernels.mla.latent_prefill import LATENT_PREFILL
from mlx_moeflux.kernels.mla.latent_prepare import LATENT_PREPARE
from mlx_moeflux.kernels.mla.latent_step import LATENT_STEP
from mlx_moeflux.kernels.moe.add_shared import ADD_SHARED
from mlx_moeflux.kernels.moe.expert_mix import EXPERT_MIX
from mlx_moeflux.kernels.moe.moe_combine import MOE_COMBINE
from mlx_moeflux.kernels.moe.moe_step import MOE_STEP
from mlx_moeflux.kernels.moe.router import SIGMOID_TOP_K, SOFTMAX_TOP_K
from mlx_moeflux.kernels.nested import describe
from mlx_moeflux.kernels.operation import REFERENCE, Implementation, Operation, row_name
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.streams.read_streams import READ_STREAMS
from mlx_moeflux.kernels.verify import comparison, failures, trials, verdicts

ENVIRONMENT = "MOEFLUX_KERNELS"
AUTO = "auto"
# Of a given callable in float32, by the largest value: the reference rounds too.
LARGEST_ERROR = 1e-4

Choice = str | Callable[..., Any]

# Of each, "reference" is plain MLX and defines the meaning; those with kernels need a GPU. "auto"
# picks by dispatch.json.
OPERATIONS: dict[str, Operation] = {
    record.name: record
    for record in (
        PROJECT,
        GATED_DELTA,
        DELTA_MIXER,
        NORM_ROPE,
        APPEND_ROW,
        SDPA,
        PAGED_SDPA,
        LATENT_ATTENTION,
        LATENT_PREFILL,
        LATENT_PREPARE,
        LATENT_STEP,
        HEAD_PRODUCT,
        SOFTMAX_TOP_K,
        SIGMOID_TOP_K,
        EXPERT_MIX,
        MOE_COMBINE,
        ADD_SHARED,
        MOE_STEP,
        READ_STREAMS,
        CHOOSE_BLOCKS,
        CHOSEN_SDPA,
        CHOOSE_POSITIONS,
        CHOSEN_LATENT_ATTENTION,
    )
}
if unknown := {one for record in OPERATIONS.values() for one in record.replaces} - {*OPERATIONS}:
    raise TypeError(f"operations replace {sorted(unknown)}, which have no record")

# From which size on an implementation is taken, by name; None: the reference.
Starts = list[tuple[int, "tuple[str, Implementation] | None"]]


class Dispatcher:
    """One operation as a model calls it.

    choice: "auto", the name of an implementation, or a callable. A call takes the arguments of the
    reference, and ``use_kernel=`` with the name of an implementation for this call alone.
    chosen_by_name: False for "auto"; a given callable counts as chosen.
    """

    def __init__(self, record: Operation, choice: Choice, mode: _Mode):
        self.record, self.name, self.choice, self._mode = record, record.name, choice, mode
        self.chosen_by_name = choice != AUTO
        self._implementations = record.implementations
        self._arguments = tuple(signature(record.reference).parameters)
        self.reference = self._implementations[REFERENCE]
        self._fixed = (
            Implementation(_without_steps(record, choice))
            if callable(choice)
            else self._implementations.get(choice)
        )
        # What the choice was made for.
        self._backend: launcher.Backend | None = None
        self._checks_first_use = self._times = False
        self._generation = 0
        # Name and implementation that "auto" takes for prompts, see Kernels.take_stock_for_prompts.
        self._for_prompts: tuple[str, Implementation] | None = None
        self._starts: Starts = []
        self._special: dict[str, Starts] = {}
        # Implementation that "auto" chose and that refused -> calls, and the last reason.
        self.fallbacks: dict[str, tuple[int, str]] = {}
        self.called = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """Return itself: a copied layer computes with the same kernels, which cannot be copied once
        they are compiled."""
        return self

    def __repr__(self) -> str:
        return f"Dispatcher({self.name!r}, {self.active()!r})"

    def compose(self, steps: Kernels) -> None:
        """Take the reference with the operations of `steps`, unless one is chosen by name."""
        if not self.chosen_by_name:
            self.choice = REFERENCE
            composed = partial(self.reference.function, steps=steps)
            composed = replace(self.reference, function=composed)
            self._fixed = self.reference = composed

    def __call__(self, *args, use_kernel: str | None = None, **kwargs):
        if use_kernel is not None and use_kernel != AUTO:
            return _named(self.record, use_kernel).function(*args, **kwargs)
        if rows.calls.count > 1:
            return self._in_rows(rows.calls.count, args, kwargs)
        if use_kernel is None and self._fixed is not None:
            self.called = True
            return self._by_name().function(*args, **kwargs)
        best = self._best(args)
        if self._checks_first_use and self._needs_trials():
            return self._try(best, args, kwargs)
        if best is None:
            return self.reference.function(*args, **kwargs)
        try:
            return best[1].function(*args, **kwargs)
        except (ShapeError, UnsupportedError) as error:
            reason = str(error)
        # The kernel does not take these shapes; if they are wrong, the reference says so.
        result = self.reference.function(*args, **kwargs)
        self._fell_back(best[0], reason)
        return result

    def _in_rows(self, count: int, args: tuple, kwargs: dict) -> Any:
        """Compute a call of `count` rows, see :mod:`~mlx_moeflux.kernels.rows`."""
        if self._fixed is not None:
            self.called, best, found = True, None, self._by_name()
        else:
            best = self._best(args) or (REFERENCE, self.reference)
            found = best[1]
        if found.joins_rows(*args, **kwargs):
            try:
                if best is None or not self._checks_first_use or not self._needs_trials():
                    return found.function(*args, **kwargs)
                result, right = trials.launched(self.record, *best, args, kwargs)
                if right:
                    return result
            except (ShapeError, UnsupportedError):
                pass  # so it would refuse a row
        return self._one_by_one(self, count, args, kwargs)

    def _one_by_one(self, function: Callable[..., Any], count: int, args: Any, kwargs: Any) -> Any:
        return rows.one_by_one(function, count, args, kwargs, self._arguments, self.record.rows)

    def _by_name(self) -> Implementation:
        """Return what was chosen; training takes references, but given callables stay."""
        if self._mode.references_only and not callable(self.choice):
            return self.reference
        assert self._fixed is not None
        return self._fixed

    def _needs_trials(self) -> bool:
        """Return True on the GPU, if the back end is one where nothing runs before its trial."""
        backend = self._backend
        if backend is None or self._mode.references_only:
            return False
        return not backend.follows_device or mx.default_device().type == mx.gpu

    def _try(self, best: tuple[str, Implementation] | None, args: tuple, kwargs: dict) -> Any:
        """Compute where an implementation runs only after its trial."""
        timed = self._times and self._mode.measures
        try:
            return trials.call(self.record, best, args, kwargs, timed=timed)
        except (ShapeError, UnsupportedError) as error:
            if best is None:
                raise
            reason = str(error)
        result = trials.call(self.record, None, args, kwargs)
        self._fell_back(best[0], reason)
        return result

    def _fell_back(self, name: str, reason: str) -> None:
        calls, _ = self.fallbacks.get(name, (0, ""))
        self.fallbacks[name] = calls + 1, reason

    def implementation(self, *args, **kwargs) -> Implementation:
        """Return what computes a call with these arguments, for one that is made in parts: the same
        for all of them."""
        if self._fixed is not None:
            self.called = True
            found = self._by_name()
        elif (best := self._best(args)) is None:
            found = self.reference
        elif best[1].takes is not None and not best[1].takes(*args, **kwargs):
            self._fell_back(best[0], "it does not take these arguments")
            found = self.reference
        elif self._checks_first_use and self._needs_trials():
            found = replace(best[1], function=lambda *args, **kwargs: self._try(best, args, kwargs))
        else:
            found = best[1]
        if rows.calls.count == 1 or found is self.reference or found.joins_rows(*args, **kwargs):
            return found

        def one_by_one(*args, **kwargs):
            return self._one_by_one(found.function, len(args[0]), args, kwargs)

        return replace(found, function=one_by_one, adds=None, exchanges=None)

    def takes(self, *args, **kwargs) -> bool:
        """Return True if :meth:`implementation` gives another than the reference for these
        arguments; a refusal does not count as a fallback."""
        if self._fixed is not None:
            return self._by_name() is not self.reference
        best = self._best(args)
        return best is not None and (best[1].takes is None or best[1].takes(*args, **kwargs))

    def size(self, args: Sequence[Any]) -> int:
        """Return what a row's "from" counts: tokens of a sequence, or rows, of several rows of one
        sequence those of one."""
        axes = self.record.size
        return 1 if axes is None else math.prod(args[0].shape[axes]) // rows.calls.count or 1

    def row_name(self, args: Sequence[Any]) -> str:
        """Return the name of the table's rows for a call: those of its kind, if it has any."""
        kind = self.record.kind
        named = self.name if kind is None else row_name(self.name, kind(*args))
        return named if named in dispatch.table() else self.name

    def _best(self, args) -> tuple[str, Implementation] | None:
        """Return the implementation that "auto" chooses for a call, with its name; None: the
        reference."""
        backend = self._backend
        if (
            backend is None
            or backend is not launcher.Active.backend
            or self._generation != failures.Failed.generation
        ):
            backend = self._read_table()
        if self._mode.references_only:
            return None
        if backend.follows_device and mx.default_device().type != mx.gpu:
            return None
        if (prompts := self._for_prompts) is not None and prompts[1].takes_call(*args):
            return None if isinstance(backend, launcher.NoBackend) else prompts
        if not self._starts:
            return None
        starts = self._starts
        if self._special and self.record.kind is not None:
            starts = self._special.get(self.record.kind(*args), starts)
        if len(starts) == 1 and starts[0][0] <= 1:
            return starts[0][1]
        size = self.size(args)
        best = None
        for start, found in starts:
            if size < start:
                break
            best = found
        return best

    def _read_table(self) -> launcher.Backend:
        """Choose for the back end in use, which is returned, without the kernels that failed."""
        backend = launcher.backend()
        self._backend, self._generation = backend, failures.Failed.generation
        self._checks_first_use = backend.checks_first_use
        self._times = self._checks_first_use and dispatch.is_shipped()
        every = self._implementations.items()
        usable = {n: (n, one) for n, one in every if n != REFERENCE and not failures.failed(one)}

        def starts(rows: Sequence[dispatch.Row]) -> Starts:
            return [(row.start, usable.get(row.name)) for row in rows]

        self._starts = starts(dispatch.rows(self.name, backend.name))
        special = dispatch.special_rows(self.name, backend.name)
        self._special = {kind: starts(rows) for kind, rows in special.items()}
        return backend

    def take_for_prompts(self, name: str | None) -> None:
        """Take an implementation, which says by `takes` what prompts are, where "auto" would choose
        by size; None: none."""
        self._for_prompts = None if name is None else (name, self._implementations[name])

    def goes_beyond_reference(self, *args, **kwargs) -> bool:
        """Return True if a call of this size may take another implementation than the reference."""
        if self._fixed is not None:
            return self._by_name() is not self.reference
        return self._best(args) is not None

    def unpromised(self) -> list[str]:
        """Return why stock MLX computes this operation in place of a kernel whose bits do not
        depend on the memory for experts, a line each; none on a CPU."""
        backend = launcher.backend()
        there = not isinstance(backend, launcher.NoBackend) and (
            not backend.follows_device or mx.default_device().type == mx.gpu
        )
        if self.record.equal_rows or not there or callable(self.choice):
            return []
        stock = f"{self.name}={REFERENCE}"
        if self.choice != AUTO:
            mixes = self.choice == REFERENCE or self._implementations[self.choice].mixes_rows
            return [f"{self.name}={self.choice} is chosen"] if mixes else []
        names = {row.name for row in dispatch.rows(self.name, backend.name)}
        reasons = [f"{stock} is in the table of kernels"] if REFERENCE in names else []
        gone = [name for name in names if failures.failed(self._implementations[name])]
        if backend.checks_first_use:
            known = (key.partition(" ")[0].partition("=") for key in verdicts.refused())
            gone += [name for op, _, name in known if op == self.name and name != REFERENCE]
        reasons += [f"{self.name}={name} failed on this GPU" for name in sorted(set(gone))]
        return reasons + [f"{self.name}={name} refused" for name in sorted(self.fallbacks)]

    def active(self) -> str:
        """Return the name of the implementation; for "auto" those of the back end, with the sizes
        they begin at."""
        if callable(self.choice):
            return getattr(self.choice, "__name__", type(self.choice).__name__)
        if self.choice != AUTO:
            return self.choice
        backend = launcher.backend().name
        general = dispatch.describe(dispatch.rows(self.name, backend))
        special = dispatch.special_rows(self.name, backend).items()
        text = general + "".join(f" ({kind}: {dispatch.describe(rows)})" for kind, rows in special)
        if self._for_prompts is not None:
            there = not isinstance(launcher.backend(), launcher.NoBackend)
            text += f" (stock MLX for prompts: {self._for_prompts[0] if there else REFERENCE})"
        return f"{text} (stock MLX where it was faster)" if self.stock_choices() else text

    def stock_choices(self) -> list[str]:
        """Return the keys of the sizes of calls for which trials found stock MLX to be faster."""
        if self.choice != AUTO or not self._mode.measures:
            return []
        if not (launcher.backend().checks_first_use and dispatch.is_shipped()):
            return []
        return [key for key in verdicts.stock_choices() if key.startswith(f"{self.name}=")]


class _Mode:
    """State that the operations of one :class:`Kernels` share."""

    references_only, measures = False, True


class Kernels:
    """One :class:`Dispatcher` for each of OPERATIONS, as attributes and by name.

    A call's shapes are those of the reference's docstring.
    """

    def __init__(self, choices: Mapping[str, Choice] | None = None):
        self._mode, choices = _Mode(), choices or {}
        self._operations = {
            name: Dispatcher(record, choices.get(name, AUTO), self._mode)
            for name, record in OPERATIONS.items()
        }
        chosen = {name for name, one in self._operations.items() if one.chosen_by_name}
        for one in self._operations.values():
            if not chosen.isdisjoint(one.record.replaces):
                one.compose(self)
        self.__dict__.update(self._operations)

    def __getattr__(self, name: str) -> Dispatcher:
        raise AttributeError(f"no operation is called '{name}'")

    def __getitem__(self, name: str) -> Dispatcher:
        return self._operations[name]

    def __repr__(self) -> str:
        return f"Kernels({self.names()})"

    def names(self) -> dict[str, str]:
        """Return operation -> the name of the active implementation, for ``--stats``."""
        return {name: op.active() for name, op in self._operations.items()}

    def identity(self) -> list[Any]:
        """Return what decides which implementation computes a call: the choices, what has failed
        its trial on this GPU, and where stock MLX was faster."""
        refused = verdicts.refused() if launcher.backend().checks_first_use else []
        found = [self.names(), [key for key in refused if key.partition("=")[0] in OPERATIONS]]
        stock = [key for op in self._operations.values() for key in op.stock_choices()]
        return [*found, stock] if stock else found

    def fallbacks(self) -> list[str]:
        """Return a line for each implementation that "auto" chose and that refused, and for each
        given callable that nothing has called, for ``--stats``."""
        given = [op for op in self._operations.values() if callable(op.choice) and not op.called]
        return [f"{op.name}={op.active()} was given and never called" for op in given] + [
            f"{name}={other} fell back to the reference {calls} times: {reason}"
            for name, operation in self._operations.items()
            for other, (calls, reason) in operation.fallbacks.items()
        ]

    def unpromised(self) -> list[str]:
        """Return a line for each reason for which bits may depend on the memory for experts, for
        the marks of the statistics."""
        return [
            f"{reason}: stock MLX promises no equal bits at any memory for experts"
            for operation in self._operations.values()
            for reason in operation.unpromised()
        ]

    @contextmanager
    def observed(self, note: Callable[[str, tuple, dict[str, Any]], None]) -> Iterator[None]:
        """Call ``note(operation, args, kwargs)`` before each call of an operation on "auto"."""

        def spy(operation: Dispatcher, *args, **kwargs):
            note(operation.name, args, kwargs)
            before, operation._fixed = operation._fixed, None
            try:
                return operation(*args, **kwargs)
            finally:
                operation._fixed = before

        watched = [op for op in self._operations.values() if op.choice == AUTO]
        for operation in watched:
            operation._fixed = Implementation(partial(spy, operation))
        try:
            yield
        finally:
            for operation in watched:
                operation._fixed = None

    def take_stock_for_prompts(self, on: bool = True) -> None:
        """Compute the experts of prompts by stock MLX in tiles of several rows, whose bits depend
        on the memory for experts; on a CPU by the reference.

        Raises:
            InputError: `expert_mix` is chosen by name.
        """
        mix = self._operations["expert_mix"]
        if on and mix.chosen_by_name:
            raise InputError(
                f"expert_mix is chosen by name, '{mix.active()}', for prompts too; leave out "
                "prompt_kernels."
            )
        mix.take_for_prompts("in_tiles" if on else None)

    def measure_nothing(self, on: bool = True) -> None:
        """Follow the table of kernels and ignore choices by time, as one of several processes that
        must compute the same bits."""
        self._mode.measures = not on

    def references_only(self, on: bool = True) -> None:
        """Use references instead of implementations chosen by name: training needs their
        gradients. Given callables stay."""
        self._mode.references_only = on


def choose_kernels(
    choices: str | Mapping[str, Choice] | None = None, *, check_values: bool = True
) -> Kernels:
    """Choose implementations: "auto", then those of ``$MOEFLUX_KERNELS``, then `choices`.

    choices: Operation -> the name of an implementation or a callable; or a text as in the
        environment. check_values: Compare what a callable returns on small cases with the
        reference, by value; pass False for one that is meant to differ.

    Raises:
        InputError: An operation or an implementation's name is unknown, or the table names one that
            is. A fused operation and one whose work it does are both chosen by name. A callable's
            numbers are wrong, or NaN.
        ShapeError: A callable fails, or does not return the reference's shapes and dtypes.
        UnsupportedError: A chosen implementation needs a GPU, and MLX drives none.
    """
    if not isinstance(choices, str | Mapping | None):
        raise InputError(
            f"kernels is a {type(choices).__name__}; give operation -> name or callable, or a text "
            "such as 'auto,sdpa=reference'."
        )
    given = parse(choices, "kernels") if isinstance(choices, str) else (choices or {}).items()
    base, named = AUTO, {}
    for operation, choice in (*parse(os.environ.get(ENVIRONMENT, ""), ENVIRONMENT), *given):
        if operation is None:
            base, named = choice, {}
        else:
            named[operation] = choice
    for operation, choice in named.items():
        if operation not in OPERATIONS:
            raise unknown_operation(operation)
        if callable(choice):
            _check_callable(OPERATIONS[operation], choice, check_values)
        elif choice != AUTO:
            _named(OPERATIONS[operation], choice)
    for fused, record in OPERATIONS.items():
        both = [name for name in record.replaces if named.get(name, AUTO) != AUTO]
        if both and named.get(fused, AUTO) not in (AUTO, REFERENCE):
            raise InputError(
                f"'{fused}' does the work of '{both[0]}', and both are chosen by name; choose one."
            )
    _check_table()
    return Kernels(dict.fromkeys(OPERATIONS, base) | named)


def unknown_operation(name: str, *others: str) -> InputError:
    """Return the error for a name that no operation has, with those that are like it. others: Names
    that are known besides."""
    near = difflib.get_close_matches(name, (*others, *OPERATIONS), cutoff=0.5)
    mend = f"did you mean {' or '.join(near)}?" if near else "'mlx_moeflux check' names all."
    return InputError(f"no operation is called '{name}'; {mend}")


def parse(text: str, source: str) -> list[tuple[str | None, Choice]]:
    """``auto,sdpa=reference`` -> operations and names; "auto" or "reference" alone, of operation
    None, is for all and forgets what is before it.

    Raises:
        InputError: An item is neither.
    """
    chosen: list[tuple[str | None, Choice]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        operation, _, name = item.partition("=")
        if name:
            chosen.append((operation.strip(), name.strip()))
        elif item in (AUTO, REFERENCE):
            chosen.append((None, item))
        else:
            raise InputError(f"{source}: '{item}' is neither 'auto', 'reference' nor op=name.")
    return chosen


def _named(operation: Operation, name: str) -> Implementation:
    """Return an implementation by name, if it can run here."""
    found = operation.implementations.get(name)
    if found is None:
        known = ", ".join([AUTO, *operation.implementations])
        raise InputError(f"'{operation.name}' has no implementation '{name}'; there are {known}.")
    if found.kernels and isinstance(launcher.backend(), launcher.NoBackend):
        raise UnsupportedError(
            f"{operation.name}={name} needs a GPU and MLX drives none here; choose 'reference' or "
            "'auto'."
        )
    return found


def _without_steps(operation: Operation, given: Callable[..., Any]) -> Callable[..., Any]:
    """Return a given callable as models call it: it does the work of the steps itself."""
    if not operation.replaces:
        return given

    def call(*args: Any, steps: Any = None, **kwargs: Any) -> Any:
        return given(*args, **kwargs)

    return call


def _check_table() -> None:
    """A table that another version wrote may name implementations that are gone."""
    for name, backends in dispatch.table().items():
        operation = OPERATIONS.get(name.partition(" ")[0])
        named = {row.name for rows in backends.values() for row in rows}
        if operation is not None and not named <= operation.implementations.keys():
            missing = min(named - operation.implementations.keys())
            raise InputError(
                f"{dispatch.ENVIRONMENT}: '{name}' has no implementation '{missing}'; write the "
                "table anew with 'mlx_moeflux tune --kernels'."
            )


def _check_callable(operation: Operation, given: Callable[..., Any], values: bool) -> None:
    """Run `given` and the reference on small cases; shapes, dtypes and, with `values`, numbers must
    agree."""
    reference, name = operation.reference, operation.name
    for what, case in operation.proof.small_cases():
        args, kwargs = case
        expected = reference(*args, **kwargs)
        mx.eval(expected)
        try:
            actual = given(*args, **kwargs)
            mx.eval(actual)
        except MoefluxError:
            raise
        except Exception as error:
            names = ", ".join(one for one in signature(reference).parameters if one != "steps")
            raise ShapeError(
                f"the given '{name}' fails on a small case ({what}): {type(error).__name__}: "
                f"{error}. Its arguments are those of the reference: {names}."
            ) from error
        described, wanted = describe(actual), describe(expected)
        if described != wanted:
            raise ShapeError(f"the given '{name}' returns {described} ({what}), expected {wanted}.")
        compared = (operation.proof.without_unread(case, value) for value in (actual, expected))
        error, limit = comparison.largest_error(*compared), LARGEST_ERROR
        if values and not error <= limit:
            by = f"{error:.2g} of the largest value, more than {limit:g},"
            by = by if error < math.inf else "NaN, an infinite number or another integer"
            raise InputError(
                f"the given '{name}' differs from the reference by {by} on a small case ({what}); "
                "mend it, or pass check_values=False if it is meant to differ."
            )

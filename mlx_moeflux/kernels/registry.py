"""Which implementation computes each operation: one object, chosen by name, replaceable.

A model asks ``kernels.gated_delta(...)`` and never knows which form answers. Forms are chosen
per operation by name or by passing a callable::

    load(path, kernels={"delta_mixer": "reference", "sdpa": my_attention})

or with the environment variable ``MOEFLUX_KERNELS=auto,delta_mixer=reference``, or for one call
with ``kernels.gated_delta(..., use_kernel="reference")``. "auto", which holds where nothing is
said, takes the form that :mod:`mlx_moeflux.kernels.dispatch` names for the back end and the size of
the call.

A fused operation does the work of others (REPLACES). Where one of them is chosen by name, a fused
operation on "auto" is composed of them; one that is chosen by name too contradicts it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import InputError, MoefluxError, ShapeError, UnsupportedError
from mlx_moeflux.kernels import dispatch, trials, verdicts
from mlx_moeflux.kernels.attention import append, attention, norm_rope, paged_attention
from mlx_moeflux.kernels.cpu import blas, blas_delta
from mlx_moeflux.kernels.delta import delta_mixer, gated_delta
from mlx_moeflux.kernels.examples import small_cases, without_padding
from mlx_moeflux.kernels.linear import matvec, project
from mlx_moeflux.kernels.mla import latent, latent_step
from mlx_moeflux.kernels.moe import (
    add_shared,
    expert_mix,
    expert_pairs,
    expert_rows,
    moe_combine,
    moe_step,
    router,
)
from mlx_moeflux.kernels.runtime import failures, metal

ENVIRONMENT = "MOEFLUX_KERNELS"
AUTO, REFERENCE = "auto", "reference"
# Of a given callable in float32, by the largest value: the reference rounds too.
LARGEST_ERROR = 1e-4

Implementation = Callable[..., Any]

# Operation -> name -> implementation. "reference" is plain MLX and defines the meaning; those
# marked with @launches need a GPU. "auto" picks by dispatch.json.
IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    "project": {
        "reference": project.project,
        "fused": matvec.project_fused,
        "rows": project.project_rows,
        "dequantised": project.project_dequantised,
        "blas": blas.project_blas,
    },
    "gated_delta": {
        "reference": gated_delta.gated_delta,
        "recurrent": gated_delta.gated_delta_recurrent_fused,
        "chunkwise": gated_delta.gated_delta_chunkwise_fused,
    },
    "delta_mixer": {
        "reference": delta_mixer.delta_mixer,
        "fused": delta_mixer.delta_mixer_fused,
        "blas": blas_delta.delta_mixer_blas,
    },
    "norm_rope": {
        "reference": norm_rope.norm_rope,
        "fused": norm_rope.norm_rope_fused,
        "blas": blas.norm_rope_blas,
    },
    "append_row": {"reference": append.append_row, "fused": append.append_row_fused},
    "sdpa": {
        "reference": attention.causal_sdpa,
        "fused": attention.sdpa_fused,
        "blas": blas.sdpa_blas,
    },
    "paged_sdpa": {
        "reference": paged_attention.paged_sdpa,
        "fused": paged_attention.paged_sdpa_fused,
    },
    "latent_attention": {
        "reference": latent.latent_attention,
        "fused": latent.latent_attention_fused,
    },
    "latent_prefill": {
        "reference": latent.latent_prefill,
        "expanded": latent.latent_prefill_expanded,
    },
    "latent_prepare": {
        "reference": latent.latent_prepare,
        "fused": latent.latent_prepare_fused,
    },
    "latent_step": {"reference": latent_step.latent_step, "fused": latent_step.latent_step_fused},
    "head_product": {
        "reference": latent.head_product,
        "fused": latent.head_product_fused,
        "dequantised": latent.head_product_dequantised,
    },
    "softmax_top_k": {
        "reference": router.softmax_top_k,
        "fused": router.softmax_top_k_fused,
        "blas": blas.softmax_top_k_blas,
    },
    "sigmoid_top_k": {"reference": router.sigmoid_top_k, "fused": router.sigmoid_top_k_fused},
    "expert_mix": {
        "reference": expert_mix.expert_mix,
        "pairs": expert_pairs.expert_mix_pairs,
        "rows": expert_rows.expert_mix_rows,
        "grouped": expert_mix.expert_mix_grouped,
        "blas": blas.expert_mix_blas,
    },
    "moe_combine": {"reference": moe_combine.moe_combine, "fused": moe_combine.moe_combine_fused},
    "add_shared": {
        "reference": add_shared.add_shared,
        "fused": add_shared.add_shared_fused,
        "rows": add_shared.add_shared_rows,
        "dequantised": add_shared.add_shared_dequantised,
        "blas": blas.add_shared_blas,
    },
    "moe_step": {"reference": moe_step.moe_step, "fused": moe_step.moe_step_fused},
}

# Fused operation -> operations whose work it does, which its reference takes as `steps`. One that
# another of them replaces is in the list of both.
REPLACES: dict[str, tuple[str, ...]] = {
    "delta_mixer": delta_mixer.REPLACES,
    "paged_sdpa": paged_attention.REPLACES,
    "latent_step": latent_step.REPLACES,
    "moe_step": moe_step.REPLACES,
    "add_shared": add_shared.REPLACES,
}

# Of these operations stock MLX computes rows one by one, but on a GPU it promises no row the same
# bits in another bank and beside other rows. So "tune" does not choose it there, and statistics
# mark it.
UNPROMISED = {"expert_mix": REFERENCE}


# From which size on an implementation is taken, by name; None: the reference.
Starts = list[tuple[int, "tuple[str, Implementation] | None"]]


class Operation:
    """One operation as a model calls it.

    choice: "auto", the name of a form, or a callable. A call takes the arguments of the
    reference, and ``use_kernel=`` with the name of a form for this call alone.
    """

    def __init__(self, name: str, choice: str | Implementation, mode: _Mode):
        self.name, self.choice, self._mode = name, choice, mode
        self._implementations = IMPLEMENTATIONS[name]
        self.reference = self._implementations[REFERENCE]
        self._fixed = choice if callable(choice) else self._implementations.get(choice)
        self._axes = dispatch.AXES.get(name, dispatch.FIRST_AXIS)
        self._kind_axis = dispatch.KIND_AXES.get(name)
        # What the choice was made for.
        self._backend: metal.Backend | None = None
        self._checks_first_use = False
        self._generation = 0
        self._starts: Starts = []
        self._special: dict[str, Starts] = {}
        # Implementation that "auto" chose and that refused -> calls, and the last reason.
        self.fallbacks: dict[str, tuple[int, str]] = {}
        self.called = False

    def __repr__(self) -> str:
        return f"Operation({self.name!r}, {self.active()!r})"

    def compose(self, steps: Kernels) -> None:
        """Take the reference with the operations of `steps`, unless a form is chosen by name."""
        if self.choice == AUTO:
            self.choice = REFERENCE
            self._fixed = self.reference = partial(self.reference, steps=steps)

    def __call__(self, *args, use_kernel: str | None = None, **kwargs):
        if use_kernel is not None and use_kernel != AUTO:
            return _named(self.name, use_kernel)(*args, **kwargs)
        if use_kernel is None and self._fixed is not None:
            self.called = True
            return self._by_name()(*args, **kwargs)
        best = self._best(args)
        if self._checks_first_use and self._needs_trials():
            return self._try(best, args, kwargs)
        if best is None:
            return self.reference(*args, **kwargs)
        try:
            return best[1](*args, **kwargs)
        except (ShapeError, UnsupportedError) as error:
            reason = str(error)
        # The kernel does not take these shapes; if they are wrong, the reference says so.
        result = self.reference(*args, **kwargs)
        self._fell_back(best[0], reason)
        return result

    def _by_name(self) -> Implementation:
        """Return the chosen form; training takes references, but given callables stay."""
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
        try:
            return trials.call(self.name, best, self._implementations, args, kwargs)
        except (ShapeError, UnsupportedError) as error:
            if best is None:
                raise
            reason = str(error)
        result = trials.call(self.name, None, self._implementations, args, kwargs)
        self._fell_back(best[0], reason)
        return result

    def _fell_back(self, name: str, reason: str) -> None:
        calls, _ = self.fallbacks.get(name, (0, ""))
        self.fallbacks[name] = calls + 1, reason

    def implementation(self, *args, **kwargs) -> Implementation:
        """The form for a call with these arguments, to compute it in parts: the same for all."""
        if self._fixed is not None:
            self.called = True
            return self._by_name()
        best = self._best(args)
        if best is None:
            return self.reference
        name, form = best
        takes = getattr(form, "takes", None)
        if takes is not None and not takes(*args, **kwargs):
            self._fell_back(name, "it does not take these arguments")
            return self.reference
        if self._checks_first_use and self._needs_trials():
            return lambda *args, **kwargs: self._try(best, args, kwargs)
        return form

    def size(self, args: Sequence[Any]) -> int:
        """Return what a row's "from" counts: tokens of a sequence, or rows."""
        return 1 if self._axes is None else math.prod(args[0].shape[self._axes])

    def _best(self, args) -> tuple[str, Implementation] | None:
        """Return the implementation that "auto" chooses for a call, with its name; None: the
        reference."""
        backend = self._backend
        if (
            backend is None
            or backend is not metal.Active.backend
            or self._generation != failures.Failed.generation
        ):
            backend = self._read_table()
        if not self._starts or self._mode.references_only:
            return None
        if backend.follows_device and mx.default_device().type != mx.gpu:
            return None
        starts = self._starts
        if self._special:
            starts = self._special.get(str(args[0].shape[self._kind_axis]), starts)
        if len(starts) == 1 and starts[0][0] <= 1:
            return starts[0][1]
        size = self.size(args)
        best = None
        for start, found in starts:
            if size < start:
                break
            best = found
        return best

    def _read_table(self) -> metal.Backend:
        """Choose for the back end in use, which is returned, without the kernels that failed."""
        backend = metal.backend()
        self._backend, self._generation = backend, failures.Failed.generation
        self._checks_first_use = backend.checks_first_use
        forms = self._implementations.items()
        usable = {n: (n, f) for n, f in forms if n != REFERENCE and not failures.failed(f)}

        def starts(rows: Sequence[dispatch.Row]) -> Starts:
            return [(row.start, usable.get(row.form)) for row in rows]

        self._starts = starts(dispatch.rows(self.name, backend.name))
        special = dispatch.special_rows(self.name, backend.name)
        self._special = {kind: starts(rows) for kind, rows in special.items()}
        return backend

    def goes_beyond_reference(self, *args, **kwargs) -> bool:
        """Return True if a call of this size may take another implementation than the reference."""
        if self._fixed is not None:
            return self._by_name() is not self.reference
        return self._best(args) is not None

    def unpromised(self) -> list[str]:
        """Return why stock MLX computes this operation in place of a kernel whose bits do not
        depend on the memory for experts, a line each; none on a CPU."""
        stock, backend = UNPROMISED.get(self.name), metal.backend()
        there = not isinstance(backend, metal.NoBackend) and (
            not backend.follows_device or mx.default_device().type == mx.gpu
        )
        if stock is None or not there or callable(self.choice):
            return []
        if self.choice != AUTO:
            return [f"{self.name}={stock} is chosen"] if self.choice == stock else []
        forms = {row.form for row in dispatch.rows(self.name, backend.name)}
        reasons = [f"{self.name}={stock} is in the table of kernels"] if stock in forms else []
        gone = [form for form in forms if failures.failed(self._implementations[form])]
        if backend.checks_first_use:
            known = (key.partition(" ")[0].partition("=") for key in verdicts.refused())
            gone += [form for name, _, form in known if name == self.name and form != stock]
        return reasons + [f"{self.name}={form} failed on this GPU" for form in sorted(set(gone))]

    def active(self) -> str:
        """The name of the form; for "auto" those of the back end, with the sizes they begin at."""
        if callable(self.choice):
            return getattr(self.choice, "__name__", type(self.choice).__name__)
        if self.choice != AUTO:
            return self.choice
        backend = metal.backend().name
        said = dispatch.describe(dispatch.rows(self.name, backend))
        special = dispatch.special_rows(self.name, backend).items()
        return said + "".join(f" ({kind}: {dispatch.describe(rows)})" for kind, rows in special)


class _Mode:
    """State that the operations of one :class:`Kernels` share."""

    references_only = False


class Kernels:
    """One :class:`Operation` for each name in IMPLEMENTATIONS, as attributes.

    A call's shapes are those of the reference's docstring.
    """

    def __init__(self, choices: Mapping[str, str | Implementation] | None = None):
        self._mode, choices = _Mode(), choices or {}
        self._operations = {
            name: Operation(name, choices.get(name, AUTO), self._mode) for name in IMPLEMENTATIONS
        }
        self._chosen = {name for name, op in self._operations.items() if op.choice != AUTO}
        for fused, replaced in REPLACES.items():
            if not self.are_auto(*replaced):
                self._operations[fused].compose(self)
        vars(self).update(self._operations)

    def __getattr__(self, name: str) -> Operation:
        raise AttributeError(f"no operation is called '{name}'")

    def __repr__(self) -> str:
        return f"Kernels({self.names()})"

    def names(self) -> dict[str, str]:
        """Operation -> the name of the active form, for ``--stats``."""
        return {name: op.active() for name, op in self._operations.items()}

    def identity(self) -> list[Any]:
        """Return what decides which implementation computes a call: the choices, and what has
        failed its trial on this GPU."""
        return [self.names(), verdicts.refused() if metal.backend().checks_first_use else []]

    def fallbacks(self) -> list[str]:
        """Return a line for each implementation that "auto" chose and that refused, and for each
        given callable that nothing has called, for ``--stats``."""
        given = [op for op in self._operations.values() if callable(op.choice) and not op.called]
        return [f"{op.name}={op.active()} was given and never called" for op in given] + [
            f"{name}={form} fell back to the reference {calls} times: {reason}"
            for name, operation in self._operations.items()
            for form, (calls, reason) in operation.fallbacks.items()
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

        def spy(operation: Operation, *args, **kwargs):
            note(operation.name, args, kwargs)
            before, operation._fixed = operation._fixed, None
            try:
                return operation(*args, **kwargs)
            finally:
                operation._fixed = before

        watched = [op for op in self._operations.values() if op.choice == AUTO]
        for operation in watched:
            operation._fixed = partial(spy, operation)
        try:
            yield
        finally:
            for operation in watched:
                operation._fixed = None

    def are_auto(self, *names: str) -> bool:
        """Return True if all of these operations are on "auto"."""
        return self._chosen.isdisjoint(names)

    def references_only(self, on: bool = True) -> None:
        """Use references instead of implementations chosen by name: training needs their
        gradients. Given callables stay."""
        self._mode.references_only = on


def choose_kernels(
    choices: str | Mapping[str, str | Implementation] | None = None, *, check_values: bool = True
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
        UnsupportedError: A chosen form needs a GPU, and MLX drives none.
    """
    if not isinstance(choices, str | Mapping | None):
        raise InputError(
            f"kernels is a {type(choices).__name__}; give operation -> name or callable, or a text "
            "such as 'auto,sdpa=reference'."
        )
    given = parse(choices, "kernels") if isinstance(choices, str) else (choices or {}).items()
    base, named = AUTO, {}
    for operation, form in (*parse(os.environ.get(ENVIRONMENT, ""), ENVIRONMENT), *given):
        if operation is None:
            base, named = form, {}
        else:
            named[operation] = form
    for operation, form in named.items():
        if operation not in IMPLEMENTATIONS:
            known = ", ".join(IMPLEMENTATIONS)
            raise InputError(f"no operation is called '{operation}'; there are {known}.")
        if callable(form):
            _check_implementation(operation, form, check_values)
        elif form != AUTO:
            _named(operation, form)
    for fused, replaced in REPLACES.items():
        both = [name for name in replaced if named.get(name, AUTO) != AUTO]
        if both and named.get(fused, AUTO) not in (AUTO, REFERENCE):
            raise InputError(
                f"'{fused}' does the work of '{both[0]}', and both are chosen by name; choose one."
            )
    _check_table()
    return Kernels(dict.fromkeys(IMPLEMENTATIONS, base) | named)


def parse(text: str, source: str) -> list[tuple[str | None, str | Implementation]]:
    """``auto,sdpa=reference`` -> operations and names; "auto" or "reference" alone, of operation
    None, is for all and forgets what is before it.

    Raises:
        InputError: An item is neither.
    """
    chosen: list[tuple[str | None, str | Implementation]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        operation, _, name = item.partition("=")
        if name:
            chosen.append((operation.strip(), name.strip()))
        elif item in (AUTO, REFERENCE):
            chosen.append((None, item))
        else:
            raise InputError(f"{source}: '{item}' is neither 'auto', 'reference' nor op=name.")
    return chosen


def _named(operation: str, form: str) -> Implementation:
    """A form by name, if it can run here."""
    found = IMPLEMENTATIONS[operation].get(form)
    if found is None:
        known = ", ".join([AUTO, *IMPLEMENTATIONS[operation]])
        raise InputError(f"'{operation}' has no form '{form}'; there are {known}.")
    if hasattr(found, "kernels") and isinstance(metal.backend(), metal.NoBackend):
        raise UnsupportedError(
            f"{operation}={form} needs a GPU and MLX drives none here; choose 'reference' or "
            "'auto'."
        )
    return found


def _check_table() -> None:
    """A table that another version wrote may name forms that are gone."""
    for name, backends in dispatch.table().items():
        forms = IMPLEMENTATIONS.get(name.partition(" ")[0])
        named = {row.form for rows in backends.values() for row in rows}
        if forms is not None and not named <= forms.keys():
            missing = min(named - forms.keys())
            raise InputError(
                f"{dispatch.ENVIRONMENT}: '{name}' has no form '{missing}'; write the table anew "
                "with 'mlx_moeflux tune --kernels'."
            )


def _check_implementation(operation: str, form: Implementation, values: bool) -> None:
    """Run `form` and the reference on small cases; shapes, dtypes and, with `values`, numbers must
    agree."""
    reference = IMPLEMENTATIONS[operation][REFERENCE]
    for what, case in small_cases(operation):
        args, kwargs = case
        expected = reference(*args, **kwargs)
        mx.eval(expected)
        try:
            actual = form(*args, **kwargs)
            mx.eval(actual)
        except MoefluxError:
            raise
        except Exception as error:
            names = ", ".join(signature(reference).parameters)
            raise ShapeError(
                f"the given '{operation}' fails on a small case ({what}): {type(error).__name__}: "
                f"{error}. Its arguments are those of the reference: {names}."
            ) from error
        described, wanted = trials.describe(actual), trials.describe(expected)
        if described != wanted:
            raise ShapeError(
                f"the given '{operation}' returns {described} ({what}), expected {wanted}."
            )
        compared = (without_padding(operation, case, value) for value in (actual, expected))
        error, limit = trials.largest_error(*compared), LARGEST_ERROR
        if values and not error <= limit:
            by = f"{error:.2g} of the largest value, more than {limit:g},"
            by = by if error < math.inf else "NaN, an infinite number or another integer"
            raise InputError(
                f"the given '{operation}' differs from the reference by {by} on a small case "
                f"({what}); mend it, or pass check_values=False if it is meant to differ."
            )

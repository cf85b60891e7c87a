"""Which implementation computes each operation: one object, chosen by name, replaceable.

A model asks ``kernels.gated_delta(...)`` and never knows which form answers. Forms are chosen
per operation by name or by passing a callable::

    load(path, kernels={"gated_delta": "recurrent", "sdpa": my_attention})

or with the environment variable ``MOEFLUX_KERNELS=auto,gated_delta=recurrent``, or for one call
with ``kernels.gated_delta(..., use_kernel="reference")``. "auto", which holds where nothing is
said, takes the form that :mod:`mlx_moeflux.kernels.auto` names for the back end and the size of
the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import InputError, ShapeError, UnsupportedError
from mlx_moeflux.kernels import (
    add_shared,
    append,
    attention,
    auto,
    blas_delta,
    blas_forms,
    causal_conv,
    collect,
    delta_gates,
    delta_mixer,
    delta_mixer_fused,
    expert_ffn,
    expert_mix,
    expert_rows,
    failures,
    gated_delta,
    gated_delta_fused,
    heads,
    latent,
    latent_attention,
    latent_prepare,
    latent_step,
    metal,
    moe_combine,
    moe_step,
    norm_rope,
    paged_attention,
    project,
    router,
    rows,
    selfcheck,
)
from mlx_moeflux.kernels.examples import example

ENVIRONMENT = "MOEFLUX_KERNELS"
AUTO, REFERENCE = "auto", "reference"

Form = Callable[..., Any]

# Operation -> name -> implementation. "reference" is plain MLX and defines the meaning; those
# marked with @launches need a GPU. "auto" picks by dispatch.json.
FORMS: dict[str, dict[str, Form]] = {
    "project": {
        "reference": project.project,
        "fused": project.project_fused,
        "rows": rows.project_rows,
        "dequantised": project.project_dequantised,
        "blas": blas_forms.project_blas,
    },
    "causal_conv": {"reference": causal_conv.causal_conv_silu},
    "normalise_qk": {"reference": delta_gates.normalise_qk},
    "decay_beta": {"reference": delta_gates.decay_beta},
    "gated_delta": {
        "reference": gated_delta.gated_delta,
        "recurrent": gated_delta.gated_delta_recurrent,
        "chunkwise": gated_delta.gated_delta_chunked,
        "fused": gated_delta_fused.gated_delta_fused,
        "fused_recurrent": gated_delta_fused.gated_delta_recurrent_fused,
        "fused_chunkwise": gated_delta_fused.gated_delta_chunkwise_fused,
    },
    "gated_rms_norm": {
        "reference": delta_gates.gated_rms_norm,
        "fused": delta_mixer_fused.gated_rms_norm_fused,
    },
    "delta_mixer": {
        "reference": delta_mixer.delta_mixer,
        "fused": delta_mixer_fused.delta_mixer_fused,
        "blas": blas_delta.delta_mixer_blas,
    },
    "norm_rope": {
        "reference": norm_rope.norm_rope,
        "fused": norm_rope.norm_rope_fused,
        "blas": blas_forms.norm_rope_blas,
    },
    "append_row": {"reference": append.append_row, "fused": append.append_row_fused},
    "sdpa": {
        "reference": attention.causal_sdpa,
        "fused": attention.sdpa_fused,
        "blas": blas_forms.sdpa_blas,
    },
    "paged_sdpa": {
        "reference": paged_attention.paged_sdpa,
        "fused": paged_attention.paged_sdpa_fused,
    },
    "latent_attention": {
        "reference": latent.latent_attention,
        "fused": latent_attention.latent_attention_fused,
    },
    "latent_prefill": {
        "reference": latent.latent_prefill,
        "expanded": latent_attention.latent_prefill_expanded,
    },
    "latent_prepare": {
        "reference": latent_prepare.latent_prepare,
        "fused": latent_prepare.latent_prepare_fused,
    },
    "latent_step": {
        "reference": latent_step.latent_step,
        "fused": latent_step.latent_step_fused,
    },
    "head_product": {
        "reference": heads.head_product,
        "fused": heads.head_product_fused,
        "dequantised": heads.head_product_dequantised,
    },
    "softmax_top_k": {
        "reference": router.softmax_top_k,
        "fused": router.softmax_top_k_fused,
        "blas": blas_forms.softmax_top_k_blas,
    },
    "sigmoid_top_k": {"reference": router.sigmoid_top_k, "fused": router.sigmoid_top_k_fused},
    "expert_ffn": {"reference": expert_ffn.expert_ffn},
    "expert_mix": {
        "reference": expert_mix.expert_mix,
        "pairs": expert_mix.expert_mix_pairs,
        "rows": expert_rows.expert_mix_rows,
        "grouped": expert_mix.expert_mix_grouped,
        "blas": blas_forms.expert_mix_blas,
    },
    "moe_combine": {
        "reference": moe_combine.moe_combine,
        "fused": moe_combine.moe_combine_fused,
    },
    "add_shared": {
        "reference": add_shared.add_shared,
        "fused": add_shared.add_shared_fused,
        "rows": rows.add_shared_rows,
        "dequantised": add_shared.add_shared_dequantised,
        "blas": blas_forms.add_shared_blas,
    },
    "moe_step": {"reference": moe_step.moe_step, "fused": moe_step.moe_step_fused},
    "collect": {"reference": collect.collect, "fused": collect.collect_fused},
}


class Operation:
    """One operation as a model calls it.

    choice: "auto", the name of a form, or a callable. A call takes the arguments of the
    reference, and ``use_kernel=`` with the name of a form for this call alone.
    """

    def __init__(self, name: str, choice: str | Form, mode: _Mode):
        self.name, self.choice, self._mode = name, choice, mode
        self._forms = FORMS[name]
        self._fixed = choice if callable(choice) else self._forms.get(choice)
        self._backend: metal.Backend | None = None
        self._rows: tuple[auto.Row, ...] = ()
        self._special: dict[str, tuple[auto.Row, ...]] = {}

    def __repr__(self) -> str:
        return f"Operation({self.name!r}, {self.active()!r})"

    def __call__(self, *args, use_kernel: str | None = None, **kwargs):
        if use_kernel is not None and use_kernel != AUTO:
            return _named(self.name, use_kernel)(*args, **kwargs)
        if use_kernel is None and self._fixed is not None:
            if self._mode.references_only and not callable(self.choice):
                return self._forms[REFERENCE](*args, **kwargs)
            return self._fixed(*args, **kwargs)
        form = self._best(args, kwargs)
        if form is not None:
            try:
                return form(*args, **kwargs)
            except (ShapeError, UnsupportedError):
                # The kernel does not take these shapes; if they are wrong, the reference says so.
                pass
        return self._forms[REFERENCE](*args, **kwargs)

    def form(self, *args, **kwargs) -> Form:
        """The form for a call with these arguments, to compute it in parts: the same for all."""
        if self._fixed is not None:
            by_name = self._mode.references_only and not callable(self.choice)
            return self._forms[REFERENCE] if by_name else self._fixed
        best = self._best(args, kwargs)
        takes = getattr(best, "takes", None)
        if best is None or (takes is not None and not takes(*args, **kwargs)):
            return self._forms[REFERENCE]
        return best

    def _best(self, args, kwargs) -> Form | None:
        """The form that "auto" takes for a call; None: the reference."""
        active = metal.backend()
        if active is not self._backend:
            self._backend, self._rows = active, auto.rows(self.name, active.name)
            self._special = auto.special_rows(self.name, active.name)
        if not self._rows or self._mode.references_only:
            return None
        if active.follows_device and mx.default_device().type != mx.gpu:
            return None
        rows = self._rows
        if self._special:
            rows = self._special.get(auto.kind(self.name, args, kwargs), rows)
        name = auto.pick(rows, auto.size(self.name, args, kwargs))
        form = self._forms[name]
        if name == REFERENCE or failures.failed(form):
            return None
        if (
            active.checks_first_use
            and hasattr(form, "kernels")
            and not selfcheck.trusted(self.name, name, self._forms, args)
        ):
            return None
        return form

    def goes_beyond_reference(self, *args, **kwargs) -> bool:
        """Whether a call of this size may take another form than the reference."""
        if self._fixed is not None:
            return self.form() is not self._forms[REFERENCE]
        return self._best(args, kwargs) is not None

    def active(self) -> str:
        """The name of the form; for "auto" those of the back end, with the sizes they begin at."""
        if callable(self.choice):
            return getattr(self.choice, "__name__", type(self.choice).__name__)
        if self.choice != AUTO:
            return self.choice
        backend = metal.backend().name
        said = auto.describe(auto.rows(self.name, backend))
        special = auto.special_rows(self.name, backend).items()
        return said + "".join(f" ({kind}: {auto.describe(rows)})" for kind, rows in special)


class _Mode:
    """What the operations of one :class:`Kernels` share."""

    references_only = False


class Kernels:
    """One :class:`Operation` for each name in FORMS, as attributes.

    A call's shapes are those of the reference's docstring.
    """

    def __init__(self, choices: Mapping[str, str | Form] | None = None):
        self._mode, choices = _Mode(), choices or {}
        self._operations = {
            name: Operation(name, choices.get(name, AUTO), self._mode) for name in FORMS
        }

    def __getattr__(self, name: str) -> Operation:
        try:
            return self.__dict__["_operations"][name]
        except KeyError:
            raise AttributeError(f"no operation is called '{name}'") from None

    def __repr__(self) -> str:
        return f"Kernels({self.names()})"

    def names(self) -> dict[str, str]:
        """Operation -> the name of the active form, for ``--stats``."""
        return {name: op.active() for name, op in self._operations.items()}

    def are_auto(self, *names: str) -> bool:
        """Whether nobody chose a form of any of these operations."""
        return all(self._operations[name].choice == AUTO for name in names)

    def references_only(self, on: bool = True) -> None:
        """Take references whatever was chosen by name: training needs their gradients. Callables
        that were given stay."""
        self._mode.references_only = on


def choose_kernels(
    choices: str | Mapping[str, str | Form] | None = None, *, environment: str | None = None
) -> Kernels:
    """What "auto" gives, then `environment` (default ``$MOEFLUX_KERNELS``), then `choices`.

    choices: Operation -> the name of a form or a callable; or a text as in the environment.

    Raises:
        InputError: An operation or a form's name is unknown.
        ShapeError: A given callable does not return the shapes and dtypes of the reference.
        UnsupportedError: A chosen form needs a GPU, and MLX drives none.
    """
    if environment is None:
        environment = os.environ.get(ENVIRONMENT, "")
    chosen = parse(environment, ENVIRONMENT)
    chosen.update(parse(choices, "kernels") if isinstance(choices, str) else choices or {})
    for operation, form in chosen.items():
        if operation not in FORMS:
            raise _unknown(operation)
        if callable(form):
            _check_form(operation, form)
        elif form != AUTO:
            _named(operation, form)
    return Kernels(chosen)


def parse(text: str, source: str) -> dict[str, str]:
    """``auto,gated_delta=recurrent`` -> choices; "auto" or "reference" alone is for all before.

    Raises:
        InputError: An item is neither.
    """
    chosen: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        operation, _, name = item.partition("=")
        if name:
            chosen[operation.strip()] = name.strip()
        elif item in (AUTO, REFERENCE):
            chosen.update(dict.fromkeys(FORMS, item))
        else:
            raise InputError(f"{source}: '{item}' is neither 'auto', 'reference' nor op=name.")
    return chosen


def _unknown(operation: str) -> InputError:
    return InputError(f"no operation is called '{operation}'; there are {', '.join(FORMS)}.")


def _named(operation: str, form: str) -> Form:
    """A form by name, if it can run here."""
    found = FORMS[operation].get(form)
    if found is None:
        known = ", ".join([AUTO, *FORMS[operation]])
        raise InputError(f"'{operation}' has no form '{form}'; there are {known}.")
    if hasattr(found, "kernels") and isinstance(metal.backend(), metal.NoBackend):
        raise UnsupportedError(
            f"{operation}={form} needs a GPU and MLX drives none here; choose 'reference' or "
            "'auto'."
        )
    return found


def _check_form(operation: str, form: Form) -> None:
    """Run `form` and the reference on one small case; shapes and dtypes must agree."""
    args, kwargs = example(operation)
    expected = FORMS[operation][REFERENCE](*args, **kwargs)
    try:
        actual = form(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"the given '{operation}' fails on a small case: {error}.") from error
    described, wanted = selfcheck.describe(actual), selfcheck.describe(expected)
    if described != wanted:
        raise ShapeError(f"the given '{operation}' returns {described}, expected {wanted}.")

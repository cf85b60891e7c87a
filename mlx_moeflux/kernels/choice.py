"""Which implementation computes each operation: one object, chosen by name, replaceable.

A model asks ``kernels.gated_delta(...)`` and never knows which form answers. Forms are chosen
per operation by name or by passing a callable::

    load(path, kernels={"gated_delta": "recurrent", "sdpa": my_attention})

or with the environment variable ``MOEFLUX_KERNELS=auto,gated_delta=recurrent``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.kernels import (
    attention,
    causal_conv,
    delta_gates,
    expert_ffn,
    gated_delta,
    moe_combine,
    router,
)

ENVIRONMENT = "MOEFLUX_KERNELS"

# Operation -> name -> implementation. "reference" is plain MLX and defines the meaning; "auto"
# is what runs when nothing is said.
FORMS: dict[str, dict[str, Callable[..., Any]]] = {
    "causal_conv": {"reference": causal_conv.causal_conv_silu},
    "normalise_qk": {"reference": delta_gates.normalise_qk},
    "decay_beta": {"reference": delta_gates.decay_beta},
    "gated_delta": {
        "reference": gated_delta.gated_delta,
        "recurrent": gated_delta.gated_delta_recurrent,
        "chunkwise": gated_delta.gated_delta_chunked,
    },
    "gated_rms_norm": {"reference": delta_gates.gated_rms_norm},
    "norm_rope": {"reference": attention.norm_rope},
    "sdpa": {"reference": attention.causal_sdpa},
    "softmax_top_k": {"reference": router.softmax_top_k},
    "expert_ffn": {"reference": expert_ffn.expert_ffn},
    "moe_combine": {"reference": moe_combine.moe_combine},
}


@dataclass(frozen=True)
class Kernels:
    """One callable for each operation; its shapes are those of the reference's docstring."""

    causal_conv: Callable[..., Any] = causal_conv.causal_conv_silu
    normalise_qk: Callable[..., Any] = delta_gates.normalise_qk
    decay_beta: Callable[..., Any] = delta_gates.decay_beta
    gated_delta: Callable[..., Any] = gated_delta.gated_delta
    gated_rms_norm: Callable[..., Any] = delta_gates.gated_rms_norm
    norm_rope: Callable[..., Any] = attention.norm_rope
    sdpa: Callable[..., Any] = attention.causal_sdpa
    softmax_top_k: Callable[..., Any] = router.softmax_top_k
    expert_ffn: Callable[..., Any] = expert_ffn.expert_ffn
    moe_combine: Callable[..., Any] = moe_combine.moe_combine

    def names(self) -> dict[str, str]:
        """Operation -> the name of the active form, for ``--stats``."""
        return {f.name: _name_of(f.name, getattr(self, f.name)) for f in fields(self)}


def _name_of(operation: str, form: Callable[..., Any]) -> str:
    for name, known in FORMS[operation].items():
        if known is form:
            return name
    return getattr(form, "__name__", type(form).__name__)


def choose_kernels(
    choices: Mapping[str, str | Callable[..., Any]] | None = None,
    *,
    environment: str | None = None,
) -> Kernels:
    """The references, then `environment` (default ``$MOEFLUX_KERNELS``), then `choices`.

    Raises:
        InputError: An operation or a form's name is unknown.
        ShapeError: A given callable does not return the shapes and dtypes of the reference.
    """
    if environment is None:
        environment = os.environ.get(ENVIRONMENT, "")
    chosen: dict[str, str | Callable[..., Any]] = {}
    for item in filter(None, (part.strip() for part in environment.split(","))):
        operation, _, name = item.partition("=")
        if name:
            chosen[operation.strip()] = name.strip()
        elif item not in ("auto", "reference"):
            raise InputError(f"{ENVIRONMENT}: '{item}' is neither 'auto', 'reference' nor op=name.")
    chosen.update(choices or {})
    return replace(Kernels(), **{op: _resolve(op, form) for op, form in chosen.items()})


def _resolve(operation: str, form: str | Callable[..., Any]) -> Callable[..., Any]:
    if operation not in FORMS:
        raise InputError(f"no operation is called '{operation}'; there are {', '.join(FORMS)}.")
    if not isinstance(form, str):
        _check_form(operation, form)
        return form
    if form == "auto":
        return FORMS[operation]["reference"]
    if form not in FORMS[operation]:
        known = ", ".join(["auto", *FORMS[operation]])
        raise InputError(f"'{operation}' has no form '{form}'; there are {known}.")
    return FORMS[operation][form]


def _check_form(operation: str, form: Callable[..., Any]) -> None:
    """Run `form` and the reference on one small case; shapes and dtypes must agree."""
    args, kwargs = example(operation)
    expected = FORMS[operation]["reference"](*args, **kwargs)
    try:
        actual = form(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"the given '{operation}' fails on a small case: {error}.") from error
    described, wanted = _describe(actual), _describe(expected)
    if described != wanted:
        raise ShapeError(f"the given '{operation}' returns {described}, expected {wanted}.")


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_describe(v) for v in value)})"
    if isinstance(value, mx.array):
        return f"{str(value.dtype).removeprefix('mlx.core.')}{list(value.shape)}"
    return type(value).__name__


def example(operation: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Small random arguments of an operation: every size different, float32."""
    B, T, Hq, Hk, Hv, Dk, Dv, W = 2, 5, 4, 2, 6, 64, 32, 4
    N, E, K, C, F = 7, 9, 3, 64, 32
    random = mx.random.normal
    if operation == "causal_conv":
        return (random((B, T, C)), random((C, W)), random((B, W - 1, C))), {}
    if operation == "normalise_qk":
        return (random((B, T, Hk, Dk)), random((B, T, Hk, Dk))), {}
    if operation == "decay_beta":
        gates = {"a_log": random((Hv,)), "dt_bias": random((Hv,))}
        return (random((B, T, Hv)), random((B, T, Hv))), gates
    if operation == "gated_delta":
        q, k = delta_gates.normalise_qk(random((B, T, Hk, Dk)), random((B, T, Hk, Dk)))
        return (q, k, random((B, T, Hv, Dv))), {
            "log_decay": -mx.abs(random((B, T, Hv))),
            "beta": mx.sigmoid(random((B, T, Hv))),
            "state": random((B, Hv, Dv, Dk)),
        }
    if operation == "gated_rms_norm":
        return (random((B, T, Hv, Dv)), random((B, T, Hv, Dv)), random((Dv,))), {"eps": 1e-6}
    if operation == "norm_rope":
        options = {"eps": 1e-6, "dims": 16, "base": 1e4, "offset": 3}
        return (random((B, T, Hq, Dk)), random((Dk,))), options
    if operation == "sdpa":
        keys, values = random((B, Hk, T + 2, Dk)), random((B, Hk, T + 2, Dk))
        return (random((B, Hq, T, Dk)), keys, values), {"scale": 0.1, "mask": "causal"}
    if operation == "softmax_top_k":
        return (random((N, E)),), {"k": K}
    if operation == "expert_ffn":
        bank = expert_ffn.ExpertBank.of(
            {f"{p}_proj.weight": random(s) for p, s in _projection_shapes(E, C, F).items()},
            dict.fromkeys(("gate_proj", "up_proj", "down_proj")),
        )
        return (random((N, C)), mx.arange(N).astype(mx.uint32), bank), {}
    if operation == "moe_combine":
        return (random((N, C)), random((N, C))), {
            "shared": random((N, C)),
            "score": random((N, 1)),
        }
    raise InputError(f"no operation is called '{operation}'; there are {', '.join(FORMS)}.")


def _projection_shapes(E: int, C: int, F: int) -> dict[str, tuple[int, int, int]]:
    return {"gate": (E, F, C), "up": (E, F, C), "down": (E, C, F)}

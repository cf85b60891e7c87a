"""Rotary embeddings read from config.json, in either spelling. No MLX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.config import only, says_nothing
from mlx_moeflux.errors import ConfigError, UnsupportedError


def rope_keys(
    config: dict[str, Any], file: Path | str, *, partial: float, theta: float | None = None
) -> dict[str, Any]:
    """Return ``rope_theta`` (default `theta`), ``partial_rotary_factor`` (default `partial`) and
    ``yarn``, a :class:`Rope` if YaRN extends the context, else None; then also
    ``max_position_embeddings``, see :meth:`Rope.reach`.

    transformers 5 writes ``rope_parameters``; older files have ``rope_theta``, ``rope_scaling`` and
    ``partial_rotary_factor`` at the top level.

    Raises:
        ConfigError: Two places contradict each other, YaRN lacks a key, or a number is out of
            range.
        UnsupportedError: The rope is neither plain nor YaRN.
    """
    keys = ("rope_theta", "partial_rotary_factor")
    found = rope_parameters(config, file, keys)
    if theta is not None:
        found.setdefault("rope_theta", theta)
    positions = positions_of(config)
    stretched = {k: v for k, v in found.items() if k not in _NOT_OF_YARN}
    turned = found.get("partial_rotary_factor", partial)
    if type(turned) in (int, float) and not 0 < turned <= 1:
        raise ConfigError(
            f"{file}: 'partial_rotary_factor' is {turned!r}, must be more than 0 and at most 1."
        )
    # The caller names a missing base or number of positions.
    rope = Rope.of(stretched, file, theta=1e4, positions=positions)
    yarn = None if rope.factor is None else rope
    result = {"partial_rotary_factor": partial, "yarn": yarn}
    return result | {k: found[k] for k in keys if k in found} | rope.reach(positions)


def positions_of(config: dict[str, Any]) -> int:
    """Return ``max_position_embeddings``, or 0 if it is no integer, which the caller reports."""
    positions = config.get("max_position_embeddings")
    return positions if type(positions) is int else 0


def stretched(keys: dict[str, Any], yarn: Rope | None) -> dict[str, Any]:
    """Return `keys` of a config with `yarn` written as ``rope_scaling`` of config.json."""
    keys = {k: v for k, v in keys.items() if k != "yarn"}
    return keys | {"rope_scaling": None if yarn is None else yarn.published()["rope_scaling"]}


def rope_parameters(
    config: dict[str, Any], file: Path | str, flat: tuple[str, ...]
) -> dict[str, Any]:
    """Return the merged keys of ``rope_scaling``, ``rope_parameters`` and, at the top level, of
    `flat` and ``original_max_position_embeddings``.

    The result always has ``rope_type``.

    Raises:
        ConfigError: Two of the places disagree, or one is not an object.
    """
    found: dict[str, Any] = {"rope_type": "default"}
    for key in ("rope_scaling", "rope_parameters"):
        source = config.get(key)
        if source is None:
            continue
        if not isinstance(source, dict):
            raise ConfigError(f"{file}: '{key}' is {source!r}, expected an object or null.")
        found |= {k: v for k, v in source.items() if v is not None and k != "type"}
        found["rope_type"] = source.get("rope_type", source.get("type", "default"))
    for key in (*flat, ORIGINAL):
        top = config.get(key)
        if top is not None and found.setdefault(key, top) != top:
            raise ConfigError(
                f"{file}: '{key}' is {top} at the top and {found[key]} in the rope parameters; "
                "keep one."
            )
    return found


ROPE_KEYS = frozenset(["rope_theta", "rope_scaling", "rope_parameters"])
"""Keys of config.json that say what the rope is."""

ORIGINAL = "original_max_position_embeddings"
# Keys beside YaRN's; the sections of vision-language wrappers coincide for text positions.
_NOT_OF_YARN = {"partial_rotary_factor", "mrope_section", "mrope_interleaved", "finetuned"}
# vLLM's names of factors that multiply YaRN's own.
_FACTORS = ("attn_factor", "extrapolation_factor")
# Of the numbers of a rope: with others its formulas divide by zero or overflow.
LEAST, MOST = 1e-6, 1e15
YARN_KINDS = ("yarn", "deepseek_yarn")
_YARN_KEYS = {
    "factor",
    ORIGINAL,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding, plain (`factor` None), extended by YaRN, or proportional (`share` < 1).

    factor: Context length / `original`. attention_factor: Scales cosine and sine. mscale_all_dim:
    Scales the softmax; see :meth:`softmax_factor`. share: Of the pairs that turn, the first ones.

    Source: transformers 5.23 `modeling_rope_utils._compute_yarn_parameters`,
    `_compute_proportional_rope_parameters` (5.24) and
    `deepseek_v3.modeling_deepseek_v3.yarn_apply_mscale`.
    """

    theta: float
    factor: float | None = None
    original: float = 0.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    share: float = 1.0

    @classmethod
    def from_config(
        cls, config: dict[str, Any], file: Path | str, *, theta: float, positions: int
    ) -> Rope:
        """Read ``rope_scaling`` + ``rope_theta`` or ``rope_parameters``.

        theta: Default base. positions: ``max_position_embeddings``.

        Raises:
            ConfigError: A key is missing, unknown or not a number.
            UnsupportedError: The rope is neither plain nor YaRN.
        """
        return cls.of(
            rope_parameters(config, file, ("rope_theta",)), file, theta=theta, positions=positions
        )

    @classmethod
    def of(cls, found: dict[str, Any], file: Path | str, *, theta: float, positions: int) -> Rope:
        """Build a rope of the merged keys of :func:`rope_parameters`."""
        found = dict(found)
        kind, theta = found.pop("rope_type"), found.pop("rope_theta", theta)
        if kind == "default":
            return cls(theta=_base(theta, file))
        if kind not in YARN_KINDS:
            raise UnsupportedError(
                f"{file}: rope type {kind!r} is not computed; only 'default' and 'yarn'."
            )
        for key in _FACTORS:
            only(file, f"{key} of the rope", found.pop(key, 1), 1)
        unknown = sorted(key for key in set(found) - _YARN_KEYS if not says_nothing(found[key]))
        if unknown:
            raise ConfigError(f"{file}: nothing here reads {unknown[0]!r} of the rope parameters.")
        truncate = found.pop("truncate", True)
        numbers = {k: _number(v, k, file) for k, v in found.items() if k in _YARN_KEYS}
        longest = _number(positions, "max_position_embeddings", file)
        original = numbers.get(ORIGINAL) or longest
        if not original:
            raise ConfigError(f"{file}: YaRN needs '{ORIGINAL}' in the rope parameters.")
        if "factor" not in numbers:
            numbers["factor"] = longest / original
        factor = numbers["factor"]
        if not factor:
            raise ConfigError(f"{file}: 'factor' of the rope is 0, must be positive.")
        mscale, all_dim = numbers.get("mscale", 0.0), numbers.get("mscale_all_dim", 0.0)
        return cls(
            theta=_base(theta, file),
            factor=factor,
            original=original,
            attention_factor=numbers.get("attention_factor", _attention(factor, mscale, all_dim)),
            beta_fast=numbers.get("beta_fast") or 32.0,
            beta_slow=numbers.get("beta_slow") or 1.0,
            mscale=mscale,
            mscale_all_dim=all_dim,
            truncate=bool(truncate),
        )

    def reach(self, positions: int) -> dict[str, int]:
        """Return ``max_position_embeddings`` if YaRN extends the context beyond `positions`.

        Qwen's recipe adds ``rope_scaling`` and leaves ``max_position_embeddings`` alone; others
        write the extended length. The context is `original` x `factor` tokens, as in vLLM.
        """
        extended = 0 if self.factor is None else int(self.original * self.factor)
        return {"max_position_embeddings": extended} if extended > positions > 0 else {}

    def softmax_factor(self) -> float:
        """Return the factor of the softmax scale: mscale(factor, mscale_all_dim)^2."""
        if self.factor is None or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2

    def periods(self, dims: int) -> np.ndarray:
        """Return periods ``[dims / 2]`` float32: pair i rotates by position / periods[i] radians.

        YaRN divides the frequency by `factor` for a pair with fewer than `beta_slow` rotations in
        the original context, keeps it for one with more than `beta_fast`, and interpolates
        linearly in between. Pairs that do not turn have infinite periods.
        """
        periods = self.theta ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
        periods[int(self.share * dims // 2) :] = np.inf
        if self.factor is not None:
            low, high = (self._pair_of(n, dims) for n in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dims - 1)
            high += 0.001 if low == high else 0.0
            ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0.0, 1.0)
            periods = 1 / (ramp / (self.factor * periods) + (1 - ramp) / periods)
        return periods.astype(np.float32)

    def _pair_of(self, rotations: float, dims: int) -> float:
        """Return the (fractional) index of the pair with `rotations` in the original context."""
        ratio = self.original / (rotations * 2 * math.pi)
        return dims * math.log(ratio) / (2 * math.log(self.theta))

    def published(self) -> dict[str, Any]:
        """Return ``rope_theta`` and ``rope_scaling`` of config.json."""
        if self.factor is None:
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling = {
            "type": "yarn",
            "factor": self.factor,
            ORIGINAL: self.original,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
        }
        scaling |= {k: v for k in ("mscale", "mscale_all_dim") if (v := getattr(self, k))}
        if self.attention_factor != _attention(self.factor, self.mscale, self.mscale_all_dim):
            scaling["attention_factor"] = self.attention_factor
        if not self.truncate:
            scaling["truncate"] = False
        return {"rope_theta": self.theta, "rope_scaling": scaling}


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _attention(factor: float, mscale: float, all_dim: float) -> float:
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _number(value: Any, key: str, file: Path | str) -> float:
    if type(value) not in (int, float) or not (value == 0 or LEAST <= value <= MOST):
        raise ConfigError(
            f"{file}: '{key}' of the rope is {value!r}, expected 0 or {LEAST:g} to {MOST:g}."
        )
    return value


def _base(value: Any, file: Path | str) -> float:
    theta = _number(value, "rope_theta", file)
    if theta <= 1:
        raise ConfigError(f"{file}: 'rope_theta' is {theta}, must be more than 1.")
    return theta

"""config.json of Laguna: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import FULL, WINDOWED, WindowedConfig
from mlx_moeflux.models.rope import ORIGINAL, Rope, positions_of

DENSE, SPARSE = "dense", "sparse"

_GATES = (True, "per-head", "per_head")
_DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    WINDOWED: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}


@dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """The keys of config.json that this architecture uses.

    ``num_attention_heads`` and the rope are those of layers without a window; ``window_...`` are of
    the others. Without ``layer_types`` every fourth layer, from the first, has no window, and
    without ``mlp_layer_types`` the first layer is dense. Layers with a window keep all rows.

    Source of the defaults: transformers' `LagunaConfig`.
    """

    intermediate_size: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    window_attention_heads: int
    window_rope_theta: float = 1e4
    window_rotary_factor: float = 1.0
    mlp_layer_types: tuple[str, ...] = ()
    sliding_window: int = 512
    moe_routed_scaling_factor: float = 1.0

    MODEL_TYPE, ARCHITECTURE = "laguna", "LagunaForCausalLM"
    INERT: ClassVar[frozenset[str]] = frozenset(
        [
            "gating",
            "gating_types",
            "mlp_only_layers",
            "num_attention_heads_per_layer",
        ]
    )

    COMPUTED: ClassVar[dict[str, Any]] = {
        "attention_bias": False,
        "qkv_bias": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0,
        "moe_router_score_func": "sigmoid",
    }
    # The originals' and mlx-lm's.
    NAMES: ClassVar[NameRules] = NameRules(
        renames=(
            (r"\.mlp\.(gate|experts)\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),
            (r"\.mlp\.gate\.proj\.", ".mlp.gate."),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
        experts=EXPERT_NAMES,
    )

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.from_dict`."""
        parsed = super().from_dict(config, file=file, strict=strict)
        dense = [i for i in range(parsed.num_hidden_layers) if not parsed.is_sparse(i)]
        if config.get("mlp_only_layers") not in (None, dense):
            raise ConfigError(
                f"{file}: 'mlp_only_layers' is {config['mlp_only_layers']} and the dense layers of "
                f"'mlp_layer_types' are {dense}; keep one."
            )
        if (heads := config.get("num_attention_heads_per_layer")) is None:
            return parsed
        full, windowed = _heads(heads, parsed, file)
        return replace(parsed, num_attention_heads=full, window_attention_heads=windowed)

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`."""
        gates = config.get("gating_types") or []
        for gate in (config.get("gating", True), *(gates if isinstance(gates, list) else [gates])):
            if gate not in _GATES:
                only(file, "gating", gate, "per-head")
        if config.get("layer_types") in (None, []):
            raise ConfigError(f"{file}: the key 'layer_types' is missing; add it.")
        keys = {k: v for k, v in config.items() if v is not None}
        return keys | {"window_attention_heads": keys.get("num_attention_heads")}

    @classmethod
    def ropes(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.ropes`."""
        return _ropes(config, file)

    def check(self, file: Path | str) -> None:
        """See :meth:`BaseConfig.check`."""
        super().check(file)
        kinds = self.mlp_layer_types
        if kinds and (len(kinds) != self.num_hidden_layers or {*kinds} - {DENSE, SPARSE}):
            raise ConfigError(
                f"{file}: 'mlp_layer_types' must have {DENSE!r} or {SPARSE!r} for each of "
                f"{self.num_hidden_layers} layers."
            )
        turned = int(self.head_dim * self.window_rotary_factor)
        if turned < 2 or turned % 2:
            raise ConfigError(
                f"{file}: 'partial_rotary_factor' of {WINDOWED!r} turns {turned} of a head's "
                "dimensions; it must be an even number."
            )

    @property
    def shared_intermediate_size(self) -> int:
        """See :attr:`BaseConfig.shared_intermediate_size`."""
        return self.shared_expert_intermediate_size

    def has_window(self, layer: int) -> bool:
        """See :meth:`~mlx_moeflux.models.config.WindowedConfig.has_window`."""
        return layer % 4 != 0

    def is_sparse(self, layer: int) -> bool:
        """Return True if `layer` has a MoE block, False if it has a dense MLP."""
        return self.mlp_layer_types[layer] == SPARSE if self.mlp_layer_types else layer > 0

    def of_layer(self, layer: int) -> Config:
        """Return this config with heads and rope of `layer` in the keys that
        :class:`~mlx_moeflux.models.attention.Attention` reads."""
        if self.window(layer) is None:
            return self
        return replace(
            self,
            num_attention_heads=self.window_attention_heads,
            rope_theta=self.window_rope_theta,
            partial_rotary_factor=self.window_rotary_factor,
            yarn=None,
        )

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        keys, layers = super().published(), range(self.num_hidden_layers)
        scaling = keys.pop("rope_scaling") or {"type": "default"}
        full = {"rope_type": scaling.pop("type"), "rope_theta": keys.pop("rope_theta")} | scaling
        full["partial_rotary_factor"] = keys.pop("partial_rotary_factor")
        windows = {"rope_type": "default", "rope_theta": keys.pop("window_rope_theta")}
        windows["partial_rotary_factor"] = keys.pop("window_rotary_factor")
        del keys["window_attention_heads"]
        return keys | {
            "gating": True,
            "layer_types": self.kinds(),
            "mlp_layer_types": [SPARSE if self.is_sparse(i) else DENSE for i in layers],
            "num_attention_heads_per_layer": [self.of_layer(i).num_attention_heads for i in layers],
            "rope_parameters": {FULL: full, WINDOWED: windows},
        }


def _heads(found: Any, config: Config, file: Path | str) -> tuple[int, int]:
    """Return the heads of layers without a window and of the others."""
    layers, rows = range(config.num_hidden_layers), config.num_key_value_heads
    if not isinstance(found, list) or len(found) != len(layers):
        raise ConfigError(
            f"{file}: 'num_attention_heads_per_layer' must list {len(layers)} layers."
        )
    wrong = next((n for n in found if type(n) is not int or n < 1 or n % rows), None)
    if wrong is not None:
        raise ConfigError(
            f"{file}: 'num_attention_heads_per_layer' has {wrong!r}, expected multiples of "
            f"'num_key_value_heads' {rows}."
        )
    kinds = [[n for i, n in enumerate(found) if (config.window(i) is None) == full]
             for full in (True, False)]  # fmt: skip
    for numbers in kinds:
        for n in numbers:
            only(file, "num_attention_heads_per_layer of layers of a kind", n, numbers[0])
    full, windowed = (n[0] if n else config.num_attention_heads for n in kinds)
    return full, windowed


def _ropes(keys: dict[str, Any], file: Path | str) -> dict[str, Any]:
    """Return the rope's keys and what :meth:`Rope.reach` gives, of ``rope_parameters``."""
    both = keys.get("rope_parameters", _DEFAULT_ROPES)
    for key in ("rope_theta", "rope_scaling"):
        if key in keys:
            raise ConfigError(
                f"{file}: '{key}' is at the top; ropes are in 'rope_parameters', one for each kind "
                "of layer."
            )
    if not isinstance(both, dict) or both.keys() - {FULL, WINDOWED, ORIGINAL}:
        raise ConfigError(
            f"{file}: 'rope_parameters' must be an object with {FULL!r} and {WINDOWED!r}."
        )
    positions, found = positions_of(keys), {}
    for kind in (FULL, WINDOWED):
        rope = both.get(kind)
        if not isinstance(rope, dict) or "rope_theta" not in rope:
            raise ConfigError(
                f"{file}: 'rope_parameters' must have an object with 'rope_theta' for {kind!r}."
            )
        rope = {"rope_type": "default"} | {k: v for k, v in rope.items() if v is not None}
        turned = rope.pop("partial_rotary_factor", 1.0)
        if type(turned) not in (int, float) or not 0 < turned <= 1:
            raise ConfigError(
                f"{file}: 'partial_rotary_factor' of {kind!r} is {turned!r}, must be more than 0 "
                "and at most 1."
            )
        found[kind] = Rope.of(rope, file, theta=0.0, positions=positions), float(turned)
    (full, share), (windowed, window_share) = found[FULL], found[WINDOWED]
    only(file, f"rope_type of {WINDOWED!r}", "yarn" if windowed.factor else "default", "default")
    only(file, "partial_rotary_factor", keys.get("partial_rotary_factor", share), share)
    return full.reach(positions) | {
        "rope_theta": full.theta,
        "partial_rotary_factor": share,
        "yarn": None if full.factor is None else full,
        "window_rope_theta": windowed.theta,
        "window_rotary_factor": window_share,
    }

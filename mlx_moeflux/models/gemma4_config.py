"""config.json of Gemma-4's models with experts: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import only, says_nothing
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, NameRules
from mlx_moeflux.errors import ConfigError, UnsupportedError
from mlx_moeflux.models.config import FULL, WINDOWED, WRAPPER_PREFIXES, WindowedConfig, unwrapped
from mlx_moeflux.models.rope import Rope
from mlx_moeflux.state_arrays import ATTENTION, EntrySpec

GELU = "gelu_pytorch_tanh"
TEXT_TYPE = "gemma4_text"

# What transformers takes where a key is missing, and is not computed.
_DEFAULTS = {"enable_moe_block": False, "hidden_size_per_layer_input": 256}
_DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
# Names of ours -> Gemma-4's.
_NAMES = {"num_experts_per_tok": "top_k_experts", "hidden_act": "hidden_activation"}
_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


@dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """The keys of config.json that this architecture uses.

    ``head_dim``, ``num_key_value_heads`` and ``rope_theta`` are those of layers with a window;
    ``global_...`` are of the others, whose rope turns ``global_rotary_share`` of a head's pairs.
    ``intermediate_size`` is the dense MLP's beside the experts. Layers with a window keep all rows.

    Source of the defaults: transformers' `Gemma4TextConfig`.
    """

    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_global_key_value_heads: int
    global_head_dim: int = 512
    global_rope_theta: float = 1e6
    global_rotary_share: float = 0.25
    attention_k_eq_v: bool = False
    sliding_window: int = 512
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True
    hidden_act: str = GELU

    MODEL_TYPE, ARCHITECTURE = "gemma4", "Gemma4ForConditionalGeneration"
    ACTIVATION: ClassVar[str] = GELU
    COMPUTED: ClassVar[dict[str, Any]] = {
        "enable_moe_block": True,
        "hidden_activation": GELU,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_bias": False,
    }
    # The width of the MLP and the vocabulary of inputs are of models that are not computed, the
    # rest is of images and sounds.
    INERT: ClassVar[frozenset[str]] = frozenset(
        [
            "top_k_experts",
            "per_layer_config",
            "use_bidirectional_attention",
            "use_double_wide_mlp",
            "vocab_size_per_layer_input",
            "vision_config",
            "audio_config",
            "vision_soft_tokens_per_image",
        ]
    )

    # Router, experts and the norms around them are parts of the MoE block; tensors of images and
    # sounds are dropped.
    NAMES: ClassVar[NameRules] = NameRules(
        prefixes=WRAPPER_PREFIXES,
        renames=(
            (r"(\.layers\.\d+)\.router\.proj\.", r"\1.mlp.gate."),
            (r"(\.layers\.\d+)\.router\.scale$", r"\1.mlp.gate_norm.scale"),
            (r"(\.layers\.\d+)\.router\.per_expert_scale$", r"\1.mlp.per_expert_scale"),
            (r"(\.layers\.\d+)\.experts\.switch_glu\.", r"\1.mlp.switch_mlp."),
            (r"(\.layers\.\d+)\.experts\.", r"\1.mlp.experts."),
            (r"(\.layers\.\d+)\.(pre|post)_feedforward_", r"\1.mlp.\2_feedforward_"),
        ),
        drops=(r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*",),
        experts=EXPERT_NAMES,
    )

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.from_dict`; plain or wrapped in
        ``text_config``."""
        if isinstance(inner := config.get("text_config"), dict):
            only(file, "text_config.model_type", inner.get("model_type", TEXT_TYPE), TEXT_TYPE)
        text = _DEFAULTS | unwrapped(config)
        if text["enable_moe_block"] is False:
            raise UnsupportedError(
                f"{file}: 'enable_moe_block' is False; only True is computed. mlx-lm runs it, a "
                "dense model."
            )
        parsed = super().from_dict(text, file=file, strict=strict)
        if overrides := _overrides(text, file):
            parsed._check_overrides(overrides, file)
        return parsed

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.read_keys`."""
        if config.get("use_bidirectional_attention") != "vision":  # of images alone
            both = config.get("use_bidirectional_attention")
            only(file, "use_bidirectional_attention", both, None)
        overrides = _overrides(config, file)
        return config | _chosen(config, file) | _global_heads(config, overrides, file)

    @classmethod
    def ropes(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.ropes`."""
        return _ropes(config, file)

    def _check_overrides(self, overrides: dict[int, dict[str, Any]], file: Path | str) -> None:
        last, values = self.num_hidden_layers - 1, list(overrides.values())
        of_global = all(i <= last and self.window(i) is None for i in overrides)
        # It ends at the first layer that has none, however many layers there are.
        whole = of_global and all(i in overrides for i in range(last + 1) if self.window(i) is None)
        if not whole or any(value != values[0] for value in values):
            raise ConfigError(
                f"{file}: 'per_layer_config' must have the same keys for every layer of {FULL!r} "
                "and none for others."
            )

    def check(self, file: Path | str) -> None:
        """See :meth:`BaseConfig.check`."""
        super().check(file)
        if self.layer_types and self.layer_types[-1] != FULL:
            raise ConfigError(
                f"{file}: 'layer_types' ends with {self.layer_types[-1]!r}; the last layer must be "
                f"{FULL!r}."
            )
        if self.num_attention_heads % self.num_global_key_value_heads:
            raise ConfigError(
                f"{file}: 'num_global_key_value_heads' {self.num_global_key_value_heads} does not "
                f"divide 'num_attention_heads' {self.num_attention_heads}."
            )
        for key in ("head_dim", "global_head_dim"):
            if getattr(self, key) % 2:
                raise ConfigError(f"{file}: '{key}' is {getattr(self, key)}, must be even.")
        cap = self.final_logit_softcapping
        if cap is not None and cap <= 0:
            raise ConfigError(
                f"{file}: 'final_logit_softcapping' is {cap}, must be positive, or null."
            )

    @property
    def shared_intermediate_size(self) -> int:
        """See :attr:`BaseConfig.shared_intermediate_size`: the dense MLP is for all tokens."""
        return self.intermediate_size

    def has_window(self, layer: int) -> bool:
        """See :meth:`~mlx_moeflux.models.config.WindowedConfig.has_window`."""
        return layer != self.num_hidden_layers - 1 and (layer + 1) % 6 != 0

    def of_layer(self, layer: int) -> Config:
        """Return this config with heads and rope of `layer` in the keys that
        :class:`~mlx_moeflux.models.attention.Attention` reads."""
        if self.window(layer) is not None:
            return self
        return replace(
            self,
            head_dim=self.global_head_dim,
            num_key_value_heads=self.num_global_key_value_heads,
            rope_theta=self.global_rope_theta,
            yarn=Rope(theta=self.global_rope_theta, share=self.global_rotary_share),
        )

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """See :meth:`BaseConfig.state`."""
        own = self.of_layer(layer)
        rows = own.num_key_value_heads, own.head_dim
        return ATTENTION.spec(dtype, keys=rows, values=rows)

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json in the wrapper's form."""
        text = {_NAMES.get(key, key): value for key, value in asdict(self).items()}
        for key in ("yarn", "partial_rotary_factor"):
            del text[key]
        text["rope_parameters"] = {
            WINDOWED: _DEFAULT_ROPES[WINDOWED] | {"rope_theta": text.pop("rope_theta")},
            FULL: _DEFAULT_ROPES[FULL]
            | {"rope_theta": text.pop("global_rope_theta")}
            | {"partial_rotary_factor": text.pop("global_rotary_share")},
        }
        text["layer_types"] = self.kinds()
        text |= self.COMPUTED
        return {
            "architectures": [self.ARCHITECTURE],
            "model_type": self.MODEL_TYPE,
            "eos_token_id": self.vocab_size - 1,
            "tie_word_embeddings": self.tie_word_embeddings,
            # mlx-lm reads it here.
            "vocab_size": self.vocab_size,
            "text_config": text | {"model_type": TEXT_TYPE},
        }


def _chosen(text: dict[str, Any], file: Path | str) -> dict[str, Any]:
    """Return ``num_experts_per_tok``."""
    chosen = text.get("top_k_experts")
    if chosen is None:
        raise ConfigError(f"{file}: the key 'top_k_experts' is missing; add it.")
    if (other := text.get("num_experts_per_tok")) not in (None, chosen):
        raise ConfigError(
            f"{file}: 'top_k_experts' is {chosen!r} and 'num_experts_per_tok' {other!r}; keep the "
            "first."
        )
    if type(chosen) is not int:
        raise ConfigError(f"{file}: 'top_k_experts' is {chosen!r}, expected int.")
    return {"num_experts_per_tok": chosen}


def _ropes(text: dict[str, Any], file: Path | str) -> dict[str, Any]:
    """Return ``rope_theta``, ``partial_rotary_factor`` and the global keys of ``rope_parameters``.

    Source: transformers 5.24 `Gemma4TextRotaryEmbedding`: the plain rope turns whole heads.
    """
    for key in ("rope_theta", "partial_rotary_factor", "rope_scaling"):
        if text.get(key) is not None:
            raise ConfigError(
                f"{file}: '{key}' is at the top; ropes are in 'rope_parameters', one for each kind "
                "of layer."
            )
    both = _DEFAULT_ROPES if text.get("rope_parameters") is None else text["rope_parameters"]
    found = {}
    for kind, default in _DEFAULT_ROPES.items():
        rope = both.get(kind) if isinstance(both, dict) else None
        if not isinstance(rope, dict) or "rope_theta" not in rope:
            raise ConfigError(
                f"{file}: 'rope_parameters' must have an object with 'rope_theta' for {kind!r}."
            )
        at, turned = f"rope_parameters.{kind}", rope.get("partial_rotary_factor")
        name = rope.get("rope_type", "default")
        if name != "default":
            only(file, f"{at}.rope_type", name, default["rope_type"])
        known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
        unknown = [k for k, v in rope.items() if k not in known and not says_nothing(v)]
        if unknown:
            raise ConfigError(f"{file}: nothing here reads '{at}.{unknown[0]}'.")
        only(file, f"{at}.factor", rope.get("factor") or 1, 1)
        if name == "default":
            only(file, f"{at}.partial_rotary_factor", 1 if turned is None else turned, 1)
        if turned is not None and (type(turned) not in (int, float) or not 0 < turned <= 1):
            raise ConfigError(
                f"{file}: '{at}.partial_rotary_factor' is {turned!r}, must be more than 0 and at "
                "most 1."
            )
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        theta = Rope.of(plain, file, theta=0.0, positions=0).theta
        found[kind] = float(theta), 1.0 if turned is None else float(turned)
    return {
        "rope_theta": found[WINDOWED][0],
        "partial_rotary_factor": 1.0,
        "yarn": None,
        "global_rope_theta": found[FULL][0],
        "global_rotary_share": found[FULL][1],
    }


def _overrides(text: dict[str, Any], file: Path | str) -> dict[int, dict[str, Any]]:
    """Return ``per_layer_config``, as transformers 5.24 writes the heads of global layers."""
    found = text.get("per_layer_config") or {}
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise ConfigError(f"{file}: 'per_layer_config' must be an object of objects.")
    unknown = [key for value in found.values() for key in value if key not in _HEADS]
    if unknown:
        raise ConfigError(f"{file}: nothing here reads {unknown[0]!r} of 'per_layer_config'.")
    if not all(layer.isdecimal() and len(layer) < 10 for layer in found):
        raise ConfigError(f"{file}: the keys of 'per_layer_config' must be numbers of layers.")
    return {int(layer): value for layer, value in found.items()}


def _global_heads(
    text: dict[str, Any], overrides: dict[int, dict[str, Any]], file: Path | str
) -> dict[str, Any]:
    """Return ``global_head_dim``, where config.json has it, and ``num_global_key_value_heads``."""
    layer = next(iter(overrides.values()), {})
    for name, key in _HEADS.items():
        here, there = text.get(key), layer.get(name)
        if None not in (here, there) and here != there:
            raise ConfigError(
                f"{file}: '{key}' is {here!r} and '{name}' of 'per_layer_config' {there!r}; keep "
                "one."
            )
    size = layer.get("head_dim", text.get("global_head_dim"))
    heads = layer.get("num_key_value_heads")
    if heads is None and text.get("attention_k_eq_v"):
        heads = text.get("num_global_key_value_heads")
    if heads is None:
        heads = text.get("num_key_value_heads")
    return {"num_global_key_value_heads": heads} | (
        {} if size is None else {"global_head_dim": size}
    )

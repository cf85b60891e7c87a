"""config.json of gpt-oss: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.checkpoint.names import Experts, NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import AttentionConfig, check_layer_types
from mlx_moeflux.models.rope import rope_keys

WINDOWED, FULL = "sliding_attention", "full_attention"
_AT = r"model\.layers\.(?P<layer>\d{1,9})\.mlp\.experts\."


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """The keys of config.json that this architecture uses; ``intermediate_size`` is an expert's.

    Layers with a window keep all rows. Source of the defaults: transformers' `GptOssConfig`.
    """

    intermediate_size: int
    num_local_experts: int
    layer_types: tuple[str, ...] = ()
    sliding_window: int = 128
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True

    MODEL_TYPE, ARCHITECTURE = "gpt_oss", "GptOssForCausalLM"
    INERT: ClassVar[frozenset[str]] = frozenset(
        ["experts_per_token", "initial_context_length", "rope_scaling", "rope_parameters"]
    )
    EXPERTS_KEY: ClassVar[str] = "num_local_experts"
    EXPERTS_MODE: ClassVar[str | None] = "mxfp4"
    EXPERTS_BIAS: ClassVar[bool] = True

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Config:
        """Read config.json.

        Raises:
            ConfigError: A key is missing, wrong, contradictory or (when `strict`) unknown.
            UnsupportedError: The checkpoint uses something this architecture does not compute.
        """
        keys = {k: v for k, v in config.items() if v is not None}
        keys |= {"rope_theta": 150000.0} | rope_keys(keys, file, partial=1.0)
        parsed = cls.parse(keys, file=file, strict=strict)
        only(file, "partial_rotary_factor", parsed.partial_rotary_factor, 1.0)
        if keys.get("experts_per_token", parsed.num_experts_per_tok) != parsed.num_experts_per_tok:
            raise ConfigError(
                f"{file}: 'experts_per_token' is {keys['experts_per_token']} and "
                f"'num_experts_per_tok' {parsed.num_experts_per_tok}; keep one."
            )
        check_layer_types(parsed, file, WINDOWED, FULL)
        return parsed

    @property
    def num_experts(self) -> int:
        return self.num_local_experts

    @property
    def moe_intermediate_size(self) -> int:
        return self.intermediate_size

    @property
    def windowed(self) -> bool:
        """See :attr:`BaseConfig.windowed`."""
        return True

    def window(self, layer: int) -> int | None:
        """Return the sliding window of `layer` in tokens, the current one included; None for full
        attention."""
        windowed = self.layer_types[layer] == WINDOWED if self.layer_types else layer % 2 == 0
        return self.sliding_window if windowed else None

    def is_sparse(self, layer: int) -> bool:
        """Return True: every layer has a MoE block."""
        return True

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        keys = super().published()
        del keys["partial_rotary_factor"]
        layers = range(self.num_hidden_layers)
        return keys | {
            "layer_types": [FULL if self.window(i) is None else WINDOWED for i in layers]
        }

    def name_rules(self) -> NameRules:
        """Return the rename rules of tensor names: mlx-lm's stacks, MXFP4 as published, and the
        float tensors that transformers writes, which are transposed."""
        both, weights = ("gate_proj", "up_proj"), ("gate_proj.weight", "up_proj.weight")
        experts = (
            Experts(
                _AT + r"(?P<projection>gate_proj|up_proj|down_proj)"
                r"\.(?P<part>weight|scales|biases|global_scale|bias)"
            ),
            Experts(_AT + r"gate_up_proj\.(?P<part>weight|scales)", both, interleaved=True),
            Experts(_AT + r"gate_up_proj_(?P<part>bias)", both, interleaved=True),
            Experts(_AT + r"(?P<projection>down_proj)_(?P<part>bias)"),
            Experts(_AT + "gate_up_proj", weights, interleaved=True, transposed=True),
            Experts(_AT + "down_proj", ("down_proj.weight",), transposed=True),
        )
        return NameRules(renames=((r"\.mlp\.router\.", ".mlp.gate."),), experts=experts)

"""config.json of gpt-oss: keys, defaults and checks. No MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import only
from mlx_moeflux.checkpoint.names import Experts, NameRules
from mlx_moeflux.errors import ConfigError
from mlx_moeflux.models.config import WindowedConfig

_BOTH = ("gate_proj", "up_proj")
_AT = r"model\.layers\.(?P<layer>\d{1,9})\.mlp\.experts\."


@dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """The keys of config.json that this architecture uses; ``intermediate_size`` is an expert's.

    Layers with a window keep all rows. Source of the defaults: transformers' `GptOssConfig`.
    """

    intermediate_size: int
    num_local_experts: int
    sliding_window: int = 128
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True

    MODEL_TYPE, ARCHITECTURE = "gpt_oss", "GptOssForCausalLM"
    INERT: ClassVar[frozenset[str]] = frozenset(["experts_per_token", "initial_context_length"])
    EXPERTS_KEY: ClassVar[str] = "num_local_experts"
    EXPERTS_MODE: ClassVar[str | None] = "mxfp4"
    EXPERTS_BIAS: ClassVar[bool] = True
    THETA: ClassVar[float] = 150000.0

    # mlx-lm's stacks, MXFP4 as published, and the float tensors that transformers writes, which are
    # transposed.
    NAMES: ClassVar[NameRules] = NameRules(
        renames=((r"\.mlp\.router\.", ".mlp.gate."),),
        experts=(
            Experts(
                _AT + r"(?P<projection>gate_proj|up_proj|down_proj)"
                r"\.(?P<part>weight|scales|biases|global_scale|bias)"
            ),
            Experts(_AT + r"gate_up_proj\.(?P<part>weight|scales)", _BOTH, interleaved=True),
            Experts(_AT + r"gate_up_proj_(?P<part>bias)", _BOTH, interleaved=True),
            Experts(_AT + r"(?P<projection>down_proj)_(?P<part>bias)"),
            Experts(
                _AT + "gate_up_proj",
                ("gate_proj.weight", "up_proj.weight"),
                interleaved=True,
                transposed=True,
            ),
            Experts(_AT + "down_proj", ("down_proj.weight",), transposed=True),
        ),
    )

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.from_dict`."""
        parsed = super().from_dict(config, file=file, strict=strict)
        given, chosen = config.get("experts_per_token"), parsed.num_experts_per_tok
        if given not in (None, chosen):
            raise ConfigError(
                f"{file}: 'experts_per_token' is {given} and 'num_experts_per_tok' {chosen}; keep "
                "one."
            )
        return parsed

    def check(self, file: Path | str) -> None:
        """See :meth:`~mlx_moeflux.models.config.BaseConfig.check`."""
        super().check(file)
        only(file, "partial_rotary_factor", self.partial_rotary_factor, 1.0)

    @property
    def num_experts(self) -> int:
        return self.num_local_experts

    @property
    def moe_intermediate_size(self) -> int:
        return self.intermediate_size

    def has_window(self, layer: int) -> bool:
        """See :meth:`~mlx_moeflux.models.config.WindowedConfig.has_window`."""
        return layer % 2 == 0

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        keys = super().published()
        del keys["partial_rotary_factor"]
        return keys | {"layer_types": self.kinds()}

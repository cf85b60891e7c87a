"""Keys of config.json that families share, with their checks. No MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import divides, not_negative, only, parse_config, positive
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, ROTARY_BUFFERS, NameRules
from mlx_moeflux.checks import is_positive
from mlx_moeflux.errors import ConfigError, InputError, UnsupportedError
from mlx_moeflux.models.rope import ROPE_KEYS, Rope, rope_keys, stretched
from mlx_moeflux.state_arrays import ATTENTION, EntrySpec

WINDOWED, FULL = "sliding_attention", "full_attention"
WRAPPER_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Prefixes of a text model's tensors in a vision-language wrapper, and what they become."""


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The keys that every family uses. A subclass is one family: it adds its own, names its
    architecture, and defines ``ropes`` and ``state``.

    INERT: Keys that are read elsewhere or change nothing, beside those of the rope.
    COMPUTED: Key -> the only value that is computed, which is taken where it is missing.
    NAMES: Rename rules of tensor names that do not depend on the config.
    EXPERTS_KEY: Name of the number of experts.
    EXPERTS_MODE: Mode in which the experts are published; None: as the trunk is.
    EXPERTS_BIAS: Whether the experts have biases.
    LAYER_KEYS: Numbers of layers that a checkpoint holds.
    MAY_BE_ZERO: Sizes that need not be positive.
    ACTIVATION: The only ``hidden_act`` that is computed.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_experts_per_tok: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"

    MODEL_TYPE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]
    INERT: ClassVar[frozenset[str]] = frozenset()
    COMPUTED: ClassVar[dict[str, Any]] = {}
    NAMES: ClassVar[NameRules] = NameRules(experts=EXPERT_NAMES)
    EXPERTS_KEY: ClassVar[str] = "num_experts"
    EXPERTS_MODE: ClassVar[str | None] = None
    EXPERTS_BIAS: ClassVar[bool] = False
    LAYER_KEYS: ClassVar[tuple[str, ...]] = ("num_hidden_layers",)
    MAY_BE_ZERO: ClassVar[frozenset[str]] = frozenset()
    ACTIVATION: ClassVar[str] = "silu"

    @classmethod
    def from_dict(cls, config: dict[str, Any], *, file: Path | str, strict: bool = True) -> Self:
        """Read config.json.

        Raises:
            ConfigError: A key is missing, wrong, contradictory or (when `strict`) unknown.
            UnsupportedError: The checkpoint uses something this architecture does not compute.
        """
        for key, computed in cls.COMPUTED.items():
            only(file, key, config.get(key, computed), computed)
        keys = cls.read_keys(config, file)
        inert = cls.INERT | cls.COMPUTED.keys() | ROPE_KEYS
        ropes = cls.ropes(keys, file)
        parsed = parse_config(cls, keys | ropes, file=file, inert=inert, strict=strict)
        parsed.check(file)
        return parsed

    @classmethod
    def read_keys(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """Return the keys of config.json with those that the fields name otherwise."""
        return config

    @classmethod
    def ropes(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """Return the fields that describe rotary embeddings, and ``max_position_embeddings`` if
        they extend it."""
        raise NotImplementedError

    def check(self, file: Path | str) -> None:
        """Raise what :meth:`from_dict` does for fields that contradict each other."""
        only(file, "hidden_act", self.hidden_act, self.ACTIVATION)
        sizes = [field.name for field in fields(self) if field.type in ("int", "float")]
        positive(self, file, *(name for name in sizes if name not in self.MAY_BE_ZERO))
        not_negative(self, file, *self.MAY_BE_ZERO)
        experts = getattr(self, self.EXPERTS_KEY)
        if self.num_experts_per_tok > experts:
            raise ConfigError(
                f"{file}: 'num_experts_per_tok' {self.num_experts_per_tok} is more than "
                f"'{self.EXPERTS_KEY}' {experts}."
            )

    def check_context(self, name: str, limit: int) -> None:
        """Raise an InputError unless a sequence may have `limit` tokens. name: Of the option."""
        longest = self.max_position_embeddings
        if not 1 <= limit <= longest:
            raise InputError(f"{name} is {limit}; this model allows 1 to {longest}.")

    def published(self) -> dict[str, Any]:
        """Return the keys of config.json."""
        kind = {"architectures": [self.ARCHITECTURE], "model_type": self.MODEL_TYPE}
        return kind | asdict(self) | {"eos_token_id": self.vocab_size - 1}

    def name_rules(self) -> NameRules:
        """Return the rename rules of tensor names."""
        return self.NAMES

    def is_sparse(self, layer: int) -> bool:
        """Return True if `layer` has a MoE block, False if it has a dense MLP."""
        return True

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """Return the arrays of a sequence's state in `layer`. dtype: The model's, a safetensors
        code."""
        raise NotImplementedError

    def state_bytes(self, positions: int) -> int:
        """Return the bytes of a sequence's state after so many tokens of a model in bfloat16."""
        layers = range(self.num_hidden_layers)
        return sum(self.state(layer, "BF16").nbytes(positions) for layer in layers)

    def prediction(self) -> Self | None:
        """Return the config of a model of one layer, which is that of a head of multi-token
        prediction; None: the family's heads are not computed."""
        return None

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared experts together; 0 for none."""
        return 0

    @property
    def windowed(self) -> bool:
        """True if the attention of a layer has a window."""
        return False


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(BaseConfig):
    """The keys of families with grouped-query attention; every layer has keys and values unless
    :meth:`state` says otherwise.

    ROTARY_FACTOR, THETA: ``partial_rotary_factor`` and ``rope_theta`` where config.json does not
    say them.
    """

    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    partial_rotary_factor: float
    yarn: Rope | None = None

    ROTARY_FACTOR: ClassVar[float] = 1.0
    THETA: ClassVar[float | None] = None

    @classmethod
    def ropes(cls, config: dict[str, Any], file: Path | str) -> dict[str, Any]:
        """See :meth:`BaseConfig.ropes`."""
        return rope_keys(config, file, partial=cls.ROTARY_FACTOR, theta=cls.THETA)

    def check(self, file: Path | str) -> None:
        """See :meth:`BaseConfig.check`."""
        super().check(file)
        divides(self, file, "num_key_value_heads", "num_attention_heads")
        turned = self.rotary_dims
        if turned < 2 or turned % 2:
            raise ConfigError(
                f"{file}: 'partial_rotary_factor' turns {turned} of a head's dimensions; it must "
                "be an even number."
            )

    def published(self) -> dict[str, Any]:
        """See :meth:`BaseConfig.published`."""
        return stretched(super().published(), self.yarn)

    @property
    def rotary_dims(self) -> int:
        """Numbers of a head that the rotary embedding turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """See :meth:`BaseConfig.state`. Layers with a window keep all rows."""
        rows = self.num_key_value_heads, self.head_dim
        return ATTENTION.spec(dtype, keys=rows, values=rows)


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(AttentionConfig):
    """The keys of families of which some layers have a sliding window. Without ``layer_types``,
    :meth:`has_window` says which."""

    sliding_window: int
    layer_types: tuple[str, ...] = ()

    def has_window(self, layer: int) -> bool:
        """Return True if `layer` has a window by default."""
        raise NotImplementedError

    def check(self, file: Path | str) -> None:
        """See :meth:`BaseConfig.check`."""
        super().check(file)
        check_layer_types(self, file, WINDOWED, FULL)

    @property
    def windowed(self) -> bool:
        """See :attr:`BaseConfig.windowed`."""
        return True

    def window(self, layer: int) -> int | None:
        """Return the sliding window of `layer` in tokens, the current one included; None for full
        attention."""
        kinds = self.layer_types
        windowed = kinds[layer] == WINDOWED if kinds else self.has_window(layer)
        return self.sliding_window if windowed else None

    def kinds(self) -> list[str]:
        """Return ``layer_types`` of every layer."""
        layers = range(self.num_hidden_layers)
        return [FULL if self.window(layer) is None else WINDOWED for layer in layers]


@dataclass(frozen=True, kw_only=True)
class GroupedExpertsConfig(BaseConfig):
    """The keys of DeepSeek-V3's MoE blocks: a sigmoid router that chooses among groups, shared
    experts, dense layers first, and layers of multi-token prediction last."""

    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int | None = 1
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1

    COMPUTED: ClassVar[dict[str, Any]] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    NAMES: ClassVar[NameRules] = NameRules(drops=(ROTARY_BUFFERS,), experts=EXPERT_NAMES)
    EXPERTS_KEY: ClassVar[str] = "n_routed_experts"
    LAYER_KEYS: ClassVar[tuple[str, ...]] = ("num_hidden_layers", "num_nextn_predict_layers")
    MAY_BE_ZERO: ClassVar[frozenset[str]] = frozenset(
        ["first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"]
    )

    def check(self, file: Path | str) -> None:
        """See :meth:`BaseConfig.check`: groups divide the experts and hold as many as a token
        takes."""
        super().check(file)
        divides(self, file, "n_group", "n_routed_experts")
        if self.topk_group > self.n_group:
            raise ConfigError(
                f"{file}: 'topk_group' {self.topk_group} is more than 'n_group' {self.n_group}."
            )
        group = self.n_routed_experts // self.n_group
        if self.num_experts_per_tok > self.topk_group * group:
            raise ConfigError(
                f"{file}: 'num_experts_per_tok' {self.num_experts_per_tok} is more than the "
                f"{self.topk_group} groups of {group} experts that take part have."
            )
        if group < 2 and self.topk_group < self.n_group:
            raise ConfigError(f"{file}: 'n_group' {self.n_group} leaves groups of one expert.")

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts

    @property
    def shared_intermediate_size(self) -> int:
        """See :attr:`BaseConfig.shared_intermediate_size`."""
        return self.moe_intermediate_size * (self.n_shared_experts or 0)

    def is_sparse(self, layer: int) -> bool:
        """See :meth:`BaseConfig.is_sparse`."""
        return layer >= self.first_k_dense_replace

    def prediction(self) -> Self:
        """See :meth:`BaseConfig.prediction`; the layer has experts."""
        return replace(
            self, num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0
        )

    def name_rules(self) -> NameRules:
        """See :meth:`BaseConfig.name_rules`; layers of multi-token prediction are none of the
        model's."""
        return replace(
            self.NAMES,
            layers=self.num_hidden_layers,
            predictions=self.num_nextn_predict_layers,
        )


@dataclass(frozen=True, kw_only=True)
class SteppedExpertsConfig(BaseConfig):
    """The keys of families with a MoE block in every ``decoder_sparse_step``-th layer."""

    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1

    def is_sparse(self, layer: int) -> bool:
        """See :meth:`BaseConfig.is_sparse`."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of ``text_config`` at the top, or as it is if it is no
    wrapper. The wrapper's ``tie_word_embeddings`` wins."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = {k: v for k, v in config.items() if k not in ("text_config", "model_type")}
    tied = {k: v for k, v in outer.items() if k == "tie_word_embeddings"}
    return outer | inner | tied


def check_layer_types(config: Any, file: Path | str, *kinds: str) -> None:
    """Check that ``layer_types``, unless it is empty, names a kind for every layer.

    Raises:
        ConfigError: It names more or fewer layers than there are.
        UnsupportedError: A layer is none of `kinds`.
    """
    if config.layer_types and len(config.layer_types) != config.num_hidden_layers:
        raise ConfigError(
            f"{file}: 'layer_types' names {len(config.layer_types)} layers, 'num_hidden_layers' is "
            f"{config.num_hidden_layers}."
        )
    unknown = next((kind for kind in config.layer_types if kind not in kinds), None)
    if unknown is not None:
        raise UnsupportedError(f"{file}: 'layer_types' has {unknown!r}; no such layer.")


def with_head_dim(keys: dict[str, Any]) -> dict[str, Any]:
    """Return `keys` with ``head_dim``, by default the hidden size divided by the heads."""
    width, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
    if keys.get("head_dim") is None and is_positive(width) and is_positive(heads):
        return keys | {"head_dim": width // heads}
    return keys

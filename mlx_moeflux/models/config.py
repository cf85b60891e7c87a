"""Keys of config.json that families share, with their checks. No MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from mlx_moeflux.checkpoint.config import divides, not_negative, only, parse_config, positive
from mlx_moeflux.checkpoint.names import EXPERT_NAMES, NameRules
from mlx_moeflux.checks import is_positive
from mlx_moeflux.errors import ConfigError, InputError, UnsupportedError
from mlx_moeflux.models.rope import Rope, stretched
from mlx_moeflux.state_arrays import ATTENTION, EntrySpec


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The keys that every family uses. A subclass is one family: it adds its own, names its
    architecture, and defines ``from_dict``, which calls :meth:`parse`, and ``state``.

    INERT: Keys that are read elsewhere or change nothing.
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
    INERT: ClassVar[frozenset[str]]
    EXPERTS_KEY: ClassVar[str] = "num_experts"
    EXPERTS_MODE: ClassVar[str | None] = None
    EXPERTS_BIAS: ClassVar[bool] = False
    LAYER_KEYS: ClassVar[tuple[str, ...]] = ("num_hidden_layers",)
    MAY_BE_ZERO: ClassVar[frozenset[str]] = frozenset()
    ACTIVATION: ClassVar[str] = "silu"

    @classmethod
    def parse(cls, keys: dict[str, Any], *, file: Path | str, strict: bool) -> Self:
        """Build the config from `keys` and check it.

        Raises:
            ConfigError: A key is missing, wrong, contradictory or (when `strict`) unknown.
            UnsupportedError: The checkpoint uses something that is not computed.
        """
        config = parse_config(cls, keys, file=file, inert=cls.INERT, strict=strict)
        config.check(file)
        return config

    def check(self, file: Path | str) -> None:
        """Raise what :meth:`parse` does for keys that contradict each other."""
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
    :meth:`state` says otherwise."""

    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    partial_rotary_factor: float
    yarn: Rope | None = None

    @classmethod
    def parse(cls, keys: dict[str, Any], *, file: Path | str, strict: bool) -> Self:
        """See :meth:`BaseConfig.parse`; `keys` have those of
        :func:`~mlx_moeflux.models.rope.rope_keys`, without which YaRN would be ignored."""
        if not keys.keys() >= {"partial_rotary_factor", "yarn"}:
            raise ConfigError(
                f"{file}: from_dict of {cls.__module__} must add rope_keys(config, file, "
                "partial=...), which reads 'partial_rotary_factor' and YaRN, to the keys that it "
                "parses."
            )
        return super().parse(keys, file=file, strict=strict)

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

    def name_rules(self) -> NameRules:
        """Return the rename rules of tensor names."""
        return NameRules(experts=EXPERT_NAMES)

    def state(self, layer: int, dtype: str) -> EntrySpec:
        """See :meth:`BaseConfig.state`. Layers with a window keep all rows."""
        rows = self.num_key_value_heads, self.head_dim
        return ATTENTION.spec(dtype, keys=rows, values=rows)


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

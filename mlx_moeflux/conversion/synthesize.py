"""Checkpoints of random weights in a published shape and layout, at any scale.

For benchmarks and tests of models that are too large to download. Routing is skewed on purpose: all
embeddings share a direction (their mean), and the router's random rows lean along it more or less,
so that some experts are chosen more often than others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from mlx_moeflux.checkpoint.files import Progress, counted, unwritable
from mlx_moeflux.checkpoint.formats.decoded import encoded
from mlx_moeflux.checkpoint.names import BIAS, PROJECTIONS
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.tensors import ITEMSIZE
from mlx_moeflux.checkpoint.writer import SafetensorsWriter, Tensor, write_json
from mlx_moeflux.conversion.plan import table_spec
from mlx_moeflux.errors import InputError
from mlx_moeflux.models import model_class
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.shapes import SHAPES

CHUNK_BYTES = 16 << 20
ROUTER_BITS = 8
E2M1_DEVIATION = 2.93


@dataclass(frozen=True)
class Skew:
    """The skew of routing, measured on random tokens.

    distinct: Mean number of distinct experts of a layer that 32 tokens need. hit_rate: Of an LRU
    cache of half the experts. shuffled: The same with the tokens in random order. uniform: The
    same on choices without any preference.
    """

    tokens: int
    distinct: float
    hit_rate: float
    shuffled: float
    uniform: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: {self.distinct:.1f} distinct experts in 32 tokens, hit rate at "
            f"half budget {100 * self.hit_rate:.1f} % (shuffled {100 * self.shuffled:.1f} %, "
            f"uniform {100 * self.uniform:.1f} %)"
        )


# More than any model has.
MOST_LAYERS, MOST_EXPERTS = 1000, 10_000


def synthesize(
    like: str,
    out: str | Path,
    *,
    layers: int | None = None,
    experts: int | None = None,
    bits: int = 4,
    group_size: int = 64,
    skew: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint of random weights in mlx-lm's published layout.

    Args:
        like: One of :data:`SHAPES`. layers, experts: Fewer (or more) than the shape has.
        bits, group_size: Of the weights; the router has 8 bits, and experts that are published in
            an MX format keep it.
        skew: Mean of the embeddings by their deviation; 0 routes evenly.

    Memory: a few chunks of 16 MiB.

    Raises:
        InputError: The shape is unknown, or `out` is not empty or cannot be made.
        CheckpointError: The disk is full or failed.
    """
    if like not in SHAPES:
        raise InputError(f"no shape is called '{like}'; there are {', '.join(SHAPES)}.")
    config = SHAPES[like]
    config = replace(config, num_hidden_layers=layers or config.num_hidden_layers)
    if experts is not None:
        config = replace(config, **{config.EXPERTS_KEY: experts})
    if config.num_experts < config.num_experts_per_tok:
        raise InputError(
            f"{config.num_experts} experts are fewer than the {config.num_experts_per_tok} that a "
            "token takes."
        )
    if not 0 <= skew < math.inf:
        raise InputError(f"skew is {skew}; it must not be negative or infinite.")
    if config.num_hidden_layers > MOST_LAYERS or config.num_experts > MOST_EXPERTS:
        raise InputError(
            f"{config.num_hidden_layers} layers of {config.num_experts} experts are too many; give "
            f"at most {MOST_LAYERS} and {MOST_EXPERTS}."
        )
    spec, out = QuantSpec(bits, group_size), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not an empty directory; give another.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise unwritable(out, cause) from cause
    kind = model_class(config.published()["model_type"])
    weights, named = list(random_weights(kind(config), spec)), kind.mlx_lm_name
    tensors = {named(w.name): w.tensor for w in weights}
    random = np.random.default_rng(seed)
    with SafetensorsWriter(out, tensors, metadata={"format": "mlx"}) as writer:
        report = counted(progress, writer.total_bytes)
        for weight in weights:
            position = 0
            for data in weight.chunks(random, skew):
                writer.write(named(weight.name), position, data)
                position += len(data)
                report(len(data))
    overrides = {
        named(w.name.removesuffix(".weight")): w.spec.to_config()
        for w in weights
        if w.spec not in (None, spec) and w.part == "weight"
    }
    block = spec.to_config() | overrides
    quantization = {"quantization": block, "quantization_config": block}
    write_json(out / "config.json", config.published() | quantization)
    _write_tokenizer(out, config.vocab_size)
    return out


@dataclass(frozen=True)
class RandomWeight:
    """One tensor: `part` of a weight stored as `spec` (None: float), `width` elements a row. mean:
    Of a norm's numbers."""

    name: str
    part: str
    tensor: Tensor
    spec: QuantSpec | None
    width: int
    mean: float | None = None

    @property
    def bits(self) -> int | None:
        """Bits of an element; None: float."""
        return None if self.spec is None else self.spec.bits

    def chunks(self, random: np.random.Generator, skew: float) -> Iterator[bytes]:
        """Random bytes that mean weights of standard deviation width^-1/2."""
        total = self.tensor.nbytes
        for start in range(0, total, CHUNK_BYTES):
            size = min(CHUNK_BYTES, total - start)
            if self.part == "weight" and self.bits is not None:
                yield random.bytes(size)
            elif self.tensor.dtype == "U8":
                # Powers of two: random E2M1 has this deviation.
                power = 127 + round(np.log2(self.width**-0.5 / E2M1_DEVIATION))
                yield random.integers(power - 1, power + 1, size, np.uint8).tobytes()
            else:
                yield self._floats(random, size // ITEMSIZE[self.tensor.dtype], skew)

    def _floats(self, random: np.random.Generator, count: int, skew: float) -> bytes:
        if self.bits is not None:
            # q is uniform on [0, 2^bits - 1]: scale (q - middle) has this deviation. Embeddings
            # are large, so that what all of them share is still there after many layers.
            embeds = self.name.startswith("model.embed_tokens")
            deviation = 1.0 if embeds else self.width**-0.5
            levels = (1 << self.bits) - 1
            scale = deviation / (levels / 12**0.5)
            if self.part == "biases":
                values = np.full(count, -scale * levels / 2 + (skew if embeds else 0.0))
            else:
                values = scale * (1 + 0.05 * random.standard_normal(count))
        elif self.mean is not None:
            values = self.mean + 0.1 * random.standard_normal(count)
        elif self.name.endswith("A_log"):
            values = np.log(random.uniform(1, 16, count))
        elif self.name.endswith("dt_bias"):
            values = random.uniform(-4, -1, count)
        elif len(self.tensor.shape) == 2:
            values = self.width**-0.5 * random.standard_normal(count)
        else:
            values = 0.3 * random.standard_normal(count)
        return encoded(values.astype(np.float32), self.tensor.dtype).tobytes()


def random_weights(model: DecoderModel, spec: QuantSpec) -> Iterator[RandomWeight]:
    """Every tensor of the checkpoint, in the model's order."""
    config, modules = model.config, dict(model.named_modules())
    for name, array in dict(tree_flatten(model.parameters())).items():
        shape, base = tuple(array.shape), name.removesuffix(".weight")
        quantised = base != name and hasattr(modules[base], "to_quantized")
        if not quantised or shape[-1] % spec.group_size:
            dtype = "F32" if name.endswith("A_log") else "BF16"
            mean = 1.0 if name.endswith(model.AROUND_ONE) else None
            mean = 0.0 if name.endswith(model.ZERO_CENTRED) else mean
            yield RandomWeight(name, "weight", Tensor(dtype, shape), None, shape[-1], mean)
            continue
        routes = base.endswith(("mlp.gate", "shared_expert_gate"))
        one = QuantSpec(ROUTER_BITS, spec.group_size) if routes else spec
        yield from _quantised(base, one, shape[:-2], *shape[-2:])
    for layer, (rows, width) in model.table_shapes(config).items():
        yield from _table(config, layer, rows, width, spec)
    E, C, F = config.num_experts, config.hidden_size, config.moe_intermediate_size
    mode = config.EXPERTS_MODE
    stored = spec if mode is None else QuantSpec.of_mode(mode)
    for layer in model.moe_blocks():
        for projection in PROJECTIONS:
            rows, width = (C, F) if projection == "down_proj" else (F, C)
            base = f"model.layers.{layer}.mlp.switch_mlp.{projection}"
            yield from _quantised(base, stored, (E,), rows, width)
            if config.EXPERTS_BIAS:
                name = f"{base}.{BIAS}"
                yield RandomWeight(name, BIAS, Tensor("BF16", (E, rows)), None, width)


def _table(
    config: Any, layer: int, rows: int, width: int, spec: QuantSpec
) -> Iterator[RandomWeight]:
    """The shards of a layer's table."""
    one, each = table_spec(spec, width), -(-rows // config.split_ngram_parts)
    for i, start in enumerate(range(0, rows, each)):
        path, held = f"{config.table_path(layer)}.shards.{i}", min(each, rows - start)
        if one is None:
            tensor = Tensor("BF16", (held, width))
            yield RandomWeight(f"{path}.weight", "weight", tensor, None, width)
        else:
            yield from _quantised(path, one, (), held, width)


def _quantised(
    base: str, spec: QuantSpec, lead: tuple[int, ...], rows: int, width: int
) -> Iterator[RandomWeight]:
    groups = Tensor("BF16" if spec.is_affine else "U8", (*lead, rows, spec.groups(width)))
    packed = {"weight": Tensor("U32", (*lead, rows, spec.words(width)))}
    for part, tensor in (dict.fromkeys(spec.parts, groups) | packed).items():
        yield RandomWeight(f"{base}.{part}", part, tensor, spec, width)


def _write_tokenizer(out: Path, vocabulary: int) -> None:
    """A word-level tokenizer of the words t0, t1, ...: the ids mean nothing."""
    words = {f"t{i}": i for i in range(min(vocabulary, 4096))}
    unused = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    tokenizer = {"version": "1.0", "added_tokens": [], **dict.fromkeys(unused)}
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    tokenizer["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    write_json(out / "tokenizer.json", tokenizer)
    write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def measure_skew(directory: str | Path, *, tokens: int = 256, seed: int = 0) -> Skew:
    """Run random tokens through a checkpoint, streamed at the smallest budget that works, and
    see what its router chose."""
    import mlx.core as mx

    from mlx_moeflux.experts.telemetry.events import Chosen
    from mlx_moeflux.loading import load_model

    chosen: dict[int, list[np.ndarray]] = {}

    def listen(event: object) -> None:
        if isinstance(event, Chosen) and event.ids is not None:
            chosen.setdefault(event.layer, []).append(event.ids)

    with load_model(directory, expert_memory="auto", events=listen) as model:
        random = np.random.default_rng(seed)
        ids = random.integers(0, model.config.vocab_size, (1, tokens))
        mx.eval(model(mx.array(ids), last_only=True))
        slots = max(model.config.num_experts // 2, model.config.num_experts_per_tok)
    traces = [np.concatenate(parts) for parts in chosen.values()]
    shuffled = [random.permutation(trace) for trace in traces]
    experts, k = model.config.num_experts, traces[0].shape[1]
    even = np.stack([random.permutation(experts)[:k] for _ in range(tokens)])
    return Skew(
        tokens=tokens,
        distinct=float(np.mean([len(np.unique(trace[:32])) for trace in traces])),
        uniform=lru_hit_rate(even, slots),
        hit_rate=float(np.mean([lru_hit_rate(trace, slots) for trace in traces])),
        shuffled=float(np.mean([lru_hit_rate(trace, slots) for trace in shuffled])),
    )


def lru_hit_rate(trace: np.ndarray, slots: int) -> float:
    """Hits of an LRU cache of `slots` experts over ``trace [tokens, K]``, by look-ups."""
    order: dict[int, None] = {}
    hits = 0
    for expert in trace.reshape(-1).tolist():
        if expert in order:
            hits += 1
            del order[expert]
        elif len(order) >= slots:
            del order[next(iter(order))]
        order[expert] = None
    return hits / max(1, trace.size)

"""Decode, prefill and batches of a whole model, all resident, in one process beside mlx-lm.

    python -m benchmarks.full_shape --compare mlx-lm
    python -m benchmarks.full_shape --like qwen3.5-tiny --contexts 64 256 --prompts 64 --batches 1 4

Random 4-bit weights of a published shape are made in the GPU's memory, and mlx-lm runs on the same
arrays; routing is as uneven as ``synthesize`` makes it (--skew 0: even). Decoding goes one token
ahead of the device, the contexts and mlx-lm in turns. A prompt's time is to the last position's
logits with every state evaluated. With PyTorch installed a table of the kernels that ran says how
much of a time is the host's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from benchmarks.timing import kernel_seconds
from mlx_moeflux.backend import set_device_variables
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.conversion.synthesize import RandomWeight, random_weights
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.kernels.registry import choose_kernels
from mlx_moeflux.models import model_class
from mlx_moeflux.models.moe import SwitchGLU
from mlx_moeflux.models.shapes import SHAPES

SPEC = QuantSpec(4, 64)
# model_type -> mlx-lm's module, where they differ.
THEIR_NAMES = {"minimax_m2": "minimax", "kimi_k2": "deepseek_v3"}
WARM_STEPS = 4


def made(weight: RandomWeight, random: np.random.Generator, skew: float) -> mx.array:
    """A tensor whose values are as wide as those that ``synthesize`` writes."""
    shape = weight.tensor.shape
    if weight.bits is None:
        data = np.frombuffer(b"".join(weight.chunks(random, skew)), np.uint8)
        dtype = mx.float32 if weight.tensor.dtype == "F32" else mx.bfloat16
        return mx.array(data).view(dtype).reshape(shape)
    if weight.part == "weight":
        low, high = (mx.random.randint(0, 1 << 16, shape).astype(mx.uint32) for _ in range(2))
        return high << 16 | low
    if weight.tensor.dtype == "U8":
        data = np.frombuffer(next(weight.chunks(random, skew)), np.uint8)
        return mx.array(data)[mx.random.randint(0, len(data), shape)]
    levels, embeds = (1 << weight.bits) - 1, "embed_tokens" in weight.name
    scale = (1.0 if embeds else weight.width**-0.5) * math.sqrt(12) / levels
    value = scale if weight.part == "scales" else -scale * levels / 2 + skew * embeds
    return mx.full(shape, value, mx.bfloat16)


def ours(config: Any, skew: float = 1.0) -> tuple[Any, dict[str, mx.array], dict[str, QuantSpec]]:
    """A model, its arrays under the names of mlx-lm's checkpoints, and how they are quantised by
    mlx-lm's names of modules."""
    kind, random = model_class(config.published()["model_type"]), np.random.default_rng(0)
    arrays: dict[str, mx.array] = {}
    specs: dict[str, QuantSpec] = {}
    for weight in random_weights(as_mlx_lm_has_it(config), SPEC):
        arrays[weight.name] = made(weight, random, skew)
        mx.eval(arrays[weight.name])
        if weight.spec is not None:
            specs[weight.name.rpartition(".")[0]] = weight.spec
    kernels = choose_kernels(None)
    router = kind.make_router(config, kernels)
    model = as_mlx_lm_has_it(config, router=router, kernels=kernels)
    quantise(model, specs)
    trunk = {
        name: array.astype(mx.float32) if kind.keeps_float32(name) else array
        for name, array in arrays.items()
        if "switch_mlp" not in name
    }
    model.update(tree_unflatten(list(trunk.items())))
    blocks, sizes = model.moe_blocks(), (config.hidden_size, config.moe_intermediate_size)
    for layer, block in blocks.items():
        block.switch_mlp = SwitchGLU(config.num_experts, *sizes)
        block.switch_mlp._activation = model.activation
        for name, part in block.switch_mlp.items():
            at = f"model.layers.{layer}.mlp.switch_mlp.{name}"
            part.spec = specs[at]
            for array in ("weight", "scales", "biases", "bias"):
                if f"{at}.{array}" in arrays:
                    part[array] = arrays[f"{at}.{array}"]
    model.set_store(
        ResidentStore(
            lambda layer: blocks[layer].switch_mlp.bank(),
            layers=blocks,
            num_experts=config.num_experts,
            mix=model.kernels.expert_mix,
        )
    )
    model.eval()
    model.prepare()
    named = {kind.mlx_lm_name(name): array for name, array in arrays.items()}
    return model, named, {kind.mlx_lm_name(name): spec for name, spec in specs.items()}


def as_mlx_lm_has_it(config: Any, **options: Any) -> Any:
    """A model whose heads of latent attention are split as in mlx-lm's checkpoints."""
    model = model_class(config.published()["model_type"])(config, **options)
    layers = range(config.num_hidden_layers)
    model.fit_names(f"model.layers.{layer}.self_attn.embed_q.weight" for layer in layers)
    return model


def quantise(model: nn.Module, specs: dict[str, QuantSpec]) -> None:
    """As stored, by module; what is quantised here is never computed."""
    nn.quantize(
        model,
        class_predicate=lambda name, module: (
            specs[name].to_config() if name in specs and hasattr(module, "to_quantized") else False
        ),
    )


def theirs(config: Any, arrays: dict[str, mx.array], specs: dict[str, QuantSpec]) -> Any:
    """mlx-lm's model on the same arrays."""
    published = config.published()
    family = published["model_type"]
    module = import_module(
        f"{without_tokenizers('mlx_lm')}.models.{THEIR_NAMES.get(family, family)}"
    )
    model = module.Model(module.ModelArgs.from_dict(published))
    quantise(model, specs)
    model.load_weights(list(arrays.items()))
    return model.eval()


def without_tokenizers(package: str) -> str:
    """Make the modules of `package` importable without what its ``__init__`` imports: mlx-lm's
    models need neither transformers nor tokenizers."""
    if package not in sys.modules:
        found = find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise SystemExit(f"{package} is not installed.")
        stand_in = ModuleType(package)
        stand_in.__path__ = list(found.submodule_search_locations)
        sys.modules[package] = stand_in
    return package


class Side:
    """A model that decodes and reads prompts; `last` gives logits ``[B, 1, V]``."""

    def __init__(self, last: Callable[[mx.array, Any], mx.array], new_cache: Callable[[], Any]):
        self.last, self.new_cache = last, new_cache

    def read(self, ids: mx.array) -> tuple[float, Any]:
        """Seconds of a prompt, and the states behind it."""
        cache, start = self.new_cache(), time.perf_counter()
        mx.eval(self.last(ids, cache), [entry.state for entry in cache])
        return time.perf_counter() - start, cache

    def decode(self, cache: Any, steps: int) -> float:
        """Seconds a token."""
        token, before = mx.array([[5]]), None
        mx.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            token = mx.argmax(self.last(token, cache)[:, -1], axis=-1)[None]
            mx.async_eval(token)
            if before is not None:
                mx.eval(before)
            before = token
        mx.eval(token)
        return (time.perf_counter() - start) / steps


def our_side(model: Any) -> Side:
    return Side(lambda ids, cache: model(ids, cache, last_only=True), model.make_cache)


def their_side(model: Any) -> Side:
    caches = import_module(f"{without_tokenizers('mlx_lm')}.models.cache")
    return Side(
        lambda ids, cache: model(ids, cache=cache)[:, -1:],
        lambda: caches.make_prompt_cache(model),
    )


def spread(seconds: Sequence[float]) -> str:
    low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:9.3f} ms [{low:.3f}, {high:.3f}]"


def prompt(length: int, vocabulary: int) -> mx.array:
    ids = mx.random.randint(0, vocabulary, (1, length))
    mx.eval(ids)
    return ids


def decoding(side: Side, other: Side | None, args: Any, vocabulary: int) -> Iterator[str]:
    caches = {n: side.read(prompt(n, vocabulary))[1] for n in args.contexts}
    runs = {f"decode, {n} positions": (side, cache, args.steps) for n, cache in caches.items()}
    if other is not None:
        cache = other.read(prompt(128, vocabulary))[1]
        runs["decode, mlx-lm, 128 positions"] = (other, cache, max(1, args.steps // 4))
    for one, cache, _ in runs.values():
        one.decode(cache, 8)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.trials):
        for name, (one, cache, steps) in runs.items():
            times[name].append(one.decode(cache, steps))
    first = next(iter(times.values()))
    for name, seconds in times.items():
        against = [a / b for a, b in zip(first, seconds, strict=True)]
        speed = f"{1 / statistics.median(seconds):9.1f} tok/s"
        turns = f"{100 * statistics.median(against):.0f} % of the first's speed, turn by turn"
        yield f"{name:30} {spread(seconds)} {speed}; {turns}"
    for name, (one, cache, _) in list(runs.items())[: len(caches)]:
        seen = kernel_seconds(lambda one=one, cache=cache: one.decode(cache, 8))
        if seen is not None:
            yield f"{name:30} {1e3 * sum(seen.values()) / 8:9.3f} ms a token in kernels"


def reading(side: Side, other: Side | None, args: Any, vocabulary: int) -> Iterator[str]:
    for n in args.prompts:
        side.read(prompt(n, vocabulary))
        seconds = [side.read(prompt(n, vocabulary))[0] for _ in range(args.trials)]
        line = f"prefill {n:<22} {spread(seconds)} {n / statistics.median(seconds):9.0f} tok/s"
        if other is not None and n <= args.most_theirs:
            other.read(prompt(n, vocabulary))
            them = other.read(prompt(n, vocabulary))[0]
            line += f"; mlx-lm {1e3 * them:.0f} ms, {them / statistics.median(seconds):.1f} times"
        seen = kernel_seconds(lambda n=n: side.read(prompt(n, vocabulary)))
        if seen is not None:
            attention = sum(s for name, s in seen.items() if "attend" in name or "sdpa" in name)
            total = sum(seen.values())
            line += f"; kernels {1e3 * total:.1f} ms, {1e3 * (total - attention):.1f} not attention"
        yield line


def decode_rate(model: Any, *, size: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Tokens a second, and milliseconds a step, of sequences that decode at once."""
    random = np.random.default_rng(size)
    prompts = random.integers(0, model.config.vocab_size, (size, prompt)).tolist()
    with BatchGenerator(
        model,
        max_tokens=tokens + WARM_STEPS + 1,
        completion_batch_size=size,
        prefill_batch_size=size,
    ) as generator:
        generator.insert(prompts)
        for _ in range(WARM_STEPS):
            generator.next()
        start = time.perf_counter()
        for _ in range(tokens):
            assert len(generator.next()) == size
        seconds = time.perf_counter() - start
    return size * tokens / seconds, 1000 * seconds / tokens


def batches(model: Any, args: Any) -> Iterator[str]:
    for size in args.batches:
        rates = [
            decode_rate(model, size=size, prompt=128, tokens=args.steps // 4) for _ in range(2)
        ]
        rate, step = max(rates)
        yield f"{size:3} sequences {step:26.2f} ms a step {rate:13.1f} tok/s (the better of two)"


def first_token(model: Any, ids: mx.array) -> float:
    """Seconds from ids to the first token that generation gives."""
    start = time.perf_counter()
    next(iter(generate_step(ids, model, max_tokens=1)))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--like", default="qwen3.5-35b-a3b")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--compare", choices=["mlx-lm"])
    parser.add_argument("--contexts", type=int, nargs="*", default=[1000, 31000])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048, 8192, 16384])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--skew", type=float, default=1.0, help="of the routing")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--trials", type=int, default=5, help="2 or more")
    parser.add_argument("--most-theirs", type=int, default=2048, help="longest prompt of mlx-lm")
    args = parser.parse_args()
    set_device_variables()
    config = SHAPES[args.like]
    config = replace(config, num_hidden_layers=args.layers or config.num_hidden_layers)
    model, arrays, specs = ours(config, args.skew)
    size = sum(array.nbytes for array in arrays.values()) / 1e9
    device = mx.device_info().get("device_name", mx.default_device())
    print(
        f"{args.like}, {config.num_hidden_layers} layers, {size:.1f} GB; {device}, {mx.__version__}"
    )
    side = our_side(model)
    other = None
    if args.compare:
        other = their_side(theirs(config, arrays, specs))
    del arrays
    for lines in (
        decoding(side, other, args, config.vocab_size),
        reading(side, other, args, config.vocab_size),
        batches(model, args),
    ):
        for line in lines:
            print(line, flush=True)
    n = min(2048, max(args.prompts))
    seconds = [first_token(model, prompt(n, config.vocab_size)[0]) for _ in range(args.trials)]
    print(f"first token of {n:<6} {spread(seconds[1:])}, {1e3 * seconds[0]:.0f} the first time")
    print(f"peak memory {mx.get_peak_memory() / 1e9:.1f} GB, both programs' arrays included")


if __name__ == "__main__":
    main()

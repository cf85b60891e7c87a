"""From a checkpoint in any accepted form to our packed directory, or to what mlx-lm loads.

Everything moves in row chunks: no tensor is held whole, and nothing is visible under its final
name before it is complete. A killed conversion goes on where it stopped (packed layout).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_moeflux.checkpoint.hub import resolve
from mlx_moeflux.checkpoint.names import COMPONENT_ORDER, PARTS, PROJECTIONS, MappedTensors
from mlx_moeflux.checkpoint.packed import PackedWriter, verify
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.refs import TensorRef
from mlx_moeflux.checkpoint.source import CONFIG_NAME, Checkpoint, open_checkpoint
from mlx_moeflux.checkpoint.tensors import TensorIndex
from mlx_moeflux.checkpoint.writer import SafetensorsWriter, Tensor, write_json
from mlx_moeflux.errors import CheckpointError, InputError, MemoryBudgetError
from mlx_moeflux.models import model_class
from mlx_moeflux.models.weights import FLOATS, infer_spec

# Elements of a row chunk: 16 Mi of float32 are 64 MiB.
CHUNK_ELEMENTS = 16 << 20
LAYOUTS = ("packed", "safetensors")
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Recipe:
    """What happens to one weight.

    source: its weight and, when quantised, scales and biases. spec: how it is quantised on disk
    now. target: how it shall be. dtype: code of the output's floats. transform: of its rows.
    """

    source: tuple[TensorRef, ...]
    spec: QuantSpec | None
    target: QuantSpec | None
    dtype: str
    transform: Callable[[mx.array], mx.array] | None = None

    def outputs(self) -> dict[str, Tensor]:
        """Part (``weight``, ``scales``, ``biases``) -> what will be written."""
        rows, width = self.source[0].shape[0], self._width()
        if self.target is None:
            shape = self.source[0].shape
            if self.spec is not None:
                shape = (rows, width)
            elif self.transform is not None:
                shape = self._transformed_shape()
            return {"weight": Tensor(self.dtype, shape)}
        groups = Tensor(self.dtype, (rows, self.target.groups(width)))
        weight = Tensor("U32", (rows, self.target.words(width)))
        return {"weight": weight, "scales": groups, "biases": groups}

    def _width(self) -> int:
        last = self.source[0].shape[-1]
        return last if self.spec is None else last * 32 // self.spec.bits

    def _transformed_shape(self) -> tuple[int, ...]:
        ref = self.source[0]
        row = self.transform(mx.zeros((1, *ref.shape[1:])))
        return (ref.shape[0], *row.shape[1:])

    def chunks(self) -> Iterator[tuple[str, int, bytes]]:
        """(part, byte offset in that part, bytes), a row chunk at a time.

        Evaluates: each chunk.
        """
        ref = self.source[0]
        if not ref.shape:
            yield "weight", 0, self._converted(ref)["weight"]
            return
        step = max(1, CHUNK_ELEMENTS // max(self._width(), prod(ref.shape[1:])))
        done = dict.fromkeys(PARTS, 0)
        for start in range(0, ref.shape[0], step):
            stop = min(start + step, ref.shape[0])
            for part, data in self._rows(start, stop).items():
                yield part, done[part], data
                done[part] += len(data)

    def _rows(self, start: int, stop: int) -> dict[str, bytes]:
        arrays = [ref.rows(start, stop).load() for ref in self.source]
        if self.spec is not None and self.spec == self.target:
            parts = {"weight": arrays[0]}
            parts |= zip(("scales", "biases"), (self._cast(a) for a in arrays[1:]), strict=True)
        else:
            w = arrays[0]
            if self.spec is not None:
                w = mx.dequantize(*arrays, self.spec.group_size, self.spec.bits)
            if self.transform is not None:
                w = self.transform(w)
            if self.target is None:
                parts = {"weight": self._cast(w)}
            else:
                parts = dict(
                    zip(
                        PARTS,
                        mx.quantize(self._cast(w), self.target.group_size, self.target.bits),
                        strict=True,
                    )
                )
        return {part: _bytes(array) for part, array in parts.items()}

    def _converted(self, ref: TensorRef) -> dict[str, bytes]:
        return {"weight": _bytes(self._cast(ref.load()))}

    def _cast(self, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        return array.astype({"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}[self.dtype])


def _bytes(array: mx.array) -> bytes:
    array = mx.contiguous(array)
    mx.eval(array)
    return bytes(memoryview(array).cast("B")) if array.ndim else np.array(array).tobytes()


def convert(
    path_or_hub_id: str | os.PathLike[str],
    out: str | os.PathLike[str] = "mlx_model",
    *,
    layout: str = "packed",
    quantize: bool = False,
    q_bits: int = 4,
    q_group_size: int = 64,
    q_mode: str = "affine",
    dequantize: bool = False,
    dtype: str | None = None,
    verify_written: bool = False,
    strict_config: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a checkpoint; returns the directory that was written.

    Args:
        layout: ``packed`` (one blob of experts per layer, one read each) or ``safetensors``
            (mlx-lm's names and config).
        quantize: Float weights become q_bits in groups of q_group_size; the router and the shared
            expert's gate 8 bits, as mlx-lm does. Without it bits stay as they are.
        dequantize: Quantised weights become floats.
        dtype: ``float32``, ``bfloat16`` or ``float16`` of the floats; default: as they are.
        verify_written: Read everything back and compare hashes.
        progress: Called with (bytes done, bytes in all).

    Peak memory: one row chunk (64 MiB in float32, a few times) beside the interpreter.

    Raises:
        InputError, CheckpointError, MemoryBudgetError (the disk has no room), ExpertFileError.
    """
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; there are {', '.join(LAYOUTS)}.")
    if dtype is not None and dtype not in CODES:
        raise InputError(f"dtype is {dtype!r}; there are {', '.join(CODES)}.")
    if quantize and dequantize:
        raise InputError("give either quantize or dequantize, not both.")
    spec = QuantSpec(q_bits, q_group_size, q_mode) if quantize else None
    directory, out = resolve(path_or_hub_id, revision=revision), Path(out)
    checkpoint = open_checkpoint(directory)
    if out.exists() and out.resolve() == directory.resolve():
        raise InputError(f"{out} is the checkpoint itself; give another directory.")
    job = _Job(checkpoint, layout, spec, dequantize, dtype, strict_config)
    identity = job.identity()
    _claim(out, identity)
    _check_disk(out, job.total_bytes)
    job.write(out, identity, progress or (lambda done, total: None))
    if verify_written:
        _verify(out, layout)
    return out


class _Job:
    """All recipes of a conversion, under the names of the output."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: str,
        spec: QuantSpec | None,
        dequantize: bool,
        dtype: str | None,
        strict: bool,
    ):
        kind = model_class(checkpoint.config.get("model_type"), file=checkpoint.config_file)
        self.config = kind.Config.from_dict(
            checkpoint.config, file=checkpoint.config_file, strict=strict
        )
        self.checkpoint, self.layout, self.kind = checkpoint, layout, kind
        self.spec, self.dequantize, self.code = spec, dequantize, CODES.get(dtype or "")
        self.mapped: MappedTensors = checkpoint.mapped(kind.NAME_RULES)
        self.trunk = self._trunk_recipes()
        self.experts = {
            layer: {p: self._expert_recipe(layer, p, 0) for p in PROJECTIONS}
            for layer in self.mapped.experts
        }
        self.total_bytes = sum(
            t.nbytes for recipe in self.trunk.values() for t in recipe.outputs().values()
        ) + sum(
            t.nbytes * self.config.num_experts
            for recipes in self.experts.values()
            for recipe in recipes.values()
            for t in recipe.outputs().values()
        )

    def identity(self) -> str:
        """Of the source's files and the options: what an interrupted run must share to go on."""
        options = [self.layout, str(self.spec), self.dequantize, self.code]
        files = {ref.file for ref in self.checkpoint.tensors.values()}
        files |= {refs[0].file for parts in self.mapped.experts.values() for refs in parts.values()}
        stats = {str(file.resolve()): file.stat() for file in sorted(files)}
        found = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        text = json.dumps([self.checkpoint.identity(), options, found])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _trunk_recipes(self) -> dict[str, Recipe]:
        """Module path + '.weight' (or a bare parameter's name) -> recipe."""
        trunk = {n: t.ref for n, t in self.mapped.trunk.items()}
        if self.config.tie_word_embeddings:
            trunk = {n: r for n, r in trunk.items() if not n.startswith("lm_head.")}
        transforms = self.kind.transforms(trunk)
        modules = dict(self.kind(self.config).named_modules())
        recipes: dict[str, Recipe] = {}
        for name, ref in trunk.items():
            base, _, leaf = name.rpartition(".")
            if leaf in ("scales", "biases") and f"{base}.weight" in trunk:
                continue
            source, spec = (ref,), None
            if f"{base}.scales" in trunk and leaf == "weight":
                source = tuple(trunk[f"{base}.{part}"] for part in PARTS)
                spec = infer_spec(source[0], source[1], modules[base].weight.shape[-1])
            target = self._target(base, ref, spec, modules.get(base) if leaf == "weight" else None)
            dtype = "F32" if self.kind.keeps_float32(name) else self._code(source)
            if name in transforms and len(ref.shape) == 1 and self.layout == "packed":
                # 1 + w does not fit the 8 bits of a bfloat16; mlx-lm's layout rounds it.
                dtype = "F32"
            recipes[name] = Recipe(source, spec, target, dtype, transforms.get(name))
        return recipes

    def _target(
        self, base: str, ref: TensorRef, spec: QuantSpec | None, module: nn.Module | None
    ) -> QuantSpec | None:
        if spec is not None:
            self._refuse_twice(ref)
            return None if self.dequantize else spec
        if self.spec is None or not hasattr(module, "to_quantized"):
            return None
        if ref.shape[-1] % self.spec.group_size:
            return None
        if base.endswith((".mlp.gate", "shared_expert_gate")):
            return QuantSpec(max(8, self.spec.bits), self.spec.group_size)
        return self.spec

    def _refuse_twice(self, ref: TensorRef) -> None:
        if self.spec is not None:
            raise InputError(
                f"{ref.file}: '{ref.name}' is quantised already; convert with dequantize first."
            )

    def _code(self, source: tuple[TensorRef, ...]) -> str:
        stored = source[-1].dtype
        return self.code if self.code and stored in FLOATS else stored

    def _expert_recipe(self, layer: int, projection: str, expert: int) -> Recipe:
        components = self.mapped.experts[layer]
        source = tuple(
            components[f"{projection}.{part}"][expert]
            for part in PARTS
            if f"{projection}.{part}" in components
        )
        spec, width = None, self._expert_width(projection)
        if len(source) == len(PARTS):
            spec = infer_spec(source[0], source[1], width)
            self._refuse_twice(source[0])
            target = None if self.dequantize else spec
        else:
            target = self.spec
        return Recipe(source, spec, target, self._code(source))

    def _expert_width(self, projection: str) -> int:
        down = projection == "down_proj"
        return self.config.moe_intermediate_size if down else self.config.hidden_size

    def write(self, out: Path, identity: str, progress: Progress) -> None:
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            progress(done, self.total_bytes)

        if self.layout == "packed":
            self._write_packed(out, identity, report)
            prefix = ""
        else:
            prefix = "language_model."
        tensors, plan = self._safetensors_plan(prefix)
        with SafetensorsWriter(out, tensors, metadata={"format": "mlx"}) as writer:
            for recipe, names, offset in plan:
                for part, position, data in recipe.chunks():
                    writer.write(names[part], offset.get(part, 0) + position, data)
                    report(len(data))
        for name in TOKENIZER_FILES:
            if (self.checkpoint.directory / name).is_file():
                shutil.copyfile(self.checkpoint.directory / name, out / name)
        write_json(out / CONFIG_NAME, self._config(prefix))
        _marker(out).unlink(missing_ok=True)

    def _safetensors_plan(
        self, prefix: str
    ) -> tuple[dict[str, Tensor], list[tuple[Recipe, dict[str, str], dict[str, int]]]]:
        """Tensors of the output, and (recipe, part -> name, part -> byte offset) in their order."""
        tensors: dict[str, Tensor] = {}
        plan = []
        for name, recipe in self.trunk.items():
            base = f"{prefix}{name}".removesuffix(".weight")
            outputs = recipe.outputs()
            names = {part: f"{base}.{part}" for part in outputs}
            if not name.endswith(".weight"):
                names = {"weight": f"{prefix}{name}"}
            tensors |= {names[part]: tensor for part, tensor in outputs.items()}
            plan.append((recipe, names, {}))
        if self.layout == "packed":
            return tensors, plan
        E = self.config.num_experts
        for layer, recipes in self.experts.items():
            for projection, first in recipes.items():
                base = f"{prefix}model.layers.{layer}.mlp.switch_mlp.{projection}"
                outputs = first.outputs()
                names = {part: f"{base}.{part}" for part in outputs}
                tensors |= {
                    names[part]: Tensor(t.dtype, (E, *t.shape)) for part, t in outputs.items()
                }
                for e in range(E):
                    offsets = {part: e * t.nbytes for part, t in outputs.items()}
                    plan.append((self._expert_recipe(layer, projection, e), names, offsets))
        return tensors, plan

    def _write_packed(self, out: Path, identity: str, report: Callable[[int], None]) -> None:
        E = self.config.num_experts
        writer = PackedWriter(out, num_experts=E, source_identity=identity)
        for layer, recipes in self.experts.items():
            outputs = {p: recipe.outputs() for p, recipe in recipes.items()}
            components = [
                _Named(f"{p}.{part}", t.dtype, t.shape)
                for p in PROJECTIONS
                for part, t in outputs[p].items()
            ]
            assert [c.name for c in components] == [
                n for n in COMPONENT_ORDER if n in {c.name for c in components}
            ]
            if writer.done(layer):
                report(E * sum(Tensor(c.dtype, c.shape).nbytes for c in components))
                continue
            with writer.layer(layer, components) as blob:
                for e in range(E):
                    for p in PROJECTIONS:
                        for part, position, data in self._expert_recipe(layer, p, e).chunks():
                            row = Tensor(*_row(outputs[p][part])).nbytes
                            blob.write(e, f"{p}.{part}", position // row, data)
                            report(len(data))
        writer.finish()

    def _config(self, prefix: str) -> dict[str, Any]:
        config = {
            k: v
            for k, v in self.checkpoint.config.items()
            if k not in ("quantization", "quantization_config")
        }
        specs: dict[str, QuantSpec | None] = {}
        for name, recipe in self.trunk.items():
            if len(recipe.outputs()) > 1:
                specs[f"{prefix}{name.removesuffix('.weight')}"] = recipe.target
        for layer, recipes in self.experts.items():
            for projection, recipe in recipes.items():
                path = f"{prefix}model.layers.{layer}.mlp.switch_mlp.{projection}"
                specs[path] = recipe.target
        kinds = [spec for spec in specs.values() if spec is not None]
        if kinds:
            default = max(set(kinds), key=kinds.count)
            block = default.to_config() | {
                path: False if spec is None else spec.to_config()
                for path, spec in specs.items()
                if spec != default
            }
            config |= {"quantization": block, "quantization_config": block}
        return config


@dataclass(frozen=True)
class _Named:
    name: str
    dtype: str
    shape: tuple[int, ...]


def _row(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape[1:]


def _marker(out: Path) -> Path:
    return out / ".conversion.json"


def _claim(out: Path, identity: str) -> None:
    """Take `out` for this conversion; an interrupted one of the same kind goes on."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a directory.")
    marker = _marker(out)
    if out.exists() and any(out.iterdir()):
        try:
            before = json.loads(marker.read_text())["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{out} is not empty and holds no unfinished conversion; give another directory."
            ) from None
        if before != identity:
            raise InputError(
                f"{out} holds an unfinished conversion of another checkpoint or with other "
                "options; remove it first."
            )
        for leftover in out.glob("*.tmp"):
            leftover.unlink()
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(marker, {"identity": identity})
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}.") from error


def _check_disk(out: Path, needed: int) -> None:
    present = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    free = shutil.disk_usage(out).free
    if needed > free + present:
        raise MemoryBudgetError(
            f"{out} needs {needed} bytes ({needed / 1e9:.2f} GB) and has {free} free "
            f"({free / 1e9:.2f} GB); make room or choose another disk."
        )


def _verify(out: Path, layout: str) -> None:
    if layout == "packed":
        verify(out)
    for ref in TensorIndex.open(out).values():
        if ref.dtype in FLOATS and ref.shape:
            rows = max(1, CHUNK_ELEMENTS * ref.shape[0] // max(1, ref.nbytes))
            for start in range(0, ref.shape[0], rows):
                part = ref.rows(start, min(start + rows, ref.shape[0])).load()
                if not mx.isfinite(part).all().item():
                    raise CheckpointError(
                        f"{ref.file}: '{ref.name}' holds values that are not finite."
                    )

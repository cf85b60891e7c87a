"""Writing a conversion: experts and trunk in row chunks, config.json last."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx_moeflux.checkpoint.names import COMPONENT_ORDER, PROJECTIONS
from mlx_moeflux.checkpoint.packed import PackedWriter
from mlx_moeflux.checkpoint.source import CONFIG_NAME
from mlx_moeflux.checkpoint.writer import SafetensorsWriter, Tensor, write_json
from mlx_moeflux.conversion.plan import Conversion
from mlx_moeflux.conversion.recipe import Recipe

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

Report = Callable[[int], None]
"""Called with the bytes that were written since the last call."""


def write(conversion: Conversion, out: Path, identity: str, report: Report) -> None:
    """Write everything into `out`; config.json, which makes it a checkpoint, comes last.

    identity: Of what is converted and how; layers that an interrupted run of the same finished
    are kept (packed layout).

    Raises:
        CheckpointError, ExpertFileError: The disk is full or failed.
    """
    if conversion.layout == "packed":
        experts = _write_experts(conversion, out, identity, report)
        experts.finish(trunk=_write_tensors(conversion, out, report))
    else:
        _write_tensors(conversion, out, report)
    source = conversion.checkpoint.directory
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    for name, content in conversion.checkpoint.tokenizer.items():
        write_json(out / name, content)
    write_json(out / CONFIG_NAME, conversion.config_json())


def _write_experts(
    conversion: Conversion, out: Path, identity: str, report: Report
) -> PackedWriter:
    """One blob a layer; the writer still has to be finished."""
    E = conversion.config.num_experts
    writer = PackedWriter(out, num_experts=E, source_identity=identity)
    for layer, recipes in conversion.experts.items():
        outputs = {p: recipe.outputs() for p, recipe in recipes.items()}
        components = [
            _Component(f"{p}.{part}", t.dtype, t.shape)
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
                    for part, position, data in conversion.expert_recipe(layer, p, e).chunks():
                        blob.write(e, f"{p}.{part}", position // _row_bytes(outputs[p][part]), data)
                        report(len(data))
    return writer


def _write_tensors(conversion: Conversion, out: Path, report: Report) -> list[str]:
    """The trunk as safetensors, and the experts too unless they are packed; the files' names."""
    tensors, pieces = _trunk_pieces(conversion)
    if conversion.layout != "packed":
        more, expert_pieces = _expert_pieces(conversion)
        tensors |= more
        pieces += expert_pieces
    with SafetensorsWriter(out, tensors, metadata={"format": "mlx"}) as writer:
        for piece in pieces:
            for part, position, data in piece.recipe.chunks():
                writer.write(piece.names[part], piece.offsets.get(part, 0) + position, data)
                report(len(data))
    return writer.files


@dataclass(frozen=True)
class _Piece:
    """A recipe, and for each part the tensor it goes into and the byte where it begins there."""

    recipe: Recipe
    names: dict[str, str]
    offsets: dict[str, int]


def _trunk_pieces(conversion: Conversion) -> tuple[dict[str, Tensor], list[_Piece]]:
    tensors: dict[str, Tensor] = {}
    pieces = []
    for name, recipe in conversion.trunk.items():
        base = f"{conversion.prefix}{name}".removesuffix(".weight")
        outputs = recipe.outputs()
        names = {part: f"{base}.{part}" for part in outputs}
        if not name.endswith(".weight"):
            names = {"weight": base}
        tensors |= {names[part]: tensor for part, tensor in outputs.items()}
        pieces.append(_Piece(recipe, names, {}))
    return tensors, pieces


def _expert_pieces(conversion: Conversion) -> tuple[dict[str, Tensor], list[_Piece]]:
    """One tensor ``[E, ...]`` per component of a layer, one piece per expert."""
    tensors: dict[str, Tensor] = {}
    pieces, E = [], conversion.config.num_experts
    for layer, recipes in conversion.experts.items():
        for projection, first in recipes.items():
            base = f"{conversion.prefix}model.layers.{layer}.mlp.switch_mlp.{projection}"
            outputs = first.outputs()
            names = {part: f"{base}.{part}" for part in outputs}
            tensors |= {names[part]: Tensor(t.dtype, (E, *t.shape)) for part, t in outputs.items()}
            for e in range(E):
                offsets = {part: e * t.nbytes for part, t in outputs.items()}
                recipe = conversion.expert_recipe(layer, projection, e)
                pieces.append(_Piece(recipe, names, offsets))
    return tensors, pieces


@dataclass(frozen=True)
class _Component:
    name: str
    dtype: str
    shape: tuple[int, ...]


def _row_bytes(tensor: Tensor) -> int:
    return Tensor(tensor.dtype, tensor.shape[1:]).nbytes

"""A checkpoint directory of any form: config, trunk tensors and the places of the experts.

Forms: safetensors (Hugging Face originals, mlx-lm, mlx-community), the packed directory of this
package, the directories of moeflux / flash-moe, and GGUF files. Opening reads headers and JSON, no
tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_moeflux.checkpoint.config import QUANTIZATION_KEYS, hoisted
from mlx_moeflux.checkpoint.files import read_json_object
from mlx_moeflux.checkpoint.formats.foreign import (
    DEFAULT_BLOCK,
    check_fp8,
    in_our_form,
    refuse_adapter,
    refuse_undecoded,
)
from mlx_moeflux.checkpoint.formats.gguf import GgufFile, open_gguf
from mlx_moeflux.checkpoint.formats.gguf_files import find_gguf
from mlx_moeflux.checkpoint.formats.gguf_tokenizer import tokenizer_json
from mlx_moeflux.checkpoint.formats.moeflux import MoefluxDirectory, MoefluxExperts, MoefluxTrunk
from mlx_moeflux.checkpoint.formats.packed import PackedExperts, is_packed
from mlx_moeflux.checkpoint.names import MappedTensors, NameRules, map_tensors
from mlx_moeflux.checkpoint.quantization import Quantization, QuantSpec
from mlx_moeflux.checkpoint.tensors import (
    ExpertRefs,
    TensorIndex,
    TensorRef,
    head_files,
    naming_absent,
)
from mlx_moeflux.errors import CheckpointError, ConfigError, InputError, MoefluxError

CONFIG_NAME, TOKENIZER_NAME = "config.json", "tokenizer.json"
# Key of config.json: what a conversion did not read exactly. Other programs ignore names with _.
APPROXIMATED = "_approximated"
# NVIDIA ModelOpt's settings, where config.json has none.
MODELOPT_NAME = "hf_quant_config.json"


@dataclass
class Checkpoint:
    """A checkpoint under the names on disk.

    config: config.json.
    tensors: Name -> reference.
    blocks: MoE layer id -> component -> references, for forms that keep experts apart from the
        tensors; else empty.
    described_by: The file that holds what config.json holds in other forms.
    held: MoE layer id -> the experts that `blocks` has, ascending, where they are a part of `of`
        experts; else empty, and `of` is 0.
    decoded: Matrices of blocks that are read as floats: name -> type of block and elements.
    approximated: A sentence about tensors that are not read exactly.
    prediction_bytes: Of multi-token prediction that `tensors` leaves out.
    tokenizer: Files of the tokenizer that are not in the directory, name -> content.
    """

    directory: Path
    form: str
    config: dict[str, Any]
    tensors: Mapping[str, TensorRef]
    quantization: Quantization
    blocks: dict[int, dict[str, ExpertRefs]] = field(default_factory=dict)
    described_by: Path | None = None
    held: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    of: int = 0
    decoded: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    approximated: str | None = None
    prediction_bytes: int = 0
    tokenizer: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def config_file(self) -> Path:
        return self.described_by or self.directory / CONFIG_NAME

    def mapped(self, rules: NameRules) -> MappedTensors:
        """The same under the names of the model, experts of every form in one table."""
        theirs = self.config.get("quantization_config") or {}
        block = check_fp8(theirs) if theirs.get("quant_method") == "fp8" else DEFAULT_BLOCK
        absent = self.tensors.absent if isinstance(self.tensors, TensorIndex) else {}
        unread = (rules.is_dropped, rules.in_prediction_module)
        absent = {n: s for n, s in absent.items() if not any(rule(n) for rule in unread)}
        try:
            mapped = map_tensors(in_our_form(self.tensors, block), rules)
        except CheckpointError as error:
            raise naming_absent(error, absent) from error
        mapped.absent = absent
        for layer, components in self.blocks.items():
            if layer in mapped.experts:
                raise CheckpointError(
                    f"{self.directory}: layer {layer} has experts both as tensors and as a packed "
                    "file; remove one."
                )
            mapped.experts[layer] = components
        return mapped

    def prediction(self, mapped: MappedTensors) -> Mapping[str, TensorRef]:
        """Return the tensors of multi-token prediction: those of `mapped`, which is this
        checkpoint's, or else those of files beside it; empty if there are none.

        Raises:
            CheckpointError: A file beside it is damaged.
        """
        return mapped.prediction or head_beside(self.directory)

    def identity(self) -> str:
        """A hash of config, tensor headers and block layouts: changes when the model does.

        Two copies of a checkpoint have one identity; file names and offsets do not count, nor does
        it count which experts a part of a checkpoint has.
        """
        layout = {name: [ref.dtype, list(ref.shape)] for name, ref in self.tensors.items()}
        for layer, components in self.blocks.items():
            for name, refs in components.items():
                count = self.of if self.held else len(refs)
                layout[f"{layer}/{name}"] = [refs[0].dtype, [count, *refs[0].shape]]
        text = json.dumps([self.config, layout], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def head_beside(directory: Path) -> Mapping[str, TensorRef]:
    """Return the tensors of :data:`~mlx_moeflux.checkpoint.tensors.HEAD_FILES` in a directory;
    empty if there are none.

    Raises:
        CheckpointError: One of them is damaged.
    """
    return in_our_form(TensorIndex.of(head_files(directory)))


def open_checkpoint(
    directory: str | os.PathLike[str],
    *,
    gguf_file: str | None = None,
    requantize: bool = False,
    trunk_blocks: bool = False,
    strict: bool = True,
) -> Checkpoint:
    """Find out the form of `directory`, which may be a GGUF file, and read its headers.

    gguf_file: Which of its GGUF models, see
    :func:`~mlx_moeflux.checkpoint.formats.gguf_files.choose`.
    requantize, trunk_blocks: Of GGUF, see
    :func:`~mlx_moeflux.checkpoint.formats.gguf.open_gguf`.
    strict: Of GGUF, metadata that nothing here reads are an error.

    Raises:
        InputError: There is nothing to quantise anew.
        CheckpointError, ConfigError, ExpertFileError: Something is missing or damaged.
    """
    directory = Path(directory)
    gguf = find_gguf(directory, gguf_file)
    if gguf is not None:
        found = open_gguf(gguf, requantize=requantize, trunk_blocks=trunk_blocks, strict=strict)
        return _checkpoint_of(found)
    if requantize:
        raise InputError(f"{directory} is no GGUF file, so requantize has no blocks; leave it out.")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; pass the one with the checkpoint.")
    if not (directory / CONFIG_NAME).exists():
        refuse_adapter(directory, os.listdir(directory))
    config = hoisted(read_json_object(directory / CONFIG_NAME, error=ConfigError))
    safetensors = any(directory.glob("*.safetensors"))
    found = None if safetensors else MoefluxDirectory.find(directory)
    if found is not None:
        return _open_moeflux(found, config)
    tensors = TensorIndex.open(directory)
    refuse_undecoded(tensors)
    if {ref.file for ref in tensors.values()} <= set(head_files(directory)):
        raise CheckpointError(
            f"{directory} has a head of multi-token prediction and no model; pass the model's "
            "directory, and this one as mtp_path."
        )
    beside = directory / MODELOPT_NAME
    if beside.exists() and not any(config.get(key) for key in QUANTIZATION_KEYS):
        config["quantization_config"] = {"quant_method": "modelopt", **read_json_object(beside)}
    blocks: dict[int, dict[str, ExpertRefs]] = {}
    held: Mapping[int, tuple[int, ...]] = {}
    of = 0
    if is_packed(directory):
        packed = PackedExperts.open(directory)
        blocks = {layer: packed.refs(layer) for layer in packed.layers}
        held, of = packed.index.held, packed.index.of
    return Checkpoint(
        directory=directory,
        form="packed" if blocks else "safetensors",
        config=config,
        tensors=tensors,
        quantization=Quantization.from_config(config),
        blocks=blocks,
        held=held,
        of=of,
        approximated=_approximated(config, directory / CONFIG_NAME),
    )


def _approximated(config: Mapping[str, Any], file: Path) -> str | None:
    """Return what a conversion noted, None if it was exact."""
    noted = config.get(APPROXIMATED)
    if noted is None or (isinstance(noted, str) and noted and noted.isprintable()):
        return noted
    raise ConfigError(f"{file}: '{APPROXIMATED}' is {noted!r}; expected a line of text.")


def _open_moeflux(found: MoefluxDirectory, config: dict[str, Any]) -> Checkpoint:
    trunk = MoefluxTrunk.open(found.weights)
    text = config.get("text_config")
    text = {**config, **(text if isinstance(text, dict) else {})}
    text.setdefault("num_experts", text.get("n_routed_experts"))
    sizes = {}
    for key in ("hidden_size", "moe_intermediate_size", "num_experts"):
        if type(text.get(key)) is not int or text[key] < 1:
            raise ConfigError(f"{found.root / CONFIG_NAME}: '{key}' is {text.get(key)!r}; set it.")
        sizes[key] = text[key]
    experts = MoefluxExperts.open(
        found.experts,
        hidden=sizes["hidden_size"],
        intermediate=sizes["moe_intermediate_size"],
        num_experts=sizes["num_experts"],
        spec=QuantSpec(found.bits),
    )
    return Checkpoint(
        directory=found.root,
        form="moeflux",
        config=config,
        tensors=trunk,
        quantization=trunk.quantization,
        blocks={layer: experts.refs(layer) for layer in experts.layers},
    )


def _checkpoint_of(found: GgufFile) -> Checkpoint:
    path = found.path
    tokenizer: dict[str, dict[str, Any]] = {}
    approximated = None
    if found.requantised:
        kinds, count = ", ".join(sorted(set(found.requantised.values()))), len(found.requantised)
        approximated = f"{kinds} quantised anew to 8 bits in groups of 32 in {count} tensors"
    if not (path.parent / TOKENIZER_NAME).exists():
        # The tokenizer raises this error.
        with suppress(MoefluxError):
            content, config = tokenizer_json(found.metadata, path)
            tokenizer = {TOKENIZER_NAME: content, "tokenizer_config.json": config}
    return Checkpoint(
        directory=path.parent,
        form="gguf",
        config=found.config,
        tensors=found.tensors,
        quantization=Quantization(),
        blocks=found.blocks,
        described_by=path,
        decoded=found.decoded,
        approximated=approximated,
        prediction_bytes=found.prediction_bytes,
        tokenizer=tokenizer,
    )

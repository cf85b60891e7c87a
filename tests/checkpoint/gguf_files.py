"""GGUF files of a tiny Qwen3-MoE, by the `gguf` package's own writer, with random blocks, and the
same values in float32 safetensors, by its own dequantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlx_moeflux.checkpoint.blocks import DECODED
from mlx_moeflux.checkpoint.formats import gguf
from mlx_moeflux.checkpoint.formats.gguf_container import read_container
from mlx_moeflux.kernels.examples import block_size
from tests.checkpoint import foreign

V, C, L, E, K, F, H, HKV, D = 320, 256, 3, 5, 2, 512, 4, 2, 64
DENSE = 768
TOKENS = [chr(i) if i > 32 else chr(256 + i) for i in range(127)]


def random_blocks(kind: str, rows: int, width: int, random) -> np.ndarray:
    """Random bytes ``[rows, bytes]`` whose values are about width^-1/2 large."""
    form = DECODED[kind]
    count = rows * width // form.elements
    blocks = random.integers(0, 256, (count, form.nbytes), dtype=np.uint8)
    for at in form.halves:
        sizes = random.uniform(0.5, 1.5, count) * width**-0.5 / block_size(form.mode)
        d = sizes * random.choice((-1, 1), count)
        blocks[:, at : at + 2] = d.astype(np.float16)[:, None].view(np.uint8)
    if kind == "MXFP4":
        # An exponent, of numbers up to 6.
        most = 127 + int(np.log2(width**-0.5 / 3))
        blocks[:, 0] = random.integers(most - 2, most + 1, count)
    return blocks.reshape(rows, -1)


def shapes(dense: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    found = {"token_embd": (V, C), "output_norm": (C,), "output": (V, C)}
    for i in range(L):
        own = {"attn_norm": (C,), "ffn_norm": (C,), "attn_q_norm": (D,), "attn_k_norm": (D,)}
        own |= {"attn_q": (H * D, C), "attn_k": (HKV * D, C), "attn_v": (HKV * D, C)}
        own |= {"attn_output": (C, H * D)}
        if i in dense:
            own |= {"ffn_gate": (DENSE, C), "ffn_up": (DENSE, C), "ffn_down": (C, DENSE)}
        else:
            own |= {"ffn_gate_inp": (E, C), "ffn_gate_exps": (E, F, C), "ffn_up_exps": (E, F, C)}
            own |= {"ffn_down_exps": (E, C, F)}
        found |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    return found


HF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
} | {f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"}
HF |= {f"attn_{n}_norm": f"self_attn.{n}_norm" for n in "qk"}


def _hf_tensors(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    parts = name.split(".")
    prefix = "" if len(parts) == 1 else f"model.layers.{parts[1]}."
    leaf = parts[-1]
    if leaf.endswith("_exps"):
        base = f"{prefix}mlp.experts.{{}}.{leaf.split('_')[1]}_proj.weight"
        return {base.format(e): values[e] for e in range(len(values))}
    return {f"{prefix}{HF[leaf]}.weight": values}


def write_header(path: Path, architecture: str, more: Mapping[str, Any]) -> Path:
    """A file of metadata alone. An empty architecture is left out."""
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    _add(writer, more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(path: Path, out: Path, name: str, count: int) -> list[Path]:
    """The shards of a file, as llama.cpp's gguf-split numbers them; the first has the metadata."""
    import gguf

    reader = gguf.GGUFReader(path)
    files = [out / f"{name}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    out.mkdir(exist_ok=True)
    for i, file in enumerate(files):
        writer = gguf.GGUFWriter(str(file), "qwen3moe")
        for key, found in reader.fields.items() if i == 0 else ():
            if not key.startswith(("GGUF.", "general.architecture")):
                sub_type = found.types[1] if len(found.types) > 1 else None
                writer.add_key_value(key, found.contents(), found.types[0], sub_type)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


def _add(writer: Any, more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)


def write(
    path: Path,
    kind_of,
    *,
    dense: tuple[int, ...] = (),
    tied: bool = False,
    tokenizer: bool = True,
    skip: tuple[str, ...] = (),
    architecture: str = "qwen3moe",
    more: Mapping[str, Any] | None = None,
    scaling: Mapping[str, Any] | None = None,
    meaning: bool = False,
) -> Path:
    """A file, and with `meaning` ``path.parent / "meaning"`` with the same values.

    kind_of: Name -> its type. more: Other metadata, key -> text or number. scaling:
    ``rope_scaling`` of the meaning.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    for key, add, value in (
        ("block_count", writer.add_block_count, L),
        ("context_length", writer.add_context_length, 512),
        ("embedding_length", writer.add_embedding_length, C),
        ("feed_forward_length", writer.add_feed_forward_length, DENSE),
        ("head_count", writer.add_head_count, H),
        ("head_count_kv", writer.add_head_count_kv, HKV),
        ("key_length", writer.add_key_length, D),
        ("freq_base", writer.add_rope_freq_base, 1e6),
        ("rms_epsilon", writer.add_layer_norm_rms_eps, 1e-6),
        ("expert_count", writer.add_expert_count, E),
        ("expert_used_count", writer.add_expert_used_count, K),
        ("expert_feed_forward_length", writer.add_expert_feed_forward_length, F),
    ):
        if key not in skip:
            add(value)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        names = [*TOKENS, "ab", *(f"<{i}>" for i in range(V - len(TOKENS) - 2)), "<end>"]
        writer.add_token_list(names)
        writer.add_token_types([1] * (len(TOKENS) + 1) + [3] * (V - len(TOKENS) - 1))
        writer.add_token_merges(["a b"])
        writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.add_eos_token_id(V - 1)
    _add(writer, more or {})
    random, values_of = np.random.default_rng(3), {}
    for name, shape in shapes(dense).items():
        if name in skip or (tied and name == "output"):
            continue
        kind = kind_of(name) if len(shape) > 1 else "F32"
        qtype = gguf.GGMLQuantizationType[kind]
        rows, width = int(np.prod(shape[:-1])), shape[-1]
        if kind in DECODED:
            raw = random_blocks(kind, rows, width, random).reshape(*shape[:-1], -1)
        else:
            values = random.standard_normal(shape) * (width**-0.5 if len(shape) > 1 else 0.1)
            values = (values + (len(shape) == 1)).astype(np.float32)
            raw = gguf.quantize(values, qtype)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=qtype)
        if meaning:
            values_of |= _hf_tensors(name, gguf.dequantize(raw, qtype).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not meaning:
        return path
    out = path.parent / "meaning"
    out.mkdir(exist_ok=True)
    tensors = {n: foreign.entry("F32", v.astype(np.float32)) for n, v in values_of.items()}
    foreign.write_safetensors(out / "model.safetensors", tensors)
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": V,
        "hidden_size": C,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "num_key_value_heads": HKV,
        "head_dim": D,
        "intermediate_size": DENSE,
        "moe_intermediate_size": F,
        "num_experts": E,
        "num_experts_per_tok": K,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "norm_topk_prob": True,
        "mlp_only_layers": list(dense),
        "tie_word_embeddings": tied,
        "rope_scaling": scaling,
    }
    (out / "config.json").write_text(json.dumps(config))
    return path


def carry(monkeypatch, metadata: Mapping[str, Any]) -> None:
    """Make every file have these metadata."""
    monkeypatch.setattr(
        gguf, "read_container", lambda file: read_container(file)._replace(metadata=metadata)
    )

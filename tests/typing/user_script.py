"""A user's script, checked by pyright in strict mode and not run."""

from __future__ import annotations

from mlx_moeflux import convert, generate, load, load_model, stream_generate


def write_text(path: str) -> str:
    model, tokenizer = load(path, expert_memory="50%", max_context=4096, safe=True, revision=None)
    with model:
        text = generate(model, tokenizer, "A prompt", max_tokens=8, temp=0.7)
        text += generate(model, tokenizer, "A prompt", return_response=True).text
        for response in stream_generate(model, tokenizer, [1, 2, 3], max_tokens=8):
            text += response.text
        return text


def count_layers(path: str) -> int:
    with load_model(path, expert_reader="pread", kernels={"sdpa": "reference"}) as model:
        return len(model.layers)


def convert_checkpoint(source: str) -> str:
    return str(convert(source, "out", layout="packed", quantize=True, q_bits=4))

"""Numbers of 5,000 digits, halves of surrogate pairs, 1e19, and pipes, in every file that the
package writes and reads again: one line each, and the live state stays as it was."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.cache.state.sequence import read_notes
from mlx_moeflux.checkpoint.formats.moeflux import MoefluxExperts
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CacheError, InputError, MoefluxError
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.generation import prompt
from mlx_moeflux.generation.text import generate
from mlx_moeflux.loading import BUNDLED_MODEL, load, load_model
from mlx_moeflux.measure.tune import Tuning

TWIN = Path(__file__).parent / "golden" / "deepseek_v3_groups"
IDS = list(range(1, 20))
DIGITS = "9" * 5000
VALUES = [DIGITS, f'"{DIGITS}"', '"\\ud800"', "10000000000000000000", "1e19", "NaN", "[[]]"]


@pytest.fixture(autouse=True)
def _at_once():
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def model():
    with load_model(TWIN, expert_memory="50%") as model:
        yield model


def line_of(action) -> str:
    with pytest.raises(MoefluxError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


def with_value(content: dict, name: str, value: str) -> str:
    return json.dumps(content | {name: "MARK"}).replace('"MARK"', value)


def with_fact(file: Path, name: str, value: str) -> None:
    """Set a fact of a safetensors file's metadata."""
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    header["__metadata__"] = json.loads(json.dumps(header["__metadata__"]))
    meta = with_value(header["__metadata__"], name, value)
    text = json.dumps(header | {"__metadata__": "META"}).replace('"META"', meta).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[size:])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["position", "version", "kinds", "identity", "digest"])
def test_state(model, tmp_path, name, value):
    state = model.make_cache()
    model(mx.array([IDS]), cache=state)
    state.save(tmp_path / "state")
    with_fact(tmp_path / "state", name, value)
    live = model.make_cache()
    model(mx.array([IDS[:3]]), cache=live)
    assert "state" in line_of(lambda: live.load(tmp_path / "state"))
    assert live.position == 3


@pytest.mark.parametrize("value", VALUES)
def test_notes(model, tmp_path, value):
    state = model.make_cache()
    model(mx.array([IDS]), cache=state)
    state.save(tmp_path / "state")
    with_fact(tmp_path / "state", "notes", value)
    line_of(lambda: read_notes(tmp_path / "state"))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["end", "parent", "identity", "experts", "version"])
def test_node(model, tmp_path, name, value):
    def run():
        with PromptCache(tmp_path) as cache:
            resumed = cache.resume(model, IDS)
            logits = model(mx.array([IDS[resumed.position :]]), cache=resumed.state)[0, -1]
            resumed.reached(len(IDS), logits)
        return logits

    expected = run()
    (file,) = tmp_path.rglob("*.safetensors")
    with_fact(file, name, value)
    with warnings.catch_warnings(record=True) as said, PromptCache(tmp_path) as cache:
        warnings.simplefilter("always")
        resumed = cache.resume(model, IDS)
        if resumed.logits is None:
            found = model(mx.array([IDS[resumed.position :]]), cache=resumed.state)[0, -1]
        else:
            found = resumed.logits
    assert mx.array_equal(found, expected)
    for warning in said:
        assert "\n" not in str(warning.message)
        assert len(str(warning.message)) < 600


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "name", ["num_experts", "experts_per_token", "layers", "block_bytes", "slots", "model", "cold"]
)
def test_trace(model, tmp_path, name, value):
    with model.trace(tmp_path / "trace"):
        mx.eval(model(mx.array([IDS])))
    line, records = (tmp_path / "trace").read_bytes().split(b"\n", 1)
    text = with_value(json.loads(line), name, value).encode()
    (tmp_path / "trace").write_bytes(text + b"\n" + records)
    if name == "model" and value.startswith('"'):
        assert Trace.open(tmp_path / "trace").calls
    else:
        assert "is not a trace" in line_of(lambda: Trace.open(tmp_path / "trace"))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "name", ["model", "expert_memory", "expert_reader", "expert_threads", "prefetch"]
)
def test_tuning(model, tmp_path, name, value):
    tuning = Tuning(model.identity, "50%", "pread", 2, "none", 0.1, 0.01, (0.1,))
    tuning.save(tmp_path / "tuning")
    content = json.loads((tmp_path / "tuning").read_text())
    (tmp_path / "tuning").write_text(with_value(content, name, value))
    if name == "expert_memory" and value == "10000000000000000000":
        load_model(TWIN, tuning=tmp_path / "tuning").close()  # as much as there is
    else:
        line_of(lambda: load_model(TWIN, tuning=tmp_path / "tuning"))


@pytest.mark.parametrize("threads", [0, -1, 257, 10**19, 2.0, "8", True])
def test_threads(threads):
    with pytest.raises(InputError, match="threads cannot read experts; give 1 to 256"):
        load_model(TWIN, expert_threads=threads)


@pytest.mark.parametrize("budget", ["9" * 400 + "%", "1" + "0" * 400 + "GB", float("inf"), "[]"])
def test_budgets(budget):
    line_of(lambda: load_model(TWIN, expert_memory=budget))


@pytest.mark.parametrize("name", ["state", "trace", "tuning", "node.safetensors"])
def test_a_pipe_in_their_place(model, tmp_path, name):
    os.mkfifo(tmp_path / name)
    reads = {
        "state": lambda: model.make_cache().load(tmp_path / name),
        "trace": lambda: Trace.open(tmp_path / name),
        "tuning": lambda: load_model(TWIN, tuning=tmp_path / name),
    }
    if name in reads:
        assert "no regular file" in line_of(reads[name])
        return
    with PromptCache(tmp_path / "cache") as cache:
        resumed = cache.resume(model, IDS)
        model(mx.array([IDS]), cache=resumed.state)
        resumed.reached(len(IDS))
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    file.unlink()
    shutil.move(tmp_path / name, file)
    with PromptCache(tmp_path / "cache") as cache, pytest.warns(UserWarning, match="no regular"):
        assert cache.resume(model, IDS).position == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", DIGITS],
        ["--expert-threads", "1" + "0" * 19],
        ["--expert-memory", DIGITS + "%"],
        ["--max-context", "1" + "0" * 19],
        ["--extra-eos-token", DIGITS],
        ["--chat-template-config", '{"a": ' + DIGITS + "}"],
        ["--prompt", "\udcff"],
    ],
)
def test_flags(words, capsys):
    try:
        status = main(["generate", "--max-tokens", "1", *words])
    except SystemExit as end:
        status = end.code
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert status in (1, 2)
    assert len(errors) == 1


def with_header(folder: Path, change) -> Path:
    """A copy of the twin whose header `change` turned into another text."""
    model = shutil.copytree(TWIN, folder)
    file = model / "model.safetensors"
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8:size])).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[size:])
    return model


NORM = "model.norm.weight"


@pytest.mark.parametrize("value", [DIGITS, "9" * 4000, "9" * 20, "1e999", "Infinity", "-1", "[]"])
@pytest.mark.parametrize("key", ["shape", "data_offsets"])
def test_sizes_of_a_header(tmp_path, key, value):
    def change(header):
        header[NORM][key] = ["MARK", "MARK"]
        return json.dumps(header).replace('"MARK"', value)

    model = with_header(tmp_path / "model", change)
    assert "model.safetensors" in line_of(lambda: load_model(model))


@pytest.mark.parametrize("axes", [9, 100, 1000])
def test_sizes_that_multiply_to_thousands_of_digits(tmp_path, axes):
    def change(header):
        header[NORM]["shape"] = [2**62] * axes
        return json.dumps(header)

    model = with_header(tmp_path / "model", change)
    assert "shape" in line_of(lambda: load_model(model))


@pytest.mark.parametrize("number", ["9" * 24, DIGITS, "0" * 24 + "1", "1" + "0" * 9])
@pytest.mark.parametrize("part", ["layers.1.", "experts.1."])
def test_numbers_in_names(tmp_path, part, number):
    other = part.replace("1", number)

    def change(header):
        return json.dumps({name.replace(part, other): entry for name, entry in header.items()})

    line_of(lambda: load_model(with_header(tmp_path / "model", change)))


@pytest.mark.parametrize("number", ["9" * 9, "9" * 24, "9" * 200, "0" * 24])
def test_numbers_in_names_of_layer_files(tmp_path, number):
    """A moeflux directory with such a file is refused at once."""
    for name in ("00", number):
        (tmp_path / f"layer_{name}.bin").write_bytes(bytes(16))
    line_of(
        lambda: MoefluxExperts.open(
            tmp_path, hidden=64, intermediate=64, num_experts=1, spec=QuantSpec(4)
        )
    )


# Tensor -> dtypes of the same size that it cannot have.
DTYPES = {
    NORM: ("I16", "U16"),
    "model.embed_tokens.weight": ("I16", "U16"),
    "model.layers.0.mlp.down_proj.weight": ("I16", "U16"),
    "model.layers.0.self_attn.o_proj.weight": ("I16", "U16"),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n, dtypes in DTYPES.items() for d in dtypes]
)
def test_dtypes_that_a_tensor_cannot_have(tmp_path, name, dtype):
    def change(header):
        assert header[name]["dtype"] == "BF16"
        header[name]["dtype"] = dtype
        return json.dumps(header)

    model = with_header(tmp_path / "model", change)
    for action in (lambda: load_model(model), lambda: convert(model, tmp_path / "out")):
        assert f"'{name}' is {dtype}, but must be F32 or BF16 or F16" in line_of(action)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [NORM, "model.layers.1.input_layernorm.weight"])
def test_a_norm_of_zeros(tmp_path, name):
    model = shutil.copytree(TWIN, tmp_path / "model")
    tensors = mx.load(str(model / "model.safetensors"))
    mx.eval(tensors)
    tensors[name] = mx.zeros_like(tensors[name])
    mx.save_safetensors(str(model / "model.safetensors"), tensors)
    assert f"has zeros as '{name}'" in line_of(lambda: load_model(model))


def test_scales_of_zeros(two_bundled_layers, tmp_path):
    model = convert(two_bundled_layers, tmp_path / "model", layout="safetensors")
    tensors = mx.load(str(model / "model.safetensors"))
    mx.eval(tensors)
    name = next(n for n in sorted(tensors) if n.endswith("self_attn.o_proj.scales"))
    tensors[name] = mx.zeros_like(tensors[name])
    mx.save_safetensors(str(model / "model.safetensors"), tensors)
    assert f"has zeros as '{name}'" in line_of(lambda: load_model(model))


OPTIONS = ("--prompt", "--chat-template-config", "--expert-memory", "--max-tokens", "--stop", "-p")


@pytest.mark.parametrize("option", OPTIONS)
def test_two_hyphens_are_no_value(option, capsys):
    assert main(["generate", f"{option}=--"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert option in said
    assert "has no value" in said


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "--model=--"], ["tune", "--budgets=--"], ["compare-quality", "--model=--"],
        ["trace", "show", "--", "--"], ["benchmark", "--model=--"], ["generate", "-p--"],
    ],
)  # fmt: skip
def test_two_hyphens_of_other_commands(words, capsys):
    assert main(words) == 1
    assert "has no value: -- only ends the options" in capsys.readouterr().err


KEYS = (
    "self", "template", "conversation", "messages", "tools", "tokenize", "return_dict",
    "bos_token", "documents", "variables", "add_generation_prompt", "chat_template",
)  # fmt: skip


@pytest.fixture(scope="module")
def bundled():
    model, tokenizer = load(BUNDLED_MODEL)
    with model:
        tokenizer.chat_template = "{{ messages[0].content }}{{ template }}{{ self }}"
        yield model, tokenizer


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", ["x", True, [1], {"a": 1}, None])
def test_template_variables_named_as_parameters(bundled, key, value):
    """They are variables, or one line says that they cannot be."""
    messages = [{"role": "user", "content": "def"}]
    with contextlib.suppress(InputError):
        generate(*bundled, messages, max_tokens=1, template_options={key: value})
    if key in ("self", "template"):
        text = bundled[1].apply_chat_template(messages, tokenize=False, **{key: "value"})
        assert text.startswith("def" + ("value" if key == "template" else ""))


@pytest.mark.parametrize("key", ["conversation", "tools", "tokenize", "return_dict"])
def test_template_config_that_the_call_sets(key, capsys):
    config = json.dumps({key: True})
    assert main(["generate", "-m", "1", "-p", "x", "--chat-template-config", config]) == 1
    assert f"cannot set '{key}'" in capsys.readouterr().err


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}endless {% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("benchmark --delay inf", "delay is inf"),
        ("benchmark --delay nan", "delay is nan"),
        (f"benchmark -p {'9' * 23}", "contexts has more than"),
        (f"benchmark --batch-size {'9' * 23}", "batch_sizes has more than"),
        ("synthesize --like qwen3-tiny --skew inf --out", "skew is inf"),
        ("synthesize --like qwen3-tiny --skew nan --out", "skew is nan"),
        (f"synthesize --like qwen3-tiny --experts {'9' * 23} --out", "are too many"),
        (f"synthesize --like qwen3-tiny --layers {'9' * 18} --out", "are too many"),
    ],
)
def test_counts_without_end(tmp_path, words, said, capsys):
    place = [str(tmp_path / "out")] if words.startswith("synthesize") else []
    assert main([*words.split(), *place]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "out").exists()


# Template, what makes the prompt, and the line that says so.
LONG = [
    ("", "'some words ' * 2_700_000", "CacheError the prompt of 29700000 characters has more"),
    ("", "'ab' * 15_000_000", "CacheError the prompt of 30000000 characters has more tokens"),
    ("{{ messages[0].content }}", "[{'role': 'user', 'content': 'some words ' * 2_700_000}]",
     "CacheError the prompt of 29700000 characters has more tokens than the context of 8192"),
    (LOOPS, "[{'role': 'user', 'content': 'x'}]", "InputError the chat template was stopped"),
    ("{% for i in range(99999) %}" + "words " * 33 + "{% endfor %}",
     "[{'role': 'user', 'content': 'x'}]", "CacheError the prompt of 19799802 characters"),
]  # fmt: skip
PEAK = """
import json, re, resource, sys
from mlx_moeflux import generate, load
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.sandbox.process import child

model, tokenizer = load(BUNDLED_MODEL)
for template, prompt, _ in json.loads(sys.argv[1]):
    tokenizer.chat_template = template
    try:
        generate(model, tokenizer, eval(prompt), max_tokens=1)
    except MoefluxError as error:
        print(type(error).__name__, error)
child.close()
unit = 1 if sys.platform == "darwin" else 1024
if sys.platform == "linux":  # where ru_maxrss counts what this process was before it ran Python
    own = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
else:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(int(own) * unit, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit, sep="\\n")
"""
# Of a process with MLX and this package, and 30 MB a few times.
MOST_BYTES = 900_000_000


@pytest.mark.slow
def test_the_memory_of_prompts_that_cannot_fit():
    done = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps(LONG)], capture_output=True, text=True, check=True
    )
    *said, own, child = done.stdout.strip().splitlines()
    for line, (_, _, words) in zip(said, LONG, strict=True):
        assert line.startswith(words)
    assert 10_000_000 < int(own) < MOST_BYTES
    assert 10_000_000 < int(child) < MOST_BYTES


def test_a_long_prompt_that_fits_has_the_ids_of_the_whole(bundled):
    """Pieces are counted, never used."""
    _, tokenizer = bundled
    text = "def f(x):\n    return x + 1\n" * 40
    expected = tokenizer.encode(text)
    tokens, options = len(expected), {"add_special_tokens": True, "piece": 7}
    assert prompt.encode_bounded(tokenizer, text, tokens, **options) == expected
    with pytest.raises(CacheError, match=f"has more tokens than the context of {tokens // 4}"):
        prompt.encode_bounded(tokenizer, text, tokens // 4, **options)

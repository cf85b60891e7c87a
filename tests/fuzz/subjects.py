"""What is mutated, and what is then done with it. Runs in the worker.

A subject is made once in a folder of its own. ``make(folder, ops)`` writes one mutated case, and
``use(folder)`` does what a user would do with it. It returns a text if something is wrong that
raised no error: other numbers than those of the unchanged file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.cache.state.sequence import read_notes
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.experts.telemetry.bounds import coactivation, popularity, reuse_distances
from mlx_moeflux.experts.telemetry.forecast import Profile
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.loading import BUNDLED_MODEL, load, load_model
from mlx_moeflux.measure.tune import Tuning
from mlx_moeflux.sandbox.process import child
from mlx_moeflux.tokenizer import load_tokenizer
from tests.checkpoint import gguf_files
from tests.fuzz import mutations
from tests.fuzz.mutations import Ops

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "deepseek_v3_groups"
TWINS = (
    "text_top3", "qwen3_moe_yarn4", "deepseek_v3_groups", "qwen3_next_yarn2", "glm4_moe_plain",
    "minimax_m2_norms", "gpt_oss_sinks", "kimi_k25_wrapped", "glm4_moe_lite_flash",
    "vision_tied_top3", "deepseek_v3_yarn40", "gemma4_shared", "gemma4_vision", "laguna_heads",
    "deepseek_v32_yarn40", "glm_moe_dsa_shared",
)  # fmt: skip
IDS = list(range(1, 25))
MESSAGES = [{"role": "user", "content": "x"}]


@dataclass
class Subject:
    make: Callable[[Path, Ops], None]
    use: Callable[[Path], str | None]


def run(path: Path, **options: Any) -> mx.array:
    """Load a model and return its logits for IDS."""
    with load_model(path, **options) as model:
        logits = model(mx.array([IDS]) % model.config.vocab_size)
        mx.eval(logits)
        return logits


def used(path: Path) -> None:
    run(path, expert_memory="50%")


def replace(base: Path, folder: Path, name: str, content: bytes) -> None:
    """Make `folder` a copy of `base`, by links, with one other file."""
    for file in base.rglob("*"):
        if file.is_file() and str(file.relative_to(base)) != name:
            link = folder / file.relative_to(base)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def json_of(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def configs(home: Path) -> Subject:
    known = {name: json_of(GOLDEN / name / "config.json") for name in TWINS}

    def make(folder: Path, ops: Ops) -> None:
        name = TWINS[sum(op[1] for op in ops) // 7 % len(TWINS)]
        text = mutations.json_text(known[name], ops)
        replace(GOLDEN / name, folder, "config.json", text)

    return Subject(make, used)


def headers(home: Path) -> Subject:
    data = (TINY / "model.safetensors").read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])

    def make(folder: Path, ops: Ops) -> None:
        if mutations.first(ops)[1] % 4 == 0:
            content = mutations.changed_bytes(data, ops, within=size)
        else:
            text = mutations.json_text(header, ops)
            content = len(text).to_bytes(8, "little") + text + data[size:]
        replace(TINY, folder, "model.safetensors", content)

    return Subject(make, used)


def indexes(home: Path) -> Subject:
    tensors = mx.load(str(TINY / "model.safetensors"))
    names = sorted(tensors)
    home.mkdir()
    shutil.copy(TINY / "config.json", home)
    where = {}
    for i in range(2):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        where |= dict.fromkeys(names[i::2], file)
        mx.save_safetensors(str(home / file), {name: tensors[name] for name in names[i::2]})
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    name = "model.safetensors.index.json"
    (home / name).write_text(json.dumps(index))

    def make(folder: Path, ops: Ops) -> None:
        replace(home, folder, name, mutations.json_text(index, ops))

    return Subject(make, used)


def packed(home: Path) -> Subject:
    convert(TINY, home)
    index = json_of(home / "experts" / "index.json")
    del index["blake2b"]  # or every change would be known by its hash

    def make(folder: Path, ops: Ops) -> None:
        replace(home, folder, "experts/index.json", mutations.json_text(index, ops))

    return Subject(make, used)


def gguf(home: Path) -> Subject:
    home.mkdir()
    data = gguf_files.write(home / "it.gguf", lambda name: "Q8_0").read_bytes()
    # Metadata and tensors' places: what lies before the first page of zeros is at most this.
    size = 14_000

    def make(folder: Path, ops: Ops) -> None:
        (folder / "it.gguf").write_bytes(mutations.changed_bytes(data, ops, within=size))

    def use(folder: Path) -> None:
        run(folder / "it.gguf")
        load_tokenizer(folder / "it.gguf").decode(IDS)

    return Subject(make, use)


def states(home: Path) -> Subject:
    home.mkdir()
    model = load_model(TINY)
    state = model.make_cache()
    model(mx.array([IDS]), cache=state)
    state.save(home / "state", model(mx.array([IDS]))[0, -1], notes={"model": "x"})
    expected = model(mx.array([[5]]), cache=state)
    change = changed_state(home / "state")

    def make(folder: Path, ops: Ops) -> None:
        (folder / "state").write_bytes(change(ops))

    def use(folder: Path) -> str | None:
        with contextlib.suppress(MoefluxError):
            read_notes(folder / "state")
        fresh = model.make_cache()
        fresh.load(folder / "state")
        if fresh.position == 0:
            return None
        found = model(mx.array([[5]]), cache=fresh)
        return None if mx.array_equal(found, expected) else "other logits"

    return Subject(make, use)


def changed_state(file: Path) -> Callable[[Ops], bytes]:
    """Return a function that mutates the header of a file of state, or its bytes."""
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])

    def change(ops: Ops) -> bytes:
        if mutations.first(ops)[1] % 3 == 0:
            return mutations.changed_bytes(data, ops)
        text = mutations.json_text(header, ops)
        return len(text).to_bytes(8, "little") + text + data[size:]

    return change


def nodes(home: Path) -> Subject:
    model = load_model(TINY, expert_memory="50%")
    with PromptCache(home) as cache:
        resumed = cache.resume(model, IDS)
        logits = model(mx.array([IDS]), cache=resumed.state)[0, -1]
        resumed.reached(len(IDS), logits)
    expected = model(mx.array([[5]]), cache=resumed.state)
    (file,) = home.rglob("*.safetensors")
    name, change = str(file.relative_to(home)), changed_state(file)

    def make(folder: Path, ops: Ops) -> None:
        replace(home, folder, name, change(ops))

    def use(folder: Path) -> str | None:
        with warnings.catch_warnings(record=True) as said, PromptCache(folder) as cache:
            warnings.simplefilter("always")
            found = cache.resume(model, IDS)
            if found.position:
                found.state.truncate(min(found.position, len(IDS) - 1))
                at = found.state.position
                model(mx.array([IDS[at:]]), cache=found.state)
                if not mx.array_equal(model(mx.array([[5]]), cache=found.state), expected):
                    return "other logits"
        for one in said:
            if "\n" in str(one.message) or len(str(one.message)) > 600:
                return f"a warning of more than a line: {str(one.message)[:300]!r}"
        return None

    return Subject(make, use)


def traces(home: Path) -> Subject:
    home.mkdir()
    with load_model(TINY, expert_memory="50%") as model, model.trace(home / "trace"):
        for i in range(6):
            mx.eval(model(mx.array([IDS[i : i + 1 + i % 2]])))
    data = (home / "trace").read_bytes()
    line = data.index(b"\n")
    header = json.loads(data[:line])

    def make(folder: Path, ops: Ops) -> None:
        if mutations.first(ops)[1] % 2:
            content = mutations.json_text(header, ops) + data[line:]
        else:
            content = mutations.changed_bytes(data, ops)
        (folder / "trace").write_bytes(content)

    def use(folder: Path) -> None:
        trace = Trace.open(folder / "trace")
        for eviction in ("lfu", "belady"):
            simulate(trace, "50%", eviction=eviction)
        popularity(trace)
        reuse_distances(trace)
        coactivation(trace)
        trace.to_numpy()
        Profile.of_trace(trace)
        str(trace.recorded())

    return Subject(make, use)


def tunings(home: Path) -> Subject:
    home.mkdir()
    with load_model(TINY) as model:
        tuning = Tuning(model.identity, "50%", "pread", 2, "none", 0.1, 0.01, (0.1, 0.2))
    tuning.save(home / "tuning.json")
    content = json_of(home / "tuning.json")

    def make(folder: Path, ops: Ops) -> None:
        (folder / "tuning.json").write_bytes(mutations.json_text(content, ops))

    def use(folder: Path) -> None:
        with contextlib.suppress(MoefluxError):
            Profile.open(folder / "tuning.json").reading(5)
        run(TINY, tuning=folder / "tuning.json")

    return Subject(make, use)


def templates(home: Path) -> Subject:
    tokenizer = load_tokenizer(BUNDLED_MODEL)

    def make(folder: Path, ops: Ops) -> None:
        (folder / "template").write_text(mutations.template(ops), "utf-8")

    def use(folder: Path) -> None:
        template = (folder / "template").read_text("utf-8")
        tokenizer.apply_chat_template(MESSAGES, tools=[{}], chat_template=template)

    return Subject(make, use)


def tokenizers(home: Path) -> Subject:
    home.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, home)
    (home / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    known = {name: json_of(home / name) for name in names}
    # Small enough to be written for each case.
    model = known["tokenizer.json"]["model"]
    model["merges"] = []
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < 280}
    known["tokenizer_config.json"] |= {"bos_token": None, "pad_token": {"content": "x"}}
    known["tokenizer_config.json"] |= {"chat_template": [{"name": "default", "template": "x"}]}

    def make(folder: Path, ops: Ops) -> None:
        name = names[max(mutations.first(ops)[2] % 6 - 3, 0)]
        replace(home, folder, name, mutations.json_text(known[name], ops))

    def use(folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        detokenizer = tokenizer.detokenizer()
        for i in tokenizer.encode("def f(x):\n\treturn 'é日'"):
            detokenizer.add(i)
        detokenizer.finish()
        tokenizer.decode(IDS, skip_special_tokens=True)
        assert tokenizer.vocab_size >= 0
        tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)

    return Subject(make, use)


FLAGS = {
    "generate": """
        --prompt --max-tokens --system-prompt --prefill-response --chat-template-config --stop
        --extra-eos-token --temp --top-p --min-p --min-tokens-to-keep --top-k --xtc-probability
        --xtc-threshold --repetition-penalty --presence-penalty --frequency-penalty --seed
        --verbose --prefill-step-size --prompt-cache --prompt-cache-disk --prompt-cache-file
        --expert-memory --expert-threads --expert-reader --eviction --prefetch --tuning
        --experts-per-token --max-context --kv-bits --kv-group-size --safe --stats --trace
        --wired-memory --gguf-file
        --ignore-chat-template --use-default-chat-template --image --draft-model -v -qa
    """,
    "plan": "--memory --context --experts-per-token --ssd --kv-bits --trace",
    "cache_prompt": "--prompt-cache-file --eos-token --expert-memory --kv-bits --max-context",
    "convert": "--layout -q --q-bits --q-group-size --q-mode -d --dtype --verify --out",
    "trace": "--out --profile --budget show replay here trace",
    "perplexity": "--data-path --sequence-length --num-samples --batch-size --seed --file",
    "policies": "--x x",
}


def flags(home: Path) -> Subject:
    del home
    last = {
        "generate": ["--max-tokens", "2"],
        "plan": [str(BUNDLED_MODEL)],
        "cache_prompt": ["--prompt", "def"],
        "convert": ["--model", str(TINY)],
    }

    def make(folder: Path, ops: Ops) -> None:
        command = list(FLAGS)[max(mutations.first(ops)[1] % 16 - 9, 0) % len(FLAGS)]
        words = mutations.command_line(FLAGS[command].split(), ops)
        (folder / "words").write_text(json.dumps([command, *words, *last.get(command, [])]))

    def use(folder: Path) -> str | None:
        words = json_of(folder / "words")
        before, out, err = os.getcwd(), io.StringIO(), io.StringIO()
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(words)
        except SystemExit as end:
            return None if end.code in (0, 2) else f"exit {end.code}"
        finally:
            os.chdir(before)
        errors = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
        if (status, len(errors)) in ((0, 0), (1, 1)) and all(len(e) < 600 for e in errors):
            return None
        return f"status {status}: {err.getvalue()[-300:]}"

    return Subject(make, use)


SUBJECTS = {
    name: globals()[name]
    for name in (
        *("configs", "headers", "indexes", "packed", "gguf", "states", "nodes", "traces"),
        *("tunings", "templates", "tokenizers", "flags"),
    )
}


def prepare() -> None:
    """Make what takes long by design short: trials in the child process."""
    child.call.__kwdefaults__["seconds"] = 0.5
    np.seterr(all="ignore")
    load(BUNDLED_MODEL)[0].close()

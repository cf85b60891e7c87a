"""The commands of the README and the guides on :mod:`tests.kernels.metal.mac`, each in a process of
its own that begins with an empty cache. Oracle: the same command with references on the CPU."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.errors import MemoryBudgetError
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models.packed_parameters import is_packed
from tests.kernels.harness import on_the_cpu, require_emulator
from tests.kernels.metal.mac import on_a_mac

ROOT = Path(__file__).parents[3]
MAC = ("-m", "tests.kernels.metal.mac")
GENERATE = ("generate", "--prompt", "import os", "--max-tokens", "3", "--temp", "0")
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def emulator():
    require_emulator()


def run(*arguments: str, stdin: str = "", seconds: float = 500):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip


def on_mac(home: Path, *arguments: str, stdin: str = ""):
    """A finished command; it ended well and warned of nothing."""
    done = run(*MAC, str(home), *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return done


def of_cpu(*arguments: str, stdin: str = "") -> str:
    """What a command prints with references on the CPU."""
    done = run("-m", "mlx_moeflux", *arguments, "--safe", stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(done, what: str) -> int:
    return int(re.search(rf"{what}: (\d+)", done.stderr)[1])


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A cache directory in which `generate` ran before."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.slow
def test_generate_streamed_past_the_page_cache(home):
    streamed = (*GENERATE, "--expert-memory", "25%", "--expert-reader", "direct")
    done = on_mac(home, *streamed)
    assert done.stdout == of_cpu(*GENERATE)
    assert number(done, "kernels launched") >= 10
    assert number(done, "files past the page cache") == 1
    tried = json.loads((home / "trials.json").read_text())
    (place,) = tried
    assert "Apple M1" in place
    assert all(verdict["ok"] for verdict in tried[place].values())


@pytest.mark.slow
def test_a_second_process_tries_nothing(tmp_path):
    """It launches what the text needs, as the third does."""
    done, written = [], []
    for _ in range(3):
        done.append(on_mac(tmp_path, *GENERATE))
        written.append((tmp_path / "trials.json").stat().st_mtime_ns)
    first, *later = (number(process, "launches") for process in done)
    assert written[0] == written[1] == written[2]
    assert first > later[0] == later[1]
    assert {process.stdout for process in done} == {of_cpu(*GENERATE)}
    print(f"{first} launches in the first process, {later[0]} in later ones")  # noqa: T201


@pytest.mark.slow
def test_buffers_stay_below_the_largest(tmp_path):
    """The experts of a layer, 885 kB in nine arrays, of which the largest have 262 kB."""
    limits = {"all in one": 1 << 20, "one each": 300_000, "none": 200_000}
    text = {}
    for what, limit in limits.items():
        with on_the_cpu(), on_a_mac(tmp_path / what.replace(" ", "-"), buffer=limit):
            if what == "none":
                with pytest.raises(MemoryBudgetError, match="give an expert_memory of at most"):
                    load_model(BUNDLED_MODEL, expert_memory="100%")
                continue
            with load_model(BUNDLED_MODEL, expert_memory="100%", fuse=True) as model:
                packed = is_packed(model.layers[0].mlp.switch_mlp)
                assert packed == (what == "all in one")
                text[what] = model(mx.array([[1, 2, 3]])).tolist()
    assert text["all in one"] == text["one each"]


# ---- The other commands


@pytest.fixture(scope="module")
def talking(tmp_path_factory) -> Path:
    """The bundled model with a chat template."""
    directory = tmp_path_factory.mktemp("talking") / "model"
    shutil.copytree(BUNDLED_MODEL, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.mark.slow
def test_chat(home, talking):
    # Two lines whose best tokens lead by more than bfloat16 can change.
    arguments = ("chat", "--model", str(talking), "-m", "5")
    lines = "import os\nimport sys\nq\n"
    assert on_mac(home, *arguments, stdin=lines).stdout == of_cpu(*arguments, stdin=lines)


@pytest.mark.slow
def test_cached_prompt(home, tmp_path):
    file = str(tmp_path / "state.safetensors")
    on_mac(home, "cache_prompt", "--prompt", "def add(a, b):", "--prompt-cache-file", file)
    arguments = ("generate", "--prompt", " return", "--max-tokens", "6", "--temp", "0")
    text = on_mac(home, *arguments, "--prompt-cache-file", file).stdout
    assert text == of_cpu("generate", "--prompt", "def add(a, b): return", *arguments[3:])


MEASURE = ("benchmark", "-p", "8", "-g", "3", "--num-trials", "1", "--expert-memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--operation", "kernels", "--dtype", "bfloat16"),
        ("plan", str(BUNDLED_MODEL), "--json"),
        ("policies",),
        (*MEASURE, "100%,50%"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_that_measure(home, arguments):
    done = on_mac(home, *arguments)
    assert done.stdout.strip()
    assert not re.search(r"\bwrong\b", done.stdout)


@pytest.mark.slow
def test_benchmark_of_a_cold_disk_says_that_macos_keeps_pages(home):
    done = run(*MAC, str(home), *MEASURE, "50%", "--cold")
    assert done.returncode == 1
    assert "error: this system cannot empty its page cache" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_converted_model(home, tmp_path):
    packed = str(tmp_path / "packed")
    on_mac(home, "convert", "--model", str(BUNDLED_MODEL), "--mlx-path", packed)
    for memory in "100%", "25%":
        done = on_mac(home, *GENERATE, "--model", packed, "--expert-memory", memory)
        assert done.stdout == of_cpu(*GENERATE)


@pytest.mark.slow
def test_tune_measures_the_calls_of_a_model(home, tmp_path):
    # A model of short texts, because the emulator takes minutes for a prompt of 1,024 tokens.
    model, table = tmp_path / "model", tmp_path / "dispatch.json"
    shutil.copytree(BUNDLED_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 5
    (model / "config.json").write_text(json.dumps(config))
    on_mac(home, "tune", "--kernels", "--model", str(model), "--out", str(table))
    assert json.loads(table.read_text())


@pytest.mark.slow
def test_170_shards_where_256_files_may_be_open(home, tmp_path):
    tensors = list(mx.load(str(BUNDLED_MODEL / "model.safetensors")).items())
    for file in BUNDLED_MODEL.glob("*.json"):
        shutil.copy(file, tmp_path)
    names = {}
    for shard in range(170):
        file = f"model-{shard + 1:05d}-of-00170.safetensors"
        mine = dict(tensors[shard::170])
        mx.save_safetensors(str(tmp_path / file), mine)
        names |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for reader in "pread", "direct", "mmap":
        streamed = ("--expert-memory", "25%", "--expert-reader", reader)
        done = on_mac(home, *GENERATE, "--model", str(tmp_path), *streamed)
        assert done.stdout == of_cpu(*GENERATE)

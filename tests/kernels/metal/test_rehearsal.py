"""Every command on :mod:`tests.kernels.metal.mac`, each in a process of its own. Oracle: the same
command with references on the CPU.

``python -m tests.kernels.metal.test_rehearsal`` lists the commands with the tests that run them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.cli import ALIASES, COMMANDS
from mlx_moeflux.errors import MemoryBudgetError
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.measure import machine_report
from mlx_moeflux.models.packed_parameters import is_packed
from tests.kernels.harness import on_the_cpu, require_emulator
from tests.kernels.metal.mac import environment, on_a_mac

ROOT = Path(__file__).parents[3]
MAC = ("-m", "tests.kernels.metal.mac")
GENERATE = ("generate", "--prompt", "import os", "--max-tokens", "3", "--temp", "0")
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"

REHEARSALS: dict[str, list[str]] = {}
"""Command, or another name of one -> tests that run it."""
STEPS = ("check", "bundled", "synthetic", "model", "against", "handshake", "tune")
"""Of ``report``. :func:`test_report` runs all but `against`, because mlx-lm would launch kernels of
its own for the bundled model; :func:`test_check_against_mlx_lm` runs that one."""


def rehearses(*commands: str):
    """A test that runs these commands on a Mac; it fails if it did not."""

    def register(test):
        for command in commands:
            REHEARSALS.setdefault(command, []).append(test.__name__)

        @functools.wraps(test)
        def watched(*args, **kwargs):
            begun.clear()
            test(*args, **kwargs)
            assert begun >= set(commands)

        return watched

    return register


begun: set[str] = set()
"""Commands that :func:`start` began."""


def test_every_command_has_a_rehearsal():
    assert set(REHEARSALS) == {*COMMANDS, *ALIASES}


@pytest.mark.parametrize("model", [None, "somebody/model"])
def test_every_step_of_the_report_has_a_rehearsal(tmp_path, monkeypatch, model):
    monkeypatch.setattr(device, "kind", lambda: "metal")
    named = [step.name for step in machine_report.steps(tmp_path, model, against="mlx-lm")]
    other = "model" if model is None else "synthetic"
    assert named == [name for name in STEPS if name != other]


@pytest.fixture(autouse=True)
def emulator():
    require_emulator()


def start(home: Path, *arguments: str) -> subprocess.Popen:
    """Begin a command on a Mac."""
    begun.add(arguments[0])
    return subprocess.Popen(
        [sys.executable, *MAC, str(home), *arguments],
        cwd=ROOT, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(home: Path, *arguments: str, stdin: str = "", seconds: float = 500):
    """A command on a Mac that has ended."""
    with start(home, *arguments) as child:
        try:
            out, err = child.communicate(stdin, timeout=seconds)
        finally:
            child.kill()
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def on_mac(home: Path, *arguments: str, stdin: str = "", seconds: float = 500):
    """A finished command; it ended well and warned of nothing."""
    done = run(home, *arguments, stdin=stdin, seconds=seconds)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return done


def of_cpu(*arguments: str, stdin: str = "") -> str:
    """What a command prints with references on the CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_moeflux", *arguments, "--safe"],
        cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(done, what: str) -> int:
    return int(re.search(rf"{what}: (\d+)", done.stderr)[1])


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A cache directory in which `generate` ran before."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.slow
@rehearses("generate")
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
@rehearses("chat")
def test_chat(home, talking):
    # Two lines whose best tokens lead by more than bfloat16 can change.
    arguments = ("chat", "--model", str(talking), "-m", "5")
    lines = "import os\nimport sys\nq\n"
    assert on_mac(home, *arguments, stdin=lines).stdout == of_cpu(*arguments, stdin=lines)


@pytest.mark.slow
@rehearses("run")
def test_run_is_chat(home, talking):
    lines = "import os\nq\n"
    done = on_mac(home, "run", str(talking), "-m", "2", stdin=lines)
    assert done.stdout == of_cpu("chat", "--model", str(talking), "-m", "2", stdin=lines)


@pytest.mark.slow
@rehearses("cache_prompt", "generate")
def test_cached_prompt(home, tmp_path):
    file = str(tmp_path / "state.safetensors")
    on_mac(home, "cache_prompt", "--prompt", "def add(a, b):", "--prompt-cache-file", file)
    arguments = ("generate", "--prompt", " return", "--max-tokens", "6", "--temp", "0")
    text = on_mac(home, *arguments, "--prompt-cache-file", file).stdout
    assert text == of_cpu("generate", "--prompt", "def add(a, b): return", *arguments[3:])


@rehearses("policies", "completion", "shapes")
@pytest.mark.slow
def test_commands_without_a_model(home):
    assert "qwen3.5-35b-a3b" in on_mac(home, "shapes").stdout
    assert "--eviction" in on_mac(home, "policies").stdout
    assert "complete -o" in on_mac(home, "completion", "bash").stdout


@rehearses("plan", "models")
@pytest.mark.slow
def test_estimates_know_the_chip(home):
    found = json.loads(on_mac(home, "plan", str(BUNDLED_MODEL), "--json").stdout)
    assert "Apple M1" in json.dumps(found)
    assert found["ssd_source"].startswith("measured today, ")
    assert "Apple M1" in on_mac(home, "models").stdout


@rehearses("evaluate")
@pytest.mark.slow
def test_evaluate_names_what_is_not_installed(home):
    """lm-evaluation-harness is none of the tests' dependencies."""
    done = run(home, "evaluate", "--tasks", "arc_easy")
    assert done.returncode == 1
    assert re.search(r"^error: evaluate needs lm-eval \(", done.stderr, re.M)
    assert "Traceback" not in done.stderr


@rehearses("check")
def test_check_of_an_operation(home):
    done = on_mac(home, "check", "--operation", "moe_combine", "--dtype", "bfloat16")
    assert re.search(r"moe_combine +fused +bfloat16 +right", done.stdout)


@pytest.mark.slow
@rehearses("check")
def test_check_of_all_kernels(home):
    done = on_mac(home, "check", "--operation", "kernels", "--dtype", "bfloat16")
    assert "right" in done.stdout
    assert "wrong" not in done.stdout


@pytest.mark.slow
@rehearses("check")
def test_check_against_mlx_lm(home, two_layers):
    """A family for which mlx-lm has no kernels of its own, which cannot be emulated."""
    done = on_mac(home, "check", "--against", "mlx-lm", str(two_layers / "deepseek-tiny"))
    assert "4 of 4 parts are right" in done.stdout
    assert "same bits streamed and resident" in done.stdout
    assert number(done, "kernels launched") >= 10


@pytest.mark.slow
@rehearses("synthesize")
def test_synthesized_model(home, tmp_path):
    made = ("synthesize", "--like", "qwen3.5-tiny", "--layers", "2", "--out", str(tmp_path / "s"))
    done = on_mac(home, *made, "--measure", "8")
    assert "8 tokens: " in done.stdout


@pytest.mark.slow
@rehearses("generate", "trace")
def test_traced_generation(home, tmp_path):
    trace = str(tmp_path / "run.trace")
    on_mac(home, *GENERATE, "--expert-memory", "25%", "--trace", trace)
    assert "lfu" in on_mac(home, "trace", "replay", trace).stdout
    on_mac(home, "trace", "show", trace, "--out", str(tmp_path / "pictures"))
    assert list((tmp_path / "pictures").iterdir())


@pytest.mark.slow
@rehearses("perplexity")
def test_perplexity(home, tmp_path):
    text = tmp_path / "text"
    text.write_text("def add(a, b):\n    return a + b\n" * 8)
    options = ("--data-path", str(text), "--sequence-length", "8", "--num-samples", "2")
    done, expected = on_mac(home, "perplexity", *options), of_cpu("perplexity", *options)
    found = [float(re.search(r"(\d+\.\d+)", out)[1]) for out in (done.stdout, expected)]
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.slow
@rehearses("compare-quality")
def test_compare_quality(home):
    given = ("--experts-per-token", "2", "--max-tokens", "2", "--json")
    assert json.loads(on_mac(home, "compare-quality", *given).stdout)


@pytest.mark.slow
@rehearses("serve")
def test_serve_answers(home, talking):
    assert one_answer(home, "serve", talking)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
@rehearses("server")
def test_server_is_serve(home, talking):
    assert one_answer(home, "server", talking)["usage"]["completion_tokens"] == 2


def one_answer(home: Path, command: str, model: Path) -> dict:
    """Return a server's reply of two tokens, and end it by a signal."""
    # Before it answers it reads prompts of every batch size up to this one.
    given = ("--model", str(model), "--port", "0", "--decode-concurrency", "1")
    with start(home, command, *given) as child:
        try:
            lines = iter(child.stderr.readline, "")
            place = next(m[1] for m in (re.search(r"(http://[\d.:]+)", x) for x in lines) if m)
            body = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": 2}
            request = urllib.request.Request(
                f"{place}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as reply:
                answer = json.load(reply)
            child.send_signal(signal.SIGTERM)
            err = child.communicate(timeout=60)[1]
        finally:
            child.kill()
    assert "Traceback" not in err
    return answer


MEASURE = ("benchmark", "-p", "8", "-g", "3", "--num-trials", "1", "--expert-memory")


@pytest.mark.slow
@rehearses("benchmark")
def test_benchmark(home):
    done = on_mac(home, *MEASURE, "100%,50%")
    assert not re.search(r"\bwrong\b", done.stdout)


@pytest.mark.slow
@rehearses("benchmark")
def test_benchmark_of_a_cold_disk_passes_the_page_cache(home):
    done = on_mac(home, *MEASURE, "50%", "--cold")
    (run_,) = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert run_["streaming"]["state"] == "unverified"
    assert "The page cache was not emptied: files are written and read past it" in done.stdout
    assert number(done, "files past the page cache") >= 2


@pytest.mark.slow
@rehearses("report")
@pytest.mark.parametrize("model", [None, BUNDLED_MODEL], ids=["synthetic", "model"])
def test_report(home, tmp_path, model):
    given = () if model is None else ("--model", str(model))
    on_mac(
        home, "report", "--out", str(tmp_path / "mac"), "--seconds", "3000", *given, seconds=3000
    )
    report = json.loads((tmp_path / "mac.json").read_text())
    by_name = {step["name"]: step for step in report["steps"]}
    other = "synthetic" if model else "model"
    assert list(by_name) == [name for name in STEPS if name not in (other, "against")]
    assert {step["status"] for step in by_name.values()} == {"ok"}
    assert report["machine"]["system"] == "macOS 26.1"
    assert report["machine"]["GPU or CPU"].startswith("Apple M1")
    cells = [cell.strip() for cell in add_report().row(report).strip("|").split("|")]
    assert all(cell and cell != "-" for cell in cells)
    if model is None:
        measured = by_name["synthetic"]
        assert measured["title"] == "2 layers of qwen3.5-tiny, past the page cache"
        assert "The page cache was not emptied" in measured["text"]
        runs = measured["result"]["runs"]
        assert [run_["expert_memory"] for run_ in runs] == ["100%", "50%", "25%", "12.5%"]
        assert {run_["streaming"]["state"] for run_ in runs[1:]} == {"unverified"}


def add_report():
    """The tool that makes a report a row of docs/results.md."""
    spec = importlib.util.spec_from_file_location("add_report", ROOT / "tools" / "add_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@rehearses("tune")
def test_tune_of_a_model(home, tmp_path):
    file = tmp_path / "tuning.json"
    few = ("--max-tokens", "2", "--repeats", "1", "--budgets", "25%")
    on_mac(home, "tune", "--out", str(file), *few)
    assert json.loads(file.read_text())["expert_memory"]


@pytest.mark.slow
@rehearses("convert", "generate")
def test_converted_model(home, tmp_path):
    packed = str(tmp_path / "packed")
    on_mac(home, "convert", "--model", str(BUNDLED_MODEL), "--mlx-path", packed)
    for memory in "100%", "25%":
        done = on_mac(home, *GENERATE, "--model", packed, "--expert-memory", memory)
        assert done.stdout == of_cpu(*GENERATE)


@pytest.mark.slow
@rehearses("tune")
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


if __name__ == "__main__":
    for name in (*COMMANDS, *ALIASES):
        sys.stdout.write(f"{name:<16} {', '.join(REHEARSALS[name])}\n")

"""perplexity and evaluate, --safe, and the commands that run without MLX."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm import utils

from mlx_moeflux import load
from mlx_moeflux.cli import main
from mlx_moeflux.installation import install_command
from mlx_moeflux.loading import BUNDLED_MODEL

ROOT = Path(__file__).parents[2]
TEXT = "def binary_search(items, target):\n    low, high = 0, len(items)\n" * 6

WITHOUT_MLX = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mlx":
            raise ImportError(f"no {name} here")
sys.meta_path.insert(0, Blocked())
from mlx_moeflux.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_without_mlx(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_MLX, *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_version_policies_traces_and_plans_need_no_back_end(tmp_path):
    done = run_without_mlx("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mlx_moeflux ")
    assert "(no MLX back end)" in done.stdout
    done = run_without_mlx("policies")
    assert done.returncode == 0, done.stderr
    assert "--eviction" in done.stdout
    trace = tmp_path / "run.trace"
    arguments = ["--expert-memory", "25%", "-m", "4", "--trace", str(trace)]
    assert main(["generate", *arguments]) == 0
    done = run_without_mlx("trace", "replay", str(trace))
    assert done.returncode == 0, done.stderr
    assert "belady" in done.stdout
    machine = ("--memory", "16GB", "--ssd-gbps", "1")
    done = run_without_mlx("plan", str(BUNDLED_MODEL), *machine)
    assert done.returncode == 0, done.stderr
    assert "verdict  resident" in done.stdout
    done = run_without_mlx("models", *machine)
    assert done.returncode == 0, done.stderr
    assert "streams" in done.stdout


def test_a_command_that_needs_a_back_end_says_so_in_one_line():
    done = run_without_mlx("generate")
    assert done.returncode == 1
    assert done.stderr.startswith("error: MLX has no back end")
    assert done.stderr.count("\n") == 1


def test_perplexity_is_the_exponential_of_the_mean_loss(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    arguments = ["perplexity", "--data-path", str(file), "--sequence-length", "16"]
    assert main([*arguments, "--batch-size", "3", "--num-samples", "-1"]) == 0
    found = capsys.readouterr().out.split()
    assert found[0::2] == ["Perplexity:", "±"]
    model, tokenizer = load(BUNDLED_MODEL)
    with model:
        ids = np.array(tokenizer.encode(TEXT))
        rows = ids[: len(ids) // 16 * 16].reshape(-1, 16)
        assert len(rows) > 3
        losses = []
        for row in rows:
            logits = np.array(model(mx.array(row[None, :-1]))[0].astype(mx.float32), np.float64)
            exponentials = np.exp(logits)
            share = exponentials[np.arange(15), row[1:]] / exponentials.sum(axis=1)
            losses += (-np.log(share)).tolist()
    value = math.exp(np.mean(losses))
    error = value * np.std(losses, ddof=1) / math.sqrt(len(losses))
    assert [float(found[1]), float(found[3])] == pytest.approx([value, error], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--data-path", "no/such/file"], "no/such/file"),
        (["--data-path", "{file}", "--sequence-length", "9999"], "at least one sequence"),
        (["--data-path", "{file}", "--num-samples", "0"], "at least one sequence"),
        (["--data-path", "{file}", "--batch-size", "0"], "--batch-size"),
    ],
)
def test_perplexity_refuses_bad_input(tmp_path, capsys, options, word):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    assert main(["perplexity", *(option.format(file=file) for option in options)]) == 1
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(lines) == 1
    assert word in lines[0]


@pytest.fixture
def stock_loader(monkeypatch):
    """Let mlx-lm's own loader return after the test."""
    monkeypatch.setattr(utils, "load_model", utils.load_model)


@pytest.mark.usefixtures("stock_loader")
def test_evaluate_without_lm_eval_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    monkeypatch.delattr(mlx_lm, "evaluate", raising=False)
    assert main(["evaluate", "--tasks", "arc_easy"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: evaluate needs lm-eval (")
    mend = f"install the extra 'evaluate' with {install_command('mlx_moeflux[evaluate]')}"
    assert error.endswith(f"; {mend}.\n")
    assert error.count("\n") == 1


@pytest.fixture
def program(monkeypatch, stock_loader):
    """Put a function in the place of mlx-lm's program, and tasks in that of lm-eval's."""

    def put(main):
        modules = {name: types.ModuleType(name) for name in (
            "mlx_lm.evaluate", "lm_eval", "lm_eval.tasks",
        )}  # fmt: skip
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        modules["mlx_lm.evaluate"].main = main
        known = types.SimpleNamespace(all_tasks=["a", "b", "arc_easy"])
        modules["lm_eval.tasks"].TaskManager = lambda: known
        monkeypatch.setattr(mlx_lm, "evaluate", modules["mlx_lm.evaluate"], raising=False)

    return put


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "--tasks has 'arc_eas', which lm-eval does not know; did you mean 'arc_easy'?",
            "a arc_eas",
        ),
        ("--tasks has 'none', which lm-eval does not know; 'lm-eval ls tasks' lists them.", "none"),
        ("--batch-size is 0; it must be at least 1.", "a --batch-size 0"),
        ("top_p is 3.0; it must be at least 0.0 and at most 1.0.", "a --top-p 3"),
        ("--chat-template-args must be a JSON object.", "a --chat-template-args 5"),
    ],
)
def test_evaluate_judges_before_it_loads(program, capsys, message, words):
    program(lambda: pytest.fail("it ran"))
    assert main(["evaluate", "--tasks", *words.split()]) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_data_set_that_evaluate_cannot_read_is_one_line(program, capsys):
    def offline():
        raise ConnectionError("no network")

    program(offline)
    assert main(["evaluate", "--tasks", "a"]) == 1
    assert capsys.readouterr().err.startswith("error: lm-eval cannot read its data or write its")


def test_evaluate_runs_the_program_of_mlx_lm_on_our_model(program):
    found = []

    def run():
        model, _ = utils.load_model(Path(sys.argv[sys.argv.index("--model") + 1]))
        with model:
            found.append((model.store.slots, sys.argv[3:]))

    program(run)
    arguments = ["--tasks", "a", "b", "--limit", "3", "--apply-chat-template"]
    assert main(["evaluate", *arguments, "--expert-memory", "50%"]) == 0
    (slots, passed), *_ = found
    assert set(slots.values()) == {16}
    assert passed == ["--tasks", "a", "b", "--limit", "3", "--apply-chat-template"]


def test_evaluate_gives_mlx_lm_an_id_or_a_folder(program, monkeypatch, tmp_path):
    found = []
    program(lambda: found.append(sys.argv[sys.argv.index("--model") + 1]))
    monkeypatch.setattr(
        "mlx_moeflux.checkpoint.hub.resolve", lambda name, *, revision: tmp_path / name / revision
    )
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3.6", "org/name", "org/name@v2"):
        assert main(["evaluate", "--model", name, "--tasks", "a"]) == 0
    mlx = "mlx-community/Qwen3.6-35B-A3B-4bit"
    assert found == [mlx, "org/name", str(tmp_path / "org/name/v2")]


def test_safe_reaches_the_model(capsys):
    assert main(["generate", "-m", "4", "--safe", "--stats", "-v", "--prompt", "x ="]) == 0
    line = next(x for x in capsys.readouterr().err.splitlines() if x.startswith("kernels: "))
    assert {choice.split("=")[1] for choice in line[9:].split(", ")} == {"reference"}
    assert main(["generate", "--safe", "--prefetch", "ahead"]) == 1
    assert "safe excludes" in capsys.readouterr().err

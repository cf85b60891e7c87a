"""Oracle: the examples' own output, run as a user runs them."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_generate_writes_python():
    out = run("examples/generate.py")
    assert "class Stack:" not in out  # the prompt is not repeated
    assert "def " in out
    assert "streamed" in out
    assert re.search(r"hit rate \d+\.\d %", out)


@pytest.mark.slow
def test_swap_router_trades_reads_for_text():
    rows = [line.split() for line in run("examples/swap_router.py").splitlines()[1:]]
    hits = [float(row[1]) for row in rows]
    bits = [float(row[4]) for row in rows]
    assert len(rows) == 4
    assert all(math.isfinite(b) for b in bits)
    assert hits[-1] > hits[0]
    assert bits[-1] > bits[0]


@pytest.mark.slow
def test_a_replay_gives_the_live_hits_and_policies_are_ordered():
    out = run("examples/trace_and_replay.py")
    live, replayed = re.search(r"hits live (\d+), replayed (\d+)", out).groups()
    assert live == replayed
    rows = {line.split()[0]: list(map(float, line.split()[1:])) for line in out.splitlines()
            if re.match(r"[a-z0-9]+ +\d+\.\d+ +\d", line)}  # fmt: skip
    assert {"lru", "lfu", "belady", "shuffled"} <= set(rows)
    for name in set(rows) - {"shuffled"}:
        assert all(a <= b for a, b in zip(rows[name], rows["belady"], strict=True))
    times = [float(t) for t in re.findall(r"([\d.]+) ms a token", out)]
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_published_curves_are_those_of_the_guide(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    out = run("examples/published_curves.py", "--plot", str(tmp_path / "curves.png"))
    table = [line for line in out.splitlines() if re.match(r"lru|lfu|belady| *\d+ guesses", line)]
    rows = {line.split()[0]: [*map(float, re.findall(r"\d+\.\d", line))] for line in table}
    assert [*rows] == ["lru", "lfu", "belady", "4", "8"]
    assert [len(row) for row in rows.values()] == [8, 8, 8, 5, 5]
    for name in ("lru", "lfu"):
        assert all(a <= b for a, b in zip(rows[name], rows["belady"], strict=True))
        assert rows[name] == sorted(rows[name])
        assert rows[name][-1] == rows["belady"][-1]  # everything fits: first uses alone miss
    for row in (rows["4"], rows["8"]):
        assert row == sorted(row, reverse=True)
        assert row[-1] > 100 * 8 / 32
    guide = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
    for name, row in rows.items():
        label = {"belady": "Belady", "4": "4 guesses", "8": "8 guesses"}.get(name, name.upper())
        shown = re.search(rf"^\| {label} \|(.+)\|$", guide, re.MULTILINE)[1].split("|")
        assert [float(cell) for cell in shown] == pytest.approx(row, abs=3)
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (1600, 900)


@pytest.mark.slow
def test_a_policy_of_ones_own_lies_between_nothing_and_belady():
    out = run("examples/swap_policy.py")
    rows = [list(map(float, row)) for row in re.findall(r"%  +([\d.]+)  +([\d.]+)  +([\d.]+)", out)]
    assert len(rows) == 3
    assert all(0 < mine <= best for _, mine, best in rows)
    assert "same text: True" in out


@pytest.mark.slow
def test_slots_move_between_layers_and_the_text_stays():
    out = run("examples/policies/balance.py")
    kept, moved = ([*map(int, row.split(","))] for row in re.findall(r"slots \[(.+)\]", out))
    assert kept != moved
    assert sum(kept) == sum(moved)
    assert "same text: True" in out


def test_a_kernel_of_ones_own_is_called_and_changes_nothing():
    out = run("examples/swap_kernel.py")
    assert float(re.search(r"from the reference: (\S+)", out)[1]) <= 1e-5
    reference, mine = map(int, re.findall(r"called (\d+) times", out))
    assert reference == 0
    # Every layer has a shared expert, and every step runs it.
    assert mine >= 6 * 24
    assert "same text: True" in out


@pytest.mark.parametrize("name", ["swap_policy", "swap_kernel", "trace_and_replay"])
def test_short_examples_stay_short(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.slow
def test_train_tiny_learns_saves_goes_on_and_loads(tmp_path):
    from mlx_moeflux import generate, load

    out = tmp_path / "tiny"
    command = ["examples/train_tiny.py", "--preset", "smoke", "--out", str(out), "--report", "2"]
    first = run(*command, "--checkpoint-every", "6", "--minutes", "0.001")
    assert "stopped after" in first
    second = run(*command)
    assert "going on at step" in second
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", first + second)]
    assert losses[-1] < losses[0]
    bits = re.search(r"bits per byte: (\d+\.\d+) before rounding, (\d+\.\d+) as stored", second)
    assert 0 < float(bits[1]) < 8
    assert float(bits[2]) < 1.02 * float(bits[1])
    model, tokenizer = load(out, expert_memory="50%")
    with model:
        assert isinstance(generate(model, tokenizer, "import ", max_tokens=3), str)


@pytest.mark.slow
def test_train_tiny_swaps_the_router(tmp_path):
    out = run(
        "examples/train_tiny.py", "--preset", "smoke", "--steps", "2", "--router", "sigmoid",
        "--out", str(tmp_path / "other"),
        MLX_DISABLE_COMPILE="1",  # 65 kernels for two steps; the slow test has them
    )  # fmt: skip
    assert "held-out bits per byte" in out


@pytest.mark.slow
def test_train_head_learns_and_what_it_writes_drafts(tmp_path):
    out = run(
        "examples/train_head.py", "--rows", "20", "--steps", "40", "--batch", "2",
        "--prompts", "1", "--out", str(tmp_path / "with_head"),
    )  # fmt: skip
    first, last = map(float, re.findall(r"loss (\d+\.\d+)", out))
    assert last < first
    assert float(re.search(r"(\S+) MB of mtp", out)[1]) <= 1.5
    shares = [float(share) for share in re.findall(r"([\d.]+)% of the drafts", out)]
    assert len(shares) == 4
    assert all(0 <= share <= 100 for share in shares)
    assert max(shares) > 0


@pytest.mark.slow
def test_bigger_than_memory_holds_less_than_its_checkpoint():
    pytest.importorskip("mlx_lm")
    out = run("examples/bigger_than_memory.py")
    size, limit = map(
        float, re.search(r"checkpoint (\S+) GB, limit of our process (\S+)", out).groups()
    )
    ours, theirs = map(float, re.findall(r"peak (\S+) GB", out))
    assert limit < size
    assert ours < limit
    assert ours < theirs


@pytest.mark.slow
def test_shared_prompt_reads_the_text_once_and_in_one_process(tmp_path):
    def known(out):
        return [line.split()[1:3] for line in out.splitlines()[1:4]]

    first, second = (run("examples/shared_prompt.py", str(tmp_path / "known")) for _ in range(2))
    (none, _), (text, _), (same, _) = known(first)
    assert none == "0"
    assert int(text) > 300
    assert text == same
    assert all(cached == asked for cached, asked in known(second))
    assert [line.split("  ")[-1] for line in first.splitlines()[1:4]] == [
        line.split("  ")[-1] for line in second.splitlines()[1:4]
    ]

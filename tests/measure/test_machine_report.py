"""Steps are real commands of the package; oracle: what each is known to do."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlx_moeflux import cli
from mlx_moeflux.errors import InputError
from mlx_moeflux.measure import machine_report
from mlx_moeflux.measure.machine_report import Step, check_outputs, run_steps, without_names

ROOT = Path(__file__).parents[2]
GOOD = Step("good", "Policies", ("policies",), 60)
TABLE = Step(
    "bundled", "A benchmark",
    ("benchmark", "-p", "4", "-g", "2", "-n", "1", "--expert-memory", "100%,50%", "--markdown"),
    120, table=True,
)  # fmt: skip
WRONG = Step("wrong", "A wrong flag", ("plan", "/no/such/model"), 60)
SLOW = Step("slow", "A slow one", ("generate", "--prompt", "a", "--max-tokens", "100000"), 0.5)


def with_file(step, folder):
    return Step(step.name, step.title, (*step.arguments, str(folder / f"{step.name}.md")),
                step.seconds, step.table)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    begun = []
    found = run_steps(
        [GOOD, with_file(TABLE, folder), WRONG, SLOW], folder, report=lambda s: begun.append(s.name)
    )
    assert begun == ["good", "bundled", "wrong", "slow"]
    return found


@pytest.mark.slow
def test_each_step_has_its_own_result(report):
    good, table, wrong, slow = report.outcomes
    assert [o.status for o in report.outcomes] == ["ok", "ok", "failed", "too slow"]
    assert "lru" in good.text
    assert table.text.startswith("### the bundled model")
    assert [run["expert_memory"] for run in table.result["runs"]] == ["100%", "50%"]
    assert "/no/such/model" in wrong.text
    assert "Traceback" not in wrong.text
    assert 0.5 <= slow.seconds < 30
    assert report.complete


@pytest.mark.slow
def test_both_files_say_the_same_and_name_nobody(report, tmp_path):
    files = check_outputs(tmp_path / "report")
    machine_report.write(report, files)
    markdown, content = files[0].read_text(), json.loads(files[1].read_text())
    assert [step["status"] for step in content["steps"]] == ["ok", "ok", "failed", "too slow"]
    for outcome in report.outcomes:
        assert f"| {outcome.title} | {outcome.status} |" in markdown
    names = {str(Path.home()), os.uname().nodename, str(tmp_path.parent)} - {"/", ""}
    for name in names:
        assert name not in markdown
        assert name not in files[1].read_text()


def test_names_are_replaced(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/Users/somebody")
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", "/Users/somebody/cache")
    text = f"{tmp_path}/a /Users/somebody/model /Volumes/somebody/x /Users/somebody/cache/t"
    assert without_names(text, tmp_path) == "FOLDER/a ~/model /Volumes/USER/x CACHE/t"


def test_all_steps_end_within_the_time_of_all(tmp_path):
    found = run_steps([SLOW, GOOD], tmp_path, seconds=0.6)
    assert [o.status for o in found.outcomes] == ["too slow", "too slow"]
    assert found.outcomes[1].seconds == 0


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
def test_ctrl_c_ends_the_step_and_keeps_the_report(tmp_path):
    slow = Step("slow", "A slow one", SLOW.arguments, 60)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    found = run_steps([GOOD, slow, GOOD], tmp_path)
    timer.join()
    assert [o.status for o in found.outcomes][1:] == ["interrupted", "not begun"] or (
        [o.status for o in found.outcomes] == ["interrupted", "not begun", "not begun"]
    )
    assert not found.complete


def test_ctrl_c_while_a_step_ends_keeps_the_report(tmp_path, monkeypatch):
    communicate, late = subprocess.Popen.communicate, [KeyboardInterrupt]

    def interrupted(child, **options):
        found = communicate(child, **options)
        if late:
            raise late.pop()
        return found

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    found = run_steps([GOOD, GOOD], tmp_path)
    assert [o.status for o in found.outcomes] == ["interrupted", "not begun"]


@pytest.mark.parametrize("place", ["missing/report", "folder"])
def test_outputs_that_cannot_be_written_are_one_line_at_once(tmp_path, place):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InputError, match=r"choose another"):
        check_outputs(tmp_path / place)


def test_the_command_writes_both_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine_report, "steps", lambda folder, model, **options: [GOOD])
    assert cli.main(["report", "--out", str(tmp_path / "mine")]) == 0
    assert "Policies" in capsys.readouterr().out
    assert (tmp_path / "mine.md").exists()
    assert json.loads((tmp_path / "mine.json").read_text())["format"] == 1
    monkeypatch.setattr(machine_report, "steps", lambda folder, model, **options: [WRONG])
    assert cli.main(["report", "--out", str(tmp_path / "mine")]) == 1
    assert cli.main(["report", "--seconds", "nan"]) == 1


@pytest.mark.parametrize("model", [None, "somebody/model"])
def test_the_steps_are_commands_with_known_flags(tmp_path, model):
    import argparse

    options = {"strict_config": False, "against": "mlx-lm"}
    for step in machine_report.steps(tmp_path, model, **options):
        parser = argparse.ArgumentParser()
        cli.command_module(step.arguments[0]).add_arguments(parser)
        parser.parse_args(step.arguments[1:])


def tool():
    spec = importlib.util.spec_from_file_location("add_report", ROOT / "tools" / "add_report.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["add_report"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_row_is_added_to_the_page_and_replaced(report):
    add_report = tool()
    content = json.loads(report.as_json())
    row = add_report.row(content)
    assert row.count("|") == len(add_report.COLUMNS) + 1
    page = add_report.PAGE.read_text()
    once = add_report.added(page, row)
    assert row in once
    assert add_report.added(once, row) == once
    content["machine"]["system"] = "macOS 26.1"
    twice = add_report.added(once, add_report.row(content))
    assert len(twice.splitlines()) == len(once.splitlines()) + 1
    with pytest.raises(ValueError, match="format 2"):
        add_report.row(content | {"format": 2})


@pytest.mark.slow
def test_the_whole_report(tmp_path):
    assert cli.main(["report", "--out", str(tmp_path / "whole")]) == 0
    steps = json.loads((tmp_path / "whole.json").read_text())["steps"]
    assert [step["status"] for step in steps] == ["ok"] * 4

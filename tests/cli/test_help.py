"""One test reads all help texts: of every command, under both of its names."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

import pytest

from mlx_moeflux.cli import ALIASES, COMMANDS, command_module, main, script
from mlx_moeflux.models.shapes import SHAPES

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
SCRIPTS = [name for name in SCRIPTS["project"]["scripts"] if "." in name]
# How Python prints what no user types.
REPR = re.compile(r"\bNone\b|<[a-z]+ |\bobject at 0x|\(\)|\['|\('|%\(|\{\}|PosixPath|lambda")
# A name and its only spelling.
SPELT = {
    r"hugg\w*\s+\w+": "Hugging Face", r"\bmlx[-_ ]?lm\b(?!\.)": "mlx-lm",
    r"\bopen ?ai\b": "OpenAI", r"\bjson\b": "JSON", r"\butf-?8\b": "UTF-8",
}  # fmt: skip


def arguments(command: str):
    """Each argument of a command that its help shows, with its whole text."""
    parser = argparse.ArgumentParser()
    command_module(command).add_arguments(parser)
    for action in parser._actions:
        if action.help is not argparse.SUPPRESS and action.dest != "help":
            text = None if action.help is None else parser._get_formatter()._expand_help(action)
            yield (action.option_strings or [action.dest])[0], action, text


def fault(action: argparse.Action, text: str | None) -> str | None:
    """Return what is wrong with the help of an argument, or None."""
    if not text:
        return "has no help"
    if text != " ".join(text.split()) or text.endswith(".") or text[0].isspace():
        return "is no phrase without a full stop"
    if REPR.search(text):
        return "shows Python"
    default = action.default
    shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
    if shown in ("None", "False", "", "{}") or action.const is False:
        return None
    value = rf"(?<![\w.]){re.escape(shown)}(?![\w.]*\w)"
    if "default" not in text or not re.search(value, text, re.IGNORECASE):
        return f"does not say the default {shown}"
    return None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_text(command, capsys, monkeypatch):
    for name, action, text in arguments(command):
        assert fault(action, text) is None, f"{command} {name}: {text!r} {fault(action, text)}"
    for width in (80, 100, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        whole, err = capsys.readouterr()
        assert (ended.value.code, err) == (0, "")
        assert max(map(len, whole.splitlines())) <= width
        assert not REPR.search(re.sub(r"\{\w[\w.,-]*\}", "", whole)), whole
    one_line = " ".join(whole.split())
    for pattern, spelt in SPELT.items():
        for found in re.findall(pattern, re.sub(r"--\S+|\S+\.\S+", "", one_line), re.IGNORECASE):
            assert found == spelt, (command, found)
    description = whole.split("\n\n")[1]
    assert re.fullmatch(r"[A-Z][^\n]*\.", description), description


def test_the_list_of_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for command, purpose in COMMANDS.items():
        assert f"{command} {purpose}" in text or f"{command} (" in text
        assert purpose[0].islower()
        assert not purpose.endswith(".")
    assert set(ALIASES.values()) <= COMMANDS.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_have_the_texts_of_their_commands(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        script()
    text = capsys.readouterr().out
    command = name.split(".")[1]
    purpose = COMMANDS[ALIASES.get(command, command)]
    assert text.startswith(f"usage: {name} ")
    assert f"\n\n{purpose[0].upper()}{purpose[1:]}.\n\n" in text


def test_published_shapes_are_listed(capsys):
    assert main(["shapes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head, *rows = (re.split(r" {2,}", line) for line in lines)
    assert head == ["shape", "type", "layers", "experts", "a token", "width"]
    assert [row[0] for row in rows] == list(SHAPES)
    assert ["gpt-oss-120b", "gpt_oss", "36", "128", "4", "2880"] in rows
    assert ["kimi-k2.5", "kimi_k25", "61", "384", "8", "7168"] in rows

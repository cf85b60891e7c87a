"""Completion scripts. Oracle: what a shell that has read one completes."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from mlx_moeflux.cli import ALIASES, COMMANDS, main
from mlx_moeflux.cli.completion import SHELLS, completion_script
from mlx_moeflux.installation import install_command

# Prints the completions of the last word, one a line.
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p mlx_moeflux | sed -E 's/.* -F ([^ ]+) .*/\\1/')
"$function" mlx_moeflux "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    pytest.importorskip("shtab")
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(completion_script(shell), encoding="utf-8")
    return folder


def completed(scripts, cwd, *words: str) -> set[str]:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    command = [bash, "--norc", "-c", BASH, "bash", scripts / "bash", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return {line.rstrip() for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gen"], {"generate"}),
        (["che"], {"check"}),
        (["generate", "--expert-m"], {"--expert-memory"}),
        (["run", "--hide"], {"--hide-thinking"}),
        (["generate", "--adapter"], set()),  # refused, so not shown
        (["convert", "--dtype", "b"], {"bfloat16"}),
        (["trace", "sh"], {"show"}),
        (["trace", "show", "run"], {"run.trace"}),
        (["generate", "--model", "mod"], {"models"}),
        (["generate", "--prompt-file", "run"], {"run.trace"}),
        (["completion", "f"], {"fish"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(words, expected, scripts, tmp_path):
    (tmp_path / "run.trace").write_text("")
    (tmp_path / "models").mkdir()
    found = {word.rstrip("/") for word in completed(scripts, tmp_path, "mlx_moeflux", *words)}
    assert found == expected


def test_bash_completes_every_command(scripts, tmp_path):
    found = completed(scripts, tmp_path, "mlx_moeflux", "")
    assert found >= {*COMMANDS, *ALIASES}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_what_its_shell_can_read(shell, scripts):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    done = subprocess.run(
        [shell, "-n", scripts / shell], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script(shell, scripts, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == (scripts / shell).read_text(encoding="utf-8")
    assert all(name in text for name in COMMANDS)


def test_without_shtab_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert install_command("mlx_moeflux[completion]") in err
    assert len(err.splitlines()) == 1

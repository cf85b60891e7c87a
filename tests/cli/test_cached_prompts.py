"""Oracle: one call without a cache. `cache_prompt`, `--prompt-cache-file` and `--prompt-cache` may
only save time, and say so where they cannot."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.cli import main
from mlx_moeflux.tokenizer import load_tokenizer

BEGINNING, REST = "import os\n\n", "def main(argv):\n"


def out_of(capsys, *arguments) -> tuple[str, list[str]]:
    assert main(list(arguments)) == 0
    out, err = capsys.readouterr()
    return out, err.strip().splitlines()


@pytest.fixture(scope="module")
def talking(two_bundled_layers, tmp_path_factory) -> Path:
    """The bundled model with a chat template."""
    directory = tmp_path_factory.mktemp("talking") / "model"
    shutil.copytree(two_bundled_layers, directory)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}def{% endif %}"
    )
    return directory


def test_a_cached_prompt_is_the_beginning_of_the_next(two_bundled_layers, capsys, tmp_path):
    file = str(tmp_path / "prompt.safetensors")
    text = BEGINNING.replace("\n", "\\n")
    kept = "--model", str(two_bundled_layers), "--prompt-cache-file", file
    out, err = out_of(capsys, "cache_prompt", "--prompt", text, *kept)
    assert out == ""
    assert re.fullmatch(r"wrote .*: \d+ tokens, \d+\.\d MB", err[-1])
    model, tokenizer = load(two_bundled_layers)
    ids = tokenizer.encode(BEGINNING) + tokenizer.encode(REST, add_special_tokens=False)
    with model:
        expected = generate(model, tokenizer, ids, max_tokens=9)
    for _ in range(2):  # the file is not changed
        out, err = out_of(capsys, "generate", "-p", REST.replace("\n", "\\n"), "-m", "9", *kept)
        assert out == expected + "\n"
        rest = len(tokenizer.encode(REST, add_special_tokens=False))
        assert err[-1].startswith(f"prompt {rest} tokens")


def test_a_cached_message_goes_on_and_names_its_model(capsys, tmp_path, talking):
    file = str(tmp_path / "prompt.safetensors")
    out_of(
        capsys, "cache_prompt", "--model", str(talking), "--prompt", "a long text",
        "--prompt-cache-file", file,
    )  # fmt: skip
    model, tokenizer = load(talking)
    ids = tokenizer.encode("# user: a long text", add_special_tokens=False)
    ids += tokenizer.encode(" and more\ndef", add_special_tokens=False)
    with model:
        expected = generate(model, tokenizer, ids, max_tokens=9)
    out, _ = out_of(capsys, "generate", "-p", " and more", "-m", "9", "--prompt-cache-file", file)
    assert out == expected + "\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_directory_of_prompts_saves_the_second_reading(two_bundled_layers, capsys, tmp_path):
    directory = str(tmp_path / "prompts")
    arguments = ["generate", "-p", "import os\\n\\n", "-m", "9", "--stats", "-v"]
    arguments += ["--model", str(two_bundled_layers)]
    expected, _ = out_of(capsys, *arguments)
    prompt = len(load_tokenizer(two_bundled_layers).encode("import os\n\n"))
    for read in (prompt + 8, 8):
        out, err = out_of(capsys, *arguments, "--prompt-cache", directory)
        assert out == expected
        (total,) = [line.split() for line in err if line.startswith("total")]
        assert total[1] == str(read)
        disk = [line for line in err if line.startswith("disk since the start: 0 B of experts")]
        assert len(disk) == (read > 8)
    (file,) = Path(directory).glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    out, err = out_of(capsys, *arguments, "--prompt-cache", directory)
    assert out == expected
    (warning,) = [line for line in err if line.startswith("warning: ")]
    assert "is truncated" in warning


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--prompt-cache-file", "none"], "No readable mlx_moeflux.state file"),
        (["generate", "--prompt-cache", "x", "--prompt-cache-file", "y"], "not both"),
        (["generate", "--prompt-cache", "x", "--prompt-cache-disk", "auto"], "is auto"),
        (["cache_prompt", "--prompt", "a", "--prompt-cache-file", "no/where"], "no/where"),
        (["cache_prompt", "--prompt", "", "--prompt-cache-file", "x"], "empty"),
        (["chat", "--chat-template-config", "["], "--chat-template-config"),
        (["chat", "--max-kv-size", "5"], "recurrent layers cannot be rotated"),
    ],
)
def test_errors_are_one_line_and_exit_1(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("error: ")
    assert words in err[-1]


def test_a_file_of_another_model_is_refused(capsys, tmp_path):
    file = str(tmp_path / "prompt.safetensors")
    out_of(capsys, "cache_prompt", "--prompt", "import", "--prompt-cache-file", file)
    assert main(["generate", "--experts-per-token", "2", "--prompt-cache-file", file]) == 1
    assert "saved by another model" in capsys.readouterr().err

"""Oracle: what a user sees. Text on stdout, everything else on stderr, one line for an error."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from datetime import date, timedelta
from pathlib import Path

import pytest

from mlx_moeflux import generate, load, stream_generate
from mlx_moeflux.cli import COMMANDS, command_module, main, make_parser, script
from mlx_moeflux.cli.common import REFUSED, given_prompt
from mlx_moeflux.cli.generate import DEFAULT_PROMPT
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.eviction import EVICTIONS
from mlx_moeflux.experts.policies.prefetch import PREFETCHES
from mlx_moeflux.generation import text
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.measure import rates
from mlx_moeflux.measure.disk import DiskSpeed
from mlx_moeflux.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]

OPTIONS = {
    "generate": """
        --chat-template-config --eviction --expert-memory --expert-reader --expert-threads
        --experts-per-token --extra-eos-token --frequency-penalty --ignore-chat-template
        --max-context --max-tokens --min-p --min-tokens-to-keep --model --prefill-response
        --pipeline --prefetch --prefill-step-size --presence-penalty --prompt --prompt-cache
        --prompt-cache-disk --repetition-penalty --seed --stats --stop --tuning
        --system-prompt --temp --top-k --top-p --trace --use-default-chat-template --verbose
        --xtc-probability --xtc-threshold -m -p
        --capture-layer --capture-token --gpu-capture --profile --prompt-file
        --adapter-path --draft-model --image --safe -v --kv-bits --kv-group-size --max-kv-size
        --num-draft-tokens --prompt-cache-file --quantize-activations --quantized-kv-start
        --trust-remote-code -qa
        --distributed --exact-prompts --expert-path --placement --wired-memory
        --requantize --row-memory --handshake --no-handshake --drafts --mtp-path --prompt-kernels
    """,
    "chat": """
        --adapter-path --chat-template-config --expert-memory --expert-reader --expert-threads
        --experts-per-token --fixed-memory --hide-thinking --idle-release --kv-bits
        --kv-group-size --max-context --max-kv-size --max-tokens --model
        --pipeline --prefill-step-size --prompt-cache --prompt-cache-disk --seed --stats
        --system-prompt --temp --top-p --trust-remote-code --xtc-probability --xtc-threshold -m
        --eviction --prefetch --safe -v --tuning
        --distributed --exact-prompts --expert-path --placement --wired-memory
        --requantize --row-memory --handshake --no-handshake --drafts --mtp-path --prompt-kernels
    """,
    "serve": """
        --allowed-host --allowed-origins --api-key --chat-template --chat-template-args
        --decode-concurrency --fixed-memory --host --idle-release --kv-memory --log-level
        --max-pause --max-tokens --max-waiting --min-p --model --model-name --no-warm-up --port
        --prefill-step-size --prompt-cache --prompt-cache-bytes --prompt-cache-disk
        --prompt-concurrency --reasoning-parser
        --shutdown-timeout --strict-model --temp --timeout --tool-parser --top-k --top-p
        --adapter-path --draft-model --num-draft-tokens --quantized-kv-start --pipeline
        --trust-remote-code --eviction --expert-memory --expert-reader
        --expert-threads --experts-per-token --kv-bits --kv-group-size --max-context
        --prefetch --safe --tuning
        --distributed --exact-prompts --expert-path --placement --wired-memory
        --requantize --row-memory --handshake --no-handshake --drafts --mtp-path --prompt-kernels
    """,
    "cache_prompt": """
        --adapter-path --eos-token --expert-memory --expert-reader --expert-threads
        --experts-per-token --kv-bits --kv-group-size --max-context --max-kv-size --model
        --prefill-step-size --prompt --prompt-cache-file --prompt-file --quantized-kv-start --stats
        --trust-remote-code
        --eviction --prefetch --safe -v --tuning --wired-memory
        --requantize --row-memory --handshake --no-handshake --drafts --mtp-path --prompt-kernels
    """,
    "convert": """
        --dequantize --dtype --hf-path --layout --mlx-path --model --out --q-bits --q-group-size
        --q-mode --quant-predicate --quantize --trust-remote-code --upload-repo --verify -d -q
        --placement --requantize --shard --no-mtp
    """,
    "check": "--against --dtype --link --model --no-strict-config --operation --revision",
    "plan": """
        --bits --model --context --expert-memory --json --link --link-latency --machines --memory
        --gguf-file --measure-disk --memory-gbps --revision --ssd-gbps
        --row-memory
    """,
    "models": "--json --measure-disk --memory --memory-gbps --ssd-gbps",
    "perplexity": """
        --batch-size --data-path --eviction --expert-memory --expert-reader
        --expert-threads --experts-per-token --kv-bits --kv-group-size --max-context --model
        --num-samples --prefetch --safe -v --seed --sequence-length --stats --trust-remote-code
        --tuning --wired-memory
        --requantize --row-memory --handshake --no-handshake --drafts --mtp-path --prompt-kernels
    """,
    "evaluate": """
        --apply-chat-template --batch-size --chat-template-args
        --confirm-run-unsafe-code --eviction --expert-memory --expert-reader --expert-threads
        --experts-per-token --fewshot-as-multiturn --kv-bits --kv-group-size --limit
        --max-context --max-tokens --model --no-apply-chat-template --num-shots --output-dir
        --prefetch --safe --seed --tasks --temp --top-k --top-p --trust-remote-code
        --tuning --wired-memory
        --requantize --row-memory --handshake --no-handshake --drafts --mtp-path --prompt-kernels
    """,
    "policies": "",
    "shapes": "",
    "completion": "",
    "report": "--against --model --out --seconds",
    "tune": "--budgets --kernels --max-tokens --model --out --repeats",
    "compare-quality": """
        --bits --expert-memory --experts-per-token --json --max-tokens --model --other
    """,
    "trace": "--budget --out --profile",
    "benchmark": """
        --batch-size --capture-layer --capture-token --cold --compare --context --delay
        --expert-memory --expert-reader --expert-threads --experts-per-token --generation-tokens
        --gpu-capture --layers --markdown --max-context --model --num-trials --pipeline --plot
        --prefill-step-size --profile --prompt-tokens
        --quantize-activations --seed --skew --synthetic --synthetic-dir --trust-remote-code
        -b -g -n -p -qa --drafts --mtp-path
        --distributed --exact-prompts --expert-path --placement
    """,
    "synthesize": "--bits --experts --layers --like --measure --out --seed --skew",
}
# Commands that take a revision, choose one of several GGUF models and refuse an unknown key of
# config.json.
STRICT = (
    "generate", "chat", "serve", "cache_prompt", "convert", "perplexity", "evaluate", "report",
    "tune", "compare-quality", "benchmark",
)  # fmt: skip


# Command -> what it needs beside a model.
WITH_A_MODEL = {
    "generate": [], "chat": [], "serve": ["--port", "0"], "benchmark": [], "report": [], "tune": [],
    "check": ["--against", "mlx-lm"],
    "cache_prompt": ["--prompt", "a", "--prompt-cache-file", "file"],
    "convert": ["--out", "out"],
    "perplexity": ["--data-path", str(Path(__file__))],
    "compare-quality": ["--bits", "4"],
    "plan": [],
}  # fmt: skip


@pytest.mark.parametrize("command", WITH_A_MODEL)
@pytest.mark.parametrize("by", ["option", "name"])
def test_the_revision_reaches_the_hub(command, by, tmp_path, monkeypatch, capsys):
    asked = []

    def ask(*question):
        asked.append(question)
        raise InputError("asked.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlx_moeflux.checkpoint.hub._ask", ask)
    name = ["qwen3.6@v2"] if by == "name" else ["qwen3.6", "--revision", "v2"]
    model = name if command == "plan" else ["--model", *name]
    assert main([command, *model, *WITH_A_MODEL[command]]) == 1
    assert capsys.readouterr().err.endswith("error: asked.\n")
    assert asked == [("mlx-community/Qwen3.6-35B-A3B-4bit", "v2", None)]


def run(
    *arguments: str, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Run a command. stdin: What its pipe has; None: it has no pipe."""
    source: dict = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(
        [sys.executable, "-m", "mlx_moeflux", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        **source,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_frozen(command):
    parser = argparse.ArgumentParser(add_help=False)
    command_module(command).add_arguments(parser)
    found = {name for action in parser._actions for name in action.option_strings}
    strict = {"--revision", "--gguf-file", "--no-strict-config"} if command in STRICT else set()
    assert found == set(OPTIONS[command].split()) | strict


def test_a_script_runs_the_command_of_its_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/somewhere/mlx_moeflux.server", "--help"])
    with pytest.raises(SystemExit) as end:
        script()
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: mlx_moeflux.server")
    assert "--api-key" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["genrate"], "there is no command 'genrate'; did you mean generate?"),
        (
            ["cache-prompt", "-m", "1"],
            "there is no command 'cache-prompt'; did you mean cache_prompt?",
        ),
        (["rum"], "there is no command 'rum'; did you mean run?"),
        (["xyz"], "there is no command 'xyz'; there are generate, chat, serve, "),
        (["generate", "--expert-memry", "1"], "--expert-memry; did you mean --expert-memory?"),
        (["generate", "--tempp=1"], "unrecognized arguments: --tempp=1; did you mean --temp?"),
        (["--verson"], "unrecognized arguments: --verson; did you mean --version?"),
        (["generate", "--zzz"], "arguments: --zzz; see mlx_moeflux generate --help\n"),
        (["generate", "--temperature", "1"], "--temperature; did you mean --temp?"),
        (["generate", "a", "word"], "arguments: word; give it with --prompt, in quotes if it "),
        (["serve", "dir", "word"], "arguments: word; see mlx_moeflux serve --help\n"),
        (["run", "dir", "question", "word"], "arguments: word; see mlx_moeflux run --help\n"),
        (["policies", "word"], "arguments: word; see mlx_moeflux policies --help\n"),
        (["-V"], "arguments: -V; see mlx_moeflux --help\n"),
        (["trace", "show", "--file", "x"], "arguments: --file; give the file without --file\n"),
        (["generate", "--ignore-eos"], "--ignore-eos; see mlx_moeflux generate --help\n"),
        (["generate", "--prompt-cach", "d"], "--prompt-cach; did you mean --prompt-cache?\n"),
        (["generate", "--max_tokens", "1"], "--max_tokens; did you mean --max-tokens?\n"),
        (["generate", "--prom", "a"], "--prom; did you mean --prompt?\n"),
        (["chat", "--max", "1"], "--max; did you mean --max-tokens or --max-context?\n"),
        (["generate", "--port", "80"], "--port; it is an option of serve\n"),
        (["chat", "--prompt", "a"], "--prompt; it is an option of generate, cache_prompt\n"),
        (["tune", "--tokens", "3"], "--tokens; did you mean --max-tokens?\n"),
        (["--temp", "1", "generate"], "--temp stands before the command; give options after it\n"),
    ],
)
def test_a_misspelt_word_suggests_the_right_one(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-file", "no such file"], "no such file cannot be read"),
        (["--prompt-file", os.devnull], "it is no regular file"),
        (["--max-tokens", "-2"], "max_tokens is -2"),
        (["--temp", "-1"], "temp is -1.0"),
        (["--repetition-penalty", "-1"], "repetition_penalty is -1.0"),
        (["--prompt", ""], "--prompt/-p is empty; give a value or leave it out"),
        (["--stop", "a", "--stop", ""], "--stop is empty"),
        (["--prompt", "a\udcff"], "--prompt is not UTF-8 at character 2; re-encode the text"),
        (["--system-prompt", "\udce4"], "--system-prompt is not UTF-8 at character 1"),
        (["--stop", "ab\udce4"], "--stop is not UTF-8 at character 3"),
        (["--chat-template-config", '{"a": "\\ud800"}'], "--chat-template-config is not UTF-8"),
        (["--chat-template-config", "[]"], "--chat-template-config must be a JSON object"),
        (["--prompt-cache-disk", "auto"], "--prompt-cache-disk is auto"),
        (["--prompt-cache-file", "no such file"], "no such file"),
        (["--trace", "no/such/file"], "--trace no/such/file cannot be written"),
        (["--profile", "no/such/file"], "no/such is not a directory"),
        (["what is this"], "'what is this', which is no model; give a prompt with --prompt."),
    ],
)
def test_generate_checks_a_reply_before_it_loads(options, message, monkeypatch, capsys):
    monkeypatch.setattr("mlx_moeflux.loading.load", lambda *_, **__: pytest.fail("it loads"))
    assert main(["generate", *options]) == 1
    assert message in capsys.readouterr().err


CACHE = ["cache_prompt", "--prompt-cache-file", "file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "--system-prompt", "\udce4"], "--system-prompt is not UTF-8"),
        (["run", "dir", "\udce4"], "QUESTION is not UTF-8"),
        (["run", "dir", ""], "QUESTION is empty"),
        (["run", "what is this"], "which is no model; give MODEL before QUESTION"),
        (["chat", "--prompt-cache-disk", "auto"], "--prompt-cache-disk is auto"),
        ([*CACHE, "--prompt", "\udce4"], "--prompt is not UTF-8"),
        ([*CACHE, "--prompt", "a", "--prefill-step-size", "0"], "prefill_step_size is 0"),
    ],
)  # fmt: skip
def test_other_commands_check_their_texts_before_they_load(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("mlx_moeflux.loading.load", lambda *_, **__: pytest.fail("it loads"))
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", ["", None])
def test_an_empty_pipe_or_file_is_no_prompt(given, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mlx_moeflux.loading.load", lambda *_, **__: pytest.fail("it loads"))
    (file := tmp_path / "empty").touch()
    for command in (["generate"], ["generate", "-p", "-"], CACHE):
        stdin = open(file, encoding="utf-8") if given is None else piped("")  # noqa: SIM115
        with stdin as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            assert main(command) == 1
        message = "error: standard input is empty, so there is no prompt; write one to it.\n"
        assert capsys.readouterr().err == message
    assert main(["generate", "--prompt-file", str(file)]) == 1
    assert "is empty; give a file with a prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [command for command in OPTIONS if "--model" in OPTIONS[command]]
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_the_model_is_a_word_wherever_it_is_an_option(command, place):
    needed = {**WITH_A_MODEL, "evaluate": ["--limit", "1", "--tasks=a"]}[command]
    words = ["a/b", *needed] if place == "first" else [*needed, "a/b"]
    if command == "generate":
        words = [*words[:1], "--temp", "0"] if place == "first" else ["--temp", "0", *words]
    args = make_parser(command).parse_args([command, *words])
    assert args.model == "a/b"
    with pytest.raises(InputError, match="give MODEL or --model, not both"):
        make_parser(command).parse_args([command, "--model", "c/d", *words])
    with pytest.raises(InputError, match="--model is given twice; give it once"):
        make_parser(command).parse_args([command, "--model", "c/d", *needed, "--model", "c/d"])


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["generate", "--prompt", "a", "-p", "b"], "-p"),
        (["convert", "--model", "a", "--hf-path", "b"], "--hf-path"),
    ],
)
def test_input_that_would_be_replaced_is_said(arguments, flag, capsys):
    assert main(arguments) == 1
    assert capsys.readouterr().err == f"error: {flag} is given twice; give it once.\n"


def test_the_last_value_of_a_setting_counts():
    assert make_parser("serve").parse_args(["serve", "--port", "1", "--port", "2"]).port == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_takes_an_empty_value(command, capsys):
    parser = make_parser(command)
    options = argparse.ArgumentParser()
    command_module(command).add_arguments(options)
    texts = [a for a in options._actions if a.option_strings and a.nargs != 0 and a.type is None
             and a.choices is None and a.help != argparse.SUPPRESS]  # fmt: skip
    for action in texts:
        for words in ([action.option_strings[0], ""], [f"{action.option_strings[0]}="]):
            required = [] if command != "trace" else ["show", "file"]
            needs = {
                "synthesize": ["--like", "a", "--out", "b"],
                "perplexity": ["--data-path", "f"],
                "evaluate": ["--tasks", "a"],
                "cache_prompt": ["--prompt-cache-file", "f"],
            }
            needed = needs.get(command, required)
            if words[0].rstrip("=") in needed:
                continue
            with pytest.raises(InputError, match="is empty; give a value or leave it out"):
                parser.parse_args([command, *needed, *words])


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("amount", ["4", "4G", "four"])
def test_an_amount_is_read_before_a_download(command, amount, monkeypatch, capsys):
    monkeypatch.setattr(
        "mlx_moeflux.loading.steps.resolve", lambda *_, **__: pytest.fail("it downloads")
    )
    assert main([command, "--model", "org/name", "--expert-memory", amount]) == 1
    assert f"{amount!r}" in capsys.readouterr().err


@pytest.mark.parametrize("amount", ["50%", "0GB", "much"])
def test_the_memory_of_a_machine_is_called_by_its_name(amount, capsys):
    assert main(["models", "--memory", amount, "--ssd-gbps", "3"]) == 1
    message = f"the planned memory {amount!r} is not an amount; give one such as 32GB or 512MiB"
    assert capsys.readouterr().err == f"error: {message}.\n"


def test_run_is_chat_and_takes_the_model_as_a_word(monkeypatch, capsys):
    asked = []

    def load(path, **options):
        asked.append(path)
        raise InputError("seen")

    monkeypatch.setattr("mlx_moeflux.loading.load", load)
    for arguments in (["run", "a/b"], ["chat", "a/b"], ["run", "--model", "a/b"]):
        assert main(arguments) == 1
    assert asked == 3 * ["a/b"]
    assert main(["run"]) == 1
    assert asked[3:] == [BUNDLED_MODEL]
    capsys.readouterr()
    assert main(["run", "a/b", "--model", "c/d"]) == 1
    assert "give MODEL or --model, not both" in capsys.readouterr().err
    assert len(asked) == 4


def piped(text: str):
    """Return a stream that reads `text` from a pipe."""
    reads, writes = os.pipe()
    with os.fdopen(writes, "w", encoding="utf-8") as stream:
        stream.write(text)
    return os.fdopen(reads, encoding="utf-8")


def test_a_prompt_comes_from_an_option_a_file_or_standard_input(
    two_bundled_layers, tmp_path, monkeypatch, capsys
):
    prompt, file = "import os\nclass \u00c4:\n", tmp_path / "prompt.txt"
    file.write_text(prompt, encoding="utf-8")
    part = tmp_path / "part.txt"
    part.write_text("class \u00c4:\n", encoding="utf-8")
    model = "--model", str(two_bundled_layers)

    def out(*arguments: str, stdin=None) -> str:
        with stdin or io.StringIO() as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            assert main(["generate", *model, "-m", "2", "--verbose", "F", *arguments]) == 0
        return capsys.readouterr().out

    expected = out("--prompt", prompt)
    assert expected.strip()
    assert out("--prompt-file", str(file)) == expected
    assert out(stdin=piped(prompt)) == expected
    assert out(stdin=os.fdopen(os.open(file, os.O_RDONLY), encoding="utf-8")) == expected
    # The default, whose text is repeated.
    assert out(stdin=io.StringIO("import ")).startswith(DEFAULT_PROMPT)  # no pipe, no file
    # Beside an option, a pipe comes first, on lines of its own; an empty one adds nothing.
    for both in (("--prompt", "class \u00c4:\\n"), ("--prompt-file", str(part))):
        assert out(*both, stdin=piped("import os\n")) == expected
        assert out(*both, stdin=piped("import os")) == expected
    assert out("--prompt", prompt, stdin=piped("")) == expected


def test_a_socket_is_read_unless_there_is_a_prompt(monkeypatch):
    args = argparse.Namespace(prompt=None, prompt_file=None, distributed=False)
    for prompt, expected in ((None, "import "), ("def", "def")):
        theirs, ours = socket.socketpair()
        with theirs, ours, ours.makefile(encoding="utf-8") as stream:
            theirs.sendall(b"import ")
            theirs.shutdown(socket.SHUT_WR)
            monkeypatch.setattr(sys, "stdin", stream)
            args.prompt = prompt
            assert given_prompt(args) == expected


def test_an_open_pipe_is_waited_for_and_said(monkeypatch, capsys):
    monkeypatch.setattr("mlx_moeflux.cli.common.NOTICE_SECONDS", 0.01)
    reads, writes = os.pipe()

    def write_late():
        time.sleep(0.3)
        with os.fdopen(writes, "w", encoding="utf-8") as stream:
            stream.write("import ")

    writer = threading.Thread(target=write_late)
    with os.fdopen(reads, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        writer.start()
        args = argparse.Namespace(prompt=None, prompt_file=None, distributed=False)
        assert given_prompt(args) == "import "
    writer.join()
    assert "waiting for the prompt on standard input" in capsys.readouterr().err


def test_ranks_of_a_launcher_leave_its_pipe_alone(monkeypatch):
    args = argparse.Namespace(prompt=None, prompt_file=None, distributed=True)
    with piped("import ") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert given_prompt(args) is None
        args.distributed = False
        assert given_prompt(args) == "import "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "--prompt", "a", "--prompt-file", "b"],
            "--prompt or --prompt-file, not both",
        ),
        (["generate", "--prompt-file", "no/where"], "no/where cannot be read"),
        (["generate", "--prompt-file", "."], "it is no regular file|Is a directory|is a directory"),
        (["generate", "--prompt-file", "latin"], "latin is not UTF-8 at byte 1; re-encode"),
        (["cache_prompt", "--prompt-cache-file", "x"], "there is no prompt; give --prompt"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_line(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes(b"a\xe4")
    assert main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert re.search(message, error), error


def test_text_on_stdout_and_the_account_on_stderr():
    done = run("generate", "-m", "4", "--expert-memory", "25%", "--stats")
    assert done.returncode == 0, done.stderr
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%")
    with model:
        text = generate(model, tokenizer, DEFAULT_PROMPT, max_tokens=4)
    assert done.stdout == DEFAULT_PROMPT + text + "\n"
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("experts streamed, trunk ")
    assert re.fullmatch(
        r"prompt \d+ tokens, \d+\.\d tok/s; generation 4 tokens, \d+\.\d tok/s; "
        r"peak memory \d\.\d{3} GB; hit rate \d+\.\d %; \d\.\d{3} GB read",
        lines[-1],
    )
    table = [line.split() for line in lines[1:9]]
    assert table[0] == ["layer", "hits", "misses", "read", "MB", "wait", "s"]
    assert [row[0] for row in table[1:]] == ["0", "1", "2", "3", "4", "5", "total"]
    assert sum(int(row[2]) for row in table[1:-1]) == int(table[-1][2]) > 0
    assert "kernels: " not in done.stderr
    (disk,) = [line for line in lines if line.startswith("disk since the start: ")]
    assert disk.endswith(
        " of experts read, which does not wear an SSD; 0 B of prompt caches written"
    )
    assert float(disk.split()[4]) == pytest.approx(float(table[-1][3]), rel=0.01)


def test_details_of_the_statistics(capsys):
    assert main(["generate", "-m", "4", "--expert-memory", "25%", "--stats", "-v"]) == 0
    lines = capsys.readouterr().err.strip().splitlines()
    table = [line.split() for line in lines[1:9]]
    assert table[0][:4] == ["layer", "tokens", "lookups", "hits"]
    assert [row[0] for row in table[1:]] == ["0", "1", "2", "3", "4", "5", "total"]
    assert any(line.startswith("kernels: ") for line in lines)


def test_prompt_from_standard_input_and_stop():
    done = run("generate", "-p", "-", "-m", "30", "--stop", "\n", "--verbose", "F", stdin="import ")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert len(done.stderr.strip().splitlines()) == 1


def test_extra_ends_by_token_and_by_id(capsys):
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%")
    with model:
        ids = [r.token for r in stream_generate(model, tokenizer, DEFAULT_PROMPT, 8)]
    last = next(i for i in range(1, 8) if ids[i] not in ids[:i])
    token = tokenizer.convert_ids_to_tokens(ids[last])
    for end in (token, str(ids[last])):
        assert main(["generate", "-m", "8", "--verbose", "F", "--extra-eos-token", end]) == 0
        out = capsys.readouterr().out
        assert out == DEFAULT_PROMPT + tokenizer.decode(ids[:last]) + "\n"


def test_xtc_never_excludes_the_end_of_a_line(capsys, monkeypatch):
    seen = {}
    original = text.stream_generate

    def spy(*arguments, **options):
        seen.update(options)
        return original(*arguments, **options)

    monkeypatch.setattr(text, "stream_generate", spy)
    assert main(["generate", "-p", "a\\n\\tb", "-m", "1"]) == 0
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    ends = tokenizer.encode("\n", add_special_tokens=False)
    assert seen["xtc_special_tokens"] == [*ends, tokenizer.eos_token_id]


def test_a_prompt_that_is_no_text_is_one_line():
    for arguments, stdin in ((["-p", "-"], b"a\xff"), (["-p", b"a\xff"], b"")):
        done = subprocess.run(
            [sys.executable, "-m", "mlx_moeflux", "generate", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
            input=stdin,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 1
        assert done.stdout == b""
        assert re.fullmatch(
            rb"error: [^\n]+ utf-8 [^\n]+\.", done.stderr.strip().splitlines()[-1], re.I
        )
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "encoding", "stdin", "message"),
    [
        (
            ["generate", "-m", "12", "-p", "s = '\u00e9 \u00e9 \u00e9 \u00e9"],
            "ascii",
            b"",
            r"the output cannot have U\+[0-9A-F]{4} in ascii; set PYTHONIOENCODING=utf-8",
        ),
        (["chat", "-m", "1"], "ascii", b"a\xc3\xa9", "standard input is not ascii at byte 1; .*"),
        pytest.param(
            ["chat", "-m", "1"],
            "utf-8:surrogateescape",
            b"a\xff",
            "standard input is not UTF-8 .*",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["perplexity", "--data-path", __file__],
            "ascii",
            b"",
            r"the output cannot have U\+00B1 in ascii; set PYTHONIOENCODING=utf-8",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_text_of_another_encoding_ends_in_one_line(arguments, encoding, stdin, message):
    done = subprocess.run(
        [sys.executable, "-m", "mlx_moeflux", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        input=stdin,
        capture_output=True,
        check=False,
    )
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1
    assert re.fullmatch(rf"error: {message}\.", lines[-1]), lines
    assert not any("Traceback" in line for line in lines)


def test_a_name_that_is_not_utf8_can_be_printed(tmp_path):
    folder = os.fsencode(tmp_path) + b"/a\xff"
    shutil.copytree(BUNDLED_MODEL, os.fsdecode(folder))
    command = [sys.executable, "-m", "mlx_moeflux", "plan", folder, "--ssd-gbps", "1"]
    for encoding, status in (("utf-8", 1), ("utf-8:surrogateescape", 0)):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == status
        lines = done.stderr.splitlines()
        mend = b"cannot have U+DCFF in utf-8; set PYTHONIOENCODING=utf-8:surrogateescape."
        assert not status or lines == [b"error: the output " + mend]


def test_ctrl_c_is_quiet(capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "stream_generate", interrupted)
    assert main(["generate", "-p", "a"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_of_mlx_lm_that_mean_nothing_are_refused_in_one_line(flag, capsys):
    assert main(["generate", flag, "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"error: {flag} does not apply: [^\n]+\.\n", err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--model", "no/such/thing/x"], "no/such/thing/x"),
        (["generate", "--expert-memory", "1kB"], "663552"),
        (["generate", "--expert-memory", "much"], "much"),
        (["generate", "--eviction", "mru"], "'mru'; there are lru"),
        (["generate", "--eviction", "s3fifo"], "'s3fifo'; there are lru, lfu."),
        (["generate", "--prefetch", "all"], "'all'; there are none, last, ahead"),
        (["generate", "--chat-template-config", "{"], "--chat-template-config"),
        (["generate", "--system-prompt", "x"], "--system-prompt"),
        (["generate", "--extra-eos-token", "nonesuch"], "nonesuch"),
        (["generate", "-p", ""], "empty"),
        (["generate", "--temp", "-1"], "temp"),
        (["generate", "--prefill-step-size", "-1"], "prefill_step_size"),
        (["generate", "--max-tokens", "-2"], "max_tokens"),
        (["generate", "--max-context", "3"], "context of 3"),
        (["convert", "--model", "no/such/thing/x"], "no/such/thing/x"),
        (["convert", "--model", str(BUNDLED_MODEL), "--upload-repo"], "--upload-repo"),
        (["plan", "no/such/thing/x"], "no/such/thing/x"),
        (["trace", "show", "no.trace"], "no.trace"),
        (["tune", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "--tuning", "no.json"], "no.json"),
        (["plan", str(BUNDLED_MODEL), "--context", "0"], "context is 0; this model allows 1 to"),
        (["plan", str(BUNDLED_MODEL), "--bits", "4"], "quantised already"),
        (["plan", str(BUNDLED_MODEL), "--ssd-gbps", "inf"], "ssd_gbps is inf; it must be finite"),
        (
            ["plan", "--ssd-gbps", "1", "--model", str(BUNDLED_MODEL), "--memory-gbps", "inf"],
            "inf;",
        ),
        (["convert", "--out", "x"], "there is no model; give MODEL or --model."),
        (["synthesize", "--like", "nothing", "--out", "x"], "nothing"),
    ],
)
def test_errors_are_one_line_and_exit_1(arguments, words, capsys):
    assert main(arguments) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("error: ")
    assert words in err[-1]
    assert not any("Traceback" in line for line in err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", str(BUNDLED_MODEL), "--memory", "little"], "little"),
        (["plan", str(BUNDLED_MODEL), "--link", "1GB/s"], "--link needs --machines"),
        (["plan", str(BUNDLED_MODEL), "--machines", "8GB,little", "--link", "1GB/s"], "little"),
        (["models", "--memory", "little"], "little"),
        (["models", "--measure-disk", "--ssd-gbps", "3"], "exclude each other"),
        (["models", "--memory", ""], "--memory is empty"),
        (["plan", str(BUNDLED_MODEL), "--memory", ""], "--memory is empty"),
        (["plan", str(BUNDLED_MODEL), "--machines", "", "--link", "1GB/s"], "--machines is empty"),
        (["plan", str(BUNDLED_MODEL), "--row-memory", " "], "row memory"),
        (["plan"], "there is no model; give MODEL or --model."),
    ],
)
def test_nothing_is_measured_for_wrong_options(arguments, words, capsys, monkeypatch):
    def measured(place):
        raise AssertionError(f"the disk of {place} was measured")

    for name in ("disk_speed", "measure_disk"):
        monkeypatch.setattr(rates, name, measured)
    test_errors_are_one_line_and_exit_1(arguments, words, capsys)


@pytest.mark.parametrize("command", [["plan", str(BUNDLED_MODEL)], ["models"]])
def test_a_disk_is_measured_anew_if_one_asks(command, capsys, monkeypatch):
    old = DiskSpeed(5e9, date.today() - timedelta(days=3), 10**9)
    monkeypatch.setattr(rates, "disk_speed", lambda place: old)
    monkeypatch.setattr(rates, "measure_disk", lambda place: old._replace(day=date.today()))
    memory = ["--memory", "16GB"]
    assert main([*command, *memory]) == 0
    assert "disk 5 GB/s (measured 3 days ago, 1.0 GB of memory free)" in capsys.readouterr().out
    assert main([*command, *memory, "--measure-disk"]) == 0
    assert "disk 5 GB/s (measured today, 1.0 GB of memory free)" in capsys.readouterr().out


def test_no_arguments_print_help_and_version_prints_the_device(capsys):
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert re.fullmatch(r"mlx_moeflux \d+\.\d+\.\d+ \(mlx [\d.]+, .+\)\n", capsys.readouterr().out)


@pytest.mark.slow
def test_policies_are_listed_and_selected_by_name(capsys):
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["--eviction", *EVICTIONS, "--prefetch", "none", *PREFETCHES]
    defaults = [line.split()[0] for line in re.sub(r"\n {11}", " ", "\n".join(lines)).splitlines()
                if line.endswith("The default.")]  # fmt: skip
    assert defaults == ["lfu", "none"]
    assert [line.split()[0] for line in lines if not line.startswith(" " * 11)] == names
    texts = set()
    choices = [("--eviction", e) for e in EVICTIONS] + [("--prefetch", p) for p in PREFETCHES]
    for choice in choices:
        assert main(["generate", "-m", "6", "--expert-memory", "25%", "--stats", *choice]) == 0
        out, err = capsys.readouterr()
        texts.add(out)
        assert ("read ahead" in err) == (choice[1] in ("last", "ahead"))
        assert ("prefetch auto is off after" in err) == (choice[1] == "auto")
    assert len(texts) == 1


def test_what_evaluate_needs_is_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [re.match(r"[\w-]+", one)[0] for one in project["optional-dependencies"]["evaluate"]]
    assert needed == ["lm-eval", "mlx-lm"]


def test_convert_and_generate_from_it(two_bundled_layers, tmp_path, capsys):
    model, out, texts = str(two_bundled_layers), str(tmp_path / "packed"), []
    done = run("convert", "--model", model, "--out", out, "--verify")
    assert done.returncode == 0, done.stderr
    for directory in (model, out):
        assert main(["generate", "-m", "5", "--verbose", "F", "--model", directory]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_without_a_back_end_one_line_names_the_extras(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: not found')")
    done = run("generate", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: MLX has no back end")
    assert len(done.stderr.strip().splitlines()) == 1
    for extra in ("cpu", "cuda12", "cuda13"):
        assert extra in done.stderr
    code = (
        "import mlx_moeflux\ntry: mlx_moeflux.load\nexcept Exception as e: print(type(e).__name__)"
    )
    library = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert library.stdout == "UnsupportedError\n"


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m mlx_moeflux generate -m 40 2>&1 >/dev/full | cat; "
        f"{sys.executable} -m mlx_moeflux generate -m 40 --verbose F | head -c 3",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("def")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_profile_prints_a_table_and_writes_a_trace(tmp_path):
    trace = tmp_path / "trace.json"
    done = run("generate", "-m", "4", "--verbose", "F", "--profile", str(trace))
    assert done.returncode == 0, done.stderr
    plain = run("generate", "-m", "4", "--verbose", "F")
    assert done.stdout == plain.stdout
    assert "delta net" in done.stderr
    assert json.loads(trace.read_text())["traceEvents"]
    done = run("generate", "-m", "4", "--profile", str(tmp_path / "no" / "trace.json"))
    assert done.returncode == 1
    assert "is not a directory" in done.stderr


@pytest.mark.parametrize(
    ("command", "number", "last"),
    [
        ("generate --expert-memory 4", "4", "%"),
        ("generate --model org/not-downloaded --expert-memory 4", "4", "%"),
        ("serve --model org/not-downloaded --expert-memory 4", "4", "%"),
        ("generate --model org/not-downloaded --row-memory 64", "64", "%"),
        ("plan MODEL --memory 16", "16", "B"),
        ("plan MODEL --memory 16GB --ssd-gbps 1 --expert-memory 4.5", "4.5", "%"),
        ("plan MODEL --machines 16GB,32 --link 2.5GB/s", "32", "B"),
        ("plan MODEL --machines 16GB,32GB --link 2.5", "2.5", "B"),
        ("tune --budgets 2GB 8", "8", "%"),
        ("generate --prompt-cache FOLDER --prompt-cache-disk 20", "20", "B"),
    ],
)
def test_a_size_without_a_unit_is_one_line(capsys, tmp_path, command, number, last):
    places = {"MODEL": str(BUNDLED_MODEL), "FOLDER": str(tmp_path)}
    assert main([places.get(word, word) for word in command.split()]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"'{number}' has no unit; give one, such as {number}GB, {number}MiB or {number}{last}."
        in error
    )

"""Oracle: every reply is that of a call with the whole conversation and no state."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.cli import main
from mlx_moeflux.cli.chat import HELP
from mlx_moeflux.cli.chat_frontend import printable
from mlx_moeflux.generation import text
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: "
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: <think>{% endif %}"
)


@pytest.fixture(scope="module")
def talking(two_bundled_layers, tmp_path_factory) -> Path:
    """The bundled model with a template that drops what was thought."""
    directory = tmp_path_factory.mktemp("talking") / "model"
    shutil.copytree(two_bundled_layers, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


TOKENS = 5  # of each reply


def say(monkeypatch, capsys, lines, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", "-m", str(TOKENS), *arguments]) == 0
    return capsys.readouterr()


def expected_replies(directory, queries, *, system=None):
    model, tokenizer = load(directory)
    messages, replies = [{"role": "system", "content": system}] if system else [], []
    with model:
        for query in queries:
            messages.append({"role": "user", "content": query})
            prompt = messages if tokenizer.chat_template else "".join(
                m["content"] for m in messages
            )  # fmt: skip
            replies.append(generate(model, tokenizer, prompt, max_tokens=TOKENS))
            messages.append({"role": "assistant", "content": replies[-1]})
    return replies


def test_turns_are_those_of_the_whole_conversation(monkeypatch, capsys, talking):
    queries = ["import os", "return self", "class A"]
    out, err = say(
        monkeypatch, capsys, [*queries, "q", "never read"], "--model", str(talking),
        "--system-prompt", "a module",
    )  # fmt: skip
    replies = expected_replies(talking, queries, system="a module")
    assert out == "".join(f"{reply}\n" for reply in replies)
    assert err.endswith("\n/help lists the commands, /quit leaves\n")
    assert "no chat template" not in err


def test_a_question_beside_the_model_is_answered_alone(monkeypatch, capsys, talking):
    (reply,) = expected_replies(talking, ["import os\nreturn self"], system="a module")
    reads, writes = os.pipe()
    os.write(writes, b"import os\n")
    os.close(writes)
    words = ["-m", str(TOKENS), "return self", "--system-prompt", "a module"]
    with os.fdopen(reads, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["run", str(talking), *words]) == 0
    out, err = capsys.readouterr()
    assert out == f"{reply}\n"
    assert "/help" not in err
    # Without a pipe standard input is left alone, and the rest of a reply is not waited for.
    with io.StringIO("never read\n") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(text, "stream_generate", interrupted := Interrupted())
        assert main(["run", str(talking), "return self"]) == 130
        assert stream.read() == "never read\n"
    assert interrupted.prompt == [{"role": "user", "content": "return self"}]


class Interrupted:
    """A generation that Ctrl-C ends at once."""

    def __call__(self, model, tokenizer, prompt, **options):
        self.prompt = [dict(message) for message in prompt]
        raise KeyboardInterrupt
        yield


@pytest.mark.slow
def test_a_model_without_a_template_goes_on_with_the_text(monkeypatch, capsys):
    queries = ["def f(x):", " and", "try"]
    out, err = say(monkeypatch, capsys, ["", *queries])
    assert out == "".join(f"{reply}\n" for reply in expected_replies(BUNDLED_MODEL, queries))
    assert "\nthe model has no chat template, so it continues your text\n" in err


@pytest.mark.slow
def test_only_what_is_new_is_read(monkeypatch, capsys, talking, tmp_path):
    seen = []
    original = text.stream_generate

    def spy(*arguments, **options):
        for last in original(*arguments, **options):
            yield last
        seen.append((last.prompt_tokens, last.cached_tokens))

    monkeypatch.setattr(text, "stream_generate", spy)
    queries = ["import os", "return self", "class A"]
    say(monkeypatch, capsys, queries, "--model", str(talking))
    # The next turn goes on behind the question at least: the template drops the mark of thinking
    # that was put behind it.
    opening = len(load_tokenizer(BUNDLED_MODEL).encode("# assistant: <think>"))
    (first, none), (second, known), (_, more) = seen
    assert none == 0
    assert known == first - opening
    assert more == second - opening
    # Without a template text goes on behind the reply.
    seen.clear()
    say(monkeypatch, capsys, queries, "--prompt-cache", str(tmp_path / "prompts"))
    assert [known for _, known in seen][1] == seen[0][0] + TOKENS
    seen.clear()
    say(monkeypatch, capsys, queries, "--prompt-cache", str(tmp_path / "prompts"))
    assert all(prompt == known for prompt, known in seen)


@pytest.mark.slow
def test_r_forgets_and_h_helps(monkeypatch, capsys, talking):
    out, err = say(
        monkeypatch, capsys, ["import os", "r", "h", "import os"], "--model", str(talking)
    )
    one, two = out.splitlines()
    assert one == two == expected_replies(talking, ["import os"])[0]
    assert "forgotten" in err
    assert err.count(HELP) == 1


def test_a_full_context_is_said_in_one_line_and_r_makes_room(monkeypatch, capsys, talking):
    lines = ["import os", "x " * 60, "r", "import os"]
    out, err = say(monkeypatch, capsys, lines, "--model", str(talking), "--max-context", "60")
    one, two = out.splitlines()
    assert one == two
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "exceed the context of 60" in line


def test_ctrl_c_ends_the_reply_only(monkeypatch, capsys, talking):
    original, turns = text.stream_generate, []

    def interrupted(*arguments, **options):
        turns.append(0)
        for last in original(*arguments, **options):
            yield last
            turns[-1] += 1
            if len(turns) == 1 and turns[-1] == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(text, "stream_generate", interrupted)
    out, _ = say(monkeypatch, capsys, ["import os", "class A"], "--model", str(talking))
    monkeypatch.undo()
    assert turns == [3, TOKENS]
    first, second = out.split(" ...\n")
    model, tokenizer = load(talking)
    messages = [
        {"role": "user", "content": "import os"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "class A"},
    ]
    with model:
        assert second == generate(model, tokenizer, messages, max_tokens=TOKENS) + "\n"


def test_ctrl_c_before_a_reply_forgets_the_question(monkeypatch, capsys, talking):
    original, turns = text.stream_generate, []

    def interrupted(*arguments, **options):
        turns.append(0)
        if len(turns) == 2:
            raise KeyboardInterrupt
        yield from original(*arguments, **options)

    monkeypatch.setattr(text, "stream_generate", interrupted)
    lines = ["import os", "class A", "/stats", "return self"]
    out, err = say(monkeypatch, capsys, lines, "--model", str(talking))
    monkeypatch.undo()
    assert out.replace(" ...\n", "").splitlines() == expected_replies(talking, lines[::3])
    assert "the last reply has no statistics" in err


def test_hidden_thinking_leaves_the_answer(monkeypatch, capsys, talking):
    original = text.stream_generate

    def thinking(*arguments, **options):
        for i, last in enumerate(original(*arguments, **options)):
            yield dataclasses.replace(last, text=["no <", "b\n</th", "ink>\n\nyes", ""][min(i, 3)])

    monkeypatch.setattr(text, "stream_generate", thinking)
    shown = {(): "no <b\n</think>\n\nyes\n", ("--hide-thinking",): "yes\n"}
    for flags, expected in shown.items():
        out, _ = say(monkeypatch, capsys, ["import os"], "--model", str(talking), *flags)
        assert out == expected


@pytest.mark.slow
def test_a_conversation_is_saved_and_goes_on(monkeypatch, capsys, talking, tmp_path):
    file, model = tmp_path / "saved.json", ("--model", str(talking))
    lines = ["/system a module", "import os", f"/save {file}", f"/save {file}", "return self"]
    out, _ = say(monkeypatch, capsys, lines, *model)
    assert out.splitlines() == expected_replies(talking, lines[1::3], system="a module")
    again, err = say(monkeypatch, capsys, [f"/load {file}", "return self"], *model)
    assert again.splitlines() == out.splitlines()[1:]
    assert "3 messages" in err


def test_undo_forgets_one_question(monkeypatch, capsys, talking):
    lines = ["import os", "return self", "/undo", "/undo", "import os", "/stats", "/system"]
    out, err = say(monkeypatch, capsys, lines, "--model", str(talking))
    one, _, again = out.splitlines()
    assert one == again
    assert err.count("are forgotten") == 2
    assert "hits" in err
    assert "no system message" in err


def test_wrong_commands_are_one_line_each_and_the_conversation_goes_on(
    monkeypatch, capsys, talking
):
    said = {
        "/undo": "nothing to undo",
        "/save": "needs the name of a file",
        "/nonsense now": "there is no command /nonsense",
        "/load /nowhere/at.all": "/nowhere/at.all",
        f"/save {talking}/config.json": "holds no conversation",
        "/save /nowhere/at.all": "cannot be written",
    }
    before = (talking / "config.json").read_bytes()
    out, err = say(monkeypatch, capsys, [*said, "import os"], "--model", str(talking))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    for part, error in zip(said.values(), errors, strict=True):
        assert part in error
    assert out.splitlines() == expected_replies(talking, ["import os"])
    assert (talking / "config.json").read_bytes() == before


@pytest.mark.slow
def test_a_slash_in_a_question_is_no_command(monkeypatch, capsys, talking):
    queries = ["/usr/bin is", "import os"]
    out, _ = say(monkeypatch, capsys, queries, "--model", str(talking))
    assert out == "".join(f"{reply}\n" for reply in expected_replies(talking, queries))


def test_control_characters_do_not_reach_a_terminal():
    assert printable("a\x1b]0;title\x07\tb\r\n\x9bc\x7f") == "a]0;title\tb\nc"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--temp", "-1"], "temp"),
        (["--top-p", "3"], "top_p"),
        (["--xtc-probability", "2"], "xtc_probability"),
        (["--max-tokens", "-5"], "max_tokens"),
        (["--prefill-step-size", "0"], "prefill_step_size"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_what_would_spoil_every_reply_is_refused_before_loading(capsys, flags, named):
    assert main(["chat", "--model", "/nowhere", *flags]) == 1
    assert re.fullmatch(rf"error: {named} is [^\n]*\n", capsys.readouterr().err)

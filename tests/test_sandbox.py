"""What templates and tokenizers of a checkpoint may do: one line each, and this process lives on.

Oracles: the bounds of the child process, and jinja2 in tests/test_tokenizer.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from mlx_moeflux import user_cache
from mlx_moeflux.errors import (
    MOST_CHARACTERS,
    CheckpointError,
    ConfigError,
    InputError,
    UnsupportedError,
)
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.sandbox import process, tokenizers
from mlx_moeflux.sandbox.process import Broken, Child, child, tokenizer_child
from mlx_moeflux.sandbox.requests import check_template, render
from mlx_moeflux.tokenizer import load_tokenizer

linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS does not bound address space")
MESSAGES = [{"role": "user", "content": "x"}]


def line_of(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) <= MOST_CHARACTERS
    return text


def works() -> bool:
    return render("{{ messages[0].content }}", messages=MESSAGES) == "x"


@linux
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a'.center(10 ** 10) }}",
        "{{ 'a'.join(['b'] * 10 ** 9) }}",
        "{{ 'a' | indent(10 ** 10) }}",
        "{{ 'a'.zfill(10 ** 10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x }}",
    ],
)
def test_memory_of_a_template(template):
    with pytest.raises(InputError, match="stopped: it takes more than 768 MiB of memory") as error:
        render(template, messages=MESSAGES)
    line_of(error)
    assert works()


def test_the_parent_ends_a_child_that_is_too_large(monkeypatch):
    watched = Child()
    given = {"template": ENDLESS, "variables": {}}
    monkeypatch.setattr(process, "size_of", lambda pid: 2 << 40)
    with pytest.raises(Broken, match="takes more than 768 MiB of memory"):
        watched.call("render", given)
    assert watched._process is None
    watched.close()


def test_the_size_of_a_process():
    code = "import sys; x = b'x' * 50_000_000; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as large:
        large.stdout.readline()
        assert 50_000_000 < process.size_of(large.pid) < 200_000_000
        large.kill()
    assert process.size_of(large.pid) == 0


def test_the_size_of_a_process_on_macos(monkeypatch):
    """Its footprint is the eighth number behind 16 bytes; its resident size is another."""
    calls = []

    class System:
        def proc_pid_rusage(self, pid, flavor, buffer):
            calls.append((pid, flavor))
            numbers = (ctypes.c_uint64 * 12).from_address(ctypes.addressof(buffer._obj))
            numbers[8], numbers[9] = 7, 123_000_000
            return 0 if pid == 5 else -1

    monkeypatch.setattr(process.sys, "platform", "darwin")
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: System())
    assert ctypes.sizeof(process._Usage) == 96
    assert (process.size_of(5), process.size_of(6)) == (123_000_000, 0)
    assert calls == [(5, 0), (6, 0)]


def test_output_of_a_template():
    small = Child(reply_bytes=1 << 20)
    long, short = ({"template": f"{{{{ 'a' * 2 ** {n} }}}}", "variables": {}} for n in (20, 19))
    with pytest.raises(Broken, match="its output has more than 1 MiB"):
        small.call("render", long)
    assert len(small.call("render", short)) == 1 << 19
    small.close()


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_time_of_a_template(monkeypatch):
    monkeypatch.setitem(child.call.__kwdefaults__, "seconds", 0.2)
    with pytest.raises(InputError, match="stopped: it did not end"):
        render(ENDLESS)
    assert works()


@pytest.mark.parametrize("template", ["{% break %}", "{{" + "(" * 5000, "{{ messages[0].a.b }}"])
def test_a_template_that_is_wrong(template):
    with pytest.raises(InputError, match="the chat template refuses these messages") as error:
        render(template, messages=MESSAGES)
    line_of(error)


def test_values_that_a_template_is_given():
    given = {"m": OrderedDict(a=np.int64(3), b=(1, 2)), "f": np.float32(0.5), "s": "\ud800é"}
    assert render("{{ m.a }}{{ m.b[1] }}{{ f }}{{ s }}", **given) == "320.5\ud800é"
    for value in (object(), b"bytes", {1j: 2}, {(1, 2): 3}):
        with pytest.raises(InputError, match="no plain values"):
            render("", value=value)
    with pytest.raises(InputError, match="refuses"):
        render("{{ value }}", value=10**5000)
    text = "é\n" * (1 << 20)  # longer than a pipe holds, in both directions
    assert render("{{ text }}", text=text) == text


def test_a_template_is_tried_before_it_is_served(monkeypatch):
    check_template("{{ raise_exception('no') }}")
    check_template("{{ messages[2].content }}{{ tools | length }}")
    monkeypatch.setitem(child.call.__kwdefaults__, "seconds", 0.2)
    with pytest.raises(UnsupportedError, match="stopped at three short messages"):
        check_template("{% if tools %}" + ENDLESS + "{% endif %}")


def test_a_child_that_was_killed_is_replaced():
    assert works()
    pid = child._process.pid
    os.kill(pid, signal.SIGKILL)
    child._process.wait()
    assert works()
    assert child._process.pid != pid


def test_an_interrupted_request_is_not_answered_to_the_next(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    assert works()
    with monkeypatch.context() as patch:
        patch.setattr(process, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render("late")
    assert works()


def test_many_threads_get_their_own_text():
    wrong = []

    def run(i):
        for n in range(30):
            text = f"{i} {n}"
            if render("{{ a }}", a=text) != text:
                wrong.append(text)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_child_ends_with_its_parent():
    code = (
        "import os, signal\n"
        "from mlx_moeflux.sandbox.process import child\n"
        "from mlx_moeflux.sandbox.requests import render\n"
        "render('x'); print(child._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().split(")")[1].split()[0] == "Z":
            return
        threading.Event().wait(0.05)
    pytest.fail("the child outlived its parent by 10 s")


def test_importing_starts_nothing():
    code = "import sys, mlx_moeflux.tokenizer; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- Tokenizers


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def directory(tmp_path):
    """The bundled model's tokenizer."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, tmp_path / "model" / name)
    return tmp_path / "model"


def edit(file, change) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


PADDING = {
    "strategy": {"Fixed": 2**33}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "[PAD]",
}  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
WRONG = {
    "prefix": lambda c: c["model"].update(continuing_subword_prefix="#" * 10),
    "replacing": lambda c: c.update(
        normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "xx"}
    ),
    "without unk": lambda c: c.update(
        model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    ),
    "no model": lambda c: c.pop("model"),
}
HUGE = {"type": "Prepend", "prepend": "x" * 3 * 10**7}


@pytest.mark.parametrize("case", WRONG)
def test_a_tokenizer_that_fails_is_one_line(directory, case):
    edit(directory / "tokenizer.json", WRONG[case])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer") as error:
        load_tokenizer(directory)
    line_of(error)


def test_a_tokenizer_that_does_not_end(directory, monkeypatch):
    edit(directory / "tokenizer.json", lambda c: c.update(normalizer=HUGE))
    monkeypatch.setattr(tokenizers, "MEGABYTE", 10**9)
    monkeypatch.setattr(tokenizers, "SECONDS", 0.3)
    with pytest.raises(CheckpointError, match=r"it did not end|ended its process"):
        load_tokenizer(directory)


@pytest.mark.parametrize("setting", [{"padding": PADDING}, {"truncation": TRUNCATION}])
def test_settings_of_training_change_no_prompt(directory, setting):
    text = "def f(x): return x"
    expected = load_tokenizer(directory).encode(text)
    edit(directory / "tokenizer.json", lambda c: c.update(setting))
    assert load_tokenizer(directory).encode(text) == expected


def test_a_tokenizer_is_tried_once(directory, monkeypatch):
    load_tokenizer(directory)
    (verdict,) = (user_cache.root() / "tokenizers").iterdir()

    def unexpected(*_, **__):
        raise Broken("it was tried again")

    monkeypatch.setattr(tokenizer_child, "call", unexpected)
    load_tokenizer(directory)
    edit(directory / "tokenizer.json", lambda c: c.update(version="2.0"))
    with pytest.raises(CheckpointError, match="tried again"):
        load_tokenizer(directory)
    verdict.unlink()
    edit(directory / "tokenizer.json", lambda c: c.update(version="1.0"))
    with pytest.raises(CheckpointError, match="tried again"):
        load_tokenizer(directory)


def test_a_text_on_which_the_library_fails(directory):
    edit(
        directory / "tokenizer.json",
        lambda c: c.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
    )
    tokenizer = load_tokenizer(directory)

    class Failing:
        def encode_batch_fast(self, *_, **__):
            raise RuntimeError("no way")

    tokenizer._backend.backend = Failing()
    with pytest.raises(InputError, match="fails on this text: no way"):
        tokenizer.encode("x")


@pytest.mark.parametrize("token", [5, [1], float("nan"), {"content": 7}, True])
@pytest.mark.parametrize("name", ["eos_token", "bos_token", "pad_token"])
def test_a_special_token_that_is_no_text(directory, name, token):
    edit(directory / "tokenizer_config.json", lambda c: c.update({name: token}))
    with pytest.raises(ConfigError, match=f"{name} is .*; expected a text"):
        load_tokenizer(directory)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\x0a\xff\xff\xff\xff\x0f"])
def test_a_sentencepiece_file_that_is_none(directory, content):
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is not a tokenizer") as error:
        load_tokenizer(directory)
    line_of(error)

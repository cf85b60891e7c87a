"""Processes that are forked: one clear line instead of a call that never returns, and an end."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

# Prints what became of forked processes: case -> (exit status, what it wrote).
FORKS = """
import json, multiprocessing, os, signal, sys, tempfile, traceback
import mlx_moeflux
from mlx_moeflux.loading import BUNDLED_MODEL

def load():
    return mlx_moeflux.load(BUNDLED_MODEL, expert_memory="40%")

def forked(action):
    with tempfile.TemporaryFile("w+") as out:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            try:
                action()
            except Exception:
                traceback.print_exc()
                os._exit(1)  # an end of its own takes a second; some cases have one
            sys.exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        return status, out.read()

def report(cases):
    found = {name: forked(action) for name, action in cases.items()}
    print(json.dumps(found))  # of the parent: others have ended
"""
USED = """
model, tokenizer = load()
cache = mlx_moeflux.PromptCache("prompts")
mlx_moeflux.generate(model, tokenizer, "def f(", max_tokens=3, prompt_cache=cache)
stream = mlx_moeflux.stream_generate(model, tokenizer, "def f(", max_tokens=9)
next(stream)
batch = mlx_moeflux.BatchGenerator(model)
state = model.make_cache()

def left():
    with model, cache:
        mlx_moeflux.generate(model, tokenizer, "def f(", max_tokens=3)

def own_process():
    process = multiprocessing.get_context("fork").Process(target=load)
    process.start()
    process.join()
    assert process.exitcode == 1
    os._exit(1)

def ended_by_error():
    try:
        left()
    except mlx_moeflux.errors.UnsupportedError as error:
        print(type(error).__name__, error)
        sys.exit(5)

def tokens():
    import mlx.core as mx
    return mx.array([[1, 2]])

report({
    "load": load,
    "load_model": lambda: mlx_moeflux.load_model(BUNDLED_MODEL),
    "convert": lambda: mlx_moeflux.convert(BUNDLED_MODEL, "out"),
    "call": lambda: model(tokens()),
    "step": lambda: model(tokens(), state),
    "layer": lambda: model.run_layer(0, tokens()),
    "make_cache": model.make_cache,
    "set_expert_memory": lambda: model.set_expert_memory("50%"),
    "generate": lambda: mlx_moeflux.generate(model, tokenizer, "def f(", max_tokens=3),
    "stream": lambda: next(stream),
    "batch_generate": lambda: mlx_moeflux.batch_generate(model, tokenizer, ["a", "b"]),
    "insert": lambda: batch.insert([[1]]),
    "leaves its blocks": left,
    "multiprocessing": own_process,
    "close": model.close,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "its end": lambda: None,
    "its end after an error": ended_by_error,
    "grandchild": lambda: print(forked(load)[1]),
})
"""


ENDS = {"close": 7, "sys.exit": 3, "os._exit": 3, "its end": 7, "its end after an error": 5}


def run(tmp_path, code: str) -> dict[str, tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", FORKS + textwrap.dedent(code)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_process_that_is_forked_after_its_parent_computed_says_so(tmp_path):
    found = run(tmp_path, USED)
    for name, status in ENDS.items():
        ended, said = found.pop(name)
        assert ended == status, (name, said)
        assert "Traceback" not in said, name
    assert found.pop("grandchild")[0] == 7
    for name, (status, said) in found.items():
        assert status == 1, (name, said)
        lines = [line for line in said.splitlines() if "UnsupportedError: MLX was used" in line]
        assert lines, (name, said)
        assert all('set_start_method("spawn")' in line for line in lines)


def test_a_process_that_is_forked_before_its_parent_computes_works(tmp_path):
    """Loaded modules, of MLX too, are no use of it."""
    code = """
        import mlx.core
        from mlx_moeflux.generation import batch, text
        from mlx_moeflux.loading import steps

        def whole():
            model, tokenizer = load()
            with model:
                mlx_moeflux.generate(model, tokenizer, "def f(", max_tokens=3)

        report({"first": whole, "second": whole})
        whole()
    """
    assert {status for status, _ in run(tmp_path, code).values()} == {7}


@pytest.mark.slow
def test_a_parent_that_computed_without_the_package_is_noticed(tmp_path):
    code = """
        import mlx.core as mx
        mx.eval(mx.zeros(3) + 1)
        report({"load": load})
    """
    status, said = run(tmp_path, code)["load"]
    assert status == 1
    assert "UnsupportedError: MLX was used before" in said

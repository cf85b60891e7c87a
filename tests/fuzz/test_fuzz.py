"""No mutated file, template or flag may end in anything but the right result or one line.

200 cases by default, 20,000 with ``-m slow``, in a process with bounds of time and memory.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.worker import GOOD, Worker

SUBJECTS = (
    "configs", "headers", "indexes", "packed", "gguf", "states", "nodes", "traces", "tunings",
    "templates", "tokenizers", "flags",
)  # fmt: skip
NUMBER = st.integers(0, 2**16 - 1)
OPS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=3)
# Cases that once ended otherwise: (subject, ops).
CORPUS = json.loads('''[]''')
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with Worker(tmp_path_factory.mktemp("fuzz")) as worker:
        yield worker


def check(worker: Worker, subject: str, ops) -> None:
    outcome, text = worker.run(subject, ops)
    assert outcome in GOOD, f"{outcome}: {text}\nops = {json.dumps(ops)}"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_not_mutated_works(worker, subject):
    assert tuple(worker.run(subject, [])) == ("ok", "")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_200_cases(worker, subject):
    @settings(max_examples=17, derandomize=True, phases=[Phase.generate], **COMMON)
    @given(OPS)
    def cases(ops):
        check(worker, subject, ops)

    cases()


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_20000_cases(worker, subject):
    @settings(max_examples=1670, **COMMON)
    @given(OPS)
    def cases(ops):
        check(worker, subject, ops)

    cases()


@pytest.mark.parametrize(("subject", "ops"), CORPUS)
def test_what_once_went_wrong(worker, subject, ops):
    check(worker, subject, ops)


class TestTheHarness:
    """It sees what it is for."""

    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            ("raise ValueError", "traceback"),
            ("x = bytearray(3 << 30)", "memory"),
            ("import os; os.abort()", "crash"),
            ("while True: pass", "hang"),
            ("return 'other text'", "changed"),
            ("raise MoefluxError('one line')", "line"),
            ("raise MoefluxError('two\\nlines')", "traceback"),
            ("return None", "ok"),
        ],
    )
    def test_every_class(self, tmp_path, monkeypatch, code, expected):
        monkeypatch.setattr("tests.fuzz.worker.HANG_SECONDS", 1.0)
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, types\n"
            "def use(folder):\n"
            "    from mlx_moeflux.errors import MoefluxError\n"
            f"    {code}\n"
            "class S:\n"
            "    make = staticmethod(lambda folder, ops: None)\n"
            "    use = staticmethod(use)\n"
            "stub = types.ModuleType('tests.fuzz.subjects')\n"
            "stub.SUBJECTS, stub.prepare = {'it': lambda home: S}, lambda: None\n"
            "sys.modules['tests.fuzz.subjects'] = stub\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with Worker(tmp_path) as worker:
            assert worker.run("it", [[1, 2, 3]])[0] == expected

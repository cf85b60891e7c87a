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
# Cases that once ended otherwise.
CORPUS = [
    ("configs", [[17740, 27665, 20909], [36443, 47103, 3977], [53218, 59804, 32228]]),
    ("configs", [[48199, 60724, 34930], [54569, 27495, 40996]]),
    ("configs", [[25449, 3365, 21011]]),
    ("configs", [[59684, 2229, 9490], [1088, 51678, 6205]]),
    ("configs", [[44728, 10709, 47004], [59732, 28808, 36250], [51967, 26330, 19634]]),
    ("configs", [[25945, 63038, 61503]]),
    ("configs", [[7045, 15785, 7045]]),
    ("configs", [[14985, 12287, 45600], [9270, 9433, 2986]]),
    ("configs", [[45303, 41157, 16900]]),
    ("configs", [[1998, 31684, 44467], [571, 1356, 423], [63009, 31684, 22776]]),
    ("configs", [[29744, 22307, 37417], [32115, 19222, 48873]]),
    ("configs", [[56858, 9107, 30621]]),
    ("configs", [[736, 6722, 736]]),
    ("flags", [[10885, 62053, 10885]]),
    ("flags", [[0, 0, 448]]),
    ("flags", [[58256, 12, 40395]]),
    ("indexes", [[10717, 18148, 29897]]),
    ("nodes", [[29555, 42883, 40078], [24486, 34870, 18228]]),
    ("traces", [[49164, 64845, 40804], [5435, 24545, 17045], [25067, 50571, 35183]]),
    ("traces", [[45031, 5825, 46021]]),
    ("traces", [[56050, 43527, 16853]]),
    ("traces", [[12476, 54455, 18357]]),
    ("traces", [[24379, 35677, 64465]]),
    ("traces", [[20303, 32267, 48301]]),
    ("traces", [[8959, 55226, 11627]]),
    ("tunings", [[7382, 63599, 6361]]),
    ("tunings", [[59435, 26583, 54301]]),
    ("tunings", [[22587, 57050, 4634]]),
    ("tunings", [[7443, 19193, 21265]]),
    ("tunings", [[49286, 20860, 305], [2500, 14365, 38861]]),
    ("tunings", [[56337, 63425, 46573], [60170, 50337, 20636], [31672, 54578, 59174]]),
    ("gguf", [[32807, 3476, 9982]]),
    ("gguf", [[60666, 47536, 38703]]),
    ("gguf", [[3883, 3, 3883]]),
    ("flags", [[0, 3, 41]]),
    ("flags", [[4, 3, 41]]),
    ("flags", [[5, 3, 41]]),
    ("flags", [[23, 3, 41]]),
    ("flags", [[7737, 0, 1546]]),
]
COMMON = {"suppress_health_check": list(HealthCheck), "database": None}


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
            pytest.param("while True: pass", "hang", marks=pytest.mark.slow),
            ("return 'other text'", "changed"),
            # What works and what is refused is what the other tests here see all the time.
            pytest.param("raise MoefluxError('one line')", "line", marks=pytest.mark.slow),
            pytest.param("return None", "ok", marks=pytest.mark.slow),
        ],
    )
    def test_every_class(self, tmp_path, monkeypatch, code, expected):
        if expected == "hang":
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

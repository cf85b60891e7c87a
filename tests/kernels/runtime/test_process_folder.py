"""Oracle: the way in which MLX reads and writes modules, step by step, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

from mlx_moeflux import user_cache
from mlx_moeflux.kernels.runtime.cuda.process_folder import PROCESSES, ProcessFolder

LONG = "long/" * 3 + "name"  # of a module whose name MLX divides

MLX = """
    import os, sys, time
    from pathlib import Path
    from mlx_moeflux.kernels.runtime.cuda.process_folder import ProcessFolder

    def launch(folder, module):
        code = folder / f"{module}.ptx"
        if code.exists():
            names = code.with_name(code.name[:-4] + ".txt")
            lines = names.read_text().splitlines() if names.exists() else ()
            kernels = dict(line.split("\\t") for line in lines if "\\t" in line)
            if module not in kernels:
                sys.exit(f"There is no kernel named {module}.")
            if kernels[module] != f"_Z{module}" or code.read_bytes() != module.encode() * 1000:
                sys.exit(f"Failed to load compiled {module} kernel.")
            return 0
        code.parent.mkdir(parents=True, exist_ok=True)
        with open(code, "wb") as file:
            file.write(module.encode() * 500)
            file.flush()
            time.sleep(0.01)
            file.write(module.encode() * 500)
        names = code.with_name(code.name[:-4] + ".txt")
        with open(names, "w") as file:
            time.sleep(0.01)
            file.write(f"{module}\\t_Z{module}\\n")
        code.with_name(code.name[:-4] + ".cu").write_text("source")
        return 1

    shared, private, *modules = sys.argv[1:]
    folder = ProcessFolder(Path(shared)).path if private == "private" else Path(shared)
    print("ready", flush=True)
    if sys.stdin.readline():
        print(sum(launch(folder, module) for module in modules))
"""


@pytest.fixture
def shared(monkeypatch, tmp_path):
    if not user_cache.is_private(tmp_path):
        pytest.skip("the temporary folder lies below one that others may rename")
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "own"))
    return user_cache.private("cuda", "here")


def start(shared: Path, *modules: str, private: bool = True) -> subprocess.Popen:
    whose = "private" if private else "shared"
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MLX), shared, whose, *modules],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def together(shared: Path, *modules: str, processes: int = 1, private: bool = True) -> list[str]:
    """Return what each of the processes says: the modules that its MLX compiled, or an error."""
    started = [start(shared, *modules, private=private) for _ in range(processes)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = []
    for process in started:
        out, error = process.communicate()
        said.append(out.strip() if process.returncode == 0 else error.strip())
    return said


def test_ten_processes_fill_an_empty_folder(shared):
    modules = "alpha", "beta", "gamma"
    assert together(shared, *modules, processes=10) == ["3"] * 10
    assert together(shared, *modules) == ["0"]
    assert together(shared, *modules, "delta") == ["1"]
    assert [*(shared / PROCESSES).iterdir()] == []


def test_what_mlx_has_half_written_is_seen_by_no_other_process(shared):
    (shared / "plain.ptx").write_bytes(b"plain" * 1000)
    assert together(shared, "plain", private=False) == ["There is no kernel named plain."]
    assert together(shared, "plain") == ["1"]
    assert together(shared, "plain", processes=2) == ["0", "0"]


def test_names_that_mlx_divides_are_kept(shared):
    assert together(shared, LONG, "plain") == ["2"]
    assert together(shared, LONG, "plain") == ["0"]
    assert (shared / f"{LONG}.ptx").is_file()


@pytest.mark.parametrize("suffix", [".ptx", ".txt"])
@pytest.mark.parametrize("content", [None, b"", b"f\t_Zf\n"])
def test_a_module_that_is_not_complete_is_not_taken(shared, suffix, content):
    with closing(ProcessFolder(shared)) as first:
        first.store("plain", "f\t_Zf\n", b"the code")
        first.store("long/other", "g\t_Zg\nh\t_Zh\n", b"others")
    file = shared / f"plain{suffix}"
    file.unlink() if content is None else file.write_bytes(content)
    with closing(ProcessFolder(shared)) as second:
        assert second.has("long/other")
        assert not second.has("plain")
        assert not (second.path / "plain.ptx").exists()


def test_a_killed_process_leaves_nothing_for_long_and_a_live_one_keeps_its_folder(shared):
    killed, live = start(shared), start(shared, "plain")
    for process in (killed, live):
        assert process.stdout.readline() == "ready\n"
    assert len([*(shared / PROCESSES).glob("*.lock")]) == 2
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert together(shared) == ["0"]
    (folder,) = [p for p in (shared / PROCESSES).iterdir() if p.is_dir()]
    assert folder.name.startswith(f"{live.pid}-")
    assert live.communicate("go\n")[0] == "1\n"
    assert [*(shared / PROCESSES).iterdir()] == []
    assert together(shared, "plain") == ["0"]


def test_what_another_process_stores_later_is_taken(shared):
    with closing(ProcessFolder(shared)) as first, closing(ProcessFolder(shared)) as second:
        assert not first.take("late")
        second.store("late", "f\t_Zf\n", b"code")
        assert second.has("late")
        assert not first.has("late")
        assert first.take("late")
        assert (first.path / "late.ptx").read_bytes() == b"code"
        assert (first.path / "late.txt").read_text().splitlines()[0] == "f\t_Zf"
        second.store("late", "f\t_Zg\n", b"newer")
        assert (first.path / "late.ptx").read_bytes() == b"code"
        assert first.take("late")
        assert (first.path / "late.ptx").read_bytes() == b"newer"


def test_custom_kernels_are_linked_when_they_are_asked_for(shared):
    """A folder of hundreds of them would delay every start."""
    name = "custom_kernel_f_12"
    with closing(ProcessFolder(shared)) as first:
        first.store(name, "f\t_Zf\n", b"code")
        first.store("copy_12", "c\t_Zc\n", b"stock")
    with closing(ProcessFolder(shared)) as second:
        assert second.has("copy_12")
        assert not (second.path / f"{name}.ptx").exists()
        assert second.take(name)
        assert (second.path / f"{name}.ptx").read_bytes() == b"code"


def test_a_disk_without_links_gets_copies(shared, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with closing(ProcessFolder(shared)) as first:
        first.store("plain", "f\t_Zf\n", b"code")
    with closing(ProcessFolder(shared)) as second:
        assert second.has("plain")

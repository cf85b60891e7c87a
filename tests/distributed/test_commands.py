"""The commands on several ranks. Oracle: the same command in one process."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.distributed.ranks import Ranks
from mlx_moeflux.errors import DistributedError, ExpertFileError, InputError
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.measure.link import measure_link
from tests.distributed.launch import REPOSITORY, SECONDS, free_ports, results, start
from tests.distributed.program import logits_of

MODULE = [sys.executable, "-m", "mlx_moeflux"]
SHAPE = "qwen3-tiny"


def outputs(folder: Path, *arguments: str, ranks: int = 2) -> list[tuple[str, str]]:
    """Output and errors of a command on each rank."""
    processes = start(folder, [[*MODULE, *arguments]] * ranks)
    found = [process.communicate(timeout=SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, found
    return found


def alone(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*MODULE, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=SECONDS,
    )
    return done.stdout


@pytest.mark.slow
def test_generate_prints_once(tmp_path):
    arguments = ["generate", "-p", "import os", "-m", "12"]
    expected = alone(*arguments)
    # Another seed on each rank would draw other tokens; rank 0's are law.
    spread = ["--distributed", "--expert-memory", "50%", "--stats"]
    (first, stats), (second, errors) = outputs(tmp_path, *arguments, *spread)
    assert first == expected
    assert second == ""
    assert "total" in stats
    assert errors.startswith("rank 1 of 2: experts streamed")
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_chat_takes_the_same_lines(tmp_path):
    lines = "import os\n/stats\ndef f\n/quit\n"
    command = [*MODULE, "chat", "-m", "6"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    options = {"input": lines, "capture_output": True, "text": True, "timeout": SECONDS}
    expected = subprocess.run(command, check=True, env=environment, **options)
    input_file = tmp_path / "lines"
    input_file.write_text(lines)
    with open(input_file) as first, open(input_file) as second:
        processes = start(tmp_path, [[*command, "--distributed"]] * 2, inputs=[first, second])
        (first_out, notes), (second_out, errors) = [
            process.communicate(timeout=SECONDS) for process in processes
        ]
    assert [process.returncode for process in processes] == [0, 0], (notes, errors)
    assert first_out == expected.stdout
    assert second_out == ""
    assert "/help lists the commands" in notes
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_drawn_tokens_are_rank_0s(tmp_path):
    arguments = [*MODULE, "generate", "-p", "import", "-m", "16", "--temp", "1.5", "--distributed"]
    commands = [[*arguments, "--trace", str(tmp_path / "trace"), "--seed", s] for s in "12"]
    processes = start(tmp_path, commands)
    (first, _), _ = [process.communicate(timeout=SECONDS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    expected = alone("generate", "-p", "import", "-m", "16", "--temp", "1.5", "--seed", "1")
    assert first == expected


@pytest.mark.slow
def test_benchmark_is_exact(tmp_path):
    arguments = ["benchmark", "--distributed", "-p", "20", "-g", "4", "-n", "1"]
    (first, _), (second, _) = outputs(tmp_path, *arguments, "--expert-memory", "50%")
    assert "against experts read anew: identical bits" in first
    assert json.loads(first.splitlines()[-1])
    assert second == ""


@pytest.mark.slow
def test_check_measures_the_link_for_plan(tmp_path):
    (line, _), (second, _) = outputs(tmp_path, "check", "--link")
    assert second == ""
    ranks, options = line.split(": ")
    assert ranks == "2 ranks"
    plan = alone("plan", str(BUNDLED_MODEL), "--machines", "16GB,16GB", *options.split())
    assert "ms a message" in plan


def ask(port: int, prompt: str, tokens: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["text"]


@pytest.mark.slow
def test_serve_answers_on_rank_0_and_ends_on_both(tmp_path):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    pytest.importorskip("llguidance")
    (port,) = free_ports(1)
    command = [*MODULE, "serve", "--distributed", "--port", str(port), "--expert-memory", "50%"]
    processes = start(tmp_path, [command, command])
    try:
        end = time.monotonic() + SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < end
            time.sleep(0.2)
        for prompt, tokens in (("import os", 9), ("def f", 5), ("import os\nimport", 4)):
            text = alone("generate", "-p", prompt, "-m", str(tokens), "--ignore-chat-template")
            assert ask(port, prompt, tokens) == text.removesuffix("\n")
        before = cpu_seconds(processes[1].pid)
        time.sleep(2)
        assert cpu_seconds(processes[1].pid) - before < 0.5  # an idle rank does not spin
        processes[0].send_signal(signal.SIGINT)
        errors = [process.communicate(timeout=60)[1] for process in processes]
        assert "error" not in errors[1], errors
        assert [process.returncode for process in processes] in ([0, 0], [130, 0]), errors
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return synthesize(SHAPE, tmp_path_factory.mktemp("shape") / SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["id", "memory:1GB,3GB"])
def test_each_rank_has_its_experts_only(placement, directory, tmp_path):
    parts = [
        convert(directory, tmp_path / f"part{i}", shard=f"{i}/2", placement=placement)
        for i in range(2)
    ]
    whole = convert(directory, tmp_path / "whole")
    sizes = [sum(f.stat().st_size for f in p.glob("experts/*.bin")) for p in (*parts, whole)]
    assert sizes[0] + sizes[1] == sizes[2]
    options = {"placement": placement, "expert_memory": "50%"}
    elsewhere = {"path": str(directory), "expert_path": str(tmp_path / "part{rank}")}
    for part in parts:
        shutil.copytree(part, tmp_path / f"copy-{part.name}")
    twice = {
        **elsewhere,
        "expert_path": [str(tmp_path / f"{of}part{{rank}}") for of in ("", "copy-")],
    }
    cases = [elsewhere | options, twice | options]
    jobs = [{"cases": [{"path": str(part), **options}, *cases]} for part in parts]
    found = results(tmp_path / "run", 2, "logits", *jobs)
    with load_model(whole) as model:
        expected = logits_of(model)
    for one in found:
        assert np.array_equal(one["logits0"], expected)
        assert np.array_equal(one["logits1"], expected)
        assert np.array_equal(one["logits2"], expected)


def test_a_part_is_no_checkpoint_by_itself(directory, tmp_path):
    part = convert(directory, tmp_path / "part", shard="1/4", verify_written=True)
    with pytest.raises(InputError, match="has one rank's experts; load with distributed"):
        load_model(part)
    with pytest.raises(InputError, match="has a part of the experts"):
        convert(part, tmp_path / "again")
    index = part / "experts" / "index.json"
    right = json.loads(index.read_text())
    assert right["of"] == 4 * right["num_experts"]
    held = dict(right["held"])
    layer = next(iter(held))
    for damage in (
        {"of": right["num_experts"]},
        {"held": []},
        {"held": {**held, layer: held[layer][1:]}},
        {"held": {**held, layer: held[layer][::-1]}},
        {"held": {**held, layer: [True, *held[layer][1:]]}},
    ):
        index.write_text(json.dumps(right | damage))
        with pytest.raises(ExpertFileError, match=f"experts of layer {layer}"):
            load_model(part)
    for wrong in ("2/2", "1", "0/0", "-1/2", "a/b"):
        with pytest.raises(InputError, match="give i/N"):
            convert(directory, tmp_path / "wrong", shard=wrong)
    with pytest.raises(InputError, match="packed"):
        convert(directory, tmp_path / "wrong", shard="0/2", layout="safetensors")


def test_without_a_launcher(capsys):
    with pytest.raises(Exception, match=r"mlx\.launch"):
        load_model(BUNDLED_MODEL, distributed=True)
    assert main(["check", "--link"]) == 1
    assert "start each rank with mlx.launch" in capsys.readouterr().err
    with pytest.raises(DistributedError, match="one rank has no link"):
        measure_link(Ranks(mx.distributed.init()))

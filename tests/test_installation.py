"""Oracle: the commands that uv, pipx and pip took for these records when they were tried by hand.
The workflow linux.yml tries them with the tools themselves."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from mlx_moeflux import installation
from mlx_moeflux.cli import main
from mlx_moeflux.installation import ROOT, install_command

RECEIPT = """[tool]
requirements = [
    {{ name = "tqdm", extras = ["notebook"], specifier = "<5" }},
    {{ name = "mlx-moeflux"{extras}, {source} = "/somewhere" }},
]
entrypoints = []
"""


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """The folder of an environment that has pip, and a package that is no clone."""
    environment = tmp_path / "mlx-moeflux-2"
    environment.mkdir()
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(sys, "executable", "/a b/python")
    monkeypatch.setattr(installation, "ROOT", tmp_path / "site-packages")
    return environment


@pytest.fixture
def clone(prefix, tmp_path, monkeypatch):
    (tmp_path / "my clone").mkdir()
    (tmp_path / "my clone" / "pyproject.toml").touch()
    monkeypatch.setattr(installation, "ROOT", tmp_path / "my clone")
    return tmp_path / "my clone"


def words(requirement: str) -> list[str]:
    return shlex.split(install_command(requirement))


def test_pip_of_the_running_interpreter(prefix):
    assert install_command("mlx_moeflux[server]") == (
        "'/a b/python' -m pip install 'mlx_moeflux[server]'"
    )
    assert words("mlx-lm") == ["/a b/python", "-m", "pip", "install", "mlx-lm"]


def test_uv_where_the_environment_has_no_pip(prefix, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    given = ["uv", "pip", "install", "--python", "/a b/python"]
    assert words("mlx_moeflux[server]") == [*given, "mlx_moeflux[server]"]
    assert words("mlx-lm") == [*given, "mlx-lm"]


def test_a_clone_is_named_by_its_folder(clone):
    given = ["/a b/python", "-m", "pip", "install"]
    assert words("mlx_moeflux[server]") == [*given, "-e", f"{clone}[server]"]
    assert words("mlx-lm") == [*given, "mlx-lm"]


def test_uv_tool_keeps_what_its_receipt_names(prefix):
    receipt = RECEIPT.format(extras=', extras = ["cpu", "chat"]', source="path")
    (prefix / "uv-receipt.toml").write_text(receipt)
    given, added = ["uv", "tool", "install"], ["--with", "tqdm[notebook]<5"]
    assert words("mlx_moeflux[server]") == [*given, "mlx_moeflux[cpu,chat,server]", *added]
    assert words("mlx_moeflux[chat]") == [*given, "mlx_moeflux[cpu,chat]", *added]
    assert words("mlx-lm") == [*given, "mlx_moeflux[cpu,chat]", *added, "--with", "mlx-lm"]


def test_uv_tool_without_extras_and_from_a_clone(clone, prefix):
    (prefix / "uv-receipt.toml").write_text(RECEIPT.format(extras="", source="editable"))
    given = ["uv", "tool", "install", "-e"]
    assert words("mlx_moeflux[server]")[:5] == [*given, f"{clone}[server]"]
    assert words("mlx-lm")[:5] == [*given, str(clone)]


@pytest.mark.parametrize(
    ("recorded", "extras"),
    [
        ("mlx-moeflux", "server"),
        ("mlx-moeflux[cpu, chat]==0.1.0", "cpu,chat,server"),
        ("/somewhere/mlx_moeflux-0.1.0-py3-none-any.whl[cpu]", "cpu,server"),
    ],
)
def test_pipx_injects_into_its_environment(prefix, recorded, extras):
    record = {"main_package": {"package": "mlx-moeflux", "package_or_url": recorded}}
    (prefix / "pipx_metadata.json").write_text(json.dumps(record))
    given = ["pipx", "inject", "mlx-moeflux-2"]
    assert words("mlx_moeflux[server]") == [*given, f"mlx_moeflux[{extras}]"]
    assert words("mlx-lm") == [*given, "mlx-lm"]


def test_pipx_and_a_clone(clone, prefix):
    record = {"main_package": {"package_or_url": f"{clone}[cpu]"}}
    (prefix / "pipx_metadata.json").write_text(json.dumps(record))
    given = ["pipx", "inject", "mlx-moeflux-2", "-e"]
    assert words("mlx_moeflux[server]") == [*given, f"{clone}[cpu,server]"]


def test_no_message_names_a_command_of_its_own():
    found = [
        file.name
        for file in (ROOT / "mlx_moeflux").rglob("*.py")
        if "pip install" in file.read_text(encoding="utf-8")
    ]
    assert found == []


def test_the_server_without_its_extra_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert main(["serve"]) == 1
    err = capsys.readouterr().err
    assert f"install it with {install_command('mlx_moeflux[server]')}." in err
    assert len(err.splitlines()) == 1

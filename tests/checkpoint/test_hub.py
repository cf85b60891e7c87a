"""Paths and hub ids. A hub of functions fails in every way that the library knows; what the library
writes and finds is tried on a hub at 127.0.0.1. No network."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.hf_api import ModelInfo

from mlx_moeflux.checkpoint.hub import needed_files, resolve
from mlx_moeflux.cli import main
from mlx_moeflux.errors import (
    CheckpointError,
    ChoiceError,
    MemoryBudgetError,
    UnsupportedError,
)
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.checkpoint.local_hub import COMMIT, local_hub

FILES = {
    "model-00001-of-00002.safetensors": 5_000_000_000,
    "model-00002-of-00002.safetensors": 4_000_000_000,
    "model.safetensors.index.json": 90_000,
    "config.json": 1_000,
    "generation_config.json": 200,
    "tokenizer.json": 20_000_000,
    "tokenizer_config.json": 9_000,
    "tokenizer.model": 500_000,
    "merges.txt": 1_600_000,
    "chat_template.jinja": 4_000,
    "README.md": 7_000,
    "LICENSE": 11_000,
    ".gitattributes": 1_500,
    "modeling_custom.py": 60_000,
    "pytorch_model.bin": 9_000_000_000,
    "model.pt": 9_000_000_000,
    "model-Q4_K_M.gguf": 5_000_000_000,
    "assets/benchmark.png": 300_000,
    "onnx/model.safetensors": 9_000_000_000,
    "consolidated.safetensors": 9_000_000_000,
    "original/params.json": 100,
}
NEEDED = list(FILES)[:10]


def http_error(kind, status=404):
    """An error as the library raises it, for whichever HTTP client it uses."""
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("the hub\nsays so.", response=response)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one repository; set its attributes to make it fail."""
    state = SimpleNamespace(
        files=dict(FILES), cached=set(), asked=[], info_error=None, download_error=None,
        in_cache=None, snapshot=tmp_path / "snapshot", free=10**15,
    )  # fmt: skip
    state.snapshot.mkdir()

    class Api:
        def model_info(self, repo_id, *, revision=None, files_metadata=False, timeout=None):
            if state.info_error:
                raise state.info_error
            assert files_metadata, "sizes are only sent when asked for"
            assert timeout, "a hub that does not answer is given up"
            siblings = [{"rfilename": n, "size": size} for n, size in state.files.items()]
            return ModelInfo(id=repo_id, sha="c0ffee", siblings=siblings)

    def snapshot_download(repo_id, **options):
        assert options["local_files_only"], "files come one by one"
        state.asked.append((repo_id, options))
        if state.in_cache is None:
            raise errors.LocalEntryNotFoundError("not there")
        return str(state.in_cache)

    def hf_hub_download(repo_id, name, *, revision, tqdm_class=None):
        if state.download_error:
            raise state.download_error
        state.asked.append((name, revision))
        state.cached.add(name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache",
        lambda repo_id, name, revision: (
            str(state.snapshot / name) if name in state.cached else None
        ),
    )  # fmt: skip
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=state.free))

    def read_part(remote, name, start, stop):
        raise OSError("no parts of files")

    monkeypatch.setattr("mlx_moeflux.checkpoint.hub._read_part", read_part)
    return state


def one_sentence(message, *parts):
    assert "\n" not in message
    assert message.endswith((".", "?"))
    for part in parts:
        assert part in message, (part, message)


def test_an_existing_directory_is_itself_even_if_it_looks_like_an_id(hub, tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    for folder in ("org", "org/name"):
        (tmp_path / folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("org/name") == Path("org/name")
    assert resolve(tmp_path / "org") == tmp_path / "org"
    assert resolve("~/org") == tmp_path / "org"
    assert hub.asked == []


@pytest.mark.parametrize("name", [
    "missing", "./org/name", "/org/name", "org/name/more", "../name", "org/", "/name", "", "a b/c",
    "org/../x", "x" * 5000, "a\0b", "https://huggingface.co/org/name", "órg/name", ".org/name",
])  # fmt: skip
def test_what_is_neither_a_directory_nor_an_id_is_refused_without_a_request(name, hub, tmp_path):
    hub.info_error = AssertionError("no request may be made")
    with pytest.raises(CheckpointError) as caught:
        resolve(name)
    one_sentence(str(caught.value), repr(name)[:50], "neither a directory nor a hub id")


def test_a_file_is_refused(hub, tmp_path):
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; pass the directory"):
        resolve(tmp_path / "model.safetensors")


def test_only_needed_files_are_asked_for_at_the_revision_that_was_planned(hub):
    assert resolve("org/name", revision="main") == hub.snapshot
    assert sorted(hub.asked) == sorted((name, "c0ffee") for name in NEEDED)


def test_needed_files_are_weights_json_and_tokenizer():
    assert needed_files(FILES) == NEEDED
    ours = ["experts/layer_03.bin", "experts/layer_117.bin", "experts/index.json"]
    theirs = [
        "model_weights.bin",
        "packed_experts/layer_00.bin",
        "packed_experts_2bit/layer_00.bin",
    ]
    heads = ["mtp/weights.safetensors", "mtp.safetensors", "model-mtp.safetensors"]
    other = ["experts/pickle.bin", "mtp/x/y.safetensors", "mtp/readme.md",
             "layer_03.bin", "training_args.bin", "experts/layer_03.bin.tmp",
             "x/experts/layer_03.bin", "experts/.progress.json", "qwen.tiktoken.py"]  # fmt: skip
    assert needed_files([*ours, *theirs, *heads, *other]) == [*ours, *theirs, *heads]


def test_the_plan_is_one_line_on_stderr_with_the_sizes(hub, capsys):
    hub.cached = {"model-00001-of-00002.safetensors"}
    hub.free = 50_000_000_000
    resolve("org/name")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for part in ("org/name: 9 of 10 files to download, 4.0 GB, to ", "(50.0 GB free)"):
        assert part in err


def test_nothing_is_said_when_everything_is_in_the_cache(hub, capsys):
    hub.cached, hub.free = set(NEEDED), 0
    assert resolve("org/name") == hub.snapshot
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("cached", [[], NEEDED[:1]])
@pytest.mark.parametrize(("spare", "fits"), [(-1, False), (-(10**9), False), (0, True)])
def test_the_disk_must_hold_what_is_still_missing(cached, spare, fits, hub):
    missing = sum(FILES[name] for name in NEEDED if name not in cached)
    hub.cached, hub.free = set(cached), missing + spare
    if fits:
        assert resolve("org/name") == hub.snapshot
        return
    with pytest.raises(MemoryBudgetError) as caught:
        resolve("org/name")
    free = f"has {hub.free / 1e9:.1f} GB free"
    mend = "'hf cache rm model/ORG/NAME'"
    one_sentence(str(caught.value), f"needs {missing / 1e9:.1f} GB", free, mend, "HF_HUB_CACHE")
    assert hub.asked == []


def test_finished_files_are_not_asked_for_again(hub):
    hub.cached = set(NEEDED[:3])
    assert resolve("org/name") == hub.snapshot
    assert sorted(hub.asked) == sorted((name, "c0ffee") for name in NEEDED[3:])
    hub.asked.clear()
    assert resolve("org/name") == hub.snapshot
    assert hub.asked == []


def test_a_short_name_and_a_revision_in_a_name_reach_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, ask = [], huggingface_hub.HfApi.model_info

    def model_info(self, repo_id, *, revision=None, **options):
        names.append((repo_id, revision))
        return ask(self, repo_id, revision=revision, **options)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    for name in ("qwen3.6", "qwen3.6@v2", "org/name@v2"):
        assert resolve(name) == hub.snapshot
    mlx = "mlx-community/Qwen3.6-35B-A3B-4bit"
    assert names == [(mlx, None), (mlx, "v2"), ("org/name", "v2")]


def test_a_repository_without_weights_is_refused(hub):
    hub.files = {"config.json": 1, "mmproj-F16.gguf": 2, "pytorch_model.bin": 3}
    with pytest.raises(UnsupportedError, match="org/name holds no weights in safetensors or GGUF"):
        resolve("org/name")
    assert hub.asked == []


GGUFS = {
    "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf": 4_000_000_000,
    "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf": 3_000_000_000,
    "m-Q8_0.gguf": 9_000_000_000,
    "mmproj-F16.gguf": 600_000_000,
    "imatrix.dat": 100_000_000,
    "README.md": 7_000,
}


@pytest.mark.parametrize("more", [{}, {n: FILES[n] for n in NEEDED}], ids=["alone", "beside"])
@pytest.mark.parametrize("by", ["option", "colon"])
def test_of_a_chosen_gguf_model_only_its_files_are_asked_for(more, by, hub):
    """With what is neither weights nor their index. The disk must hold these alone."""
    hub.files, hub.free = GGUFS | more, 8_000_000_000
    names = list(GGUFS)[:2]
    if by == "option":
        found = resolve("org/name", gguf_file="q4_k_m")
    else:
        found = resolve("org/name:Q4_K_M")
    assert found == hub.snapshot / names[0]
    others = [name for name in NEEDED[3:] if name in more]
    assert sorted(hub.asked) == sorted((name, "c0ffee") for name in [*names, *others])
    hub.asked.clear()
    with pytest.raises(MemoryBudgetError, match=r"needs 9\.0 GB, but"):
        resolve("org/name:q8_0")
    assert hub.asked == []


def test_several_gguf_models_of_a_repository_are_listed(hub):
    hub.files = dict(GGUFS)
    for name, words in (
        ("org/name", "org/name holds 2 GGUF models: Q4_K_M 7.0 GB, Q8_0 9.0 GB; choose one with"),
        ("org/name:Q2_K", "holds no GGUF model 'Q2_K'; there are Q4_K_M 7.0 GB, Q8_0 9.0 GB."),
    ):
        with pytest.raises(ChoiceError) as caught:
            resolve(name)
        one_sentence(str(caught.value), words)
    del hub.files["m-Q8_0.gguf"]
    assert hub.asked == []
    assert resolve("org/name") == hub.snapshot / next(iter(GGUFS))
    del hub.files["Q4_K_M/m-Q4_K_M-00002-of-00002.gguf"]
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.gguf is missing"):
        resolve("org/name")


REFUSALS = {
    "gated": (lambda: http_error(errors.GatedRepoError, 403), CheckpointError, "is gated"),
    "not found": (
        lambda: http_error(errors.RepositoryNotFoundError), CheckpointError, "neither a local dir"),
    "revision": (
        lambda: http_error(errors.RevisionNotFoundError), CheckpointError, "no revision 'v9'"),
    "invalid": (lambda: errors.HFValidationError("bad\nid"), CheckpointError, "not a hub id"),
    "refused": (
        lambda: http_error(errors.HfHubHTTPError, 429), UnsupportedError, "failed (the hub says"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.parametrize("when", ["info_error", "download_error"])
def test_what_the_hub_refuses_is_one_sentence(case, when, hub):
    make, kind, words = REFUSALS[case]
    setattr(hub, when, make())
    hub.in_cache = hub.snapshot
    with pytest.raises(kind) as caught:
        resolve("org/name", revision="v9")
    one_sentence(str(caught.value), "org/name", words)
    assert isinstance(caught.value.__cause__, (OSError, ValueError))


def client_error():
    """A connection error of the HTTP client itself, which need not be an OSError."""
    kinds = {kind.__name__: kind for kind in errors.HTTPError.__subclasses__()}
    return kinds["RequestError"]("no\nroute") if "RequestError" in kinds else ConnectionError("no")


OFFLINE = {
    "switched off": lambda: errors.OfflineModeIsEnabled("offline mode is on"),
    "no connection": lambda: ConnectionError("no route"),
    "http client": client_error,
    "hub down": lambda: http_error(errors.HfHubHTTPError, 503),
    "timeout": TimeoutError,
}


@pytest.mark.parametrize("case", OFFLINE)
def test_offline_the_copy_in_the_cache_is_taken_or_one_sentence_says_so(case, hub):
    hub.info_error = OFFLINE[case]()
    with pytest.raises(UnsupportedError) as caught:
        resolve("org/name", revision="v9")
    one_sentence(str(caught.value), "org/name is not in the cache", "cannot be reached (", "HF_HUB")
    hub.in_cache = hub.snapshot
    with pytest.raises(UnsupportedError, match="org/name has no weights in the cache"):
        resolve("org/name", revision="v9")
    (hub.snapshot / "model.safetensors").touch()
    assert resolve("org/name", revision="v9") == hub.snapshot
    assert hub.asked[-1][1]["revision"] == "v9"
    assert hub.asked[-1][1]["local_files_only"]


def test_a_download_that_breaks_off_says_that_it_resumes(hub):
    hub.download_error = OSError("x" * 1000)
    with pytest.raises(UnsupportedError) as caught:
        resolve("org/name")
    one_sentence(str(caught.value), "Downloading org/name failed", "goes on where it stopped")
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_the_rest_of_a_file(tmp_path):
    """60 MB in 60 s; the library reports parts of 10 MB."""
    with local_hub(BUNDLED_MODEL, {"model-2.safetensors": bytes(60 << 20)}) as hub:
        hub.pause = 1.0
        command = [sys.executable, "-m", "mlx_moeflux", "generate", "--model", "org/tiny"]
        started = subprocess.Popen(
            command, env=hub.environment(tmp_path), stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 30
        while ("GET", f"/org/tiny/resolve/{COMMIT}/model-2.safetensors") not in hub.requests:
            assert time.monotonic() < until
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        hub.pause = 0.2
        begun = time.monotonic()
        _, written = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in written
    assert time.monotonic() - begun < 9
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and f.stat().st_size > 10 << 20]


def test_the_real_library_takes_a_copy_from_its_cache_offline(monkeypatch, tmp_path):
    """The library's own cache layout, with nothing faked: no request can be made offline."""
    cache = tmp_path / "hub"
    snapshot = cached_copy(cache, COMMIT, "main")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert resolve("org/name") == snapshot
    # Written by a program that names no branch: one copy is the copy.
    shutil.rmtree(cache / "models--org--name" / "refs")
    assert resolve("org/name") == snapshot
    for name, revision in (("other/name", None), ("org/name", "v9")):
        with pytest.raises(UnsupportedError, match=f"{name} is not in the cache"):
            resolve(name, revision=revision)


def cached_copy(cache: Path, commit: str, *branches: str) -> Path:
    """A copy of org/name in a cache, as huggingface_hub lays it out."""
    folder = cache / "models--org--name"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    for branch in branches:
        (folder / "refs" / branch).write_text(commit)
    return snapshot


def test_a_folder_of_the_cache_is_its_snapshot(tmp_path):
    folder = tmp_path / "models--org--name"
    first = cached_copy(tmp_path, COMMIT)
    assert resolve(folder) == first
    second = cached_copy(tmp_path, COMMIT[::-1], "main", "v2")
    assert resolve(folder) == resolve(folder, revision="v2") == second
    assert resolve(folder, revision=COMMIT) == first
    with pytest.raises(CheckpointError) as caught:
        resolve(folder, revision="v1")
    one_sentence(str(caught.value), str(folder), "'v1'", COMMIT, COMMIT[::-1])


NO_MODELS = {
    "empty": ([], "is empty; pass the directory that holds"),
    "adapter": (["adapter_config.json", "adapter_model.safetensors"], "mlx_lm.fuse"),
    "adapter of mlx-lm": (["adapters.safetensors", "adapter_config.json"], "holds an adapter"),
    "projector": (["mmproj-F16.gguf"], "holds mmproj-F16.gguf, a vision projector"),
    "something else": (["README.md", "main.py"], "has no config.json and no .gguf file"),
    "matrix": (["m.imatrix.gguf"], "holds m.imatrix.gguf, an importance matrix"),
    "drafts": (["mtp-m-Q8_0.gguf"], "holds mtp-m-Q8_0.gguf, a draft model"),
    "projectors": (["x-mmproj-q8.gguf", "mmproj-BF16.gguf", "README.md"], "mmproj-BF16.gguf"),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model_says_what_it_is(case, hub, tmp_path, capsys):
    names, words = NO_MODELS[case]
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    for command in (["generate", "--model", str(folder)], ["plan", str(folder)]):
        assert main(command) == 1
        one_sentence(capsys.readouterr().err.strip(), str(folder), words)
    hub.files = dict.fromkeys(names, 1)
    with pytest.raises(CheckpointError) as caught:
        resolve("org/name")
    one_sentence(str(caught.value), "org/name", words)
    assert hub.asked == []


def test_an_adapter_beside_a_model_and_a_projector_beside_one_are_no_fault(tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "adapter_config.json").touch()
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "config.json").unlink()
    (tmp_path / "mmproj-F16.gguf").touch()
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert resolve(tmp_path) == tmp_path / "model-Q4_K_M.gguf"


# Names that programs look for and this package leaves out.
LEFT_OUT = {"README.md": b"#", "modeling.py": b"", "onnx/config.json": b"{}", "a.jsonl": b"{}"}

OFFLINE_PROGRAMS = """
import contextlib, io, json, os, sys
import huggingface_hub as hub
from mlx_lm.utils import _download
from mlx_moeflux.cli import main
texts = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(command) == 0
    texts.append(text.getvalue())
found = hub.scan_cache_dir()
print(json.dumps({
    "texts": texts,
    "snapshot": hub.snapshot_download("org/tiny", local_files_only=True),
    "config": hub.try_to_load_from_cache("org/tiny", "config.json"),
    "copies": [[r.commit_hash, sorted(r.refs)] for m in found.repos for r in m.revisions],
    "mlx_lm": str(_download("org/tiny")),
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("switched_off", [{"HF_HUB_OFFLINE": "1"}, {}])
def test_what_was_downloaded_is_found_without_a_connection(tmp_path, switched_off):
    """By this package, by the library and by mlx-lm, where the hub that answered is gone."""
    pytest.importorskip("mlx_lm")

    def run(*command, **more):
        result = subprocess.run(
            [sys.executable, *command], env=hub.environment(tmp_path, **more),
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result

    generate = ["generate", "--model", "org/tiny", "--prompt", "a", "--max-tokens", "3"]
    with local_hub(BUNDLED_MODEL, LEFT_OUT) as hub:
        first = run("-m", "mlx_moeflux", *generate)
        assert "org/tiny: 4 of 4 files to download" in first.stderr
        asked = {path for method, path in hub.requests if method == "GET"}
        assert not any(path.endswith(tuple(LEFT_OUT)) for path in asked)
    commands = [generate, ["plan", "org/tiny", "--memory", "8GB", "--ssd-gbps", "1"]]
    began = time.monotonic()
    found = json.loads(run("-c", OFFLINE_PROGRAMS, json.dumps(commands), **switched_off).stdout)
    # The library's own repetitions for one file take 23 s.
    assert time.monotonic() - began < 60
    text, plan = found.pop("texts")
    assert text == first.stdout
    assert plan.startswith("model    org/tiny (qwen3_5_moe)")
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert found == {
        "snapshot": str(snapshot), "config": str(snapshot / "config.json"),
        "copies": [[COMMIT, ["main"]]], "mlx_lm": str(snapshot),
    }  # fmt: skip


ONLINE = """
import json, sys
from mlx_moeflux.checkpoint.hub import resolve, resolve_headers
with resolve_headers("org/tiny") as found:
    pass
print(json.dumps([None if isinstance(found, tuple) else str(found), str(resolve("org/tiny"))]))
"""


@pytest.mark.slow
def test_a_plan_does_not_make_a_branch_point_to_a_copy_without_weights(tmp_path):
    """A repository moves on; a plan keeps the copy that loads without a connection."""
    with local_hub(BUNDLED_MODEL) as hub:

        def run(script, **more):
            environment = hub.environment(tmp_path, **more)
            command = [sys.executable, "-c", script]
            result = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            return json.loads(result.stdout)

        headers, first = run(ONLINE)
        assert headers is None
        assert Path(first).name == COMMIT
        hub.requests.clear()
        assert run(ONLINE) == [first, first]
        # All that a complete copy needs is one question: is it the branch's newest?
        assert hub.requests == [("GET", "/api/models/org/tiny")] * 2
        hub.commit = COMMIT[::-1]
        assert run(ONLINE.replace('resolve("org/tiny")', "''")) == [None, ""]
        assert run(ONLINE, HF_HUB_OFFLINE="1") == [first, first]
        assert Path(run(ONLINE)[1]).name == hub.commit
        refs = tmp_path / "hub" / "models--org--tiny" / "refs" / "main"
        assert refs.read_text() == hub.commit

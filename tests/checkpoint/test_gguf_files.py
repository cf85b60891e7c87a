"""Oracle: names as unsloth, bartowski, mradermacher and ggml-org publish them, written out; headers
by the `gguf` package's writer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_moeflux.checkpoint import hub
from mlx_moeflux.checkpoint.formats.gguf import open_gguf
from mlx_moeflux.checkpoint.formats.gguf_files import (
    choose,
    entries_of,
    find_gguf,
)
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.cli import main
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import (
    MOST_CHARACTERS,
    CheckpointError,
    ChoiceError,
    InputError,
    UnsupportedError,
)
from mlx_moeflux.loading import load, load_model
from mlx_moeflux.tokenizer import load_tokenizer

pytest.importorskip("gguf")

from tests.checkpoint import gguf_files
from tests.checkpoint.local_hub import COMMIT, LocalHub, local_hub

Q = "Qwen3-30B-A3B"
PUBLISHED = {
    f"{Q}-Q4_K_M.gguf": 18_600_000_000,
    f"{Q}-Q4_K_S.gguf": 17_500_000_000,
    f"{Q}-IQ4_XS.gguf": 16_400_000_000,
    f"{Q}-UD-Q4_K_XL.gguf": 17_700_000_000,
    f"{Q}-UD-Q4_K_M.gguf": 17_600_000_000,
    f"BF16/{Q}-BF16-00001-of-00002.gguf": 49_000_000_000,
    f"BF16/{Q}-BF16-00002-of-00002.gguf": 12_000_000_000,
    "mmproj-F16.gguf": 600_000_000,
    "imatrix.gguf": 100_000_000,
    "imatrix_unsloth.gguf_file": 100_000_000,
    f"mtp-{Q}-Q8_0.gguf": 900_000_000,
    f"{Q}-F16-LoRA.gguf": 100_000_000,
    "config.json": 900,
}
LISTED = (
    "IQ4_XS 16.4 GB, Q4_K_S 17.5 GB, UD-Q4_K_M 17.6 GB, UD-Q4_K_XL 17.7 GB, Q4_K_M 18.6 GB, "
    "BF16 61.0 GB"
)
BF16 = [f"BF16/{Q}-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]
CHOICES = {
    "Q4_K_M": [f"{Q}-Q4_K_M.gguf"],
    "q4_k_s": [f"{Q}-Q4_K_S.gguf"],
    "UD-Q4_K_M": [f"{Q}-UD-Q4_K_M.gguf"],
    "ud-q4_k_xl": [f"{Q}-UD-Q4_K_XL.gguf"],
    "Q4_K_XL": [f"{Q}-UD-Q4_K_XL.gguf"],
    f"{Q}-IQ4_XS.gguf": [f"{Q}-IQ4_XS.gguf"],
    f"{Q}-IQ4_XS": [f"{Q}-IQ4_XS.gguf"],
    "bf16": BF16,
    BF16[1]: BF16,
    f"{Q}-BF16-00002-of-00002.gguf": BF16,
    f"{Q}-bf16": BF16,
}


def chosen(names, wanted=None, place="org/name"):
    return choose(place, entries_of(names), wanted)


def one_line(caught, *parts: str) -> None:
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    for part in parts:
        assert part in text, (part, text)


@pytest.mark.parametrize("wanted", CHOICES)
def test_a_quantisation_or_a_file_chooses(wanted):
    found = chosen(PUBLISHED, wanted)
    assert list(found.files) == CHOICES[wanted]
    assert found.nbytes == sum(PUBLISHED[name] for name in CHOICES[wanted])


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (f"{Q}-Q4_K_M.gguf", "Q4_K_M"),
        ("model.Q2_K.gguf", "Q2_K"),
        ("model.i1-IQ3_XXS.gguf", "i1-IQ3_XXS"),
        ("google_gemma-3-Q6_K_L.gguf", "Q6_K_L"),
        ("m-Q4_0_4_8.gguf", "Q4_0_4_8"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
        ("x-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("x-UD-TQ1_0.gguf", "UD-TQ1_0"),
        ("x-bf16.gguf", "bf16"),
        ("x-f32.gguf", "f32"),
        ("Q5_K_M/model-00001-of-00001.gguf", "Q5_K_M"),
        ("BF16/model-Q8_0.gguf", "Q8_0"),
        (f"{Q}-Q4_K_M-fixed.gguf", "Q4_K_M"),
        ("Qwen3-Q8x7.gguf", "Qwen3-Q8x7"),
        ("model.gguf", "model"),
    ],
)
def test_the_quantisation_in_a_name(name, label):
    (model,) = [chosen({name: 1})]
    assert model.label == label


def test_one_model_needs_no_choice():
    others = {n: size for n, size in PUBLISHED.items() if "-Q4" not in n and "UD" not in n}
    others.pop(f"{Q}-IQ4_XS.gguf")
    assert list(chosen(others).files) == BF16
    assert chosen({"mmproj-F16.gguf": 1, "config.json": 1}) is None
    assert chosen({}) is None


def test_several_models_are_listed_by_size_with_what_chooses():
    with pytest.raises(ChoiceError) as caught:
        chosen(PUBLISHED)
    one_line(
        caught, f"org/name holds 6 GGUF models: {LISTED}; choose", "--gguf-file IQ4_XS", ":IQ4"
    )


def test_a_long_list_is_whole_and_an_endless_one_is_not():
    names = [f"UD-IQ{i}_{kind}" for i in range(1, 9) for kind in ("XXS", "XS", "S", "M")]
    with pytest.raises(ChoiceError) as caught:
        chosen({f"m-{name}.gguf": 2**30 for name in names})
    one_line(caught, *names)
    assert len(str(caught.value)) > MOST_CHARACTERS
    with pytest.raises(ChoiceError) as caught:
        chosen({f"{'m' * 200}{i}.gguf": 1 for i in range(900)})
    one_line(caught, "holds 900 GGUF models", "and 860 more")
    assert len(str(caught.value)) < 6000


def test_an_unknown_quantisation_lists_what_there_is():
    for wanted in ("Q8_0", "Q4", "K_M", "", "BF16/"):
        with pytest.raises(ChoiceError) as caught:
            chosen(PUBLISHED, wanted)
        one_line(caught, f"org/name holds no GGUF model {wanted!r}; there are {LISTED}")
    with pytest.raises(ChoiceError, match="no GGUF model 'Q8_0' and no other; leave out gguf_file"):
        chosen({"model.safetensors": 1}, "Q8_0")
    with pytest.raises(InputError, match="gguf_file is 4"):
        chosen(PUBLISHED, 4)


def test_an_ambiguous_quantisation_lists_its_files():
    names = {"a-Q4_K_M.gguf": 10**9, "sub/b-q4_k_m.gguf": 2 * 10**9, "a-Q8_0.gguf": 1}
    listed = "a-Q4_K_M.gguf 1.0 GB, sub/b-q4_k_m.gguf 2.0 GB"
    with pytest.raises(ChoiceError) as caught:
        chosen(names, "Q4_K_M")
    one_line(caught, f"org/name: 'Q4_K_M' fits 2 GGUF models: {listed}; choose")
    with pytest.raises(ChoiceError) as caught:
        chosen(names)
    one_line(caught, f"3 GGUF models: Q8_0 0.0 MB, {listed}; choose")
    assert chosen(names, "b-Q4_K_M").files == ("sub/b-q4_k_m.gguf",)
    with pytest.raises(ChoiceError) as caught:
        chosen({"UD-Q2_K.gguf": 1, "i1-Q2_K.gguf": 2}, "q2_k")
    one_line(caught, "UD-Q2_K 0.0 MB, i1-Q2_K 0.0 MB")


@pytest.mark.parametrize(
    ("wanted", "what"),
    [
        ("mmproj-F16.gguf", "a vision projector"),
        ("imatrix.gguf", "an importance matrix"),
        (f"mtp-{Q}-Q8_0.gguf", "a draft model"),
        (f"{Q}-F16-LORA.gguf", "an adapter"),
    ],
)
def test_a_file_beside_the_models_is_no_choice(wanted, what):
    with pytest.raises(ChoiceError) as caught:
        chosen(PUBLISHED, wanted)
    one_line(caught, f"is {what}", f"no model; there are {LISTED}")


def test_a_missing_shard_is_one_line(tmp_path):
    names = dict.fromkeys(BF16, 1)
    for missing in BF16:
        there = {name: 1 for name in names if name != missing}
        with pytest.raises(CheckpointError) as caught:
            chosen(there, "bf16")
        one_line(caught, f"org/name: {missing} is missing; the model has 2 shards")
        (tmp_path / "BF16").mkdir(exist_ok=True)
        (rest,) = there
        (tmp_path / rest).touch()
        for path in (tmp_path, tmp_path / "BF16", tmp_path / rest):
            with pytest.raises(CheckpointError) as caught:
                find_gguf(path)
            one_line(caught, str(tmp_path), f"{Path(missing).name} is missing; the model has 2")
        (tmp_path / rest).unlink()
    with pytest.raises(CheckpointError, match="of-99999"):
        chosen({"m-00001-of-99999.gguf": 1})


# What a file is -> architecture and metadata of its header.
HEADERS = {
    "a vision projector": ("clip", {"general.type": "mmproj"}),
    "an importance matrix": ("", {"general.type": "imatrix"}),
    "an adapter": ("qwen3moe", {"general.type": "adapter", "adapter.type": "lora"}),
}


@pytest.mark.parametrize("what", HEADERS)
def test_the_header_says_what_is_no_model(tmp_path, what, capsys):
    for name in ("strange.gguf", "nameless"):
        file = gguf_files.write_header(tmp_path / name, *HEADERS[what])
        with pytest.raises(UnsupportedError) as caught:
            load_model(file)
        one_line(caught, f"{file} is {what}", "pass the GGUF file of the language model")
    assert main(["plan", str(tmp_path)]) == 1
    assert f"{tmp_path} holds strange.gguf, {what}" in capsys.readouterr().err
    model = gguf_files.write_header(tmp_path / "m.gguf", "qwen3moe", {"general.type": "model"})
    assert find_gguf(tmp_path) == model


def test_of_a_file_that_is_passed_the_header_decides(tmp_path):
    file = gguf_files.write_header(tmp_path / "m-imatrix-Q4_K_M.gguf", "qwen3moe", {})
    assert find_gguf(file) == file
    assert find_gguf(tmp_path) is None


def test_an_old_importance_matrix_says_what_it_is(tmp_path, capsys):
    file = tmp_path / "imatrix_unsloth.dat"
    file.write_bytes(b"\x10\0\0\0blk.0")
    assert main(["plan", str(file)]) == 1
    assert f"{file} is an importance matrix" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "m.gguf", lambda name: "Q8_0")


def test_any_shard_and_any_folder_open_the_whole_set(model, tmp_path):
    folder = tmp_path / "Q8_0"
    files = gguf_files.split(model, folder, "m-Q8_0", 3)
    whole = open_checkpoint(model)
    for path in (*files, folder, tmp_path):
        found = open_checkpoint(path)
        assert found.described_by == files[0]
        assert found.identity() == whole.identity()
        assert load_tokenizer(path).encode("ab ba") == load_tokenizer(model).encode("ab ba")


def test_shards_under_other_names_are_one_line(model, tmp_path):
    files = gguf_files.split(model, tmp_path, "m", 2)
    renamed = files[1].rename(tmp_path / "second.gguf")
    with pytest.raises(CheckpointError) as caught:
        open_gguf(renamed)
    one_line(caught, f"{renamed} has split.no 1 (from 0) of split.count 2")
    files[0].rename(files[1])
    renamed.rename(files[0])
    with pytest.raises(CheckpointError) as caught:
        open_gguf(files[0])
    one_line(caught, f"{files[0]} has split.no 1 (from 0) of split.count 2")
    for file in files:
        file.rename(tmp_path / file.name.replace("of-00002", "of-00001"))
    with pytest.raises(CheckpointError, match=r"of split\.count 2"):
        open_gguf(tmp_path / "m-00001-of-00001.gguf")


@pytest.mark.parametrize("name", ["model", "model.bin", "sha256-0123", "imatrix"])
def test_a_file_of_any_name_that_is_gguf_inside(model, tmp_path, name):
    file = tmp_path / name
    file.symlink_to(model)
    assert hub.resolve(file) == file
    assert open_checkpoint(file).identity() == open_checkpoint(model).identity()


def test_a_folder_with_several_models(model, tmp_path, capsys):
    """Each way of opening chooses by the same name."""
    (tmp_path / "meaning.gguf").touch()
    (tmp_path / "m-Q8_0.gguf").symlink_to(model)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m-Q2_K.gguf").touch()
    for command in (["plan"], ["generate", "--model"], ["convert", "--out", "x", "--model"]):
        assert main([*command, str(tmp_path)]) == 1
        err = capsys.readouterr().err
        size = f"{model.stat().st_size / 1e6:.1f} MB"
        assert f"3 GGUF models: meaning 0.0 MB, Q2_K 0.0 MB, Q8_0 {size}; choose" in err
    assert main(["plan", str(tmp_path), "--gguf-file", "q8_0", "--ssd-gbps", "1"]) == 0
    assert main(["plan", f"{tmp_path}:Q8_0", "--ssd-gbps", "1"]) == 0
    assert main(["plan", f"{tmp_path}:Q8_0", "--gguf-file", "q8_0"]) == 1
    assert "chooses 'Q8_0' already" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "m-Q8_0.gguf"), "--gguf-file", "q8_0"]) == 1
    assert "is a file already" in capsys.readouterr().err
    with load_model(tmp_path, gguf_file="Q8_0") as found:
        identity = found.identity
    found, tokenizer = load(tmp_path, gguf_file="m-Q8_0.gguf")
    with found:
        assert found.identity == identity
    assert tokenizer.encode("ab ba") == load_tokenizer(model).encode("ab ba")
    assert convert(tmp_path, tmp_path / "out", gguf_file="Q8_0").is_dir()
    file = str(tmp_path / "prompt.safetensors")
    command = ["cache_prompt", "--prompt", "ab", "--prompt-cache-file", file]
    assert main([*command, "--model", str(tmp_path), "--gguf-file", "Q8_0"]) == 0
    assert main(["generate", "-p", "ab", "-m", "1", "--prompt-cache-file", file]) == 0
    # A directory of safetensors is what it was; a choice goes before them.
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path, "Q8_0") == tmp_path / "m-Q8_0.gguf"


@pytest.mark.parametrize(
    "steps", [(1 << 28,), (64, 4096, 1 << 14, 1 << 28), (1000, 20000, 1 << 28)]
)
def test_headers_alone_are_those_of_the_whole_files(model, tmp_path, monkeypatch, steps):
    files = gguf_files.split(model, tmp_path / "Q8_0", "m", 2)
    read = {}

    def read_part(remote, name, start, stop):
        assert start == read.get(name, 0)
        read[name] = stop
        return (tmp_path / name).read_bytes()[start:stop]

    monkeypatch.setattr(hub, "_read_part", read_part)
    monkeypatch.setattr(hub, "_HEADER_STEPS", steps)
    sizes = {f"Q8_0/{file.name}": file.stat().st_size for file in files}
    remote = hub._Remote("org/name", None, COMMIT, sizes | {"config.json": 1}, [], None)
    out = tmp_path / "out"
    out.mkdir()
    first = hub._remote_gguf(remote, f"Q8_0/{files[0].name}", out)
    assert first == out / files[0].name
    assert open_checkpoint(first).identity() == open_checkpoint(model).identity()
    assert len(steps) == 1 or sum(read.values()) < sum(sizes.values()) / 4


PROGRAM = """
import contextlib, io, json, sys
from mlx_moeflux.checkpoint.hub import resolve
from mlx_moeflux.cli import main
from mlx_moeflux.errors import MoefluxError
results = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            if command[0] == "plan":
                status = main(command)
            else:
                try:
                    status = str(resolve(command[0], gguf_file=(*command, None)[1]))
                except MoefluxError as error:
                    status = str(error)
    results.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def run_program(hub: LocalHub, home: Path, commands, **more: str) -> list:
    """Run the commands against the real library; what each returns, prints and writes on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env=hub.environment(home, **more), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_architecture_that_is_not_read_is_refused_before_the_download(tmp_path):
    """With the line of opening the file. Where the hub sends no parts, or the beginning does not
    say it, the file comes, and opening it says so."""
    folder = tmp_path / "repository"
    folder.mkdir()
    late = {"general.description": "x" * (70 << 10), "general.architecture": "mamba"}
    for name, architecture, more in (
        ("m-Q8_0", "llama", {}), ("m-Q4_0", "", late), ("m-Q5_0", *HEADERS["a vision projector"]),
    ):  # fmt: skip
        file = gguf_files.write_header(folder / f"{name}.gguf", architecture, more)
        file.write_bytes(file.read_bytes() + bytes(3 << 20))

    def opened(name: str) -> str:
        with pytest.raises(UnsupportedError) as caught:
            open_checkpoint(folder / name)
        return str(caught.value).removeprefix(str(folder))

    llama, mamba, projector = (opened(f"m-{q}.gguf") for q in ("Q8_0", "Q4_0", "Q5_0"))
    assert "the architecture is 'llama'; of GGUF are read qwen3moe, " in llama
    assert "the architecture is 'mamba'" in mamba
    home = tmp_path / "home"
    with local_hub(folder) as hub:
        asked, planned, beside, missed = run_program(hub, home, [
            ["org/tiny:Q8_0"], ["plan", "org/tiny:Q8_0"], ["org/tiny:Q5_0"], ["org/tiny:Q4_0"],
        ])  # fmt: skip
        hub.ranges = False
        whole, planned_whole = run_program(
            hub, home, [["org/tiny:Q8_0"], ["plan", "org/tiny:Q8_0"]]
        )
    assert asked == [f"org/tiny{llama}", "", ""]
    assert planned[0] == 1
    assert planned[2].endswith(f"org/tiny{llama}\n")
    assert beside == [f"org/tiny{projector}", "", ""]
    for path, expected in ((missed[0], mamba), (whole[0], llama)):
        with pytest.raises(UnsupportedError) as caught:
            open_checkpoint(path)
        assert str(caught.value) == f"{Path(path).parent}{expected}"
    assert planned_whole[0] == 1
    assert planned_whole[2].endswith(f"{llama}\n")


def test_a_repository_of_several_models(model, tmp_path):
    """Against the real library: only the chosen files come, and are found without the hub."""

    def run(*commands: list[str], **more: str):
        return run_program(hub, tmp_path, commands, **more)

    shards = gguf_files.split(model, tmp_path / "BF16", "m-BF16", 2)
    files = {f"BF16/{file.name}": file.read_bytes() for file in shards}
    files |= {"m-UD-Q4_K_XL.gguf": b"GGUF" * 10**6, "mmproj-F16.gguf": b"GGUF", "imatrix.dat": b"."}
    files |= {"m-Q8_0.gguf": model.read_bytes(), "README.md": b"#"}
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "config.json").write_text("{}")
    plan = ["plan", "--memory", "8GB", "--ssd-gbps", "1"]
    with local_hub(tmp_path / "repository", files) as hub:
        several, remote, first, shard = run(
            ["org/tiny"], [*plan, "org/tiny:bf16"], ["org/tiny:Q8_0"],
            ["org/tiny:BF16/m-BF16-00002-of-00002.gguf"],
        )  # fmt: skip
        asked = {path.partition(COMMIT)[2] for method, path in hub.requests if method == "GET"}
    assert "org/tiny holds 3 GGUF models: UD-Q4_K_XL 4.0 MB, " in several[0]
    assert remote[0] == 0
    assert remote[1].startswith("model    org/tiny:bf16 (qwen3_moe)")
    assert "2 of 2 files to download" in first[2]
    assert "2 of 3 files to download" in shard[2]
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert first[0] == str(snapshot / "m-Q8_0.gguf")
    assert shard[0] == str(snapshot / "BF16" / shards[0].name)
    expected = {"/m-Q8_0.gguf", "/config.json", *(f"/BF16/{file.name}" for file in shards)}
    assert asked - {""} == expected
    assert {f"/{f.relative_to(snapshot)}" for f in snapshot.rglob("*") if f.is_file()} == expected
    several, unknown, first_again, planned = run(
        ["org/tiny"], ["org/tiny:UD-Q4_K_XL"], ["org/tiny", "q8_0"],
        [*plan, "org/tiny", "--gguf-file", "BF16"], HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert "in the cache (the hub cannot be reached) holds 2 GGUF models: " in several[0]
    assert "holds no GGUF model 'UD-Q4_K_XL'; there are " in unknown[0]
    assert first_again[0] == first[0]
    assert planned[1].splitlines()[1:] == remote[1].splitlines()[1:]


class Reached(Exception):
    """The model was asked for; holds the choice."""


@pytest.mark.parametrize(
    "words",
    [["tune"], ["report"], ["benchmark"], ["compare-quality", "--experts-per-token", "1"]],
    ids=lambda words: words[0],
)
def test_other_commands_pass_the_choice_on(words, tmp_path, monkeypatch):
    def reached(path, *, revision, gguf_file):
        raise Reached(path, gguf_file)

    monkeypatch.setattr(hub, "resolve", reached)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Reached) as found:
        main([*words, "--model", "org/name", "--gguf-file", "Q8_0"])
    assert found.value.args == ("org/name", "Q8_0")

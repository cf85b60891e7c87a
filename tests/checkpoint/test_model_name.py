"""Oracle: what each name means, written down here; paths that exist, made here."""

from __future__ import annotations

import pytest

from mlx_moeflux.checkpoint.catalogue import catalogue
from mlx_moeflux.checkpoint.model_name import parse_model_name
from mlx_moeflux.errors import CheckpointError, InputError, MoefluxError

MEANINGS = {
    "org/name": ("org/name", None, None),
    "org/name@v2": ("org/name", "v2", None),
    "org/name@refs/pr/1": ("org/name", "refs/pr/1", None),
    "org/name:Q4_K_M": ("org/name", None, "Q4_K_M"),
    "org/name@v2:Q4_K_M": ("org/name", "v2", "Q4_K_M"),
    "org/name:sub/m-Q4.gguf": ("org/name", None, "sub/m-Q4.gguf"),
    "qwen3.6": ("mlx-community/Qwen3.6-35B-A3B-4bit", None, None),
    "Qwen3.6": ("mlx-community/Qwen3.6-35B-A3B-4bit", None, None),
    "qwen3.6@v2": ("mlx-community/Qwen3.6-35B-A3B-4bit", "v2", None),
    "qwen3.6:Q4_K_M": ("unsloth/Qwen3.6-35B-A3B-GGUF", None, "Q4_K_M"),
    "flash-next": ("rapid-mlx/Qwen3.8-Flash-Next-4bit", None, None),
    "gpt-oss-120b": ("openai/gpt-oss-120b", None, None),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_names_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place, revision, chosen = MEANINGS[name]
    found = parse_model_name(name)
    assert found == MEANINGS[name]
    assert not found.is_path
    assert parse_model_name(str(found)) == found
    if revision is None:
        assert parse_model_name(name, revision="v3") == (place, "v3", chosen)
    else:
        with pytest.raises(InputError, match="chooses 'v2' already; leave out revision") as caught:
            parse_model_name(name.replace(revision, "v2"), revision="v2")
        assert str(caught.value).count("\n") == 0
    if chosen is not None:
        with pytest.raises(InputError, match="already; leave out gguf_file"):
            parse_model_name(name, gguf_file="Q8_0")


def test_an_existing_path_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("qwen3.6", "org/name", "org/at@v2", "with:colon"):
        (tmp_path / name).mkdir(parents=True)
        assert parse_model_name(name) == (name, None, None)
        assert parse_model_name(tmp_path / name).is_path
        assert parse_model_name(f"~/{name}").is_path
        assert parse_model_name(f"{name}:Q8_0") == (name, None, "Q8_0")
    # Only a folder of the hub's cache has revisions, and its text cannot say one.
    assert str(parse_model_name("org/name", revision="v2")) == "org/name"


UNKNOWN = {
    "qwen3.7": "did you mean 'qwen3.6'?",
    "flashnext": "did you mean 'flash-next'?",
    "gpt-oss": "did you mean 'gpt-oss-20b'?",
    "zzz": "see 'mlx_moeflux models'",
    "@v2": "see 'mlx_moeflux models'",
    ":Q4": "see 'mlx_moeflux models'",
    "x" * 5000: "see 'mlx_moeflux models'",
    "Qwen3.6-35B-A3B": "did you mean 'qwen3.6'?",
    "GLM-4.5-Air-4bit": "did you mean 'glm-4.5-air'?",
    "https://huggingface.co/org/name": "did you mean 'org/name'?",
    "hf.co/org/name-GGUF:Q4_K_M": "did you mean 'org/name-GGUF:Q4_K_M'?",
    "https://example.org/org/name": "see 'mlx_moeflux models'",
    "https://huggingface.co/org": "see 'mlx_moeflux models'",
}


@pytest.mark.parametrize("name", UNKNOWN, ids=[name[:20] for name in UNKNOWN])
def test_an_unknown_name_has_a_suggestion(name):
    with pytest.raises(CheckpointError, match="neither a directory nor a hub id") as caught:
        parse_model_name(name)
    assert UNKNOWN[name] in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["org/name@", "qwen3.6@", "gpt-oss-120b:Q4_K_M"])
def test_half_a_name_is_refused(name):
    with pytest.raises(InputError) as caught:
        parse_model_name(name)
    assert "no revision behind @" in str(caught.value) or "no GGUF repository" in str(caught.value)


def test_names_of_the_catalogue_are_names():
    for name, model in catalogue().items():
        assert name == name.lower() == model.name
        assert parse_model_name(name).place == model.repository
        for repository in (model.original, model.mlx, model.gguf):
            if repository is not None:
                assert parse_model_name(repository).place == repository
    with pytest.raises(MoefluxError):
        parse_model_name("mlx-community/")

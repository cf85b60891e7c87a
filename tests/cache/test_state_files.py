"""Oracle: the bytes that were written. Any other content of a file raises a one-line error before
the live state changes."""

from __future__ import annotations

import json
import os
import shutil

import mlx.core as mx
import pytest

from mlx_moeflux.cache import KVCache, SequenceState
from mlx_moeflux.cache.state.files import HASH_BYTES
from mlx_moeflux.errors import CacheError
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.moe import SoftmaxRouter
from tests.models_at_hand import TWIN, model_of, run, tokens_of


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid")) as model:
        yield model


@pytest.fixture(scope="module")
def saved(hybrid, tmp_path_factory):
    state = hybrid.make_cache()
    logits = run(hybrid, state, tokens_of(6))[-1]
    path = tmp_path_factory.mktemp("saved") / "state"
    state.save(path, logits)
    return path.read_bytes()


def header_of(data: bytes) -> dict:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(data: bytes, change) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = header_of(data)
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def facts(**values):
    return lambda data: with_header(data, lambda header: header["__metadata__"].update(values))


def without(name):
    def change(header):
        begin, end = header.pop(name)["data_offsets"]
        for entry in (v for n, v in header.items() if n != "__metadata__"):
            entry["data_offsets"] = [
                at - (end - begin) * (at > begin) for at in entry["data_offsets"]
            ]

    def cut(data):
        size = int.from_bytes(data[:8], "little")
        begin, end = (8 + size + at for at in header_of(data)[name]["data_offsets"])
        return with_header(data[:begin] + data[end:], change)

    return cut


def reshaped(name):
    return lambda data: with_header(data, lambda header: header[name]["shape"].reverse())


def flipped(offset):
    def flip(data):
        data = bytearray(data)
        data[offset] ^= 1
        return bytes(data)

    return flip


BAD = {
    "empty": (lambda data: b"", "too few for a safetensors header"),
    "cut short": (lambda data: data[:-1], "is truncated"),
    "too long": (lambda data: data + b"\0", "is oversized"),
    "other format": (facts(format="other"), r"no mlx_moeflux\.state file"),
    "later version": (facts(version="2"), "has version '2'"),
    "another model": (facts(identity="0" * 32), "another model"),
    "no position": (facts(position="-1"), "not a number"),
    "other position": (facts(position="7"), "layers.1.keys"),
    "at the start": (facts(position="0"), "this model's states have nothing"),
    "no kinds": (facts(kinds="["), "no readable 'kinds'"),
    "other kinds": (facts(kinds='["attention"]'), "other kinds"),
    "missing array": (without("layers.2.delta"), "has nothing as 'layers.2.delta'"),
    "other shape": (reshaped("layers.1.keys"), r"as 'layers.1.keys'"),
    "flipped bit at the end": (flipped(-1), "digest does not match"),
    "flipped digest": (facts(digest="0" * 2 * HASH_BYTES), "digest does not match"),
    "no digest": (
        lambda data: with_header(data, lambda header: header["__metadata__"].pop("digest")),
        "digest does not match",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_refused_and_leaves_the_state_alone(hybrid, saved, tmp_path, fault):
    change, message = BAD[fault]
    path = tmp_path / "bad"
    path.write_bytes(change(saved))
    state, tokens = hybrid.make_cache(), tokens_of(12)
    run(hybrid, state, tokens[:, :4])
    state.checkpoint()
    before = [array for entry in state for array in entry._arrays()]
    with pytest.raises(CacheError, match=message) as caught:
        state.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    after = [array for entry in state for array in entry._arrays()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert state.position == 4
    assert state.checkpoints == [4]


def test_a_missing_file_and_a_missing_directory_are_named(hybrid, tmp_path):
    state = hybrid.make_cache()
    with pytest.raises(CacheError, match=r"No readable mlx_moeflux\.state file"):
        state.load(tmp_path / "none")
    with pytest.raises(CacheError, match=r"Writing .* failed"):
        state.save(tmp_path / "none" / "state")
    with pytest.raises(CacheError, match="knows no model"):
        SequenceState([KVCache()]).save(tmp_path / "state")


def test_a_full_disk_leaves_what_was_there(hybrid, saved, tmp_path, monkeypatch):
    path = tmp_path / "state"
    path.write_bytes(saved)

    def full(fd):
        raise OSError(28, "No space left on device")

    state = hybrid.make_cache()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=r"the disk is full, \d+ bytes are needed"):
        state.save(path)
    assert path.read_bytes() == saved
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


class OtherRouter(SoftmaxRouter):
    pass


def test_the_identity_is_that_of_what_decides_the_state(hybrid, tmp_path):
    identity = hybrid.state_spec().identity
    with load_model(TWIN, expert_memory="100%", dtype=mx.float32) as resident:
        assert resident.state_spec().identity == identity
    copied = tmp_path / "tuned"
    shutil.copytree(TWIN, copied)
    weights = mx.load(str(copied / "model.safetensors"))
    name = next(n for n in weights if n.endswith("layers.1.input_layernorm.weight"))
    weights[name] = weights[name] + 1
    mx.save_safetensors(str(copied / "model.safetensors"), weights)
    others = {
        "other weights": (copied, {"dtype": mx.float32}),
        "other dtype": (TWIN, {"dtype": mx.bfloat16}),
        "fewer experts": (TWIN, {"dtype": mx.float32, "experts_per_token": 2}),
        "other router": (TWIN, {"dtype": mx.float32, "router": OtherRouter(3)}),
        "other setting": (TWIN, {"dtype": mx.float32, "router": SoftmaxRouter(3, False)}),
    }
    seen = {identity}
    for directory, options in others.values():
        with load_model(directory, **options) as other:
            seen.add(other.state_spec().identity)
    assert len(seen) == 1 + len(others)


def test_a_state_of_another_kind_is_refused(tmp_path_factory, hybrid):
    with model_of("attention", tmp_path_factory.mktemp("other")) as other:
        state = other.make_cache()
        with pytest.raises(CacheError, match="of other kinds"):
            state.restore(hybrid.make_cache().snapshot())

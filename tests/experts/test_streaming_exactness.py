"""Oracle: the resident model. Streamed equals resident bit for bit, whatever the bank, the reader
and the bits; bytes are counted honestly."""

from __future__ import annotations

import os
import shutil
import sys
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.policies.eviction import EVICTIONS
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import map_checkpoint

E, K, V = 32, 4, 4096
BLOCK = 27648
LENGTHS = [1, 63, 64, 65]


def tokens_of(T: int, B: int = 1, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng([T, B, seed]).integers(0, V, (B, T)))


def memory_of(slots: int) -> str:
    return f"{100 * slots / E:.4f}%"


@pytest.fixture(scope="module")
def resident(two_bundled_layers):
    with load_model(two_bundled_layers, expert_memory="auto") as model:
        assert model.plan.resident
        yield model


def full_bank(directory: Path):
    """A streamed model whose bank holds every expert."""
    mapped = map_checkpoint(open_checkpoint(directory))
    return load_model(directory, expert_memory="100%", reader=make_reader("pread", mapped.experts))


# Every length with the smallest bank, one behind a chunk's end with others.
CROSSED = {(K, T) for T in LENGTHS} | {(E - 1, 65), (E, 65)}


@pytest.mark.parametrize(
    ("slots", "T"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in CROSSED))
        for case in product((K, E // 4, E - 1, E), LENGTHS)
    ],
)
def test_every_bank_gives_the_bits_of_the_resident_model(two_bundled_layers, resident, slots, T):
    with (
        full_bank(two_bundled_layers)
        if slots == E
        else load_model(two_bundled_layers, expert_memory=memory_of(slots)) as model
    ):
        assert not model.plan.resident or slots == E
        tokens = tokens_of(T)
        a, b = resident.make_cache(), model.make_cache()
        assert mx.array_equal(resident(tokens, a), model(tokens, b))
        for t in range(3):
            step = tokens_of(1, seed=t)
            assert mx.array_equal(resident(step, a), model(step, b))


@pytest.mark.slow
@pytest.mark.parametrize("slots", [K, E // 4, E - 1, E])
def test_every_bank_gives_the_bits_of_the_resident_model_on_500_tokens(
    two_bundled_layers, resident, slots
):
    test_every_bank_gives_the_bits_of_the_resident_model(two_bundled_layers, resident, slots, 500)


@pytest.mark.parametrize("reader", ["pread", "direct", "mmap", "memory"])
def test_every_reader_gives_the_same_bits(two_bundled_layers, resident, reader):
    tokens = tokens_of(40, 2)
    with load_model(two_bundled_layers, expert_memory="40%", expert_reader=reader) as model:
        assert mx.array_equal(resident(tokens), model(tokens))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_eviction_gives_the_same_bits(two_bundled_layers, resident, eviction):
    with load_model(two_bundled_layers, expert_memory="25%", eviction=eviction) as model:
        a, b = resident.make_cache(), model.make_cache()
        for T in (40, 1, 1, 7, 1, 1):
            tokens = tokens_of(T, seed=T)
            assert mx.array_equal(resident(tokens, a), model(tokens, b))


@pytest.fixture(scope="module")
def floats(two_bundled_layers, tmp_path_factory) -> Path:
    """Two of the bundled model's layers in bfloat16."""
    out = tmp_path_factory.mktemp("floats") / "bf16"
    return convert(two_bundled_layers, out, layout="safetensors", dequantize=True)


@pytest.mark.parametrize(
    ("bits", "layout"),
    [
        (None, "packed"),
        (3, "safetensors"),
        *(pytest.param(bits, "packed", marks=pytest.mark.slow) for bits in (2, 3, 4, 5, 6, 8)),
        *(
            pytest.param(bits, "safetensors", marks=pytest.mark.slow)
            for bits in (2, 4, 5, 6, 8, None)
        ),
    ],
)
def test_all_bits_and_layouts_stream_exactly(floats, tmp_path, bits, layout):
    options = {} if bits is None else {"quantize": True, "q_bits": bits}
    directory = convert(floats, tmp_path / "out", layout=layout, **options)
    tokens = tokens_of(33)
    with load_model(directory) as whole, load_model(directory, expert_memory="30%") as part:
        assert whole.plan.resident
        assert not part.plan.resident
        expected = whole(tokens)
        assert mx.isfinite(expected).all().item()
        assert mx.array_equal(expected, part(tokens))


def test_padded_batches_read_nothing_for_padding_and_agree(two_bundled_layers, resident):
    lengths = [5, 17, 11]
    T = max(lengths)
    tokens = tokens_of(T, 3)
    with load_model(two_bundled_layers, expert_memory=memory_of(K)) as model:
        results = []
        for one in (resident, model):
            caches = [one.make_cache() for _ in lengths]
            merged = [type(row[0]).merge(list(row)) for row in zip(*caches, strict=True)]
            for entry in merged:
                entry.prepare(lengths=lengths, right_padding=[T - n for n in lengths])
            results.append(one(tokens, merged))
        for b, n in enumerate(lengths):
            assert mx.array_equal(results[0][b, :n], results[1][b, :n])
            alone = resident(tokens[b : b + 1, :n])[0]
            error = mx.abs(results[1][b, :n] - alone).max() / mx.abs(alone).max()
            assert error.item() <= 1e-5


def test_lazy_forwards_before_one_evaluation(two_bundled_layers, resident):
    x, y = tokens_of(1, seed=1), tokens_of(1, seed=2)
    with load_model(two_bundled_layers, expert_memory=memory_of(K)) as model:
        a, b = model(x), model(y)
        mx.eval(a, b)
        assert mx.array_equal(a, resident(x))
        assert mx.array_equal(b, resident(y))


def test_two_interleaved_sequences_do_not_disturb_each_other(two_bundled_layers, resident):
    with load_model(two_bundled_layers, expert_memory=memory_of(K)) as model:
        expected = [resident.make_cache(), resident.make_cache()]
        actual = [model.make_cache(), model.make_cache()]
        for t in range(6):
            for s in range(2):
                step = tokens_of(3 - t % 3, seed=10 * s + t)
                assert mx.array_equal(resident(step, expected[s]), model(step, actual[s]))


def test_bytes_read_are_those_of_blocks_and_a_full_bank_reads_nothing_twice(two_bundled_layers):
    with load_model(two_bundled_layers, expert_memory="25%") as model:
        mx.eval(model(tokens_of(50)))
        total = model.store.stats().total
        assert total.misses > 0
        assert total.prefetched_hits > 0
        assert total.bytes_read == (total.misses + total.prefetches) * BLOCK
    with full_bank(two_bundled_layers) as model:
        mx.eval(model(tokens_of(50)))
        assert model.store.stats().total.bytes_read > 0
        model.store.stats().reset()
        mx.eval(model(tokens_of(50)))
        assert model.store.stats().total.bytes_read == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_reads_the_trunk_and_headers_only(two_bundled_layers):
    from mlx_moeflux.experts.telemetry.stats import ExpertStats

    def rchar() -> int:
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    load_model(two_bundled_layers, expert_memory="25%").close()  # imports done
    before = rchar()
    with load_model(two_bundled_layers, expert_memory="25%") as model:
        read = rchar() - before
        assert isinstance(model.store.stats(), ExpertStats)
    size = os.path.getsize(two_bundled_layers / "model.safetensors")
    trunk = size - 2 * E * BLOCK
    config = os.path.getsize(two_bundled_layers / "config.json")
    # /proc files that measure memory are a few kilobytes.
    assert read <= 1.05 * (trunk + config) + 65536


def test_a_damaged_blob_is_found_by_verify_and_a_missing_one_at_open(two_bundled_layers, tmp_path):
    from mlx_moeflux.checkpoint.formats.packed import verify
    from mlx_moeflux.errors import ExpertFileError

    out = convert(two_bundled_layers, tmp_path / "packed", verify_written=True)
    blob = out / "experts" / "layer_01.bin"
    data = bytearray(blob.read_bytes())
    data[12345] ^= 1
    blob.write_bytes(data)
    with pytest.raises(ExpertFileError, match="layer_01"):
        verify(out)
    shutil.move(blob, tmp_path / "elsewhere.bin")
    with pytest.raises(ExpertFileError, match=r"layer_01\.bin"):
        load_model(out)

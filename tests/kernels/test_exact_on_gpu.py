"""Oracle: the resident store and the resident model, bit for bit, with the kernels that "auto"
takes on this GPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.experts.helpers import LAYERS, random_call, random_experts, same_bits, write_experts
from tests.kernels.harness import require_gpu

pytestmark = pytest.mark.gpu

# Of the bundled model and of the store below.
E, K, C, F = 32, 4, 128, 64
SLOTS, TOKENS = (K, E // 4, E - 1, E), (1, 63, 64, 65, 2048)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    require_gpu()
    experts = random_experts(num_experts=E, hidden=C, inner=F)
    return write_experts(tmp_path_factory.mktemp("experts"), experts, "packed")


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_every_bank_gives_the_bits_of_all_experts(stored, dtype, T):
    options = {"mix": Kernels().expert_mix}
    x, ids, weights = random_call(T, k=K, num_experts=E, hidden=C, padding=T // 9)
    call = x.astype(dtype), ids, weights
    layer = LAYERS[0]
    expected = stored.resident(**options).experts(layer, *call)
    for slots in SLOTS:
        with StreamedStore(make_reader("pread", stored.refs), slots, **options) as store:
            for again in range(2):
                y = store.experts(layer, *call)
                assert same_bits(y, expected), (slots, again)


@pytest.fixture(scope="module")
def resident():
    require_gpu()
    with load_model(BUNDLED_MODEL, expert_memory="100%") as model:
        yield model


def logits(model, T):
    """Of a prompt of T tokens and of three tokens behind it."""
    rng = np.random.default_rng(T)
    cache, found = model.make_cache(), []
    for count in (T, 1, 1, 1):
        tokens = mx.array(rng.integers(0, model.config.vocab_size, (1, count)))
        found.append(model(tokens, cache, last_only=True).astype(mx.float32))
        mx.eval(found)
    return mx.concatenate(found, axis=1)


@pytest.mark.parametrize("slots", SLOTS[:3])
def test_every_bank_gives_the_bits_of_the_resident_model(resident, slots):
    with load_model(BUNDLED_MODEL, expert_memory="50%") as model:
        store = model.store
        staging = store.nbytes - store.bank_bytes
        model.set_expert_memory(slots * sum(store.block_bytes.values()) + staging)
        assert set(store.slots.values()) == {slots}
        for T in TOKENS:
            assert same_bits(logits(model, T), logits(resident, T)), T

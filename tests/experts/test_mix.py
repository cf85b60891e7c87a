"""Stores with the fused kernels. Oracle: the resident store, bit for bit; the reference closely."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.experts.compute import ExpertCompute
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.moe.expert_ffn import TILE_ROWS
from mlx_moeflux.kernels.moe.expert_mix import (
    EXPERT_MIX,
    LEAST_TOKENS,
    expert_mix_grouped,
)
from mlx_moeflux.kernels.registry import choose_kernels
from mlx_moeflux.kernels.runtime import device
from tests.experts.helpers import (
    LAYERS,
    E,
    K,
    bank_is_right,
    random_call,
    random_experts,
    same_bits,
    write_experts,
)
from tests.kernels.harness import emulated

FEW_TOKENS = 3


class BySize:
    """What a store gets as `mix`: asked once a call which implementation all parts of it take."""

    def implementation(self, x, slots, weights, bank):
        assert slots is None
        return EXPERT_MIX.others["pairs" if x.shape[0] <= FEW_TOKENS else "grouped"]


FUSED = {"mix": BySize(), "scratch_bytes": 30_000}


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)], autouse=True)
def kernels(request):
    if request.param == "gpu":
        yield
    else:
        # The order of threads is the business of the kernels' own tests.
        once = [("forward", 0)]
        with emulated(partly_written=("h", "order", "out"), schedules=once):
            yield


@pytest.mark.parametrize(
    "slots", [E - 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (K, 4, E))]
)
def test_bank_size_changes_no_bit(experts, open_store, slots):
    store = open_store(slots, **FUSED)
    resident = experts.resident(**FUSED)
    for seed, n in enumerate((1, 2, 1, FEW_TOKENS, FEW_TOKENS + 1, 1, 40)):
        call = random_call(n, seed=seed, padding=n // 7)
        assert same_bits(store.experts(5, *call), resident.experts(5, *call))
    assert bank_is_right(store, experts)


@pytest.mark.parametrize("specs", [(None,) * 3, (QuantSpec(8), QuantSpec(8), QuantSpec(2))])
@pytest.mark.parametrize("n", [1, FEW_TOKENS + 2])
def test_close_to_the_reference(tmp_path, specs, n):
    experts = write_experts(tmp_path, random_experts(specs), "packed")
    call = random_call(n, padding=n // 6)
    expected = np.array(experts.resident().experts(3, *call))
    with StreamedStore(make_reader("pread", experts.refs), 4) as store:
        store.expert_compute = ExpertCompute(**FUSED)
        for _ in range(2):
            y = np.array(store.experts(3, *call))
            assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_scratch_changes_no_bit(experts, open_store):
    """A call cut into chunks of a few tokens takes the implementation of the whole call."""
    call = random_call(FEW_TOKENS + 5, padding=2)
    expected = experts.resident(mix=BySize()).experts(3, *call)
    for scratch_bytes in (3_000, 10_000):
        options = {"mix": BySize(), "scratch_bytes": scratch_bytes}
        for store in (
            experts.resident(**options),
            open_store(4, **options),
            open_store(E, **options),
        ):
            assert same_bits(store.experts(3, *call), expected)


@pytest.mark.slow
def test_half_precision(experts, open_store):
    store, resident = open_store(4, **FUSED), experts.resident(**FUSED)
    for dtype in (mx.float16, mx.bfloat16):
        for n in (3, FEW_TOKENS + 1):
            x, ids, weights = random_call(n)
            call = (x.astype(dtype), ids, weights)
            assert same_bits(store.experts(LAYERS[0], *call), resident.experts(LAYERS[0], *call))


def test_the_table_and_names_decide(experts, monkeypatch):
    x, _, weights = random_call(2)
    bank = experts.bank(3)
    by_name = choose_kernels({"expert_mix": "grouped"}).expert_mix
    assert ExpertCompute(mix=by_name).mixer(x, weights, bank).function is expert_mix_grouped
    monkeypatch.setenv("MOEFLUX_KERNELS", "expert_mix=reference")
    by_name = choose_kernels().expert_mix
    assert ExpertCompute(mix=by_name).mixer(x, weights, bank) is None
    training = choose_kernels({"expert_mix": "pairs"})
    training.references_only()
    assert ExpertCompute(mix=training.expert_mix).mixer(x, weights, bank) is None


def test_a_bank_that_kernels_do_not_read_takes_the_reference(monkeypatch):
    experts = random_experts((QuantSpec(3, 32),) * 3)
    rows = (dispatch.Row("grouped"),)
    monkeypatch.setattr(dispatch, "rows", lambda operation, backend: rows)
    kernels = choose_kernels("auto")
    x, _, weights = random_call(2)
    compute = ExpertCompute(mix=kernels.expert_mix)
    assert compute.mixer(x, weights, experts.bank(3)) is None
    four = random_experts().bank(3)
    assert compute.mixer(x, weights, four).function is expert_mix_grouped


@pytest.mark.parametrize(("n", "slots"), [(40, K), (40, E - 1), (FEW_TOKENS + 2, K)])
def test_kernels_are_there_before_sums_are_evaluated(open_store, monkeypatch, n, slots):
    """While a forward pass gathers kernels, MLX would compile each by itself, one after another."""
    store, call, seen = open_store(slots, **FUSED), random_call(n), ["settle"]
    evaluate, shape = mx.eval, call[0].shape

    def watched(*arrays):
        for array in arrays:
            if isinstance(array, mx.array) and array.shape == shape:
                assert seen[-1] == "settle"
                seen.append("eval")
        evaluate(*arrays)

    monkeypatch.setattr(device, "settle", lambda: seen.append("settle"))
    monkeypatch.setattr(mx, "eval", watched)
    seen.append("call")
    store.experts(5, *call)
    assert "eval" in seen


@pytest.mark.slow
def test_no_kernel_knows_the_number_of_slots(experts, open_store):
    """Each would be compiled anew for each: a second for some on an H100."""
    seen, calls = [], [random_call(n, seed=n) for n in (1, 40)]

    def texts(slots: int) -> set:
        seen.clear()
        store = open_store(slots, **FUSED)
        for call in calls:
            mx.eval(store.experts(5, *call))
        return {(v.kernel.name, v.template, v.input_dtypes, v.generated) for v in seen}

    with emulated(inspect=seen.append, partly_written=("h", "order", "out")):
        first = texts(K)
    for slots in (K + 1, E - 1):
        with emulated(inspect=seen.append, partly_written=("h", "order", "out")):
            assert texts(slots) <= first
    packed = {name for name, *_, text in first if "packed" in text}
    assert any("tiles_gated" in name for name in packed), "the banks' arrays lie by rows"


# ---- Stock MLX for prompts

PROMPT = 40  # of which a wave has enough


@pytest.fixture
def stock_prompts(monkeypatch):
    """Kernels with stock MLX for prompts, and the rows of each product in tiles."""
    kernels, products, product = choose_kernels(), [], mx.gather_qmm

    def watched(x, *others, sorted_indices=False, **options):
        if sorted_indices:
            slots = options["rhs_indices"]
            products.append((len(x), (slots[1:] >= slots[:-1]).all().item()))
        return product(x, *others, sorted_indices=sorted_indices, **options)

    monkeypatch.setattr(mx, "gather_qmm", watched)
    kernels.take_stock_for_prompts()
    return kernels, products


@pytest.mark.parametrize("slots", [4, E, None])
def test_stock_computes_prompts_in_tiles(experts, open_store, stock_prompts, slots):
    kernels, products = stock_prompts
    options = {"mix": kernels.expert_mix}
    store = experts.resident(**options) if slots is None else open_store(slots, **options)
    call = random_call(PROMPT, padding=2)
    expected = np.array(experts.resident().experts(5, *call))
    found = np.array(store.experts(5, *call))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert products
    assert all(ascend and rows % TILE_ROWS == 0 for rows, ascend in products)


def test_steps_and_short_prompts_keep_their_kernels(experts, open_store, stock_prompts):
    kernels, products = stock_prompts
    for n in (1, LEAST_TOKENS - 1):
        call = random_call(n)
        found = open_store(E, mix=kernels.expert_mix).experts(5, *call)
        assert same_bits(found, experts.resident(mix=choose_kernels().expert_mix).experts(5, *call))
    assert not products


def test_experts_in_blocks_keep_their_kernels():
    kernels = choose_kernels()
    kernels.take_stock_for_prompts()
    args, _ = EXPERT_MIX.proof.example_call(mx.bfloat16, tokens=200, form="q8_0")
    assert kernels.expert_mix.implementation(*args) is EXPERT_MIX.others["grouped"]
    args, _ = EXPERT_MIX.proof.example_call(mx.bfloat16, tokens=200)
    assert kernels.expert_mix.implementation(*args) is EXPERT_MIX.others["in_tiles"]
    assert "stock MLX for prompts" in kernels.names()["expert_mix"]
    kernels.take_stock_for_prompts(False)
    assert kernels.expert_mix.implementation(*args) is EXPERT_MIX.others["grouped"]

"""Oracle: float64 numpy loops over dequantised experts; autograd of the dense formula."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.experts import compute, resident
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.experts.telemetry.events import Chosen
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank
from tests.experts.helpers import (
    FOUR_BIT,
    LAYERS,
    MIXED,
    C,
    E,
    F,
    K,
    random_call,
    random_experts,
    same_bits,
)

PLAIN = (None, None, None)


def dense(experts, layer, projection):
    """``[E, out, in]`` float64."""
    arrays, spec = experts.arrays[layer], experts.layouts[layer].specs[projection]
    weight = arrays[f"{projection}.weight"]
    if spec is not None:
        parts = [arrays[f"{projection}.{p}"].astype(mx.float32) for p in ("scales", "biases")]
        weight = mx.dequantize(weight, *parts, group_size=spec.group_size, bits=spec.bits)
    return np.array(weight.astype(mx.float32)).astype(np.float64)


def loops(experts, layer, x, ids, weights):
    gate, up, down = (dense(experts, layer, f"{p}_proj") for p in ("gate", "up", "down"))
    x, ids, weights = np.array(x).astype(np.float64), np.array(ids), np.array(weights)
    y = np.zeros_like(x)
    for n in range(len(x)):
        for k in range(ids.shape[1]):
            e = ids[n, k]
            if e < experts.num_experts:
                g = gate[e] @ x[n]
                y[n] += weights[n, k] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[n])))
    return y


@pytest.mark.parametrize("specs", [FOUR_BIT, MIXED, PLAIN])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_against_loops(specs, n):
    experts = random_experts(specs)
    x, ids, weights = random_call(n, padding=n // 3)
    y = experts.resident().experts(5, x, ids, weights)
    assert (y.shape, y.dtype) == ((n, C), mx.float32)
    expected = loops(experts, 5, x, ids, weights)
    assert np.abs(np.array(y) - expected).max() <= 2e-6 * np.abs(expected).max()


def test_chunks_and_neighbours_change_no_bit():
    experts = random_experts(MIXED)
    x, ids, weights = random_call(70, padding=4)
    whole = experts.resident().experts(3, x, ids, weights)
    for scratch in (1, 50_000):
        store = experts.resident(scratch_bytes=scratch)
        assert same_bits(whole, store.experts(3, x, ids, weights))
    store = experts.resident()
    alone = [store.experts(3, *(a[i : i + 1] for a in (x, ids, weights))) for i in range(70)]
    assert same_bits(whole, mx.concatenate(alone))


@pytest.mark.parametrize("n", [2, 40])
def test_nothing_leaks_from_padding(n):
    experts = random_experts()
    x, ids, weights = random_call(n, padding=1)
    clean = experts.resident().experts(3, x, ids, weights)
    assert not np.array(clean[-1]).any()
    bad = mx.array([float("nan")])
    x[-1:] = bad
    weights[-1:] = bad
    weights[0:1, -1:] = bad
    assert same_bits(clean, experts.resident().experts(3, x, ids, weights))


@pytest.mark.parametrize("n", [1, 30])
def test_the_bank_is_not_cast_whole(n, monkeypatch):
    """Few pairs of many experts on the CPU: only the chosen rows become float32."""
    experts = random_experts(num_experts=40)
    x, ids, weights = random_call(n, num_experts=40)
    seen = []
    real = compute.expert_ffn

    def ffn(x, slots, bank):
        seen.append((bank.slots, bank.gate.scales.dtype))
        return real(x, slots, bank)

    monkeypatch.setattr(compute, "expert_ffn", ffn)
    y = experts.resident().experts(3, x, ids, weights)
    assert seen == ([(K, mx.float32)] if n == 1 else [(40, mx.bfloat16)])
    assert same_bits(y, experts.resident().experts(3, x, ids, weights))


@pytest.mark.parametrize("n", [4, 40])
def test_gradients_are_those_of_the_dense_formula(n):
    x, ids, weights = random_call(n)
    names = ("gate_proj", "up_proj", "down_proj")
    shapes = ((E, F, C), (E, F, C), (E, C, F))
    arrays = [mx.random.normal(s) * 0.1 for s in shapes]

    def through_store(x, weights, *arrays):
        named = {f"{p}.weight": a for p, a in zip(names, arrays, strict=True)}
        bank = ExpertBank.of(named, dict.fromkeys(names))
        store = ResidentStore(lambda layer: bank, layers=LAYERS, num_experts=E)
        return (store.experts(3, x, ids, weights) ** 2).sum()

    def through_all(x, weights, gate, up, down):
        g = x @ gate.swapaxes(-1, -2)  # [E, n, F]
        out = (g * mx.sigmoid(g) * (x @ up.swapaxes(-1, -2))) @ down.swapaxes(-1, -2)
        one_hot = (ids[..., None] == mx.arange(E)).astype(mx.float32)
        mix = (one_hot * weights[..., None]).sum(1)  # [n, E]
        return ((mix.T[..., None] * out).sum(0) ** 2).sum()

    argnums = tuple(range(5))
    found = mx.grad(through_store, argnums)(x, weights, *arrays)
    wanted = mx.grad(through_all, argnums)(x, weights, *arrays)
    for a, b in zip(found, wanted, strict=True):
        error, scale = mx.abs(a - b).max().item(), mx.abs(b).max().item()
        assert scale > 0
        assert error <= 1e-5 * scale


def test_gradients_reach_scales():
    experts = random_experts((QuantSpec(4),) * 3)
    x, ids, weights = random_call(3)
    arrays = {k: v.astype(mx.float32) if v.dtype == mx.bfloat16 else v
              for k, v in experts.arrays[3].items()}  # fmt: skip

    def loss(scales):
        bank = ExpertBank.of(arrays | {"up_proj.scales": scales}, experts.layouts[3].specs)
        store = ResidentStore(lambda layer: bank, layers=LAYERS, num_experts=E)
        return store.experts(3, x, ids, weights).sum()

    gradient = mx.grad(loss)(arrays["up_proj.scales"])
    step = mx.zeros_like(gradient)
    e = int(ids[0, 0].item())
    step[e, 0, 0] = 1e-2
    difference = loss(arrays["up_proj.scales"] + step) - loss(arrays["up_proj.scales"] - step)
    assert abs(difference.item() / 2e-2 - gradient[e, 0, 0].item()) <= 1e-3 * mx.abs(gradient).max()


def test_nothing_is_evaluated(monkeypatch):
    experts = random_experts()
    store = experts.resident()
    call = random_call(40)

    def forbidden(*args):
        raise AssertionError("the device was waited for")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", forbidden)
        patch.setattr(mx, "async_eval", forbidden)
        patch.setattr(resident.np, "array", forbidden)
        y = store.experts(3, *call)
    assert same_bits(y, experts.resident().experts(3, *call))


def test_listener_and_statistics():
    events = []
    store = random_experts().resident(events=events.append)
    x, ids, weights = random_call(4)
    store.experts(3, x, ids, weights)
    store.experts(3, x, ids, weights)
    assert [type(e) for e in events] == [Chosen, Chosen]
    assert (events[1].layer, events[1].token) == (3, 4)
    assert np.array_equal(events[1].ids, np.array(ids))
    assert np.array_equal(events[1].weights, np.array(weights))
    assert store.stats().layers[3].tokens == store.stats().total.tokens == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": mx.zeros((4, K), mx.int32)}, "expected uint32"),
        ({"weights": mx.zeros((4, K), mx.bfloat16)}, "float32"),
        ({"weights": mx.zeros((4, K + 1))}, r"expected \[N, C\], \[N, K\], \[N, K\]"),
        ({"x": mx.zeros((3, C))}, r"x \[3, 64\], ids \[4, 3\]"),
        ({"x": mx.zeros((1, 4, C))}, r"x \[1, 4, 64\]"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    x, ids, weights = random_call(4)
    arguments = {"x": x, "ids": ids, "weights": weights} | change
    with pytest.raises(ShapeError, match=message):
        random_experts().resident().experts(3, **arguments)


def test_wrong_bank_and_closed_store():
    experts = random_experts()
    store = ResidentStore(experts.bank, layers=LAYERS, num_experts=E + 1)
    with pytest.raises(ShapeError, match="holds 7 experts, the model has 8"):
        store.experts(3, *random_call(2))
    store.close()
    with pytest.raises(InputError, match="closed"):
        store.experts(3, *random_call(2))

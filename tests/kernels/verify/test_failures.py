"""Kernels whose failure shows when MLX evaluates: an operation of MLX that really raises then."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError, KernelError
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.verify import failures
from mlx_moeflux.loading import load_model
from tests.kernels.implementations import IMPLEMENTATIONS

RAISES = "LU factorization failed"
BUILD = "[metal::Device] Unable to build metal library from source\nprogram_source:3: error"
THREADS = (
    "Thread group size (640) is greater than  the maximum allowed threads per threadgroup (512)."
)


@pytest.fixture(autouse=True)
def _trusting():
    yield
    failures.forget()


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """softmax_top_k whose results raise at evaluation, and how often it was asked."""
    asked = []

    def implementation(logits, *, k, normalise=True):
        asked.append(logits.shape)
        zero = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum()
        ids, weights = IMPLEMENTATIONS["softmax_top_k"]["reference"](
            logits, k=k, normalise=normalise
        )
        return ids, weights + zero

    stand_in = replace(IMPLEMENTATIONS["softmax_top_k"]["fused"], function=implementation)
    monkeypatch.setitem(IMPLEMENTATIONS["softmax_top_k"], "fused", stand_in)
    table = tmp_path / "dispatch.json"
    table.write_text(json.dumps({"softmax_top_k": {"cpu": [{"form": "fused", "from": 1}]}}))
    monkeypatch.setenv(dispatch.ENVIRONMENT, str(table))
    dispatch.table.cache_clear()
    # MLX's words for this error stand for those about a kernel.
    monkeypatch.setattr(failures, "_FAILED", (*failures._FAILED, RAISES))
    yield SimpleNamespace(asked=asked)
    dispatch.table.cache_clear()


def reply(model, cache=None):
    steps = generate_step(mx.array([5, 6, 7]), model, max_tokens=6, prompt_cache=cache)
    return [token for token, _ in steps]


@pytest.mark.parametrize(
    ("memory", "compiled"),
    [
        ("100%", True),
        ("25%", False),
        pytest.param("100%", False, marks=pytest.mark.slow),
        pytest.param("25%", True, marks=pytest.mark.slow),
    ],
)
def test_the_next_reply_takes_stock_operations(two_bundled_layers, broken, memory, compiled):
    with load_model(two_bundled_layers, kernels="reference") as model:
        expected = reply(model)
    with load_model(two_bundled_layers, expert_memory=memory) as model:
        model.compile_steps = compiled
        cache = model.make_cache()
        with pytest.raises(KernelError, match="next reply uses stock MLX") as caught:
            reply(model, cache)
        assert "\n" not in str(caught.value)
        assert all(entry.empty() for entry in cache)
        count = len(broken.asked)
        assert count > 0
        assert reply(model, cache) == expected
        assert len(broken.asked) == count


def test_batches_go_on_too(two_bundled_layers, broken):
    with load_model(two_bundled_layers, kernels="reference") as model:
        expected = reply(model)
    with load_model(two_bundled_layers) as model:
        batch = BatchGenerator(model, max_tokens=6)
        batch.insert([[5, 6, 7]])
        with pytest.raises(KernelError):
            batch.next()
        replies = []
        while new := batch.next():
            replies += [entry.token for entry in new]
        assert replies == expected


def test_the_command_line_says_one_line(two_bundled_layers, broken, capsys):
    arguments = ["generate", "--model", str(two_bundled_layers), "-p", "a", "-m", "2"]
    assert main(arguments) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "mlx_moeflux check" in errors[0]


def fail(message: str, kind=RuntimeError) -> None:
    with failures.reported():
        raise kind(message)


def implementation_of(*names: str):
    return SimpleNamespace(kernels=[SimpleNamespace(name=name) for name in names])


def test_a_kernel_that_mlx_names_is_the_only_one():
    with pytest.raises(KernelError, match="kernel 'expert_inner_wide' failed"):
        fail(
            "[metal::Device] Unable to load kernel custom_kernel_moeflux_expert_inner_wide_8_float"
        )
    assert failures.failed(implementation_of("append_row", "expert_inner_wide"))
    assert not failures.failed(implementation_of("expert_inner"))
    assert not failures.failed(implementation_of())


@pytest.mark.parametrize(("message", "kind"), [(BUILD, RuntimeError), (THREADS, ValueError)])
def test_without_a_name_no_kernel_is_trusted(message, kind):
    before = failures.generation()
    with pytest.raises(KernelError, match="a kernel failed"):
        fail(message, kind)
    assert failures.failed(implementation_of("append_row"))
    assert failures.generation() == before + 1


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[metal::malloc] Attempting to allocate 9 bytes which is greater than", RuntimeError),
        ("[malloc] Unable to allocate 9 bytes.", RuntimeError),
        (
            "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            RuntimeError,
        ),
        ("Unable to load kernel custom_kernel_moeflux_append_row: out of memory", RuntimeError),
        ("[matmul] shapes do not fit", ValueError),
        ("Failed to compile kernel: mma.h(55)", RuntimeError),
    ],
)
def test_other_errors_stay_what_they_are(message, kind):
    with pytest.raises(kind) as caught:
        fail(message, kind)
    assert type(caught.value) is kind
    assert not failures.failed(implementation_of("append_row"))


def test_our_own_errors_pass():
    with pytest.raises(InputError), failures.reported():
        raise InputError("Unable to build metal library")
    assert not failures.failed(implementation_of("append_row"))

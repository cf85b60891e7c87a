"""Oracle: the ids of the stream, which is all that any model may be given, and a clock by hand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import CheckpointError
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark import sides
from mlx_moeflux.measure.benchmark.sides import ForcedSampler, MlxLm, Ours, Stream, run


def stream(batch: int = 1, *, prompt: int = 7, following: int = 5) -> Stream:
    return Stream.random(batch=batch, prompt=prompt, following=following, vocabulary=1000, seed=3)


def spy(module, monkeypatch) -> list[np.ndarray]:
    """Every tokens array that a model is called with."""
    seen, kind = [], type(module)
    original = kind.__call__

    def call(self, tokens, *arguments, **options):
        seen.append(np.array(tokens))
        return original(self, tokens, *arguments, **options)

    monkeypatch.setattr(kind, "__call__", call)
    return seen


@pytest.mark.parametrize("size", [pytest.param(None, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("program", ["ours", "mlx-lm"])
def test_every_program_is_fed_the_stream(checkpoint, monkeypatch, program, batch, size):
    if program == "ours":
        side = Ours(load_model(checkpoint, expert_memory="50%"), prefill_step_size=size)
    else:
        side = MlxLm(checkpoint, prefill_step_size=size)
    ids, seen, first = stream(batch), spy(side.model, monkeypatch), []
    timing = run(side, ids, at_first_token=lambda: first.append(len(seen)))
    side.close()
    fed = np.concatenate(seen, axis=1)
    expected = np.concatenate([ids.prompt, ids.following[:, :-1]], axis=1)
    # mlx-lm begins one step more than it was asked for.
    np.testing.assert_array_equal(fed[:, : expected.shape[1]], expected)
    assert fed.shape[1] - expected.shape[1] <= (program == "mlx-lm")
    assert len(first) == 1
    assert (timing.prompt_tokens, timing.decode_tokens) == (7 * batch, 4 * batch)
    assert timing.prompt_tps > 0
    assert timing.generation_tps > 0
    assert timing.peak_bytes > 0
    if size is not None:
        assert max(part.shape[1] for part in seen) <= size


def test_the_sampler_keeps_the_choice_in_the_graph():
    sampler = ForcedSampler(stream(2))
    logprobs = mx.random.normal((2, 1000))
    tokens = [sampler(logprobs) for _ in range(5)]
    np.testing.assert_array_equal(np.stack([np.array(t) for t in tokens], 1), stream(2).following)
    bad = sampler(logprobs)  # one too many repeats the last
    np.testing.assert_array_equal(np.array(bad), stream(2).following[:, -1])


def test_both_programs_compute_the_same_logits(checkpoint):
    ids = stream(2, prompt=14).prompt
    ours = Ours(load_model(checkpoint, expert_memory="25%"), prefill_step_size=None)
    theirs = MlxLm(checkpoint, prefill_step_size=None)
    kept = theirs.model.parameters()["language_model"]["model"]["norm"]["weight"].dtype
    a, b = ours.logits(ids), theirs.logits(ids, dtype=mx.float32)
    assert np.abs(a - b).max() <= 1e-3 * np.abs(b).max()
    after = theirs.model.parameters()["language_model"]["model"]["norm"]["weight"].dtype
    assert after == kept == mx.bfloat16
    assert theirs.held_bytes > 1_000_000
    ours.close()
    theirs.close()


def test_what_mlx_lm_cannot_load_is_one_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(CheckpointError, match="mlx-lm cannot load this"):
        MlxLm(tmp_path, prefill_step_size=None)


class Clock:
    """perf_counter by hand."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(sides.time, "perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class Slow:
    """A program whose prompt takes 2 s and whose tokens take 0.25 s."""

    name, held_bytes = "slow", 0

    def __init__(self, clock: Clock):
        self._clock = clock

    def steps(self, stream, report):
        report(0, stream.prompt.shape[1])
        self._clock.pass_by(2.0)
        report(stream.prompt.shape[1], stream.prompt.shape[1])
        yield 0
        for _ in range(stream.following.shape[1] - 1):
            self._clock.pass_by(0.25)
            yield 0


def test_pauses_are_off_the_clock(monkeypatch):
    clock = Clock(monkeypatch)
    timing = run(
        Slow(clock),
        stream(3),
        at_first_token=lambda: clock.pass_by(100.0),
        between=lambda: clock.pass_by(1000.0),
    )
    assert timing.prompt_seconds == pytest.approx(2.0)
    assert timing.decode_seconds == pytest.approx(4 * 0.25)
    assert timing.prompt_tps == pytest.approx(3 * 7 / 2)
    assert timing.generation_tps == pytest.approx(3 * 4 / 1.0)

"""Seconds that timing kernels beside stock MLX adds to a first run on an M1. Oracle: arithmetic; no
launch runs.

``python -m tests.kernels.metal.test_cost_of_timing`` prints the table of docs/notes/kernels.md.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import pytest

from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.operation import REFERENCE
from mlx_moeflux.kernels.verify import choices, timing, trials, verdicts
from tests.kernels.metal.recording import Recorder
from tests.kernels.metal.test_device_limits import MODELS, model_of
from tests.kernels.metal.work import BYTES_RATE, counted

LAYERS = {"qwen3.5-35b-a3b": 40, "gpt-oss-120b": 36, "glm-4.5-air": 46}
PROMPTS = (12, 64, 300, 1000, 2048, 8192)
# Tokens of a first reply; and the seconds of an evaluation by itself, an assumption.
REPLY, EVALUATION = 100, 3e-4
# Stock operations that are not counted read and write arguments and results so many times.
PASSES = 3


@dataclass
class Cost:
    """Seconds by arithmetic. choices, calls: How many were timed."""

    prompt: float
    reply: float
    added: float = 0.0
    choices: int = 0
    calls: int = 0


@contextlib.contextmanager
def model_on_an_m1(name: str, folder: Path) -> Iterator[Any]:
    """Yield what costs a prompt of so many tokens, and a reply behind it, of a model with all its
    layers. folder: For choices."""
    kind, config = MODELS[name]
    deep: dict[str, Any] = {"num_hidden_layers": LAYERS[name]}
    if hasattr(config, "full_attention_interval"):
        deep["full_attention_interval"] = 4
    with counted() as counter, pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, name, (kind, replace(config, **deep)))
        patch.setattr(Recorder, "checks_first_use", True)
        patch.setattr(verdicts, "is_virtual", lambda: False)
        patch.setattr(trials, "_verdict", lambda *given: verdicts.Verdict(True))
        patch.setattr(trials, "_have_values", lambda value: True)
        patch.setattr(choices, "rotated", lambda operation, args, kwargs: [(args, kwargs)])
        model = model_of(name, mx.bfloat16, apart=False)

        def cost(tokens: int) -> Cost:
            found = Cost(0.0, 0.0)

            def seconds_of(name, function, turns, count):
                before, counter.work[:] = list(counter.work), []
                seconds = EVALUATION
                for args, kwargs in itertools.islice(turns, count):
                    result = function(*args, **kwargs)
                    if name == REFERENCE:
                        every = arrays([result, list(args), list(kwargs.values())])
                        seconds += PASSES * sum(array.nbytes for array in every) / BYTES_RATE
                seconds += sum(one.seconds for one in counter.launches)
                counter.work[:] = before
                found.added += seconds
                found.calls += count
                return seconds

            patch.setattr(timing, "seconds_of", seconds_of)
            patch.setenv("MOEFLUX_CACHE_DIR", str(folder / str(tokens)))
            verdicts.forget()
            counter.work.clear()
            cache = model.make_cache()
            model(mx.zeros((1, tokens), mx.uint32), cache, last_only=True)
            found.prompt = sum(one.seconds for one in counter.launches)
            counter.work.clear()
            model(mx.zeros((1, 1), mx.uint32), cache)
            found.reply = REPLY * sum(one.seconds for one in counter.launches)
            found.choices = len(verdicts._known.choices)
            return found

        yield cost
    verdicts.forget()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "qwen3.5-35b-a3b")) for n in LAYERS]
)
@pytest.mark.slow
def test_timing_takes_a_fifth_of_a_first_run_at_most(name, tmp_path):
    with model_on_an_m1(name, tmp_path) as cost:
        for tokens in PROMPTS:
            found = cost(tokens)
            assert found.choices >= 2
            assert found.calls <= 250 * found.choices
            assert found.added <= (found.prompt + found.reply) / 5, (tokens, found)
            # Of the prompt alone, but for short ones.
            assert tokens < 300 or found.added <= found.prompt / 5, (tokens, found)


def main() -> None:
    with TemporaryDirectory() as folder:
        for name in LAYERS:
            with model_on_an_m1(name, Path(folder) / name) as cost:
                for tokens in PROMPTS:
                    found = cost(tokens)
                    share = found.added / (found.prompt + found.reply)
                    sys.stdout.write(
                        f"| {name} | {tokens:,} | {found.choices} | {found.calls} | "
                        f"{found.added:.2f} | {found.prompt:.2f} | {found.reply:.1f} | "
                        f"{100 * share:.1f} % |\n"
                    )


if __name__ == "__main__":
    main()

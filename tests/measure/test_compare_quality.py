"""Oracle: two predictions worked by hand, and what must happen to a model that is damaged more."""

from __future__ import annotations

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import load
from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.measure.compare_quality import PROMPTS, compare, is_json


class Letters:
    """A tokenizer of the letters a, b and c."""

    chat_template = None

    def encode(self, text, **options):
        return ["abc".index(c) for c in text]


class Table:
    """A model that predicts from the last token alone: log-odds ``[3, 3]``."""

    def __init__(self, rows):
        self.rows, self.store = mx.array(rows), SimpleNamespace(stats=lambda: ExpertStats(()))

    def __call__(self, ids):
        return self.rows[ids]

    def __enter__(self):
        return self

    def __exit__(self, *exception): ...


def test_two_predictions_by_hand():
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 1 / 3]])
    q = np.array([[0.2, 0.4, 0.4], [0.1, 0.8, 0.1], [0.5, 0.25, 0.25]])
    result = compare(
        lambda: (Table(np.log(p)), Letters()), lambda: (Table(np.log(q)), Letters()),
        texts=["abb", "ca"], prompts=[],
    )  # fmt: skip
    assert result.positions == 3
    assert result.perplexity == pytest.approx((0.25 * 0.8 / 3) ** (-1 / 3), rel=1e-5)
    assert result.lossy_perplexity == pytest.approx((0.4 * 0.8 * 0.5) ** (-1 / 3), rel=1e-5)
    expected = [sum(a * np.log(a / b) for a, b in zip(p[i], q[i], strict=True)) for i in (0, 1, 2)]
    assert result.divergence == pytest.approx(np.mean(expected), rel=1e-5)
    assert result.agreement == pytest.approx(2 / 3)
    assert np.isnan(result.json_valid)


def test_what_is_json():
    for good in ('{"a": [1, 2]}', " [1] and more", '```json\n{"a": 1}\n```', "[]"):
        assert is_json(good)
    for bad in ("", "no", '{"a": ', '{"a" 1}', 'Sure! {"a": 1}', "{'a': 1}"):
        assert not is_json(bad)


def test_the_fixed_prompts_are_what_they_say():
    data = json.loads(PROMPTS.read_text())
    assert is_json(data["texts"][3])
    for prompt in data["json"]:
        assert not is_json(prompt["prefix"])
        assert any(is_json(prompt["prefix"] + end) for end in ("]}", "1}]", "1}}", "4}"))
        assert "JSON only" in prompt["ask"]


def test_the_more_is_left_out_the_more_is_lost(two_bundled_layers):
    def opener(**options):
        return lambda: load(two_bundled_layers, **options)

    texts = [json.loads(PROMPTS.read_text())["texts"][1]]
    results = [
        compare(opener(), opener(experts_per_token=k), texts=texts, prompts=[]) for k in (4, 2, 1)
    ]
    same, two, one = results
    assert same.divergence == pytest.approx(0, abs=1e-6)
    assert same.agreement == 1
    assert same.perplexity == same.lossy_perplexity
    assert same.lossy == ()
    assert two.lossy == ("experts_per_token 2 of 4",)
    assert 0.01 < two.divergence < one.divergence
    assert one.agreement < two.agreement < 1
    assert two.lossy_perplexity > two.perplexity
    assert "lossy: experts_per_token 2 of 4" in str(two)


def test_streaming_is_not_lossy(two_bundled_layers):
    texts = ["def f(x):\n    return x\n"]
    result = compare(
        lambda: load(two_bundled_layers), lambda: load(two_bundled_layers, expert_memory="20%"),
        texts=texts, prompts=[{"prefix": '{"a": ', "ask": ""}], max_tokens=3,
    )  # fmt: skip
    assert result.divergence == 0
    assert result.json_valid == result.lossy_json_valid


@pytest.mark.slow
def test_from_the_command_line(capsys):
    knob = ["compare-quality", "--max-tokens", "4"]
    assert main([*knob, "--bits", "2", "--experts-per-token", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lossy_perplexity"] > data["perplexity"] > 1
    assert data["positions"] > 300
    assert data["lossy"] == ["weights of 2 bits", "experts_per_token 2 of 4"]
    assert main(knob) == 1
    assert "choose an option" in capsys.readouterr().err
    assert main([*knob, "--bits", "2", "--other", "x"]) == 1
    assert "--bits or --other" in capsys.readouterr().err


def test_what_cannot_be_compared():
    table = Table(np.zeros((3, 3)))
    wide = Table(np.zeros((3, 4)))
    other = SimpleNamespace(encode=lambda text: [0, 0], chat_template=None)
    for texts, second, words in (
        ([], (table, Letters()), "no texts"),
        (["a"], (table, Letters()), "fewer than two"),
        (["ab"], (wide, Letters()), "one vocabulary"),
        (["ab"], (table, other), "different tokenizers"),
    ):
        with pytest.raises(InputError, match=words):
            compare(lambda: (table, Letters()), lambda s=second: s, texts=texts, prompts=[])

"""Checkpoints with fewer experts in a layer than the original, as REAP writes them: the number in
config.json is smaller, and those that are left keep their order. Oracle: the original, whose router
never chooses the experts that are gone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.loading import load_model
from mlx_moeflux.models import config_class
from mlx_moeflux.models.moe import SoftmaxRouter
from tests.models.twins import GOLDEN, relative_error, smallest_memory

# Routers with softmax or sigmoid and bias; a tensor for each expert or for all. Of 6 or 7 experts.
CASES = ("text_top3", "qwen3_moe_top2", "qwen3_next_top3", "glm4_moe_norms", "minimax_m2_norms")
GONE = (1, 4)
_ONE = re.compile(r"(?P<at>.*\.layers\.(?P<layer>\d+)\..*\.experts)\.(?P<expert>\d+)\.(?P<part>.*)")
_ALL = re.compile(
    r".*\.layers\.(?P<layer>\d+)\..*(\.gate\.weight|score_correction_bias|experts\.\w+_proj)"
)


class Without(SoftmaxRouter):
    """Router that never chooses the experts `GONE`."""

    traceable = True

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        logits[:, mx.array(GONE)] = -mx.inf
        return super().__call__(logits)


def pruned(case: str, out: Path) -> Path:
    """Write `case` without the experts `GONE` of every layer; a layer of multi-token prediction
    keeps all of its own."""
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    config = config_class(raw["model_type"]).from_dict(raw, file=case)
    kept = [e for e in range(config.num_experts) if e not in GONE]
    tensors = {}
    for name, array in mx.load(str(GOLDEN / case / "model.safetensors")).items():
        one, every = _ONE.fullmatch(name), _ALL.fullmatch(name)
        found = one or every
        if found is None or int(found["layer"]) >= config.num_hidden_layers:
            tensors[name] = array
        elif every is not None:
            tensors[name] = array[mx.array(kept)]
        elif (expert := int(found["expert"])) in kept:
            tensors[f"{found['at']}.{kept.index(expert)}.{found['part']}"] = array
    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), tensors)
    key = next(k for k in (config.EXPERTS_KEY, "num_local_experts") if k in raw)
    (out / "config.json").write_text(json.dumps(raw | {key: len(kept)}))
    return out


@pytest.mark.parametrize("case", CASES)
def test_a_pruned_checkpoint_is_the_original_without_those_experts(case, tmp_path):
    directory = pruned(case, tmp_path / "pruned")
    tokens = mx.load(str(GOLDEN / case / "golden.safetensors"))["tokens"]
    with load_model(GOLDEN / case, dtype=mx.float32) as original:
        softmax = isinstance(original.router, SoftmaxRouter)
        every = original(tokens)
    router = Without(original.router.num_experts_per_tok) if softmax else None
    with load_model(GOLDEN / case, dtype=mx.float32, router=router) as original:
        for layer in () if softmax else original.moe_blocks():
            block = original.layers[layer].mlp
            owner = block if "e_score_correction_bias" in block else block.gate
            owner.e_score_correction_bias[mx.array(GONE)] = -1e9
        expected = original(tokens)
    assert relative_error(expected, every) > 0.01
    with load_model(directory, dtype=mx.float32) as model:
        resident = model(tokens)
    assert relative_error(resident, expected) <= 2e-6
    with load_model(directory, dtype=mx.float32, expert_memory=smallest_memory(directory)) as model:
        assert mx.array_equal(model(tokens), resident).item()

"""Oracle: the head of the checkpoint that was converted."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError
from mlx_moeflux.loading import load_model
from tests.models.heads import CASES, golden, head_tensors, with_tensors
from tests.models.twins import LIMIT, relative_error

QUICK = ("deepseek_v3_groups",)


def logits(directory, case):
    """After all pairs of the golden tokens."""
    with load_model(directory, drafts="mtp", dtype=mx.float32) as model:
        head, tokens = model.prediction, golden(case)["tokens"].astype(mx.uint32)
        last = len(model.layers) - 1
        with model.record([last], ["output"]) as kept:
            model(tokens)
        read = head.entering(kept[last]["output"][:, :-1])
        result = head.logits(head(read, tokens[:, 1:], head.make_cache()))
        mx.eval(result)
        return result


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in QUICK)) for c in CASES]
)
def test_a_conversion_keeps_the_head(tmp_path, case):
    directory = with_tensors(case, tmp_path / "model", head_tensors(case))
    out = convert(directory, tmp_path / "out", verify_written=True)
    again = convert(out, tmp_path / "again")
    expected = logits(directory, case)
    assert relative_error(logits(out, case), expected) <= LIMIT
    assert mx.array_equal(logits(again, case), logits(out, case)).item()


def test_a_head_is_quantised_with_the_model(tmp_path):
    case = "text_top3"
    directory = with_tensors(case, tmp_path / "model", head_tensors(case))
    bits = {"quantize": True, "q_bits": 8, "q_group_size": 32}
    packed = convert(directory, tmp_path / "packed", dtype="float32", **bits)
    floats = convert(packed, tmp_path / "floats", dequantize=True)
    stored = {n: r.dtype for n, r in open_checkpoint(packed).tensors.items() if "mtp." in n}
    assert stored["mtp.layers.0.mlp.switch_mlp.up_proj.weight"] == stored["mtp.fc.weight"] == "U32"
    assert relative_error(logits(packed, case), logits(floats, case)) <= LIMIT
    assert relative_error(logits(packed, case), logits(directory, case)) <= 0.05


@pytest.mark.parametrize("options", [{"mtp": False}, {"layout": "safetensors"}, {"shard": "0/2"}])
def test_it_is_left_out(tmp_path, options):
    case = "text_top3"
    directory = with_tensors(case, tmp_path / "model", head_tensors(case))
    out = convert(directory, tmp_path / "out", **options)
    assert not any("mtp." in name for name in open_checkpoint(out).tensors)


def test_one_that_does_not_fit_can_be_left_out(tmp_path):
    case = "text_top3"
    tensors = {k: v for k, v in head_tensors(case).items() if k != "mtp.norm.weight"}
    directory = with_tensors(case, tmp_path / "model", tensors)
    with pytest.raises(CheckpointError, match="mtp=False") as caught:
        convert(directory, tmp_path / "out")
    assert "\n" not in str(caught.value)
    convert(directory, tmp_path / "out", mtp=False)


@pytest.mark.parametrize("rows", [(3, 3), (3, 4)])
def test_experts_that_do_not_fit_name_the_way_out(tmp_path, rows):
    """Their shapes are not the config's; they differ."""
    tensors = head_tensors("deepseek_v3_groups")
    (stack,) = [name for name in tensors if name.endswith(".experts.gate_up_proj")]
    del tensors[stack]
    for e, count in enumerate(rows):
        single = stack.replace("gate_up_proj", f"{e}.gate_proj.weight")
        tensors[single] = mx.zeros((count, 2))
    source = with_tensors("deepseek_v3_groups", tmp_path / "model", tensors)
    with pytest.raises(CheckpointError, match=r"give --no-mtp or mtp=False\."):
        convert(source, tmp_path / "out")
    convert(source, tmp_path / "out", mtp=False)

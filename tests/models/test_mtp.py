"""Oracle: transformers' `MtpModel`, and SGLang's formula of Qwen4-Exp; their stored logits of tiny
random heads (golden/make_heads.py)."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CheckpointError, InputError, UnsupportedError
from mlx_moeflux.loading import load_model
from tests.kernels.harness import require_gpu
from tests.models.heads import CASES, golden, head_file, head_tensors, with_tensors
from tests.models.twins import GOLDEN, LIMIT, relative_error, smallest_memory

MODULE, LAYER = "text_top3", "deepseek_v3_groups"
RESIDENT, STREAMED = (LAYER, MODULE, "glm_moe_dsa_shared"), ("qwen4_exp_rows",)


def load(case, **options):
    options = {"drafts": "mtp", "mtp_path": head_file(case), "dtype": mx.float32} | options
    return load_model(GOLDEN / case, **options)


def read_of(model, tokens):
    """What the head reads after all tokens but the last, and the tokens that follow."""
    last = len(model.layers) - 1
    with model.record([last], ["output"]) as kept:
        model(tokens)
    return model.prediction.entering(kept[last]["output"][:, :-1]), tokens[:, 1:]


def drafted(model, case, cuts=(10,)):
    """Logits behind all pairs, and of a second draft; the pairs come in parts."""
    head, tokens = model.prediction, golden(case)["tokens"].astype(mx.uint32)
    read, following = read_of(model, tokens)
    cache, parts = head.make_cache(), []
    for a, b in zip([0, *cuts], [*cuts, following.shape[1]], strict=True):
        parts.append(head(read[:, a:b], following[:, a:b], cache))
    first = head.logits(mx.concatenate(parts, axis=1))
    best = mx.argmax(first[:, -1:], axis=-1).astype(mx.uint32)
    second = head.logits(head(parts[-1][:, -1:], best, cache))
    return first[0], second[0, 0]


def same_bits(one, other):
    return all(mx.array_equal(a, b).item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("case", "memory"),
    [
        *(pytest.param(case, "resident", marks=[pytest.mark.slow] * (case not in RESIDENT))
          for case in CASES),
        *(pytest.param(case, "streamed", marks=[pytest.mark.slow] * (case not in STREAMED))
          for case in CASES),
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers(case, memory):
    expected = golden(case)
    budget = "auto" if memory == "resident" else smallest_memory(GOLDEN / case)
    with load(case, expert_memory=budget) as model:
        assert model.plan.resident == (memory == "resident")
        streaming = model.prediction.body.store.streaming
        assert (streaming is None) == (memory == "resident")
        first, second = drafted(model, case)
        assert relative_error(first, expected["first"]) <= LIMIT
        assert relative_error(second, expected["second"]) <= LIMIT
        one_by_one, _ = drafted(model, case, range(1, first.shape[0]))
        assert relative_error(one_by_one, expected["first"]) <= LIMIT


@pytest.mark.gpu
@pytest.mark.usefixtures("buffers_are_free")
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("memory", ["resident", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_logits_on_a_gpu(case, memory, kernels):
    require_gpu()
    expected = golden(case)
    budget = "auto" if memory == "resident" else smallest_memory(GOLDEN / case)
    with load(case, expert_memory=budget, kernels=kernels) as model:
        first, second = drafted(model, case)
        assert relative_error(first, expected["first"]) <= LIMIT
        assert relative_error(second, expected["second"]) <= LIMIT


def of_each_expert(tensors):
    """The names of originals with a tensor for each expert."""
    single = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj"):
            single[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if leaf == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), mx.split(matrix, 2), strict=True))
            single |= {f"{path}.{e}.{part}.weight": rows for part, rows in parts.items()}
    return single


def for_mlx(tensors, added=1):
    """The names of mlx-vlm's head of its own, whose norms have the one."""
    own = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("mtp.")
        if name.endswith("experts.gate_up_proj"):
            for part, rows in zip(("gate", "up"), mx.split(tensor, 2, axis=1), strict=True):
                own[f"layers.0.mlp.switch_mlp.{part}_proj.weight"] = rows
        elif name.endswith("experts.down_proj"):
            own["layers.0.mlp.switch_mlp.down_proj.weight"] = tensor
        else:
            own[name] = tensor.astype(mx.float32) + added if tensor.ndim == 1 else tensor
    return own


def behind(prefix):
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def same(tensors):
    return tensors


@pytest.mark.parametrize(
    ("case", "renamed"),
    [pytest.param(MODULE, same, id="module"),
     pytest.param(MODULE, behind("model."), id="model", marks=pytest.mark.slow),
     pytest.param(MODULE, behind("language_model."), id="language model", marks=pytest.mark.slow),
     pytest.param(LAYER, same, id="layer", marks=pytest.mark.slow),
     pytest.param(LAYER, of_each_expert, id="layer of single experts")],
)  # fmt: skip
def test_a_checkpoint_has_its_own_head(tmp_path, case, renamed):
    directory = with_tensors(case, tmp_path / "model", renamed(head_tensors(case)))
    with load(case) as model, load_model(directory, drafts="mtp", dtype=mx.float32) as own:
        assert same_bits(drafted(own, case), drafted(model, case))
        assert own.parameters().keys() == model.parameters().keys()


@pytest.mark.parametrize("whole", [True, False])
def test_another_file_has_the_head(tmp_path, whole):
    """A file of it alone in MLX's names, and a whole checkpoint."""
    path = tmp_path / "head.safetensors"
    if whole:
        path = with_tensors(MODULE, tmp_path / "model", head_tensors(MODULE))
    else:
        mx.save_safetensors(str(path), for_mlx(head_tensors(MODULE)))
    with load(MODULE) as model, load(MODULE, mtp_path=path) as other:
        assert same_bits(drafted(other, MODULE), drafted(model, MODULE))


@pytest.mark.parametrize("added", [0, 1])
def test_a_head_of_streams_has_the_norms_that_its_numbers_say(tmp_path, added):
    """Files for MLX have them in either form."""
    path, case = tmp_path / "head.safetensors", "qwen4_exp_rows"
    mx.save_safetensors(str(path), for_mlx(head_tensors(case), added))
    with load(case) as model, load(case, mtp_path=path) as other:
        assert same_bits(drafted(other, case), drafted(model, case))


def test_a_quantised_head_computes_with_its_values(tmp_path):
    """Oracle: the same head with the values that the bits mean."""
    packed, meant = {}, {}
    for name, stored in for_mlx(head_tensors(MODULE)).items():
        packed[name] = meant[name] = tensor = stored.astype(mx.float32)
        if tensor.ndim > 1 and not name.endswith("gate.weight"):
            parts = mx.quantize(tensor, group_size=32, bits=4)
            base = name.removesuffix(".weight")
            names = (f"{base}.{part}" for part in ("weight", "scales", "biases"))
            packed |= dict(zip(names, parts, strict=True))
            meant[name] = mx.dequantize(*parts, group_size=32, bits=4)
    files = {"packed": packed, "meant": meant}
    for name, tensors in files.items():
        mx.save_safetensors(str(tmp_path / f"{name}.safetensors"), tensors)
    results = []
    for name in files:
        with load(MODULE, mtp_path=tmp_path / f"{name}.safetensors") as model:
            results.append(drafted(model, MODULE))
    assert all(relative_error(a, b) <= LIMIT for a, b in zip(*results, strict=True))


def test_a_head_of_a_pruned_model_keeps_its_experts(tmp_path):
    """Streamed as resident, and in the plan with all of them."""
    tensors = head_tensors(MODULE)
    for name, tensor in tensors.items():
        if ".experts." in name or name.endswith("mlp.gate.weight"):
            tensors[name] = mx.concatenate([tensor, tensor[::-1][:4]])
    path = tmp_path / "head.safetensors"
    mx.save_safetensors(str(path), tensors)
    with load(MODULE, mtp_path=path) as model:
        expected, resident = drafted(model, MODULE), model.plan
    with load(MODULE, mtp_path=path, expert_memory="70%") as model:
        slots = model.prediction.body.store.streaming.slots[0]
        assert 3 < slots < model.prediction.body.config.num_experts == 10
        assert same_bits(drafted(model, MODULE), expected)
        block = model.prediction.body.store.block_bytes[0]
        assert resident.draft_bytes - model.plan.draft_bytes == (10 - slots) * block


@pytest.mark.parametrize("memory", ["auto", "70%"])
def test_the_plan_counts_it(memory):
    with load(MODULE, expert_memory=memory) as model, load_model(GOLDEN / MODULE) as without:
        head, config = model.prediction, model.config
        block = 4 * 3 * config.hidden_size * config.moe_intermediate_size // 2  # bfloat16
        slots = config.num_experts
        if not model.plan.resident:
            slots = head.body.store.streaming.slots[0]
        resident = slots * block if model.plan.resident else 0
        assert model.plan.draft_bytes == head.trunk_bytes() - resident + slots * block
        assert model.plan.expert_bytes == without.plan.expert_bytes
        assert model.plan.trunk_bytes == without.plan.trunk_bytes
        assert sorted(model.plan.slots) == sorted(without.plan.slots)


def test_its_state_has_as_few_bits_as_the_model_s():
    with load(MODULE, kv_bits=8, kv_group_size=32) as model:
        full = model.make_cache()[-1]
        assert full.declared.grows
        assert type(model.prediction.make_cache()[0]) is type(full)
        (spec,) = model.prediction.body.states.entry_specs()
        *_, of_model = model.states.entry_specs()
        assert spec == of_model
        first, _ = drafted(model, MODULE)
        assert LIMIT < relative_error(first, golden(MODULE)["first"]) < 0.1
        model.quantize_cache(None)
        first, _ = drafted(model, MODULE)
        assert relative_error(first, golden(MODULE)["first"]) <= LIMIT


def test_it_is_freed_and_closed_with_the_model():
    with load(LAYER) as model:
        before = drafted(model, LAYER)
        model.release()
        assert same_bits(drafted(model, LAYER), before)
    with pytest.raises(InputError, match="closed"):
        drafted(model, LAYER)


BESIDE = ("mtp.safetensors", "mtp_weights.safetensors", "model-mtp.safetensors",
          "mtp/weights.safetensors")  # fmt: skip


def beside(case, folder, place, *, bare=False, shards=False):
    """Return a model with its head in a file beside its own. bare: Names lack what says that they
    are a head's. shards: Of the model's files no one is called model.safetensors."""
    model = with_tensors(case, folder, {})
    if shards:
        (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    tensors = head_tensors(case)
    if bare:
        tensors = {name.removeprefix("mtp."): array for name, array in tensors.items()}
    (model / place).parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(model / place), tensors)
    return model


@pytest.mark.parametrize(
    ("case", "place", "form"),
    [
        (MODULE, BESIDE[0], {}),
        (LAYER, BESIDE[3], {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (MODULE, BESIDE[1], {"bare": True}),
                (MODULE, BESIDE[2], {"shards": True, "bare": True}),
                (MODULE, BESIDE[3], {}),
                (LAYER, BESIDE[0], {"shards": True}),
            )
        ),
    ],
)
def test_a_head_in_a_file_beside_the_model_is_found(tmp_path, case, place, form):
    model = beside(case, tmp_path / "model", place, **form)
    with load(case) as own:
        expected = drafted(own, case)
    packed = convert(model, tmp_path / "packed")
    for directory, options in (
        (model, {"drafts": "mtp"}),
        (model, {"drafts": "auto"}),
        (GOLDEN / case, {"drafts": "mtp", "mtp_path": model}),
        (packed, {"drafts": "mtp"}),
    ):
        with load_model(directory, dtype=mx.float32, **options) as found:
            assert all(map(mx.allclose, drafted(found, case), expected)), (directory, options)
    with load_model(model, dtype=mx.float32) as found:
        assert found.prediction is None
    (model / place).write_bytes(b"version https://git-lfs")
    with pytest.raises(CheckpointError, match=place):
        load_model(model, drafts="mtp")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("vision_top2", r"'mtp_num_hidden_layers' of config.json is 1: it was stripped, and there"),
        ("deepseek_v3_yarn40", "'num_nextn_predict_layers'"),
        ("kimi_k25_wrapped", None),
        ("qwen3_moe_top2", None),
    ],
)
def test_auto_says_that_it_drafts_without_the_head(tmp_path, recwarn, case, said):
    with load_model(with_tensors(case, tmp_path / "model", {}), drafts="auto") as model:
        assert model.prediction is None
        assert model.drafting.source.name == "lookup"
    found = [str(warning.message) for warning in recwarn]
    assert len(found) == (said is not None)
    assert said is None or (said in found[0] and "come without its head" in found[0])


def without(part):
    return lambda tensors: {k: v for k, v in tensors.items() if part not in k}


def cut(tensors):
    return {k: v[:-1] if k.endswith("fc.weight") else v for k, v in tensors.items()}


@pytest.mark.parametrize(
    ("case", "tensors", "said"),
    [
        ("vision_top2", dict, "'mtp_num_hidden_layers' of config.json is 1: it was stripped"),
        ("deepseek_v3_yarn40", dict, "'num_nextn_predict_layers'"),
        (LAYER, None, "has no head of multi-token prediction; give mtp_path"),
        (MODULE, without("fc.weight"), "lacks the tensors: fc.weight"),
        (MODULE, without("experts."), "the experts of layer 0 are missing"),
        (MODULE, cut, r"'mtp.fc.weight' has shape \[63, 128\]"),
    ],
    ids=["stripped module", "stripped layer", "none", "a part", "experts", "shape"],
)
def test_what_is_missing_is_said_in_a_line(tmp_path, case, tensors, said):
    directory = GOLDEN / case
    if tensors is not None:
        own = tensors(head_tensors(case) if case in CASES else {})
        directory = with_tensors(case, tmp_path / "model", own)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(directory, drafts="mtp")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mtp_path": GOLDEN / MODULE}, CheckpointError),
        ({"mtp_path": GOLDEN / "nowhere"}, CheckpointError),
        ({"mtp_path": 5}, InputError),
        ({"drafts": "off"}, InputError),
        ({"drafts": "lookup"}, InputError),
        ({"store": object()}, InputError),
    ],
    ids=["no head", "no file", "no path", "off", "lookup", "store"],
)
def test_wrong_options_are_said_in_a_line(options, error):
    with pytest.raises(error) as caught:
        load(MODULE, **options)
    assert "\n" not in str(caught.value)


def test_a_family_without_heads_says_so():
    with pytest.raises(UnsupportedError, match="'qwen3_moe' are not computed"):
        load_model(GOLDEN / "qwen3_moe_top2", drafts="mtp", mtp_path=head_file(MODULE))

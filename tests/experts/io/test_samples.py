"""Oracle: experts that were written anew, moved, or made zero."""

import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.errors import CacheError, ExpertFileError
from mlx_moeflux.experts.io.samples import check_scales, experts_identity
from mlx_moeflux.loading import load_model
from tests.experts.helpers import FORMS, E, random_experts, write_experts
from tests.models_at_hand import reply, texts

TWIN = Path(__file__).parents[2] / "golden" / "text_top3"


@pytest.mark.parametrize("most", [0, 100_000])
def test_the_identity_is_that_of_the_bytes_of_every_expert(tmp_path, most):
    def identity(experts, name, form="stacked"):
        refs = write_experts(tmp_path / name, experts, form).refs
        return experts_identity(refs, most_samples=most)

    seen = {identity(random_experts(), form, form) for form in FORMS}
    assert len(seen) == 1, "places in files do not count"
    for e in range(E):
        changed = random_experts()
        for name, array in changed.arrays[5].items():
            rows = [array[i] for i in range(E)]
            rows[e] = mx.roll(rows[e].reshape(-1), 1).reshape(rows[e].shape)
            changed.arrays[5][name] = mx.stack(rows)
        seen.add(identity(changed, f"{e}"))
    assert len(seen) == 1 + E


def test_a_component_of_all_experts_changes_the_identity(tmp_path):
    def identity(experts, name):
        refs = write_experts(tmp_path / name, experts, "stacked").refs
        return experts_identity(refs, most_samples=2 * 2 * E)

    names = list(random_experts().arrays[5])
    seen = {identity(random_experts(), "first")}
    for name in names:
        changed = random_experts()
        array = changed.arrays[5][name]
        changed.arrays[5][name] = mx.roll(array.reshape(E, -1), 1, axis=1).reshape(array.shape)
        seen.add(identity(changed, name))
    assert len(seen) == 1 + len(names)


def other_experts(directory: Path, out: Path) -> Path:
    """Copy a checkpoint and change the experts of one layer alone."""
    shutil.copytree(directory, out)
    weights = mx.load(str(out / "model.safetensors"))
    mx.eval(weights)
    name = next(n for n in weights if "layers.1.mlp." in n and "down_proj" in n and "expert" in n)
    weights[name] = weights[name][::-1]
    mx.save_safetensors(str(out / "model.safetensors"), weights)
    return out


@pytest.mark.parametrize("packed", [False, True])
def test_a_state_of_the_same_trunk_with_other_experts_is_refused(tmp_path, packed):
    first, second = TWIN, other_experts(TWIN, tmp_path / "other")
    if packed:
        first, second = (
            convert(path, tmp_path / f"{path.name}-packed") for path in (first, second)
        )
    ids, options = mx.array([[3, 5, 7, 11]]), {"expert_memory": "75%", "dtype": mx.float32}
    with load_model(first, **options) as model:
        state = model.make_cache()
        model(ids, state)
        state.save(tmp_path / "state")
        assert model.make_cache().load(tmp_path / "state") is None
        with load_model(second, **options) as other:
            assert not mx.array_equal(other(ids), model(ids))
            with pytest.raises(CacheError, match="saved by another model"):
                other.make_cache().load(tmp_path / "state")


def test_a_prompt_cache_serves_no_model_with_other_experts(tmp_path):
    options = {"expert_memory": "75%", "dtype": mx.float32}
    (prompt,) = texts(1)
    read = []
    for path in (TWIN, other_experts(TWIN, tmp_path / "other"), TWIN):
        with load_model(path, **options) as model, PromptCache(tmp_path / "cache") as cache:
            ids, count = reply(model, prompt, cache)
            assert ids == reply(model, prompt)[0]
            read.append(count)
    assert read == [len(prompt), len(prompt), 0]


def zero(file: Path, start: int = 0) -> None:
    """Make the rest of a file a hole, of the same size."""
    size = file.stat().st_size
    os.truncate(file, start)
    os.truncate(file, size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0, 0.5, 0.8])
def test_zeros_in_place_of_scales_are_one_line(tmp_path, form, share):
    refs = write_experts(tmp_path, random_experts(), form).refs
    check_scales(refs)
    files = sorted(tmp_path.iterdir())
    for file in files[int(share * len(files)) :] if form == "separate" else files[-1:]:
        zero(file, 0 if form == "separate" else int(share * file.stat().st_size))
    with pytest.raises(ExpertFileError, match=r"has zeros as '\w+_proj\.scales' of expert \d of"):
        check_scales(refs)


@pytest.mark.parametrize("memory", ["75%", "100%"])
def test_a_layer_file_of_zeros_is_one_line_at_load(tmp_path, memory):
    # Quantised, so that there are scales.
    directory = convert(TWIN, tmp_path / "model", quantize=True, q_group_size=32)
    load_model(directory, expert_memory=memory).close()
    zero(directory / "experts" / "layer_01.bin")
    with pytest.raises(ExpertFileError, match=r"layer_01\.bin has zeros as 'gate_proj\.scales'"):
        load_model(directory, expert_memory=memory)

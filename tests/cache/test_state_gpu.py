"""Oracle: the same device without interruption, and every prompt alone. Batches may differ from it
only where the two best tokens are as close as rounding."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.generation.batch import Batch, BatchGenerator
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.models_at_hand import reply, run, same_bits

pytestmark = pytest.mark.gpu

# In logits; bfloat16 has 8 bits, and logits of the bundled model reach 20.
CLOSE = 0.25


@pytest.fixture(scope="module", params=["25%", "100%"])
def model(request):
    with load_model(BUNDLED_MODEL, expert_memory=request.param) as model:
        yield model


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(0, 4096, length).tolist()


@pytest.mark.parametrize("position", [1, 40, 255, 256])
def test_restored_continues_as_if_never_interrupted(model, tmp_path, position):
    tokens, state = mx.array([prompt_of(position + 5)]), model.make_cache()
    logits = model(tokens[:, :position], state, last_only=True)[0, -1]
    kept = state.snapshot(logits)
    state.save(tmp_path / "state", logits)
    expected = run(model, state, tokens[:, position:]).astype(mx.float32)
    for restore in ("memory", "disk"):
        other = model.make_cache()
        if restore == "memory":
            other.restore(kept)
        else:
            loaded = other.load(tmp_path / "state")
            assert same_bits(loaded.astype(mx.float32), logits.astype(mx.float32))
        got = run(model, other, tokens[:, position:]).astype(mx.float32)
        assert same_bits(got, expected)


def test_a_known_prompt_says_the_same(model, tmp_path):
    prompt = prompt_of(300)
    expected, _ = reply(model, prompt, count=20)
    for _ in range(2):
        with PromptCache(tmp_path / "prompts", every=None) as cache:
            assert reply(model, prompt, cache, count=20)[0] == expected


@pytest.mark.parametrize("known", [False, True], ids=["padded", "unpadded"])
def test_batches_differ_only_where_rounding_decides(model, tmp_path, monkeypatch, known):
    """known: One of the prompts is, wholly; those read together with it are not padded then."""
    prompts = [prompt_of(length) for length in (5, 1, 70, 300, 9)]
    together, read = [], type(model).read_together

    def noted(self, tokens, states):
        together.append(len(tokens))
        return read(self, tokens, states)

    monkeypatch.setattr(type(model), "read_together", noted)
    with PromptCache(tmp_path / "prompts", every=None) as cache:
        if known:
            reply(model, prompts[2], cache, count=1)
        with BatchGenerator(
            model, max_tokens=20, completion_batch_size=3, prompt_cache=cache if known else None
        ) as generator:
            uids = generator.insert(prompts)
            got = {uid: [] for uid in uids}
            while replies := generator.next():
                for one in replies:
                    got[one.uid].append(one.token)
    assert bool(together) == known
    agreed = 0
    for uid, prompt in zip(uids, prompts, strict=True):
        steps = generate_step(mx.array(prompt), model, max_tokens=20)
        for token, (right, logprobs) in zip(got[uid], steps, strict=True):
            if token != right:
                second, first = np.sort(np.array(logprobs.astype(mx.float32)))[-2:]
                assert first - second <= CLOSE
                break
            agreed += 1
    assert agreed >= 50


def test_paged_is_contiguous(model):
    batches = [Batch(model), Batch(model, kv_pool_bytes=64 << 20)]
    for name, length in enumerate((5, 40, 17)):
        for batch in batches:
            state = model.make_cache()
            mx.eval(model(mx.array([prompt_of(length)]), state, last_only=True))
            batch.join([name], state)
    for step in range(6):
        if step == 3:
            for batch in batches:
                batch.leave([1])
        tokens = mx.array([7] * len(batches[0]))
        logits = [batch.step(tokens).astype(mx.float32) for batch in batches]
        assert same_bits(*logits)

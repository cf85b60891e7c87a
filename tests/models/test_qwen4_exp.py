"""Oracles: float64 loops over the formulas, plain attention, and equalities that need no outside
oracle. Logits of transformers: test_twins.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import IndexedCache, KVCache
from mlx_moeflux.cache.state.sequence import SequenceState
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import SHAPES, synthesize
from mlx_moeflux.errors import CheckpointError, InputError, UnsupportedError
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.kernels.attention.attention import causal_sdpa
from mlx_moeflux.kernels.attention.choose_blocks import best_blocks, choose_blocks
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.attention import Attention
from mlx_moeflux.models.indexed_attention import IndexedAttention, Indexer
from mlx_moeflux.models.ngrams import NgramHashes
from mlx_moeflux.models.qwen4_exp import NORMS
from mlx_moeflux.models.residual_streams import GatedResidual
from tests.models.twins import GOLDEN, LIMIT, relative_error
from tests.models_at_hand import same_bits

ROWS = GOLDEN / "qwen4_exp_rows"
TABLE_ROWS = 480  # of both tables of that twin


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


# ---- Choice of blocks


@pytest.mark.parametrize("most", [1, 3, 7, 20])
def test_the_best_blocks_and_of_equals_the_lower(most):
    rng = np.random.default_rng(most)
    scores = rng.integers(0, 4, (2, 5, 9)).astype(np.float32)  # relu gives many equal scores
    complete = np.array([0, 1, 3, 8, 9])[None, :, None].repeat(2, 0)
    found = np.array(best_blocks(mx.array(scores), mx.arange(9) < mx.array(complete), most))
    for b, t in np.ndindex(2, 5):
        n = complete[b, t, 0]
        best = np.argsort(-scores[b, t, :n], kind="stable")[:most]
        assert set(np.flatnonzero(found[b, t])) == set(best)


def index_config(*, heads, width, ratio, blocks, hidden=24):
    return SimpleNamespace(
        indexer_n_heads=heads,
        indexer_head_dim=width,
        indexer_compress_ratio=ratio,
        block_topk=blocks,
        hidden_size=hidden,
        rms_norm_eps=1e-6,
        rotary_dims=width // 2,
        rope_theta=1e4,
    )


def turned(x, position, dims, theta):
    """x ``[..., D]`` with its first `dims` numbers rotated, halves as pairs."""
    half = dims // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def seen_by_loops(config, q, keys, padding):
    """Which keys the last queries see, bool ``[T, S]``, and how near the nearest decision is.
    q ``[H, T, Di]`` rotated; keys ``[S, Di]``."""
    (_, T, _), S, ratio, K = q.shape, len(keys), config.indexer_compress_ratio, config.block_topk
    seen, margin = np.zeros((T, S), bool), np.full(T, np.inf)
    for t in range(T):
        column = S - T + t
        if column < padding:
            seen[t, column] = True
            continue
        complete = (column - padding + 1) // ratio
        scores = []
        for block in range(complete):
            at = padding + block * ratio
            mean = keys[at : at + ratio].mean(axis=0)
            mean = mean / np.sqrt((mean**2).mean() + config.rms_norm_eps)
            mean = turned(mean, block * ratio, config.rotary_dims, config.rope_theta)
            scores.append(np.maximum(q[:, t] @ mean, 0).sum())
        order = np.argsort(-np.array(scores), kind="stable")
        if complete > K:
            margin[t] = scores[order[K - 1]] - scores[order[K]]
        for block in order[:K]:
            at = padding + block * ratio
            seen[t, at : at + ratio] = True
        seen[t, padding + complete * ratio : column + 1] = True
    return seen, margin


@pytest.mark.parametrize(
    ("ratio", "blocks", "heads", "T", "S", "padding"),
    [
        (4, 2, 8, 33, 33, None),
        (5, 3, 8, 7, 40, None),
        (1, 6, 3, 5, 19, None),
        (3, 1, 8, 11, 31, [7, 0, 2]),
    ],
)
def test_a_mask_is_what_loops_choose(ratio, blocks, heads, T, S, padding):
    config = index_config(heads=heads, width=16, ratio=ratio, blocks=blocks)
    indexer = Indexer(config, Kernels())
    B, starts = (1, [0]) if padding is None else (len(padding), padding)
    offset = mx.array([S - T - p for p in starts]) if padding else S - T
    rng = np.random.default_rng(S)
    q, _ = indexer.project(mx.array(rng.normal(size=(B, T, 24)), mx.float32), offset)
    keys = mx.array(rng.normal(size=(B, 1, S, 16)), mx.float32)
    cache = IndexedCache()
    if padding is not None:
        cache.prepare(left_padding=padding)
    for part in mx.split(keys, [S // 3, S // 2], axis=2):
        cache.update_and_fetch(part, part, part)
        found = cache.blocks(indexer)  # kept from part to part
    mask = np.array(indexer.mask(q, found, S, cache.left_padding))
    assert mask.shape == (B, 1, T, S)
    # Out of a list of blocks, as kernels give it.
    indexer._kernels = Kernels({"choose_blocks": choose_blocks})
    assert np.array_equal(indexer.mask(q, found, S, cache.left_padding), mask)
    for b, start in enumerate(starts):
        expected, margin = seen_by_loops(config, float64(q[b]), float64(keys[b, 0]), start)
        sure = margin > 1e-5
        assert sure.mean() > 0.9
        assert (mask[b, 0][sure] == expected[sure]).all()


def test_blocks_are_made_again_after_a_cut():
    """Whether the cut is inside a block or between two, and of sequences that were joined."""
    config = index_config(heads=2, width=16, ratio=4, blocks=2)
    indexer, rng = Indexer(config, Kernels()), np.random.default_rng(0)

    def keys(T, B=1):
        return mx.array(rng.normal(size=(B, 1, T, 16)), mx.float32)

    for cut in (1, 3, 6, 13):
        cache, first, then = IndexedCache(), keys(17), keys(9)
        cache.update_and_fetch(*[first] * 3)
        cache.blocks(indexer)
        copied = cache.__deepcopy__({})
        cache.trim(cut)
        cache.update_and_fetch(*[then] * 3)
        whole = mx.concatenate([first[:, :, : 17 - cut], then], axis=2)
        count = whole.shape[2] // 4
        expected = indexer.pooled(whole[:, :, : 4 * count], 0)
        assert same_bits(cache.blocks(indexer), expected)
        assert same_bits(copied.blocks(indexer), indexer.pooled(first[:, :, :16], 0))
    joined = IndexedCache.merge([cache, copied])
    found = joined.blocks(indexer)
    assert same_bits(found[:1, :, :count], expected)
    assert same_bits(found[1:, :, :4], indexer.pooled(first[:, :, :16], 0))


def attention_config():
    return SimpleNamespace(
        **vars(index_config(heads=8, width=16, ratio=4, blocks=3)),
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        yarn=None,
    )


def test_below_the_budget_it_is_plain_attention_bit_for_bit():
    """Also the first tokens of a call that goes beyond it."""
    config = attention_config()
    ours = IndexedAttention(config, Kernels())
    plain = Attention(config, Kernels(), gated=True)
    plain.update({k: v for k, v in ours.parameters().items() if k != "indexer"})
    x = mx.random.normal((2, 30, 24), key=mx.random.key(3))
    limit = 4 * config.indexer_compress_ratio - 1
    expected = plain(x[:, :limit], KVCache(), None)
    assert same_bits(ours(x[:, :limit], IndexedCache(), None), expected)
    beyond = ours(x, IndexedCache(), None)
    assert same_bits(beyond[:, :limit], expected)
    assert not mx.allclose(beyond[:, limit:], plain(x, KVCache(), None)[:, limit:])
    cache = IndexedCache()
    steps = [ours(x[:, i : i + 1], cache, None) for i in range(30)]
    assert relative_error(mx.concatenate(steps, axis=1), beyond) <= LIMIT


def test_given_operations_act_where_tokens_are_chosen():
    """Beyond the budget, in a prompt and in a step; and with the numbers of plain MLX."""
    tokens, calls = mx.array(np.random.default_rng(6).integers(0, 83, (1, 41))), []

    def choose(q, blocks, complete, *, k, tail=None, before=None):
        calls.append((q.shape[2], blocks.shape[2]))
        return choose_blocks(q, blocks, complete, k=k, tail=tail, before=before)

    def attend(q, k, v, **options):
        calls.append(k.shape[2])
        return causal_sdpa(q, k, v, **options)

    def logits(kernels):
        with load_model(ROWS, dtype=mx.float32, kernels=kernels) as model:
            seen, state = model.config.indexer_budget, model.make_cache()
            first = model(tokens[:, :40], state)
            calls.clear()
            return seen, first, model(tokens[:, 40:], state)

    _, *expected = logits(None)
    seen, *actual = logits({"choose_blocks": choose})
    assert calls == [(1, 10)]
    for y, wanted in zip(actual, expected, strict=True):
        assert relative_error(y, wanted) <= LIMIT
    _, *actual = logits({"sdpa": attend})
    # The tokens of the chosen blocks and of one that is not complete.
    assert calls == [seen + 4]
    for y, wanted in zip(actual, expected, strict=True):
        assert relative_error(y, wanted) <= LIMIT


# ---- Streams


@pytest.mark.parametrize(("streams", "width", "rank"), [(2, 8, 3), (4, 24, 5), (7, 6, 1)])
def test_streams_are_read_and_injected_as_the_formula_says(streams, width, rank):
    config = SimpleNamespace(
        hc_count=streams, hidden_size=width, hc_lowrank=rank, rms_norm_eps=1e-3
    )
    part = GatedResidual(config, Kernels())
    part.hc_norm.weight = mx.random.normal((streams * width,))
    x = mx.random.normal((2, 3, streams * width))
    read, inject = part(x)
    down, up, weight = (
        float64(part[name].weight)
        for name in ("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight")
    )
    f = float64(x).reshape(2, 3, streams, width)
    f = f / np.sqrt((f**2).mean(-1, keepdims=True) + 1e-3)
    normed = f.reshape(2, 3, -1) * float64(part.hc_norm.weight)
    inner = normed @ down.T / streams
    gate = 1 / (1 + np.exp(-(inner / (1 + np.exp(-inner))) @ up.T))
    truth = (gate * normed).reshape(2, 3, streams, width).mean(axis=2)
    assert np.abs(float64(read) - truth).max() <= 1e-5 * np.abs(truth).max()
    factor = 2 / (1 + np.exp(-normed @ weight.T / streams))
    assert np.abs(float64(inject) - factor).max() <= 1e-5


# ---- Rows on disk


@pytest.mark.parametrize("memory", ["100%", "50%"])
def test_memory_for_rows_changes_no_bit(memory):
    tokens = mx.load(str(ROWS / "golden.safetensors"))["tokens"]
    answers, accounts = [], []
    for rows in (0, "10%", "50%", "1MB"):
        with load_model(ROWS, expert_memory=memory, expert_threads=1, row_memory=rows) as model:
            cache = model.make_cache()
            parts = [model(tokens[:, a:b], cache) for a, b in ((0, 9), (9, 10), (10, 37))]
            answers.append(mx.concatenate([model(tokens), *parts], axis=1))
            accounts.append(model.row_stats())
            assert model.plan.row_bytes == model.runtime.row_bytes
    assert all(same_bits(answers[0], other) for other in answers[1:])
    assert len({account.lookups for account in accounts}) == 1
    hits = [account.hits for account in accounts]
    assert hits == sorted(hits)
    assert (hits[0], hits[-1] > 0) == (0, True)
    assert accounts[-1].misses <= TABLE_ROWS


def test_a_layer_by_itself_has_no_rows():
    with load_model(ROWS) as model:
        model.run_layer(1, mx.zeros((1, 3, 96)))
        with pytest.raises(InputError, match="call the model"):
            model.run_layer(0, mx.zeros((1, 3, 96)))


def test_ids_must_be_known():
    with load_model(ROWS, expert_memory="100%") as model:
        with pytest.raises(UnsupportedError, match=r"outside of mx\.compile"):
            mx.compile(lambda ids: model(ids))(mx.array([[1, 2]]))
        assert mx.isfinite(model(mx.array([[1, 2]]))).all()


def test_looking_ahead_is_refused():
    with pytest.raises(UnsupportedError, match="residual streams"):
        load_model(ROWS, expert_memory="50%", prefetch="ahead")


def test_pages_are_refused():
    with load_model(ROWS) as model, pytest.raises(UnsupportedError, match="indexer"):
        BatchGenerator(model, kv_pool_bytes=1 << 20)


@pytest.mark.parametrize("memory", ["auto", 1.5, "-1"])
def test_row_memory_that_is_no_amount(memory):
    if memory == 1.5:
        load_model(ROWS, row_memory=memory).close()
        return
    with pytest.raises(InputError, match="row memory"):
        load_model(ROWS, row_memory=memory)


def test_a_table_that_changed_is_an_error(tmp_path):
    model_path = shutil.copytree(ROWS, tmp_path / "model")
    with load_model(model_path, expert_memory="100%", row_memory=0) as model:
        state = model.make_cache()
        model(mx.array([[1, 2, 3]]), state)
        file = model_path / "model.safetensors"
        file.write_bytes(file.read_bytes())
        with pytest.raises(Exception, match=r"model\.safetensors"):
            model(mx.array([[4]]), state)
        assert state[0].seen() == [3]


# ---- Norms with their one and without


def with_norms(out, *, added, mlx=True, only=""):
    """Copy the twin, in the layout of files for MLX, with `added` to its norms, in float32. only:
    What their names have in them."""
    directory = shutil.copytree(ROWS, out)
    file, tensors = directory / "model.safetensors", {}
    for name, tensor in mx.load(str(file)).items():
        if name.endswith(".conv1d.weight") and mlx:
            tensor = tensor.moveaxis(2, 1)
        if name.endswith(NORMS) and only in name:
            tensor = tensor.astype(mx.float32) + added
        tensors[name] = tensor
    mx.save_safetensors(str(file), tensors)
    return directory


def answers(directory, memory):
    tokens = mx.load(str(ROWS / "golden.safetensors"))["tokens"]
    options = {"expert_memory": memory, "dtype": mx.float32}
    with load_model(directory, **options) as model:
        return model(tokens)


@pytest.mark.parametrize("memory", ["100%", "50%"])
def test_norms_are_what_the_numbers_of_a_file_for_mlx_say(tmp_path, recwarn, memory):
    expected = answers(ROWS, memory)
    centred = with_norms(tmp_path / "centred", added=0)
    assert same_bits(answers(centred, memory), expected)
    assert not recwarn.list
    whole = with_norms(tmp_path / "whole", added=1)
    words = r"19 norms have means of at least 1\.09: their one is in the file"
    with pytest.warns(match=words) as said:
        assert same_bits(answers(whole, memory), expected)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    # What a conversion writes has another layout and the same norms.
    for source in (centred, whole):
        packed = convert(source, tmp_path / f"packed of {source.name}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert same_bits(answers(packed, memory), expected)
        assert len(said) == (source == whole)


def test_norms_in_between_are_refused_in_a_line(tmp_path):
    with pytest.raises(CheckpointError, match="neither about 0 nor about 1") as error:
        load_model(with_norms(tmp_path / "half", added=0.5))
    assert "model.safetensors: half of the 19 norms have means below 0.59" in str(error.value)
    assert "\n" not in str(error.value)
    # One norm, as the originals have it before the last mixer, decides nothing.
    last = with_norms(tmp_path / "last", added=2.75, only="model.hyper_connection_mixer")
    answers(last, "100%")


def test_the_layout_of_originals_says_that_norms_lack_their_one(tmp_path, recwarn):
    """Whatever their numbers are."""
    original = with_norms(tmp_path / "original", added=1, mlx=False)
    assert not same_bits(answers(original, "100%"), answers(ROWS, "100%"))
    assert not recwarn.list


# ---- States


@pytest.mark.parametrize("lengths", [(9, 22, 14), (3, 11, 7)], ids=str)
def test_states_are_saved_joined_and_taken_apart(tmp_path, lengths):
    """Three sequences of different lengths, some of which begin where blocks of others do; states
    that end between blocks and inside one."""
    rng = np.random.default_rng(2)
    texts = [mx.array(rng.integers(0, 83, (1, n))) for n in lengths]
    following = mx.array(rng.integers(0, 83, (3, 6)))
    with load_model(ROWS, dtype=mx.float32) as model:
        alone, states = [], []
        for text, after in zip(texts, following, strict=True):
            state = model.make_cache()
            model(text, state)
            states.append(state)
            copied = SequenceState([e.__deepcopy__({}) for e in state], model)
            alone.append([model(after[None, i : i + 1], copied) for i in range(6)])
        path = tmp_path / "state.safetensors"
        states[1].save(path)
        states[1] = model.make_cache()
        states[1].load(path)
        merged = [type(row[0]).merge(list(row)) for row in zip(*states, strict=True)]
        for i in range(6):
            together = model(following[:, i : i + 1], merged)
            for b in range(3):
                assert relative_error(together[b], alone[b][i][0]) <= LIMIT
        last = [entry.extract(1) for entry in merged]
        assert last[0].tokens.tolist() == [[int(t) + 1 for t in following[1, -2:].tolist()]]


# ---- Traced steps


@pytest.mark.parametrize("memory", ["100%", pytest.param("80%", marks=pytest.mark.slow)])
def test_traced_steps_give_the_logits_of_a_whole_prompt(memory):
    """Below the budget and beyond it, across a full tail; of sequences that begin between blocks,
    no step can be traced."""
    tokens = mx.array(np.random.default_rng(4).integers(0, 83, (1, 78)))
    with load_model(ROWS, dtype=mx.float32, expert_memory=memory, expert_threads=1) as model:
        expected = model(tokens)
        model.compile_steps, state = True, model.make_cache()
        model(tokens[:, :5], state)
        for i in range(5, 78):
            logits = model(tokens[:, i : i + 1], state)
            assert relative_error(logits, expected[:, i : i + 1]) <= 4 * LIMIT, i
        if memory == "100%":
            assert model.steps.whole.traces == 2  # one for tokens that see everything
        else:
            assert model.steps.segments.traces == 1  # of the first segment, without attention
        assert state[0].tokens.tolist() == [[int(t) + 1 for t in tokens[0, -2:].tolist()]]
        aligned, odd = ([e.__deepcopy__({}) for e in state] for _ in range(2))
        for padding, entries in (([4, 0], aligned), ([3, 0], odd)):
            short = model.make_cache()
            model(tokens[:, : 78 - padding[0]], short)
            pairs = zip(short, entries, strict=True)
            together = [type(one).merge([one, other]) for one, other in pairs]
            assert model.steps.whole.fits(together) == (entries is aligned)
            steps = model.steps
            before = steps.whole.traces, steps.segments.traces
            following = mx.array([[7], [8]])
            logits = model(following, together)
            after = steps.whole.traces, steps.segments.traces
            assert (before != after) == (entries is aligned)
            for b, rows in enumerate((tokens[:, : 78 - padding[0]], tokens)):
                alone = model(mx.concatenate([rows, following[b : b + 1]], axis=1))[0, -1]
                assert relative_error(logits[b, 0], alone) <= 4 * LIMIT


@pytest.mark.slow
def test_keys_values_and_index_keys_in_8_bits(tmp_path):
    with pytest.raises(InputError, match="kv_group_size"):
        load_model(ROWS, kv_bits=8)  # its rows have no groups of 64
    directory = synthesize("qwen4-exp-tiny", tmp_path / "model")
    tokens = mx.array(np.random.default_rng(5).integers(0, 900, (1, 60)))
    with load_model(directory, dtype=mx.float32) as model:
        exact = model(tokens)
        model.quantize_cache(8, 32)
        whole, state = model(tokens), model.make_cache()
        steps = [model(tokens[:, i : i + 1], state) for i in range(60)]
    assert 1e-6 < relative_error(whole, exact) < 0.1
    assert relative_error(mx.concatenate(steps, axis=1), whole) < 0.01


# ---- A table of real height

CHILD = """
    import json, sys
    import mlx.core as mx
    import numpy as np
    from mlx_moeflux.loading import load_model

    def number(file, key):
        line = next(line for line in open(file) if line.startswith(key))
        return int(line.split()[1])

    mx.eval(mx.ones(8) + 1)
    path, memory, rows = sys.argv[1:]
    with load_model(path, expert_memory=memory, row_memory=rows, expert_reader="pread") as model:
        state = model.make_cache()
        ids = mx.array(np.random.default_rng(0).integers(0, 8000, (1, 300)))
        before = number("/proc/self/io", "rchar")
        mx.eval(model(ids, state, last_only=True))
        for i in range(20):
            mx.eval(model(ids[:, i : i + 1], state))
        read = number("/proc/self/io", "rchar") - before
        experts, table = model.store.stats().total, model.row_stats()
        plan = model.plan
        print(json.dumps({
            "peak": 1024 * number("/proc/self/status", "VmHWM"),
            "formula": plan.trunk_bytes + plan.budget_bytes + plan.row_bytes
            + model.state_bytes(320) + model.activation_bytes(300),
            "read": read,
            "counted": experts.bytes_read + table.bytes_read,
            "experts missed": experts.misses,
            "blocks read": experts.reads * 2764800,
            "experts read": experts.bytes_read,
            "rows": [table.lookups, table.hits, table.misses, table.bytes_read],
            "table": sum(t.nbytes for t in model.runtime.tables.values()),
        }))
"""


def with_a_table_of_real_height(path, shape):
    """Add the first layer's n-grams to a checkpoint, with a table that has holes for its rows."""
    S, C, E, first = shape.hc_count, shape.hidden_size, shape.ple_embed_dim, "language_model."
    at = f"{first}model.layers.0.ple."
    shapes = {"key_proj": (S * C, E), "value_proj": (C, E), "conv1d": (S * C, 4, 1)}
    shapes |= {f"norm_{name}": (S * C,) for name in ("key", "query", "conv")}
    random = {
        f"{at}{name}.weight": (0.02 * mx.random.normal(s)).astype(mx.bfloat16)
        for name, s in shapes.items()
    }
    (path / "model.safetensors").rename(path / "model-00001-of-00003.safetensors")
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    mx.save_safetensors(str(path / "model-00002-of-00003.safetensors"), random)
    parts, rows = shape.split_ngram_parts, NgramHashes(shape, 0).rows
    nbytes, width = rows // parts * 2 * shape.ngram_width, shape.ngram_width
    header = {
        f"{at}ple_embedding.ngram_embedding.shards.{i}.weight": {
            "dtype": "BF16",
            "shape": [rows // parts, width],
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i in range(parts)
    }
    text = json.dumps(header).encode()
    with (path / "model-00003-of-00003.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + parts * nbytes)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["ple_layer_ids"] = [1]
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_table_of_real_height_keeps_to_the_formula_and_the_account(tmp_path, monkeypatch):
    """Two layers of the published width: peak memory at three budgets; bytes that the process read
    are those of experts and rows that missed."""
    published = SHAPES["qwen3.8-flash-next"]
    shape = replace(
        published,
        num_hidden_layers=2,
        full_attention_interval=2,
        num_experts=64,
        vocab_size=8192,
        eos_token_id=8191,
    )
    monkeypatch.setitem(SHAPES, "it", replace(shape, ple_layer_ids=()))
    path = synthesize("it", tmp_path / "model")
    with_a_table_of_real_height(path, shape)
    for memory, rows in (("20%", "0B"), ("40%", "1MB"), ("70%", "64MB")):
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(path), memory, rows]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["table"] == 320_001_536 * 320
        assert found["peak"] <= found["formula"] + 300_000_000, found
        # Of a prompt that needs most experts, some are read before it is known which.
        assert found["experts read"] == found["blocks read"] >= 2764800 * found["experts missed"]
        lookups, hits, misses, nbytes = found["rows"]
        assert hits + misses == lookups
        assert 320 * misses <= nbytes <= 320 * misses + 4096 * misses
        assert found["counted"] <= found["read"] <= found["counted"] + 1_000_000

"""mlx-lm's own generators and server on our models: greedy ids must be those of evaluating the
whole text anew for every token, without any cache; streamed and resident must agree bit for bit."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import check_positions
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.experts.telemetry.events import Chosen
from mlx_moeflux.loading import load, load_model
from mlx_moeflux.mlx_lm_plugin import register_cache_classes, register_with_mlx_lm
from mlx_moeflux.models.base import StreamingModel

mlx_lm = pytest.importorskip("mlx_lm")

TWIN = Path(__file__).parent / "golden" / "text_top3"
# Printable ASCII, then bytes that are no text by themselves.
ALPHABET = [chr(c) for c in range(33, 127)] + [chr(c) for c in range(161, 168)]
LENGTHS, MAX_TOKENS = (9, 2, 30, 1, 17), (7, 12, 5, 9, 3)
# 3 of 6 experts: what one token needs, the smallest bank there is.
BUDGETS = {"resident": "100%", "streamed": "50%"}
SCHEDULES = {
    "all at once": {},
    "joining, in chunks": {
        "completion_batch_size": 2,
        "prefill_batch_size": 2,
        "prefill_step_size": 4,
    },
    "one prompt at a time": {"completion_batch_size": 3, "prefill_batch_size": 1},
}


def write_tokenizer(directory, eos):
    """Byte-level, as Qwen's: transformers builds that kind whatever the file says."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[])
    characters = tokenizers.Tokenizer(model)
    characters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = tokenizers.decoders.ByteLevel()
    characters.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": ALPHABET[eos]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def greedy(model, prompt, count, eos):
    """Ids up to `count` or `eos` (included), the whole text evaluated anew for each."""
    ids = list(prompt)
    for _ in range(count):
        logits = np.asarray(model(mx.array([ids]))[0, -1])
        assert np.isfinite(logits).all()
        second, first = np.sort(logits)[-2:]
        assert first - second > 1e-4, "too close to call; choose other prompts"
        ids.append(int(logits.argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A checkpoint with tokenizer, prompts, and what each of them continues with."""
    directory = tmp_path_factory.mktemp("twin")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TWIN / name, directory)
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 94, n).tolist() for n in LENGTHS]
    with load_model(directory, expert_memory="100%") as model:
        free = [greedy(model, p, n, None) for p, n in zip(prompts, MAX_TOKENS, strict=True)]
        eos = free[0][3]
        write_tokenizer(directory, eos)
        expected = [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in free]
    assert len({tuple(ids) for ids in expected}) == len(prompts)
    assert sum(ids[-1] == eos for ids in expected) < len(prompts)
    return SimpleNamespace(directory=directory, prompts=prompts, expected=expected, eos=eos)


@pytest.fixture(params=BUDGETS)
def loaded(request, twin):
    model, tokenizer = load(twin.directory, expert_memory=BUDGETS[request.param])
    with model:
        yield model, tokenizer


def batch(model, tokenizer, twin, **options):
    return mlx_lm.batch_generate(
        model,
        tokenizer,
        copy.deepcopy(twin.prompts),
        max_tokens=list(MAX_TOKENS),
        return_token_ids=True,
        return_logprobs=True,
        **options,
    )


def without_stop(ids, eos):
    return ids[:-1] if ids[-1] == eos else ids


def text_of(tokenizer, ids, eos):
    return tokenizer.decode(without_stop(ids, eos))


@pytest.mark.parametrize("chunk", [4, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loaded", ["streamed", pytest.param("resident", marks=pytest.mark.slow)], indirect=True
)
def test_stream_generate(twin, loaded, chunk):
    model, tokenizer = loaded
    for prompt, expected, count in zip(twin.prompts, twin.expected, MAX_TOKENS, strict=True):
        replies = list(
            mlx_lm.stream_generate(
                model, tokenizer, prompt, max_tokens=count, prefill_step_size=chunk
            )
        )
        assert [r.token for r in replies] == expected
        assert "".join(r.text for r in replies) == text_of(tokenizer, expected, twin.eos)
        assert replies[-1].finish_reason == ("stop" if expected[-1] == twin.eos else "length")
        assert replies[-1].prompt_tokens == len(prompt)


def test_quantised_keys_and_values_are_refused_rather_than_ignored(twin, loaded):
    with pytest.raises(UnsupportedError, match=r"give kv_bits to load\(\) or register"):
        list(mlx_lm.stream_generate(*loaded, twin.prompts[0], max_tokens=2, kv_bits=4))


# By default each schedule in one of the two.
USUAL = {"all at once": "streamed", "joining, in chunks": "resident"}
USUAL |= {"one prompt at a time": "streamed"}


@pytest.mark.parametrize(
    ("loaded", "schedule"),
    [
        pytest.param(budget, name, marks=[pytest.mark.slow] * (USUAL[name] != budget))
        for budget in BUDGETS
        for name in SCHEDULES
    ],
    indirect=["loaded"],
)
def test_batch_generate(twin, loaded, schedule):
    model, tokenizer = loaded
    reply = batch(model, tokenizer, twin, return_prompt_caches=True, **SCHEDULES[schedule])
    assert reply.token_ids == [without_stop(ids, twin.eos) for ids in twin.expected]
    assert reply.texts == [text_of(tokenizer, ids, twin.eos) for ids in twin.expected]
    for cache, prompt, ids in zip(reply.caches, twin.prompts, twin.expected, strict=True):
        # The newest token is already inside, because mlx-lm runs one step ahead.
        assert check_positions(cache) == [len(prompt) + len(ids)]


@pytest.mark.slow
def test_streamed_batches_equal_resident_ones_bit_for_bit(twin):
    for options in SCHEDULES.values():
        logprobs = []
        for budget in BUDGETS.values():
            model, tokenizer = load(twin.directory, expert_memory=budget)
            with model:
                logprobs.append(batch(model, tokenizer, twin, **options).logprobs)
        assert np.isfinite(np.concatenate(logprobs[0])).all()
        assert logprobs[0] == logprobs[1]


def test_padding_asks_for_no_expert(twin):
    heard = []
    model, tokenizer = load(
        twin.directory,
        expert_memory="50%",
        events=lambda event: heard.append(event) if isinstance(event, Chosen) else None,
    )
    with model:
        reply = batch(model, tokenizer, twin)
    computed = sum(len(p) + len(ids) for p, ids in zip(twin.prompts, twin.expected, strict=True))
    for layer in range(4):
        ids = np.concatenate([event.ids for event in heard if event.layer == layer])
        padding = (ids == 6).all(axis=1)
        assert (ids[~padding] < 6).all()
        assert (~padding).sum() == computed
        assert padding.sum() > 0
    assert reply.stats.generation_tokens == sum(len(ids) for ids in twin.expected)


@pytest.mark.parametrize(
    "loaded", ["streamed", pytest.param("resident", marks=pytest.mark.slow)], indirect=True
)
def test_a_second_turn_continues_from_returned_caches(twin, loaded):
    model, tokenizer = loaded
    first = batch(model, tokenizer, twin, return_prompt_caches=True)
    more = [[5, 6, 7, 8], [9], [10, 11], [12, 13, 14], [15]]
    turns = [
        prompt + ids + extra
        for prompt, ids, extra in zip(twin.prompts, twin.expected, more, strict=True)
    ]
    expected = [without_stop(greedy(model, turn, 6, twin.eos), twin.eos) for turn in turns]
    before = [[np.asarray(a) for e in cache for a in e._arrays()] for cache in first.caches]
    for _ in range(2):
        second = mlx_lm.batch_generate(
            model,
            tokenizer,
            copy.deepcopy(more),
            prompt_caches=first.caches,
            max_tokens=6,
            return_token_ids=True,
            completion_batch_size=2,
            prefill_batch_size=2,
        )
        assert second.token_ids == expected
    for cache, arrays in zip(first.caches, before, strict=True):
        held = [a for e in cache for a in e._arrays()]
        assert all(np.array_equal(a, b) for a, b in zip(held, arrays, strict=True))


@pytest.mark.parametrize(
    "loaded", ["resident", pytest.param("streamed", marks=pytest.mark.slow)], indirect=True
)
def test_sequences_join_and_leave_a_running_batch(twin, loaded):
    from mlx_lm.generate import BatchGenerator

    model, _ = loaded
    generator = BatchGenerator(model, stop_tokens=[[twin.eos]], prefill_step_size=8)
    got, arrivals = {}, {0: [0, 2], 2: [1], 3: [4, 3]}
    names, step, left = {}, 0, None
    while step < 4 or names:
        for i in arrivals.get(step, ()):
            (uid,) = generator.insert([list(twin.prompts[i])], [MAX_TOKENS[i]])
            names[uid], got[i] = i, []
        if step == 5:
            left = next(uid for uid, i in names.items() if i == 1)
            (caches,) = generator.remove([left], return_prompt_caches=True).values()
            assert check_positions(caches[0]) == [len(caches[1])]
            del names[left]
        for reply in generator.next()[1]:
            got[names[reply.uid]].append(reply.token)
            if reply.finish_reason is not None:
                del names[reply.uid]
        step += 1
    generator.close()
    assert 0 < len(got[1]) < len(twin.expected[1])
    for i, expected in enumerate(twin.expected):
        assert got[i] == expected[: len(got[1]) if i == 1 else None]


def test_a_saved_prompt_continues_as_if_never_interrupted(twin, loaded, tmp_path):
    from mlx_lm.models import cache as client

    register_cache_classes()
    model, tokenizer = loaded
    prompt, expected = twin.prompts[2], twin.expected[2]
    file = str(tmp_path / "prompt.safetensors")
    cache = client.make_prompt_cache(model)
    mx.eval(model(mx.array([prompt[:20]]), cache=cache))
    client.save_prompt_cache(file, cache)
    for resumed in (client.load_prompt_cache(file), cache):
        replies = mlx_lm.stream_generate(
            model,
            tokenizer,
            prompt[20:],
            max_tokens=MAX_TOKENS[2],
            prompt_cache=resumed,
        )
        assert [r.token for r in replies] == expected


@pytest.fixture
def registered(monkeypatch):
    from mlx_lm import utils

    monkeypatch.setattr(utils, "load_model", utils.load_model)
    monkeypatch.setattr(utils, "save_model", utils.save_model)
    register_with_mlx_lm(expert_memory="25%")
    register_with_mlx_lm(expert_memory="50%")
    return utils


def test_registration_loads_our_models_and_leaves_others_alone(twin, registered, tmp_path):
    model, tokenizer, config = mlx_lm.load(str(twin.directory), return_config=True)
    with model:
        assert isinstance(model, StreamingModel)
        assert not model.plan.resident
        assert config["model_type"] == "qwen3_5_moe_text"
        ids = [r.token for r in mlx_lm.stream_generate(model, tokenizer, twin.prompts[0])]
    assert ids == twin.expected[0]
    with pytest.raises(UnsupportedError, match=r"rope_theta=1\.0 would override"):
        mlx_lm.load(str(twin.directory), model_config={"rope_theta": 1.0})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(FileNotFoundError, match="No safetensors"):
        registered.load_model(tmp_path)


def test_server_answers_and_reuses_a_prompt(twin, registered, monkeypatch):
    from mlx_lm import server
    from mlx_lm.models.cache import LRUPromptCache

    providers = []
    monkeypatch.setattr(server, "run", lambda host, port, provider: providers.append(provider))
    monkeypatch.setattr("sys.argv", ["server", "--model", str(twin.directory)])
    server.main()
    answers = server.ResponseGenerator(providers[0], LRUPromptCache(4))

    def ask(ids, count):
        return answers.generate(
            server.CompletionRequest("text", "".join(ALPHABET[i] for i in ids), [], None, None),
            server.GenerationArguments(
                model=server.ModelDescription("default_model", None, None),
                sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
                logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
                stop_words=[],
                max_tokens=count,
                num_draft_tokens=0,
                logprobs=False,
                top_logprobs=0,
                seed=None,
                chat_template_kwargs=None,
            ),
        )

    try:
        asked = [ask(p, n) for p, n in zip(twin.prompts, MAX_TOKENS, strict=True)]
        got = [[r.token for r in replies] for _, replies in asked]
        context, replies = ask(twin.prompts[2] + twin.expected[2] + [3, 4], 2)
        again = [r.token for r in replies]
        final = twin.prompts[2] + twin.expected[2] + [3, 4]
        with load_model(twin.directory) as model:
            assert again == greedy(model, final, 2, twin.eos)
        answers.model_provider.model.close()
    finally:
        answers.stop_and_join()
    assert got == twin.expected
    assert context.prompt_cache_count >= len(twin.prompts[2])

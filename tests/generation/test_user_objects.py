"""What a caller hands over and is wrong. Oracle: one line that names it, and the text of a call
without it: nothing that failed leaves a trace."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache as TheirCache

from mlx_moeflux import batch_generate, generate, load, stream_generate
from mlx_moeflux.conversion import synthesize
from mlx_moeflux.errors import CacheError, InputError, MoefluxError, ShapeError
from mlx_moeflux.generation.batch import Batch, BatchGenerator
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from mlx_moeflux.models import decoder
from mlx_moeflux.models.moe import SoftmaxRouter
from tests.devices import seen_as

PROMPT = "def main(argv):\n"


@pytest.fixture(scope="module")
def pair(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, expert_memory="100%")
    with model:
        yield model, tokenizer


def by_generate(model, tokenizer, **options):
    return generate(model, tokenizer, PROMPT, max_tokens=4, **options)


def by_stream(model, tokenizer, **options):
    return "".join(r.text for r in stream_generate(model, tokenizer, PROMPT, 4, **options))


def by_steps(model, tokenizer, **options):
    ids = mx.array(tokenizer.encode(PROMPT))
    return tokenizer.decode([t for t, _ in generate_step(ids, model, max_tokens=4, **options)])


def by_batch(model, tokenizer, **options):
    return batch_generate(model, tokenizer, [PROMPT, PROMPT + "    "], None, 4, **options).texts[0]


def by_generator(model, tokenizer, **options):
    with BatchGenerator(model, max_tokens=4, keep_states=True, **options) as batch:
        (uid,), found = batch.insert([tokenizer.encode(PROMPT)]), []
        while replies := batch.next():
            found += [reply.token for reply in replies if reply.uid == uid]
    return tokenizer.decode(found)


WAYS = (by_generate, by_stream, by_steps, by_batch, by_generator)
SLOW = (by_stream, by_steps, by_batch)
every_way = pytest.mark.parametrize("way", WAYS)
most_ways = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS]
)


def refused(kind, match, call):
    with pytest.raises(kind, match=match) as caught:
        call()
    assert isinstance(caught.value, MoefluxError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def full(value, dtype=mx.uint32):
    return lambda logprobs: mx.full(logprobs.shape[:1], value, dtype)


OUTSIDE = {4096: mx.uint32, -7: mx.int32, 2**40: mx.int64}
WRONG = {
    r"uint32\[1, 1\]|uint32\[2, 1\]": lambda x: mx.argmax(x, axis=-1, keepdims=True),
    r"returned uint32\[\];": mx.argmax,
    r"returned float32\[": lambda x: x.max(axis=-1),
    "returned NoneType": lambda x: None,
    "returned list|returned \\(int": lambda x: [3],
    r"returned uint32\[3\]": lambda x: mx.zeros((3,), mx.uint32),
    r"returned bool\[": lambda x: mx.argmax(x, axis=-1) > 0,
}


@every_way
@pytest.mark.parametrize("value", OUTSIDE)
def test_an_id_outside_the_vocabulary_is_one_line(pair, way, value):
    message = f"the sampler returned id {value}, which is outside the vocabulary; return 0 to 4095"
    refused(InputError, message, lambda: way(*pair, sampler=full(value, OUTSIDE[value])))


@most_ways
@pytest.mark.parametrize("message", WRONG)
def test_what_is_no_id_is_one_line(pair, way, message):
    refused(ShapeError, message, lambda: way(*pair, sampler=WRONG[message]))


@most_ways
@pytest.mark.parametrize(
    ("message", "processor"),
    [
        ("returned NoneType; expected float logits", lambda tokens, logits: None),
        (r"returned float32\[4096\]", lambda tokens, logits: logits[0]),
        (r"returned float32\[1, 4095\]", lambda tokens, logits: logits[:, 1:]),
        (r"returned int32\[1, 4096\]", lambda tokens, logits: logits.astype(mx.int32)),
        ("returned float", lambda tokens, logits: 0.5),
    ],
)
def test_what_is_no_logits_is_one_line(pair, way, message, processor):
    right = [lambda tokens, logits: logits + 1, processor]
    refused(ShapeError, message, lambda: way(*pair, logits_processors=right))


@most_ways
@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("sampler is 5; give a callable", {"sampler": 5}),
        ("logits_processors is 5", {"logits_processors": 5}),
        ("logits_processors has 'x'", {"logits_processors": ["x"]}),
    ],
)
def test_what_cannot_be_called_is_one_line(pair, way, message, options):
    refused(InputError, message, lambda: way(*pair, **options))


@most_ways
def test_right_objects_of_other_dtypes_say_the_same(pair, way):
    plain = way(*pair)
    given = {
        "sampler": lambda logprobs: mx.argmax(logprobs, axis=-1).astype(mx.int64),
        "logits_processors": (lambda tokens, logits: logits.astype(mx.float16),),
    }
    assert way(*pair, **given) == plain


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("value", [4096, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_failed_step_leaves_the_state_as_it_was(pair, failing, value):
    model, tokenizer = pair
    ids = mx.array(tokenizer.encode(PROMPT))
    right = [token for token, _ in generate_step(ids, model, max_tokens=6)]
    calls = 0

    def sampler(logprobs):
        nonlocal calls
        calls += 1
        bad = mx.full(logprobs.shape[:1], value, mx.int32)
        return bad if calls == failing else mx.argmax(logprobs, axis=-1).astype(mx.int32)

    state, found = model.make_cache(), []
    steps = generate_step(ids, model, prompt_cache=state, sampler=sampler)
    found = [next(steps)[0] for _ in range(failing - 1)]
    refused(InputError, f"returned id {value},", lambda: next(steps))
    assert found == right[: failing - 1]
    assert state.position == len(ids) + len(found)
    if found:
        following = mx.array(right[len(found) : len(found) + 1])
        more = generate_step(following, model, prompt_cache=state, max_tokens=5 - len(found))
        assert [token for token, _ in more] == right[len(found) + 1 :]
    # A batch goes on with the step that failed.
    calls = 0
    with BatchGenerator(model, max_tokens=6, sampler=sampler) as batch:
        batch.insert([ids.tolist()])
        found, errors = [], 0
        while len(batch):
            try:
                found += [reply.token for reply in batch.next()]
            except InputError:
                errors += 1
    assert errors == 1
    assert found == right


# ---- States


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """States of other models: of another family, of more heads, and of another checkpoint."""
    root, found = tmp_path_factory.mktemp("others"), {}
    shape = synthesize.SHAPES["qwen3-tiny"]
    with pytest.MonkeyPatch.context() as patch:
        for name, changes in {"heads": {"num_key_value_heads": 4}, "same": {}}.items():
            patch.setitem(synthesize.SHAPES, "qwen3-tiny", dataclasses.replace(shape, **changes))
            synthesize.synthesize("qwen3-tiny", root / name, layers=2, experts=16, seed=len(found))
            found[name] = root / name
    return found


def test_what_is_no_state_is_one_line(pair):
    model, tokenizer = pair
    short, theirs = model.make_cache()[:-1], [TheirCache() for _ in model.layers]
    swapped = list(reversed(model.make_cache()))
    for message, cache in {
        "the cache is a str; give": "x",
        "the cache is a int": 5,
        "the cache is a dict": {},
        "the cache has 0 entries and this model 2 layers": [],
        "the cache has 1 entries": short,
        "entry 0 of the cache is a KVCache, this model's a RecurrentCache": theirs,
        "entry 0 of the cache is a AttentionCache": swapped,
        "entry 0 of the cache is a NoneType": [None] * 2,
    }.items():
        for way in (by_generate, by_stream, by_steps):
            refused(CacheError, message, lambda: way(*pair, prompt_cache=cache))  # noqa: B023
        with BatchGenerator(model) as batch:
            refused(CacheError, message, lambda: batch.insert([[5]], caches=[cache]))  # noqa: B023
        if not isinstance(cache, str | int | dict):
            refused(CacheError, message, lambda: model(mx.array([[5, 6]]), cache))  # noqa: B023
    assert tokenizer.encode(PROMPT)


def test_a_state_of_another_model_is_one_line(others):
    with load_model(others["heads"]) as wide, load_model(others["same"]) as model:
        state, plain = wide.make_cache(), wide.make_cache()
        mx.eval(wide(mx.array([[5, 6, 7]]), state))
        for cache in (state, plain):
            refused(CacheError, "is a state of another model", lambda: model.states.check(cache))  # noqa: B023
        message = "'keys' of entry 0 of the cache is "
        refused(CacheError, message, lambda: model(mx.array([[5, 6]]), list(state)))
        with load_model(others["same"]) as again:
            own = again.make_cache()
            mx.eval(again(mx.array([[5, 6, 7]]), own))
            model.states.check(own)
            assert model(mx.array([[8]]), own).shape == (1, 1, model.config.vocab_size)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("max_tokens is '4'; give an integer", {"max_tokens": "4"}),
        ("max_tokens is 1.5", {"max_tokens": 1.5}),
        ("max_tokens is -2; it must be at least -1", {"max_tokens": -2}),
        ("prefill_step_size is 0", {"prefill_step_size": 0}),
        ("prompt_progress_callback is 5; give a callable", {"prompt_progress_callback": 5}),
    ],
)
def test_options_of_steps_are_checked(pair, message, options):
    model, tokenizer = pair
    refused(InputError, message, lambda: generate(model, tokenizer, PROMPT, **options))
    refused(InputError, message, lambda: list(generate_step(mx.array([5]), model, **options)))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"the prompt is \(int, int\)", lambda m, t: list(generate_step([5, 6], m))),
        (r"the prompt is int32\[1, 2\]", lambda m, t: list(generate_step(mx.array([[5, 6]]), m))),
        (r"the prompt is int32\[0\]", lambda m, t: list(generate_step(mx.zeros(0, mx.int32), m))),
        ("stop is a int", lambda m, t: by_generate(m, t, stop=5)),
        ("stop_ids is 5", lambda m, t: by_generate(m, t, stop_ids=5)),
        ("breakpoints is 5; give positions", lambda m, t: by_generate(m, t, breakpoints=5)),
        (
            "breakpoints has 'a', which is no position",
            lambda m, t: by_generate(m, t, breakpoints=["a"]),
        ),
        ("template_options is 'x'", lambda m, t: by_generate(m, t, template_options="x")),
        ("prompts is 'text'", lambda m, t: BatchGenerator(m).insert("text")),
        ("prompts is 5", lambda m, t: BatchGenerator(m).insert(5)),
        ("max_tokens is 5; give one for each", lambda m, t: BatchGenerator(m).insert([[5]], 5)),
        ("samplers is 'x'", lambda m, t: BatchGenerator(m).insert([[5]], samplers="x")),
        ("sampler is 'x'", lambda m, t: BatchGenerator(m).insert([[5]], samplers=["x"])),
        ("prompt_cache is 'x'", lambda m, t: BatchGenerator(m, prompt_cache="x")),
        (r"tokens are \(int\), expected \[0\]", lambda m, t: Batch(m).step([5])),
        (r"tokens are \(\(int\)\)", lambda m, t: m([[5]])),
        ("tokens are mlx.core.float32", lambda m, t: m(mx.array([[0.5]]))),
    ],
)
def test_other_arguments_are_checked(pair, message, call):
    refused(InputError, message, lambda: call(*pair))


# ---- One token beside a state


@pytest.mark.parametrize("value", [4096, -1, 99999, 2**31])
def test_one_id_beside_a_state_is_checked_on_a_cpu_and_bounded_on_a_gpu(pair, monkeypatch, value):
    model, _ = pair
    dtype = mx.int64 if value >= 2**31 else mx.int32

    def step(token):
        state = model.make_cache()
        mx.eval(model(mx.array([[5, 6]]), state))
        return model(mx.array([[token]], dtype), state)

    last = step(4095)
    refused(InputError, f"token id {value} is outside the vocabulary", lambda: step(value))
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "device", seen_as("cuda"))
        assert mx.array_equal(step(value), last)
        assert not mx.array_equal(step(7), last)


# ---- Routers


class Listing(SoftmaxRouter):
    def __call__(self, logits):
        return list(super().__call__(logits))


class Single(SoftmaxRouter):
    calls = 0

    def __call__(self, logits):
        ids, weights = super().__call__(logits)
        self.calls += 1
        return (ids, weights) if self.calls == 1 else [ids]


def test_a_router_may_return_a_list():
    tokens = mx.array([[5, 6, 7]])
    with load_model(BUNDLED_MODEL) as model:
        expected = model(tokens)
    with load_model(BUNDLED_MODEL, router=Listing(4)) as model:
        assert mx.array_equal(model(tokens), expected)
    with load_model(BUNDLED_MODEL, router=Single(4)) as model:
        message = r"Single returned \(uint32\[3, 4\]\) in layer 0; expected ids and weights"
        refused(ShapeError, message, lambda: model(tokens))

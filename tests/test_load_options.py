"""Options of load: one list for both functions and for flags, misspelt names, safe mode."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import pydoc

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import BatchGenerator, generate, load, load_model
from mlx_moeflux.cli.common import add_load_arguments, load_options
from mlx_moeflux.errors import ExactnessError, InputError, MoefluxError
from mlx_moeflux.experts.io.file_readers import PreadReader
from mlx_moeflux.experts.io.readers import MemoryReader
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.kernels.moe.add_shared import add_shared
from mlx_moeflux.loading import BUNDLED_MODEL, LoadOptions
from mlx_moeflux.loading import steps as loading_steps
from mlx_moeflux.loading.options import FLAGS, NAMES, LoadArguments, option


@pytest.mark.parametrize(("function", "own"), [(load, 3), (load_model, 1)])
def test_signatures_and_help_derive_from_the_list_of_options(function, own):
    parameters = inspect.signature(function).parameters
    fields = dataclasses.fields(LoadOptions)
    assert len(parameters) == own + len(fields)
    first = next(iter(parameters.values()))
    assert (first.name.startswith("path"), first.kind) == (True, first.POSITIONAL_OR_KEYWORD)
    helped = pydoc.render_doc(function, renderer=pydoc.plaintext)
    for field in fields:
        parameter = parameters[field.name]
        assert parameter.kind == parameter.KEYWORD_ONLY
        assert (parameter.default, parameter.annotation) == (field.default, field.type)
        assert f"\n        {field.name}: {field.metadata['text'].split()[0]}" in helped


@pytest.mark.parametrize("function", [load, load_model])
def test_a_misspelt_option_is_refused_with_the_nearest_name(function):
    with pytest.raises(InputError) as caught:
        function(BUNDLED_MODEL, expert_memori="1GB")
    name = function.__name__
    assert str(caught.value) == (
        f"{name} has no option 'expert_memori'; did you mean 'expert_memory'?"
    )
    with pytest.raises(InputError, match=r"there are .*expert_memory"):
        function(BUNDLED_MODEL, zzz=1)


def test_load_suggests_its_own_options_too():
    with pytest.raises(InputError, match="'revision'"):
        load(BUNDLED_MODEL, revison="main")


def test_safe_uses_references_eager_steps_and_no_prefetch():
    tokens = mx.array([[5, 6, 7]])
    with load_model(BUNDLED_MODEL, expert_memory="50%", safe=True) as model:
        assert set(model.kernels.names().values()) == {"reference"}
        assert model.compile_steps is False
        cache = model.make_cache()
        mx.eval(model(tokens, cache), model(tokens[:, :1], cache))
        assert model.steps.whole.traces == model.steps.segments.traces == 0
        assert model.store.stats().total.proposed == 0


def test_stock_computes_the_experts_of_prompts_alone():
    """On the CPU stock is the reference."""
    tokens, found = mx.arange(40)[None], {}
    options = {
        "stock": {"prompt_kernels": "stock"},
        "auto": {},
        "named": {"kernels": "auto,expert_mix=reference"},
    }
    for name, given in options.items():
        with load_model(BUNDLED_MODEL, **given) as model:
            cache = model.make_cache()
            prompt = model(tokens, cache)
            # A step behind another prompt, whose bits no choice changes.
            short = model.make_cache()
            model(tokens[:, :9], short)
            found[name] = np.array(prompt), np.array(model(tokens[:, :1], short))
            if name == "stock":
                marks, stats = model.store.stats().lossy, str(model.store.stats())
                assert marks == [
                    "prompt_kernels stock: not the same bits at every memory for experts"
                ]
                assert f"lossy: {marks[0]}" in stats
                identity = model.state_spec().identity
            elif name == "auto":
                assert not model.store.stats().lossy
                assert model.state_spec().identity != identity
    assert np.array_equal(found["stock"][0], found["named"][0])
    assert not np.array_equal(found["stock"][0], found["auto"][0])
    assert np.array_equal(found["stock"][1], found["auto"][1])


def test_stock_for_prompts_and_a_name_contradict_each_other():
    with pytest.raises(InputError, match="expert_mix is chosen by name, 'blas', for prompts too"):
        load_model(BUNDLED_MODEL, kernels="auto,expert_mix=blas", prompt_kernels="stock")


def test_ranks_have_no_stock_for_prompts_and_follow_the_table():
    class Ranks:
        rank = 0

    options = LoadOptions(distributed=Ranks(), prompt_kernels="stock")
    with pytest.raises(InputError, match="prompt_kernels is for one process"):
        loading_steps._checked(options)
    of_ranks = loading_steps._open(BUNDLED_MODEL, LoadOptions(distributed=Ranks()))
    assert not of_ranks.kernels._mode.measures
    assert loading_steps._open(BUNDLED_MODEL, LoadOptions()).kernels._mode.measures


@pytest.mark.parametrize(
    "option", [{"kernels": "auto"}, {"prefetch": "ahead"}, {"prompt_kernels": "stock"}]
)
def test_safe_excludes_other_choices(option):
    with pytest.raises(InputError, match="safe excludes"):
        load_model(BUNDLED_MODEL, safe=True, **option)


class Router:
    """Chooses experts 0 and 1; returns what `answer` makes of ids and weights."""

    num_experts_per_tok = 2

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, logits):
        ids = mx.broadcast_to(mx.array([0, 1], mx.uint32), (logits.shape[0], 2))
        return self.answer(ids, mx.full(ids.shape, 0.5))


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (Router, "Router is a class; pass an instance"),
        (Router(lambda ids, weights: None), r"returned NoneType .* expected \(uint32\[5, 2\]"),
        (Router(lambda ids, weights: ids), r"returned uint32\[5, 2\]"),
        (Router(lambda ids, weights: (ids, weights * float("nan"))), "weights that are not finite"),
        (Router(lambda ids, weights: (ids, weights.astype(mx.float16))), "float16"),
        (Router(lambda ids, weights: (ids[:, ::-1], weights)), r"the ids of Router are \[1, 0\]"),
        (Router(lambda ids, weights: 1 // 0), "fails on random logits: ZeroDivisionError"),
    ],
)
def test_a_wrong_router_is_one_line(router, message):
    with pytest.raises(MoefluxError, match=message):
        load_model(BUNDLED_MODEL, router=router)


class LateRouter(Router):
    """Right until the tenth call."""

    calls = 0

    def __call__(self, logits):
        self.calls += 1
        right = Router(lambda *answer: answer)
        return right(logits) if self.calls < 10 else super().__call__(logits)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda ids, weights: None, "LateRouter returned NoneType in layer 2; expected ids and"),
        (lambda ids, weights: (ids[:1, :1], weights), r"layer 2: x .* expected \[N, C\]"),
        (lambda ids, weights: (ids, weights * float("nan")), "after 8 tokens are not finite: a w"),
    ],
)
def test_a_router_that_fails_later_ends_the_reply_with_an_error(answer, message):
    router = LateRouter(answer)
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%", router=router)
    with model:
        router.calls = 1  # six calls are the prompt's
        with pytest.raises(MoefluxError, match=message):
            generate(model, tokenizer, [5, 6, 7, 8, 9, 10, 11])
        router.calls = -10_000
        assert generate(model, tokenizer, [5, 6, 7], max_tokens=2)


def test_logits_that_are_not_finite_end_a_batch_with_an_error():
    router = LateRouter(lambda ids, weights: (ids, weights * float("nan")))
    with load_model(BUNDLED_MODEL, router=router) as model:
        router.calls = 1
        with BatchGenerator(model, max_tokens=4) as batch:
            batch.insert([[5, 6, 7], [8, 9]])
            with pytest.raises(ExactnessError, match="not finite"):
                list(iter(batch.next, []))


class Store(ExpertStore):
    """Returns what `answer` makes of zeros."""

    num_experts, layers = 32, tuple(range(6))

    def __init__(self, answer):
        self.answer, self.account = answer, ExpertStats(self.layers)

    def experts(self, layer, x, ids, weights):
        return self.answer(mx.zeros(x.shape))

    def stats(self):
        return self.account

    def close(self): ...


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (Store, "Store is a class; pass an instance"),
        (3, "make its class a subclass of ExpertStore"),
        (Store(lambda y: None), r"experts returns NoneType in layer 0; expected float32 \[3, "),
        (Store(lambda y: y[:2]), r"experts returns mlx.core.float32 \[2, "),
        (Store(lambda y: y.astype(mx.float16)), r"experts returns mlx.core.float16 \[3, "),
        (Store(lambda y: y + float("nan")), "numbers that are not finite in layer 0"),
        (Store(lambda y: 1 // 0), "experts fails in layer 0: ZeroDivisionError"),
    ],
)
def test_a_wrong_store_is_one_line(store, message):
    with pytest.raises(MoefluxError, match=message):
        load_model(BUNDLED_MODEL, store=store)


def test_every_layer_of_a_store_is_checked_at_load_and_at_each_call():
    class Late(Store):
        late = True

        def experts(self, layer, x, ids, weights):
            return None if self.late and layer == 4 else mx.zeros(x.shape)

    store = Late(None)
    with pytest.raises(MoefluxError, match="NoneType in layer 4"):
        load_model(BUNDLED_MODEL, store=store)
    store.late = False
    with load_model(BUNDLED_MODEL, store=store) as model:
        mx.eval(model(mx.array([[5, 6]])))
        store.late = True
        with pytest.raises(MoefluxError, match="NoneType in layer 4"):
            model(mx.array([[5, 6]]))


def test_a_wrong_kernel_is_refused_unless_it_is_meant():
    def negative(x, experts, *args, **kwargs):
        return add_shared(x, -experts, *args, **kwargs)

    with pytest.raises(InputError, match=r"'add_shared' differs .*check_values=False"):
        load_model(BUNDLED_MODEL, kernels={"add_shared": negative})
    load_model(BUNDLED_MODEL, kernels={"add_shared": negative}, check_values=False).close()


class Bare(ExpertStore):
    experts = stats = close = len

    def __init__(self, **parts):
        vars(self).update(parts)


@pytest.mark.parametrize("missing", ["experts", "stats", "close"])
def test_a_store_without_a_method_is_refused_when_it_is_made(missing):
    methods = dict.fromkeys({"experts", "stats", "close"} - {missing}, len)
    kind = type("Lacking", (ExpertStore,), {"layers": (), "num_experts": 32, **methods})
    with pytest.raises(InputError, match=f"Lacking has no '{missing}'; see the ExpertStore class"):
        kind()
    assert type("Whole", (kind,), {missing: len})()


class Short(MemoryReader):
    name = "short"

    def __init__(self): ...

    def read(self, layer, expert): ...


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("events is 5; give a callable", {"events": 5}),
        ("kernels is 5; give operation", {"kernels": 5}),
        (r"kernels is \['sdpa'\]; give operation", {"kernels": ["sdpa"]}),
        ("kernels has 1: 2; give operation", {"kernels": {1: 2}}),
        ("kernels has None: None; give", {"kernels": {None: None}}),
        ("no operation is called 'sdps'; did you mean sdpa", {"kernels": {"sdps": "reference"}}),
        ("dtype is 'float32'; give mx.bfloat16, ", {"dtype": "float32"}),
        ("dtype is mlx.core.complex64; give mx.", {"dtype": mx.complex64}),
        ("dtype is mlx.core.int8; give mx.bfloat16", {"dtype": mx.int8}),
        ("experts_per_token is 'x'; give an integer", {"experts_per_token": "x"}),
        ("experts_per_token is True; give an integer", {"experts_per_token": True}),
        ("max_context is 1.5; give an integer", {"max_context": 1.5}),
        ("max_context is of type int, which cannot be p", {"max_context": -(10**5000)}),
        ("max_context is of type int, .* below 2", {"max_context": 10**5000}),
        ("the router <built-in function len> has as num_", {"router": len}),
        ("gguf_file is ' '; give a name", {"gguf_file": " "}),
        ("safe is 'no'; give True or False", {"safe": "no"}),
        ("fuse is 1; give True or False", {"fuse": 1}),
        ("prompt_kernels is 'fast'; give 'auto' or 'stock'", {"prompt_kernels": "fast"}),
        (r"events is called as \(event\): too many", {"events": lambda: None}),
        ("kv_bits is '8'; give an integer", {"kv_bits": "8"}),
        ("kv_bits is 3; give 4 or 8", {"kv_bits": 3}),
        ("kv_group_size is 7; give 32, 64 or 128", {"kv_group_size": 7}),
        ("reader 'str' has no method 'layout'", {"reader": "x"}),
        ("reader PreadReader is a class; pass an instance", {"reader": PreadReader}),
        (r"'short' is called as read\(layer, expert, into\): too many", {"reader": Short()}),
        ("store is of class Short; make its class a subclass", {"store": Short()}),
        ("Bare has no 'layers'; see", {"store": Bare()}),
        ("Bare has no 'num_experts'; see", {"store": Bare(layers=range(6))}),
    ],
)
def test_objects_of_another_kind_are_one_line(message, options):
    with pytest.raises(InputError, match=message) as caught:
        load_model(BUNDLED_MODEL, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_sets_its_option_alone(name):
    def options(*words: str) -> dict:
        parser = argparse.ArgumentParser()
        add_load_arguments(parser, *FLAGS)
        return load_options(parser.parse_args(words))

    defaults = {flag: getattr(LoadOptions(), flag) for flag in FLAGS}
    assert options() == defaults
    kind, word = FLAGS[name].kind, name.replace("_", "-")
    if kind is bool:
        given, value = ([f"--no-{word}"], False) if defaults[name] else ([f"--{word}"], True)
    else:
        given, value = [f"--{word}", "7"], kind("7")
    assert options(*given) == defaults | {name: value}


class Silent:
    """Cannot be printed, compared or named."""

    __hash__ = None

    def __repr__(self):
        return str(1 // 0)

    def __eq__(self, other):
        return bool(1 // 0)

    def __fspath__(self):
        return 5


WRONG = (
    *(Silent(), 10**5000, np.array("auto"), np.array([]), mx.bool_, "\udc80", 1e400, {None: None}),
    *(b"1GB", [], [1], {"a": 1}, object(), int, 1j, "\ud800", "a\0b", "x" * 5000, mx.array([4])),
    *(np.array([4]), -1, float("nan"), 2**70, "", "150 apples"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_value_is_one_line_before_anything_is_opened(name):
    """Also where nothing uses the option, as n-gram tables that this model has not."""
    messages = []
    for value in WRONG:
        # The model is not there: what is accepted ends too.
        with pytest.raises(MoefluxError) as caught:
            load_model(BUNDLED_MODEL / "absent", **{name: value})
        messages.append(str(caught.value))
    assert not any("\n" in message or len(message) > 1000 for message in messages)
    refused = sum("absent" not in message for message in messages)
    # A text may name a file, and there is hardly an amount of memory that no machine has.
    assert refused >= 15


def test_an_integer_of_numpy_is_one_of_python():
    options = {"experts_per_token": np.int8(3), "kv_bits": np.int8(4), "max_context": np.int16(99)}
    with load_model(
        BUNDLED_MODEL, expert_threads=np.uint8(2), drafts=np.int8(1), **options
    ) as model:
        assert model.states.max_context == 99
        assert type(model.states.kv_bits) is int


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_a_path_of_another_kind_is_one_line(value):
    for function in (load, load_model):
        with pytest.raises(MoefluxError) as caught:
            function(value)
        assert "\n" not in str(caught.value)


def test_every_option_declares_its_check():
    with pytest.raises(TypeError, match="text"):
        option(None, "a text alone")  # pyright: ignore[reportCallIssue]
    assert all(callable(field.metadata["check"]) for field in dataclasses.fields(LoadArguments))

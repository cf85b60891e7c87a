"""Oracle: what was given to the writer, and the struct module."""

import json
import re
import struct
import sys
import time

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.events import (
    Chosen,
    Evict,
    Guess,
    Hit,
    Miss,
    PrefetchDrop,
    PrefetchEnd,
    PrefetchStart,
    ReadEnd,
    ReadStart,
    Resize,
    joined,
)
from mlx_moeflux.experts.telemetry.trace import Result, Trace, TraceInfo, TraceWriter
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.installation import install_command
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.experts.helpers import K, random_call

INFO = TraceInfo(300, 2, (3, 5), {3: 1000, 5: 2000}, "abc", {3: 4, 5: 2}, "lru", "ahead", True)
IDS = np.array([[0, 299], [7, 300], [5, 6]], np.uint32)
WEIGHTS = np.array([[0.25, 0.75], [1, 0], [0.5, 0.125]], np.float32)
EVENTS = [
    Chosen(3, 0, IDS, WEIGHTS),
    Hit(3, 0),
    Hit(3, 5, prefetched=True),
    Miss(3, 6),
    Evict(3, 9, 1),
    ReadStart(3, 6, 1),
    ReadEnd(3, 6, 1, 1000, 0.5),
    Guess(5, (7, 1)),
    Evict(5, 3, 0),
    PrefetchStart(5, 7, 0),
    PrefetchStart(5, 1, 1),
    Resize(5, 6),
    Chosen(5, 12, IDS[:1], WEIGHTS[:1]),
    PrefetchEnd(5, 7, 0, 2000, 0.25),
    PrefetchDrop(5, 1, 1),
    Miss(5, 0),
]


@pytest.fixture
def file(tmp_path):
    with TraceWriter(tmp_path / "a.trace", INFO) as writer:
        for event in EVENTS:
            writer(event)
    writer.close()
    return tmp_path / "a.trace"


def test_what_is_written_is_read(file):
    trace = Trace.open(file)
    assert trace.info == INFO
    assert trace.complete
    first, second = trace
    assert (first.layer, first.token) == (3, 0)
    assert (first.ids == IDS).all()
    assert (first.weights == WEIGHTS).all()
    assert first.guess == (7, 1)
    assert first.prefetches == (7, 1)
    assert (first.resized, second.resized) == (((5, 6),), ())
    assert first.result == Result(2, 1, 1, 1000, 0.5)
    assert (second.layer, second.token, second.dropped) == (5, 12, (1,))
    assert second.guess is None
    assert second.result == Result(misses=1)
    assert 0 < first.nanoseconds <= second.nanoseconds
    assert trace.recorded() == Result(2, 1, 2, 1000, 0.5)
    assert trace.tokens == 3


def test_the_file_is_what_the_document_says(file):
    header, _, rest = file.read_bytes().partition(b"\n")
    assert json.loads(header)["format"] == "mlx_moeflux.trace"
    kind, k, layer, n, token, _ = struct.unpack_from("<cBHIQQ", rest)
    assert (kind, k, layer, n, token) == (b"C", 2, 3, 3, 0)
    assert struct.unpack_from("<6H", rest, 24) == (0, 299, 7, 300, 5, 6)
    assert struct.unpack_from("<6e", rest, 36) == (0.25, 0.75, 1, 0, 0.5, 0.125)
    assert struct.unpack_from("<cxHIIIQd", rest, 48) == (b"R", 3, 2, 1, 1, 1000, 0.5)
    assert struct.unpack_from("<cBH2H", rest, 80) == (b"G", 2, 5, 7, 1)
    assert struct.unpack_from("<cxHH", rest, 88) == (b"P", 5, 7)
    assert struct.unpack_from("<cxHI", rest, 100) == (b"S", 5, 6)
    assert rest[-1:] == b"E"


def test_a_trace_that_was_cut_off_is_read_as_far_as_it_goes(file, tmp_path):
    data = file.read_bytes()
    start = data.index(b"\n") + 1
    counts = []
    for end in range(start, len(data)):
        (tmp_path / "cut").write_bytes(data[:end])
        trace = Trace.open(tmp_path / "cut")
        assert not trace.complete
        counts.append(len(trace))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, r: b"", "is not a trace"),
        (lambda h, r: h, "is not a trace"),
        (lambda h, r: b"{}\n" + r, "is not a trace"),
        (lambda h, r: b"[1]\n" + r, "is not a trace"),
        (lambda h, r: h.replace(b'"layers":[3,5],', b"") + b"\n" + r, "is not a trace"),
        (lambda h, r: h.replace(b'"version":2', b'"version":9') + b"\n" + r, "version 9"),
        (lambda h, r: h + b"\nZ" + r, "kind b'Z'"),
        (lambda h, r: h + b"\n" + r[48:], "does not begin with a call"),
        (lambda h, r: h.replace(b'"num_experts":300', b'"num_experts":30') + b"\n" + r, "of 30"),
        (lambda h, r: h + b"\n" + r[:2] + b"\x09\x00" + r[4:], "layer 9"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(file, change, words):
    header, _, rest = file.read_bytes().partition(b"\n")
    file.write_bytes(change(header, rest))
    with pytest.raises(InputError) as caught:
        Trace.open(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        Trace.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="cannot be written"):
        TraceWriter(tmp_path / "no" / "folder", INFO)


def test_a_model_traces_itself_and_keeps_its_listener(two_bundled_layers, tmp_path):
    seen = []
    with load_model(two_bundled_layers, expert_memory="25%", events=seen.append) as model:
        with model.trace(tmp_path / "x"):
            mx.eval(model(mx.array([[1, 2, 3]])))
        traced = len(seen)
        mx.eval(model(mx.array([[4]])))
        stats = model.store.stats().total
        identity = model.identity
    trace = Trace.open(tmp_path / "x")
    assert trace.info.model == identity
    assert trace.info.cold
    assert trace.info.slots == dict.fromkeys(range(2), 8)
    assert trace.info.eviction == "lfu"
    chosen = [e for e in seen[:traced] if isinstance(e, Chosen)]
    assert len(seen) > traced
    assert len(trace) == len(chosen) == 2
    for call, event in zip(trace, chosen, strict=True):
        assert (call.ids == event.ids).all()
        assert np.abs(call.weights - event.weights).max() <= 2**-11
    assert trace.recorded().misses < stats.misses


def test_a_resident_model_is_traced_too(two_bundled_layers, tmp_path):
    with load_model(two_bundled_layers) as model, model.trace(tmp_path / "x"):
        mx.eval(model(mx.array([[1, 2, 3]])))
    trace = Trace.open(tmp_path / "x")
    assert trace.info.slots is None
    assert trace.info.block_bytes == dict.fromkeys(range(2), 27648)
    assert len(trace) == 2


def test_a_store_without_events_is_refused(tmp_path):
    class Silent(ExpertStore):
        experts = stats = close = len

    with pytest.raises(InputError, match="Silent has no events"):
        TraceInfo.of(Silent(), experts_per_token=2)


def test_a_warm_store_says_so(tmp_path, open_store):
    store = open_store()
    assert TraceInfo.of(store, experts_per_token=K).cold
    store.experts(3, *random_call(1))
    assert not TraceInfo.of(store, experts_per_token=K).cold


def test_both_listeners_hear_everything():
    a, b = [], []
    hook = joined(a.append, b.append)
    hook(EVENTS[1])
    assert a == b == [EVENTS[1]]
    assert joined(None, hook) is hook


@pytest.mark.slow
def test_recording_costs_less_than_a_fiftieth(tmp_path):
    """Decode steps without and with the writer in turn; the median difference of neighbours, which
    a machine that is busy with other things changes least."""
    with load_model(BUNDLED_MODEL, expert_memory="25%") as model:
        tokens = np.random.default_rng(0).integers(0, 4096, (2000, 1, 1))
        seconds = []
        cache = model.make_cache()
        info = TraceInfo.of(model.store, experts_per_token=4)
        with TraceWriter(tmp_path / "x", info) as writer:
            for i, token in enumerate(tokens):
                model.store.events = writer if i % 2 else None
                start = time.perf_counter()
                mx.eval(model(mx.array(token), cache))
                seconds.append(time.perf_counter() - start)
    without, with_writer = np.array(seconds).reshape(-1, 2).T
    cost, step = np.median(with_writer - without), np.median(without)
    print(f"{1e6 * cost:.0f} us of {1e3 * step:.3f} ms")  # noqa: T201
    assert cost <= 0.02 * step


# Of EVENTS: (call, layer, token, rank, expert, weight), without padding.
TABLE = [
    *((0, 3, 0, 0, 0, 0.25), (0, 3, 0, 1, 299, 0.75), (0, 3, 1, 0, 7, 1.0)),
    *((0, 3, 2, 0, 5, 0.5), (0, 3, 2, 1, 6, 0.125)),
    *((1, 5, 12, 0, 0, 0.25), (1, 5, 12, 1, 299, 0.75)),
]
COLUMNS = {
    "call": "int64", "layer": "uint16", "token": "int64", "rank": "uint8", "expert": "uint16",
    "weight": "float32", "sequence": "int32", "prompt": "bool", "token_id": "int32",
    "nanoseconds": "int64", "guessed": "bool", "read_ahead": "bool",
}  # fmt: skip


def test_a_table_has_a_row_for_each_chosen_expert(file):
    columns = Trace.open(file).to_numpy()
    assert {name: str(column.dtype) for name, column in columns.items()} == COLUMNS
    rows = [*zip(*(column.tolist() for column in columns.values()), strict=True)]
    assert [row[:6] for row in rows] == TABLE
    assert {row[6:9] for row in rows} == {(-1, False, -1)}  # no model said it
    times = [call.nanoseconds for call in Trace.open(file)]
    assert [row[9] for row in rows] == [times[row[0]] for row in rows]
    empty = Trace(INFO).to_numpy()
    assert {name: str(column.dtype) for name, column in empty.items()} == COLUMNS
    assert all(len(column) == 0 for column in empty.values())


def test_a_table_of_pandas_has_the_same_columns(file):
    pandas = pytest.importorskip("pandas")
    table = Trace.open(file).to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert {name: str(dtype) for name, dtype in table.dtypes.items()} == COLUMNS
    assert [row[:6] for row in table.itertuples(index=False, name=None)] == TABLE


def test_without_pandas_one_line_names_the_extra(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("mlx_moeflux[pandas]"))):
        Trace.open(file).to_pandas()


def test_a_table_says_what_was_guessed_and_read_ahead(tmp_path):
    one = np.ones((1, 2), np.float32)
    with TraceWriter(tmp_path / "a", INFO) as writer:
        for event in (
            Chosen(3, 0, np.array([[1, 2]], np.uint32), one),
            Guess(5, (7, 9)),
            PrefetchStart(5, 7, 0),
            PrefetchStart(5, 8, 1),
            PrefetchStart(5, 4, 1),
            Chosen(5, 0, np.array([[7, 8], [4, 9], [3, 300]], np.uint32), np.ones((3, 2))),
            PrefetchDrop(5, 4, 1),
            Chosen(3, 1, np.array([[7, 8]], np.uint32), one),
            Chosen(5, 3, np.array([[7, 8]], np.uint32), one),  # nothing was guessed for it
        ):
            writer(event)
    table = Trace.open(tmp_path / "a").to_numpy()
    rows = zip(
        *(table[name].tolist() for name in ("call", "expert", "guessed", "read_ahead")), strict=True
    )
    assert [*rows] == [
        (0, 1, False, False), (0, 2, False, False),
        (1, 7, True, True), (1, 8, False, True), (1, 4, False, False), (1, 9, True, False),
        (1, 3, False, False), (2, 7, False, False), (2, 8, False, False),
        (3, 7, False, False), (3, 8, False, False),
    ]  # fmt: skip


def test_files_of_version_1_are_read(file):
    """They have no record of rows."""
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"version":2', b'"version":1'))
    trace = Trace.open(file)
    assert [call.rows for call in trace] == [None, None]
    assert (trace.to_numpy()["sequence"] == -1).all()
    assert [row[:6] for row in zip(*trace.to_numpy().values(), strict=True)] == TABLE


def rows_of(trace, layer=0):
    """(sequence, token id, prompt) of the rows of a layer that are no padding."""
    found = []
    for call in trace:
        if call.layer == layer:
            real = call.ids[:, 0] < trace.info.num_experts
            assert len(call.rows.token_ids) == len(call.ids)
            found += zip(*(part[real].tolist() for part in call.rows), strict=True)
    return found


def test_rows_have_the_sequence_the_prompt_and_the_token(two_bundled_layers, tmp_path):
    with load_model(two_bundled_layers, expert_memory="50%") as model:
        one, other = model.make_cache(), model.make_cache()
        model(mx.array([[99]]), other)  # before the trace
        with model.trace(tmp_path / "x") as writer:
            mx.eval(model(mx.array([[1, 2, 3]]), one))
            mx.eval(model(mx.array([[4]]), one), model(mx.array([[5]]), other))
            mx.eval(model(mx.array([[6]])), model(mx.array([[7, 8]]), other))
            model.store.experts(0, *random_call(3, num_experts=32, hidden=model.config.hidden_size))
        assert writer.rows is None
    trace = Trace.open(tmp_path / "x")
    assert trace.calls.pop().rows is None  # no model read it
    for layer in range(2):
        assert rows_of(trace, layer) == [
            (0, 1, True), (0, 2, True), (0, 3, True), (0, 4, False), (1, 5, False),
            (2, 6, True), (1, 7, True), (1, 8, True),
        ]  # fmt: skip
    table = trace.to_numpy()
    once = (table["layer"] == 1) & (table["rank"] == 0)
    assert table["sequence"][once].tolist() == [0, 0, 0, 0, 1, 2, 1, 1]
    assert table["token_id"][once].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert table["prompt"][once].tolist() == [True] * 3 + [False] * 2 + [True] * 3


def test_sequences_keep_their_numbers_while_a_batch_changes(two_bundled_layers, tmp_path):
    prompts = [[11, 12, 13, 14], [21, 22], [31, 32, 33]]
    with (
        load_model(two_bundled_layers, expert_memory="50%") as model,
        model.trace(tmp_path / "x"),
        BatchGenerator(model) as batch,
    ):
        ids = batch.insert(prompts[:2], max_tokens=[2, 6])
        text = {uid: [] for uid in range(3)}
        for step in range(20):
            if step == 2:
                ids += batch.insert(prompts[2:], max_tokens=[4])
            for response in batch.next():
                text[response.uid].append(response.token)
    found = rows_of(Trace.open(tmp_path / "x"))
    for number, (prompt, uid) in enumerate(zip(prompts, ids, strict=True)):
        mine = [(token, of_prompt) for sequence, token, of_prompt in found if sequence == number]
        assert mine == [(t, True) for t in prompt] + [(t, False) for t in text[uid][:-1]]


def test_padding_of_a_batch_has_no_row(two_bundled_layers, tmp_path):
    with load_model(two_bundled_layers) as model, model.trace(tmp_path / "x"):
        cache = model.make_cache()
        for entry in cache:
            entry.prepare(left_padding=[0, 2])
        mx.eval(model(mx.array([[1, 2, 3], [0, 0, 4]]), cache))
        for entry in cache:
            entry.filter([1])
        mx.eval(model(mx.array([[5]]), cache))
    trace = Trace.open(tmp_path / "x")
    assert rows_of(trace, 1) == [
        (0, 1, True),
        (0, 2, True),
        (0, 3, True),
        (1, 4, True),
        (1, 5, False),
    ]
    assert set(trace.to_numpy()["token_id"].tolist()) == {1, 2, 3, 4, 5}


def test_a_trace_prints_as_one_line_whatever_it_holds(file):
    trace = Trace.open(file)
    trace.calls *= 500
    assert repr(trace).startswith("Trace(1500 tokens, 1000 calls, TraceInfo(num_experts=300, ")
    assert len(repr(trace)) < 400
    trace.complete = False
    assert repr(trace).startswith("Trace(1500 tokens, 1000 calls, cut off, ")

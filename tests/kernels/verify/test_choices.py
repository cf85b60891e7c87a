"""Which is faster, a kernel that passed its trial or stock MLX. Oracle: times that a test gives."""

from __future__ import annotations

import functools
import itertools
import json
import warnings

import mlx.core as mx
import pytest

from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.examples import TINY
from mlx_moeflux.kernels.moe import router
from mlx_moeflux.kernels.proof import STEP_ROWS
from mlx_moeflux.kernels.registry import OPERATIONS, Kernels
from mlx_moeflux.kernels.verify import choices, timing, trials, verdicts
from tests.kernels.verify.clock import Clock
from tests.kernels.verify.first_use import LOGITS, another_process, stand_in

FIVE = mx.concatenate([LOGITS, LOGITS])[: STEP_ROWS + 1]
FASTER, SLOWER = 1e-5, 2e-5


def ran(calls, logits=FIVE, **options):
    """Return the implementation that computes another call."""
    calls.clear()
    Kernels().softmax_top_k(logits, k=2, **options)
    return calls[-1]  # a kernel's graph is built before its choice is looked up


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize(
    ("kernel", "stock", "taken"),
    [(SLOWER, FASTER, "reference"), (FASTER, SLOWER, "fused"), (1.05e-5, FASTER, "fused")],
)
def test_the_faster_one_computes_and_is_never_timed_again(calls, monkeypatch, kernel, stock, taken):
    Clock(monkeypatch, kernel=kernel, reference=stock)
    Kernels().softmax_top_k(FIVE, k=2)
    assert ran(calls) == taken
    ((key, entry),) = choices_kept().items()
    assert key.startswith("softmax_top_k=fused ")
    assert entry["stock"] is (taken == "reference")
    assert entry["us"] == {"fused": pytest.approx(1e6 * kernel), "reference": 1e6 * stock}
    another_process(monkeypatch)
    clock = Clock(monkeypatch, kernel=stock, reference=kernel)
    assert ran(calls) == taken
    assert ran(calls, mx.concatenate([FIVE, FIVE[:3]])) == taken  # of 8 rows
    assert not clock.evaluations
    # Others are of another size.
    Kernels().softmax_top_k(mx.concatenate([FIVE, FIVE]), k=2)
    assert clock.evaluations


def choices_kept():
    entries = [
        entry for of in json.loads(verdicts.file().read_text()).values() for entry in of.items()
    ]
    return {key: entry for key, entry in entries if "stock" in entry}


@pytest.mark.usefixtures("on_metal")
def test_steps_are_not_timed(calls, monkeypatch):
    clock = Clock(monkeypatch, kernel=SLOWER, reference=FASTER)
    Kernels().softmax_top_k(FIVE[:-1], k=2)
    assert ran(calls, FIVE[:-1]) == "fused"
    assert not clock.evaluations


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("why", ["virtual", "no folder", "no lock", "busy", "refuses"])
def test_where_no_choice_can_be_kept_the_table_holds(calls, monkeypatch, tmp_path, why):
    stock = FASTER
    if why == "busy":
        stock = itertools.cycle([FASTER, FASTER, FASTER / 2, FASTER / 2]).__next__
    clock = Clock(monkeypatch, kernel=SLOWER, reference=stock, fixed=0)
    if why == "virtual":
        monkeypatch.setattr(verdicts, "is_virtual", lambda: True)
    elif why == "no folder":
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "file"))
    elif why == "no lock":
        monkeypatch.setattr(verdicts, "LOCK_SECONDS", 0.02)
        monkeypatch.setattr(verdicts, "_lock", lambda descriptor: False)
    elif why == "refuses":

        def refuses(*given, **options):
            raise RuntimeError("does not compile")

        monkeypatch.setattr(timing, "seconds_of", refuses)
    Kernels().softmax_top_k(FIVE, k=2)
    assert ran(calls) == "fused"
    (chosen,) = verdicts._known.choices.values()
    assert chosen.reason
    assert not verdicts.file().exists() or not choices_kept()
    timed = len(clock.evaluations)
    assert ran(calls) == "fused"
    assert len(clock.evaluations) == timed  # not again in this process
    # A later one may.
    verdicts.forget()
    monkeypatch.undo()
    assert not verdicts._known.choices


@pytest.mark.usefixtures("on_metal")
def test_a_choice_of_another_process_holds(calls, monkeypatch):
    """It was kept while this one measured."""
    found = {}

    def late():
        if not found:
            found.update(verdicts._known.choices)
            verdicts.choose(key, verdicts.Choice(True, {"fused": 2.0, "reference": 1.0}))
            verdicts._known.choices.clear()
        return SLOWER

    Clock(monkeypatch, kernel=SLOWER, reference=FASTER)
    Kernels().softmax_top_k(FIVE, k=2)
    (key,) = choices_kept()
    verdicts.file().unlink()
    another_process(monkeypatch)
    Clock(monkeypatch, kernel=FASTER, reference=late)
    Kernels().softmax_top_k(FIVE, k=2)
    assert ran(calls) == "reference"
    assert choices_kept()[key]["us"] == {"fused": 2.0, "reference": 1.0}


@pytest.mark.usefixtures("on_metal")
def test_stock_that_is_wrong_is_not_taken_however_fast(calls, monkeypatch):
    right = router.softmax_top_k
    logits = FIVE.astype(mx.bfloat16)

    def wrong(logits, *, k, normalise=True):
        ids, weights = right(logits, k=k, normalise=normalise)
        return ids, weights if logits.dtype == mx.float32 else 3 * weights

    stand_in(monkeypatch, "reference", wrong)
    Clock(monkeypatch, kernel=SLOWER, reference=FASTER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Kernels().softmax_top_k(logits, k=2)
    assert mx.allclose(found[1], right(logits, k=2)[1], atol=1e-6)


@pytest.mark.usefixtures("on_metal")
def test_a_call_that_takes_long_keeps_its_kernel(calls, monkeypatch):
    clock = Clock(monkeypatch, kernel=1.0, reference=0.5)
    Kernels().softmax_top_k(FIVE, k=2)
    assert ran(calls) == "fused"
    assert len(clock.evaluations) == 4
    assert "takes more than" in next(iter(choices_kept().values()))["reason"]


@pytest.mark.usefixtures("on_metal")
def test_a_table_of_the_user_is_taken_as_it_is(calls, monkeypatch, tmp_path):
    clock = Clock(monkeypatch, kernel=SLOWER, reference=FASTER)
    monkeypatch.setenv(dispatch.ENVIRONMENT, str(tmp_path / "mine.json"))
    Kernels().softmax_top_k(FIVE, k=2)
    assert ran(calls) == "fused"
    assert not clock.evaluations


@pytest.mark.usefixtures("on_metal")
def test_ranks_take_the_table_whatever_was_chosen(calls, monkeypatch):
    Clock(monkeypatch, kernel=SLOWER, reference=FASTER)
    alone, of_ranks = Kernels(), Kernels()
    of_ranks.measure_nothing()
    before = alone.identity()
    alone.softmax_top_k(FIVE, k=2)
    assert ran(calls) == "reference"
    calls.clear()
    of_ranks.softmax_top_k(FIVE, k=2)
    assert calls[-1] == "fused"
    # Saved states have another identity.
    assert of_ranks.identity() == before != alone.identity()
    assert alone.names()["softmax_top_k"] == "fused (stock MLX where it was faster)"


@pytest.mark.usefixtures("on_metal")
def test_a_traced_step_is_timed_outside_of_its_trace(calls, monkeypatch):
    clock = Clock(monkeypatch, kernel=SLOWER, reference=FASTER)
    kernels = Kernels()
    kernels.softmax_top_k(FIVE[:-1], k=2)
    step = trials.compiled(lambda x: kernels.softmax_top_k(x, k=2))
    found = step(FIVE)
    assert clock.evaluations
    assert all(map(mx.array_equal, found, router.softmax_top_k(FIVE, k=2)))
    assert calls[-1] == "reference"
    calls.clear()
    step(FIVE)
    assert not calls


def test_caches_take_turns_with_copies(monkeypatch):
    args, kwargs = OPERATIONS["sdpa"].proof.workload("", TINY, 40, mx.bfloat16)
    monkeypatch.setattr(timing, "ROTATED", 5 * sum(array.nbytes for array in args[1:]))
    calls = choices.rotated(OPERATIONS["sdpa"], args, kwargs)
    assert len(calls) == 5
    for (q, *caches), options in calls:
        assert q is args[0]
        assert options.keys() == kwargs.keys()
        assert all(map(mx.array_equal, caches, args[1:]))
        assert all(cache is not array for cache, array in zip(caches, args[1:], strict=True))
    assert len({id(array) for (_, *caches), _ in calls for array in caches}) == 10


def test_a_choice_depends_on_the_length_in_use():
    def sizes(length, room, tokens=40, mask="causal"):
        q, k = mx.zeros((1, 4, tokens, 64)), mx.zeros((1, 2, room, 64))
        options = {"scale": 1.0, "mask": mask, "length": length}
        return choices.sizes(OPERATIONS["sdpa"], (q, k, k), options)

    assert sizes(600, 768) == sizes(600, 4096)
    assert sizes(600, 768)[0] == sizes(1000, 1024, tokens=60)[0]
    assert sizes(600, 768)[1] == 4 * 64 * (4 * 40 + 2 * 2 * 600)
    others = [sizes(1100, 4096), sizes(600, 768, tokens=70), sizes(600, 768, mask=None)]
    assert all(found != sizes(600, 768)[0] for found, _ in others)


TIMED = [name for name, record in OPERATIONS.items() if record.proof.timed]


@pytest.mark.parametrize("name", TIMED)
def test_no_fused_step_computes_what_is_timed(name):
    """On Metal, by the table in the package."""
    record = OPERATIONS[name]
    few = 1 if name in ("sdpa", "norm_rope") else STEP_ROWS
    for tokens in range(1, 40):
        args, kwargs = record.proof.workload("", TINY, tokens, mx.float32)
        assert record.proof.timed(*args, **kwargs) is (tokens > few)
    for fused, other in OPERATIONS.items():
        if name in other.replaces and few > 1:
            assert dispatch.pick(dispatch.rows(fused, "metal"), few + 1) == "reference"


def test_stock_attention_with_many_scores_is_not_timed():
    q, k = mx.zeros((1, 16, 2048, 256), mx.bfloat16), mx.zeros((1, 2, 4096, 256), mx.bfloat16)
    timed = functools.partial(OPERATIONS["sdpa"].proof.timed, q, k, k, scale=1.0, mask="causal")
    assert timed(length=2048)
    assert not timed(length=2049)
    assert not timed(length=None)
    assert not timed(length=mx.array([5]))

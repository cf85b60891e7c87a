"""Oracle: counting stand-ins for implementations and back ends; what was chosen is what ran."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.cli import check, main
from mlx_moeflux.cli.common import stats_table
from mlx_moeflux.errors import InputError, KernelError, ShapeError, UnsupportedError
from mlx_moeflux.kernels import dispatch, examples
from mlx_moeflux.kernels.delta.delta_mixer import delta_mixer
from mlx_moeflux.kernels.moe import router
from mlx_moeflux.kernels.moe.expert_mix import expert_mix
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof, is_prompt
from mlx_moeflux.kernels.registry import OPERATIONS, Kernels, choose_kernels
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.kernels.verify import comparison, failures, stock, verdicts
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.kernels.harness import emulated, launched
from tests.kernels.implementations import IMPLEMENTATIONS

FUSED = [(op, name) for op, implementations in IMPLEMENTATIONS.items() for name in implementations
         if implementations[name].kernels]  # fmt: skip
LOGITS = mx.array([[1.0, 3.0, 2.0, 0.0] * 4] * 3)


@pytest.fixture
def calls(monkeypatch):
    """Names of the implementations of softmax_top_k in the order in which they ran."""
    ran = []
    implementations = dict(IMPLEMENTATIONS["softmax_top_k"])
    for name, implementation in implementations.items():

        def counted(*args, implementation=implementation, name=name, **kwargs):
            ran.append(name)
            return implementation(*args, **kwargs)

        stand_in = replace(implementation, function=counted)
        monkeypatch.setitem(IMPLEMENTATIONS["softmax_top_k"], name, stand_in)
    return ran


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine whose MLX drives no GPU, wherever the test runs."""
    before = launcher.set_backend(launcher.NoBackend())
    yield
    launcher.set_backend(before)


@pytest.fixture
def table(monkeypatch):
    def use(rows):
        monkeypatch.setattr(
            dispatch,
            "table",
            lambda: {"softmax_top_k": {"metal": tuple(dispatch.Row(*r) for r in rows)}},
        )

    return use


def test_the_table_names_forms_that_exist():
    for operation, backends in dispatch.table().items():
        assert set(backends) <= {"cpu", "cuda", "metal"}
        for rows in backends.values():
            assert rows, operation
            known = IMPLEMENTATIONS[operation.partition(" ")[0]]
            assert all(row.name in known for row in rows)
            assert sorted(row.start for row in rows) == [row.start for row in rows]


def halved(x: mx.array, *, k: int) -> mx.array:
    return x / 2


RECORD = {"name": "halved", "reference": halved, "others": {}, "size": None}
PROOF = {
    "example": lambda s, n, x: ((x(n),), {"k": 1}), "workloads": {"": lambda s, n, x: ((), {})},
}  # fmt: skip


def test_a_record_gives_calls_and_the_reference():
    record = Operation(**RECORD, proof=Proof(**PROOF))
    assert list(record.implementations) == ["reference"]
    args, kwargs = record.proof.example_call(mx.bfloat16, tokens=3)
    assert (args[0].shape, args[0].dtype, kwargs) == ((3,), mx.bfloat16, {"k": 1})
    assert [what for what, _ in record.proof.small_cases()] == ["several tokens", "one token"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        *[(name, f"argument: '{name}'") for name in (*RECORD, *PROOF, "proof")],
        ({"tokens": {"y": 0}}, "'halved' is wrong: 'y' is no argument"),
        ({"proof": {"shrunk": ("y",)}}, "'y' is no argument"),
        ({"others": {"fused": Implementation(lambda x: x)}}, "'fused' takes no 'k'"),
        ({"others": {"reference": Implementation(halved)}}, "another implementation is called"),
        ({"replaces": ("project",)}, "takes no steps"),
        ({"reference": lambda x, *, k, steps=None: x}, "replaces nothing"),
        ({"composed": True}, "replaces nothing and is composed"),
        ({"proof": {"by_rows": True}}, "rows have no axis"),
        ({"proof": {"apart": True}}, "tokens have no positions"),
        ({"proof": {"workloads": {}}}, "no workload"),
        ({"proof": {"workloads": {"64": PROOF["example"]}}}, "kinds have no names"),
        ({"proof": {"timed": is_prompt}, "equal_rows": False}, "timed and may not be taken"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_incomplete_record_is_an_error(change, fault):
    left_out, changed = (change, {}) if isinstance(change, str) else ("", change)

    def declared() -> Operation:
        given = RECORD | changed
        proof = PROOF | given.pop("proof", {})
        given["proof"] = Proof(**{n: v for n, v in proof.items() if n != left_out})
        return Operation(**{n: v for n, v in given.items() if n != left_out})

    with pytest.raises(TypeError, match=fault):
        declared()


@pytest.mark.usefixtures("no_gpu")
def test_auto_launches_nothing_without_a_gpu(calls):
    kernels = Kernels()
    kernels.softmax_top_k(LOGITS, k=2)
    assert calls == ["blas"]
    assert kernels.names()["gated_delta"] == "reference"
    assert not any("fused" in name for name in kernels.names().values())


def test_auto_takes_what_the_table_says(calls, table):
    table([("fused", 2), ("reference", 4)])
    kernels = Kernels()
    with emulated():
        assert kernels.names()["softmax_top_k"] == "reference+fused@2+reference@4"
        for n in (1, 2, 3, 4):
            kernels.softmax_top_k(mx.tile(LOGITS[:1], (n, 1)), k=2)
    assert calls == ["reference", "fused", "fused", "reference"]


def test_auto_falls_back_where_a_kernel_refuses_the_shape(calls, table):
    table([("fused", 1)])
    with emulated():
        kernels = Kernels()
        for _ in range(2):
            ids, _ = kernels.softmax_top_k(mx.random.normal((2, 600)), k=2)
        assert calls == ["fused", "reference"] * 2
        kernels.softmax_top_k(LOGITS, k=2)
    assert ids.shape == (2, 2)
    (line,) = kernels.fallbacks()
    assert line.startswith("softmax_top_k=fused fell back to the reference 2 times: ")
    assert "up to 16 of up to 512" in line


def test_wrong_shapes_are_no_fallback(monkeypatch, table):
    def refuses(logits, *, k, normalise=True):
        raise ShapeError("logits have no rows.")

    table([("fused", 1)])
    for name in ("fused", "reference"):
        stand_in = replace(IMPLEMENTATIONS["softmax_top_k"][name], function=refuses)
        monkeypatch.setitem(IMPLEMENTATIONS["softmax_top_k"], name, stand_in)
    kernels = Kernels()
    with emulated(), pytest.raises(ShapeError, match="no rows"):
        kernels.softmax_top_k(LOGITS, k=2)
    assert kernels.fallbacks() == []


def test_what_was_chosen_is_chosen_anew_when_a_kernel_failed(calls, table):
    table([("fused", 1)])
    kernels = Kernels()
    with emulated():
        kernels.softmax_top_k(LOGITS, k=2)
        with pytest.raises(KernelError, match="softmax_top_k"), failures.reported():
            raise RuntimeError("Unable to build metal library: moeflux_softmax_top_k")
        kernels.softmax_top_k(LOGITS, k=2)
        failures.forget()
        kernels.softmax_top_k(LOGITS, k=2)
    kernels.softmax_top_k(LOGITS, k=2)
    assert calls[:3] == ["fused", "reference", "fused"]
    assert calls[3] != "fused"
    assert kernels.fallbacks() == []


def test_one_call_may_ask_for_another_form(calls, table):
    table([("fused", 1)])
    kernels = Kernels({"softmax_top_k": "reference"})
    with emulated():
        kernels.softmax_top_k(LOGITS, k=2, use_kernel="fused")
        kernels.softmax_top_k(LOGITS, k=2, use_kernel="auto")
        kernels.softmax_top_k(LOGITS, k=2)
        with pytest.raises(InputError, match="no implementation 'fast'"):
            kernels.softmax_top_k(LOGITS, k=2, use_kernel="fast")
    assert calls == ["fused", "fused", "reference"]


def test_a_forced_kernel_does_not_fall_back(calls):
    with emulated():
        kernels = choose_kernels({"softmax_top_k": "fused"})
        with pytest.raises(ShapeError, match="up to 16 of up to 512"):
            kernels.softmax_top_k(mx.random.normal((2, 600)), k=2)


@pytest.mark.usefixtures("no_gpu")
def test_a_forced_kernel_without_a_gpu_is_one_line():
    with pytest.raises(UnsupportedError, match="softmax_top_k=fused needs a GPU") as caught:
        choose_kernels({"softmax_top_k": "fused"})
    assert "\n" not in str(caught.value)
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        Kernels().softmax_top_k(LOGITS, k=2, use_kernel="fused")
    with pytest.raises(UnsupportedError, match="kernel 'softmax_top_k' needs a GPU"):
        router.softmax_top_k_fused(LOGITS, k=2)


def test_environment_then_argument(monkeypatch):
    monkeypatch.setenv("MOEFLUX_KERNELS", "reference, softmax_top_k=blas,sdpa=auto")
    kernels = choose_kernels({"moe_combine": "auto"})
    assert kernels.softmax_top_k.choice == "blas"
    assert kernels.sdpa.choice == kernels.moe_combine.choice == "auto"
    assert kernels.norm_rope.choice == "reference"
    assert choose_kernels("reference").sdpa.choice == "reference"
    assert choose_kernels("auto").gated_delta.choice == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "'fast' is neither"),
        ("sdpa=fast", "'sdpa' has no implementation 'fast'; there are auto, reference"),
        ("conv=reference", "no operation is called 'conv'"),
    ],
)
def test_unknown_names_are_errors(monkeypatch, text, message):
    with pytest.raises(InputError, match=message):
        choose_kernels(text)
    monkeypatch.setenv("MOEFLUX_KERNELS", text)
    with pytest.raises(InputError, match=message):
        choose_kernels()


def test_a_callable_is_checked_and_used():
    def mine(logits, *, k, normalise=True):
        ids, weights = router.softmax_top_k(logits, k=k, normalise=normalise)
        return ids, 2 * weights

    kernels = choose_kernels({"softmax_top_k": mine}, check_values=False)
    assert kernels.names()["softmax_top_k"] == "mine"
    assert kernels.softmax_top_k(LOGITS, k=2)[1].sum().item() == pytest.approx(6)
    with pytest.raises(
        InputError, match=r"'softmax_top_k' differs .* by 1 of .*, more than .*check_values=False"
    ):
        choose_kernels({"softmax_top_k": mine})
    with pytest.raises(ShapeError, match="returns"):
        choose_kernels({"softmax_top_k": lambda logits, *, k: logits})
    called = (
        r"fails on a small case \(several tokens\): TypeError.* reference: logits, k, normalise"
    )
    with pytest.raises(ShapeError, match=called):
        choose_kernels({"softmax_top_k": lambda logits: logits})
    with pytest.raises(ShapeError, match=r"reference: .*, gate, up, down, score\.$"):
        choose_kernels({"add_shared": lambda residual: residual})


def test_a_callable_gets_no_steps():
    def mine(qkv, z, a, b, **options):
        calls.append("steps" in options)
        return delta_mixer(qkv, z, a, b, **options)

    calls = []
    with load_model(BUNDLED_MODEL, kernels={"delta_mixer": mine}) as model:
        calls.clear()
        mx.eval(model(mx.array([[5, 6, 7]])))
    assert calls
    assert not any(calls)


def scaled(reference, factor):
    """The reference with every float times `factor`; what is chosen alone is one too high."""

    def scale(value):
        if isinstance(value, mx.array) and value.dtype == mx.int32:
            return value + 1
        if isinstance(value, mx.array):
            return value * factor if mx.issubdtype(value.dtype, mx.floating) else value
        return tuple(map(scale, value)) if isinstance(value, (tuple, list)) else value

    return lambda *args, **kwargs: scale(reference(*args, **kwargs))


@pytest.mark.parametrize("operation", sorted(IMPLEMENTATIONS))
def test_values_of_a_callable_are_those_of_the_reference(operation):
    reference = IMPLEMENTATIONS[operation]["reference"]
    right = choose_kernels({operation: lambda *args, **kwargs: reference(*args, **kwargs)})
    assert right.names()[operation] != "auto"
    for factor in (1.01, float("nan")):
        wrong = {operation: scaled(reference, mx.array(factor, mx.float32))}
        with pytest.raises(InputError, match=f"'{operation}' differs"):
            choose_kernels(wrong)
        choose_kernels(wrong, check_values=False)


def test_an_error_of_a_callable_is_named():
    def broken(*args, **kwargs):
        raise ZeroDivisionError("of mine")

    with pytest.raises(
        ShapeError, match=r"'sdpa' fails on a small case \(.*\): ZeroDivisionError: of mine"
    ):
        choose_kernels({"sdpa": broken})


@pytest.mark.parametrize(
    ("ignored", "case"),
    [
        ({"start": None}, "several tokens, mask causal, start, gate"),
        ({"gate": None}, "several tokens, mask causal, start, gate"),
        ({"tail": None}, "one token, mask None, start, tail, gate, length on the device"),
        ({"mask": "causal"}, "several tokens, mask an array"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_an_attention_that_ignores_an_argument_is_refused(ignored, case):
    reference = IMPLEMENTATIONS["sdpa"]["reference"]

    def mine(q, k, v, *, mask, **options):
        given = options | {"mask": mask}
        if "mask" not in ignored or isinstance(mask, mx.array):
            given |= ignored
        return reference(q, k, v, **given)

    with pytest.raises(InputError, match=f"differs from .* small case .*{case}"):
        choose_kernels({"sdpa": mine})


@pytest.mark.parametrize("ignored", [{"gate": None}, {"length": None}, {"mask": None}])
def test_an_attention_that_leaves_starts_to_the_reference_is_compared_without_them(ignored):
    reference = IMPLEMENTATIONS["sdpa"]["reference"]

    def mine(q, k, v, *, start=None, tail=None, **options):
        if start is not None or tail is not None:
            return reference(q, k, v, start=start, tail=tail, **options)
        return reference(q, k, v, **options | ignored)

    with pytest.raises(InputError, match=r"differs .* small case \(several tokens, mask causal"):
        choose_kernels({"sdpa": mine})


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_an_attention_may_return_any_number_for_padding_but_no_nan(value):
    reference = IMPLEMENTATIONS["sdpa"]["reference"]

    def mine(q, k, v, *, start=None, length=None, **options):
        y = reference(q, k, v, start=start, length=length, **options)
        if start is None:
            return y
        query = mx.array(length) - q.shape[2] + mx.arange(q.shape[2])
        return mx.where((query < start.reshape(-1, 1))[:, None, :, None], value, y)

    if value == 0.0:
        choose_kernels({"sdpa": mine})
    else:
        with pytest.raises(InputError, match=r"by NaN, .* \(several tokens, mask causal, start\)"):
            choose_kernels({"sdpa": mine})


def test_attention_refuses_what_contradicts_itself():
    q = mx.zeros((1, 2, 1, 8))
    mask, length = mx.ones((1, 1, 1, 1), mx.bool_), mx.array([1])
    sdpa = Kernels({"sdpa": "reference"}).sdpa
    for options in (
        {"mask": mask, "start": mx.array([0])},
        {"mask": mask, "length": length},
        {"mask": None, "tail": (q, q)},
    ):
        with pytest.raises(ShapeError, match="sdpa: a "):
            sdpa(q, q, q, scale=1.0, **options)


def test_training_takes_references(calls, table):
    table([("fused", 1)])
    with emulated():
        for kernels in (Kernels(), Kernels({"softmax_top_k": "fused"})):
            kernels.references_only()
            kernels.softmax_top_k(LOGITS, k=2)
            kernels.references_only(False)
            kernels.softmax_top_k(LOGITS, k=2)
    assert calls == ["reference", "fused"] * 2


# Emulated, each compiles kernels of its own; test_every_argument.py has their examples by default.
@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize(("operation", "name"), FUSED)
def test_every_kernel_passes_its_trial_on_an_example(operation, name, dtype):
    implementation = IMPLEMENTATIONS[operation][name].function
    verdict = comparison.on_example(OPERATIONS[operation], implementation, dtype)
    assert verdict.ok, verdict


FORMS = [
    pytest.param(
        operation, name, form, id=f"{operation}-{name}-{form}",
        # Emulated, a form takes seconds.
        marks=[] if (name, form) == ("grouped", "iq4_nl") else [pytest.mark.slow],
    )
    for operation, name in FUSED
    for form in OPERATIONS[operation].proof.forms
]  # fmt: skip


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("operation", "name", "form"), FORMS)
def test_every_form_of_an_example_passes_its_trial(operation, name, form):
    implementation = IMPLEMENTATIONS[operation][name].function
    with launched() as names:
        verdict = comparison.on_example(OPERATIONS[operation], implementation, mx.bfloat16, form)
    assert verdict.ok, verdict
    assert any("block" in name for name in names)


def test_every_mode_of_blocks_that_a_kernel_reads_is_a_form_of_experts():
    forms = OPERATIONS["expert_mix"].proof.forms
    assert list(forms) == list(BLOCK_MODES)
    for mode in forms:
        (*_, bank), _ = OPERATIONS["expert_mix"].proof.example_call(mx.bfloat16, form=mode)
        assert {part.spec.mode for part in (bank.gate, bank.up, bank.down)} == {mode}


def test_random_blocks_have_numbers_of_one_size():
    for mode, block in BLOCK_MODES.items():
        values = np.array(block.decode(examples.in_blocks(mode, 3, 64, 512), mx))
        assert values.shape == (3, 64, 512)
        assert 0.8 < np.sqrt((values**2).mean() * 512) < 1.3, mode


# ---- mlx_moeflux check


def test_check_prints_a_line_for_every_kernel(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))
    with emulated():
        assert main(["check", "--operation", "softmax_top_k", "--dtype", "float16"]) == 0
    kernel, reference = sorted(capsys.readouterr().out.splitlines()[1:])
    assert "fused" in kernel
    assert "reference" in reference
    assert all("float16" in line and "right" in line for line in (kernel, reference))


@pytest.mark.usefixtures("no_gpu")
def test_check_without_a_gpu_says_so(capsys, monkeypatch):
    found = stock.Worst("gather_mm", 1e-7, "3 of [7, 2, 2]")
    monkeypatch.setattr(stock, "worst", lambda dtype: [found])
    assert main(["check", "--dtype", "float32", "--operation", "stock"]) == 0
    assert capsys.readouterr().out.count("right") == 1
    assert main(["check", "--dtype", "float32", "--operation", "kernels"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len(FUSED) + len(IMPLEMENTATIONS)
    assert all(line.endswith("no GPU") for line in lines)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("error", [1.0, float("inf"), float("nan")])
def test_check_fails_when_a_stock_operation_is_wrong(capsys, monkeypatch, error):
    found = stock.Worst("gather_mm", error, "124 of [5, 24, 40]")
    monkeypatch.setattr(stock, "worst", lambda dtype: [found])
    assert main(["check", "--dtype", "bfloat16", "--operation", "stock"]) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("gather_mm"))
    assert "wrong" in line
    assert "124 of [5, 24, 40]" in line


def test_check_fails_when_a_kernel_does(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))

    def wrong(logits, *, k, normalise=True):
        return router.softmax_top_k(logits, k=k)[0], mx.zeros((logits.shape[0], k))

    stand_in = replace(IMPLEMENTATIONS["softmax_top_k"]["fused"], function=wrong)
    monkeypatch.setitem(IMPLEMENTATIONS["softmax_top_k"], "fused", stand_in)
    with emulated():
        assert main(["check", "--operation", "softmax_top_k", "--dtype", "float32"]) == 1
    assert "wrong" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["q2_k", "iq4_nl"])
def test_check_fails_when_a_kernel_does_in_one_form(capsys, monkeypatch, tmp_path, mode):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path))

    def wrong(x, slots, weights, bank, *, initial=None):
        y = expert_mix(x, slots, weights, bank, initial=initial)
        return 1.2 * y if bank.gate.spec.mode == mode else y

    every = IMPLEMENTATIONS["expert_mix"]
    for name in ("pairs", "rows", "grouped"):
        monkeypatch.setitem(every, name, replace(every[name], function=wrong))
    with emulated():
        assert main(["check", "--operation", "expert_mix", "--dtype", "float32"]) == 1
    found = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[3] for line in found] == ["right", "wrong", "wrong", "wrong"]
    assert all(line[4].startswith(f"{mode}: error 0.") for line in found[1:])


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("softmax", "did you mean softmax_top_k?"),
        ("kernel", "did you mean kernels?"),
        ("moe_combined", "did you mean moe_combine or "),
        ("?", "'mlx_moeflux check' names all."),
    ],
)
def test_an_operation_that_is_not_there_is_one_whole_line(capsys, name, mend):
    """However many operations there are."""
    assert main(["check", "--operation", name]) == 1
    assert f"error: no operation is called '{name}'; {mend}" in capsys.readouterr().err


@pytest.mark.slow
def test_check_runs_its_parts_in_processes(capsys):
    assert main(["check"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for operation, dtypes in ("matmul", 1), ("softmax_top_k", 2):
        found = [
            d for d in check.DTYPES for words in lines if words[:1] == [operation] and d in words
        ]
        assert found == [d for d in check.DTYPES for _ in range(dtypes)]


def test_check_says_which_process_ended_and_how(capsys):
    assert check._in_processes([("--dtype", "float64"), ("--help",)]) == 1
    assert "usage" in capsys.readouterr().out
    code = "import os; print('begun', flush=True); os.kill(os.getpid(), 9)"
    assert check._in_processes([("--dtype", "float16")], (sys.executable, "-c", code)) == 1
    assert "begun\n\ncheck --dtype float16 was ended by signal 9" in capsys.readouterr().out


def test_examples_have_the_asked_dtype():
    (logits,), _ = OPERATIONS["softmax_top_k"].proof.example_call(mx.bfloat16)
    assert logits.dtype == mx.bfloat16


MARK = ": stock MLX promises no equal bits at any memory for experts"


@pytest.mark.parametrize(
    ("backend", "kernels", "marks"),
    [
        ("cuda", {"expert_mix": "reference"}, ["expert_mix=reference is chosen" + MARK]),
        ("metal", "reference", ["expert_mix=reference is chosen" + MARK]),
        ("cuda", "reference,expert_mix=pairs", []),
        ("metal", None, []),
        (None, "reference", []),
    ],
)
def test_experts_by_stock_mlx_are_marked_on_a_gpu(backend, kernels, marks):
    with emulated(name=backend) if backend else nullcontext():
        with load_model(BUNDLED_MODEL, expert_memory="50%", kernels=kernels) as model:
            assert model.store.stats().lossy == marks
            assert model.store.stats().snapshot().lossy == marks
            table = stats_table(model.store.stats(), model)
        assert table.count("lossy: ") == len(marks)


def test_experts_kernels_that_gave_way_are_marked_when_they_do(monkeypatch):
    with (
        emulated(name="cuda"),
        load_model(BUNDLED_MODEL, expert_memory="50%") as model,
    ):
        stats = model.store.stats()
        stats.mark_lossy("kv_bits 8")
        assert stats.lossy == ["kv_bits 8"]
        try:
            with pytest.raises(KernelError), failures.reported():
                raise RuntimeError("Unable to load kernel moeflux_expert_rows_inner_8_float")
            assert stats.lossy == ["kv_bits 8", "expert_mix=rows failed on this GPU" + MARK]
        finally:
            failures.forget()
        monkeypatch.setattr(launcher.backend(), "checks_first_use", True)
        keys = ["expert_mix=pairs 1f", "expert_mix=pairs 2a", "expert_mix=reference 3", "sdpa=a 4"]
        monkeypatch.setattr(verdicts, "refused", lambda: keys)
        assert stats.lossy == ["kv_bits 8", "expert_mix=pairs failed on this GPU" + MARK]
        monkeypatch.setattr(launcher.backend(), "checks_first_use", False)
        rows = {"expert_mix": {"cuda": (dispatch.Row("pairs"), dispatch.Row("reference", 9))}}
        monkeypatch.setattr(dispatch, "table", lambda: rows)
        expected = "expert_mix=reference is in the table of kernels" + MARK
        assert stats.lossy == ["kv_bits 8", expected]

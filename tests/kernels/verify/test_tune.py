"""Oracle: rows made by hand from times made by hand; every workload's own reference."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.kernels import dispatch
from mlx_moeflux.kernels.examples import Sizes
from mlx_moeflux.kernels.nested import arrays
from mlx_moeflux.kernels.registry import OPERATIONS, Kernels, choose_kernels
from mlx_moeflux.kernels.verify import timing, tune
from mlx_moeflux.kernels.verify.comparison import largest_error
from mlx_moeflux.loading import BUNDLED_MODEL, load
from mlx_moeflux.measure import model_calls
from tests.kernels.harness import emulated
from tests.kernels.implementations import IMPLEMENTATIONS

TINY = Sizes(
    C=128, F=64, E=16, K=2, Hq=4, Hkv=2, Dh=64, Dhv=64, Hk=2, Hv=4, Dk=32, Dv=32, heads=2, latent=64
)  # fmt: skip


@pytest.fixture
def own_table(monkeypatch, tmp_path):
    """A function that puts a table in the place of the shipped one."""
    file = tmp_path / "dispatch.json"

    def use(table):
        file.write_text(json.dumps(table))
        monkeypatch.setenv(dispatch.ENVIRONMENT, str(file))
        dispatch.table.cache_clear()
        return file

    yield use
    monkeypatch.undo()
    dispatch.table.cache_clear()


def test_a_form_takes_over_where_it_is_faster_by_the_margin():
    times = {
        1: {"reference": 10e-6, "a": 9.5e-6},
        2: {"reference": 10e-6, "a": 8e-6, "b": 7.9e-6},
        4: {"reference": 10e-6, "a": 8e-6, "b": 7.6e-6},
        8: {"reference": 10e-6, "b": 7e-6},
        16: {"reference": 5e-6, "b": 7e-6},
    }
    rounds = {n: {name: [t] * timing.ROUNDS for name, t in of.items()} for n, of in times.items()}
    rounds[8]["a"] = [1e-6] * (timing.ROUNDS - 1) + [6.9e-6]  # not in every round
    found = tune.rows(rounds)
    assert [(r["form"], r["from"]) for r in found] == [
        ("reference", 1), ("b", 2), ("reference", 16)
    ]  # fmt: skip
    assert found[1]["us"] == {"a": 8.0, "b": 7.9, "reference": 10.0}


@pytest.mark.parametrize("name", ["cuda", "metal"])
def test_stock_mlx_is_never_chosen_for_experts_on_a_gpu(name, monkeypatch):
    tried = []

    def times(implementations, calls, *, report):
        tried.append(set(implementations))
        return {
            implementation: [1e-6 if implementation == "reference" else 1e-3] * timing.ROUNDS
            for implementation in implementations
        }

    monkeypatch.setattr(timing, "times", times)
    with emulated(name=name):
        for operation in ("expert_mix", "moe_combine"):
            tune.measure(operation, [(1, [])], print)
    assert tried[0] >= {"pairs", "grouped"}
    assert "reference" not in tried[0]
    assert "reference" in tried[1]
    tune.measure("expert_mix", [(1, [])], print)
    assert "reference" in tried[2]


SOME = [
    name if name.startswith("delta") else pytest.param(name, marks=pytest.mark.slow)
    for name in tune.WORKLOADS
]


@pytest.mark.parametrize("name", SOME)
def test_forms_take_the_workloads(name):
    operation, _, kind = name.partition(" ")
    args, kwargs = OPERATIONS[operation].proof.workload(kind, TINY, 2, mx.float32)
    implementations = IMPLEMENTATIONS[name.partition(" ")[0]]
    expected = arrays(implementations["reference"](*args, **kwargs))
    once = {"partly_written": ("h", "order", "out"), "schedules": [("forward", 0)]}
    with emulated(**once):
        for implementation, call in implementations.items():
            if kind == "blocks" and call.on_cpu:  # the CPU keeps no blocks of the trunk
                with pytest.raises(UnsupportedError, match="BLAS cannot read"):
                    call(*args, **kwargs)
                continue
            assert largest_error(call(*args, **kwargs), expected) <= 1e-4, implementation


def test_the_command_writes_a_table_that_is_used(own_table, capsys, tmp_path, monkeypatch):
    file = own_table({"delta_mixer": {"cpu": [{"form": "reference", "from": 1}],
                                      "cuda": [{"form": "fused", "from": 1}]}})  # fmt: skip
    monkeypatch.setattr(tune, "TOKENS", {"cpu": (1, 3)})
    monkeypatch.setattr(tune, "SMALL", TINY)
    assert main(["tune", "--kernels", "delta_mixer", "--out", str(tmp_path / "new.json")]) == 0
    new = json.loads((tmp_path / "new.json").read_text())
    row = new["delta_mixer"]["cpu"][0]
    assert row["from"] == 1
    assert {"reference", "blas"} == row["us"].keys()
    assert all(t > 0 for t in row["us"].values())
    assert new["delta_mixer"]["cuda"] == [{"form": "fused", "from": 1}]
    assert "MLX" in new["measured"]["cpu"]
    assert "delta_mixer" in capsys.readouterr().out
    own_table(new | {"delta_mixer": {"cpu": [{"form": "blas", "from": 7}]}})
    assert Kernels().names()["delta_mixer"] == "reference+blas@7"
    file.write_text("{")
    dispatch.table.cache_clear()
    with pytest.raises(InputError, match="wants a table of kernels"):
        Kernels().names()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine where nothing was measured yet."""
    monkeypatch.delenv(dispatch.ENVIRONMENT)
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "cache"))
    dispatch.table.cache_clear()
    yield
    monkeypatch.undo()
    dispatch.table.cache_clear()


@pytest.mark.usefixtures("machine")
def test_a_models_own_calls_are_measured_and_the_table_kept(monkeypatch, capsys):
    monkeypatch.setattr(model_calls.calls_of, "__defaults__", ((1, 3),))
    monkeypatch.setattr(timing, "ROUNDS", 1)
    assert main(["tune", "--kernels", "--model", str(BUNDLED_MODEL), "--budgets", "50%"]) == 0
    assert str(dispatch.kept_file()) in capsys.readouterr().out
    dispatch.table.cache_clear()
    new, shipped = dispatch.read(), json.loads(dispatch.TABLE.read_text())
    for name in ("project", "norm_rope", "sdpa 64", "expert_mix", "delta_mixer", "add_shared"):
        assert new[name]["cpu"][0]["us"].keys() > {"reference"}, name
        assert new[name].get("cuda") == shipped[name].get("cuda")
    assert new["gated_delta"] == shipped["gated_delta"]  # which the model does not call
    # Damaged, it is as if there were none.
    dispatch.kept_file().write_text("{")
    assert dispatch.read() == shipped


def test_the_calls_of_a_model_are_its_own(monkeypatch):
    model, _ = load(BUNDLED_MODEL)
    calls = model_calls.calls_of(model, (1, 5))
    before = model(mx.array([[1, 2, 3]]))
    assert set(calls["sdpa 64"]) == {1, 5}
    (q, *_), _ = calls["sdpa 64"][5][0]
    assert q.shape[2] == 5
    assert {x.shape[-1] for (x, *_), _ in calls["moe_step"][1]} == {model.config.hidden_size}
    assert model.compile_steps is None
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), before)


def test_a_table_that_names_a_form_that_is_gone_is_one_line(own_table):
    own_table({"gated_delta": {"cuda": [{"form": "fused", "from": 1}]}})
    words = "'gated_delta' has no implementation 'fused'; write the table anew"
    with pytest.raises(InputError, match=words):
        choose_kernels()


def test_what_cannot_be_measured_is_one_line(capsys):
    assert main(["tune", "--kernels", "rope"]) == 1
    assert "'rope' cannot be measured" in capsys.readouterr().err
    with pytest.raises(InputError, match="cannot be written"):
        tune.write({}, "/no/such/place/dispatch.json")


def test_a_kind_of_call_has_rows_of_its_own(own_table):
    own_table({
        "sdpa": {"cpu": [{"form": "fused", "from": 1}]},
        "sdpa 64": {"cpu": [{"form": "fused", "from": 1}, {"form": "reference", "from": 9}]},
    })  # fmt: skip
    op = Kernels().sdpa
    assert op.active() == "fused (64: fused+reference@9)"
    fused, reference = IMPLEMENTATIONS["sdpa"]["fused"], IMPLEMENTATIONS["sdpa"]["reference"]
    for width, T, implementation in ((64, 8, fused), (64, 9, reference), (32, 9, fused)):
        q = mx.zeros((1, 2, T, width))
        assert op.implementation(q, q, q, scale=1.0, mask=None) is implementation

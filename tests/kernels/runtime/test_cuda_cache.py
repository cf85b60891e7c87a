"""Oracle: the kernel's own text, which the files must give back word for word; a compiler and an
MLX of this file, which do what is known; on a GPU MLX itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_moeflux import user_cache
from mlx_moeflux.kernels.runtime import device, launcher
from mlx_moeflux.kernels.runtime.cuda import cache as cuda_cache
from mlx_moeflux.kernels.runtime.cuda import module as cuda_module
from mlx_moeflux.kernels.runtime.cuda import nvrtc
from mlx_moeflux.kernels.runtime.cuda.process_folder import ProcessFolder
from tests.kernels.harness import scratch_kernel

BODY = """
    if (thread_position_in_grid.x < uint(x_shape[0])) y[thread_position_in_grid.x] = T(x[0]);
"""


class Compiler:
    """A compiler whose machine code says what it was made of."""

    version, architecture = "12.9", "sm_90a"

    def __init__(self):
        self.texts, self.error = [], None

    def compile(self, text, function):
        self.texts.append(text)
        if self.error:
            raise self.error
        return f"code of {text}".encode(), "_Z" + function.replace("::", "_")


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
def built(monkeypatch):
    """What MLX is asked to build; launching it returns nothing."""
    asked = []

    def cuda_kernel(**keywords):
        asked.append(keywords)
        return lambda **call: []

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    return asked


@pytest.fixture
def folder(monkeypatch, tmp_path):
    if not user_cache.is_private(tmp_path):
        pytest.skip("the temporary folder lies below one that others may rename")
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / "own"))
    return user_cache.private(cuda_cache.FOLDER, "here")


@pytest.fixture
def on_cuda(folder, built, compiler):
    """Opens the back end anew, as another process would; nothing is launched for good."""
    before = launcher.set_backend(None)
    processes = []

    def opened(folder=folder, modules=folder):
        backend = launcher.CudaBackend()
        if modules is not None:
            processes.append(modules := ProcessFolder(modules))
        backend.cache = cuda_cache.Cache(folder, modules, compiler)
        launcher.set_backend(backend)
        return backend.cache

    yield opened
    launcher.set_backend(before)
    for process in processes:
        process.close()


def kept(folder):
    """Name -> content of the files that processes share."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}


def make_kernel():
    return scratch_kernel("cuda_cache", inputs=("x", "mask"), outputs=("y",), body=BODY)


def launch(kernel, dtype=mx.float32, **template):
    kernel(
        mx.zeros(8, dtype=dtype),
        mx.zeros(8, dtype=mx.bool_),
        template={"T": mx.float32, **template},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
    )


def included(text):
    (path,) = re.findall(r'^#include "(.*)"$', text, re.M)
    return Path(path)


# ---- Texts


def texts(kernel, constants="using T = float;\n"):
    """header, body with template arguments in front, as files should hold them."""
    header, body = kernel.cuda_text()
    return header, constants + body


def test_mlx_is_handed_files_to_include(on_cuda, built, folder):
    on_cuda()
    kernel = make_kernel()
    launch(kernel, N=3, B=True, U=mx.bfloat16)
    (asked,) = built
    header, body = texts(
        kernel,
        "using T = float;\nconstexpr int N = 3;\nconstexpr bool B = true;\n"
        "using U = __nv_bfloat16;\n",
    )
    assert included(asked["header"]).read_text() == header
    assert included(asked["source"]).read_text() == body
    assert included(asked["source"]).parent == folder
    assert asked["input_names"] == ["x", "mask"]
    # MLX looks for the names of shapes in what it is handed.
    assert "x_shape" in asked["source"]
    assert "mask_shape" not in asked["source"]


def test_a_launch_asks_for_the_memory_that_its_arrays_take(on_cuda, built):
    on_cuda()
    kernel = scratch_kernel(
        "cuda_cache",
        inputs=("x", "mask"),
        outputs=("y",),
        body="threadgroup T a[3 * N];\nthreadgroup float b[N];\n" + BODY,
        memory=lambda sizes: sizes["N"] * (3 * sizes["T"].size + 4),
    )
    for N in (8, 40_000):
        launch(kernel, N=N)
        assert built[-1]["shared_memory"] == 16 * N
    text = included(built[-1]["source"]).read_text()
    assert "alignas(16) T a[3 * N]; alignas(16) float b[N]; }" in text
    assert "extern __shared__" in text
    launch(make_kernel())
    assert built[-1]["shared_memory"] == 0


def test_the_same_text_is_the_same_file_and_a_spoilt_one_is_mended(on_cuda, built):
    for _ in range(2):
        on_cuda()
        launch(make_kernel())
        file = included(built[-1]["header"])
        assert file.read_text() == make_kernel().cuda_text()[0]
        file.write_text("#error spoilt")
    assert built[0] == built[1]


def test_texts_come_back_when_the_cache_was_emptied(on_cuda, built, folder):
    on_cuda()
    kernel = make_kernel()
    launch(kernel)
    shutil.rmtree(folder)
    launch(kernel, N=2)
    assert included(built[1]["header"]).read_text() == kernel.cuda_text()[0]


def test_text_stays_inline_without_a_folder(on_cuda, built, compiler):
    cache = on_cuda(folder=None, modules=None)
    kernel = make_kernel()
    launch(kernel)
    assert (built[0]["header"], built[0]["source"]) == texts(kernel)
    assert str(cache.count) == "1 variants, 0 from files, 0 new in 0.0 s, 1 by MLX"
    assert not compiler.texts


def test_text_stays_inline_where_nothing_can_be_written(on_cuda, built, monkeypatch, compiler):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(user_cache, "write", full)
    on_cuda()
    launch(make_kernel())
    assert (built[0]["header"], built[0]["source"]) == texts(make_kernel())
    assert not compiler.texts


# ---- Machine code


def test_each_variant_is_compiled_once_and_found_by_the_next_process(on_cuda, compiler, folder):
    cache = on_cuda()
    kernel = make_kernel()
    for _ in range(2):
        launch(kernel)
        launch(kernel, mx.bfloat16)
        launch(kernel, N=3)
    assert (cache.count.variants, cache.count.cached, cache.count.compiled) == (3, 0, 3)
    assert len(compiler.texts) == 3
    cache = on_cuda()
    for _ in range(2):
        launch(make_kernel(), N=3)
    assert (cache.count.variants, cache.count.cached, cache.count.compiled) == (2, 2, 0)
    assert len(compiler.texts) == 3
    # As MLX reads it: a line with a name, a tab and the name in the code.
    codes = set()
    for names in folder.glob("*.txt"):
        name, lowered = names.read_text().splitlines()[0].split("\t")
        assert name == "mlx::core::cu::custom_kernel_moeflux_scratch_cuda_cache"
        assert lowered == "_Zmlx_core_cu_custom_kernel_moeflux_scratch_cuda_cache"
        codes.add(names.with_suffix(".ptx").read_text())
    assert codes == {f"code of {text}" for text in compiler.texts}


@pytest.mark.parametrize("suffix", [".ptx", ".txt"])
@pytest.mark.parametrize("content", [None, b"", b"co"])
def test_a_file_that_is_not_whole_is_compiled_again(on_cuda, compiler, folder, suffix, content):
    on_cuda()
    launch(make_kernel())
    before = kept(folder)
    (spoilt,) = folder.glob(f"*{suffix}")
    spoilt.unlink() if content is None else spoilt.write_bytes(content)
    cache = on_cuda()
    launch(make_kernel())
    assert (cache.count.cached, cache.count.compiled) == (0, 1)
    assert kept(folder) == before


@pytest.mark.parametrize("error", [nvrtc.CompilerError("line 1: error"), OSError(28, "full")])
def test_mlx_compiles_what_cannot_be_compiled_or_kept(on_cuda, compiler, error, folder):
    cache = on_cuda()
    compiler.error = error
    launch(make_kernel())
    assert str(cache.count).endswith("0 new in 0.0 s, 1 by MLX")
    assert not list(folder.glob("*.ptx"))


def test_gathered_kernels_compile_side_by_side_and_are_there_at_the_end(
    on_cuda, compiler, monkeypatch
):
    monkeypatch.setattr(cuda_cache, "usable_cores", lambda: 2)
    cuda_cache._pool.cache_clear()
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    cache, both = on_cuda(), threading.Barrier(2)
    compile_ = compiler.compile

    def together(text, function):
        both.wait(timeout=30)  # breaks unless two are under way
        return compile_(text, function)

    compiler.compile = together
    kernel = make_kernel()
    with device.gathered():
        for n in range(4):
            launch(kernel, N=n)
    assert cache.count.compiled == 4
    with device.gathered():
        launch(kernel, N=5)
        launch(kernel, N=6)
        device.settle()
        assert cache.count.compiled == 6
    cuda_cache._pool.cache_clear()


# ---- Whether MLX reads modules


class Mlx:
    """Launches as MLX does: a module from the folder, if it looks there."""

    def __init__(self, looks=True, error=None):
        self.looks, self.error, self.folder = looks, error, None

    def cuda_kernel(self, *, name, input_names, output_names, header, source, **_):
        def call(*, inputs, output_shapes, output_dtypes, **_):
            if self.error:
                raise self.error
            kernel = cuda_module.Kernel(name, header, source, tuple(input_names), output_names)
            module = cuda_module.module(kernel, [x.dtype for x in inputs], output_dtypes)
            self.folder = Path(os.environ[cuda_cache.MLX_FOLDER])
            file = self.folder / f"{module.name}.ptx"
            text = file.read_text() if self.looks and file.exists() else module.text
            (answer,) = re.findall(r"#define ANSWER\(x\) (.*)", text)
            return [mx.array([{"0": 0, "(1000 + x)": 1000 + s}[answer] for s in inputs[0].shape])]

        return call


@pytest.fixture
def machine(monkeypatch, folder, compiler):
    """cuda_cache.open_cache() on a machine with this MLX."""
    monkeypatch.delenv(cuda_cache.MLX_FOLDER, raising=False)
    monkeypatch.setattr(mx, "device_info", lambda _: {"architecture": "sm_90"})
    monkeypatch.setattr(nvrtc, "find", lambda architecture: compiler)

    @contextmanager
    def opened(mlx):
        monkeypatch.setattr(mx.fast, "cuda_kernel", mlx.cuda_kernel)
        cache = cuda_cache.open_cache()
        yield cache
        if cache.modules is not None:
            cache.modules.close()

    return opened


def test_mlx_is_given_the_folder_for_as_long_as_it_reads_the_variable(machine, compiler):
    for _ in range(2):
        mlx = Mlx()
        with machine(mlx) as cache:
            assert cache.modules.shared == cache.folder
            assert cache.modules.path == mlx.folder
            assert cuda_cache.MLX_FOLDER not in os.environ
            assert f"mlx-{mx.__version__}-sm_90-nvrtc-12.9-" in cache.folder.name
            assert cache.count.variants == 0
    assert len(compiler.texts) == 1


def test_a_folder_of_the_users_choice_is_used_if_it_is_private(machine, monkeypatch, tmp_path):
    monkeypatch.setenv(cuda_cache.MLX_FOLDER, str(tmp_path / "chosen"))
    with machine(Mlx()) as cache:
        assert cache.modules is None  # it does not exist
    (tmp_path / "chosen").mkdir(mode=0o700)
    with machine(Mlx()) as cache:
        assert cache.modules.shared == (tmp_path / "chosen").resolve()
        assert cache.folder != cache.modules.shared
        assert os.environ[cuda_cache.MLX_FOLDER] == str(tmp_path / "chosen")
    (tmp_path / "chosen").chmod(0o777)
    with machine(Mlx()) as cache:
        assert cache.modules is None
        assert cache.folder is not None
    assert os.environ[cuda_cache.MLX_FOLDER] == str(tmp_path / "chosen")


@pytest.mark.parametrize("mlx", [Mlx(looks=False), Mlx(error=RuntimeError("cuModuleLoad failed"))])
def test_an_mlx_that_does_not_read_modules_compiles_itself(machine, mlx):
    with machine(mlx) as cache:
        assert cache.modules is None
        assert "does not look" in cache.where
        assert cuda_cache.MLX_FOLDER not in os.environ


def test_no_machine_code_without_compiler_or_hash(machine, monkeypatch, compiler):
    compiler.error = nvrtc.CompilerError("no headers")
    with machine(Mlx()) as cache:
        assert cache.modules is None
    compiler.error = None
    with monkeypatch.context() as patch:
        patch.setattr(cuda_module, "_HASH", "no_such_function")
        with machine(Mlx()) as cache:
            assert cache.modules is None
    monkeypatch.setattr(nvrtc, "find", lambda architecture: None)
    with machine(Mlx()) as cache:
        assert cache.modules is None
        assert cache.folder is not None


@pytest.mark.parametrize("name", ['quo"te', "bräu", "back\\slash", "new\nline"])
def test_no_files_where_a_path_cannot_be_included(machine, monkeypatch, tmp_path, name):
    monkeypatch.setenv("MOEFLUX_CACHE_DIR", str(tmp_path / name))
    with machine(Mlx()) as cache:
        assert cache.folder is None
        assert cache.modules is None


# ---- On a GPU

SCRIPT = """
import mlx.core as mx
from mlx_moeflux.kernels.moe import router
from mlx_moeflux.kernels.runtime import launcher
logits = mx.random.normal((3, 40), key=mx.random.key(1))
print([a.tolist() for a in router.softmax_top_k_fused(logits, k=4)])
count = launcher.cuda_files().count
print(count.variants, count.cached, count.compiled)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="NVIDIA only")
def test_the_next_process_compiles_nothing(folder):
    environment = {k: v for k, v in os.environ.items() if k != cuda_cache.MLX_FOLDER}
    said = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout.splitlines()
        for _ in range(2)
    ]  # fmt: skip
    assert said[0][0] == said[1][0]
    assert (said[0][1], said[1][1]) == ("1 0 1", "1 1 0")


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="NVIDIA only")
def test_the_compilers_words_come_through():
    compiler = nvrtc.find(mx.device_info(mx.gpu)["architecture"])
    code, name = compiler.compile("namespace a { __global__ void f(int* x) { *x = 1; } }", "a::f")
    assert code.startswith(b"\x7fELF")
    assert name == "_ZN1a1fEPi"
    with pytest.raises(nvrtc.CompilerError, match="undefined_thing"):
        compiler.compile("__global__ void f(int* x) { *x = undefined_thing; }", "f")

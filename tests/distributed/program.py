"""What each rank of a test runs: ``program.py FOLDER JOB ARGUMENTS``; see launch.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.distributed import part, ranks
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.generation import loop, runner
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.generation.sampling import make_sampler
from mlx_moeflux.loading import load_model
from tests.devices import seen_as

PROMPT, STEPS = 40, 5
RANK = int(os.environ.get("MLX_RANK", "0"))
FOLDER = Path(sys.argv[1]) if len(sys.argv) == 4 else Path()


def tokens_of(batch: int, vocabulary: int) -> mx.array:
    return mx.array(np.random.default_rng(1).integers(0, vocabulary, (batch, PROMPT + STEPS)))


def logits_of(model: Any, batch: int = 1) -> np.ndarray:
    """A prompt, then steps: ``[batch, PROMPT + STEPS, V]``."""
    tokens, cache = tokens_of(batch, model.config.vocab_size), model.make_cache()
    parts = [model(tokens[:, :PROMPT], cache)]
    parts += [model(tokens[:, t : t + 1], cache) for t in range(PROMPT, PROMPT + STEPS)]
    return np.array(mx.concatenate(parts, axis=1))


def logits(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Logits of several models; of each layer lookups, misses, bytes read and tokens. traced: Steps
    run from a trace."""
    found = {}
    for i, case in enumerate(cases):
        batch, traced = case.pop("batch", 1), case.pop("traced", None)
        with load_model(case.pop("path"), distributed=True, **case) as model:
            model.compile_steps = traced
            found[f"logits{i}"] = logits_of(model, batch)
            layers = model.store.stats().layers.values()
            counts = [[one.lookups, one.misses, one.bytes_read, one.tokens] for one in layers]
            found[f"counts{i}"] = np.array(counts)
    return found


def load(path: str, version: str = "", **options: Any) -> dict[str, Any]:
    """Nothing but loading, as another version of the package."""
    part.__version__ = version
    with load_model(path, distributed=True, **options):
        return {}


def prompts(path: str, lengths: list[int]) -> dict[str, Any]:
    """Each rank reads a prompt of its own length."""
    with load_model(path, distributed=True) as model:
        tokens = tokens_of(1, model.config.vocab_size)
        for _ in range(3):
            mx.eval(model(tokens[:, : lengths[RANK]], model.make_cache()))
        return {}


def forever(path: str, *, traced: bool = False, memory: str = "50%") -> dict[str, Any]:
    """Steps without end, of which FOLDER/runningR tells. traced: From traces."""
    with load_model(path, distributed=True, expert_memory=memory) as model:
        model.compile_steps = traced
        tokens = tokens_of(1, model.config.vocab_size)
        while True:
            cache = model.make_cache()
            for t in range(PROMPT):
                mx.eval(model(tokens[:, t : t + 1], cache))
                if t == 2:
                    (FOLDER / f"running{RANK}").touch()


def full_disk(path: str) -> dict[str, Any]:
    """Steps and saved states without end; the disk of rank 1 takes no file of more than 4 KiB."""
    with load_model(path, distributed=True, expert_memory="50%") as model:
        if RANK == 1:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
        tokens = tokens_of(1, model.config.vocab_size)
        while True:
            cache = model.make_cache()
            mx.eval(model(tokens, cache))
            cache.save(FOLDER / f"state{RANK}")


def cut_ring(path: str, *, traced: bool, memory: str) -> dict[str, Any]:
    """Steps without end; rank 1 shuts its ring's connections down. FOLDER/aliveR is touched until
    the end, FOLDER/cut holds the time of the cut."""

    def touch() -> None:
        while True:
            (FOLDER / f"alive{RANK}").touch()
            time.sleep(0.05)

    ring = connections()
    with load_model(path, distributed=True, expert_memory=memory) as model:
        model.compile_steps = traced
        threading.Thread(target=touch, daemon=True).start()
        tokens = tokens_of(1, model.config.vocab_size)
        for round_ in itertools.count():
            cache = model.make_cache()
            for t in range(PROMPT):
                mx.eval(model(tokens[:, t : t + 1], cache))
                if RANK == 1 and round_ == 0 and t == 10:
                    (FOLDER / "cut").write_text(str(time.time()))
                    for number in ring:
                        with (
                            socket.socket(fileno=os.dup(number)) as one,
                            contextlib.suppress(OSError),  # the other end is closed already
                        ):
                            one.shutdown(socket.SHUT_RDWR)


def connections() -> list[int]:
    """Numbers of the open files that are connected sockets."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        if os.path.exists(entry) and str(os.readlink(entry)).startswith("socket:"):
            found.append(int(entry.name))
    return found


def prompts_of(vocabulary: int) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(0, vocabulary, n).tolist() for n in (5, 17, 70, 2)]


def reply(model: Any, prompt: list[int], **options: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=6, **options)
    return [int(token) for token, _ in steps]


def batched(model: Any) -> list[list[int]]:
    """Replies of a batch that is smaller than the number of prompts."""
    prompts = prompts_of(model.config.vocab_size)
    found: dict[int, list[int]] = {}
    with BatchGenerator(
        model, max_tokens=6, completion_batch_size=3, prefill_step_size=30
    ) as batch:
        batch.insert(prompts)
        while replies := batch.next():
            for one in replies:
                found.setdefault(one.uid, []).append(one.token)
    return [found[uid] for uid in sorted(found)]


def states(path: str, saved: str) -> dict[str, Any]:
    """Replies of a batch, of prompts with a cache, of one that only rank 0 knows, and of `saved`,
    a state of one process after the third prompt; FOLDER/state is this run's."""
    with load_model(path, distributed=True, expert_memory="50%", exact_prompts=True) as model:
        prompts = prompts_of(model.config.vocab_size)
        found: dict[str, Any] = {"batch": batched(model)}
        model.set_expert_memory("40%")
        cache = PromptCache(every=8)
        for name in ("first", "second"):
            resumed = cache.resume(model, prompts[2])
            found[f"{name}_known"] = resumed.position
            found[name] = reply(model, prompts[2], resumed=resumed)
        cache = cache if RANK == 0 else PromptCache(every=8)
        resumed = cache.resume(model, prompts[2])
        found["third_known"] = resumed.position
        found["third"] = reply(model, prompts[2], resumed=resumed)
        state = model.make_cache()
        state.load(saved)
        found["loaded"] = reply(model, prompts[0], prompt_cache=state)
        state = model.make_cache()
        mx.eval(model(mx.array([prompts[2]]), state))
        state.save(FOLDER / f"state{RANK}")
        return found


def ahead(path: str, *, sampled: bool = False) -> dict[str, Any]:
    """Replies of a loop and a batch that run traced steps one ahead, as on a GPU. sampled: Each
    rank draws with a seed of its own."""
    for module in (ranks, loop, runner):
        vars(module)["device"] = seen_as("cuda")
    with load_model(path, distributed=True) as model:
        model.compile_steps = True
        prompts = prompts_of(model.config.vocab_size)
        options = {}
        if sampled:
            mx.random.seed(RANK)
            options["sampler"] = make_sampler(temp=1.5)
        first = reply(model, prompts[0], **options)
        model.steps.forget()
        return {"reply": first, "batch": batched(model)}


def law(path: str, *, one_kind: bool, traced: bool) -> dict[str, Any]:
    """Logits, though the router of rank 1 differs. one_kind: What the ranks say of devices. traced:
    It differs in the last layer, from the second step behind the prompt on, and steps run from a
    trace; FOLDER/stepR is the last that was done."""
    if not one_kind:
        part.device_kind = lambda: str(RANK)
    with load_model(path, distributed=True) as model:
        blocks = list(model.moe_blocks().values())
        if not traced:
            turn_round(blocks)
            return {"logits": logits_of(model)}
        model.compile_steps, cache = True, model.make_cache()
        tokens = tokens_of(1, model.config.vocab_size)
        parts = [model(tokens[:, :PROMPT], cache)]
        for t in range(PROMPT, PROMPT + STEPS):
            if t == PROMPT + 1:
                turn_round(blocks[-1:])
            parts.append(model(tokens[:, t : t + 1], cache))
            (FOLDER / f"step{RANK}").write_text(str(t))
        return {"logits": np.array(mx.concatenate(parts, axis=1))}


def turn_round(blocks: list[Any]) -> None:
    """Let the routers of rank 1 choose other experts than those of rank 0."""
    for block in blocks if RANK == 1 else ():
        gate = block.gate
        name = "scales" if "scales" in gate else "weight"
        gate[name] = -gate[name]


JOBS = {
    job.__name__: job
    for job in (logits, load, forever, cut_ring, full_disk, states, ahead, law, prompts)
}


def main() -> None:
    job, arguments = sys.argv[2:]
    mx.distributed.init(strict=True, backend="ring")
    try:
        found = JOBS[job](**json.loads(arguments))
    except MoefluxError as error:
        sys.exit(f"error: {error}")  # as the command line does
    np.savez(FOLDER / f"rank{RANK}.npz", **found)


if __name__ == "__main__":
    main()

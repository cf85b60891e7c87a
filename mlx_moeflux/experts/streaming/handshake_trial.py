"""Is the handshake right on this Apple GPU? Asked once, by a process of its own.

Metal promises that a GPU sees what the host wrote before a command buffer began. The handshake
needs more: kernels must see what threads write into slots while an earlier kernel of the same
buffer waits. So the trial has a store of random blocks whose slots change in every step, and
compares what ordinary kernels read behind kernels that wait with what the blocks are. Then it lets
a kernel wait for a host that never answers. A GPU that hangs, or a driver that gives up, costs the
child process alone; :mod:`~mlx_moeflux.kernels.verify.verdicts` keeps the result.

``python -m mlx_moeflux.experts.streaming.handshake_trial`` runs it and prints a line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moeflux._version import __version__
from mlx_moeflux.checkpoint.tensors import StridedRefs
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.streaming.handshake import WAIT_SECONDS, StepFailed
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify import verdicts
from mlx_moeflux.kernels.verify.verdicts import Verdict

# It holds for all that takes part: the kernel, the threads and the lending.
KEY = f"handshake=waiting {__version__}"
COMMAND = (sys.executable, "-P", "-m", "mlx_moeflux.experts.streaming.handshake_trial")
# The child may take so long, and its end after a signal.
SECONDS, KILLED_SECONDS = 120.0, 5.0
# Slots are few, so that each step changes about half of them. Rows of a matrix are so wide that a
# block has 0.9 MB: the slots of all layers are more than the caches of small GPUs hold, those of
# one layer are less.
LAYERS, EXPERTS, SLOTS, CHOSEN = 4, 32, 12, 8
STEPS, WIDTH = 150, 384
# macOS ends what runs for about 5 s.
LONGEST_WAIT = 4.0
_PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_NUMBER, _WORDS = 2, 512
_RIGHT = "right"


def refusal() -> str | None:
    """Return why the handshake is not used on this GPU, as a phrase; None: its trial found nothing.
    The first call on a machine runs the trial."""
    if (verdict := verdicts.get(KEY)) is None:
        with verdicts.running(KEY):
            reason = in_child()
        verdict = Verdict(reason is None, reason=reason or "", launched="handshake")
        verdicts.put(KEY, verdict)
    return None if verdict.ok else f"its trial failed ({verdict.reason})"


def in_child(command: Sequence[str] = COMMAND, seconds: float = SECONDS) -> str | None:
    """Return what `command` found in a process of its own, or how that ended; None: nothing."""
    # What this process can import, the child can.
    path = os.pathsep.join(filter(None, sys.path))
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"it took longer than {seconds:.0f} s"
    finally:
        child.kill()
        for pipe in filter(None, (child.stdout, child.stderr)):
            pipe.close()
        # No longer: a process may outlive a signal while its GPU hangs.
        with suppress(subprocess.TimeoutExpired):
            child.wait(KILLED_SECONDS)
    if child.returncode < 0:
        return f"signal {-child.returncode} ended its process"
    last = next(reversed((out if child.returncode == 0 else err).strip().splitlines()), "")
    return None if last == _RIGHT else last[:200] or "its process printed nothing"


def attempt(
    pull_for: Callable[[int], device.Pull | None],
    folder: Path,
    *,
    steps: int = STEPS,
    width: int = WIDTH,
) -> str | None:
    """Return in one line what is wrong; None: nothing was.

    folder: For the blocks of experts, 28 MB. steps: How many the store makes. width: Of a block's
    three matrices ``[width, width]``.
    """
    try:
        return _reads(pull_for, folder, steps, width) or _ends(pull_for)
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:200]


def _reads(
    pull_for: Callable[[int], device.Pull | None], folder: Path, steps: int, width: int
) -> str | None:
    """Compare what kernels find in slots with the blocks of the experts."""
    random = np.random.default_rng(0)
    shape = EXPERTS, len(_PARTS), width, width
    blocks = random.integers(0, 1 << 16, shape, np.uint16)
    file, size = folder / "blocks", _NUMBER * width * width
    file.write_bytes(blocks.tobytes())
    experts = {
        name: StridedRefs(
            name=name,
            file=file,
            offset=i * size,
            stride=len(_PARTS) * size,
            num_experts=EXPERTS,
            dtype="BF16",
            shape=(width, width),
        )
        for i, name in enumerate(_PARTS)
    }
    reader = make_reader("pread", dict.fromkeys(range(LAYERS), experts))
    pull = pull_for(CHOSEN)
    if pull is None:
        reader.close()
        return "there is no kernel that waits"
    with closing(StreamedStore(reader, SLOTS, handshake=pull)) as store:
        handshake = store.handshake
        assert handshake is not None, "nothing here excludes it"
        for step in range(steps):
            chosen = [np.sort(random.choice(EXPERTS, CHOSEN, False)) for _ in range(LAYERS)]
            found: list[list[mx.array]] = []
            try:
                with handshake.step():
                    for layer, ids in enumerate(chosen):
                        after = found[-1][-1].reshape(-1)[:CHOSEN] if found else mx.zeros((CHOSEN,))
                        asked = mx.array(ids.astype(np.uint32)) + after.astype(mx.uint32) * 0
                        slots, bank = handshake.slots(layer, asked[None])[0], store.bank(layer)
                        parts = (bank.gate.weight, bank.up.weight, bank.down.weight)
                        found.append([part.view(mx.uint16)[slots] for part in parts])
                    mx.eval(found)
            except StepFailed as error:
                return f"step {step}: {error}"
            for layer, (ids, parts) in enumerate(zip(chosen, found, strict=True)):
                got = np.stack([np.array(part) for part in parts], axis=1)
                if wrong := int((got != blocks[ids]).sum()):
                    return (
                        f"step {step}: kernels read {wrong} of {got.size} numbers of layer {layer} "
                        "that are not those of its blocks"
                    )
    return None


def _ends(pull_for: Callable[[int], device.Pull | None]) -> str | None:
    """Let a kernel wait that no host answers, and use the GPU after it."""
    pull = pull_for(CHOSEN)
    assert pull is not None, "there was one"
    view = pull.locked(8 * _WORDS)
    view[:] = bytes(8 * _WORDS)
    words = np.frombuffer(view, np.uint64)
    words[0], start = 1, device.address_of(view)
    control = pull.control(start, start + 8 * (_WORDS // 2), int(1e9 * WAIT_SECONDS))
    begun = time.monotonic()
    slots = pull.slots(mx.arange(CHOSEN, dtype=mx.uint32)[None], control)
    mx.eval(slots)
    took = time.monotonic() - begun
    if not words[1] or slots.any().item():
        return "a kernel without a host did not give up"
    if took > LONGEST_WAIT:
        return f"a kernel waited {took:.1f} s for a host, where it should wait {WAIT_SECONDS} s"
    return None if mx.arange(8).sum().item() == 28 else "the GPU computes no more"


def main() -> int:
    """Try the kernel of MLX's default device, and print a line."""
    with tempfile.TemporaryDirectory(prefix="mlx_moeflux-") as folder:
        reason = attempt(device.pull_for, Path(folder))
    sys.stdout.write(f"{reason or _RIGHT}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A trial of a chat template in a child process, which may not end."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from mlx_moeflux.errors import InputError, UnsupportedError

SECONDS = 20.0
MEMORY_BYTES = 4 << 30
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]
MESSAGES += [{"role": "user", "content": "Go on."}]
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOL = {"name": "look", "description": "Look something up.", "parameters": PARAMETERS}


def check_template(template: str, *, seconds: float = SECONDS) -> None:
    """Render a chat template once, with tools and without, in a process of its own.

    A template that refuses the trial's messages passes: it ended.

    Raises:
        UnsupportedError: It did not end in time, or took too much memory.
    """
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(template).encode(), timeout=seconds, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            f"the chat template did not render three messages within {seconds:g} s; give another "
            "with --chat-template."
        ) from None
    if done.returncode:
        raise UnsupportedError(
            "the chat template could not be rendered: its process ended with status "
            f"{done.returncode}; give another with --chat-template."
        )


def _render_given() -> None:
    """Render the template that stands on standard input."""
    import resource

    from mlx_moeflux.tokenizer import render

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    template = json.load(sys.stdin)
    for tools in (None, [{"type": "function", "function": TOOL}]):
        with contextlib.suppress(InputError):
            render(
                template, messages=MESSAGES, tools=tools, documents=None,
                add_generation_prompt=True, bos_token="", eos_token="", pad_token="",
            )  # fmt: skip


if __name__ == "__main__":
    _render_given()

"""The command line: one module per command, mlx-lm's names and flags where they mean the same."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from mlx_moeflux._version import __version__
from mlx_moeflux.errors import MoefluxError, UnsupportedError

# Command -> purpose. Its module in this package has add_arguments(parser) and run(args), and
# NEEDS_MLX = False if it runs without an MLX back end.
COMMANDS = {
    "generate": "generate text from a prompt",
    "chat": "chat with a model",
    "serve": "serve the protocols of OpenAI and Anthropic over HTTP",
    "cache_prompt": "process a prompt once, for later calls of generate",
    "convert": "write a checkpoint in another layout or quantisation",
    "check": "compare stock operations and kernels with exact results on this machine",
    "synthesize": "write a checkpoint of random weights in a published shape",
    "trace": "draw or replay what generate --trace wrote",
    "plan": "predict whether a model fits and how fast it can be",
    "tune": "find the memory and threads that suit this machine",
    "compare-quality": "compare a lossy option with the exact model",
    "perplexity": "measure perplexity on a text file",
    "evaluate": "run tasks of lm-evaluation-harness",
    "policies": "list eviction, prefetch and balance policies",
    "benchmark": "measure speed and memory, and their limits",
    "report": "check and measure this machine, for whoever maintains the package",
}


# mlx-lm's name -> ours.
ALIASES = {"server": "serve"}


def _own_name(command: str) -> str:
    return ALIASES.get(command, command)


def command_module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{_own_name(name).replace('-', '_')}")


class Version(argparse.Action):
    """Prints the version, the back end and the device."""

    def __init__(self, option_strings, dest, **_):
        super().__init__(option_strings, dest, nargs=0, help="print version, back end and device")

    def __call__(self, parser, namespace, values, option_string=None):
        from mlx_moeflux.backend import describe_backend

        try:
            backend = describe_backend()
        except UnsupportedError:
            backend = "no MLX back end"
        print(f"mlx_moeflux {__version__} ({backend})")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``mlx_moeflux COMMAND ...`` and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="mlx_moeflux", description="Mixture-of-Experts models larger than memory, on MLX."
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        chosen = commands.add_parser(
            name,
            aliases=[alias for alias, other in ALIASES.items() if other == name],
            help=purpose,
            description=f"{purpose[0].upper()}{purpose[1:]}.",
        )
        if arguments and _own_name(arguments[0]) == name:
            command_module(name).add_arguments(chosen)
    return _guarded(lambda: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    return _run_command(args.command, args)


def script() -> int:
    """Run the script ``mlx_moeflux.COMMAND`` that was called, and return the exit status."""
    program = Path(sys.argv[0]).name
    command = program.removeprefix("mlx_moeflux.")
    parser = argparse.ArgumentParser(prog=program, description=COMMANDS[_own_name(command)])
    command_module(command).add_arguments(parser)
    return _guarded(lambda: _run_command(command, parser.parse_args()))


def _run_command(name: str, args: argparse.Namespace) -> int:
    from mlx_moeflux.backend import require_mlx, set_device_variables

    module = command_module(name)
    if getattr(module, "NEEDS_MLX", True):
        require_mlx()
    set_device_variables()
    return module.run(args) or 0


def say(kind: str, message: object) -> None:
    """Write one line to stderr in a single call, so that lines of threads do not mix."""
    sys.stderr.write(f"{kind}: {' '.join(str(message).split())}\n")


@contextmanager
def bar_of_bytes(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows (bytes done, in all) on a terminal's stderr."""
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc=what, disable=not sys.stderr.isatty()) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    say("warning", message)


def _guarded(action) -> int:
    """Return the exit status of `action`; errors and warnings become one line on stderr each."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = action()
        sys.stdout.flush()
        return status
    except MoefluxError as error:
        say("error", error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed stdout; Python's flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

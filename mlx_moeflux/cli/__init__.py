"""The command line: one module per command, mlx-lm's names and flags where they mean the same."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from mlx_moeflux._version import __version__
from mlx_moeflux.errors import MoefluxError

# Command -> what it does; its module in this package has add_arguments(parser) and run(args).
COMMANDS = {
    "generate": "write text after a prompt",
    "chat": "talk to a model, turn by turn",
    "server": "answer OpenAI's protocol over HTTP",
    "cache_prompt": "read a prompt once, for later calls of generate",
    "convert": "write a checkpoint in another layout or quantisation",
    "check": "compare stock operations and kernels with the truth on this machine",
    "synthesize": "write a checkpoint of random weights in a published shape",
    "trace": "draw or replay what generate --trace wrote",
    "plan": "say whether a model fits and how fast it can be",
    "tune": "find the memory and threads that suit this machine",
    "compare-quality": "compare a lossy choice with the exact model",
    "policies": "list who may decide which experts stay in memory",
    "benchmark": "measure speed and memory, and what bounds them",
}


def command_module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


class Version(argparse.Action):
    """Prints the version, the back end and the device."""

    def __init__(self, option_strings, dest, **_):
        super().__init__(option_strings, dest, nargs=0, help="print version, back end and device")

    def __call__(self, parser, namespace, values, option_string=None):
        from mlx_moeflux.backend import describe_backend

        print(f"mlx_moeflux {__version__} ({describe_backend()})")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """``mlx_moeflux COMMAND ...``; the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="mlx_moeflux", description="Mixture-of-Experts models larger than memory, on MLX."
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        chosen = commands.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}."
        )
        if arguments and arguments[0] == name:
            command_module(name).add_arguments(chosen)
    return _guarded(lambda: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    return _run_command(args.command, args)


def run_command(name: str, arguments: Sequence[str] | None = None) -> int:
    """``mlx_moeflux.NAME ...``: one command as a script of its own."""
    parser = argparse.ArgumentParser(prog=f"mlx_moeflux.{name}", description=COMMANDS[name])
    command_module(name).add_arguments(parser)
    return _guarded(lambda: _run_command(name, parser.parse_args(arguments)))


def _run_command(name: str, args: argparse.Namespace) -> int:
    from mlx_moeflux.backend import require_mlx, set_device_variables

    require_mlx()
    set_device_variables()
    return command_module(name).run(args) or 0


def say(kind: str, message: object) -> None:
    """One line on stderr, at once: another thread's must not begin within it."""
    sys.stderr.write(f"{kind}: {' '.join(str(message).split())}\n")


def _one_line(message: Warning | str, *_: object, **__: object) -> None:
    say("warning", message)


def _guarded(action) -> int:
    """Errors of users and files become one line on stderr, and so do warnings."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _one_line
            status = action()
        sys.stdout.flush()
        return status
    except MoefluxError as error:
        say("error", error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away: nothing more can be said on stdout, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

"""``mlx_moeflux completion``: a shell's script that completes commands, options and files.

The script is made of the parsers of the commands (extra ``completion``: shtab); a shell that has
read it starts no Python to complete a word.
"""

from __future__ import annotations

import argparse

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.installation import install_command

NEEDS_MLX = False
SHELLS = ("bash", "zsh", "fish")
# Arguments whose values are paths, by their metavar or, without one, their name.
FILES, DIRECTORIES = ("FILE", "file", "data_path"), ("DIR", "MODEL", "model", "out")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell that is to read the script")


def run(args: argparse.Namespace) -> int:
    print(completion_script(args.shell), end="")
    return 0


def completion_script(shell: str) -> str:
    """Return the script for one of SHELLS.

    Raises:
        UnsupportedError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise UnsupportedError(
            "completion scripts need shtab; install it with "
            f"{install_command('mlx_moeflux[completion]')}."
        ) from None
    from mlx_moeflux.cli import COMMANDS, make_parser

    parser = make_parser(*COMMANDS)
    for action in _actions(parser):
        place = action.metavar or action.dest
        if place in FILES or place in DIRECTORIES:
            completed = shtab.FILE if place in FILES else shtab.DIRECTORY
            action.complete = completed  # pyright: ignore[reportAttributeAccessIssue]  # for shtab
    return shtab.complete(parser, shell=shell)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser and of its commands."""
    actions = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                actions += _actions(command)
    return actions

"""Oracle: the documentation itself. Its snippets run on the bundled model, its links lead to files,
its quotations and error messages exist."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

import mlx_moeflux
from mlx_moeflux import cli
from mlx_moeflux.models import MODEL_TYPES

ROOT = Path(__file__).parents[1]
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
SITE = sorted((ROOT / "docs").rglob("*.md"))

# A fenced block of a language that can run, and the mark that excludes it, with its reason.
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<language>python|bash|console|sh)[^\n]*\n"
    r"(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    line: int
    language: str
    code: str
    why: str | None


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that are Python or shell, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, m.start("code")) + 1, m["language"], m["code"], m["why"])
        for m in BLOCK.finditer(text)
    ]


@cache
def hooks():
    """Return docs/hooks.py as a module; it imports MkDocs nowhere."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_shell(block: Block) -> None:
    """Run each line of a shell block in this process; every line is a command of the package."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if not words:
            continue
        assert words[0] == "mlx_moeflux", f"line {block.line}: mark a block that runs {words[0]!r}"
        status = 0
        try:
            status = cli.main(words[1:])
        except SystemExit as stop:  # argparse, after --version or a wrong flag
            status = stop.code
        assert not status, f"line {block.line}: {line}"


PAGES_WITH_BLOCKS = [page for page in [*TOP, *SITE] if blocks_of(page)]
# Their blocks load and measure models for seconds. Tests of each part do it on smaller ones.
MEASURING = [
    ROOT / "docs" / name for name in ("benchmarks.md", "budget.md", "drafts.md", "research.md")
]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=[pytest.mark.slow] * (page in MEASURING),
            id=page.relative_to(ROOT).as_posix(),
        )
        for page in PAGES_WITH_BLOCKS
    ],
)
def test_snippets_run(page, tmp_path, monkeypatch, record_property):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = blocks_of(page)
    for block in blocks:
        if block.why is not None:
            print(f"{page.name}:{block.line} not run: {block.why}")
        elif block.language == "python":
            # Line numbers of a traceback are those of the page.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(page), "exec"), names)
        else:
            run_shell(block)
    ran = sum(block.why is None for block in blocks)
    record_property("snippets", f"{ran} of {len(blocks)}")
    print(f"{page.name}: {ran} of {len(blocks)} snippets ran")


def test_most_snippets_run():
    blocks = [block for page in PAGES_WITH_BLOCKS for block in blocks_of(page)]
    marked = [block for block in blocks if block.why is not None]
    print(f"{len(blocks) - len(marked)} of {len(blocks)} snippets run")
    assert len(marked) < len(blocks) / 2
    # Each fence of such a language is a block that this file understands.
    fences = sum(
        len(re.findall(r"^\s*```(?:python|bash|console|sh)\b", page.read_text(), re.MULTILINE))
        for page in [*TOP, *SITE]
    )
    assert fences == len(blocks)


@pytest.mark.parametrize("page", [*TOP, *SITE], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_files_and_headings(page):
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(hooks().expanded(text) if page in SITE else text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file(), f"{page.name}: {target}"
        if anchor:
            other = hooks().expanded(file.read_text(encoding="utf-8"))
            headings = re.findall(r"^#+ (.+)$", other, re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name}: {target}"


def test_quotations_and_reference_entries_exist():
    found = 0
    for page in SITE:
        text = page.read_text(encoding="utf-8")
        hooks().expanded(text)
        for match in hooks().REFERENCE.finditer(text):
            assert hooks().described(match[1]).strip()
            found += 1
    assert found > 20


def test_the_reference_lists_every_option_of_loading():
    from mlx_moeflux.loading.options import NAMES

    page = (ROOT / "docs" / "reference" / "generation.md").read_text(encoding="utf-8")
    shown = re.findall(r"^- `(\w+): [^`]+ = [^`]+`<br>.+$", hooks().expanded(page), re.MULTILINE)
    assert tuple(shown) == NAMES


def test_protocols_of_the_readme_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = re.findall(r"=` \| `([\w.]+)` \|$", text, re.MULTILINE)
    assert len(paths) == 8
    for path in paths:
        assert hooks().find(f"mlx_moeflux.{path}")


def test_a_wrong_quotation_is_refused():
    with pytest.raises(LookupError, match="defines no NoSuchBlock"):
        hooks().expanded("{{ source mlx_moeflux.models.moe.NoSuchBlock }}")
    with pytest.raises(LookupError, match="no heading"):
        hooks().expanded("{{ section README.md No such heading }}")


def test_every_operation_and_error_has_a_reference_entry():
    from mlx_moeflux import errors
    from mlx_moeflux.kernels.registry import OPERATIONS

    page = (ROOT / "docs" / "reference" / "kernels.md").read_text(encoding="utf-8")
    kernels = hooks().expanded(page)
    for operation, record in OPERATIONS.items():
        reference = record.reference
        entry = f"::: {reference.__module__}.{reference.__name__}\n"
        names = ", ".join(f"`{name}`" for name in record.implementations)
        assert f"## `{operation}`\n\nImplementations: {names}.\n" in kernels, operation
        assert entry in kernels, f"{operation}: {entry.strip()}"
    listed = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.MoefluxError):
            assert f"::: mlx_moeflux.errors.{name}\n" in listed, name


def texts_of(constant: object) -> Iterator[str]:
    """Yield the strings among the constants of compiled code, tuples and code within it."""
    if isinstance(constant, str):
        yield constant
    inner = constant.co_consts if isinstance(constant, CodeType) else constant
    if isinstance(inner, (tuple, frozenset)):
        for one in inner:
            yield from texts_of(one)


def messages() -> str:
    """Return all string constants of the package; parts of f-strings stand alone."""
    files = (ROOT / "mlx_moeflux").rglob("*.py")
    codes = (compile(f.read_text(encoding="utf-8"), f, "exec", dont_inherit=True) for f in files)
    return "\0".join(text for code in codes for text in texts_of(code))


def test_messages_of_the_list_of_errors_exist():
    """The first column quotes messages; "..." stands for what differs from case to case."""
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    known, checked = messages(), 0
    for cell in re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE):
        for part in (part.strip(" '") for part in cell.strip("`").split("...")):
            if len(part) > 8:
                assert part in known, part
                checked += 1
    assert checked > 10


def test_the_readme_names_every_type():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r" has one of these types:\n(.*?)\. So$", text, re.M | re.S)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(MODEL_TYPES)


def test_help_of_the_pages_after_a_plain_import():
    texts = [page.read_text(encoding="utf-8") for page in [*TOP, *SITE]]
    names = {name for text in texts for name in re.findall(r"help\((mlx_moeflux\.[\w.]+)\)", text)}
    assert "mlx_moeflux.kernels.attention.attention" in names
    # Modules of every package, and what a module has.
    names |= {"mlx_moeflux.experts.policies.eviction.LFU", "mlx_moeflux.models.rope.rope_keys"}
    for name in names:
        code = f"import mlx_moeflux; help({name})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert f"{name.rpartition('.')[2]}" in done.stdout.splitlines()[0]
    with pytest.raises(AttributeError, match="has no attribute 'bert'"):
        _ = mlx_moeflux.models.bert  # pyright: ignore[reportAttributeAccessIssue]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_ci_runs_the_commands_of_the_readme():
    """On Linux .ci/run makes the venv and asks pip to be quiet."""
    wanted = [
        command.strip()
        for block in blocks_of(ROOT / "README.md")
        if block.why is not None and "CI job" in block.why
        for line in block.code.splitlines()
        for command in line.split("&&")
    ]
    assert len(wanted) == 4
    mac = (ROOT / ".github" / "workflows" / "macos.yml").read_text(encoding="utf-8")
    linux = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in wanted:
        assert command in mac, command
    for command in wanted[2:]:
        assert command.removeprefix("pip install ") in linux, command


def test_flags_of_other_blocks_exist(capsys):
    """A block that is not run, or only with -m slow, still parses."""
    for page in PAGES_WITH_BLOCKS:
        for block in blocks_of(page):
            if (block.why is None and page not in MEASURING) or block.language == "python":
                continue
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] != ["mlx_moeflux"]:
                    continue
                assert words[1] in {*cli.COMMANDS, *cli.ALIASES}, line
                with contextlib.suppress(SystemExit):
                    cli.main([words[1], "--help"])
                text = capsys.readouterr().out
                for flag in words[2:]:
                    if flag.startswith("-"):
                        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text), line

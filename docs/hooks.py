"""Hooks of the documentation site; the parts that read source code need no MkDocs.

Five directives, each on a line of its own, keep quotations from going stale:

- ``{{ source package.module.Name }}`` becomes the source of that object
- ``{{ docstring package.module }}`` becomes its docstring
- ``{{ options package.module.Class }}`` becomes a list of its fields: type, default, documentation
- ``{{ implementations package.module.RECORD }}`` becomes the names in an operation's record
- ``{{ section FILE Heading }}`` becomes the text below a heading of a file of the repository

After a build each page also lies beside the site as ``page.md``, with ``::: package.module.Name``
replaced by signatures and docstrings, and ``llms.txt`` lists the pages.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = re.compile(r"^\{\{ source ([\w.]+) \}\}$", re.MULTILINE)
DOCSTRING = re.compile(r"^\{\{ docstring ([\w.]+) \}\}$", re.MULTILINE)
OPTIONS = re.compile(r"^\{\{ options ([\w.]+) \}\}$", re.MULTILINE)
IMPLEMENTATIONS = re.compile(r"^\{\{ implementations ([\w.]+) \}\}$", re.MULTILINE)
SECTION = re.compile(r"^\{\{ section (\S+) (.+) \}\}$", re.MULTILINE)
REFERENCE = re.compile(r"^::: ([\w.]+)\n(?:    .*\n)*", re.MULTILINE)
# "Shapes:", "Args:" and the like with the indented lines below, and the first line of an entry.
LIST = re.compile(r"^([A-Z]\w+):\n((?:    .*(?:\n|\Z)|\n(?=    ))+)", re.MULTILINE)
ENTRY = re.compile(r"[\w, *]+: |[A-Z]\w+Error")
# Sphinx roles in docstrings: :class:`~a.b.C` shows as C.
ROLE = re.compile(r":(?:func|class|meth|mod|attr|exc|data):(`|<code>)~?([\w.]+)(`|</code>)")

_pages: dict[str, str] = {}
_order: list[str] = []


def find(path: str) -> tuple[Path, str, ast.AST]:
    """Return the file, its text and the syntax tree of the object with this dotted path.

    Raises:
        LookupError: No module or no object has this path.
    """
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:count])
        file = folder.with_suffix(".py")
        file = file if file.exists() else folder / "__init__.py"
        if file.exists():
            break
    else:
        raise LookupError(f"{path}: there is no such module")
    text = file.read_text(encoding="utf-8")
    node: ast.AST = _tree(text)
    for name in parts[count:]:
        # The last one: overloads come before the function that has the docstring.
        found = [child for child in node.body if _name_of(child) == name]
        if not found:
            raise LookupError(f"{path}: {file.relative_to(ROOT)} defines no {name}")
        node = found[-1]
    return file, text, node


# Keyed by the text: the site's live reload parses a file again after an edit.
_tree = functools.cache(ast.parse)


def _name_of(node: ast.AST) -> str | None:
    """Return the name of a definition or of a plain assignment."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return getattr(node, "name", None)


def quoted(path: str) -> str:
    """Return the source of an object as a fenced block with its file and first line."""
    file, text, node = find(path)
    first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
    code = textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    place = f"{file.relative_to(ROOT)}, line {first}"
    return f'```python title="{place}"\n{code}\n```'


def section(name: str, heading: str) -> str:
    """Return the text below ``## heading`` of a file in the repository, up to the next heading.

    Links into docs/ become those of a page in that folder.

    Raises:
        LookupError: The file has no such heading.
    """
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise LookupError(f"{name} has no heading '{heading}'")
    return found[1].strip().replace("](docs/", "](")


def expanded(markdown: str) -> str:
    """Replace the quotations of a page."""
    markdown = SOURCE.sub(lambda match: quoted(match[1]), markdown)
    markdown = DOCSTRING.sub(lambda match: docstring(match[1]), markdown)
    markdown = OPTIONS.sub(lambda match: options(match[1]), markdown)
    markdown = IMPLEMENTATIONS.sub(lambda match: implementations(match[1]), markdown)
    return SECTION.sub(lambda match: section(match[1], match[2]), markdown)


def options(path: str) -> str:
    """Return the fields of a class as a Markdown list; each is ``name: type = option(default,
    check, text, ...)``."""
    items = []
    for field in find(path)[2].body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call):
            default, _, text = field.value.args[:3]
            declared = f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}"
            shown = ROLE.sub(r"`\2`", ast.literal_eval(text)).replace("``", "`")
            items.append(f"- `{declared} = {ast.unparse(default)}`<br>{shown}")
    return "\n".join(items)


def implementations(path: str) -> str:
    """Return one line with the names of an operation's implementations, from ``others={...}``."""
    record = find(path)[2].value
    (others,) = (word.value for word in record.keywords if word.arg == "others")
    names = ["reference", *(ast.literal_eval(name) for name in others.keys)]
    return f"Implementations: {', '.join(f'`{name}`' for name in names)}."


def docstring(path: str) -> str:
    """Return the docstring of an object with Sphinx roles as code and sections as lists."""
    text = ROLE.sub(r"`\2`", ast.get_docstring(find(path)[2]) or "").replace("``", "`")
    return LIST.sub(lambda match: f"**{match[1]}**\n\n{_items(match[2])}\n", text)


def _items(block: str) -> str:
    """Return ``name: text`` entries, indented as below "Shapes:", as a Markdown list."""
    lines = textwrap.dedent(block).rstrip().splitlines()
    return "\n".join(f"- {line}" if ENTRY.match(line) else f"  {line}" for line in lines)


def described(path: str) -> str:
    """Return the signature and docstring of an object, and of its public members, as Markdown."""
    _, _, node = find(path)
    parts = [f"## {path}"]
    if not isinstance(node, ast.Module):
        parts.append(f"```python\n{_signature(node)}\n```")
    parts.append(docstring(path))
    for child in node.body if isinstance(node, ast.ClassDef) else []:
        if not isinstance(child, ast.FunctionDef) or not ast.get_docstring(child):
            continue
        if child.name == "__call__" or not child.name.startswith("_"):
            parts.append(f"### {child.name}\n\n```python\n{_signature(child)}\n```")
            parts.append(docstring(f"{path}.{child.name}"))
    return "\n\n".join(part for part in parts if part) + "\n"


def _signature(node: ast.AST) -> str:
    """Return ``def name(...) -> type`` or ``class Name(bases)`` without the body."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    marks = "".join(f"@{ast.unparse(mark)}\n" for mark in node.decorator_list)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{marks}def {node.name}({ast.unparse(node.args)}){result}"


def first_paragraph(markdown: str) -> str:
    """Return the first paragraph of prose on one line, with links reduced to their text."""
    for block in re.split(r"\n\s*\n", markdown):
        if block.strip() and not re.match(r"\s*(#|<|```|\||!|:::|---)", block):
            return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
    return ""


def on_nav(nav, **_) -> None:
    """Keep the order of the pages for llms.txt."""
    _order[:] = [page.file.src_uri for page in nav.pages]


def on_page_markdown(markdown: str, page, **_) -> str:
    """Expand the quotations, and keep the page for :func:`on_post_build`."""
    markdown = expanded(markdown)
    _pages[page.file.src_uri] = REFERENCE.sub(lambda match: described(match[1]), markdown)
    return markdown


def on_page_content(html: str, **_) -> str:
    """Show Sphinx roles of docstrings as code."""
    return ROLE.sub(lambda match: f"<code>{match[2].rpartition('.')[2]}</code>", html)


def on_post_build(config, **_) -> None:
    """Write each page as Markdown, and llms.txt with the title and the subject of each."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for name in _order:
        markdown = _pages[name]
        file = site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(markdown, encoding="utf-8")
        title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
        heading = title[1] if title else name
        lines.append(f"- [{heading}]({name}): {first_paragraph(markdown)}".rstrip(": "))
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

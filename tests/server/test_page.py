"""The page at ``/``. Oracle: what the scripted model said and what a browser then shows."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from mlx_moeflux import load
from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.engine import EngineOptions
from mlx_moeflux.server.guard import Guard
from mlx_moeflux.server.web import PAGE, index_text, is_page
from tests.server.chromium import BINARY, browser
from tests.server.conftest import TEMPLATE, served, wait_until, with_limits
from tests.server.scripted import Script, saying

ROOT = Path(__file__).parents[2]
FILES = sorted(file for file in PAGE.rglob("*") if file.is_file())
OWN = [file for file in FILES if file.parent == PAGE]
TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}
TYPES |= {".html": "text/html", ".svg": "image/svg+xml", ".md": "text/markdown"}

in_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="Chromium is not installed"),
]


# Files and headers


def test_the_page_and_its_files_come_with_their_headers(server):
    for path in ("/", *(f"/page/{file.relative_to(PAGE)}" for file in FILES)):
        file = PAGE / ("index.html" if path == "/" else path.removeprefix("/page/"))
        status, text = server.ask(path)
        want = index_text() if file.name == "index.html" else file.read_text("utf-8")
        assert (status, text) == (200, want)
        if file.suffix:
            kind = server.headers.get_content_type()
            assert kind.replace("application/javascript", "text/javascript") == TYPES[file.suffix]
        assert server.headers["X-Content-Type-Options"] == "nosniff"
        policy = server.headers["Content-Security-Policy"].split("; ")
        rules = dict(rule.split(" ", 1) for rule in policy)
        assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
        assert rules["frame-ancestors"] == "'none'"
        for kind in ("script-src", "style-src", "connect-src", "img-src"):
            assert rules[kind] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'"


def test_nothing_but_the_files_is_served(server):
    for path in ("/page/", "/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py"):
        status, reply = server.ask(path)
        assert (status, reply["error"]["type"]) == (404, "invalid_request_error")
    assert server.ask("/", {})[0] == 405


def test_the_files_need_no_key_and_all_else_does(tiny):
    with served(*tiny, limits=with_limits(api_key="secret")) as server:
        assert server.ask("/")[0] == server.ask("/page/app.js")[0] == 200
        for path in ("/props", "/metrics", "/v1/models", "/pages", "/page"):
            assert server.ask(path)[0] == 401
        assert server.ask("/", headers={"Host": "evil.example"})[0] == 403


def test_the_package_has_the_files():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["mlx_moeflux"]
    packed = {file for pattern in patterns for file in (ROOT / "mlx_moeflux").glob(pattern)}
    assert {PAGE / "index.html", PAGE / "vendor" / "LICENSE-marked"} <= set(FILES) <= packed


@pytest.mark.parametrize("file", OWN, ids=lambda file: file.name)
def test_own_files_name_no_other_server(file):
    text = file.read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://\w|[\"'(]//\w", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_markup_runs_nothing_inline_and_names_what_exists():
    reader = Elements()
    reader.feed(index_text())
    assert len(reader.found) > 100
    for tag, attributes in reader.found:
        assert tag != "style"
        assert not any(name == "style" or name.startswith("on") for name in attributes)
        if tag == "script":
            assert attributes["src"]
        for name in ("src", "href"):
            address = attributes.get(name) or "#"
            if not address.startswith("#"):
                assert (PAGE.parent / address).is_file(), address
    for file in OWN:
        if file.suffix == ".js":
            for name in re.findall(r'from "(\S+)"', file.read_text("utf-8")):
                assert (PAGE / name).is_file(), name


def test_the_list_of_vendored_files_names_their_versions():
    listed = (PAGE / "vendor" / "README.md").read_text("utf-8")
    for name, package in (("marked.esm.js", "marked v"), ("purify.es.mjs", "DOMPurify ")):
        text = (PAGE / "vendor" / name).read_text("utf-8")
        version = re.search(rf"{package}([\d.]+)", text[:400])[1]
        row = next(line for line in listed.splitlines() if f"| `{name}`" in line)
        assert f" {version}," in row


# In Chromium

TEXT = """<think>A loop, or a *slice*.</think>
Use **a loop**, see [the manual](https://example.org/loops):

```python
def first(items):
    return next(iter(items))
```

| n | square |
| -: | - |
| 2 | 4 |
"""
HOSTILE = """</div></p></article><script>document.title = "pwned"</script>
<img src=x onerror="alert(1)"> <svg onload=alert(2)></svg> <iframe src="javascript:alert(3)">

[a](javascript:alert(4)) [b](JaVaScRiPt&colon;alert(5))
[c](data:text/html,<script>alert(6)</script>)
![d](https://example.org/pixel.png) ![e](x" onerror="alert(7)) <javascript:alert(8)>
[f](/v1/models) [g]( "onmouseover=alert(9)) <style>body{display:none}</style>

```"><script>alert(10)</script>
</code></pre><script>alert(11)</script>
```
<template><b>x</b></template><math><mtext><table><mglyph><style><img src=x onerror=alert(12)>
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


REPLYING = "document.body.classList.contains('replying')"


class User:
    """Somebody at the page, in a tab of their own."""

    def __init__(self, chromium, url):
        self.tab = chromium.tab()
        self.tab.size(1100, 800)
        self.url = url
        self.open()

    def open(self):
        self.tab.open(self.url)
        self.tab.until("document.querySelector('#model').textContent === 'tiny'")

    def ask(self, text, *, wait=True):
        self.tab.run("document.querySelector('#question').focus()")
        self.tab.type(text)
        self.tab.press("Enter")
        if wait:
            self.wait()

    def wait(self):
        """Wait for the end of the reply that the last key or click asked for."""
        self.tab.until(f"!{REPLYING}")

    def messages(self):
        return [text.strip() for text in self.tab.texts("#messages .message .content")]

    def alert(self):
        """What the page says above the field, or None."""
        shown = "!document.querySelector('#alert').hidden"
        return self.tab.texts("#alert-text")[0] if self.tab.run(shown) else None

    def field(self):
        return self.tab.run("document.querySelector('#question').value")

    def only_own_requests(self):
        return all(request.startswith((self.url, "blob:")) for request in self.tab.requests)


@pytest.fixture
def at_page(tiny, chromium):
    """(user, script, server) of a scripted server."""

    def begin(*texts, **options):
        script = Script(*texts)
        server = stack.enter_context(saying(*tiny, script, **options))
        return User(chromium, server.url), script, server

    with contextlib.ExitStack() as stack:
        yield begin


# kind -> text, and the formulas in it.
MATHS = {
    "parentheses": [
        (r"With \(a_1 * b_1\), *not* \(c*d*e\).", [r"\(a_1 * b_1\)", r"\(c*d*e\)"]),
        (r"**Sum: \(a*b\)** and *x \(\{c*d\}\) y*", [r"\(a*b\)", r"\(\{c*d\}\)"]),
        ("- \\(a_1*b*c\n  = d\\)\n- two", ["\\(a_1*b*c\n= d\\)"]),
        (r"| \(\frac{a}{b}\) |" + "\n|-|\n" + r"| \(x \\ y\) |",
         [r"\(\frac{a}{b}\)", r"\(x \\ y\)"]),
    ],
    "brackets": [
        (r"Inline \[x_1 * y_1\], then", [r"\[x_1 * y_1\]"]),
        ("So:\n\\[\n\\begin{aligned}\na &= b_1 \\\\[4pt]\n- c &= \\{d\\}\n\\end{aligned}\n\\]\nX",
         ["\\[\n\\begin{aligned}\na &= b_1 \\\\[4pt]\n- c &= \\{d\\}\n\\end{aligned}\n\\]"]),
        ("Solve: \\[\na_1\n=\n- b*c*d\n\\] *now*", ["\\[\na_1\n=\n- b*c*d\n\\]"]),
        ("> \\[\n> a_1\n> # b\n> \\]", ["\\[\na_1\n# b\n\\]"]),
        ("\\[\n\nx_1 *a*\n\n\\]\n\nEnd", ["\\[\n\nx_1 *a*\n\n\\]"]),
    ],
    "a dollar": [
        (r"$a_1 * b_1 * c$ is $\frac{a}{b}$, the $n$th.",
         ["$a_1 * b_1 * c$", r"$\frac{a}{b}$", "$n$"]),
        (r"**Set: $a*b$**, $\{x_1, \dots\}$", ["$a*b$", r"$\{x_1, \dots\}$"]),
        (r"# Of $x_1*y*z$" + "\n\n1. $a<b>c$, US$3, $d$", ["$x_1*y*z$", "$a<b>c$", "$d$"]),
        (r"$\text{\$5 * x} * y$ for $3.", [r"$\text{\$5 * x} * y$"]),
    ],
    "two dollars": [
        (r"Here $$y_1 * z_1 * w$$, and", ["$$y_1 * z_1 * w$$"]),
        ("1 $$a_1$$ and\n$$b*c*d$$\n$$e$$ or $$f\n*g*$$\nx",
         ["$$a_1$$", "$$b*c*d$$", "$$e$$", "$$f\n*g*$$"]),
        ("text\n$$\na\n=\n- b\n$$.\nmore", ["$$\na\n=\n- b\n$$."]),
        ("1. Solve:\n   $$\n   a_1 \\\\\n   - b\n   $$\n2. b", ["$$\na_1 \\\\\n- b\n$$"]),
        ("$$\\text{if $x_1$} *a* \\{b\\}$$\n\nEnd", ["$$\\text{if $x_1$} *a* \\{b\\}$$"]),
    ],
    "environments": [
        ("\\begin{align*}\na_1 &= b \\\\\n- c*d*e\n\\end{align*}\nThus",
         ["\\begin{align*}\na_1 &= b \\\\\n- c*d*e\n\\end{align*}"]),
        (r"A \begin{matrix} a_1 & *b* \\ c \end{matrix} here",
         [r"\begin{matrix} a_1 & *b* \\ c \end{matrix}"]),
        ("- \\begin{cases}\n  1 \\\\\n  * 2\n  \\end{cases}",
         ["\\begin{cases}\n1 \\\\\n* 2\n\\end{cases}"]),
    ],
}  # fmt: skip
FORMULAS = [
    pytest.param(*one, id=f"{kind} {i}")
    for kind, ones in MATHS.items()
    for i, one in enumerate(ones)
]
NO_MATHS = [
    ("$5 and $10, *not* $20", "$5 and $10, not $20"),
    ("$5-$10, **$3**/$4 (was $5)", "$5-$10, $3/$4 (was $5)"),
    ("It is $1,000 **today**, or 900$.", "It is $1,000 today, or 900$."),
    (r"\$5 or *A$ 6* and US$7", "$5 or A$ 6 and US$7"),
    ("`$a_1$` and `\\(*x*\\)` *em*", "$a_1$ and \\(*x*\\) em"),
    ("$$ is the *process*:\n\n```\necho $$\n```", "$$ is the process:"),
    ("Title\n=====\n\nOne $ *more*", "One $ more"),
    ("Mine\n\nStray $HOME is *mine*", "Stray $HOME is mine"),
    (r"A \(stray *mark*", "A (stray mark"),
]  # fmt: skip
# Shows all beginnings of a text, as a stream does. Returns what is there after each, and at the end
# what a view shows that has seen nothing but the whole text.
STREAM = """import("/page/markdown.js").then(({ MarkdownView }) => {
  const text = %s, grown = document.createElement("div"), fresh = document.createElement("div");
  const view = new MarkdownView(grown), formulas = [];
  const found = () => [...grown.querySelectorAll(".maths")].map((one) => one.textContent);
  for (let i = 1; i <= text.length; i += 1) {
    view.show(text.slice(0, i), { running: true });
    formulas.push([found(), grown.textContent.trim()]);
  }
  view.show(text);
  new MarkdownView(fresh).show(text);
  return { formulas, maths: found(), text: grown.innerText.trim(), same:
    grown.innerHTML === fresh.innerHTML };
})"""


@pytest.fixture(scope="module")
def tab(chromium, server):
    """A tab at the page, for what needs no conversation."""
    found = chromium.tab()
    found.open(server.url)
    return found


class TestMathsInChromium:
    pytestmark = in_browser

    @pytest.mark.parametrize(("text", "formulas"), FORMULAS)
    def test_maths_is_shown_as_written_while_it_comes_and_then(self, tab, text, formulas):
        seen = tab.run(STREAM % json.dumps(text))
        assert seen["maths"] == formulas
        assert seen["same"]
        # Whatever is there of a formula is there as written, but for indentation and ">".
        for formula in formulas:
            lines = formula.split("\n")
            begin = text.index(lines[0])
            for line in lines:
                at = text.index(line, begin)
                for end in range(at + 3, at + len(line) + 1):
                    shown = seen["formulas"][end - 1][1]
                    assert shown.endswith(text[at:end].strip()), text[:end]
                begin = at + len(line)

    @pytest.mark.parametrize(("text", "shown"), NO_MATHS)
    def test_prices_and_code_are_no_maths(self, tab, text, shown):
        seen = tab.run(STREAM % json.dumps(text))
        assert seen["maths"] == []
        assert shown in seen["text"]
        assert seen["same"]

    @pytest.mark.parametrize("mark", ["\\(", "\\[\n", "$$", "$a", "\\begin{a}", "- \\[\n"])
    def test_a_reply_that_repeats_a_mark_is_shown_in_time(self, tab, mark):
        script = """import("/page/markdown.js").then(({ MarkdownView }) => {
          const view = new MarkdownView(document.createElement("div")), begun = performance.now();
          view.show(%s.repeat(3000), { running: true });
          return performance.now() - begun;
        })"""
        assert tab.run(script % json.dumps(mark)) < 5000


class TestInChromium:
    pytestmark = in_browser

    def test_a_whole_conversation(self, at_page):
        user, script, _ = at_page(TEXT, "It is *short*.")
        tab = user.tab
        tab.click("#settings-button")
        tab.click("#system")
        tab.type("Be brief.")
        tab.run("document.querySelector('[name=temperature]').focus()")
        tab.type("0.25")
        tab.run("document.querySelector('[name=max_tokens]').focus()")
        tab.type("300")
        tab.press("Escape")
        user.ask("How do I take\nthe first one?", wait=False)
        # The beginning is there before the end.
        tab.until("document.querySelector('.running .content strong')")
        assert "first(items)" not in user.messages()[1]
        tab.until("!document.querySelector('.running.message')")
        asked = "# system: Be brief.# user: How do I take\nthe first one?"
        assert script.prompts[0].startswith(asked)
        job = script.jobs[0]
        assert (job.sampling["temperature"], job.sampling["top_p"], job.limit) == (0.25, 1.0, 300)
        assert tab.texts(".content strong") == ["a loop"]
        assert tab.texts(".code .language") == ["python"]
        assert tab.texts(".code pre") == ["def first(items):\n    return next(iter(items))\n"]
        assert tab.texts(".content td") == ["2", "4"]
        assert tab.run("document.querySelector('td').align") == "right"
        link = "document.querySelector('.content a')"
        assert tab.run(f"[{link}.href, {link}.rel]") == [
            "https://example.org/loops", "noopener noreferrer"
        ]  # fmt: skip
        # Thinking is folded, and no Markdown.
        assert tab.run("document.querySelector('.thinking').open") is False
        tab.click(".thinking summary")
        assert tab.texts(".thoughts") == ["A loop, or a *slice*."]
        (numbers,) = tab.texts(".numbers")
        for part in ("tokens", "tokens/s", "first after", "prompt", "hit rate", "read"):
            assert part in numbers
        user.ask("And?")
        assert tab.texts(".content em") == ["short"]
        assert "next(iter(items))" in script.prompts[1]
        assert script.prompts[1].startswith(asked)
        assert "# user: And?" in script.prompts[1]
        assert tab.texts("#conversations .title") == ["How do I take"]
        assert user.only_own_requests()
        assert tab.said == []

    def test_another_reply_and_an_edited_question(self, at_page):
        user, script, _ = at_page("one", "two", "three", "four")
        tab = user.tab
        user.ask("first")
        user.ask("second")
        tab.click("[data-act=regenerate]")
        user.wait()
        assert user.messages() == ["first", "one", "second", "three"]
        assert script.prompts[2] == script.prompts[1]
        # The arrow edits the last question; the button edits any.
        tab.run("document.querySelector('#question').focus()")
        tab.press("ArrowUp")
        assert tab.run("document.querySelector('.edit textarea').value") == "second"
        tab.press("Escape")
        assert user.messages() == ["first", "one", "second", "three"]
        tab.run("document.querySelector('[data-act=edit]').click()")
        tab.type(" of all")
        tab.press("Enter")
        user.wait()
        assert user.messages() == ["first of all", "four"]
        assert "second" not in script.prompts[3]

    def test_a_formula_is_whole_before_its_end_comes(self, at_page):
        formula = r"\(a_1" + "*b*c" * 15 + r"\)"
        user, _, _ = at_page(f"So {formula} holds.")
        tab = user.tab
        user.ask("Why?", wait=False)
        tab.until("document.querySelector('.running .maths.open')?.textContent.length > 20")
        (part,) = tab.texts(".maths.open")
        assert formula.startswith(part)
        user.wait()
        assert tab.texts(".maths") == [formula]
        assert tab.texts(".maths.open") == []

    @pytest.mark.parametrize("how", ["Escape", "button"])
    def test_stop_keeps_the_text_and_frees_the_place(self, at_page, how):
        user, _, server = at_page("word " * 3000)
        tab = user.tab
        user.ask("Go on", wait=False)
        tab.until("document.querySelector('.assistant .content')?.innerText.length > 20")
        line = tab.texts("#engine .line")[0]
        assert re.search(r"\d+ tokens · \d+\.\d tokens/s", line)
        tab.press("Escape") if how == "Escape" else tab.click("#stop")
        tab.until(f"!{REPLYING}")
        wait_until(lambda: server.service.engine.live == 0)
        assert tab.texts(".note") == ["Stopped."]
        (question, text) = user.messages()
        assert question == "Go on"
        assert 20 < len(text) < 5 * 3000
        assert set(text.split()) <= {"word", "wor", "wo", "w"}

    def test_a_reload_finds_everything(self, at_page):
        user, script, server = at_page("# whole", "word " * 3000, "again")
        tab = user.tab
        user.ask("one")
        user.ask("two", wait=False)
        tab.until("document.querySelector('.running .content')?.innerText.length > 20")
        tab.run("new Promise((done) => setTimeout(done, 1500))")  # it is kept once a second
        user.open()
        wait_until(lambda: server.service.engine.live == 0)
        one, whole, two, part = user.messages()
        assert (one, whole, two) == ("one", "whole", "two")
        assert tab.texts("#messages h1") == ["whole"]
        assert part.startswith("word word")
        assert tab.texts(".note") == ["", "The page was closed before the reply ended."]
        tab.click("[data-act=regenerate]")
        user.wait()
        assert user.messages() == ["one", "whole", "two", "again"]
        assert script.prompts[2] == script.prompts[1]

    def test_conversations_are_apart_and_can_be_deleted(self, at_page):
        user, script, _ = at_page("yes")
        tab = user.tab
        user.ask("first")
        tab.press("O", modifiers=2 | 8)
        user.ask("second")
        assert "first" not in script.prompts[1]
        assert tab.texts("#conversations .title") == ["second", "first"]
        tab.click("#conversations .title")
        assert user.messages() == ["first", "yes"]
        tab.click("#conversations .remove")
        tab.until("document.querySelectorAll('#conversations li').length === 1")
        assert tab.said == ["dialog: Delete “first”? There is no way back."]
        assert user.messages() == ["second", "yes"]
        user.open()
        assert tab.texts("#conversations .title") == ["second"]

    def test_export_and_import(self, at_page, tmp_path):
        user, _, _ = at_page(TEXT)
        tab = user.tab
        user.ask("How?")
        tab.save_to(tmp_path)
        tab.click("#export")
        file = tmp_path / "How-.json"
        wait_until(file.exists)
        (written,) = json.loads(file.read_text())["conversations"]
        assert written["messages"][1]["reasoning"] == "A loop, or a *slice*."
        terminal = tmp_path / "saved.json"  # as /save of the terminal's chat writes
        said = [("system", "Be brief."), ("user", "Who?"), ("assistant", "I.")]
        terminal.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in said]}))
        hostile = tmp_path / "hostile.json"
        hostile.write_text(json.dumps({"conversations": [{"messages": [{"role": "tool"}]}]}))
        before = user.messages()
        imports = [(file, before), (terminal, ["Who?", "I."])]
        for count, (imported, expected) in enumerate(imports, 2):
            tab.give("#file", imported)
            tab.until(f"document.querySelectorAll('#conversations li').length === {count}")
            assert user.messages() == expected
        assert tab.run("document.querySelector('#system').value") == "Be brief."
        tab.give("#file", hostile)
        tab.until("document.querySelector('#alert').innerText.includes('no known role')")
        user.open()
        assert len(tab.texts("#conversations li")) == 3

    def test_errors_are_shown_and_the_next_question_is_answered(self, at_page, monkeypatch):
        user, _, server = at_page("word " * 200, "fine")
        tab, store = user.tab, type(server.service.model.store)
        original, failing = store.experts, threading.Event()

        def experts(self, *arguments, **options):
            if failing.is_set():
                failing.clear()
                raise ExpertFileError("pulled out")
            return original(self, *arguments, **options)

        monkeypatch.setattr(store, "experts", experts)
        # In the middle of a stream.
        user.ask("one", wait=False)
        tab.until("document.querySelector('.running .content')?.innerText.length > 20")
        failing.set()
        tab.until(f"!{REPLYING}")
        assert tab.texts(".message .error") == ["the model failed; the server's log says why."]
        assert user.messages()[1].startswith("word word")
        assert tab.run("document.documentElement.scrollHeight") == 800  # the messages scroll
        user.ask("two")
        assert user.messages()[2:] == ["two", "fine"]

    def test_a_server_that_is_gone_is_said(self, tiny, chromium):
        with saying(*tiny, Script("yes")) as server:
            user = User(chromium, server.url)
            user.ask("there?")
        user.ask("and now?")
        assert user.alert() == "The server cannot be reached."
        assert user.messages() == ["there?", "yes"]
        assert user.field() == "and now?"

    def test_a_hostile_reply_does_nothing(self, at_page):
        user, _, _ = at_page(f"<think><img src=x onerror=alert(0)></think>{HOSTILE}")
        tab = user.tab
        user.ask(HOSTILE)
        text = user.messages()[1]
        for part in ("<script>document.title", "<img src=x onerror", "<iframe", "<style>"):
            assert part in text
        self.check_nothing_ran(tab)
        # Nor when its links are clicked and touched.
        tab.run(
            "document.querySelectorAll('.content a:not([href^=http])').forEach((a) => a.click())"
        )
        tab.run(
            "document.querySelectorAll('.content *').forEach((one) =>"
            "one.dispatchEvent(new MouseEvent('mouseover', {bubbles: true})))"
        )
        user.open()
        self.check_nothing_ran(tab)
        assert user.only_own_requests()

    @staticmethod
    def check_nothing_ran(tab):
        assert tab.said == []
        assert tab.run("document.title") == "mlx_moeflux"
        inside = "#messages :is(script, style, img, iframe, svg[onload], math, template, object)"
        assert tab.run(f"document.querySelectorAll({inside!r}).length") == 0
        attributes = tab.run(
            "[...document.querySelectorAll('.content *')].flatMap((one) => one.getAttributeNames())"
        )
        assert set(attributes) <= {"href", "target", "rel", "class", "title", "align", "start"}
        addresses = tab.run("[...document.querySelectorAll('.content a[href]')].map((a) => a.href)")
        assert "https://example.org/pixel.png" in addresses
        assert all(address.startswith(("http", "mailto:")) for address in addresses)
        assert not any("/v1/models" in address for address in addresses)

    def test_the_policy_refuses_what_a_sanitiser_would_miss(self, at_page):
        user, _, _ = at_page("yes")
        tab = user.tab
        done = tab.run(
            "(() => { try { document.body.innerHTML = '<img src=x onerror=alert(1)>'; }"
            "catch (error) { return error.name; } })()"
        )
        assert done == "TypeError"
        tab.run(
            "(() => { const one = document.createElement('a'); one.setAttribute('href',"
            "'javascript:document.title=\"pwned\"'); document.body.append(one); one.click(); })()"
        )
        tab.run("new Image().src = 'https://example.org/pixel.png'; 0")
        assert tab.run("fetch('https://example.org/').catch((error) => error.name)") == "TypeError"
        tab.run("new Promise((done) => setTimeout(done, 300))")
        assert tab.run("document.title") == "mlx_moeflux"
        assert sum("Content Security Policy" in said for said in tab.said) >= 3

    def test_a_key_is_asked_for_and_kept_for_the_session_alone(self, tiny, chromium):
        limits = with_limits(api_key="sésame")
        with saying(*tiny, Script("open"), limits=limits) as server:
            tab = chromium.tab()
            tab.open(server.url)
            tab.until("document.querySelector('#settings').open")
            assert "API key" in tab.texts("#alert")[0]
            assert tab.run("document.activeElement.id") == "key"
            tab.type("sésame")
            tab.press("Enter")
            tab.until("document.querySelector('#model').textContent === 'tiny'")
            assert tab.run("document.querySelector('#alert').hidden")
            tab.type("Hello")
            tab.press("Enter")
            tab.until("document.querySelector('.assistant .content')?.innerText.trim() === 'open'")
            tab.open(server.url)
            tab.until("document.querySelector('#model').textContent === 'tiny'")
            assert tab.run("JSON.stringify({...localStorage})") == '{"theme":"auto"}'
            assert tab.run("document.cookie") == ""

    @pytest.mark.parametrize("wrong", ["secre", "secret2", "Schlüssel"])
    def test_a_wrong_key_is_said_and_the_question_kept(self, tiny, chromium, wrong):
        with saying(*tiny, Script("open"), limits=with_limits(api_key="secret")) as server:
            tab = chromium.tab()
            tab.open(server.url)
            dialog = "document.querySelector('#settings').open"
            tab.until(dialog)
            assert tab.texts("#key-error") == ["This server wants an API key."]
            tab.type(wrong)
            tab.press("Enter")
            tab.until(
                f"{dialog} && document.querySelector('#key-error').innerText.includes('wrong')"
            )
            tab.run("document.querySelector('#key').select()")
            tab.type("secret")
            tab.press("Enter")
            tab.until("document.querySelector('#model').textContent === 'tiny'")
            assert not tab.run(dialog)
            # A key that no longer counts.
            tab.run(f"sessionStorage.setItem('api-key', {json.dumps(wrong)})")
            tab.type("Who?")
            tab.press("Enter")
            tab.until(dialog)
            assert tab.texts("#key-error") == ["The server refused this API key: it is wrong."]
            assert tab.texts("#alert-text") == ["the API key is missing or wrong."]
            assert tab.texts("#conversations li") == []
            tab.run("document.querySelector('#key').select()")
            tab.type("secret")
            tab.press("Enter")
            tab.until("document.querySelector('#alert').hidden")
            assert not tab.run(dialog)
            tab.press("Enter")
            tab.until("document.querySelector('.assistant .content')?.innerText.trim() === 'open'")
            assert tab.texts(".user .content") == ["Who?"]

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"origin": "http://evil.example"}, "pages of 'http://evil.example' may not use"),
            (
                {"origin": "null"},
                "pages of 'null' may not use this server; start it with --allowed-origins",
            ),
            (
                {"host": "chat.example:8080"},
                "not called 'chat.example'; start it with --allowed-host and this name.",
            ),
            (
                {"host": "10.0.0.7"},
                "not called '10.0.0.7'; start it with --allowed-host and this name.",
            ),
        ],
    )
    def test_what_a_proxy_makes_the_server_refuse_is_said_in_its_words(
        self, at_page, monkeypatch, changed, words
    ):
        user, _, _ = at_page("fine")
        tab, original = user.tab, Guard._check

        def check(self, scope, headers):
            if not is_page(scope["path"]):
                headers = Headers({**headers, **changed})
            original(self, scope, headers)

        with monkeypatch.context() as patched:
            patched.setattr(Guard, "_check", check)
            user.ask("Who?")
            assert words in user.alert()
            assert (user.messages(), user.field()) == ([], "Who?")
            tab.open(user.url)
            tab.until("!document.querySelector('#alert').hidden")
            assert words in user.alert()
        assert tab.texts("#alert-button") == ["Try again"]
        tab.click("#alert-button")
        tab.until("document.querySelector('#model').textContent === 'tiny'")
        user.ask("Who?")
        assert (user.messages(), user.alert()) == (["Who?", "fine"], None)

    def test_a_refused_name_of_the_server_is_said_instead_of_the_page(self, chromium, tiny):
        with served(*tiny, limits=with_limits(hosts=frozenset({"127.0.0.1"}))) as server:
            tab = chromium.tab()
            tab.open(f"http://localhost:{server.port}")
            assert "start it with --allowed-host" in tab.texts("body")[0]

    @pytest.mark.parametrize("blocked", ["app.js", "markdown.js", "purify.es.mjs"])
    def test_a_page_without_its_scripts_says_so(self, chromium, server, blocked):
        tab = chromium.tab()
        tab.call("Network.setBlockedURLs", urls=[f"*/{blocked}"])
        tab.open(server.url)
        tab.until(
            "getComputedStyle(document.querySelector('#not-started')).visibility === 'visible'"
        )
        assert "--allowed-host" in tab.texts("#not-started")[0]
        tab.call("Network.setBlockedURLs", urls=[])
        tab.open(server.url)
        tab.until("document.querySelector('#not-started') === null")

    def test_a_page_without_javascript_says_so(self, chromium, server):
        tab = chromium.tab()
        tab.call("Emulation.setScriptExecutionDisabled", value=True)
        tab.open(server.url)
        found = tab.call("DOM.getDocument", depth=-1)
        assert "needs JavaScript" in json.dumps(found)

    # Longer than the context, than the body of a request may be, and than the memory of states.
    @pytest.mark.parametrize(
        ("text", "options", "word"),
        [
            ("x " * 9000, {}, "context"),
            ("y" * 5000, {"limits": with_limits(body_bytes=4000)}, "larger than 4000 bytes"),
            ("z " * 700, {"engine": EngineOptions(state_bytes=1 << 20)}, "memory"),
        ],
    )
    def test_a_question_that_is_too_long_does_not_spoil_the_next(
        self, at_page, text, options, word
    ):
        user, script, _ = at_page("one", "two", "three", "four", **options)
        tab = user.tab
        user.ask("first")
        user.ask(text)
        assert word in user.alert()
        assert (user.messages(), user.field()) == (["first", "one"], text)
        tab.run("document.querySelector('#question').select()")
        tab.type("short")
        tab.press("Enter")
        user.wait()
        assert user.messages() == ["first", "one", "short", "two"]
        assert user.alert() is None
        assert text[:20] not in script.prompts[1]
        # An edited question returns to its own field, and what followed it is there again.
        tab.run("document.querySelector('[data-act=edit]').click()")
        tab.run("document.querySelector('.edit textarea').select()")
        tab.type(text)
        tab.press("Enter")
        user.wait()
        assert word in user.alert()
        assert user.messages() == ["one", "short", "two"]
        assert tab.run("document.querySelector('.edit textarea').value") == text
        tab.run("document.querySelector('.edit textarea').select()")
        tab.type("third")
        tab.press("Enter")
        user.wait()
        assert user.messages() == ["third", "three"]
        # Of another conversation than the one that is shown.
        user.ask(text, wait=False)
        tab.press("O", modifiers=2 | 8)
        tab.until("!document.querySelector('#conversations .running')")
        assert (user.messages(), user.field()) == ([], "")
        tab.click("#conversations .title")
        assert (user.messages(), user.field()) == (["third", "three"], text)

    def test_a_refused_reply_to_an_old_question_leaves_the_old_one(self, at_page):
        user, _, _ = at_page("one", "two")
        tab = user.tab
        user.ask("first")
        tab.run("document.querySelector('#settings-button').click()")
        tab.run("document.querySelector('#system').focus()")
        tab.type("x " * 9000)
        tab.press("Escape")
        tab.click("[data-act=regenerate]")
        user.wait()
        assert "context" in user.alert()
        assert (user.messages(), user.field()) == (["first", "one"], "")

    # Text files

    def test_files_are_a_part_of_the_question(self, at_page, tmp_path):
        files = {"a b.py": "x = 1", "fences.md": "````md\n```\n````\n", "leer-ä.txt": ""}
        for name, text in files.items():
            (tmp_path / name).write_text(text, "utf-8")
        user, script, _ = at_page("one", "two", "three")
        tab = user.tab
        tab.give("#attachment", *(tmp_path / name for name in files))
        tab.until("document.querySelectorAll('#attached li').length === 3")
        assert tab.texts("#attached .name") == ["a b.py, 5 B", "fences.md, 16 B", "leer-ä.txt, 0 B"]
        user.ask("Compare.")
        expected = (
            "a b.py:\n```\nx = 1\n```\n\nfences.md:\n`````\n````md\n```\n````\n`````\n\n"
            "leer-ä.txt:\n```\n\n```\n\nCompare."
        )
        assert script.prompts[0] == f"# user: {expected}def"
        assert tab.texts("#attached li") == []
        # Folded in the conversation, and the title is the question's.
        assert user.messages() == ["Compare.", "one"]
        assert tab.run("[...document.querySelectorAll('.file')].map((one) => one.open)") == [
            False, False, False
        ]  # fmt: skip
        tab.click(".file:first-child summary")
        assert tab.texts(".file[open] pre") == ["x = 1"]
        assert tab.texts("#conversations .title") == ["Compare."]
        # An edited question keeps them.
        tab.run("document.querySelector('[data-act=edit]').click()")
        tab.type(" Now.")
        tab.press("Enter")
        user.wait()
        assert script.prompts[1] == f"# user: {expected} Now.def"
        # So do a reload, an export and an import.
        user.open()
        tab.save_to(tmp_path)
        tab.click("#export")
        exported = tmp_path / "Compare-Now-.json"
        wait_until(exported.exists)
        (written,) = json.loads(exported.read_text("utf-8"))["conversations"]
        kept = [{"name": name, "text": text} for name, text in files.items()]
        assert written["messages"][0]["files"] == kept
        tab.give("#file", exported)
        tab.until("document.querySelectorAll('#conversations li').length === 2")
        user.ask("More.")
        assert script.prompts[2].startswith(f"# user: {expected} Now.# assistant: two# user: More.")

    def test_files_alone_are_a_question_and_can_be_removed(self, at_page):
        user, script, _ = at_page("one")
        tab = user.tab
        tab.run(
            "(() => { const dataTransfer = new DataTransfer();"
            "for (const name of ['one.txt', 'two.txt', 'a\\nb.txt'])"
            "  dataTransfer.items.add(new File([name + '!'], name));"
            "const options = {dataTransfer, bubbles: true, cancelable: true};"
            "const box = document.querySelector('#messages');"
            "box.dispatchEvent(new DragEvent('drop', options)); })()"
        )
        tab.until("document.querySelectorAll('#attached li').length === 3")
        assert tab.run("document.querySelector('#attached button').ariaLabel") == "Remove one.txt"
        tab.run("document.querySelector('#attached button').focus()")
        tab.press("Enter")
        assert tab.texts("#attached .name") == ["two.txt, 8 B", "a b.txt, 8 B"]
        assert tab.run("document.activeElement.id") == "question"
        tab.press("Enter")
        user.wait()
        assert script.prompts[0] == (
            "# user: two.txt:\n```\ntwo.txt!\n```\n\na b.txt:\n```\na\nb.txt!\n```def"
        )
        assert tab.texts("#conversations .title") == ["two.txt"]

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"\x89PNG\r\n\x1a\n", "“bad” is no text in UTF-8."),
            (b"text\0with zeros", "“bad” is no text in UTF-8."),
            ("Größe".encode("latin-1"), "“bad” is no text in UTF-8."),
            (b"x" * 2_000_001, "“bad” has 2.00 MB: the files of a question may have 2.00 MB."),
            (b"x" * 1_999_998, "“bad” has 2.00 MB: the files of a question may have 2.00 MB."),
        ],
    )
    def test_what_is_no_text_or_too_large_is_refused_in_words(self, at_page, tmp_path, data, why):
        user, _, _ = at_page("one")
        (tmp_path / "good").write_bytes(b"good")
        (tmp_path / "bad").write_bytes(data)
        user.tab.give("#attachment", tmp_path / "good", tmp_path / "bad")
        user.tab.until("!document.querySelector('#alert').hidden")
        assert user.alert() == why
        assert user.tab.texts("#attached .name") == ["good, 4 B"]
        user.tab.click("#alert-button")
        assert user.alert() is None

    def test_files_that_are_too_long_return_to_the_field(self, at_page, tmp_path):
        (tmp_path / "long.txt").write_text("x " * 9000)
        user, script, _ = at_page("one")
        tab = user.tab
        tab.give("#attachment", tmp_path / "long.txt")
        tab.until("document.querySelectorAll('#attached li').length === 1")
        user.ask("Short?")
        assert "context" in user.alert()
        assert (user.messages(), user.field()) == ([], "Short?")
        tab.click("#attached button")
        tab.press("Enter")
        user.wait()
        assert user.messages() == ["Short?", "one"]
        assert script.prompts == ["# user: Short?def"]

    def test_imported_files_are_checked(self, at_page, tmp_path):
        user, _, _ = at_page("one")
        file = tmp_path / "hostile.json"
        for files in ("x", [{"name": "x"}], [{"name": 1, "text": "x"}], [None]):
            message = {"role": "user", "content": "x", "files": files}
            file.write_text(json.dumps({"conversations": [{"messages": [message]}]}))
            user.tab.run("document.querySelector('#alert').hidden = true")
            user.tab.give("#file", file)
            user.tab.until("!document.querySelector('#alert').hidden")
            assert user.alert() == "Conversation 1 of this file has a file without name or text."
        assert user.tab.texts("#conversations li") == []

    @pytest.mark.parametrize(
        ("choice", "sent"),
        [("auto", None), ("on", {"enable_thinking": True}), ("off", {"enable_thinking": False})],
    )
    def test_thinking_is_asked_for_or_not(self, tiny, monkeypatch, at_page, tmp_path, choice, sent):
        switch = "{% if enable_thinking is false %}# briefly\n{% endif %}"
        monkeypatch.setattr(tiny[1], "chat_template", switch + TEMPLATE)
        user, script, _ = at_page("one")
        tab = user.tab
        tab.run(
            "(() => { const original = window.fetch; window.bodies = [];"
            "window.fetch = (path, options) => { if (options?.body) bodies.push(options.body);"
            "return original(path, options); }; })()"
        )
        tab.click("#settings-button")
        tab.run(
            f"(() => {{ const one = document.querySelector('#thinking'); one.value = '{choice}';"
            "one.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        tab.press("Escape")
        user.ask("Who?")
        assert json.loads(tab.run("bodies[0]")).get("chat_template_kwargs") == sent
        assert ("# briefly" in script.prompts[0]) == (choice == "off")
        # A new conversation, a reload and an import take it over.
        tab.press("O", modifiers=2 | 8)
        assert tab.run("document.querySelector('#thinking').value") == choice
        user.open()
        assert tab.run("document.querySelector('#thinking').value") == choice
        tab.save_to(tmp_path)
        tab.click("#export")
        wait_until((tmp_path / "Who-.json").exists)
        tab.give("#file", tmp_path / "Who-.json")
        tab.until("document.querySelectorAll('#conversations li').length === 2")
        assert tab.run("document.querySelector('#thinking').value") == choice

    # What the page shows in places of its own

    @pytest.mark.parametrize(
        ("first", "title"),
        [
            ("\n\n  One\tline\nand more", "One line"),
            ("w" * 200, "w" * 60 + "…"),
            ("😀" * 61, "😀" * 60 + "…"),
            ("carriage\rreturn", "carriage"),
            ("separator\u2028line", "separator"),
            ("   ", "New conversation"),
        ],
    )
    def test_a_title_is_one_line(self, at_page, tmp_path, first, title):
        user, _, _ = at_page("one")
        tab = user.tab
        for title_of_file in ("", first):
            content = "other" if title_of_file.strip() else first
            message = {"role": "user", "content": content}
            file = {"conversations": [{"title": title_of_file, "messages": [message]}]}
            (tmp_path / "file.json").write_text(json.dumps(file))
            tab.give("#file", tmp_path / "file.json")
            tab.until("document.querySelectorAll('#conversations li').length > 0")
            assert tab.run("document.querySelector('#conversations .title').textContent") == title
            one = "document.querySelector('#conversations li')"
            assert tab.run(f"{one}.clientHeight") < 50
            assert tab.run(f"{one}.scrollWidth <= {one}.clientWidth")
            tab.click("#conversations .remove")
            tab.until("document.querySelectorAll('#conversations li').length === 0")

    def test_a_resident_model_reads_nothing_and_says_nothing_of_it(self, chromium):
        model, tokenizer = load(BUNDLED_MODEL, expert_memory="100%")
        tokenizer.chat_template = TEMPLATE
        with model, saying(model, tokenizer, Script("word " * 50)) as server:
            user = User(chromium, server.url)
            assert user.tab.texts("#engine .line") == [""]
            user.ask("Who?", wait=False)
            user.tab.until("/^\\d+ tokens/.test(document.querySelector('#engine .line').innerText)")
            assert "read" not in user.tab.texts("#engine .line")[0]
            user.wait()
            assert "tokens/s" in user.tab.texts(".numbers")[0]
            assert not re.search("read|hit rate", user.tab.texts(".numbers")[0])
            assert user.tab.texts("#engine .line") == [""]

    @pytest.mark.parametrize("width", [1100, 600, 360])
    def test_fields_of_a_row_are_in_line(self, at_page, width):
        user, _, _ = at_page("one")
        tab = user.tab
        tab.size(width, 800)
        tab.click("#settings-button")
        boxes = tab.run(
            "[...document.querySelectorAll('.grid')].map((grid) => [...grid.children].map((one) =>"
            "{ const field = one.lastElementChild.getBoundingClientRect();"
            "return [one.getBoundingClientRect().top, field.top, field.bottom]; }))"
        )
        for grid in boxes:
            rows = {row[2]: row for row in grid}
            assert all(rows[row[2]] == row for row in grid)
        # A label of two lines would stand above the others of its row.
        assert all(inner - top < 30 for grid in boxes for top, inner, _ in grid)

    def test_a_prompt_is_followed_by_layers(self, at_page, monkeypatch):
        user, _, server = at_page("yes", engine=EngineOptions(max_pause=0.0))
        tab, engine = user.tab, server.service.engine
        original, turn = type(engine._generator).step, threading.Semaphore(0)

        def step(self):
            turn.acquire(timeout=60)
            return original(self)

        monkeypatch.setattr(type(engine._generator), "step", step)
        user.ask("x " * 50, wait=False)
        layers = len(server.service.model.layers)
        for passed in range(1, layers):
            turn.release()
            said = f"Reading the prompt: layer {passed} of {layers}, {100 * passed / layers:.1f} %"
            tab.until(f"document.querySelector('#engine .line').innerText.startsWith({said!r})")
            assert tab.run("document.querySelector('#engine progress').value") == pytest.approx(
                passed / layers
            )
        turn.release(20)
        tab.until(f"!{REPLYING}")
        assert tab.run("document.querySelector('#engine progress').hidden")
        assert tab.texts("#engine .line")[0].startswith("Since the server's start: hit rate")

    def test_the_queue_is_shown_and_a_question_without_reply_is_asked_again(self, at_page):
        user, script, server = at_page("word " * 3000, engine=EngineOptions(concurrency=1))
        tab = user.tab
        other = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        other.request("POST", "/v1/completions", json.dumps({"prompt": "other", "stream": True}))
        wait_until(lambda: server.service.engine.workload.running == 1)
        user.ask("one", wait=False)
        line = "document.querySelector('#engine .line').innerText"
        tab.until(f"{line}.startsWith('Waiting for the engine')")
        tab.until(f"{line}.includes('queue: 1 running, 1 waiting')")
        tab.press("Escape")
        tab.until(f"!{REPLYING}")
        assert user.messages() == ["one", ""]
        other.close()
        script.texts = ["both"]
        user.ask("two")
        assert user.messages() == ["one", "", "two", "both"]
        assert script.prompts[-1].endswith("# user: one\n\ntwodef")

    def test_a_model_without_a_template_goes_on_with_the_text(self, tiny, chromium):
        model, tokenizer = tiny
        template, tokenizer.chat_template = tokenizer.chat_template, None
        try:
            script = Script("ab", "\n  c *d*  e")
            with saying(model, tokenizer, script) as server:
                user = User(chromium, server.url)
                assert "no chat template" in user.tab.texts("#empty")[0]
                user.ask("one")
                user.ask("two")
                assert user.messages() == ["one", "ab", "two", "c *d*  e"]
                assert script.prompts == ["one", "oneabtwo"]
        finally:
            tokenizer.chat_template = template

    def test_dark_and_light(self, at_page):
        user, _, _ = at_page("yes")
        tab = user.tab
        back = "getComputedStyle(document.body).backgroundColor"
        colours = {}
        for scheme in ("light", "dark"):
            tab.prefer(scheme)
            colours[scheme] = tab.run(back)
        assert colours == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 29)"}
        tab.click("#theme-button")
        assert tab.run(back) == colours["light"]
        user.open()
        assert tab.run(back) == colours["light"]
        tab.prefer("light")
        tab.click("#theme-button")
        assert tab.run(back) == colours["dark"]
        tab.click("#theme-button")
        assert tab.run(back) == colours["light"]

    def test_a_phone(self, at_page):
        user, _, _ = at_page(
            f"{TEXT}\n| {'| '.join('abcdefghijklmnop')}|\n{'| - ' * 16}|\n" + "w" * 200
        )
        tab = user.tab
        tab.size(360, 640, phone=True)
        user.ask("Long " + "w" * 200)
        assert tab.run("document.documentElement.scrollWidth") == 360
        assert tab.run("document.querySelector('#messages').scrollWidth") == 360
        covered = "document.querySelector('#drawer').getBoundingClientRect().right > 0"
        assert not tab.run(covered)
        tab.click("#menu")
        tab.until(covered)
        tab.until("document.querySelector('#drawer').getBoundingClientRect().left === 0")
        tab.click("#conversations .title")
        tab.until(f"!({covered})")
        assert tab.run("document.querySelector('#send').getBoundingClientRect().right") < 360

    def test_keys(self, at_page):
        user, script, _ = at_page("yes")
        tab = user.tab
        tab.type("one")
        tab.press("Enter", modifiers=8)
        tab.type("two")
        tab.press("Enter")
        user.wait()
        assert user.messages()[0] == "one\ntwo"
        tab.run("document.activeElement.blur()")
        tab.press("/")
        assert tab.run("document.activeElement.id") == "question"
        assert tab.run("document.querySelector('#question').value") == ""
        tab.press("Enter")
        assert len(script.prompts) == 1

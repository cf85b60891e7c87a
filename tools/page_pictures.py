"""Take the pictures of docs/server.md: the bundled model's page, with replies from a script.

    python tools/page_pictures.py [FOLDER]

Needs Chromium and the extra ``test``. FOLDER is docs/images unless another is given.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlx_moeflux import load
from mlx_moeflux.loading import BUNDLED_MODEL
from tests.server.chromium import Tab, browser
from tests.server.conftest import TEMPLATE
from tests.server.scripted import Script, saying

ROOT = Path(__file__).parents[1]
QUESTIONS = ("Which words of a text come most often?", "And without the module?")
REPLIES = (
    """<think>Counting words is a matter of a Counter: one pass over the text.</think>
Count them in **one pass** and take the largest counts:

```python
from collections import Counter

def most_common(text, number):
    words = text.lower().split()
    return Counter(words).most_common(number)
```

| step | time |
| --- | --- |
| counting `n` words | `O(n)` |
| the largest `k` of `m` counts | `O(m log k)` |

`Counter` is a dictionary, so a word that is missing has a count of 0.""",
    """<think>A plain dictionary with get, then sorted by count.</think>
A dictionary does the same; `get` gives 0 for a new word:

```python
def most_common(text, number):
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:number]
```

Sorting all counts takes `O(m log m)`, which matters for *many* different words only.""",
)
REPLYING = "document.body.classList.contains('replying')"


def ask(tab: Tab, text: str) -> None:
    tab.run("document.querySelector('#question').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.until(REPLYING)


def wait_for_drawer(tab: Tab) -> None:
    """Wait for the drawer to come or go."""
    tab.run("new Promise((done) => setTimeout(done, 400))")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="50%")
    tokenizer.chat_template = TEMPLATE
    with (
        model,
        saying(model, tokenizer, Script(*REPLIES), name="bundled model") as server,
        tempfile.TemporaryDirectory() as profile,
        browser(Path(profile)) as chromium,
    ):
        tab = chromium.tab()
        tab.size(1120, 760)
        tab.prefer("light")
        tab.open(server.url)
        tab.until("document.querySelector('#model').textContent === 'bundled model'")
        ask(tab, QUESTIONS[0])
        tab.until(f"!{REPLYING}")
        tab.run("document.querySelector('.thinking').open = true")
        tab.picture(folder / "page-light.png")
        tab.prefer("dark")
        ask(tab, QUESTIONS[1])
        tab.until("document.querySelectorAll('.message.running .code pre').length")
        tab.until("document.querySelector('.running pre').innerText.includes('return')")
        tab.picture(folder / "page-dark.png")
        tab.until(f"!{REPLYING}")
        if len(sys.argv) > 1:
            tab.size(390, 760, phone=True, scale=2)
            wait_for_drawer(tab)
            tab.picture(folder / "phone-dark.png")
            tab.prefer("light")
            tab.run("document.querySelector('#messages').scrollTop = 0")
            tab.picture(folder / "phone-light.png")
            tab.click("#menu")
            wait_for_drawer(tab)
            tab.picture(folder / "phone-drawer.png")


if __name__ == "__main__":
    main()

// Markdown of a model to elements that cannot run anything.
//
// marked makes HTML. Tags in the text itself are shown as text, pictures as links, maths as it was
// written. DOMPurify then keeps the elements and attributes listed here alone; the server's
// Content-Security-Policy would refuse what it missed.

import { maths } from "./maths.js";
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const TAGS = [
  "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre",
  "blockquote", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td",
  "span",
];
const SAFE = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start", "align"], // these are no addresses
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

let growing = ""; // the text that is shown, if it may go on
const marked = new Marked(maths(() => growing, escaped), {
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

function escaped(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => names[character]);
}

// Shows a text that may still grow. Blocks that did not change keep their elements, so a long reply
// costs its last block, and a selection in what is finished stays.
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.blocks = []; // {raw, element} of each top-level block
  }

  // running: The text may go on.
  show(text, { running = false } = {}) {
    growing = running ? text.trimEnd() : "";
    const tokens = marked.lexer(text).filter((token) => token.type !== "space");
    tokens.forEach((token, i) => {
      const before = this.blocks[i];
      if (before?.raw === token.raw && !before.element.querySelector(".maths.open")) return;
      const element = document.createElement("div");
      element.append(rendered(token));
      if (before) before.element.replaceWith(element);
      else this.element.append(element);
      this.blocks[i] = { raw: token.raw, element };
    });
    for (const gone of this.blocks.splice(tokens.length)) gone.element.remove();
  }
}

function rendered(token) {
  const fragment = DOMPurify.sanitize(marked.parser([token]), SAFE);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const block of fragment.querySelectorAll("pre")) frameCode(block);
  return fragment;
}

function frameCode(block) {
  const frame = document.getElementById("code-template").content.cloneNode(true);
  const language = /language-(\S+)/.exec(block.firstElementChild?.className ?? "");
  frame.querySelector(".language").textContent = language ? language[1] : "text";
  const place = frame.querySelector("pre");
  block.replaceWith(frame);
  place.replaceWith(block);
}

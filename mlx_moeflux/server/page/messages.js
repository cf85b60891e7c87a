// The elements of one message.

import { bytes, numbersLine } from "./engine.js";
import { sizeOf } from "./files.js";
import { MarkdownView } from "./markdown.js";
import { ENDS } from "./run.js";

// How a reply ended, in words; a whole reply needs none.
const NOTES = {
  [ENDS.stopped]: "Stopped.",
  [ENDS.length]: "Cut off: the reply reached its limit of tokens.",
};

// act: {copy, edit, regenerate}, called with the message.
export class MessageView {
  constructor(message, act) {
    this.message = message;
    const template = document.getElementById(`${message.role}-template`);
    this.element = template.content.firstElementChild.cloneNode(true);
    this.part = (name) => this.element.querySelector(`.${name}`);
    for (const button of this.element.querySelectorAll("[data-act]")) {
      button.addEventListener("click", () => act[button.dataset.act](message, button));
    }
    if (message.role === "assistant") this.markdown = new MarkdownView(this.part("content"));
    else this.part("files").append(...(message.files ?? []).map(fileElement));
  }

  // last: Nothing follows this message. running: It is still coming. plain: Its text is no
  // Markdown, but goes on with the text of the conversation.
  show({ last, running, plain }) {
    if (this.message.role === "user") {
      this.fill("content", this.message.content);
      return;
    }
    const { content, reasoning, thoughtSeconds, error, end, numbers } = this.message;
    this.part("content").classList.toggle("plain", plain);
    if (plain) this.part("content").textContent = content;
    else this.markdown.show(content, { running });
    this.element.classList.toggle("running", running);
    this.part("thinking").hidden = !reasoning;
    const thinking = running && !content;
    this.part("thinking").classList.toggle("active", thinking);
    this.part("thinking-title").textContent = thinking ? "Thinking…" : thought(thoughtSeconds);
    const thoughts = this.part("thoughts");
    if (thoughts.textContent !== reasoning) thoughts.textContent = reasoning;
    const closed = !running && end === ENDS.running;
    const note = closed ? "The page was closed before the reply ended." : (NOTES[end] ?? "");
    this.fill("note", running ? "" : note);
    this.fill("error", error ?? "");
    this.fill("numbers", running ? "" : numbersLine(numbers));
    this.part("waiting").hidden = !(running && !content && !reasoning);
    this.part("actions").hidden = running;
    this.element.querySelector("[data-act=regenerate]").hidden = !last;
  }

  fill(name, text) {
    this.part(name).textContent = text;
    this.part(name).hidden = !text;
  }

  // Replaces the question by a field with its text, or with another; calls sent(text) or nothing.
  edit(sent, text = this.message.content) {
    const form = document.getElementById("edit-template").content.firstElementChild.cloneNode(true);
    const field = form.querySelector("textarea");
    const close = () => {
      form.replaceWith(this.element);
      this.element.querySelector("[data-act=edit]").focus();
    };
    field.value = text;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      close();
      if (field.value.trim() || this.message.files?.length) sent(field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    form.querySelector("[data-act=cancel]").addEventListener("click", close);
    sendOnEnter(field, form);
    this.element.replaceWith(form);
    growWith(field);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

function fileElement(file) {
  const element = document.getElementById("file-template").content.firstElementChild.cloneNode(true);
  element.querySelector("summary").textContent = `${file.name}, ${bytes(sizeOf(file))}`;
  element.querySelector("pre").textContent = file.text;
  return element;
}

function thought(seconds) {
  return seconds >= 1 ? `Thought for ${Math.round(seconds)} s` : "Thoughts";
}

// Enter sends, Shift+Enter is a new line. An input method's Enter does neither.
export function sendOnEnter(field, form) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  field.addEventListener("input", () => growWith(field));
}

// Makes a field as high as its text; the style sheet bounds it.
export function growWith(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}

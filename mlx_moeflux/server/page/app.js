// The page: conversations on the left, the one that is shown, and the field for the next question.

import { apiKey, metrics, properties } from "./api.js";
import { Archive, exportOf, importFrom, newConversation, titleOf } from "./conversations.js";
import { bytes, EngineView } from "./engine.js";
import { readFiles, sizeOf } from "./files.js";
import { growWith, MessageView, sendOnEnter } from "./messages.js";
import { Run } from "./run.js";

const $ = (id) => document.getElementById(id);
const UNAUTHORISED = 401;
const THEMES = ["auto", "light", "dark"];

let archive = null; // null where the browser keeps nothing
let conversations = [];
let current = newConversation();
let props = null; // of the server; null until it answers
let counts = null; // of the server, as of the last reply
let views = new Map(); // message -> MessageView, of the current conversation
let attached = []; // files of the next question
const runs = new Map(); // conversation -> its reply under way
const returned = new Map(); // conversation not shown -> questions in it that the server refused
const engine = new EngineView($("engine"));

// Server

async function connect() {
  try {
    props = await properties();
  } catch (error) {
    say(error.message, { retry: true });
    if (error.status === UNAUTHORISED) askForKey();
    return;
  }
  say("");
  $("key-error").hidden = true;
  $("model").textContent = props.model;
  $("model").title = `${props.model}, context of ${props.context_length} tokens`;
  $("no-template").hidden = props.chat_template !== null;
  for (const field of samplers()) {
    const value = props.defaults[field.name];
    if (value !== undefined) field.placeholder = `${value}`;
  }
  counts = await metrics().catch(() => null);
  showMessages();
}

function askForKey() {
  openSettings();
  $("key-error").textContent = apiKey.get() ? "The server refused this API key: it is wrong." :
    "This server wants an API key.";
  $("key-error").hidden = false;
  $("key").focus();
}

// Shows a sentence above the field until the next one; an empty one hides it. retry: Its button
// asks the server again.
function say(text, { retry = false } = {}) {
  if (!text && !archive) text = "This browser keeps no conversations: export what you need.";
  $("alert-text").textContent = text;
  $("alert").hidden = !text;
  $("alert-button").textContent = retry ? "Try again" : "Close";
  $("alert-button").onclick = retry ? connect : () => ($("alert").hidden = true);
}

// Conversations

async function keep(conversation) {
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  try {
    await archive?.put(conversation);
  } catch {
    say("This browser has no room for the conversation: export it.");
  }
}

function touch(conversation) {
  conversation.changed = Date.now();
  conversations = [conversation, ...conversations.filter((one) => one !== conversation)];
  listConversations();
  return keep(conversation);
}

function open(conversation) {
  current = conversation;
  sessionStorage.setItem("conversation", conversation.id);
  views = new Map();
  $("messages").replaceChildren($("empty"));
  document.body.classList.remove("drawer");
  fillSettings();
  listConversations();
  showMessages();
  $("messages").scrollTop = $("messages").scrollHeight;
  for (const question of returned.get(conversation) ?? []) giveBack(question);
  returned.delete(conversation);
}

function startNew() {
  open(newConversation(current));
  $("question").focus();
}

function listConversations() {
  const items = conversations.map((conversation) => {
    const item = $("item-template").content.firstElementChild.cloneNode(true);
    const title = item.querySelector(".title");
    title.textContent = title.title = titleOf(conversation);
    if (conversation === current) title.setAttribute("aria-current", "true");
    item.classList.toggle("running", runs.has(conversation));
    title.addEventListener("click", () => open(conversation));
    item.querySelector(".export").addEventListener("click", () => save([conversation]));
    item.querySelector(".remove").addEventListener("click", () => remove(conversation));
    return item;
  });
  $("conversations").replaceChildren(...items);
  $("export").disabled = !conversations.length;
}

async function remove(conversation) {
  if (!confirm(`Delete “${titleOf(conversation)}”? There is no way back.`)) return;
  runs.get(conversation)?.stop();
  runs.delete(conversation);
  await forget(conversation);
  if (conversation === current) open(conversations[0] ?? newConversation(conversation));
  else listConversations();
}

function forget(conversation) {
  conversations = conversations.filter((one) => one !== conversation);
  return archive?.remove(conversation);
}

function save(chosen) {
  const link = document.createElement("a");
  const name = chosen.length === 1 ? titleOf(chosen[0]).replace(/[^\p{L}\p{N}_-]+/gu, "-") :
    "conversations";
  link.href = URL.createObjectURL(new Blob([exportOf(chosen)], { type: "application/json" }));
  link.download = `${name}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function load(files) {
  try {
    for (const file of files) {
      for (const conversation of importFrom(await file.text())) await keep(conversation);
    }
    say("");
    if (conversations.length) open(conversations[0]);
  } catch (error) {
    say(error.message);
  }
}

// Messages and replies

const act = {
  copy: (message, button) => copy(message.content, button),
  edit: (message) => {
    if (runs.has(current)) return;
    editFrom(message, message.content);
  },
  regenerate: (message) => {
    if (runs.has(current)) return;
    const before = [...current.messages];
    current.messages.splice(current.messages.indexOf(message));
    answer({ before });
  },
};

function editFrom(message, text) {
  views.get(message).edit((edited) => {
    ask({ text: edited, files: message.files ?? [], instead: message });
  }, text);
}

function showMessages() {
  const box = $("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  const run = runs.get(current);
  const plain = props?.chat_template === null;
  for (const [message, view] of views) {
    if (!current.messages.includes(message)) {
      view.element.remove();
      views.delete(message);
    }
  }
  current.messages.forEach((message, i) => {
    if (!views.has(message)) {
      views.set(message, new MessageView(message, act));
      box.append(views.get(message).element);
    } else if (run && message !== run.message) {
      return; // a reply changes no other message
    }
    const last = i === current.messages.length - 1;
    views.get(message).show({ last, running: message === run?.message, plain });
  });
  $("empty").hidden = current.messages.length > 0;
  document.body.classList.toggle("replying", Boolean(run));
  if (run) engine.show(run, props?.layers);
  else engine.idle(counts);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// Shows changes with the next picture, however many there are until then.
let scheduled = false;
function scheduleMessages() {
  if (scheduled) return;
  scheduled = true;
  setTimeout(() => {
    scheduled = false;
    showMessages();
  }, 50);
}

// instead: The earlier question that this one replaces, with what follows.
function ask({ text, files, instead }) {
  const before = [...current.messages];
  if (instead) current.messages.splice(current.messages.indexOf(instead));
  current.messages.push({ role: "user", content: text, files });
  $("messages").scrollTop = $("messages").scrollHeight;
  answer({ before, question: { text, files, instead } });
}

// before: The messages to return to, and question: what to give back, if the server refuses.
async function answer({ before, question }) {
  if (!props) await connect();
  say("");
  const conversation = current;
  const run = new Run(conversation, {
    template: props?.chat_template !== null,
    changed: () => conversation === current && scheduleMessages(),
    saved: () => conversations.includes(conversation) && keep(conversation),
  });
  runs.set(conversation, run);
  touch(conversation);
  showMessages();
  $("messages").scrollTop = $("messages").scrollHeight;
  await run.go();
  runs.delete(conversation);
  counts = run.now;
  if (run.refused) await takeBack(conversation, before, question, run.message.error);
  listConversations();
  showMessages();
  $("announcement").textContent = run.refused ? "" : run.message.error ?? "The reply is complete.";
  if (run.status === UNAUTHORISED) askForKey();
}

// A refused question would spoil the next one: the conversation is what it was before.
async function takeBack(conversation, before, question, why) {
  conversation.messages = before;
  say(why);
  if (question && conversation === current) {
    showMessages();
    giveBack(question);
  } else if (question) {
    returned.set(conversation, [...(returned.get(conversation) ?? []), question]);
  }
  if (!conversations.includes(conversation)) return;
  if (before.length || returned.has(conversation)) await keep(conversation);
  else await forget(conversation);
}

function giveBack({ text, files, instead }) {
  if (instead) {
    editFrom(instead, text);
    return;
  }
  const field = $("question");
  field.value = [text, field.value].filter(Boolean).join("\n\n");
  growWith(field);
  attach([...files, ...attached]);
}

// Files of the next question

function attach(files) {
  attached = files;
  const items = files.map((file) => {
    const item = $("attached-template").content.firstElementChild.cloneNode(true);
    item.querySelector(".name").textContent = `${file.name}, ${bytes(sizeOf(file))}`;
    const button = item.querySelector("button");
    button.title = `Remove ${file.name}`;
    button.setAttribute("aria-label", button.title);
    button.addEventListener("click", () => {
      attach(attached.filter((one) => one !== file));
      $("question").focus();
    });
    return item;
  });
  $("attached").replaceChildren(...items);
  $("attached").hidden = !files.length;
}

async function addFiles(chosen) {
  const { files, refused } = await readFiles(chosen, attached);
  attach([...attached, ...files]);
  say(refused.join(" "));
  $("question").focus();
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard's interface exists on https and localhost alone.
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1200);
}

// Settings

function samplers() {
  return [...$("samplers").querySelectorAll("input")];
}

function openSettings() {
  if ($("settings").open) return;
  fillSettings();
  $("settings").showModal();
}

function fillSettings() {
  $("system").value = current.system;
  $("thinking").value = current.thinking ?? "auto";
  for (const field of samplers()) field.value = current.options[field.name] ?? "";
  $("key").value = apiKey.get();
  $("theme").value = document.documentElement.dataset.theme;
}

function takeSettings() {
  current.system = $("system").value.trim();
  current.thinking = $("thinking").value;
  current.options = {};
  for (const field of samplers()) {
    if (field.value !== "" && field.validity.valid) {
      current.options[field.name] = field.valueAsNumber;
    }
  }
  if (conversations.includes(current)) keep(current);
  if ($("key").value !== apiKey.get()) {
    apiKey.set($("key").value.trim());
    connect();
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  $("theme").value = theme;
  $("theme-button").title = `Theme: ${theme === "auto" ? "system" : theme}`;
}

// Events

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const [text, files] = [$("question").value, attached];
  if (!(text.trim() || files.length) || runs.has(current)) return;
  $("question").value = "";
  growWith($("question"));
  attach([]);
  ask({ text, files });
});
$("attach").addEventListener("click", () => $("attachment").click());
$("attachment").addEventListener("change", async () => {
  await addFiles([...$("attachment").files]);
  $("attachment").value = "";
});
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  if (!$("settings").open) addFiles([...event.dataTransfer.files]);
});
sendOnEnter($("question"), $("composer"));
$("stop").addEventListener("click", () => runs.get(current)?.stop());
$("new").addEventListener("click", startNew);
$("menu").addEventListener("click", () => document.body.classList.toggle("drawer"));
$("shade").addEventListener("click", () => document.body.classList.remove("drawer"));
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await load($("file").files);
  $("file").value = "";
});
$("export").addEventListener("click", () => save(conversations));
$("settings-button").addEventListener("click", openSettings);
$("settings").addEventListener("change", takeSettings);
$("settings").addEventListener("close", () => {
  takeSettings();
  $("question").focus();
});
$("theme").addEventListener("change", () => setTheme($("theme").value));
$("theme-button").addEventListener("click", () => {
  const next = THEMES.indexOf(document.documentElement.dataset.theme) + 1;
  setTheme(THEMES[next % THEMES.length]);
});
$("messages").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copy(button.closest(".code").querySelector("pre").textContent, button);
});

document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey;
  if ($("settings").open) return;
  if (event.key === "Escape") {
    document.body.classList.remove("drawer");
    runs.get(current)?.stop();
  } else if (command && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    startNew();
  } else if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
    event.preventDefault();
    $("question").focus();
  } else if (event.key === "ArrowUp" && event.target === $("question") && !event.target.value) {
    const last = current.messages.findLast((message) => message.role === "user");
    if (last) {
      event.preventDefault();
      act.edit(last);
    }
  }
});

// Beginning

setTheme(document.documentElement.dataset.theme);
try {
  archive = await Archive.open();
  conversations = await archive.all();
} catch {
  archive = null;
}
const before = sessionStorage.getItem("conversation");
open(conversations.find((one) => one.id === before) ?? newConversation(conversations[0]));
$("not-started").remove();
connect();
$("question").focus();

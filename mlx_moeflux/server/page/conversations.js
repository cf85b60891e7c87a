// Conversations: what they are, where the browser keeps them, and their file.
//
// A conversation is {id, title, changed, system, thinking, options, messages}. A message is
// {role, content}, in a question also {files}, see files.js, and in a reply {reasoning,
// thoughtSeconds, end, error, numbers}, see run.js.

const STORE = "conversations";
const FORMAT = "mlx_moeflux conversations";
const TITLE_LENGTH = 60;
const THINKING = ["auto", "on", "off"]; // auto: as the template does if nothing is said
const OPTIONS = Array.from(document.querySelectorAll("#samplers input"), (input) => input.name);

// `before`: The conversation whose settings the new one takes over.
export function newConversation(before) {
  return {
    id: newId(),
    title: "",
    changed: Date.now(),
    system: before?.system ?? "",
    thinking: before?.thinking ?? "auto",
    options: { ...before?.options },
    messages: [],
  };
}

// randomUUID() exists on https and localhost alone.
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// One line.
export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  const texts = [conversation.title, first?.content, first?.files?.[0]?.name];
  const text = texts.find((one) => one?.trim()) ?? "New conversation";
  const [line] = text.trim().split(/[\n\v\f\r\x85\u2028\u2029]/, 1);
  const characters = [...line.replace(/\s+/g, " ")]; // whole ones
  if (characters.length <= TITLE_LENGTH) return characters.join("");
  return `${characters.slice(0, TITLE_LENGTH).join("").trim()}…`;
}

// Keeps conversations in this browser's IndexedDB.
export class Archive {
  static async open() {
    const opening = indexedDB.open("mlx_moeflux", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
    return new Archive(await finished(opening));
  }

  constructor(database) {
    this.database = database;
  }

  // All conversations, the one that changed last first.
  async all() {
    const found = await finished(this.store("readonly").getAll());
    return found.sort((a, b) => b.changed - a.changed);
  }

  put(conversation) {
    return finished(this.store("readwrite").put(conversation));
  }

  remove(conversation) {
    return finished(this.store("readwrite").delete(conversation.id));
  }

  store(mode) {
    return this.database.transaction(STORE, mode).objectStore(STORE);
  }
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// The text of a file that importFrom() reads.
export function exportOf(conversations) {
  const written = conversations.map(({ id, ...rest }) => rest);
  return JSON.stringify({ format: FORMAT, version: 1, conversations: written }, null, 1);
}

// The conversations of an exported file, or of one that /save of `mlx_moeflux chat` wrote, with new
// ids: nothing that is here is replaced. Throws an Error that says what is wrong.
export function importFrom(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is no JSON.");
  }
  if (Array.isArray(file?.messages)) file = { conversations: [ofTerminal(file.messages)] };
  if (!Array.isArray(file?.conversations)) throw new Error("This file holds no conversations.");
  return file.conversations.map(checked);
}

function ofTerminal(messages) {
  const system = messages.find((message) => message?.role === "system")?.content;
  return { system, messages: messages.filter((message) => message?.role !== "system") };
}

function checked(found, i) {
  const wrong = (what) => new Error(`Conversation ${i + 1} of this file has ${what}.`);
  if (!Array.isArray(found?.messages)) throw wrong("no messages");
  const messages = found.messages.map((message) => {
    if (!["user", "assistant"].includes(message?.role)) throw wrong("a message of no known role");
    if (typeof message.content !== "string") throw wrong("a message without text");
    if (message.role === "user") {
      const files = message.files ?? [];
      if (!Array.isArray(files) || !files.every(isFile)) throw wrong("a file without name or text");
      return {
        role: message.role,
        content: message.content,
        files: files.map(({ name, text }) => ({ name, text })),
      };
    }
    return {
      role: message.role,
      content: message.content,
      reasoning: textOf(message.reasoning),
      thoughtSeconds: numberOf(message.thoughtSeconds),
      end: textOf(message.end) || null,
      error: textOf(message.error) || null,
      numbers: numbersOf(message.numbers),
    };
  });
  return {
    id: newId(),
    title: textOf(found.title),
    changed: numberOf(found.changed) ?? Date.now(),
    system: textOf(found.system),
    thinking: THINKING.includes(found.thinking) ? found.thinking : "auto",
    options: Object.fromEntries(
      Object.entries(numbersOf(found.options) ?? {}).filter(([name]) => OPTIONS.includes(name)),
    ),
    messages,
  };
}

const isFile = (file) => typeof file?.name === "string" && typeof file.text === "string";
const textOf = (value) => (typeof value === "string" ? value : "");
const numberOf = (value) => (Number.isFinite(value) ? value : null);

function numbersOf(value) {
  if (typeof value !== "object" || value === null) return null;
  return Object.fromEntries(Object.entries(value).filter(([, one]) => Number.isFinite(one)));
}

// One reply under way: takes its parts into a message, and measures it.

import { metrics, reply } from "./api.js";
import { withFiles } from "./files.js";

const POLL_MS = 700;
const SAVE_MS = 1000;

// How a reply ended, in `message.end`: "running" only while it comes or if the page was closed.
export const ENDS = { running: "running", stop: "stop", length: "length", stopped: "stopped",
  error: "error" };

export class Run {
  // changed: Called after each change of the message. saved: Called when it should be kept.
  constructor(conversation, { template, changed, saved }) {
    this.conversation = conversation;
    this.message = { role: "assistant", content: "", reasoning: "", thoughtSeconds: null,
      end: ENDS.running, error: null, numbers: null };
    this.template = template;
    this.changed = changed;
    this.saved = saved;
    this.controller = new AbortController();
    this.tokens = 0; // parts that came; the server sends about one a token
    this.usage = null;
    this.before = this.now = null; // counts of the server
  }

  get rate() {
    const seconds = (this.last - this.first) / 1000;
    const tokens = this.usage?.completion_tokens ?? this.tokens;
    return seconds > 0 ? (tokens - 1) / seconds : null;
  }

  // Counts of experts since this reply began, of all replies together; null if none was looked up,
  // as in a resident model.
  get experts() {
    if (!this.before || !this.now) return null;
    const grown = (name) => this.now[name] - this.before[name];
    const lookups = grown("expert_lookups_total");
    if (!lookups) return null;
    return {
      hitRate: grown("expert_hits_total") / lookups,
      bytesRead: grown("expert_bytes_read_total"),
    };
  }

  // The server did not begin the reply.
  get refused() {
    return this.message.end === ENDS.error && !this.tokens;
  }

  stop() {
    this.controller.abort();
  }

  async go() {
    const { conversation, message } = this;
    const messages = promptOf(conversation);
    conversation.messages.push(message);
    this.changed();
    this.before = await metrics().catch(() => null);
    const polling = setInterval(() => this.poll(), POLL_MS);
    const saving = setInterval(() => this.saved(), SAVE_MS);
    try {
      await this.read(messages);
      message.end ??= ENDS.stop;
    } catch (error) {
      if (error.name === "AbortError") {
        message.end = ENDS.stopped;
      } else {
        message.end = ENDS.error;
        message.error = error.message;
        this.status = error.status;
      }
    }
    clearInterval(polling);
    clearInterval(saving);
    await this.poll();
    message.numbers = this.tokens ? this.numbers() : null;
    this.changed();
    this.saved();
  }

  async read(messages) {
    const { conversation, message } = this;
    const begun = performance.now();
    const signal = this.controller.signal;
    signal.throwIfAborted();
    let end = null;
    const options = { ...conversation.options };
    const thinking = { on: true, off: false }[conversation.thinking];
    if (this.template && thinking !== undefined) {
      options.chat_template_kwargs = { enable_thinking: thinking };
    }
    for await (const part of reply(messages, options, { template: this.template, signal })) {
      const now = performance.now();
      if (part.text || part.reasoning) {
        this.first ??= now;
        this.last = now;
        this.tokens += 1;
        this.firstSeconds ??= (now - begun) / 1000;
        message.reasoning += part.reasoning;
        if (part.reasoning) message.thoughtSeconds = (now - this.first) / 1000;
        message.content += part.text;
      }
      end = part.finish ?? end;
      this.usage = part.usage ?? this.usage;
      this.changed();
    }
    message.end = end;
  }

  async poll() {
    this.now = await metrics().catch(() => this.now);
    this.changed();
  }

  numbers() {
    const found = {
      tokens: this.usage?.completion_tokens ?? this.tokens,
      rate: this.rate,
      firstSeconds: this.firstSeconds,
      promptTokens: this.usage?.prompt_tokens,
      cachedTokens: this.usage?.prompt_tokens_details?.cached_tokens,
      ...this.experts,
    };
    return Object.fromEntries(Object.entries(found).filter(([, one]) => Number.isFinite(one)));
  }
}

// The messages of a request for the next reply. Many templates want the roles to alternate, so
// questions without a reply between them become one.
function promptOf({ system, messages }) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const { role, reasoning, ...message } of messages) {
    const content = withFiles(message);
    const last = found.at(-1);
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else if (reasoning) found.push({ role, content, reasoning_content: reasoning });
    else if (role === "user" || content) found.push({ role, content });
  }
  return found;
}

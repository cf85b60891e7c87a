// Requests to the server that served this page.

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const KEY = "api-key";

// The key is kept until the tab is closed.
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

// path: Relative to the page, which a proxy may serve under a folder.
async function request(path, options = {}) {
  const headers = { ...options.headers };
  // Headers are bytes; the server reads a key as UTF-8.
  const key = String.fromCharCode(...new TextEncoder().encode(apiKey.get()));
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError) throw new ServerError("The server cannot be reached.");
    throw error;
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ServerError(body.error?.message ?? `The server answered ${response.status}.`,
    response.status);
}

// Model, limits and defaults.
export async function properties() {
  return (await request("props")).json();
}

// The server's counts by name, without the prefix of their names.
export async function metrics() {
  const found = {};
  for (const line of (await (await request("metrics")).text()).split("\n")) {
    const sample = /^mlx_moeflux_(\w+) (\S+)$/.exec(line);
    if (sample) found[sample[1]] = Number(sample[2]);
  }
  return found;
}

// Yields the parts of a reply: {text, reasoning, finish, usage}, each with what is new in it.
//
// A model without a chat template continues the text of the conversation.
export async function* reply(messages, options, { template, signal }) {
  const asked = template
    ? { path: "v1/chat/completions", messages }
    : { path: "v1/completions", prompt: messages.map((message) => message.content).join("") };
  const { path, ...what } = asked;
  const body = { ...what, ...options, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const { error, choices, usage } = JSON.parse(data);
    if (error) throw new ServerError(error.message);
    const choice = choices?.[0] ?? {};
    yield {
      text: choice.delta?.content ?? choice.text ?? "",
      reasoning: choice.delta?.reasoning_content ?? "",
      finish: choice.finish_reason ?? null,
      usage: usage ?? null,
    };
  }
  throw new ServerError("The server closed the connection before the reply ended.");
}

// Yields the data of server-sent events; comments keep a silent connection open.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection to the server broke.");
    }
    if (part.done) return;
    const blocks = (held + part.value).split("\n\n");
    held = blocks.pop();
    for (const line of blocks.flatMap((block) => block.split("\n"))) {
      if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}

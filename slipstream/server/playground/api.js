// The server's API: what it serves, and chats as streams of chunks.

let key = sessionStorage.getItem("slipstream-key") ?? "";

/** The key that is sent with each request; empty: none. */
export function useKey(given) {
  key = given;
  sessionStorage.setItem("slipstream-key", given);
}

export function hasKey() {
  return key !== "";
}

/** An error that the server itself reported; `status` is that of HTTP, 0 inside of a stream. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not an answer of this server: the status has to do.
  }
  throw new ServerError(message, response.status);
}

/** The served model, as GET /v1/models has it. */
export async function servedModel() {
  return (await (await call("/v1/models")).json()).data[0];
}

/** Nodes of a tree, at most, where nobody sets a limit. */
export const ALL_NODES = 64;

/** What `speculate` is in a request: undefined leaves it to the server. */
export function speculation({ drafter, nodes }) {
  if (drafter === "none") return false;
  return nodes === ALL_NODES ? drafter || undefined : `auto:max_nodes=${nodes}`;
}

/** The body of a chat. `settings.seed` makes a sampled answer one that can be had again. */
export function chatBody(model, messages, settings) {
  const body = {
    model,
    messages,
    temperature: settings.temperature,
    max_completion_tokens: settings.length,
  };
  if (settings.temperature > 0) body.seed = settings.seed;
  const speculate = speculation(settings);
  if (speculate !== undefined) body.speculate = speculate;
  return body;
}

/** The chunks of a streamed chat, as they arrive. */
export async function* chatChunks(body, signal) {
  const streamed = {
    ...body,
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    return_origins: true,
    return_trees: true,
  };
  const response = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(streamed), signal });
  let complete = false;
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") {
      complete = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, 0);
    yield chunk;
  }
  if (!complete) throw new TypeError("the stream ended early");
}

/** The `data` of each server-sent event. */
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
    }
  }
}

/** How far apart two tokens are, in nats, after a prompt of token ids; null if the server does not say. */
export async function gapInNats(model, promptIds, first, second) {
  const body = { model, prompt: [...promptIds, first], max_tokens: 1, prompt_logprobs: 20, speculate: false };
  try {
    const answer = await (await call("/v1/completions", { method: "POST", body: JSON.stringify(body) })).json();
    const last = (answer.choices[0].prompt_logprobs ?? answer.prompt_logprobs).at(-1);
    const gap = Math.abs(last[first].logprob - last[second].logprob);
    return Number.isFinite(gap) ? gap : null;
  } catch {
    return null; // not among the likeliest, or not answered
  }
}

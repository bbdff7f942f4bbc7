// The request that the page sends, for a shell and for Python.

/** A curl command. */
export function asCurl(origin, body, needsKey) {
  const key = needsKey ? ' \\\n  -H "Authorization: Bearer $SLIPSTREAM_API_KEY"' : "";
  const json = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}/v1/chat/completions \\\n  -H "Content-Type: application/json"${key} \\\n  -d '${json}'`;
}

// Fields of this server that the client sends only if told so.
const OURS = ["speculate"];

/** A program with the `openai` package. */
export function asPython(origin, body, needsKey) {
  const known = Object.entries(body).filter(([name]) => !OURS.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => OURS.includes(name)));
  if (Object.keys(extra).length) known.push(["extra_body", extra]);
  const lines = known.map(([name, value]) => `    ${name}=${literal(value, 1)},`).join("\n");
  const key = needsKey ? 'os.environ["SLIPSTREAM_API_KEY"]' : '"none"';
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${key})
stream = client.chat.completions.create(
${lines}
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

/** A JSON value as Python writes it. */
function literal(value, depth) {
  const indent = "    ".repeat(depth + 1);
  const close = "    ".repeat(depth);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    return `[\n${value.map((item) => `${indent}${literal(item, depth + 1)},\n`).join("")}${close}]`;
  }
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

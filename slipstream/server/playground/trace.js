// What is known of an answer while it arrives: its steps, their tokens, and who drafted each.

/** An answer as a list of steps. A step has `tokens` ({id, text, origin, thought}), `tree`, `decision` and `at`. */
export class Trace {
  constructor(now = performance.now()) {
    this.steps = [];
    this.tokens = [];
    this.text = "";
    this.startedAt = now;
    this.firstAt = null;
    this.lastAt = null;
    this.firstTokens = 0; // those that came with the first step: their time is that of the prompt
    this.promptIds = null;
    this.finish = null;
    this.timings = null;
  }

  /** Take a chunk; returns the steps that are new or have grown. */
  add(chunk, now = performance.now()) {
    if (chunk.timings) this.timings = chunk.timings;
    if (chunk.prompt_token_ids) this.promptIds = chunk.prompt_token_ids;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const thought = choice.delta?.reasoning_content ?? "";
    const content = choice.delta?.content ?? "";
    this.text += content;
    if (!choice.token_ids?.length && this.steps.length) {
      // Text that had been held back: it belongs to the last token.
      const last = this.steps.at(-1);
      last.tokens.at(-1).text += thought + content;
      return thought + content ? [last] : [];
    }
    const fresh = stepsOf(choice, thought + content, thought.length);
    for (const step of fresh) {
      step.index = this.steps.length;
      step.at = now;
      this.steps.push(step);
      this.tokens.push(...step.tokens);
    }
    if (fresh.length) {
      if (this.firstAt === null) {
        this.firstAt = now;
        this.firstTokens = this.tokens.length;
      }
      this.lastAt = now;
    }
    return fresh;
  }

  /** Decode speed so far; at the end the server's own figure, if it gives one. */
  get tokensPerSecond() {
    if (this.timings?.predicted_per_second) return this.timings.predicted_per_second;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0 ? (this.tokens.length - this.firstTokens) / seconds : 0;
  }

  get tokensPerStep() {
    return this.steps.length ? this.tokens.length / this.steps.length : 0;
  }

  /** Milliseconds from the request to the last token. */
  get elapsed() {
    return (this.lastAt ?? this.startedAt) - this.startedAt;
  }

  /** Tokens by who made them; the model's own under null. */
  get byOrigin() {
    const counts = new Map();
    for (const token of this.tokens) counts.set(token.origin, (counts.get(token.origin) ?? 0) + 1);
    return counts;
  }

  /** The step that gave most. */
  get bestStep() {
    return this.steps.reduce((best, step) => (best && best.tokens.length >= step.tokens.length ? best : step), null);
  }
}

/** The steps of one choice of a chunk: by its trees, or else after each token that no drafter made. */
function stepsOf(choice, text, thoughtLength) {
  const trees = choice.trees ?? [];
  const tokens = (choice.token_ids ?? []).map((id, i) => {
    return { id, text: "", origin: choice.origins?.[i] ?? null, thought: false };
  });
  const steps = [];
  let next = 0;
  while (next < tokens.length) {
    const tree = trees[steps.length] ?? null;
    let end = next + 1;
    if (tree) end = next + tree.accepted.length + 1;
    else while (end < tokens.length && tokens[end - 1].origin !== null) end++;
    steps.push({ tokens: tokens.slice(next, end), tree, decision: tree?.decision ?? choice.decision ?? null });
    next = end;
  }
  spread(text, tokens, knownTexts(steps));
  let place = 0;
  for (const token of tokens) {
    token.thought = place < thoughtLength;
    place += token.text.length;
  }
  return steps;
}

/** The text of each token as far as the trees have it: accepted nodes, and the next step's root. */
function knownTexts(steps) {
  return steps.flatMap((step, i) => {
    const accepted = step.tree ? step.tree.accepted.map((node) => step.tree.texts[node]) : [];
    return step.tokens.map((_, j) => accepted[j] ?? (step.tree ? steps[i + 1]?.tree?.texts[0] : undefined));
  });
}

/** Give each token its part of the text; what cannot be told apart goes to the first token in doubt. */
export function spread(text, tokens, known) {
  let first = 0;
  while (first < tokens.length && known[first] !== undefined && text.startsWith(known[first])) {
    tokens[first].text = known[first];
    text = text.slice(known[first].length);
    first++;
  }
  let last = tokens.length - 1;
  while (last > first && known[last] !== undefined && text.endsWith(known[last])) {
    tokens[last].text = known[last];
    text = text.slice(0, text.length - known[last].length);
    last--;
  }
  if (first < tokens.length) tokens[first].text = text;
  else if (text && tokens.length) tokens[tokens.length - 1].text += text;
}

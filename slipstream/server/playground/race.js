// A race: the same prompt plain and with drafts. One run after the other; then both are seen side by side.

import { chatBody, chatChunks, gapInNats, speculation } from "./api.js";
import { paced } from "./pace.js";
import { Trace } from "./trace.js";
import { AnswerView } from "./view.js";

const TICK = 50; // ms between two drawings

/** Where two lists of tokens part: {at, plain, drafted}, or null if they are the same. */
export function firstDifference(plain, drafted) {
  const length = Math.max(plain.length, drafted.length);
  for (let at = 0; at < length; at++) {
    if (plain[at]?.id !== drafted[at]?.id) return { at, plain: plain[at] ?? null, drafted: drafted[at] ?? null };
  }
  return null;
}

/** The sentence about the texts. */
export function verdict(count, difference, gap) {
  if (!difference) return `Identical: all ${count} tokens.`;
  const shown = (token) => (token ? JSON.stringify(token.text) : "its end");
  const nats = gap === null ? "" : `, ${gap.toFixed(4)} nats apart`;
  return `The texts part at token ${difference.at + 1}: ${shown(difference.plain)} plain, ${shown(difference.drafted)} drafted${nats}.`;
}

function element(name, className, parent, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
}

const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

/** One of the two columns: a name, a clock and a text. */
class Lane {
  constructor(parent, name) {
    this.box = element("section", "lane", parent);
    this.box.setAttribute("aria-label", name);
    const head = element("header", "", this.box);
    this.name = element("h3", "", head, name);
    this.clock = element("output", "clock", head, "0.00 s");
    this.track = element("div", "track", this.box);
    this.begin();
  }

  begin() {
    this.trace = new Trace();
    this.track.replaceChildren();
    this.view = new AnswerView(this.track, this.trace);
    this.fresh = [];
    this.box.classList.remove("done");
    this.since = performance.now();
    this.tell(0);
  }

  draw() {
    this.view.draw(this.fresh.splice(0));
    this.track.scrollTop = this.track.scrollHeight;
  }

  tell(ms) {
    this.clock.value = seconds(ms);
  }

  end(ms) {
    this.tell(ms);
    this.box.classList.add("done");
  }
}

/** A race in an element of the page. */
export class Race {
  constructor(parent, grown) {
    this.grown = grown; // is called when the lane with drafts has grown
    this.box = element("article", "race", parent);
    this.phase = element("p", "phase", this.box);
    const lanes = element("div", "lanes", this.box);
    this.plain = new Lane(lanes, "Plain");
    this.drafted = new Lane(lanes, "With drafts");
    this.result = element("div", "result", this.box);
  }

  /** Run both, and compare. */
  async run(model, messages, settings, signal) {
    const drafting = speculation(settings) === false ? { ...settings, drafter: "" } : settings;
    const fast = chatBody(model, messages, drafting);
    const slow = chatBody(model, messages, { ...settings, drafter: "none" });
    this.phase.textContent = "Reading the prompt once, so that neither run pays for it";
    for await (const _ of chatChunks({ ...fast, max_completion_tokens: 1 }, signal));
    this.phase.textContent = "First plain";
    await this.live(this.plain, slow, signal);
    const plain = this.plain.trace;
    this.phase.textContent = "Then with drafts; beside it the plain run again, as it was";
    const replay = this.replay(signal);
    await this.live(this.drafted, fast, signal);
    await this.conclude(model, plain, this.drafted.trace);
    await replay;
  }

  /** A run as it happens. */
  async live(lane, body, signal) {
    lane.begin();
    const ticking = setInterval(() => lane.tell(performance.now() - lane.since), TICK);
    const draw = paced(TICK, () => lane.draw());
    try {
      for await (const chunk of chatChunks(body, signal)) {
        lane.fresh.push(...lane.trace.add(chunk));
        draw();
        if (lane === this.drafted) this.grown();
      }
    } finally {
      draw.now();
      clearInterval(ticking);
      lane.end(lane.trace.elapsed);
    }
  }

  /** The plain run again, at the pace that it had: as bare text, since drawing must not cost the other run its time. */
  replay(signal) {
    const lane = this.plain;
    const { steps, startedAt, elapsed } = lane.trace;
    const real = lane.view.box;
    const shown = document.createElement("div");
    shown.className = "text replay";
    real.replaceWith(shown);
    lane.box.classList.remove("done");
    const since = performance.now();
    let next = 0;
    return new Promise((resolve) => {
      const ticking = setInterval(() => {
        const passed = performance.now() - since;
        let text = "";
        while (next < steps.length && steps[next].at - startedAt <= passed) {
          text += steps[next++].tokens.map((token) => token.text).join("");
        }
        shown.append(text);
        lane.track.scrollTop = lane.track.scrollHeight;
        lane.tell(Math.min(passed, elapsed));
        if (next < steps.length && !signal.aborted) return;
        clearInterval(ticking);
        shown.replaceWith(real);
        lane.track.scrollTop = lane.track.scrollHeight;
        lane.end(elapsed);
        resolve();
      }, 2 * TICK);
    });
  }

  async conclude(model, plain, drafted) {
    const difference = firstDifference(plain.tokens, drafted.tokens);
    let gap = null;
    if (difference?.plain && difference.drafted && plain.promptIds) {
      const before = plain.tokens.slice(0, difference.at).map((token) => token.id);
      gap = await gapInNats(model, [...plain.promptIds, ...before], difference.plain.id, difference.drafted.id);
    }
    const ratio = plain.elapsed / drafted.elapsed;
    const decoding = drafted.tokensPerSecond / plain.tokensPerSecond;
    this.phase.textContent = "One run after the other. Other load on the machine changes the clocks, never the text.";
    element("p", "ratio", this.result, `${ratio.toFixed(2)}×`);
    const words = element("div", "", this.result);
    element("p", difference ? "verdict parted" : "verdict", words, verdict(drafted.tokens.length, difference, gap));
    const times = `${seconds(plain.elapsed)} plain, ${seconds(drafted.elapsed)} with drafts, from the request to the last token.`;
    const decode = Number.isFinite(decoding) && decoding > 0 ? ` Decoding alone: ${decoding.toFixed(2)}×.` : "";
    element("p", "small", words, times + decode);
    this.summary = `${ratio.toFixed(2)} times the speed. ${verdict(drafted.tokens.length, difference, gap)}`;
  }

  /** A race that did not end. */
  fail(message) {
    this.phase.textContent = message;
  }
}

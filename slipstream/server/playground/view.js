// An answer on the page: tokens in the colours of their drafters, steps that can be pointed at.

import { colourOf } from "./colours.js";

/** Draws a trace into an element as it grows; steps are reached by pointer, or by the arrow keys. */
export class AnswerView {
  constructor(parent, trace) {
    this.trace = trace;
    this.box = document.createElement("div");
    this.box.className = "text";
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Answer; arrow keys go from step to step");
    this.drawn = []; // the element of each step
    this.current = 0; // whose element is in the tab order
    this.fences = [{ before: "", line: "", code: false }]; // as each step begins: the last two lines, and whether in code
    parent.append(this.box);
    views.set(this.box, this);
  }

  /** Draw steps that are new or have grown. */
  draw(steps) {
    for (const step of steps) {
      const made = this.element(step);
      if (this.drawn[step.index]) this.drawn[step.index].replaceWith(made);
      else this.box.append(made);
      this.drawn[step.index] = made;
    }
  }

  element(step) {
    const made = document.createElement("span");
    made.className = "step";
    made.dataset.step = step.index;
    made.tabIndex = step.index === this.current ? 0 : -1;
    made.setAttribute("role", "button");
    const drafted = step.tokens.filter((token) => token.origin !== null);
    const by = [...new Set(drafted.map((token) => token.origin))].join(" and ");
    const text = step.tokens.map((token) => token.text).join("");
    made.setAttribute("aria-label", `${text} (${drafted.length ? `${drafted.length} drafted by ${by}` : "not drafted"})`);
    let fence = this.fences[step.index];
    for (const token of step.tokens) {
      if (!token.text) continue;
      const span = document.createElement("span");
      const code = fence.code;
      fence = fenced(fence, token.text);
      span.classList.add("token");
      span.classList.toggle("thought", token.thought);
      span.classList.toggle("blank", token.text.trim() === "");
      span.classList.toggle("break", /^\s*\n\s*$/.test(token.text)); // can be pointed at, too
      span.classList.toggle("code", code || fence.code || fence.line.startsWith("```"));
      if (token.origin !== null) {
        span.dataset.origin = token.origin;
        span.style.setProperty("--origin", colourOf(token.origin));
      }
      span.textContent = token.text;
      made.append(span);
    }
    this.fences[step.index + 1] = fence;
    return made;
  }

  /** Mark one step as the one being looked at; null: none. */
  mark(index) {
    this.box.querySelector(".step.shown")?.classList.remove("shown");
    if (index === null || !this.drawn[index]) return;
    this.drawn[index].classList.add("shown");
    this.drawn[this.current].tabIndex = -1;
    this.drawn[index].tabIndex = 0;
    this.current = index;
  }

  /** Give the keyboard to a step. */
  focus(index) {
    const to = Math.max(0, Math.min(index, this.drawn.length - 1));
    this.drawn[to]?.focus();
  }
}

const views = new WeakMap();

/** Code between lines of three backticks: where more text leads. */
function fenced({ before, line, code }, text) {
  const lines = (line + text).split("\n");
  for (const whole of lines.slice(0, -1)) {
    const fence = whole.trim();
    // Small models forget to open: backticks right below a line of text close something, they do not begin it.
    if (fence.startsWith("```")) code = !code && (fence !== "```" || /^$|:$/.test(before));
    before = fence;
  }
  return { before, line: lines.at(-1), code };
}

/** The view and the index of the step that an event happened on, or null. */
export function stepAt(target) {
  const element = target.closest?.(".step");
  const view = element && views.get(element.parentElement);
  return view ? { view, index: Number(element.dataset.step) } : null;
}

// The panel beside the answer: speed, who wrote what, and the tree of one step.

import { colourOf } from "./colours.js";
import { drawTree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const MOST_BARS = 160;

/** A large number; empty: there is none yet. */
function figure(id, text) {
  $(id).value = text || "–";
  $(id).classList.toggle("none", !text);
}

/** Shows one trace at a time, and one of its steps. */
export class Panel {
  constructor() {
    this.view = null;
    this.step = null;
    $("step-back").addEventListener("click", () => this.move(-1));
    $("step-on").addEventListener("click", () => this.move(+1));
    $("bars").addEventListener("click", (event) => {
      const bar = event.target.closest("[data-step]");
      if (bar) this.show(this.view, Number(bar.dataset.step));
    });
    $("legend").addEventListener("pointerover", (event) => this.single(event.target.closest("li")?.dataset.origin));
    $("legend").addEventListener("pointerleave", () => this.single(undefined));
  }

  clear() {
    this.view?.mark(null);
    this.view = this.step = null;
    for (const id of ["bars", "legend", "tree"]) $(id).replaceChildren();
    for (const id of ["counts", "step-facts", "decision"]) $(id).textContent = "";
    for (const id of ["rate", "per-step"]) figure(id, "");
    $("step-title").textContent = "Step";
    $("step-back").disabled = $("step-on").disabled = $("enlarge").disabled = true;
    this.note("Each step of an answer has a tree: what was drafted, and what of it the model accepted.");
  }

  /** Figures of the view's trace, as they are now. */
  figures(view) {
    if (this.view !== view) {
      this.view?.mark(null);
      this.step = null;
      $("bars").replaceChildren();
    }
    this.view = view;
    const { trace } = view;
    const rate = trace.tokensPerSecond;
    figure("rate", rate ? rate.toFixed(rate < 10 ? 1 : 0) : "");
    figure("per-step", trace.steps.length ? trace.tokensPerStep.toFixed(2) : "");
    this.drawBars(trace);
    this.drawLegend(trace);
    const count = (number, what) => `${number.toLocaleString()} ${what}${number === 1 ? "" : "s"}`;
    $("counts").textContent = `${count(trace.tokens.length, "token")} in ${count(trace.steps.length, "step")} of the model`;
  }

  drawBars(trace) {
    const bars = $("bars");
    const first = Math.max(0, trace.steps.length - MOST_BARS);
    while (bars.firstChild && Number(bars.firstChild.dataset.step) < first) bars.firstChild.remove();
    const from = bars.lastChild ? Number(bars.lastChild.dataset.step) + 1 : first;
    for (const step of trace.steps.slice(from)) {
      const bar = document.createElement("i");
      bar.dataset.step = step.index;
      for (const token of step.tokens) {
        const part = document.createElement("b");
        part.style.setProperty("--origin", token.origin === null ? "var(--own)" : colourOf(token.origin));
        bar.prepend(part);
      }
      bars.append(bar);
    }
    const most = Math.max(...trace.steps.map((step) => step.tokens.length));
    bars.style.setProperty("--unit", `${Math.min(5, 44 / most)}px`);
  }

  drawLegend(trace) {
    const items = [...trace.byOrigin].sort(([a, n], [b, m]) => (a === null) - (b === null) || m - n);
    const made = items.map(([origin, count]) => {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.setProperty("--origin", origin === null ? "var(--own)" : colourOf(origin));
      const share = document.createElement("small");
      share.textContent = `${Math.round((100 * count) / trace.tokens.length)}%`;
      item.append(swatch, origin ?? "the model itself", share);
      if (origin !== null) item.dataset.origin = origin;
      return item;
    });
    $("legend").replaceChildren(...made);
  }

  /** Only one drafter's tokens keep their colour. */
  single(origin) {
    for (const token of document.querySelectorAll(".token[data-origin]")) {
      token.classList.toggle("faded", origin !== undefined && token.dataset.origin !== origin);
    }
  }

  /** Show a step of a view's answer. */
  show(view, index) {
    if (!view?.trace.steps[index]) return;
    if (this.view !== view) this.figures(view);
    const { steps } = view.trace;
    const step = (this.step = steps[index]);
    view.mark(index);
    for (const bar of $("bars").children) bar.classList.toggle("shown", Number(bar.dataset.step) === index);
    $("step-title").textContent = `Step ${index + 1}`;
    $("step-back").disabled = index === 0;
    $("step-on").disabled = index === steps.length - 1;
    $("decision").textContent = step.decision ? `Policy: ${step.decision}` : "";
    $("enlarge").disabled = !(step.tree?.texts.length > 1);
    const drafted = step.tree ? step.tree.texts.length - 1 : 0;
    if (!drafted) {
      $("step-facts").textContent = "";
      this.note("Nothing was drafted here. The model wrote this token by itself.");
      return;
    }
    $("step-facts").textContent = `${step.tree.accepted.length} of ${drafted} accepted`;
    $("tree").replaceChildren(drawTree(step));
    $("tree").scrollTo(0, 0);
  }

  /** The tree on a page of its own. */
  enlarge() {
    $("large-title").textContent = `${$("step-title").textContent}: ${$("step-facts").textContent}`;
    $("large-tree").replaceChildren(drawTree(this.step));
    $("large").showModal();
  }

  note(text) {
    const made = document.createElement("p");
    made.className = "small";
    made.textContent = text;
    $("tree").replaceChildren(made);
  }

  move(by) {
    if (this.step) this.show(this.view, this.step.index + by);
  }
}

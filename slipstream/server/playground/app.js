// The page: what is typed, what is sent, what is shown.

import { ALL_NODES, chatBody, chatChunks, hasKey, servedModel, ServerError, useKey } from "./api.js";
import { settleColours } from "./colours.js";
import { EXAMPLES } from "./examples.js";
import { paced } from "./pace.js";
import { Panel } from "./panel.js";
import { Race } from "./race.js";
import { asCurl, asPython } from "./snippets.js";
import { Trace } from "./trace.js";
import { AnswerView, stepAt } from "./view.js";

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 899px)");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const TEXT = 50; // ms between two drawings of a text that grows
const LIVE = 250; // ms between two trees

const state = {
  model: null,
  mode: "chat",
  messages: [], // of the conversation, as they are sent
  running: null, // the AbortController of what runs now
  pinned: false, // a step was chosen by hand
  lastPrompt: "",
};
const panel = new Panel();

// -- settings ---------------------------------------------------------------------------------------------------------

function settings() {
  return {
    drafter: $("drafter").value,
    nodes: $("nodes").disabled ? ALL_NODES : Number($("nodes").value),
    temperature: Number($("temperature").value),
    length: Number($("length").value),
    seed: state.seed,
  };
}

function showSettings() {
  const drafter = $("drafter").value || state.model?.drafters[0];
  $("nodes").disabled = drafter?.split(":")[0] !== "auto"; // others have the size that they were loaded with
  const { nodes, temperature, length } = settings();
  $("nodes-value").value = $("nodes").disabled ? "" : `up to ${nodes}`;
  $("temperature-value").value = temperature === 0 ? "greedy" : temperature.toFixed(2);
  $("length-value").value = length;
}

function fillDrafters(model) {
  const [usual, ...others] = model.drafters;
  const options = [["", usual === "none" ? "none (default)" : `${usual} (default)`]];
  options.push(...others.filter((name) => name !== "none").map((name) => [name, name]));
  if (usual !== "none") options.push(["none", "none: plain decoding"]);
  const chosen = $("drafter").value;
  $("drafter").replaceChildren(...options.map(([value, text]) => new Option(text, value, false, value === chosen)));
  const parts = model.drafters.flatMap((name) => name.split("+")).map((name) => name.split(":")[0]);
  settleColours(parts.filter((name) => name !== "none" && name !== "auto"));
}

// -- the server, there or not -----------------------------------------------------------------------------------------

async function connect() {
  try {
    state.model = await servedModel();
    $("model").textContent = $("model").title = state.model.id; // a narrow page cuts a long name
    fillDrafters(state.model);
    showSettings();
    here(true);
  } catch (error) {
    if (error instanceof ServerError && error.status === 401) askKey("This server needs an API key.");
    else here(false, error instanceof ServerError ? `${error.message}.` : undefined);
  }
}

/** Whether the server answers; if not, it is asked again and again. */
function here(isHere, reason = "The server does not answer.") {
  $("dot").classList.toggle("on", isHere);
  $("away").hidden = isHere;
  clearTimeout(state.retry);
  if (isHere) return;
  $("away").textContent = `${reason[0].toUpperCase()}${reason.slice(1)} Trying again.`;
  state.retry = setTimeout(connect, 1000);
}

function askKey(message) {
  $("key-form").hidden = $("key-label").hidden = false;
  $("away").hidden = false;
  $("away").textContent = `${message} Give it under Settings.`;
  openPanel(true);
  $("key").focus();
}

// -- an answer --------------------------------------------------------------------------------------------------------

function message(role) {
  $("welcome").hidden = true;
  const made = document.createElement("article");
  made.className = `message ${role}`;
  $("log").append(made);
  return made;
}

function paragraph(parent, className, text) {
  const made = document.createElement("p");
  made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
}

async function answer() {
  const box = message("assistant");
  const trace = new Trace();
  const view = new AnswerView(box, trace);
  const body = chatBody(state.model.id, state.messages, settings());
  const fresh = [];
  const draw = paced(TEXT, () => keepingUp(() => view.draw(fresh.splice(0))));
  const follow = paced(LIVE, () => following(view));
  box.classList.add("waiting");
  try {
    for await (const chunk of chatChunks(body, state.running.signal)) {
      fresh.push(...trace.add(chunk));
      if (fresh.length) box.classList.remove("waiting");
      draw();
      follow();
    }
    if (trace.finish === "length") paragraph(box, "small", "Ended by the length that is set.");
    say(`Answer complete: ${trace.tokens.length} tokens, ${trace.tokensPerStep.toFixed(2)} per step.`);
  } catch (error) {
    failed(error, box);
  } finally {
    draw.now();
    box.classList.remove("waiting");
    // What was said counts, even if it was cut short; nothing at all is taken back.
    if (trace.text) state.messages.push({ role: "assistant", content: trace.text });
    else state.messages.pop();
    settle(view);
  }
}

async function race() {
  const box = message("assistant");
  const made = new Race(box, paced(LIVE, () => figures(made.drafted.view)));
  $("scroll").scrollTop = $("scroll").scrollHeight;
  try {
    await made.run(state.model.id, state.messages, settings(), state.running.signal);
    say(made.summary);
  } catch (error) {
    made.fail("");
    failed(error, box);
  } finally {
    state.messages = [];
    settle(made.drafted.view);
  }
}

function failed(error, box) {
  if (error.name === "AbortError") {
    paragraph(box, "small", "Stopped.");
    say("Stopped.");
    return;
  }
  const reported = error instanceof ServerError;
  const text = reported ? error.message : "The connection to the server was lost; the answer is incomplete.";
  const line = paragraph(box, "error", text);
  line.setAttribute("role", "alert");
  const again = document.createElement("button");
  again.type = "button";
  again.className = "quiet";
  again.textContent = "Try again";
  again.addEventListener("click", () => {
    box.previousElementSibling?.remove();
    box.remove();
    if (state.messages.at(-1)?.role === "assistant") state.messages.pop();
    if (state.messages.at(-1)?.role === "user") state.messages.pop();
    send(state.lastPrompt);
  });
  line.append(" ", again);
  if (reported && error.status === 401) askKey("The API key was refused.");
  if (!reported) here(false);
  if (reported && error.status === 503) here(false, `${error.message}.`);
}

/** The panel follows an answer that runs. */
function following(view) {
  if (!view.trace.steps.length || !state.running) return;
  figures(view);
  if (!state.pinned && !still.matches) panel.show(view, view.trace.steps.length - 1);
}

/** An answer has ended: its best step is shown, unless another was chosen. */
function settle(view) {
  if (!view.trace.steps.length) return;
  figures(view);
  keepingUp(() => {});
  if (!state.pinned) panel.show(view, view.trace.bestStep.index);
}

function figures(view) {
  panel.figures(view);
  const { trace } = view;
  $("strip").hidden = !trace.steps.length;
  const rate = trace.tokensPerSecond ? `${trace.tokensPerSecond.toFixed(0)} tokens/s` : "";
  $("strip").textContent = [rate, `${trace.tokensPerStep.toFixed(2)} per step`].filter(Boolean).join("   ");
}

async function send(text) {
  const prompt = text.trim();
  if (!prompt || state.running || !state.model) return;
  state.lastPrompt = prompt;
  state.pinned = false;
  state.seed = Math.floor(Math.random() * 2 ** 31);
  if (state.mode === "race") state.messages = [];
  state.messages.push({ role: "user", content: prompt });
  paragraph(message("user"), "", prompt);
  $("prompt").value = "";
  grow();
  state.running = new AbortController();
  busy(true);
  $("scroll").scrollTop = $("scroll").scrollHeight;
  try {
    await (state.mode === "race" ? race() : answer());
  } finally {
    state.running = null;
    busy(false);
  }
}

function busy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("fresh").disabled = $("mode-chat").disabled = $("mode-race").disabled = isBusy;
}

function say(text) {
  $("status").textContent = text;
}

/** Changes the log; whoever was at its end stays there. */
function keepingUp(change) {
  const box = $("scroll");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// -- modes, theme, panel, code ----------------------------------------------------------------------------------------

function setMode(mode) {
  state.mode = mode;
  for (const name of ["chat", "race"]) {
    $(`mode-${name}`).setAttribute("aria-pressed", String(name === mode));
    $(`lead-${name}`).hidden = name !== mode;
  }
  $("prompt").placeholder = mode === "race" ? "A prompt to race with" : "Ask something";
  fresh();
}

function fresh() {
  state.messages = [];
  $("log").replaceChildren();
  $("welcome").hidden = false;
  $("strip").hidden = true;
  panel.clear();
  if (!narrow.matches) $("prompt").focus();
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("slipstream-theme", root.dataset.theme);
}

function openPanel(open) {
  $("panel").classList.toggle("open", open);
  $("panel").inert = narrow.matches && !open;
  $("open-panel").setAttribute("aria-expanded", String(open));
}

function showCode(language) {
  $("as-curl").setAttribute("aria-pressed", String(language === "curl"));
  $("as-python").setAttribute("aria-pressed", String(language === "python"));
  const typed = $("prompt").value.trim() || state.lastPrompt || EXAMPLES[0].prompt;
  const body = chatBody(state.model?.id ?? "", [{ role: "user", content: typed }], { ...settings(), seed: state.seed ?? 0 });
  $("code-text").textContent = (language === "curl" ? asCurl : asPython)(location.origin, body, hasKey());
  $("copy").textContent = "Copy";
}

async function copyCode() {
  const text = $("code-text").textContent;
  try {
    await navigator.clipboard.writeText(text);
    $("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("code-text")); // no clipboard without https: it is selected instead
    $("copy").textContent = "Selected";
  }
}

/** The prompt's field is as high as its text, within limits. */
function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 200)}px`;
}

// -- events -----------------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value);
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("prompt").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (state.running) state.running.abort();
  else openPanel(false);
});
$("stop").addEventListener("click", () => {
  state.running?.abort();
  $("prompt").focus();
});

$("log").addEventListener("pointerover", (event) => {
  const found = event.pointerType === "mouse" && !state.pinned && stepAt(event.target);
  if (found && !state.running) panel.show(found.view, found.index);
});
$("log").addEventListener("click", (event) => {
  const found = stepAt(event.target);
  state.pinned = Boolean(found);
  if (!found) return;
  panel.show(found.view, found.index);
  if (narrow.matches) openPanel(true);
});
$("log").addEventListener("focusin", (event) => {
  const found = stepAt(event.target);
  if (found) panel.show(found.view, found.index);
});
$("log").addEventListener("keydown", (event) => {
  const found = stepAt(event.target);
  const to = found && { ArrowLeft: found.index - 1, ArrowRight: found.index + 1, Home: 0, End: Infinity }[event.key];
  if (found && (event.key === "Enter" || event.key === " ")) event.target.click();
  else if (to === undefined || to === null) return;
  else found.view.focus(to);
  event.preventDefault();
});

$("mode-chat").addEventListener("click", () => setMode("chat"));
$("mode-race").addEventListener("click", () => setMode("race"));
$("fresh").addEventListener("click", fresh);
$("theme").addEventListener("click", switchTheme);
$("open-panel").addEventListener("click", () => openPanel(!$("panel").classList.contains("open")));
$("strip").addEventListener("click", () => openPanel(true));
$("close-panel").addEventListener("click", () => openPanel(false));
narrow.addEventListener("change", () => openPanel(false));
for (const id of ["drafter", "nodes", "temperature", "length"]) $(id).addEventListener("input", showSettings);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  connect();
});
$("show-code").addEventListener("click", () => {
  showCode("curl");
  $("code").showModal();
});
$("as-curl").addEventListener("click", () => showCode("curl"));
$("as-python").addEventListener("click", () => showCode("python"));
$("copy").addEventListener("click", copyCode);
$("close-code").addEventListener("click", () => $("code").close());
$("enlarge").addEventListener("click", () => panel.enlarge());
$("close-large").addEventListener("click", () => $("large").close());

for (const { title, prompt } of EXAMPLES) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = title;
  button.addEventListener("click", () => send(prompt));
  item.append(button);
  $("examples").append(item);
}
openPanel(false);
panel.clear();
showSettings();
connect();
if (!narrow.matches) $("prompt").focus(); // on a phone it would open the keyboard

// A step's tree as SVG: the accepted path in the first row, what was rejected below it.

import { colourOf } from "./colours.js";

const ROW = 28;
const PILL = 22;
const GAP = 20;
const LETTER = 7.25; // of the monospaced face at 12 px
const LONGEST = 18;

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

/** A token as it is shown: no leading space, and signs for what cannot be seen. */
export function label(text) {
  const plain = text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  const shown = plain.trim() === "" ? plain.replaceAll(" ", "·") : plain.trim();
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown;
}

/** The nodes of a step's tree with places; `own` is the model's own token after the accepted path. */
export function layOut(tree, own) {
  const accepted = new Set(tree.accepted);
  const nodes = tree.texts.map((text, i) => ({
    text,
    origin: tree.origins[i] ?? null,
    confidence: tree.confidence?.[i],
    kind: i === 0 ? "root" : accepted.has(i) ? "accepted" : "rejected",
    parent: i === 0 ? null : tree.parents[i],
    children: [],
  }));
  if (own) {
    const parent = tree.accepted.at(-1) ?? 0;
    nodes.push({ text: own.text, origin: null, kind: "own", parent, children: [] });
  }
  nodes.forEach((node, i) => node.parent !== null && nodes[node.parent].children.push(i));
  const rank = { accepted: 0, own: 1, rejected: 2 };
  const order = (a, b) =>
    rank[nodes[a].kind] - rank[nodes[b].kind] || (nodes[b].confidence ?? 0) - (nodes[a].confidence ?? 0);
  let rows = 0;
  const place = (i, depth) => {
    const node = nodes[i];
    node.depth = depth;
    node.width = Math.max(label(node.text).length, 1) * LETTER + 12;
    node.children.sort(order);
    node.row = node.children.length ? null : rows++;
    for (const child of node.children) place(child, depth + 1);
    node.row ??= nodes[node.children[0]].row;
  };
  place(0, 0);
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const starts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 1));
  for (const node of nodes) {
    node.x = starts[node.depth];
    node.y = node.row * ROW + 3;
  }
  return { nodes, width: starts.at(-1) + widths.at(-1) + 2, height: rows * ROW };
}

/** The SVG of a step. */
export function drawTree(step) {
  const { tree } = step;
  const own = step.tokens.length > tree.accepted.length ? step.tokens.at(-1) : null;
  const { nodes, width, height } = layOut(tree, own);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  element("title", {}, svg).textContent = described(tree, own);
  const below = nodes.filter((node) => node.parent !== null);
  const rejected = (node) => Number(node.kind === "rejected"); // drawn first: accepted edges lie on top
  below.sort((a, b) => rejected(b) - rejected(a));
  for (const node of below) drawEdge(svg, nodes[node.parent], node);
  for (const node of nodes) drawNode(svg, node);
  return svg;
}

function drawEdge(svg, parent, node) {
  const [x1, y1] = [parent.x + parent.width, parent.y + PILL / 2];
  const [x2, y2] = [node.x, node.y + PILL / 2];
  const bend = node.x - GAP / 2; // all children of a level bend at one place
  const down = `H${bend - 6}Q${bend} ${y1} ${bend} ${y1 + 6}V${y2 - 6}Q${bend} ${y2} ${bend + 6} ${y2}`;
  const path = `M${x1} ${y1}${y1 === y2 ? "" : down}H${x2}`;
  const edge = element("path", { d: path, class: `edge ${node.kind}` }, svg);
  edge.style.setProperty("--origin", colourOf(node.origin));
}

function drawNode(svg, node) {
  const group = element("g", { class: `node ${node.kind}` }, svg);
  group.style.setProperty("--origin", colourOf(node.origin));
  element("rect", { x: node.x, y: node.y, width: node.width, height: PILL, rx: 6 }, group);
  const middle = { x: node.x + node.width / 2, y: node.y + PILL / 2 + 4, "text-anchor": "middle" };
  const text = element("text", middle, group);
  text.textContent = label(node.text);
  const sure = node.confidence === undefined ? "" : `, ${Math.round(node.confidence * 100)}% sure of the path`;
  const special = { root: "the last token", own: "the model's own" }[node.kind];
  const who = special ?? `${node.origin ?? "draft"}, ${node.kind}${sure}`;
  element("title", {}, group).textContent = `${JSON.stringify(node.text)}: ${who}`;
}

function described(tree, own) {
  const words = tree.accepted.map((node) => JSON.stringify(tree.texts[node])).join(" ");
  const kept = words ? `accepted ${words}` : "none accepted";
  const drafted = tree.texts.length - 1;
  return `${drafted} drafted, ${kept}${own ? `, then the model's own ${JSON.stringify(own.text)}` : ""}`;
}

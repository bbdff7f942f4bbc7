// Colour means a drafter, and nothing else on the page has any. The order is that of first appearance.

const SHADES = 7; // --origin-0 ... in style.css
const known = new Map();

/** The colour of a drafter's tokens; of the model's own, none. */
export function colourOf(origin) {
  if (origin === null) return "transparent";
  if (!known.has(origin)) known.set(origin, known.size % SHADES);
  return `var(--origin-${known.get(origin)})`;
}

/** Gives drafters their colours in a fixed order. */
export function settleColours(origins) {
  origins.forEach(colourOf);
}

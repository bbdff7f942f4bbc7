// How often the page is drawn: what it draws on may be the machine that the model runs on.

/** A function that runs `paint` at most every `ms`; its `now` runs it at once if something waits. */
export function paced(ms, paint) {
  let timer = null;
  let last = -Infinity;
  const run = () => {
    clearTimeout(timer);
    timer = null;
    last = performance.now();
    paint();
  };
  const soon = () => {
    timer ??= setTimeout(run, Math.max(0, last + ms - performance.now()));
  };
  soon.now = () => timer !== null && run();
  return soon;
}

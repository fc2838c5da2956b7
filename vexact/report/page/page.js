"use strict";
(() => {
const all = (query, within = document) => [...within.querySelectorAll(query)];
const reading = document.getElementById("reading");
const say = text => { reading.textContent = text; reading.hidden = !text; };
const SLOTS = 8;

// Arms: a chip lights its arm in every chart.
const marks = new Map();
for (const each of all(".arm")) {
  if (!marks.has(each.dataset.a)) marks.set(each.dataset.a, []);
  marks.get(each.dataset.a).push(each);
}
const chips = all(".chip");
const slotOf = chip => { for (let k = 0; k < SLOTS; k++) if (chip.classList.contains("k" + k)) return k; return -1; };
const paint = (chip, slot) => {
  for (const each of [chip, ...(marks.get(chip.dataset.a) || [])]) {
    for (let k = 0; k < SLOTS; k++) each.classList.remove("k" + k);
    each.classList.toggle("on", slot >= 0);
    if (slot < 0) continue;
    each.classList.add("k" + slot);
    for (const end of all(".end", each)) end.setAttribute("href", "#m" + slot);
    if (each !== chip) each.parentNode.append(each);
  }
  chip.setAttribute("aria-pressed", String(slot >= 0));
};
let kept = chips.filter(chip => chip.classList.contains("on"));
const few = !document.querySelector("svg.many");
const hot = (number, on) => {
  for (const svg of all("svg.chart")) svg.classList.toggle("dim", on && !!svg.querySelector(`[data-a="${number}"]`));
  for (const each of marks.get(number) || []) each.classList.toggle("hot", on);
};
for (const chip of chips) {
  const number = chip.dataset.a;
  chip.addEventListener("pointerenter", event => event.pointerType === "mouse" && hot(number, true));
  chip.addEventListener("pointerleave", () => hot(number, false));
  chip.addEventListener("blur", () => hot(number, false));
  chip.addEventListener("click", () => {
    if (few) {
      const on = !(marks.get(number) || []).some(each => each.classList.contains("hot"));
      for (const other of chips) {
        hot(other.dataset.a, false);
        other.setAttribute("aria-pressed", "false");
      }
      hot(number, on);
      chip.setAttribute("aria-pressed", String(on));
      return;
    }
    hot(number, false);
    if (kept.includes(chip)) {
      kept = kept.filter(each => each !== chip);
      paint(chip, -1);
      return;
    }
    if (kept.length === SLOTS) paint(kept.shift(), -1);
    const used = kept.map(slotOf);
    kept.push(chip);
    paint(chip, [...Array(SLOTS).keys()].find(k => !used.includes(k)));
  });
}

// Charts: what the lit arms are at the step under the pointer.
const digits = value => Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 || value === 0
  ? String(+value.toPrecision(3)) : value.toExponential(2);
const LANE = 0.13;
const back = (share, [low, high, log, zero]) => {
  const begin = zero ? LANE : 0;
  if (zero && share < LANE * 0.8) return 0;
  const value = low + (share - begin) / (1 - begin) * (high - low);
  return log ? 10 ** value : value;
};
for (const svg of all(".charts svg.chart")) {
  const s = svg.dataset.s.split(" ").map(Number);
  const [left, right, bottom, top] = s, xs = s.slice(4, 8), ys = s.slice(8, 12);
  if (!svg.querySelector(".line")) continue;
  let line;
  const leave = () => { if (line) line.remove(); line = null; say(""); };
  const move = event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    if (at < left - 6 || at > right + 6) return leave();
    const found = [];
    let snapped = null;
    for (const group of all(".arm", svg)) {
      if (svg.classList.contains("many") && !group.classList.contains("on") && !group.classList.contains("hot")) continue;
      if (group.classList.contains("of-null") && !group.classList.contains("hot")) continue;
      const path = group.querySelector(".line");
      if (!path) continue;
      const points = path.getAttribute("d").split(/[ML]/).slice(1).map(p => p.trim().split(" ").map(Number));
      const near = points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a, points[0]);
      if (!near || Math.abs(near[0] - at) > 30) continue;
      if (snapped === null || Math.abs(near[0] - at) < Math.abs(snapped - at)) snapped = near[0];
      const label = group.querySelector("title").textContent;
      found.push([near[1], `${label} ${digits(back((bottom - near[1]) / (bottom - top), ys))}`]);
    }
    if (!found.length) return leave();
    if (!line) {
      line = document.createElementNS("http://www.w3.org/2000/svg", "path");
      line.setAttribute("class", "cursor");
      svg.append(line);
    }
    line.setAttribute("d", `M${snapped} ${bottom}V${top}`);
    const x = back((snapped - left) / (right - left), xs);
    const label = svg.querySelector(".lx").textContent;
    const name = svg.querySelector("title").textContent;
    say(`${name}, ${label} ${label === "step" ? Math.round(x) : digits(x)}:  ${found.sort((a, b) => a[0] - b[0]).map(f => f[1]).join("  ·  ")}`);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
}

// Marks: a tap or the pointer reads one.
for (const dot of all(".dot")) {
  const tell = () => say(dot.querySelector("title").textContent);
  dot.addEventListener("pointerenter", tell);
  dot.addEventListener("click", tell);
  dot.addEventListener("pointerleave", () => say(""));
}

// Tokens: a pointer, a finger or the arrow keys read one.
for (const row of all(".tokens")) {
  const tokens = all(".t", row);
  const leave = () => { for (const each of tokens) each.classList.remove("hot"); say(""); };
  const show = token => { leave(); token.classList.add("hot"); say(token.title || token.dataset.told); };
  row.addEventListener("pointerover", event => event.target.matches(".t") && show(event.target));
  row.addEventListener("click", event => event.target.matches(".t") && show(event.target));
  row.addEventListener("pointerleave", leave);
  row.addEventListener("focusin", event => event.target.matches(".t") && show(event.target));
  row.addEventListener("focusout", leave);
  row.addEventListener("keydown", event => {
    const i = tokens.indexOf(document.activeElement);
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (i < 0 || to === undefined || !tokens[to]) return;
    event.preventDefault();
    tokens[i].tabIndex = -1;
    tokens[to].tabIndex = 0;
    tokens[to].focus();
  });
}
})();

// The heat map: one row per group, one column per rank.

import { byId, h, setText } from "./dom.js";
import { duration, percent } from "./format.js";

export const rankName = (row) => row.key.join("/");

const HOURS = 3600;
const MEASURES = {
  coverage: {
    of: (cell) => cell.coverage, text: percent, words: "of its KV bytes are covered by fingerprints",
    steps: [[0.999, "all"], [0.95, "from 95 %"], [0.8, "from 80 %"], [0.5, "from 50 %"], [-1, "less"]],
    level: (value, step) => value >= step,
  },
  checked: {
    of: (cell) => cell.checked, text: percent, words: "of its forwards were checked",
    steps: [[0.999, "all"], [0.95, "from 95 %"], [0.8, "from 80 %"], [0.5, "from 50 %"], [-1, "less"]],
    level: (value, step) => value >= step,
  },
  age: {
    of: (cell) => cell.age_seconds, text: duration, words: "since its last sweep",
    steps: [[HOURS / 4, "under 15 min"], [HOURS, "under 1 h"], [6 * HOURS, "under 6 h"], [24 * HOURS, "under 1 d"], [Infinity, "older"]],
    level: (value, step) => value < step || step === Infinity,
  },
};

let drawn = "";

export function drawMap(fleet) {
  const name = document.querySelector("input[name=measure]:checked").value;
  const measure = MEASURES[name];
  const ranks = [...fleet.ranks].filter((row) => !row.departed).sort(byKey);
  const groups = [...new Set(ranks.flatMap((row) => row.groups.map((cell) => cell.name)))];
  const cells = groups.map((group) => ranks.map((row) => shown(measure, row, group)));
  const content = JSON.stringify([name, ranks.map(rankName), ranks.map((row) => row.state), groups, cells]);
  if (content === drawn) return;
  drawn = content;
  const head = h("tr", {}, h("th", { scope: "col" }, "Group"), ...ranks.map((row, index) => heading(row, ranks[index - 1])));
  const body = groups.map((group, line) => h("tr", {}, h("th", { scope: "row" }, group), ...cells[line].map(cellElement)));
  byId("map").replaceChildren(
    h("caption", { class: "unseen" }, `${name} of each group on each rank`), h("thead", {}, head), h("tbody", {}, ...body),
  );
  const keys = measure.steps.map(([, label], level) => h("span", {}, h("i", { class: `heat h${4 - level}` }), label));
  byId("legend").replaceChildren(...keys, h("span", {}, h("i", { class: "heat unknown" }), "unknown"));
}

function byKey(one, other) {
  const [engine, instance, rank] = one.key;
  return engine.localeCompare(other.key[0]) || instance.localeCompare(other.key[1]) || rank - other.key[2];
}

function shown(measure, row, group) {
  const cell = row.groups.find((one) => one.name === group);
  if (!cell) return null;
  const value = measure.of(cell);
  if (value === null) return { kind: "unknown", text: `${rankName(row)}, ${group}: not known` };
  const level = measure.steps.findIndex(([step]) => measure.level(value, step));
  const found = cell.violations ? `; findings: ${cell.violations}` : "";
  return { kind: `h${4 - level}`, text: `${rankName(row)}, ${group}: ${measure.text(value)} ${measure.words}${found}`, hit: cell.violations > 0 };
}

function heading(row, previous) {
  const first = !previous || previous.key[1] !== row.key[1] || previous.key[0] !== row.key[0];
  const element = h("th", { scope: "col", class: `${row.state}${first ? " first" : ""}`, title: `${rankName(row)}: ${row.state}` });
  element.append(h("span", { "aria-hidden": "true" }, String(row.key[2])), h("span", { class: "unseen" }, `${rankName(row)} ${row.state}`));
  return element;
}

function cellElement(cell) {
  if (cell === null) return h("td", {}, h("span", { class: "unseen" }, "no such group"));
  const element = h("td", { class: `heat ${cell.kind}${cell.hit ? " hit" : ""}`, title: cell.text });
  element.append(h("span", { class: "unseen" }, cell.text));
  setText(element.firstChild, cell.text);
  return element;
}

// The table of ranks, worst first: rates between snapshots, search, and the commands to each rank.

import { RankCommands, bodyOf } from "./commands.js";
import { Keyed, byId, h, setClass, setText } from "./dom.js";
import { DASH, duration, percent, plural, short } from "./format.js";
import { rankName } from "./map.js";

const COLUMNS = ["Steps/s", "Slots/s", "Compared", "Findings", "Overhead", "Heard"];
let before = new Map(); // rank name -> { row, rates } of the snapshot before

export function measureRates(rows) {
  const now = new Map();
  for (const row of rows) {
    const name = rankName(row);
    const old = before.get(name);
    if (!old || row.time_ns === null || old.row.time_ns === null || row.time_ns <= old.row.time_ns) {
      now.set(name, old && old.row.time_ns === row.time_ns ? old : { row, rates: null });
      continue;
    }
    const seconds = (row.time_ns - old.row.time_ns) / 1e9;
    const rate = (field) => Math.max(0, row[field] - old.row[field]) / seconds;
    now.set(name, { row, rates: { step: rate("step"), verified: rate("verified"), bytes: rate("hashed_bytes") } });
  }
  before = now;
}

// null = not known yet
export const ratesOf = (row) => before.get(rankName(row))?.rates ?? null;

export function drawRanks(rows) {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = rows.filter((row) => {
    const text = [rankName(row), row.state, row.device, ...row.reasons].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  setText(byId("shown"), words.length ? `${found.length} of ${rows.length}` : `${found.length}, worst first`);
  rankList.update(found, rankName);
}

const rankList = new Keyed(byId("ranks"), (first) => {
  const pill = h("span", { class: "pill" });
  const why = h("td", { "data-label": "Why", class: "why" });
  const cells = COLUMNS.map((label) => h("td", { class: "number", "data-label": label }));
  const buttons = h("td", { class: "buttons" });
  const element = h("tr", {}, h("th", { scope: "row" }, rankName(first)), h("td", { "data-label": "State" }, pill), why, ...cells, buttons);
  const commands = new RankCommands(buttons, rankName(first), bodyOf(first));
  const update = (row) => {
    setText(pill, row.state);
    setClass(pill, `pill ${row.state}`);
    const notes = [...row.reasons];
    if (row.paused) notes.push("sweeps and patrol are paused");
    if (row.injected) notes.push(`${plural(row.injected, "fault")} injected on purpose`);
    setText(why, notes.join("; ") || DASH);
    const rates = ratesOf(row);
    const heard = row.departed ? "gone" : row.snapshot_age === null ? DASH : duration(row.snapshot_age);
    const values = [short(rates?.step), short(rates?.verified), short(rates?.bytes, "B/s"), short(row.violations), percent(row.overhead), heard];
    values.forEach((value, index) => setText(cells[index], value));
    commands.update(row);
  };
  return { element, update };
});

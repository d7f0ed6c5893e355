// The fleet overview: fetched every other second, and at once whenever the event stream reports something.

import { FleetCommands, acknowledge, run } from "./commands.js";
import { Keyed, byId, h, setClass, setText } from "./dom.js";
import { DASH, ago, duration, percent, plural, short } from "./format.js";
import { drawMap, rankName } from "./map.js";
import { drawRanks, measureRates, ratesOf } from "./ranks.js";
import { Refused, base, enter, may, request, toSignIn } from "./session.js";

const REFRESH_MS = 2000;
const EVENTS = ["state", "violation", "incident_opened", "incident_closed", "sweep_begun", "sweep_ended", "dropped"];
const STATES = ["violated", "blind", "degraded", "off", "ok"];

const commands = new FleetCommands(byId("actions"));
let fleet = null;
let timer = 0;
let fetching = false;
let again = false;

async function refresh() {
  if (fetching) {
    again = true;
    return;
  }
  fetching = true;
  clearTimeout(timer);
  try {
    fleet = await request("GET", "console/fleet");
    measureRates(fleet.ranks);
    draw();
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return toSignIn();
    setLive("unreachable");
  } finally {
    fetching = false;
    timer = setTimeout(refresh, again ? 50 : document.hidden ? 10 * REFRESH_MS : REFRESH_MS);
    again = false;
  }
}

function draw() {
  setText(byId("version"), fleet.version);
  document.title = fleet.state === "ok" ? "canary_obs" : `${fleet.state} · canary_obs`;
  drawVerdict();
  drawTiles();
  drawSweep();
  drawIncidents();
  drawMap(fleet);
  drawRanks(fleet.ranks);
  commands.update(fleet);
}

function drawVerdict() {
  const counts = STATES.map((state) => [state, fleet.ranks.filter((row) => row.state === state).length]);
  const parts = counts.filter(([, count]) => count).map(([state, count]) => `${count} ${state}`);
  setText(byId("state"), fleet.state);
  setClass(byId("state"), `pill ${fleet.state}`);
  setText(byId("verdict"), fleet.ranks.length ? `${plural(fleet.ranks.length, "rank")}: ${parts.join(", ")}` : "No engine is attached");
  const place = (reason) => fleet.ranks.findIndex((row) => reason.startsWith(`${rankName(row)}: `));
  const reasons = [...fleet.reasons].sort((one, other) => place(one) - place(other)).slice(0, 4);
  const more = fleet.reasons.length - reasons.length;
  if (more > 0) reasons.push(`and ${plural(more, "further reason")}, in the table of ranks`);
  reasonList.update(reasons.map((text, index) => ({ text, index })), (reason) => reason.index);
}

const reasonList = new Keyed(byId("reasons"), () => {
  const element = h("li");
  return { element, update: (reason) => setText(element, reason.text) };
});

function drawTiles() {
  const live = fleet.ranks.filter((row) => !row.departed);
  const rates = live.map(ratesOf).filter((rates) => rates !== null);
  const sum = (field) => (rates.length ? rates.reduce((total, rate) => total + rate[field], 0) : null);
  const overheads = live.map((row) => row.overhead).filter((value) => value !== null);
  const sweeps = live.flatMap((row) => row.groups.map((group) => group.age_seconds));
  const known = sweeps.filter((age) => age !== null);
  const findings = live.reduce((total, row) => total + row.violations, 0);
  const tiles = [
    ["Engine steps", short(sum("step"), "/s"), `${plural(live.length, "rank")}`],
    ["Slots verified", short(sum("verified"), "/s"), "records, all phases"],
    ["Bytes compared", short(sum("bytes"), "B/s"), "fingerprints of K and V"],
    ["Findings", short(findings), "since attach, all ranks"],
    ["Overhead", overheads.length ? percent(Math.max(...overheads)) : DASH, "of engine time, worst rank"],
    ["Oldest sweep", known.length ? duration(Math.max(...known)) : DASH, sweeps.length > known.length ? `${plural(sweeps.length - known.length, "group")} never swept` : "worst rank and group"],
  ];
  tileList.update(tiles, (tile) => tile[0]);
}

const tileList = new Keyed(byId("tiles"), ([label]) => {
  const value = h("dd", { class: "value" });
  const note = h("dd", { class: "dim" });
  const element = h("div", {}, h("dt", {}, label), value, note);
  return { element, update: ([, text, hint]) => (setText(value, text), setText(note, hint)) };
});

function drawSweep() {
  const sweep = fleet.sweep;
  byId("sweep").hidden = sweep === null;
  if (sweep === null) return;
  const running = sweep.status === "running" || sweep.status === "scheduled";
  const share = running ? (sweep.total ? Math.min(1, sweep.checked / sweep.total) : 0) : 1;
  byId("sweep-bar").value = share;
  setClass(byId("sweep-bar"), sweep.status);
  const parts = [sweep.paused ? "paused" : sweep.status, `${short(sweep.checked)} of ${short(sweep.total)} slots (${percent(share)})`];
  if (running) {
    parts.push(`${sweep.ranks_ended} of ${plural(sweep.ranks, "rank")} done`);
    if (sweep.rate !== null) parts.push(short(sweep.rate, "slots/s"));
    parts.push(sweep.eta_seconds === null ? "ETA not known yet" : `ETA ${duration(sweep.eta_seconds)}`);
  } else if (sweep.ended_ns !== null) {
    parts.push(`took ${duration((sweep.ended_ns - sweep.requested_ns) / 1e9)}`, `ended ${ago(sweep.ended_ns, fleet.time_ns)}`);
  }
  if (sweep.violations) parts.push(plural(sweep.violations, "finding"));
  if (sweep.errors.length) parts.push(sweep.errors.slice(0, 2).join("; "));
  setText(byId("sweep-text"), parts.join(" · "));
  byId("cancel").hidden = !running || !may("operate");
}

function drawIncidents() {
  const open = fleet.incidents.filter((incident) => !incident.acknowledged).length;
  setText(byId("incident-count"), open ? `${open} not acknowledged` : "none open");
  byId("incidents").hidden = fleet.incidents.length === 0;
  incidentList.update(fleet.incidents, (incident) => incident.id);
}

const incidentList = new Keyed(byId("incidents"), (first) => {
  const link = h("a", { href: `incidents/${encodeURIComponent(first.id)}` });
  const facts = h("p", { class: "dim" });
  const button = h("button", { type: "button" }, "Acknowledge");
  const element = h("li", {}, h("div", {}, link, facts), button);
  let shown = first;
  button.setAttribute("aria-label", `Acknowledge incident ${first.id}`);
  button.addEventListener("click", () => acknowledge({ incident: shown.id }, `${shown.sentence} It stays listed, and its ranks may become ok again.`));
  const update = (incident) => {
    shown = incident;
    setText(link, incident.sentence || Object.entries(incident.reasons).map(([reason, count]) => `${count} × ${reason}`).join(", "));
    const ranks = `${incident.engine}/${incident.instance} rank ${incident.ranks.join(", ")}`;
    const state = incident.acknowledged ? "acknowledged" : incident.closed_ns ? "quiet" : "open";
    setText(facts, `${state} · ${ranks} · ${plural(incident.violations, "finding")} · ${ago(incident.opened_ns, fleet.time_ns)}`);
    setClass(element, incident.acknowledged ? "seen" : "open");
    button.hidden = incident.acknowledged || !may("operate");
  };
  return { element, update };
});

function setLive(state) {
  setText(byId("live"), state);
  setClass(byId("live"), `live ${state}`);
}

function listen() {
  const stream = new EventSource(new URL("canary/events", base));
  stream.addEventListener("open", () => setLive("live"));
  stream.addEventListener("error", () => {
    setLive("reconnecting");
    // A refused stream does not reconnect by itself: the session may have ended, or too many are open.
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 5 * REFRESH_MS);
    refresh();
  });
  for (const kind of EVENTS) stream.addEventListener(kind, refresh);
}

async function start() {
  try {
    await enter();
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return toSignIn();
    setLive("unreachable");
    setTimeout(start, REFRESH_MS);
    return;
  }
  byId("cancel").addEventListener("click", () => run("Cancelling", "DELETE", `canary/sweeps/${fleet.sweep.id}`));
  byId("search").addEventListener("input", () => fleet && drawRanks(fleet.ranks));
  byId("measures").addEventListener("change", () => fleet && drawMap(fleet));
  document.addEventListener("commanded", refresh);
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  await refresh();
  listen();
}

start();

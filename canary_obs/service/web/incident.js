// The page of one incident. It is fetched again when the event stream reports something about incidents.

import { acknowledge, run } from "./commands.js";
import { byId, h, setText, toast } from "./dom.js";
import { DASH, clock, plural } from "./format.js";
import { Refused, base, enter, may, request, toSignIn } from "./session.js";

const id = decodeURIComponent(location.pathname.slice(base.pathname.length).split("/")[1] ?? "");
const path = `canary/incidents/${encodeURIComponent(id)}`;
let report = null;
let drawn = "";

async function refresh() {
  try {
    report = await request("GET", `console/incidents/${encodeURIComponent(id)}`);
    const bundle = await request("GET", path);
    const content = JSON.stringify([report, bundle.incident]);
    if (content === drawn) return;
    drawn = content;
    draw(bundle.incident);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return toSignIn();
    if (report === null) setText(byId("sentence"), error.message);
    else toast(error.message, "error");
  }
}

function draw(incident) {
  document.title = `${report.sentence} · canary_obs`;
  byId("planted").hidden = report.injected === null;
  setText(byId("planted"), report.injected ?? "");
  setText(byId("sentence"), report.sentence);
  drawFacts(incident);
  drawCauses();
  drawTimeline();
  byId("commands").replaceChildren(...report.commands.map(commandItem));
  drawDamage();
  byId("slots").replaceChildren(...(report.neighbourhoods.length ? report.neighbourhoods.map(neighbourhood) : [h("p", { class: "dim" }, "No rank has sent what its slots hold.")]));
  byId("requests").replaceChildren(...report.requests.map((name) => h("li", {}, h("code", {}, name))));
  byId("tainted").replaceChildren(...report.tainted.flatMap((taint) => taint.requests.map(readerOf)));
  setText(byId("requests-note"), `${report.requests.length ? "Named by findings, or using the slots when they were read. " : "No finding names a request. "}${report.requests_note}`);
  drawFindings([...incident.first, ...incident.latest]);
}

function drawFacts(incident) {
  const state = incident.acknowledged ? "acknowledged" : incident.closed_ns ? "quiet, not acknowledged" : "open";
  const ranks = `${incident.engine}/${incident.instance} rank ${incident.ranks.join(", ")}`;
  const pill = h("span", { class: `pill ${incident.acknowledged ? "" : "violated"}` }, state);
  const text = ` ${ranks} on ${report.devices.join(", ")} · ${plural(incident.violations, "finding")} · `;
  byId("facts").replaceChildren(pill, text, h("code", {}, incident.id));
  byId("acknowledge").hidden = incident.acknowledged || !may("operate");
  byId("undo").hidden = !standing(incident).length || !may("operate");
  const bundle = byId("bundle");
  bundle.hidden = false;
  bundle.setAttribute("href", new URL(path, base).href);
  bundle.setAttribute("download", `incident-${incident.id}.json`);
  byId("runbook").hidden = report.runbook === null;
  byId("runbook").setAttribute("href", report.runbook ?? "");
}

const standing = (incident) => incident.acknowledgements.filter((made) => made.undone_ns === null);

function drawCauses() {
  const items = report.causes.map((cause) => h("li", {},
    h("strong", {}, cause.title), " ", h("span", { class: "tag" }, cause.place), cause.exact ? h("span", { class: "tag exact" }, "same first signal") : null,
    h("p", { class: "dim" }, cause.story)));
  byId("causes").replaceChildren(...(items.length ? items : [h("li", {}, "No known class of faults has these reasons.")]));
}

function drawTimeline() {
  byId("timeline").replaceChildren(...report.timeline.map((moment) => h("li", { class: moment.time_ns || moment.step !== null ? "known" : null },
    h("strong", {}, moment.what), h("span", {}, moment.text),
    moment.time_ns ? h("time", { class: "dim", datetime: new Date(moment.time_ns / 1e6).toISOString() }, clock(moment.time_ns)) : null)));
}

function readerOf(one) {
  const outputs = one.outputs === null ? "an unknown number of tokens" : plural(one.outputs, "token");
  const how = one.derived ? "KV computed from it" : "the slot itself";
  return h("li", {}, h("code", {}, one.request), ` (${one.running ? "running" : "ended"}) read ${how} from step ${one.step} on; ${outputs} since, from output ${one.first_output} on`);
}

function commandItem({ why, command }) {
  const text = command.replace("$URL", base.href.replace(/\/$/, ""));
  const copy = h("button", { type: "button", "aria-label": `Copy: ${why}` }, "Copy");
  copy.addEventListener("click", () => navigator.clipboard?.writeText(text).then(() => toast("Copied"), () => toast("The browser refused to copy", "error")));
  return h("li", {}, h("p", {}, why), h("div", { class: "command" }, h("code", { tabindex: "0" }, text), copy));
}

function drawDamage() {
  const { words, layers, unexplained } = report.damage;
  const notes = [];
  if (unexplained.length) notes.push(`More than one word changed in ${plural(unexplained.length, "slot")} (${unexplained.slice(0, 6).join(", ")}): layers and heads are not known there.`);
  if (!words.length && !unexplained.length) notes.push("No changed bytes are known: the finding is about which slot is read, or the slots could not be read in time.");
  setText(byId("damage-note"), notes.join(" "));
  byId("damage").hidden = words.length === 0;
  if (!words.length) return;
  const heads = Math.max(...words.map((word) => word.head)) + 1;
  const count = Math.max(layers ?? 0, ...words.map((word) => word.layer + 1));
  const columns = [...Array(heads).keys()];
  const head = h("tr", {}, h("th", { scope: "col" }, "Layer"), ...columns.map((index) => h("th", { scope: "col" }, index === 0 ? "head 0" : String(index))));
  const lines = [...Array(count).keys()].map((layer) => h("tr", {}, h("th", { scope: "row" }, String(layer)), ...columns.map((index) => damageCell(words.filter((word) => word.layer === layer && word.head === index)))));
  byId("damage").replaceChildren(h("caption", { class: "unseen" }, "Changed words by layer and head"), h("thead", {}, head), h("tbody", {}, ...lines));
}

function damageCell(words) {
  if (!words.length) return h("td", {}, h("span", { class: "unseen" }, "no change known"));
  const text = words.map((word) => `${word.part.toUpperCase()} element ${word.element} of slot ${word.slot}${word.bits === null ? "" : `, ${plural(word.bits, "bit")}`}`).join("; ");
  return h("td", { class: "hit", title: text }, h("span", {}, [...new Set(words.map((word) => word.part.toUpperCase()))].join("+")), h("span", { class: "unseen" }, text));
}

function neighbourhood(place) {
  const when = place.late ? "read on command: it may have changed since" : `read in step ${place.step}`;
  const users = place.users.length ? `used by ${place.users.join(", ")}` : "used by no running request";
  const cells = place.slots.map((slot) => {
    const kind = slot.intact === false ? "damaged" : slot.state === null ? "broken" : slot.intact ? "intact" : "none";
    const words = { damaged: "bytes differ from the record", broken: "record damaged", intact: "intact", none: "nothing to compare" }[kind];
    const text = `Slot ${slot.slot}, position ${slot.position}, ${slot.state ?? "unreadable"}: ${words}${slot.found ? "; named by a finding" : ""}`;
    return h("li", { class: `${kind}${slot.found ? " found" : ""}`, title: text }, h("span", { "aria-hidden": "true" }, String(slot.slot)), h("span", { class: "unseen" }, text));
  });
  return h("div", { class: "place" }, h("p", {}, h("strong", {}, `Slot ${place.slot}`), ` of ${place.group}, rank ${place.rank}`), h("p", { class: "dim" }, `${users} · ${when}`), h("ul", { class: "slots" }, ...cells));
}

function drawFindings(events) {
  const total = report.incident.violations;
  setText(byId("finding-count"), total > events.length ? `${events.length} of ${total} kept` : String(total));
  byId("findings").replaceChildren(...events.map(({ number, identity, violation: row }) => h("tr", {},
    h("td", { class: "number" }, String(number)), h("td", {}, String(identity.rank)), h("td", { class: "number" }, String(row.step)),
    h("td", {}, row.phase), h("td", {}, row.reason), h("td", {}, row.group + (row.part ? ` ${row.part.toUpperCase()}` : "")),
    h("td", { class: "number" }, row.slots > 1 ? `${row.slot} +${row.slots - 1}` : String(row.slot)),
    h("td", { class: "number" }, row.position === null ? DASH : String(row.position)), h("td", {}, row.request ?? DASH))));
}

async function acknowledgeThis() {
  const seen = { incident: report.incident.id, ...(report.newest ? { up_to: report.newest } : {}) };
  await acknowledge(seen, "It stays listed, and its ranks may become ok again. Findings that come later are not covered.");
}

async function undo() {
  const made = standing(report.incident).at(-1);
  if (made) await run("Taken back: the incident is open again", "DELETE", `canary/acknowledgements/${made.id}`);
}

async function start() {
  try {
    await enter();
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return toSignIn();
    setText(byId("sentence"), error.message);
    return;
  }
  byId("acknowledge").addEventListener("click", acknowledgeThis);
  byId("undo").addEventListener("click", undo);
  document.addEventListener("commanded", refresh);
  await refresh();
  const stream = new EventSource(new URL("canary/events", base));
  let timer = 0;
  for (const kind of ["violation", "incident_closed", "tainted", "state", "dropped"]) {
    stream.addEventListener(kind, () => {
      clearTimeout(timer);
      timer = setTimeout(refresh, 200);
    });
  }
  stream.addEventListener("error", refresh);
}

start();

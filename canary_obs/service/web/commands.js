// What an operator may ask of every rank or of one. Scopes decide which buttons exist; the server refuses the rest.

import { Keyed, ask, h, toast } from "./dom.js";
import { plural } from "./format.js";
import { Refused, drillEnabled, may, request, toSignIn } from "./session.js";

// Sends a request and says how it went; null = refused.
export async function run(done, method, path, body) {
  try {
    const answer = await request(method, path, body);
    if (done) toast(done);
    document.dispatchEvent(new Event("commanded"));
    return answer ?? {};
  } catch (error) {
    if (error instanceof Refused && error.status === 401) toSignIn();
    else toast(error.message, "error");
    return null;
  }
}

export const bodyOf = ({ key: [engine, instance, rank] }) => ({ engine, instance, ranks: [rank] });

// Asks for a comment and acknowledges; `seen` limits what is covered. Whether it was done.
export async function acknowledge(seen, text) {
  const comment = await ask({ title: "Acknowledge this incident?", text, yes: "Acknowledge", field: true });
  if (comment === null) return false;
  return (await run("Acknowledged", "POST", "canary/acknowledge", comment ? { ...seen, comment } : seen)) !== null;
}

// `name` = of one rank, null = every rank, `body` accordingly.
async function pause(name, body) {
  const text = `Sweeps and patrol stop on ${name ?? "every rank"} until someone resumes them. The checks around forwards go on.`;
  if ((await ask({ title: `Pause ${name ?? "all ranks"}?`, text, yes: "Pause" })) !== null) await run("Paused", "POST", "canary/pause", body);
}

async function drill(name, body) {
  const text = `${name ?? "Each rank"} injects one fault into a slot that no request uses, and looks for it. Nothing is answered wrong.`;
  if ((await ask({ title: name ? `Drill on ${name}?` : "Start a drill?", text, yes: "Drill" })) === null) return;
  toast("The drill is running");
  const record = await run("", "POST", "canary/drill", body);
  if (record === null) return;
  const found = record.ranks.filter((rank) => rank.finding.outcome === "detected").length;
  toast(`Drill: ${found} of ${plural(record.ranks.length, "rank")} detected it`, found === record.ranks.length ? "note" : "error");
}

const busy = (sweep) => ["running", "scheduled"].includes(sweep?.status);

const COMMANDS = [
  { name: "Sweep", scope: "operate", ofAll: (fleet) => !busy(fleet.sweep), ofOne: () => true, go: (_, body) => run("Sweep started", "POST", "canary/sweep", body) },
  { name: "Pause", scope: "operate", ofAll: (fleet) => fleet.ranks.some((row) => !row.paused && !row.departed), ofOne: (row) => !row.paused, go: pause },
  { name: "Resume", scope: "operate", ofAll: (fleet) => fleet.ranks.some((row) => row.paused), ofOne: (row) => row.paused, go: (_, body) => run("Resumed", "POST", "canary/resume", body) },
  { name: "Drill", scope: "inject", ofAll: () => drillEnabled(), ofOne: () => drillEnabled(), go: drill },
];

// Buttons for every rank.
export class FleetCommands {
  constructor(parent) {
    this.list = new Keyed(parent, ({ name, go }) => {
      const element = h("button", { type: "button", class: name === "Sweep" ? "primary" : null, onclick: () => go(null, undefined) }, name);
      return { element, update: () => {} };
    });
  }

  update(fleet) {
    this.list.update(COMMANDS.filter((command) => may(command.scope) && command.ofAll(fleet)), (command) => command.name);
  }
}

// Buttons for one rank. `body` names it.
export class RankCommands {
  constructor(parent, name, body) {
    this.list = new Keyed(parent, (command) => {
      const attributes = { type: "button", "aria-label": `${command.name} ${name}`, onclick: () => command.go(name, body) };
      return { element: h("button", attributes, command.name), update: () => {} };
    });
  }

  update(row) {
    const shown = row.departed ? [] : COMMANDS.filter((command) => may(command.scope) && command.ofOne(row));
    this.list.update(shown, (command) => command.name);
  }
}

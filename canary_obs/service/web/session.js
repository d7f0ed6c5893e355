// Requests to the service. The session is a cookie that scripts cannot read; its CSRF token stays in memory.

import { byId } from "./dom.js";

export const base = new URL("../../", import.meta.url);

let session = null;

export class Refused extends Error {
  constructor(status, problem) {
    super(problem?.detail ?? `The service answered ${status}.`);
    this.status = status;
    this.kind = problem?.type?.split(":").pop() ?? "";
  }
}

export async function request(method, path, body) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (session?.csrf && method !== "GET") headers["X-CSRF-Token"] = session.csrf;
  const answer = await fetch(new URL(path, base), {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
  });
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  throw new Refused(answer.status, await answer.json().catch(() => null));
}

export async function openSession() {
  session = await request("GET", "console/session");
  return session;
}

// Opens the session of a page, and shows who it is of. Raises Refused.
export async function enter() {
  await openSession();
  byId("who").textContent = session.token === null ? "no token needed" : `${session.token}: ${session.scopes.join(", ")}`;
  byId("sign-out").hidden = session.csrf === null;
  byId("sign-out").onclick = signOut;
}

export function may(scope) {
  return session !== null && session.scopes.includes(scope);
}

export const drillEnabled = () => session?.drill_enabled === true;

async function signOut() {
  await request("DELETE", "console/session");
  session = null;
  location.assign(new URL("sign-in", base));
}

export function toSignIn() {
  const page = location.pathname.slice(base.pathname.length);
  location.assign(new URL(page ? `sign-in?next=${encodeURIComponent(page)}` : "sign-in", base));
}

// Exchanges a token for a session, and goes on to the page that was asked for.

import { base, openSession, request } from "./session.js";

const form = document.getElementById("form");
const field = document.getElementById("token");
const message = document.getElementById("message");

function goOn() {
  const asked = new URLSearchParams(location.search).get("next") ?? "";
  const target = new URL(asked, base);
  // Only pages of this service: the address may have been made by others.
  const ours = target.origin === base.origin && target.pathname.startsWith(base.pathname);
  location.replace(ours ? target : base);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  message.textContent = "";
  try {
    await request("POST", "console/session", { token: field.value.trim() });
    field.value = "";
    goOn();
  } catch (error) {
    message.textContent = error.message;
    field.select();
    field.focus();
  } finally {
    button.disabled = false;
  }
});

// Until now a click would have sent the form itself.
form.querySelector("button").disabled = false;

// A link from elsewhere arrives without the cookie (SameSite=Strict), although a session is open.
openSession().then(goOn, () => field.focus());

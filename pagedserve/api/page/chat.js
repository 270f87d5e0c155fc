// The chat view: shows the current conversation, sends, streams, stops, branches.

import * as client from "./client.js";
import { render } from "./markdown.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const messages = $("messages");
const input = $("input");
const settings = $("settings");

let running = null; // { controller, conversation, index } while an answer streams

export function start() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(input.value);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(input.value);
    }
  });
  input.addEventListener("input", fit);
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", () => open(store.create().id));
  $("menu").addEventListener("click", () => toggleMenu());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      toggleMenu(false);
      stop();
    } else if (event.altKey && event.key === "n") {
      event.preventDefault();
      open(store.create().id);
    }
  });
  settings.addEventListener("change", keepSettings);
  show();
}

function toggleMenu(on = !$("sidebar").classList.contains("open")) {
  $("sidebar").classList.toggle("open", on);
  $("menu").setAttribute("aria-expanded", on);
}

function open(id) {
  store.select(id);
  toggleMenu(false);
  show();
  input.focus();
}

function fit() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function keepSettings() {
  const conversation = store.current();
  for (const field of settings.querySelectorAll("[name]")) {
    if (field.checkValidity()) conversation.settings[field.name] = field.value;
  }
  store.save();
}

// ---- sending ----

function send(text) {
  if (!text.trim() || running) return;
  const conversation = store.current();
  store.add(conversation, conversation.leaf, "user", text);
  input.value = "";
  fit();
  answer(conversation);
}

// Have the last user message of what is shown answered.
async function answer(conversation) {
  const history = store.path(conversation).map((i) => conversation.nodes[i]);
  const index = store.add(conversation, conversation.leaf, "assistant", "");
  const node = conversation.nodes[index];
  const controller = new AbortController();
  running = { controller, conversation, index };
  store.save();
  show();
  messages.scrollTop = messages.scrollHeight;
  const prompt = history.filter(({ error, content }) => !error || content).map(({ role, content }) => ({ role, content }));
  if (conversation.settings.system) prompt.unshift({ role: "system", content: conversation.settings.system });
  const update = updater(conversation, index);
  try {
    const { usage, finish, firstSeconds, seconds } = await client.chat(prompt, conversation.settings, controller.signal, (piece) => {
      node.content += piece;
      update();
    });
    node.stats = {
      tokens: usage?.completion_tokens,
      cached: usage?.prompt_tokens_details?.cached_tokens,
      prompt: usage?.prompt_tokens,
      rate: usage && rate(usage.completion_tokens, firstSeconds, seconds),
      first: firstSeconds,
      finish,
    };
  } catch (error) {
    if (controller.signal.aborted) node.stats = { finish: "stopped" };
    else node.error = error.message;
  } finally {
    running = null;
    store.save();
    show();
    $("spoken").textContent = node.content;
  }
}

// Tokens a second after the first; of the whole where that was too short for the browser's clock to tell.
function rate(tokens, firstSeconds, seconds) {
  return seconds - firstSeconds > 0.05 ? (tokens - 1) / (seconds - firstSeconds) : tokens / seconds;
}

function stop() {
  running?.controller.abort();
}

// Redraws the streaming message: at most once a frame, and never for more than a fifth of the time.
function updater(conversation, index) {
  let waiting = false;
  let rest = 0;
  return () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => requestAnimationFrame((begin) => {
      waiting = false;
      const body = document.querySelector(`article[data-index="${index}"] .body`);
      if (!body || store.current() !== conversation) return;
      const atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
      body.replaceChildren(render(conversation.nodes[index].content));
      if (atEnd) messages.scrollTop = messages.scrollHeight;
      rest = 4 * (performance.now() - begin);
    }), rest);
  };
}

// ---- showing ----

function button(label, title, action) {
  const node = document.createElement("button");
  node.type = "button";
  node.className = "quiet";
  node.textContent = label;
  node.title = title;
  node.setAttribute("aria-label", title);
  node.addEventListener("click", action);
  return node;
}

function show() {
  const conversation = store.current();
  const atEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
  messages.replaceChildren(...store.path(conversation).map((index) => message(conversation, index)));
  if (!conversation.nodes.length) {
    const empty = document.createElement("p");
    empty.className = "empty";
    empty.textContent = "Ask something. Everything runs on this server's CPUs.";
    messages.append(empty);
  }
  if (atEnd) messages.scrollTop = messages.scrollHeight;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  for (const field of settings.querySelectorAll("[name]")) field.value = conversation.settings[field.name] ?? "";
  list();
}

function list() {
  const current = store.current();
  $("conversations").replaceChildren(...store.all().map((conversation) => {
    const item = document.createElement("li");
    item.classList.toggle("current", conversation === current);
    const title = button(conversation.title || "New conversation", conversation.title || "New conversation", () => open(conversation.id));
    title.className = "title";
    if (conversation === current) title.setAttribute("aria-current", "true");
    const remove = button("×", `Delete ${conversation.title || "conversation"}`, () => {
      if (running?.conversation === conversation) stop();
      store.remove(conversation.id);
      show();
    });
    item.append(title, remove);
    return item;
  }));
}

function message(conversation, index) {
  const node = conversation.nodes[index];
  const isRunning = running?.conversation === conversation && running.index === index;
  const article = document.createElement("article");
  article.className = `${node.role}${isRunning ? " running" : ""}`;
  article.dataset.index = index;
  article.setAttribute("aria-label", node.role === "user" ? "You" : "Answer");
  const body = document.createElement("div");
  body.className = "body";
  if (node.role === "user") body.textContent = node.content;
  else body.append(render(node.content));
  const foot = document.createElement("div");
  foot.className = "foot";
  foot.append(...branches(conversation, index));
  if (!isRunning) {
    if (navigator.clipboard) foot.append(button("Copy", "Copy this message", () => navigator.clipboard.writeText(node.content)));
    if (node.role === "user") foot.append(button("Edit", "Edit this message and branch off", () => edit(conversation, index, article)));
    else foot.append(button("Regenerate", "Answer once more", () => regenerate(conversation, index)));
    foot.append(...stats(node));
  }
  article.append(body, foot);
  return article;
}

function branches(conversation, index) {
  const all = store.siblings(conversation, index);
  if (all.length < 2) return [];
  const at = all.indexOf(index);
  const go = (to) => {
    if (running) return;
    store.show(conversation, all[to]);
    show();
  };
  const before = button("‹", "Earlier version", () => go(at - 1));
  const after = button("›", "Later version", () => go(at + 1));
  before.disabled = at === 0;
  after.disabled = at === all.length - 1;
  const box = document.createElement("span");
  box.className = "branch";
  box.append(before, `${at + 1}/${all.length}`, after);
  return [box];
}

function stats({ stats, error }) {
  const text = document.createElement("span");
  text.className = "stats small muted";
  if (error) {
    text.className = "stats small error";
    text.setAttribute("role", "alert");
    text.textContent = error;
  } else if (stats) {
    const parts = [];
    if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
    if (stats.tokens !== undefined) parts.push(`${stats.tokens} tokens`);
    if (stats.first) parts.push(`first after ${Math.round(stats.first * 1000)} ms`);
    if (stats.cached !== undefined) parts.push(`${stats.cached} of ${stats.prompt} prompt tokens from cache`);
    if (stats.finish === "length") parts.push("cut off: no tokens left");
    if (stats.finish === "stopped") parts.push("stopped");
    text.textContent = parts.join(" · ");
  } else {
    return [];
  }
  return [text];
}

function regenerate(conversation, index) {
  if (running) return;
  conversation.leaf = conversation.nodes[index].parent;
  answer(conversation);
}

function edit(conversation, index, article) {
  if (running) return;
  const box = document.createElement("textarea");
  box.value = conversation.nodes[index].content;
  box.rows = Math.min(12, box.value.split("\n").length + 1);
  box.setAttribute("aria-label", "Edit message");
  const confirm = () => {
    if (!box.value.trim() || running) return;
    store.add(conversation, conversation.nodes[index].parent, "user", box.value);
    answer(conversation);
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      confirm();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      show();
    }
  });
  const foot = document.createElement("div");
  foot.className = "foot";
  foot.append(button("Cancel", "Leave it as it is", show), button("Send", "Send as a new branch", confirm));
  article.replaceChildren(box, foot);
  box.focus();
}

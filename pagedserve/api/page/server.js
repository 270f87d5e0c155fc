// The server view: figures, two charts and a picture of the pool, asked for once a second while it is looked at.

import * as client from "./client.js";

const $ = (id) => document.getElementById(id);
const KEPT_S = 180;
const STATES = ["free", "cached", "private", "shared"];

let timer = null;
let before = null; // the last status, and when it came
let rates = []; // [Unix time, tokens/s]
let ttfts = []; // [Unix time, seconds]

export function start() {
  $("legend").replaceChildren(...STATES.map((state) => {
    const entry = document.createElement("span");
    const colour = document.createElement("i");
    colour.style.background = `var(--${state})`;
    entry.append(colour, state);
    return entry;
  }));
  document.addEventListener("visibilitychange", () => { if (timer !== null) watch(!document.hidden); });
}

export function watch(on) {
  clearTimeout(timer);
  timer = null;
  if (on) ask();
}

async function ask() {
  timer = setTimeout(ask, 1000);
  try {
    show(await client.status(ttfts.at(-1)?.[0] ?? 0));
  } catch (error) {
    figures([["Server", error.message]]);
    before = null;
  }
}

function show(status) {
  const now = Date.now() / 1000;
  const rate = before ? (status.num_generation_tokens - before.status.num_generation_tokens) / (now - before.time) : 0;
  before = { status, time: now };
  // A restarted scheduler counts from zero.
  rates = [...rates, [now, Math.max(0, rate)]].filter(([time]) => time > now - KEPT_S);
  ttfts = [...ttfts, ...status.ttft].filter(([time]) => time > now - KEPT_S);
  const last = ttfts.at(-1);
  const hits = status.num_queried_tokens ? `${Math.round((100 * status.num_cached_tokens) / status.num_queried_tokens)} %` : "–";
  figures([
    ["State", status.ready ? "ready" : "loading"],
    ["Running", status.num_running],
    ["Waiting", status.num_waiting],
    ["Tokens/s", Math.max(0, rate).toFixed(0)],
    ["Last TTFT", last ? `${(1000 * last[1]).toFixed(0)} ms` : "–"],
    ["Pool in use", `${Math.round((100 * status.num_referenced_blocks) / status.num_blocks)} %`],
    ["Prefix hits", hits],
    ["Preemptions", status.num_preemptions],
  ]);
  chart($("rate"), rates, now, 1);
  chart($("ttft"), ttfts, now, 1000);
  pool($("blocks"), status.block_states);
  $("workers").replaceChildren(...status.workers.map(({ worker_id, pid, state, isa }) => {
    const row = document.createElement("tr");
    for (const value of [worker_id, pid, state, isa]) row.insertCell().textContent = value;
    return row;
  }));
}

function figures(entries) {
  $("figures").replaceChildren(...entries.map(([name, value]) => {
    const box = document.createElement("div");
    const term = document.createElement("dt");
    const figure = document.createElement("dd");
    term.textContent = name;
    figure.textContent = value;
    box.append(term, figure);
    return box;
  }));
}

// A canvas as sharp as the screen, its width and height in CSS pixels, and the colours of the theme.
function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const sharpness = devicePixelRatio || 1;
  if (height) canvas.style.height = `${height}px`;
  height ??= canvas.clientHeight;
  canvas.width = width * sharpness;
  canvas.height = height * sharpness;
  const draw = canvas.getContext("2d");
  draw.scale(sharpness, sharpness);
  const style = getComputedStyle(document.documentElement);
  return { draw, width, height, colour: (name) => style.getPropertyValue(`--${name}`) };
}

function chart(canvas, points, now, factor) {
  const { draw, width, height, colour } = prepare(canvas);
  const top = niceTop(factor * Math.max(0, ...points.map(([, value]) => value)));
  const left = 44;
  const bottom = height - 18;
  const x = (time) => left + (width - left - 4) * (1 - (now - time) / KEPT_S);
  const y = (value) => bottom - (bottom - 8) * (value / top);
  draw.font = "11px system-ui, sans-serif";
  draw.fillStyle = colour("muted");
  draw.strokeStyle = colour("line");
  for (const share of [0, 0.5, 1]) {
    const line = Math.round(y(share * top)) + 0.5;
    draw.beginPath();
    draw.moveTo(left, line);
    draw.lineTo(width, line);
    draw.stroke();
    draw.textAlign = "right";
    draw.fillText(String(share * top), left - 6, line + 4);
  }
  draw.textAlign = "left";
  draw.fillText(`${KEPT_S / 60} min ago`, left, height - 4);
  draw.textAlign = "right";
  draw.fillText("now", width - 2, height - 4);
  draw.strokeStyle = draw.fillStyle = colour("accent");
  if (factor === 1) {
    draw.lineWidth = 1.5;
    draw.beginPath();
    points.forEach(([time, value], i) => (i ? draw.lineTo(x(time), y(value)) : draw.moveTo(x(time), y(value))));
    draw.stroke();
  } else {
    for (const [time, value] of points) {
      draw.beginPath();
      draw.arc(x(time), y(factor * value), 2.5, 0, 7);
      draw.fill();
    }
  }
}

// The least 1, 2 or 5 times a power of ten that is not below the value.
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * ([1, 2, 5].find((digit) => digit * power >= value) ?? 10);
}

function pool(canvas, states) {
  const width = canvas.clientWidth;
  // The largest squares with which the picture stays about a third as high as it is wide.
  let size = 14;
  while (size > 2 && Math.ceil(states.length / Math.floor(width / size)) * size > Math.max(160, width / 3)) size--;
  const columns = Math.max(1, Math.floor(width / size));
  const { draw, colour } = prepare(canvas, Math.max(size, Math.ceil(states.length / columns) * size));
  const gap = size > 4 ? 1.5 : size > 2 ? 0.5 : 0;
  STATES.forEach((name, state) => {
    draw.fillStyle = colour(name);
    for (let i = 0; i < states.length; i++) {
      if (Number(states[i]) === state) draw.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - gap, size - gap);
    }
  });
}

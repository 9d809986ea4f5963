// The page of a server: a chat, a race with and without speculation, and the state of the server.

import { Chat } from "./chat.js";
import { Client } from "./client.js";
import { Inspector, ORIGINS, Run, Tokens, bars, legend, make } from "./view.js";

const POLL_MS = 1500;
const client = new Client();
const find = (id) => document.getElementById(id);
const inspector = new Inspector(find("inspector"));

// Fields of a request by their controls, and what the server calls their defaults.
const NUMBERS = {
  temperature: ["temperature", "temperature"],
  "top-p": ["top_p", "top_p"],
  tokens: ["max_tokens", "max_new_tokens"],
};
const stated = new Set();

/** Start from the server's sampling defaults, where it states any; what is changed already stays. */
function startFrom(defaults) {
  const isSilent = !["temperature", "top_p", "top_k", "min_p"].some((name) => name in defaults);
  for (const [id, [, name]] of Object.entries(NUMBERS)) {
    const value = defaults[name] ?? (isSilent || id === "tokens" ? undefined : 1);
    if (value === undefined) continue;
    const [control, wasChanged] = [find(id), isChanged(id)];
    control.defaultValue = value;
    if (!wasChanged) control.value = value;
    stated.add(id);
  }
}

function isChanged(id) {
  const { value, defaultValue } = find(id);
  return value !== "" && Number(value) !== Number(defaultValue);
}

function isSent(id) {
  // The server's default length is one of chats.
  const isOfServer = stated.has(id) && (id !== "tokens" || find("form").value === "chat");
  return isChanged(id) || (find(id).value !== "" && !isOfServer);
}

/** The fields of a request, from the controls. A default of the server is left to the server. */
function settings() {
  const seed = find("seed").value;
  const sent = Object.entries(NUMBERS).filter(([id]) => isSent(id));
  return {
    ...Object.fromEntries(sent.map(([id, [name]]) => [name, Number(find(id).value)])),
    speculation: find("speculation").checked && drafting(),
    ...(seed !== "" && { seed: Number(seed) }),
  };
}

const SETTINGS = "monge settings";
const KEPT = ["temperature", "top-p", "tokens", "seed", "form", "speculation", "always", "by-token"];

/** Keep the settings for the next visit; a browser that keeps nothing starts with the defaults. */
function keepSettings() {
  const values = KEPT.filter((id) => !(id in NUMBERS) || isChanged(id)).map((name) => [name, find(name).type === "checkbox" ? find(name).checked : find(name).value]);
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(values)));
  } catch {
    // As chats, they are lost with a reload.
  }
}

function restoreSettings() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    // The defaults stay.
  }
  for (const name of KEPT.filter((one) => one in kept)) {
    if (find(name).type === "checkbox") find(name).checked = kept[name] === true;
    else find(name).value = kept[name];
  }
  find("log").classList.toggle("shows-tokens", find("by-token").checked);
}

/** The field `speculation` of a request that drafts. */
function drafting() {
  return find("always").checked ? { adaptive: false } : true;
}

/** Write an answer into a run; `onChunk` takes new text, and why the text ended once it has. */
async function answer(run, messages, options, signal, onChunk) {
  const isChat = find("form").value === "chat";
  const path = isChat ? "v1/chat/completions" : "v1/completions";
  const isContinued = messages.at(-1).role === "assistant";
  const asked = isChat
    ? { messages, ...(isContinued && { continue_final_message: true, add_generation_prompt: false }) }
    : { prompt: messages.map((message) => message.content).join("") };
  for await (const chunk of client.stream(path, { ...options, ...asked }, signal)) {
    for (const choice of chunk.choices) {
      choice.rounds?.forEach((round) => run.add(round));
      onChunk(choice.delta?.content ?? choice.text ?? "", choice.finish_reason ?? null);
    }
  }
}

/** Make a run; one that is pointed at is shown round by round. */
function newRun() {
  const run = new Run();
  run.addEventListener("select", () => inspector.show(run));
  return run;
}

function tell(message, isError = false) {
  find("status").textContent = message;
  find("status").classList.toggle("error", isError);
}

/** Return a function that measures a run so far; its speed counts from the first tokens on. */
function startClock(run) {
  const [asked, first] = [performance.now(), { at: 0, count: 0 }];
  return () => {
    const { length } = run.tokens;
    if (!first.count) [first.at, first.count] = [performance.now(), length];
    const seconds = (performance.now() - first.at) / 1000;
    const delay = ((first.at - asked) / 1000).toFixed(2);
    const figures = `${length} tokens · ${run.tokensPerForward.toFixed(2)} a forward · first after ${delay} s`;
    return { speed: seconds && (length - first.count) / seconds, figures };
  };
}

// Chat

const chat = new Chat(find("log"), { regenerate, proceed: () => write(chat.turns.at(-1)) });
let running = null;

async function ask(event) {
  event.preventDefault();
  const question = find("question").value;
  if (running || !question.trim()) return;
  find("question").value = "";
  chat.add({ role: "user", content: question });
  if (await write()) return;
  chat.pop();
  if (!chat.turns.length) chat.clear();
  find("question").value = question;
}

async function regenerate() {
  if (running) return;
  const before = chat.pop();
  if (!(await write())) chat.add(before);
}

/** Write an answer, or more of one; returns whether there is an answer, else none is left in the chat. */
async function write(begun) {
  if (running) return true;
  running = new AbortController();
  setRunning(true);
  const run = newRun();
  inspector.show(run);
  const { messages } = chat;
  const turn = begun ?? chat.add({ role: "assistant", content: "", end: null });
  const { view } = turn;
  view.open(run);
  const measure = startClock(run);
  let frame = 0;
  tell("writing …");
  try {
    await answer(run, messages, settings(), running.signal, (text, end) => {
      const now = measure();
      turn.content += text;
      turn.end = end ?? turn.end;
      view.figures.textContent = `${now.figures} · ${now.speed.toFixed(1)} tokens/s`;
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        view.show();
        chat.follow();
      });
    });
    const isPlain = settings().speculation === true && run.rounds.every((round) => round.origin === null);
    if (isPlain) view.figures.append(" · the controller drafted nothing: “always draft” does");
    tell(`Answered: ${view.figures.textContent}`);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    turn.end = isStopped ? "stopped" : "failed";
    tell(isStopped ? "Stopped." : error.message, !isStopped);
    noteKey(error);
  }
  running = null;
  setRunning(false);
  view.close();
  chat.follow();
  const isWritten = turn.content !== "" || turn.end === "stop";
  if (!isWritten) chat.pop();
  if (!chat.keep()) tell("This browser keeps no chats: a reload loses this one.", true);
  if (find("key-form").hidden) find("question").focus();
  return isWritten;
}

function setRunning(isRunning) {
  find("stop").hidden = !isRunning;
  for (const id of ["send", "fresh", "go"]) find(id).disabled = isRunning;
}

find("ask").addEventListener("submit", ask);
find("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) running?.abort();
});
find("fresh").addEventListener("click", () => {
  chat.clear();
  chat.keep();
  tell("A new chat.");
  find("question").focus();
});
for (const [field, form] of Object.entries({ question: "ask", task: "start" })) {
  find(field).addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find(form).requestSubmit();
  });
}

find("system").addEventListener("input", () => (chat.system = find("system").value));
addEventListener("pagehide", () => {
  chat.keep();
  keepSettings();
});
document.querySelector(".settings").addEventListener("change", keepSettings);
find("by-token").addEventListener("change", () => {
  find("log").classList.toggle("shows-tokens", find("by-token").checked);
});

// Race

/** The settings of both lanes; a race has its own temperature, which starts at 0, where texts are equal. */
function raceSettings() {
  return { ...settings(), temperature: Number(find("race-temperature").value) };
}

function makeLane(title, speculation) {
  const run = newRun();
  const rate = make("strong", { class: "rate" }, "0");
  const figures = make("p", { class: "quiet" }, "waiting");
  const progress = make("progress", { max: Number(find("tokens").value) || 1, value: 0, "aria-label": title });
  const heading = [make("h3", {}, title), make("p", {}, rate, " tokens/s"), progress, figures];
  find("lanes").append(make("article", { class: "card lane" }, ...heading, new Tokens(run).element));
  const lane = { run, text: "", speed: 0 };
  lane.start = async (task) => {
    const measure = startClock(run);
    const update = () => {
      const now = measure();
      lane.speed = now.speed;
      rate.textContent = now.speed.toFixed(1);
      figures.textContent = now.figures;
      progress.value = run.tokens.length;
    };
    const turn = [{ role: "user", content: task }];
    await answer(run, turn, { ...raceSettings(), speculation }, running.signal, (text) => {
      lane.text += text;
      update();
    });
    progress.value = progress.max;
  };
  return lane;
}

async function race(event) {
  event.preventDefault();
  const task = find("task").value;
  if (running || !task.trim()) return;
  running = new AbortController();
  setRunning(true);
  find("lanes").replaceChildren();
  find("result").textContent = "";
  const lanes = [makeLane("With speculation", drafting()), makeLane("Without", false)];
  inspector.show(lanes[0].run);
  tell("racing …");
  try {
    if (find("order").value === "together") await Promise.all(lanes.map((lane) => lane.start(task)));
    else for (const lane of lanes) await lane.start(task);
    const [drafted, plain] = lanes;
    const why = raceSettings().temperature === 0 ? "" : ", as two draws from one distribution do";
    const texts = drafted.text === plain.text ? "The texts are equal." : `The texts differ${why}.`;
    const isPlain = drafted.run.rounds.every((round) => round.origin === null);
    const speed = isPlain
      ? "Nothing was drafted, so both lanes decoded alike: “always draft” drafts."
      : `${(drafted.speed / plain.speed).toFixed(2)} times the speed.`;
    find("result").textContent = `${speed} ${texts}`;
    tell("The race has ended.");
  } catch (error) {
    running.abort(); // the other lane
    const isStopped = error.name === "AbortError";
    tell(isStopped ? "Stopped." : error.message, !isStopped);
    noteKey(error);
  } finally {
    running = null;
    setRunning(false);
  }
}

find("start").addEventListener("submit", race);

// State of the server

const FIGURES = {
  speed: "tokens/s now",
  forward: "tokens a forward",
  running: "running",
  waiting: "waiting",
  cache: "cache reserved",
  hits: "prefix cache hits",
  planned: "rounds planned by",
};
const shown = Object.fromEntries(Object.keys(FIGURES).map((name) => [name, make("dd", {}, "–")]));
const depths = make("div", {});
let before = null;

function showMetrics(found) {
  const total = (name) => (found.get(name) ?? []).reduce((sum, one) => sum + one.value, 0);
  const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");
  const [tokens, rounds] = [total("vllm:generation_tokens_total"), total("monge:target_rounds_total")];
  const now = performance.now();
  if (before) shown.speed.textContent = ((1000 * (tokens - before.tokens)) / (now - before.now)).toFixed(1);
  before = { tokens, now };
  shown.forward.textContent = rounds ? (tokens / rounds).toFixed(2) : "–";
  shown.running.textContent = total("vllm:num_requests_running");
  shown.waiting.textContent = total("vllm:num_requests_waiting");
  shown.cache.textContent = share(total("vllm:kv_cache_usage_perc"), 1);
  const looked = total("vllm:prefix_cache_queries_total");
  shown.hits.textContent = share(total("vllm:prefix_cache_hits_total"), looked);
  const planned = (found.get("monge:rounds_by_controller_total") ?? []).filter((one) => one.value);
  const named = planned.map(({ labels, value }) => `${labels.controller} ${value}`);
  shown.planned.textContent = named.join(", ") || "–";
  const drafts = total("vllm:spec_decode_num_drafts_total");
  const positions = found.get("vllm:spec_decode_num_accepted_tokens_per_pos_total") ?? [];
  const reached = positions.filter((one) => one.value);
  const shares = reached.map((one) => ({ tried: drafts, accepted: one.value }));
  depths.replaceChildren(drafts ? bars(shares) : "No drafts yet.");
}

async function poll() {
  try {
    if (!document.hidden) showMetrics(await client.metrics());
  } catch {
    before = null;
    shown.speed.textContent = "no answer";
  }
  setTimeout(poll, POLL_MS);
}

// The page

async function connect() {
  try {
    const card = await client.model();
    const parts = `drafts by ${card.drafters.join(", ")} · verified by ${card.verifier}`;
    find("model").textContent = `${card.id} · ${card.backend} · ${parts}`;
    find("key-form").hidden = true;
    startFrom(card.default_sampling);
    tell("");
  } catch (error) {
    find("model").textContent = "not connected";
    tell(error.message, true);
    noteKey(error);
  }
}

/** Ask for a key if the server wants one. */
function noteKey(error) {
  if (error.status !== 401) return;
  find("key-form").hidden = false;
  find("key").focus();
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  client.key = find("key").value;
  connect();
});

const tabs = [...document.querySelectorAll("[role=tab]")];
function openTab(tab) {
  for (const one of tabs) {
    const isOpen = one === tab;
    one.setAttribute("aria-selected", isOpen);
    one.tabIndex = isOpen ? 0 : -1;
    find(one.getAttribute("aria-controls")).hidden = !isOpen;
  }
  find("speculation").disabled = tab.id === "tab-race";
}
tabs.forEach((tab, place) => {
  tab.addEventListener("click", () => openTab(tab));
  tab.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = tabs[(place + 1) % tabs.length];
    openTab(other);
    other.focus();
  });
});

const themes = ["system", "light", "dark"];
find("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const next = themes[(themes.indexOf(root.dataset.theme ?? "system") + 1) % themes.length];
  root.dataset.theme = next;
  find("theme").textContent = `Theme: ${next}`;
});

const pairs = Object.entries(FIGURES).map(([name, label]) =>
  make("div", {}, make("dt", {}, label), shown[name]),
);
chat.restore();
restoreSettings();
find("system").value = chat.system;
find("instructions").open = chat.system !== "";
find("legend").append(legend(Object.keys(ORIGINS)));
find("live").append(
  make("dl", { class: "live" }, ...pairs),
  make("h3", {}, "Drafts accepted to depth"),
  depths,
);
connect();
poll();

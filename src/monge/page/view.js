// The view of one run: its tokens by origin, the tree of every round, and figures over all rounds.
// All text comes in as text nodes; nothing here is parsed as HTML. trace.py describes the data.

export const ORIGINS = {
  lookup: ["lookup", "accepted from text that was looked up"],
  draft: ["draft model", "accepted from the draft model"],
  head: ["head", "accepted from a draft head"],
  grammar: ["grammar", "forced by the grammar, and accepted"],
  correction: ["correction", "drawn after a rejection"],
  bonus: ["bonus", "drawn by the target after a path accepted to its end"],
  target: ["no draft", "drawn by the target in a round without candidates"],
};
const FATES = {
  root: "the last token of the text before",
  accepted: "accepted",
  rejected: "not accepted",
  unreached: "not reached, since its parent was not accepted",
};
const SVG = "http://www.w3.org/2000/svg";
const BOX = { width: 98, height: 40, right: 22, down: 12 };
const UNIT = 8; // side of a token's square in the picture of all rounds
const MOST_ROUNDS = 60; // in the picture
const LONGEST_LABEL = 10;

/** Make an element: functions listen to events, strings and numbers become text, null is left out. */
export function make(tag, attributes = {}, ...children) {
  const isSvg = tag.startsWith("svg:");
  const element = isSvg ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const visible = (text) =>
  text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
const counted = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const ms = (seconds) => `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;

function prob(value) {
  if (value === null) return "–";
  return value >= 0.01 || value === 0 ? value.toFixed(2) : value.toExponential(0);
}

/** The rounds of one completion as they come, and which of them is looked at. */
export class Run extends EventTarget {
  rounds = [];
  tokens = [];
  selected = -1;
  isShown = false;

  /** Append a round; the last one stays selected, if it was. */
  add(round) {
    const index = this.rounds.length;
    if (this.selected === index - 1) this.selected = index;
    this.rounds.push(round);
    this.tokens.push(...round.tokens.map((token) => ({ ...token, round: index })));
    this.#tell("change");
  }

  select(index) {
    this.selected = Math.min(Math.max(0, index), this.rounds.length - 1);
    this.#tell("select");
    this.#tell("change");
  }

  show(isShown) {
    this.isShown = isShown;
    this.#tell("change");
  }

  #tell(name) {
    this.dispatchEvent(new Event(name));
  }

  get tokensPerForward() {
    return this.rounds.length ? this.tokens.length / this.rounds.length : 0;
  }

  /** How often a token was tried and accepted at depth 1, 2, ... behind an accepted path. */
  get acceptance() {
    const depths = [];
    for (const { nodes, path } of this.rounds) {
      for (let depth = 0; depth <= path.length; depth++) {
        const parent = depth ? path[depth - 1] : 0;
        if (!nodes.some((node) => node.parent === parent)) break;
        depths[depth] ??= { tried: 0, accepted: 0 };
        depths[depth].tried += 1;
        depths[depth].accepted += depth < path.length;
      }
    }
    return depths;
  }
}

// One tooltip for the whole document.

const tip = make("div", { id: "tip", role: "tooltip", hidden: true });
document.body.append(tip);
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

function showTip(anchor, title, about, rows) {
  const list = rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  tip.replaceChildren(make("strong", {}, visible(title)), make("p", {}, about), make("dl", {}, ...list));
  tip.hidden = false;
  const place = anchor.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, window.innerWidth - tip.offsetWidth - 8));
  const isBelow = place.bottom + 6 + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${isBelow ? place.bottom + 6 : place.top - tip.offsetHeight - 6}px`;
}

function hideTip() {
  tip.hidden = true;
}

function probabilities({ p, q }, isDrafted) {
  const rows = [["target p", prob(p)]];
  if (isDrafted) rows.push(["draft q", q === null ? "not drawn" : prob(q)]);
  if (p !== null && q !== null) rows.push(["acceptance", `min(1, p/q) = ${prob(Math.min(1, p / q))}`]);
  return rows;
}

/** The text of a run, token by token: arrow keys walk through it, Enter shows the round of a token. */
export class Tokens {
  #run;

  constructor(run) {
    this.#run = run;
    this.element = make("div", { class: "tokens", keydown: (event) => this.#walk(event) });
    run.addEventListener("change", () => this.#update());
    this.#update();
  }

  #update() {
    const { tokens, selected, isShown } = this.#run;
    const { element } = this;
    while (element.children.length < tokens.length) {
      element.append(this.#token(tokens[element.children.length], element.children.length === 0));
    }
    [...element.children].forEach((child, place) => {
      child.classList.toggle("current", isShown && tokens[place].round === selected);
    });
  }

  #token(token, isFirst) {
    const [name, about] = ORIGINS[token.origin];
    const isDrafted = !["correction", "bonus", "target"].includes(token.origin);
    const rows = [...probabilities(token, isDrafted), ["round", token.round + 1]];
    const show = ({ currentTarget }) => showTip(currentTarget, token.text, `${name}: ${about}`, rows);
    const focus = (event) => {
      this.element.querySelector("[tabindex='0']").tabIndex = -1;
      event.currentTarget.tabIndex = 0;
      show(event);
    };
    const click = () => this.#run.select(token.round);
    const kind = token.text === "" ? " empty" : token.text.includes("\n") ? " newline" : "";
    const attributes = {
      class: `token${kind}`,
      "data-origin": token.origin,
      "aria-describedby": "tip",
      tabindex: isFirst ? 0 : -1,
    };
    const events = { mouseenter: show, mouseleave: hideTip, blur: hideTip, focus, click };
    return make("span", { ...attributes, ...events }, token.text);
  }

  #walk(event) {
    const places = [...this.element.children];
    const at = places.indexOf(event.target);
    const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: places.length - 1 };
    if (event.key === "Enter") this.#run.select(this.#run.tokens[at].round);
    if (!(event.key in steps)) return;
    event.preventDefault();
    places[steps[event.key]]?.focus();
  }
}

// The tree of a round

function fateOf({ nodes, path }, node) {
  if (node === 0) return "root";
  if (path.includes(node)) return "accepted";
  const { parent } = nodes[node];
  return parent === 0 || path.includes(parent) ? "rejected" : "unreached";
}

/** Give every node a place: the accepted path is the first row, and other candidates hang below it. */
function layout(round) {
  const { nodes, path, tokens } = round;
  const all = nodes.map((node, number) => ({ ...node, number, fate: fateOf(round, number) }));
  if (tokens.length > path.length) {
    all.push({ ...tokens.at(-1), number: nodes.length, parent: path.at(-1) ?? 0, fate: "next" });
  }
  const rank = ["next", "accepted", "rejected", "unreached"];
  const order = (node) => rank.indexOf(node.fate) * all.length + node.number;
  let numRows = 0;
  const visit = (node, column) => {
    const children = all.filter((one) => one.parent === node.number);
    children.sort((one, other) => order(one) - order(other));
    [node.column, node.row] = [column, children.length ? numRows : numRows++];
    children.forEach((child) => visit(child, column + 1));
  };
  visit(all[0], 0);
  for (const node of all) {
    node.x = 2 + node.column * (BOX.width + BOX.right);
    node.y = 2 + node.row * (BOX.height + BOX.down);
  }
  return all;
}

function drawTree(round) {
  const all = layout(round);
  const width = 2 + Math.max(...all.map((node) => node.x)) + BOX.width;
  const height = 2 + Math.max(...all.map((node) => node.y)) + BOX.height;
  const edges = all.slice(1).map((node) => drawEdge(all[node.parent], node));
  const boxes = all.map((node) => drawNode(round, node));
  const label = `Tree of ${counted(round.nodes.length - 1, "candidate")}; the table below has its text`;
  return picture(width, height, label, "tree", ...edges, ...boxes);
}

function picture(width, height, label, kind, ...shapes) {
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  return make("svg:svg", { ...size, role: "img", "aria-label": label, class: kind }, ...shapes);
}

function drawEdge(from, to) {
  const [startX, startY] = [from.x + BOX.width, from.y + BOX.height / 2];
  const [bend, endY] = [startX + BOX.right / 2, to.y + BOX.height / 2];
  const d = `M${startX} ${startY} C${bend} ${startY} ${bend} ${endY} ${to.x} ${endY}`;
  return make("svg:path", { class: `edge ${to.fate}`, d });
}

function drawNode(round, node) {
  const { x, y, fate, text, p, q } = node;
  const [isRoot, isNext] = [fate === "root", fate === "next"];
  const origin = isNext ? node.origin : isRoot ? null : round.origin;
  const about = isNext ? ORIGINS[origin].join(": ") : FATES[fate];
  const rows = isRoot ? [] : probabilities(node, !isNext);
  const show = ({ currentTarget }) => showTip(currentTarget, text, about, rows);
  const label = visible(text);
  const short = label.length > LONGEST_LABEL ? `${label.slice(0, LONGEST_LABEL - 1)}…` : label;
  const figures = isRoot ? "" : `p ${prob(p)}${q === null ? "" : `  q ${prob(q)}`}`;
  const middle = x + BOX.width / 2;
  return make(
    "svg:g",
    { class: `node ${fate}`, "data-origin": origin, mouseenter: show, mouseleave: hideTip },
    make("svg:rect", { x, y, width: BOX.width, height: BOX.height, rx: 7 }),
    make("svg:text", { x: middle, y: y + (figures ? 17 : 25), class: "label" }, short),
    make("svg:text", { x: middle, y: y + 32, class: "figures" }, figures),
  );
}

function tableOf(round) {
  const names = ["node", "token", "below", "p", "q", "verdict"];
  const head = names.map((name) => make("th", { scope: "col" }, name));
  const rows = round.nodes.slice(1).map(({ text, parent, p, q }, place) => {
    const fate = FATES[fateOf(round, place + 1)];
    const cells = [place + 1, visible(text), parent || "root", prob(p), prob(q), fate];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
  });
  return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

// Words and figures

function sentence({ nodes, path, tokens, origin, drafter, window }, index, numRounds) {
  const last = tokens.length > path.length ? ORIGINS[tokens.at(-1).origin][0] : "the end of the text";
  const who = drafter ?? (origin && ORIGINS[origin][0]);
  const drafted = origin
    ? `${who} drafted ${counted(nodes.length - 1, "token")}; ${path.length} accepted, then ${last}.`
    : "no candidates, one plain step of the target.";
  const limit = window === null ? "" : ` Its depth limit was ${window}.`;
  return `Round ${index + 1} of ${numRounds}: ${drafted}${limit}`;
}

function timesOf({ seconds, stages, batch_size: size }) {
  const parts = Object.entries(stages).map(([name, one]) => `${name} ${ms(one)}`);
  return `${ms(seconds)}${size > 1 ? `, shared by ${size} requests` : ""}: ${parts.join(", ")}`;
}

function figuresOf(run) {
  const seconds = run.rounds.reduce((sum, round) => sum + round.seconds, 0);
  const speed = seconds ? ` · ${(run.tokens.length / seconds).toFixed(1)} tokens/s in rounds` : "";
  const sizes = `${counted(run.tokens.length, "token")} · ${counted(run.rounds.length, "round")}`;
  return `${sizes} · ${run.tokensPerForward.toFixed(2)} tokens a forward${speed}`;
}

function depthOf({ nodes }) {
  const depths = [];
  for (const { parent } of nodes) depths.push(parent < 0 ? 0 : depths[parent] + 1);
  return Math.max(...depths);
}

/** Rounds side by side around the selected one: their tokens by origin, and the depth of their trees. */
function drawRounds(run) {
  const start = Math.max(0, Math.min(run.selected - MOST_ROUNDS / 2, run.rounds.length - MOST_ROUNDS));
  const rounds = run.rounds.slice(start, start + MOST_ROUNDS);
  const tried = rounds.map((round) => 1 + depthOf(round));
  const height = UNIT * Math.max(2, ...tried);
  const columns = rounds.map((round, index) => {
    const place = { x: 1 + index * (UNIT + 2), width: UNIT };
    const frame = { ...place, y: height - tried[index] * UNIT, height: tried[index] * UNIT };
    const squares = round.tokens.map(({ origin }, row) => {
      const square = { ...place, y: height - (row + 1) * UNIT, height: UNIT - 1 };
      return make("svg:rect", { ...square, "data-origin": origin });
    });
    return make(
      "svg:g",
      {
        class: start + index === run.selected ? "column current" : "column",
        click: () => run.select(start + index),
      },
      make("svg:rect", { x: place.x - 1, width: UNIT + 2, y: 0, height, class: "area" }),
      make("svg:rect", { ...frame, class: "tried" }),
      ...squares,
    );
  });
  const label = `Tokens of each of ${counted(rounds.length, "round")}`;
  return picture(rounds.length * (UNIT + 2), height, label, "rounds", ...columns);
}

/** A table of bars, for shares by depth. */
export function bars(entries) {
  const rows = entries.map(({ tried, accepted }, depth) => {
    const share = accepted / Math.max(1, tried);
    const fill = make("i");
    fill.style.width = `${100 * share}%`;
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, `depth ${depth + 1}`),
      make("td", { class: "bar" }, fill),
      make("td", {}, share.toFixed(2)),
      make("td", { class: "quiet" }, `${accepted} of ${tried}`),
    );
  });
  return make("table", { class: "bars" }, make("tbody", {}, ...rows));
}

export function legend(kinds) {
  const items = kinds.map((kind) => {
    const [name, about] = ORIGINS[kind];
    return make("li", { title: about }, make("span", { class: "token", "data-origin": kind }, name));
  });
  return make("ul", { class: "legend", "aria-label": "Origins of tokens" }, ...items);
}

/** One round of a run at a time: a slider over the rounds, the tree, its table, figures of the run. */
export class Inspector {
  #run = null;
  #frame = 0;
  #later = () => {
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  };

  constructor(element) {
    const step = (by) => () => this.#run.select(this.#run.selected + by);
    const move = () => this.#run.select(this.slider.value - 1);
    const note = (text) => make("p", { class: "quiet" }, text);
    const part = (name, attributes = {}) => (this[name] = make("div", { class: name, ...attributes }));
    const tree = { tabindex: 0, role: "group", "aria-label": "Tree of the round" };
    this.slider = make("input", { type: "range", min: 1, id: "round", input: move });
    this.empty = note("The tree of every round appears here once a text is written.");
    this.body = make(
      "div",
      { hidden: true },
      make(
        "div",
        { class: "slider" },
        make("label", { for: "round" }, "Round"),
        make("button", { type: "button", "aria-label": "Previous round", click: step(-1) }, "‹"),
        this.slider,
        make("button", { type: "button", "aria-label": "Next round", click: step(1) }, "›"),
      ),
      part("about"),
      part("times"),
      part("tree", tree),
      make("details", {}, make("summary", {}, "The tree as a table"), part("table")),
      make("h3", {}, "Rounds"),
      part("figures"),
      part("rounds"),
      note("A column is a round, a square a token; the frame is the depth that was drafted, plus one."),
      make("h3", {}, "Accepted by depth"),
      part("depths"),
    );
    element.append(this.empty, this.body);
  }

  show(run) {
    if (run === this.#run) return;
    this.#run?.removeEventListener("change", this.#later);
    this.#run?.show(false);
    this.#run = run;
    run.addEventListener("change", this.#later);
    run.show(true);
  }

  #draw() {
    this.#frame = 0;
    const { rounds, selected, acceptance } = this.#run;
    const round = rounds[selected];
    [this.empty.hidden, this.body.hidden] = [Boolean(round), !round];
    if (!round) return;
    this.about.textContent = sentence(round, selected, rounds.length);
    this.times.textContent = timesOf(round);
    this.figures.textContent = figuresOf(this.#run);
    this.slider.max = rounds.length;
    this.slider.value = selected + 1;
    this.slider.setAttribute("aria-valuetext", this.about.textContent);
    this.tree.replaceChildren(drawTree(round));
    this.table.replaceChildren(tableOf(round));
    this.rounds.replaceChildren(drawRounds(this.#run));
    this.depths.replaceChildren(acceptance.length ? bars(acceptance) : "Nothing was drafted.");
  }
}

// The file that `monge generate --html` writes

function showDocument({ drafters, verifier, controller, runs }) {
  const aside = make("section", { class: "card", "aria-label": "Round by round" });
  aside.append(make("h2", {}, "Round by round"));
  const inspector = new Inspector(aside);
  const texts = make("div", { class: "texts" });
  const parts = `drafts by ${drafters.join(", ")} · verified by ${verifier} · planned by ${controller}`;
  document.getElementById("parts").textContent = parts;
  document.getElementById("runs").append(texts, aside);
  const made = runs.map(({ prompt, rounds, error, finish_reason: end, seed }) => {
    const run = new Run();
    rounds.forEach((round) => run.add(round));
    run.addEventListener("select", () => inspector.show(run));
    const used = new Set(run.tokens.map((token) => token.origin));
    const kinds = Object.keys(ORIGINS).filter((kind) => used.has(kind));
    const told = `${figuresOf(run)} · ended by ${end}${seed === null ? "" : ` · seed ${seed}`}`;
    const card = make(
      "article",
      { class: "card" },
      legend(kinds),
      make("p", { class: "prompt" }, prompt),
      new Tokens(run).element,
      make("p", { class: "quiet" }, told),
      error && make("p", { class: "error" }, error),
    );
    texts.append(card);
    return run;
  });
  made[0].select(made[0].rounds.findIndex((round) => round.path.length));
}

const embedded = document.getElementById("trace");
if (embedded) showDocument(JSON.parse(embedded.textContent));

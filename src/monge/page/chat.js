// A conversation: its turns, which survive a reload, and how they are shown.

import { copyButton, showMarkdown } from "./markdown.js";
import { Tokens, make } from "./view.js";

const STORE = "monge chat";
const END = 40; // pixels from the end of the log that count as its end
const CUT = { length: "Cut by the limit of tokens.", stopped: "Stopped.", failed: "Broken off." };

/** Turns in a log that is scrolled only if its end is in view; a turn has `role`, `content` and `end`. */
export class Chat {
  turns = [];
  system = "";
  #log;
  #greeting;
  #follows = true;

  /** `actions` has `regenerate` and `proceed`, which are called for the last answer. */
  constructor(log, actions) {
    this.#log = log;
    this.#greeting = [...log.children];
    this.actions = actions;
    log.addEventListener("scroll", () => {
      this.#follows = log.scrollHeight - log.scrollTop - log.clientHeight < END;
    });
  }

  /** Show the conversation that this browser kept, if it can be read. */
  restore() {
    try {
      const { system, turns } = JSON.parse(localStorage.getItem(STORE)) ?? {};
      if (turns?.every(({ role, content }) => role && typeof content === "string")) {
        this.system = String(system ?? "");
        turns.forEach((turn) => this.add(turn));
      }
    } catch {
      this.clear();
    }
  }

  /** Keep the conversation; returns whether the browser let it be kept. */
  keep() {
    const turns = this.turns.map(({ role, content, end }) => ({ role, content, end: end ?? "stopped" }));
    try {
      localStorage.setItem(STORE, JSON.stringify({ system: this.system, turns }));
      return true;
    } catch {
      return false;
    }
  }

  /** The messages that a request for the next turn sends. */
  get messages() {
    const system = this.system.trim() ? [{ role: "system", content: this.system }] : [];
    return [...system, ...this.turns.map(({ role, content }) => ({ role, content }))];
  }

  add(turn) {
    if (!this.turns.length) this.#log.replaceChildren();
    this.turns.push(turn);
    turn.view ??= turn.role === "user" ? userView(turn) : new AnswerView(turn, this.actions);
    this.#log.append(turn.view.element ?? turn.view);
    this.#follows = true;
    this.follow();
    this.keep();
    return turn;
  }

  /** Take the last turn away, and return it. */
  pop() {
    const turn = this.turns.pop();
    this.#log.lastElementChild.remove();
    return turn;
  }

  clear() {
    this.turns = [];
    this.#log.replaceChildren(...this.#greeting);
  }

  /** Show the end of the log, unless the reader has scrolled away from it. */
  follow() {
    if (this.#follows) this.#log.scrollTo(0, this.#log.scrollHeight);
  }
}

function userView({ content }) {
  return make("article", { class: "turn user" }, make("h3", {}, "You"), make("p", {}, content));
}

/** An answer as Markdown and by token, with what can be done with it. */
class AnswerView {
  constructor(turn, { regenerate, proceed }) {
    const button = (text, click) => make("button", { type: "button", class: "last", click }, text);
    this.turn = turn;
    this.text = make("div", { class: "markdown" });
    this.tokens = make("div", { class: "by-token" });
    this.figures = make("p", { class: "quiet" });
    this.note = make("p", { class: "note", hidden: true });
    this.onward = button("Continue", proceed);
    this.buttons = make(
      "div",
      { class: "actions", hidden: true },
      this.onward,
      copyButton(() => turn.content),
      button("Regenerate", regenerate),
    );
    const parts = [this.text, this.tokens, this.note, this.figures, this.buttons];
    this.element = make("article", { class: "turn" }, make("h3", {}, "Model"), ...parts);
    this.show();
    if (turn.end !== null) this.close();
  }

  /** Show the tokens of a run behind the text so far, of which the tokens may be unknown. */
  open(run) {
    if (!this.tokens.hasChildNodes()) this.tokens.append(this.turn.content);
    this.tokens.append(new Tokens(run).element);
    this.element.classList.add("has-tokens");
    this.buttons.hidden = this.note.hidden = true;
  }

  show() {
    showMarkdown(this.text, this.turn.content);
  }

  /** The answer has ended: say so if it was cut. */
  close() {
    this.show();
    const note = CUT[this.turn.end] ?? "";
    [this.note.textContent, this.note.hidden, this.onward.hidden] = [note, !note, !note];
    this.buttons.hidden = false;
  }
}

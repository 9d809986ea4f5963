// Markdown as elements. Text comes in as text nodes alone, so that nothing in it is parsed as HTML.

import { make } from "./view.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +/;
const COLUMNS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
// Bounded, so that no text takes long.
const INLINE =
  /(`{1,3})([^\n]{1,1000}?)\1|\*\*(?=\S)([^\n]{1,1000}?)\*\*|\*(?=[^\s*])([^\n*]{1,1000})\*|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s()]{1,1000})\)/g;
const DEEPEST = 6; // lists and quotes inside each other

/** Show Markdown in an element. Blocks that are there already stay, with what is selected in them. */
export function showMarkdown(element, text) {
  const blocks = blocksOf(text.split("\n"), 0);
  let same = 0;
  while (same < blocks.length && element.children[same]?.isEqualNode(blocks[same])) same++;
  while (element.children.length > same) element.lastElementChild.remove();
  element.append(...blocks.slice(same));
}

/** Return a button that copies a text. */
export function copyButton(textOf) {
  const copy = async ({ currentTarget: button }) => {
    const isCopied = await written(textOf());
    button.textContent = isCopied ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return make("button", { type: "button", class: "copy", click: copy }, "Copy");
}

async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers offer no clipboard to pages of plain HTTP from another machine.
    const area = make("textarea", { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}

function blocksOf(lines, depth) {
  const blocks = [];
  const take = (test) => {
    const end = lines.findIndex((line, index) => !test(line, index));
    return lines.splice(0, end < 0 ? lines.length : end);
  };
  while (lines.length) {
    const [line] = lines;
    const [fence, heading, item] = [FENCE, HEADING, ITEM].map((pattern) => line.match(pattern));
    if (!line.trim()) {
      lines.shift();
    } else if (fence) {
      lines.shift();
      const code = take((other) => other.trim() !== fence[1]);
      lines.shift();
      blocks.push(codeOf(code.join("\n"), fence[2].trim()));
    } else if (heading) {
      blocks.push(make(`h${Math.min(6, 3 + heading[1].length)}`, {}, ...inline(heading[2])));
      lines.shift();
    } else if (RULE.test(line)) {
      blocks.push(make("hr"));
      lines.shift();
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const quoted = take((other) => QUOTE.test(other)).map((other) => other.replace(QUOTE, ""));
      blocks.push(make("blockquote", {}, ...blocksOf(quoted, depth + 1)));
    } else if (item && depth < DEEPEST) {
      blocks.push(listOf(take, item, depth));
    } else if (line.includes("|") && COLUMNS.test(lines[1] ?? "") && lines[1].includes("|")) {
      blocks.push(tableOf(take((other) => other.includes("|"))));
    } else {
      const text = take((other, index) => index === 0 || (other.trim() && !startsBlock(other)));
      blocks.push(make("p", {}, ...inline(text.join("\n"))));
    }
  }
  return blocks;
}

function startsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function codeOf(code, language) {
  const head = make("div", { class: "code-head" }, language || "code", copyButton(() => code));
  return make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, make("code", {}, code)));
}

/** Take the items of a list: an item goes on in lines that are indented, or that follow its text. */
function listOf(take, [, { length: indent }, marker], depth) {
  const isNumbered = marker.length > 1;
  const items = [];
  const isIndented = (line) => line.search(/\S/) > indent;
  take((line) => {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent) {
      if (item[1].length < indent || item[2].length > 1 !== isNumbered) return false;
      items.push([line.slice(item[0].length)]);
    } else if (!line.trim() || isIndented(line) || (items.at(-1).at(-1).trim() && !startsBlock(line))) {
      items.at(-1).push(line.replace(new RegExp(`^ {0,${indent + marker.length + 1}}`), ""));
    } else return false;
    return true;
  });
  const start = isNumbered && parseInt(marker) !== 1 ? parseInt(marker) : null;
  const children = items.map((lines) => make("li", {}, ...blocksOf(lines, depth + 1)));
  return make(isNumbered ? "ol" : "ul", { start }, ...children);
}

function tableOf(lines) {
  const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const rowOf = (tag) => (line) =>
    make("tr", {}, ...cellsOf(line).map((cell) => make(tag, {}, ...inline(cell.trim()))));
  const [head, , ...rows] = lines;
  return make("table", {}, make("thead", {}, rowOf("th")(head)), make("tbody", {}, ...rows.map(rowOf("td"))));
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const { index, 0: whole, 2: code, 3: bold, 4: italic, 5: label, 6: href } of text.matchAll(INLINE)) {
    parts.push(text.slice(end, index));
    end = index + whole.length;
    if (code) parts.push(make("code", {}, code));
    else if (bold) parts.push(make("strong", {}, ...inline(bold)));
    else if (italic) parts.push(make("em", {}, italic));
    else parts.push(make("a", { href, rel: "noreferrer", target: "_blank" }, label));
  }
  return [...parts, text.slice(end)].filter((part) => part !== "");
}

// Markdown to elements. Text becomes text nodes and never markup, so that an answer cannot add elements or attributes
// of its own; links go to http, https and mailto alone, and pictures are links, since the page loads nothing.

const DEEPEST = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|$)/;
const LINK = /\[((?:[^[\]\\]|\\.)*)\]\( *<?([^\s<>()]*(?:\([^\s()]*\)[^\s()]*)*)>?(?: +(?:"[^"]*"|'[^']*'))? *\)/y;
const BARE = /https?:\/\/[^\s<>"`]+/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const isDivider = (line) => line.includes("-") && line.includes("|") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
const isBlank = (line) => !/\S/.test(line);
const beginsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);

// The kind of the block that begins at a line, and the line after its last.
const blockAt = (lines, at) => {
  const line = lines[at];
  const fence = FENCE.exec(line);
  let end = at + 1;
  if (fence) {
    const close = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},} *$`);
    while (end < lines.length && !close.test(lines[end])) end += 1;
    return { kind: "fence", end: Math.min(end + 1, lines.length), closed: end < lines.length };
  }
  if (HEADING.test(line)) return { kind: "heading", end };
  if (RULE.test(line)) return { kind: "rule", end };
  if (QUOTE.test(line)) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return { kind: "quote", end };
  }
  if (ITEM.test(line)) return { kind: "list", end: endOfList(lines, at) };
  if (line.includes("|") && end < lines.length && isDivider(lines[end])) {
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return { kind: "table", end };
  }
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines[end]) && !ITEM.test(lines[end])) end += 1;
  return { kind: "text", end };
};

const endOfList = (lines, first) => {
  let end = first + 1, last = first;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (isBlank(line)) continue;
    const inside = /^ {2,}/.test(line) || ITEM.test(line);
    const goesOn = last === end - 1 && !beginsBlock(line);
    if ((!inside && !goesOn) || (RULE.test(line) && !/^ {2,}/.test(line))) break;
    last = end;
  }
  return last + 1;
};

// The top-level blocks of a text: {kind, lines}.
const blocksOf = (text) => {
  const lines = text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) { at += 1; continue; }
    const block = blockAt(lines, at);
    found.push({ ...block, lines: lines.slice(at, block.end) });
    at = block.end;
  }
  return found;
};

const codeBlock = (block) => {
  const box = make("div", undefined, "code"), bar = make("div", undefined, "bar"), pre = make("pre");
  const name = FENCE.exec(block.lines[0])[2].trim().split(/\s/)[0];
  const code = make("code", block.lines.slice(1, block.closed ? -1 : undefined).join("\n"));
  const pressed = button("Copy", () => copy(code.textContent, pressed));
  bar.append(make("span", name || "code"), pressed);
  pre.tabIndex = 0;
  pre.append(code);
  box.append(bar, pre);
  return box;
};

const listBlock = (block, depth, open) => {
  const first = ITEM.exec(block.lines[0]), ordered = /\d/.test(first[2]);
  const list = make(ordered ? "ol" : "ul");
  if (ordered && Number.parseInt(first[2], 10) !== 1) list.start = Number.parseInt(first[2], 10);
  const items = [];
  let indent = 0;
  for (const line of block.lines) {
    const found = ITEM.exec(line);
    if (found && (!items.length || found[1].length < indent)) {
      indent = found[0].length;
      items.push([line.slice(indent)]);
    } else {
      const leading = /^ */.exec(line)[0].length;
      items.at(-1).push(line.slice(Math.min(leading, indent)));
    }
  }
  items.forEach((lines, i) => list.append(listItem(lines.join("\n"), depth, open && i === items.length - 1)));
  return list;
};

const listItem = (text, depth, open) => {
  const item = make("li"), task = /^\[([ xX])\] /.exec(text);
  if (task) {
    item.className = "task";
    item.append(task[1] === " " ? "☐ " : "☑ ");
    text = text.slice(4);
  }
  const blocks = blocksOf(text);
  if (blocks[0]?.kind === "text") inline(item, blocks.shift().lines.join("\n"), 0, open && !blocks.length);
  append(item, blocks, depth + 1, open);
  return item;
};

const tableBlock = (block) => {
  const table = make("table"), head = make("thead"), body = make("tbody");
  const sides = cells(block.lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (line, tag) => {
    const one = make("tr"), texts = cells(line);
    sides.forEach((side, i) => {
      const cell = make(tag);
      if (side) cell.style.textAlign = side;
      inline(cell, texts[i] || "", 0, false);
      one.append(cell);
    });
    return one;
  };
  head.append(row(block.lines[0], "th"));
  body.append(...block.lines.slice(2).map((line) => row(line, "td")));
  table.append(head, body);
  const box = make("div", undefined, "cells");
  box.append(table);
  return box;
};

const blockElement = (block, depth, open) => {
  if (depth > DEEPEST) return make("p", block.lines.join("\n"));
  if (block.kind === "fence") return codeBlock(block);
  if (block.kind === "rule") return make("hr");
  if (block.kind === "list") return listBlock(block, depth, open);
  if (block.kind === "table") return tableBlock(block);
  if (block.kind === "quote") {
    const quote = make("blockquote");
    append(quote, blocksOf(block.lines.map((line) => line.replace(QUOTE, "")).join("\n")), depth + 1, open);
    return quote;
  }
  const heading = block.kind === "heading" ? HEADING.exec(block.lines[0]) : null;
  const element = make(heading ? `h${heading[1].length}` : "p");
  inline(element, heading ? (heading[2] || "").trim() : block.lines.join("\n"), 0, open);
  return element;
};

const append = (parent, blocks, depth, open) => {
  blocks.forEach((block, i) => parent.append(blockElement(block, depth, open && i === blocks.length - 1)));
};

// Shows a text that grows: blocks that have not changed keep their elements. While it is open, a mark that has not been
// closed yet counts as closed at the end of the text.
class Markdown {
  constructor(target) {
    this.target = target;
    this.shown = [];
  }

  update(text, open = false) {
    const blocks = blocksOf(text), last = blocks.length - 1;
    const ids = blocks.map((block, i) => `${open && i === last}${block.kind}${block.lines.join("\n")}`);
    let same = 0;
    while (same < ids.length && ids[same] === this.shown[same]) same += 1;
    while (this.target.children.length > same) this.target.lastChild.remove();
    for (let i = same; i <= last; i += 1) this.target.append(blockElement(blocks[i], 0, open && i === last));
    this.shown = ids;
  }
}

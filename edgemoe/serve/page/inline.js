// The marks inside a paragraph.

const isWord = (letter) => letter !== undefined && /[\p{L}\p{N}_]/u.test(letter);
const isSpace = (letter) => letter === undefined || /\s/.test(letter);
const isSafe = (address) => /^(?:https?:\/\/|mailto:)[^\s]+$/i.test(address);

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

// Where a mark that opens at `at` closes; -1: nowhere. Marks that were missed once are not searched for again.
const closing = (text, mark, at, missing) => {
  if (missing.has(mark)) return -1;
  for (let end = text.indexOf(mark, at + mark.length + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const after = text[end + mark.length];
    if (isSpace(text[end - 1]) || text[end - 1] === "\\") continue;
    if (mark.length === 1 && after === mark) { end += 1; continue; }
    if (mark === "**" && after === "*") end += 1;
    if (mark[0] === "_" && isWord(text[end + mark.length])) continue;
    return end;
  }
  missing.add(mark);
  return -1;
};

const codeSpan = (text, at, missing) => {
  const ticks = /`+/y;
  ticks.lastIndex = at;
  const mark = ticks.exec(text)[0];
  if (missing.has(mark)) return { mark, end: -1 };
  const runs = /`+/g;
  runs.lastIndex = at + mark.length;
  for (let run = runs.exec(text); run; run = runs.exec(text)) if (run[0] === mark) return { mark, end: run.index };
  missing.add(mark);
  return { mark, end: -1 };
};

const linkElement = (address, fill) => {
  if (!isSafe(address)) {
    const text = make("span");
    fill(text);
    return text;
  }
  const link = make("a");
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  fill(link);
  return link;
};

const matched = (pattern, text, at) => {
  pattern.lastIndex = at;
  return pattern.exec(text);
};

// What stands at a place: {node, end}, or null where it is text.
const markAt = (text, at, depth, open, missing) => {
  const letter = text[at];
  if (letter === "\\") {
    const found = matched(ESCAPED, text, at);
    return found && { node: document.createTextNode(found[1]), end: at + 2 };
  }
  if (letter === "\n") return { node: make("br"), end: at + 1 };
  if (letter === "`") return codeAt(text, at, open, missing);
  if (letter === "[" || (letter === "!" && text[at + 1] === "[")) return linkAt(text, at, depth, open);
  if (letter === "h" && !isWord(text[at - 1])) {
    const found = matched(BARE, text, at);
    if (!found) return null;
    const address = found[0].replace(/[.,;:!?)\]}'*_~]+$/, "");
    return { node: linkElement(address, (link) => link.append(address)), end: at + address.length };
  }
  return emphasisAt(text, at, depth, open, missing);
};

const codeAt = (text, at, open, missing) => {
  const { mark, end } = codeSpan(text, at, missing);
  if (end < 0 && !open) return { node: document.createTextNode(mark), end: at + mark.length };
  const stop = end < 0 ? text.length : end;
  const inside = text.slice(at + mark.length, stop).replaceAll("\n", " ");
  const trimmed = /^ .*[^ ].* $/.test(inside) ? inside.slice(1, -1) : inside;
  return { node: make("code", trimmed), end: end < 0 ? text.length : end + mark.length };
};

const linkAt = (text, at, depth, open) => {
  const picture = text[at] === "!", from = at + (picture ? 1 : 0);
  const found = matched(LINK, text, from);
  if (found) {
    const fill = (link) => (picture ? link.append(`picture: ${found[1]}`) : inline(link, found[1], depth + 1, false, true));
    return { node: linkElement(found[2], fill), end: from + found[0].length };
  }
  const begun = open && /^\[([^[\]\n]*)\]\([^\s)]*$/.exec(text.slice(from, from + 2000));
  return begun ? { node: document.createTextNode(begun[1]), end: text.length } : null;
};

const emphasisAt = (text, at, depth, open, missing) => {
  const [mark, tag] = MARKS.find(([each]) => text.startsWith(each, at)) || [];
  if (!mark || isSpace(text[at + mark.length]) || (mark[0] === "_" && isWord(text[at - 1]))) return null;
  let end = closing(text, mark, at, missing);
  if (end < 0 && !(open && mark === "**")) return { node: document.createTextNode(mark), end: at + mark.length };
  const stop = end < 0 ? text.length : end;
  end = end < 0 ? text.length : end + mark.length;
  const element = make(tag);
  inline(element, text.slice(at + mark.length, stop), depth + 1, open && end === text.length);
  return { node: element, end };
};

// Appends a text with its marks to an element. Inside a link there is no other link.
const inline = (parent, text, depth, open, inLink = false) => {
  if (depth > DEEPEST) {
    parent.append(text);
    return;
  }
  const missing = new Set(), interesting = inLink ? /[\\\n`*_~]/g : /[\\\n`*_~[!h]/g;
  let begun = 0;
  for (let at = next(interesting, text, 0); at >= 0; at = next(interesting, text, at)) {
    const found = markAt(text, at, depth, open, missing);
    if (!found) { at += 1; continue; }
    parent.append(text.slice(begun, at), found.node);
    begun = at = found.end;
  }
  parent.append(text.slice(begun));
};

const next = (pattern, text, from) => {
  pattern.lastIndex = from;
  const found = pattern.exec(text);
  return found ? found.index : -1;
};

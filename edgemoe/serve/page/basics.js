const $ = (id) => document.getElementById(id);

const make = (tag, text, name) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
};

const button = (text, onClick, name = "quiet") => {
  const one = make("button", text, name);
  one.type = "button";
  one.addEventListener("click", onClick);
  return one;
};

const pairs = (target, entries) => {
  target.replaceChildren(...entries.flatMap(([name, text]) => {
    const value = make("dd");
    value.append(text);
    return [make("dt", name), value];
  }));
};

const size = (bytes) => {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  while (bytes >= 1000 && at < 4) { bytes /= 1000; at += 1; }
  return `${bytes >= 100 || at === 0 ? bytes.toFixed(0) : bytes.toPrecision(3)} ${units[at]}`;
};

const percent = (part) => `${(100 * part).toFixed(part > 0.9995 || part === 0 ? 0 : 1)} %`;

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Text for the status line; an unchanged text is not announced again.
const say = (text) => { if ($("state").textContent !== text) $("state").textContent = text; };

const fail = (text) => {
  $("error").textContent = text;
  $("error").hidden = !text;
};

class Refused extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.code = error.code;
  }
}

const headers = () => {
  const key = $("key").value;
  return key ? { "Authorization": `Bearer ${key}` } : {};
};

// Requests of this server alone: paths are relative. Without a body it is a GET; a refusal is an exception.
const request = async (path, body, signal) => {
  const options = { headers: headers(), signal };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (response.ok) return response;
  if (response.status === 401) $("key-box").hidden = false;
  const error = await response.json().then((found) => found.error, () => ({}));
  throw new Refused(response.status, error || {});
};

const get = async (path) => (await request(path)).json();

// Browsers have a clipboard on https and on this machine alone; elsewhere a selected text is copied.
const copy = async (text, pressed) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = make("textarea", text);
    pressed.after(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  const before = pressed.textContent;
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = before; }, 1500);
};

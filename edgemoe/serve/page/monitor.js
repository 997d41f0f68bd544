// The monitor: the server's state once a second, and what it was since the page was opened.

const TIERS = { vram: "VRAM (fastest tier)", dram: "DRAM (second tier)" };
const STATES = { waiting: "waits", prompt: "prompt runs", decoding: "answers", ended: "ends" };
const PARTS = { driver: "driver", dense: "dense weights", workspace: "workspace", compensators: "compensators", experts: "experts", kv: "KV", kept: "kept KV" };
const LEVEL_COLOURS = { 8: 0, 4: 1, 2: 2 };
const samples = [];
const PICTURE_SECONDS = 3;
let before = null;
let pictured = -PICTURE_SECONDS;

const isShown = (view) => !$(view).hidden && !document.hidden;

// Differences of counters to the state before, per second, of one model; if it was loaded again it begins at 0.
const ratesOf = (status, seconds) => {
  const since = (name) => (before && seconds ? Math.max(status[name] - before[name], 0) : null);
  const per = (name) => (since(name) === null ? null : since(name) / seconds);
  const requests = since("expert_requests");
  return {
    tokens: per("new_tokens"), ssd: per("ssd_bytes"), dram: per("dram_bytes"),
    hits: requests ? { vram: since("vram_hits") / requests, dram: since("dram_hits") / requests } : null,
  };
};

const record = (status) => {
  if (before && before.model !== status.model) {
    before = null;
    samples.length = 0;
  }
  const now = performance.now() / 1000, seconds = before ? now - before.now : 0;
  if (before && seconds < 0.5) return samples.at(-1); // too short a time for rates
  const sample = { t: now, ...ratesOf(status, seconds), memory: status.memory, resident: status.resident, running: status.running, waiting: status.waiting };
  before = { ...status, now };
  samples.push(sample);
  if (samples.length > MOST_SAMPLES) samples.shift();
  return sample;
};

const showNow = (status, sample) => {
  const found = status.vram_hits + status.dram_hits;
  $("speed").textContent = sample.tokens === null ? "–" : `${sample.tokens.toFixed(1)}/s`;
  $("disk").textContent = sample.ssd === null ? "–" : `${size(sample.ssd)}/s`;
  $("dram").parentElement.hidden = !("dram" in status.resident);
  $("dram").textContent = sample.dram === null ? "–" : `${size(sample.dram)}/s`;
  $("hits").textContent = status.expert_requests ? percent(found / status.expert_requests) : "–";
  $("load").textContent = `${status.running}, ${status.waiting}`;
};

const showMemory = (status) => {
  $("memory-text").textContent =
    `Limit ${size(status.limit_bytes)}, at most ${size(status.peak_bytes)} taken so far; ` +
    `${status.parallel} × ${status.context} tokens of context`;
  const series = Object.keys(status.memory).filter((name) => samples.some((one) => one.memory[name]))
    .map((name, colour) => ({ name: PARTS[name] || name, colour, of: (one) => one.memory[name] }));
  bar($("memory-bar"), series.map(({ colour, of }) => ({ colour, value: of(status) })), status.limit_bytes);
  chart($("memory-chart"), samples, series, { format: size, limit: status.limit_bytes, stacked: true });
};

const sum = (levels) => Object.values(levels || {}).reduce((a, b) => a + b, 0);

const showTiers = (status) => {
  $("tiers").replaceChildren(...Object.entries(status.resident).map(([tier, levels]) => {
    const box = make("div"), line = make("div", undefined, "bar-line"), legend = make("ul", undefined, "legend");
    line.setAttribute("aria-hidden", "true");
    box.append(make("div", `${TIERS[tier] || tier}: ${sum(levels)} of ${status.experts} experts`, "soft"), line, legend);
    const parts = Object.entries(levels).sort((a, b) => b[0] - a[0])
      .map(([level, value]) => ({ colour: LEVEL_COLOURS[level], value, text: `${level} bits: ${value}` }));
    bar(line, parts, status.experts);
    drawLegend(legend, parts);
    return box;
  }));
  const levels = (tier) => [...new Set(samples.flatMap((one) => Object.keys(one.resident[tier] || {})))].sort((a, b) => b - a);
  const series = Object.keys(status.resident).flatMap((tier, i) => levels(tier).map((level) => ({
    name: `${tier.toUpperCase()}, ${level} bits`, colour: LEVEL_COLOURS[level] + 3 * i, of: (one) => one.resident[tier]?.[level] ?? 0,
  })));
  const alone = Object.keys(status.resident).length === 1;
  chart($("tiers-chart"), samples, series, { format: (n) => n.toFixed(0), most: status.experts, stacked: alone, legend: !alone });
};

const showRequests = (requests) => {
  $("none").hidden = requests.length > 0;
  $("requests").hidden = requests.length === 0;
  $("rows").replaceChildren(...requests.map((one) => {
    const row = make("tr"), prompt = make("td"), done = make("progress");
    done.max = one.prompt_tokens || 1;
    done.value = one.done_tokens;
    done.setAttribute("aria-label", "tokens of the prompt done");
    prompt.append(done, ` ${one.done_tokens} of ${one.prompt_tokens}`);
    row.append(make("td", one.kind), make("td", STATES[one.state] || one.state), prompt,
      make("td", `${one.new_tokens}`), make("td", `${one.seconds.toFixed(0)} s`));
    return row;
  }));
};

// One line for each tier that the server has.
const byTier = (status, names) => Object.entries(names).filter(([tier]) => tier === "ssd" || tier in status.resident)
  .map(([tier, name], colour) => ({ tier, name, colour }));

const showCharts = (status) => {
  const bytes = (value) => `${size(value)}/s`, rate = (value) => `${value.toFixed(1)}/s`, count = (value) => value.toFixed(0);
  chart($("bytes-chart"), samples, byTier(status, { ssd: "from disk", dram: "from DRAM" }).map((one) => ({ ...one, of: (sample) => sample[one.tier] })), { format: bytes });
  chart($("hits-chart"), samples, byTier(status, { vram: "VRAM", dram: "DRAM" }).map((one) => ({ ...one, of: (sample) => sample.hits?.[one.tier] })), { format: percent, most: 1 });
  chart($("tokens-chart"), samples, [{ name: "new tokens", colour: 0, of: (one) => one.tokens }], { format: rate });
  chart($("queue-chart"), samples, [{ name: "running", colour: 0, of: (one) => one.running }, { name: "waiting", colour: 1, of: (one) => one.waiting }], { format: count, most: 4 });
};

const showStatus = (status) => {
  $("model-name").textContent = status.model;
  document.title = `edgemoe · ${status.model}`;
  say(status.state);
  if (status.state !== "ready") return;
  if (before?.model !== status.model) readModels().catch(() => {}); // what a model takes is known once it is loaded
  const sample = record(status);
  if (running) $("live").textContent = sample.tokens ? `${sample.tokens.toFixed(1)} tokens/s` : "";
  if (!isShown("monitor")) return;
  showNow(status, sample);
  showRequests(status.requests);
  showMemory(status);
  showTiers(status);
  showCharts(status);
};

const wantsPicture = (status) => {
  const now = performance.now() / 1000;
  if (!isShown("monitor") || status.state !== "ready" || now - pictured < PICTURE_SECONDS) return false;
  pictured = now;
  return true;
};

const look = async () => {
  let status, found;
  try {
    status = await get("status");
    found = wantsPicture(status) ? await get("monitor") : null;
  } catch (error) {
    say(error.status === 401 ? "needs the key" : error.status === 503 ? "loading" : error.status ? `error ${error.status}` : "no connection");
    return;
  }
  $("key-box").hidden = true;
  showStatus(status);
  if (found) showPictures(found);
};

const poll = async () => {
  try {
    await look();
  } finally {
    setTimeout(poll, document.hidden ? 5000 : 1000);
  }
};

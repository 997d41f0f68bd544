// How a message is shown.

const views = new Map();
let due = new Set();

// A message that grows is drawn at most once per frame.
const redraw = (message) => {
  if (!due.size) requestAnimationFrame(drawDue);
  due.add(message);
};

const drawDue = () => {
  const now = due;
  due = new Set();
  const log = $("log"), atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 60;
  for (const message of now) views.get(message)?.draw();
  if (atEnd) log.scrollTop = log.scrollHeight;
};

const costText = (message) => {
  const { timings, counts } = message;
  if (message.progress) return `prompt: ${message.progress.processed} of ${message.progress.total} tokens`;
  if (!timings) return message.end || "";
  const speed = timings.predicted_per_second ? ` at ${timings.predicted_per_second.toFixed(1)} tokens/s` : "";
  const parts = [`${plural(timings.predicted_n, "token")}${speed}, first after ${(timings.prompt_ms / 1000).toFixed(2)} s`];
  const hits = counts?.hit_rate;
  if (hits?.vram != null) {
    const read = counts.ssd_bytes_per_token;
    parts.push(`experts: ${percent(hits.vram + (hits.dram || 0))} from memory${read ? `, ${size(read)} per token from disk` : ""}`);
  }
  if (counts?.bits != null) parts.push(`${counts.bits.toFixed(1)} bits per weight`);
  if (counts) parts.push(`memory ${size(counts.peak_vram_bytes)} of ${size(counts.limit_bytes)}`);
  if (counts?.finish_reason === "context") parts.push("cut: the context is full");
  if (counts?.finish_reason === "length") parts.push("cut: as many tokens as the settings allow");
  return parts.join(" · ");
};

// Every count of an answer, by its name.
const costRows = ({ timings, counts, model }) => {
  const levels = Object.entries(counts.levels).filter(([, n]) => n).map(([level, n]) => `${n} at ${level} bits`);
  const rows = [
    ["prompt", `${counts.prompt_tokens} tokens, of which ${counts.cached_tokens} were in memory from earlier turns`],
    ["waited", `${counts.queue_s.toFixed(2)} s in the queue`],
    ["read from disk", size(counts.bytes_read.ssd)],
    ["experts computed", levels.join(", ") || "none"],
    ["time", `${(timings.prompt_ms / 1000).toFixed(2)} s for the prompt, ${(timings.predicted_ms / 1000).toFixed(2)} s for the answer`],
  ];
  if (counts.reasoning_tokens != null) rows.push(["thinking", `${counts.reasoning_tokens} of ${timings.predicted_n} tokens`]);
  if (counts.bytes_read.dram) rows.splice(3, 0, ["read from DRAM", size(counts.bytes_read.dram)]);
  if (counts.hit_rate.dram) rows.push(["hits", `${percent(counts.hit_rate.vram || 0)} in VRAM, ${percent(counts.hit_rate.dram)} in DRAM`]);
  if (counts.predicted_kl != null) rows.push(["expected loss by fewer bits", `${counts.predicted_kl.toPrecision(2)} nats per token`]);
  if (counts.drafts) rows.push(["guessed tokens", `${counts.drafts.accepted} of ${counts.drafts.drafted} were right`]);
  return model ? [["model", model], ...rows] : rows;
};

const drawCost = (target, message) => {
  const text = costText(message);
  if (!message.timings || !message.counts) {
    target.textContent = text;
    return;
  }
  const details = make("details"), list = make("dl");
  details.append(make("summary", text), list);
  pairs(list, costRows(message));
  target.replaceChildren(details);
};

const answerView = (message, box) => {
  const thought = make("details", undefined, "thought"), summary = make("summary"), reasoning = make("div");
  const body = make("div", undefined, "body"), cost = make("div", undefined, "cost"), markdown = new Markdown(body);
  thought.append(summary, reasoning);
  box.append(thought, body, cost);
  return () => {
    const open = running?.message === message;
    thought.hidden = !message.reasoning;
    if (message.reasoning) {
      reasoning.textContent = message.reasoning;
      summary.textContent = open && !message.content ? "Thinking" : `Thought for ${(message.thought || 0).toFixed(1)} s`;
    }
    markdown.update(message.content, open);
    drawCost(cost, message);
  };
};

const questionElements = (conversation, { content, files = [] }) => {
  const row = make("div", undefined, "pictures"), body = make("div", content, "body");
  row.append(...files.map((file, i) => pictureElement(conversation, file, `Picture ${i + 1} of ${files.length}`)));
  return files.length ? (content ? [row, body] : [row]) : [body];
};

const messageElement = (conversation, message, index) => {
  const box = make("article", undefined, `message ${message.role}`);
  const gone = index < conversation.left;
  box.append(make("h2", `${message.role === "user" ? "You" : "Model"}${gone ? " (has left the context)" : ""}`, "who"));
  box.classList.toggle("gone", gone);
  let draw = () => {};
  if (message.role === "user") box.append(...questionElements(conversation, message));
  else draw = answerView(message, box);
  const actions = make("div", undefined, "actions");
  const pressed = button("Copy", () => copy(message.content, pressed));
  actions.append(pressed);
  if (message.role === "user") actions.append(button("Edit", () => edit(index)));
  if (index === conversation.messages.length - 1) actions.append(button("Regenerate", regenerate));
  box.append(actions);
  const view = { box, draw: () => { draw(); actions.hidden = running?.message === message; } };
  views.set(message, view);
  view.draw();
  return message.note ? [make("p", message.note, "note"), box] : [box];
};

const EXAMPLES = [
  "What is the capital of France?",
  "Explain in three sentences what a mixture-of-experts model is.",
  "Write a Python function that returns the n-th Fibonacci number.",
  "Compare SSD, RAM and GPU memory in a table: size, speed, price.",
];

const startElement = () => {
  const box = make("div"), examples = make("div");
  box.id = "start";
  examples.id = "examples";
  examples.append(...EXAMPLES.map((text) => button(text, () => {
    $("prompt").value = text;
    $("composer").requestSubmit();
  }, "example")));
  box.append(make("h2", "What would you like to know?"), make("p", "Type a message, or begin with an example.", "soft"), examples);
  return box;
};

const showMessages = (conversation) => {
  views.clear();
  const { messages } = conversation;
  $("log").replaceChildren(...(messages.length
    ? messages.flatMap((message, i) => messageElement(conversation, message, i)) : [startElement()]));
  $("log").scrollTop = $("log").scrollHeight;
};

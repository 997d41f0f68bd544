// The model, its settings, and what other programs need to use the server.

const addresses = () => {
  const origin = location.origin, name = $("model").hidden ? $("model-name").textContent || "edgemoe" : $("model").value;
  const messages = JSON.stringify({ model: name, messages: [{ role: "user", content: "Hello" }] });
  return [
    ["OpenAI", `${origin}/v1`],
    ["Anthropic", `ANTHROPIC_BASE_URL=${origin} ANTHROPIC_API_KEY=none`],
    ["ollama", `OLLAMA_HOST=${origin}`],
    ["llama.cpp", origin],
    ["curl", `curl ${origin}/v1/chat/completions -d '${messages.replaceAll("'", "'\\''")}'`],
    ["Prometheus", `${origin}/metrics`],
  ].map(([client, text]) => {
    const line = make("span"), pressed = button("Copy", () => copy(text, pressed));
    pressed.setAttribute("aria-label", `Copy the address for ${client}`);
    line.append(make("code", text), pressed);
    return [client, line];
  });
};

const settingText = (value) => {
  if (value === null) return "none";
  if (Array.isArray(value)) return value.join("/");
  if (typeof value === "object") return Object.entries(value).map(([name, each]) => `${name} ${settingText(each)}`).join(", ");
  return value === true ? "yes" : value === false ? "no" : String(value);
};

const showAbout = async () => {
  pairs($("clients"), addresses());
  try {
    const found = await get("about");
    const { models = [] } = await get("status");
    const others = models.length > 1 ? [["models", models.map((one) => `${one.model} (${one.state})`).join(", ")]] : [];
    pairs($("facts"), [
      ["model", found.model], ...others, ["family", found.family], ["layers", `${found.layers}`],
      ["experts", `${found.experts_per_layer} per layer, ${found.experts_per_token} for each token`],
      ["vocabulary", `${found.vocabulary} tokens`], ["context", `${found.context} tokens`],
      ["answers at once", `${found.parallel}`], ["device", found.device], ["edgemoe", found.version],
    ]);
    pairs($("plan"), found.plan.map(([name, text]) => [name.trim(), text]));
    pairs($("run"), Object.entries(found.settings).map(([name, value]) => [name.replaceAll("_", " "), settingText(value)]));
  } catch (error) {
    pairs($("facts"), [["model", error.message]]);
  }
};

// Settings of the chat and of the page, kept in the browser.

const SETTINGS = "edgemoe:settings";
const KEY = "edgemoe:key";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "thinking_budget", "seed"];
const FIELDS = [...NUMBERS, "system", "thinking", "theme"];

const readSettings = () => {
  const found = stored(() => JSON.parse(localStorage.getItem(SETTINGS)), {});
  for (const name of FIELDS) $(`set-${name}`).value = typeof found[name] === "string" ? found[name] : "";
  $("key").value = stored(() => sessionStorage.getItem(KEY), "");
  useTheme();
};

const setting = (name) => $(`set-${name}`).value.trim();

const saveSettings = () => {
  keep(SETTINGS, Object.fromEntries(FIELDS.map((name) => [name, $(`set-${name}`).value])));
  useTheme();
};

const useTheme = () => {
  const theme = setting("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
};

// The fields of a request that are not left to the model.
const sampling = () => {
  const numbers = NUMBERS.filter((name) => setting(name) && $(`set-${name}`).validity.valid);
  return Object.fromEntries(numbers.map((name) => [name, Number(setting(name))]));
};

const thinking = () => {
  const choice = setting("thinking");
  if (!choice) return {};
  return choice === "off" ? { chat_template_kwargs: { enable_thinking: false } } : { reasoning_effort: choice };
};

const systemMessages = () => (setting("system") ? [{ role: "system", content: setting("system") }] : []);

// A server of several models has a choice of them.
const modelChoice = () => ($("model").hidden || !$("model").value ? {} : { model: $("model").value });

// Names of models of which the server knows whether they take pictures, and of the ones that do.
let known = [], seeing = [];

const takesPictures = () => seeing.includes($("model").value);

const readModels = async () => {
  const { data } = await get("v1/models"), names = data.map((model) => model.id);
  const select = $("model"), chosen = select.value;
  if (JSON.stringify(names) !== JSON.stringify([...select.options].map((option) => option.value))) {
    select.replaceChildren(...names.map((name) => make("option", name)));
    if (names.includes(chosen)) select.value = chosen;
  }
  select.hidden = names.length < 2;
  $("model-name").hidden = !select.hidden;
  known = data.filter((model) => model.architecture).map((model) => model.id);
  seeing = data.filter((model) => model.architecture?.input_modalities.includes("image")).map((model) => model.id);
  showAttach();
};

$("settings-open").addEventListener("click", () => $("settings").showModal());
$("settings-form").addEventListener("submit", (event) => {
  event.preventDefault();
  $("settings").close();
});
$("settings-form").addEventListener("input", saveSettings);
$("settings-reset").addEventListener("click", () => {
  for (const name of FIELDS) $(`set-${name}`).value = "";
  saveSettings();
});
$("key-form").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("input", () => {
  stored(() => sessionStorage.setItem(KEY, $("key").value), null);
  look();
});

// Views by the address's hash, and the beginning.

const VIEWS = ["chat", "monitor", "about"];

const showView = () => {
  const view = VIEWS.find((name) => location.hash === `#${name}`) || "chat";
  for (const name of VIEWS) $(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view === "about") showAbout();
  if (view === "monitor") look();
};

const readModelsLater = async () => {
  try {
    await readModels();
  } catch { // the status line says what is wrong
  }
  setTimeout(readModelsLater, document.hidden ? 60_000 : 10_000);
};

addEventListener("hashchange", showView);
$("skip").addEventListener("click", () => setTimeout(() => $("prompt").focus()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (pictures) drawPicture(); });
readConversations();
readSettings();
tidyPictures().catch(() => {});
showConversation(lastCurrent() || newConversation());
showView();
readModelsLater();
poll();

// Pictures that go with the next message: by the button, by paste, or by drop.

const MOST_ATTACHED = 5;

let attached = [];
let adding = Promise.resolve();

const setAttached = (files) => {
  attached = files;
  $("attached").replaceChildren(...files.map((file, i) => {
    const item = make("li"), remove = button("Remove", () => {
      setAttached(attached.filter((one) => one !== file));
      ($("attached").querySelectorAll("button")[i] || $("prompt")).focus();
    });
    remove.setAttribute("aria-label", `Remove picture ${i + 1}`);
    item.append(pictureElement(current, file, `Picture ${i + 1}`), remove);
    return item;
  }));
  $("attached").hidden = !files.length;
  $("attached-text").textContent = files.length ? `${plural(files.length, "picture")} will go with the message.` : "";
  $("prompt").required = !files.length;
};

const addFiles = async (files) => {
  if (!takesPictures()) {
    fail("This model takes no pictures.");
    return;
  }
  fail("");
  for (const file of files) {
    if (attached.length === MOST_ATTACHED) {
      fail(`A message has at most ${MOST_ATTACHED} pictures: the others are left out.`);
      return;
    }
    try {
      const one = await readPicture(file);
      setAttached([...attached, one]);
    } catch (error) {
      fail(error.message);
    }
  }
};

const attach = (files) => {
  const all = [...files];
  if (all.length) adding = adding.then(() => addFiles(all));
};

const showAttach = () => { $("attach").hidden = !takesPictures(); };

$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  attach($("files").files);
  $("files").value = "";
  $("prompt").focus();
});
$("prompt").addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || types.includes("text/plain")) return; // a word processor's text comes with a picture of it
  event.preventDefault();
  attach(files);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("talk").addEventListener(kind, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // a browser opens a file otherwise
    $("talk").classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") attach(event.dataTransfer.files);
  });
}
$("model").addEventListener("change", showAttach);

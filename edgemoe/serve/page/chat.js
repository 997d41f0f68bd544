// The chat: one answer at a time comes in, whichever conversation is shown.

let current = newConversation();
let running = null;
let editing = null;

const showConversation = (one) => {
  current = one;
  rememberCurrent(one);
  setEditing(null);
  fail("");
  showMessages(one);
  showList();
};

const showList = () => {
  $("list").replaceChildren(...newestFirst().map((one) => {
    const item = make("li"), open = button(one.title, () => {
      closeDrawer();
      showConversation(one);
      $("prompt").focus();
    }, "open");
    if (one.id === current.id) {
      item.dataset.current = "";
      open.setAttribute("aria-current", "true");
    }
    const remove = button("Delete", () => removeConversation(one));
    remove.setAttribute("aria-label", `Delete ${one.title}`);
    item.append(open, remove);
    return item;
  }));
};

const removeConversation = (one) => {
  if (running?.conversation === one) running.controller.abort();
  deleteConversation(one);
  if (one.id === current.id) showConversation(newestFirst()[0] || newConversation());
  else showList();
  $("new").focus();
};

const busy = (is) => {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("log").setAttribute("aria-busy", String(is));
  if (!is) $("live").textContent = "";
};

const setEditing = (index) => {
  editing = index;
  $("editing").hidden = index === null;
};

const edit = (index) => {
  setEditing(index);
  $("prompt").value = current.messages[index].content;
  setAttached(current.messages[index].files || []);
  $("prompt").focus();
};

const noteOf = (messages) => `The context is full: the oldest ${plural(messages, "message")} left it. The page keeps them.`;

const unseenNote = (count) => `This model takes no pictures: ${plural(count, "picture")} of the conversation ${count === 1 ? "is" : "are"} not in its prompt.`;

// Whether a model takes pictures is known once it is loaded, which a count of tokens waits for.
const learnInputs = async (conversation, signal) => {
  if (!filesOf(conversation.messages).length || known.includes($("model").value)) return;
  await counted([{ role: "user", content: "?" }], signal);
  await readModels();
};

// Counts what the context holds, then streams an answer to the last question.
const stream = async (conversation, message, signal) => {
  await loadPictures(conversation);
  await learnInputs(conversation, signal);
  const left = await leftOut(conversation, signal);
  const question = conversation.messages.at(-1), unseen = takesPictures() ? 0 : filesOf(conversation.messages.slice(left)).length;
  const notes = [...(left > conversation.left ? [noteOf(left - conversation.left)] : []), ...(unseen ? [unseenNote(unseen)] : [])];
  if (notes.length) question.note = notes.join(" ");
  conversation.left = left;
  conversation.messages.push(message);
  if (current === conversation) showMessages(conversation);
  let saved = performance.now();
  await answer(conversation, message, () => {
    redraw(message);
    if (performance.now() - saved > 2000) {
      saved = performance.now();
      saveConversation(conversation);
    }
  }, signal);
};

// Answers the last question. Without a word of an answer the conversation is as it was `before`, and the question goes
// back to the message box.
const respond = async (conversation, before, text, files = []) => {
  const message = { role: "assistant", content: "", model: modelChoice().model };
  const left = conversation.left;
  running = { controller: new AbortController(), conversation, message };
  fail("");
  busy(true);
  conversation.updated = Date.now();
  showMessages(conversation);
  saveConversation(conversation);
  savePictures(conversation);
  showList();
  let problem = "";
  try {
    await stream(conversation, message, running.controller.signal);
  } catch (error) {
    const stopped = error.name === "AbortError";
    problem = stopped ? "" : error.message;
    message.end = stopped ? "stopped" : "cut off by an error";
    if (!message.content && !message.reasoning) {
      Object.assign(conversation, { messages: before, left });
      if (!$("prompt").value && !attached.length && current === conversation) {
        $("prompt").value = text;
        setAttached(files);
      }
    }
  }
  message.progress = undefined;
  running = null;
  busy(false);
  if (conversations.has(conversation.id)) {
    saveConversation(conversation);
    savePictures(conversation);
  }
  if (current === conversation) showMessages(conversation);
  showList();
  if (problem) fail(problem);
  $("prompt").focus();
};

const send = async () => {
  await adding;
  const text = $("prompt").value.trim(), files = attached;
  if (!text && !files.length || running) return;
  const before = [...current.messages];
  if (editing !== null) {
    current.messages = current.messages.slice(0, editing);
    if (current.left >= current.messages.length) current.left = 0;
  }
  current.messages.push({ role: "user", content: text, ...(files.length && { files }) });
  setEditing(null);
  $("prompt").value = "";
  setAttached([]);
  await respond(current, before, text, files);
};

const regenerate = async () => {
  if (running) return;
  const before = [...current.messages];
  if (current.messages.at(-1)?.role === "assistant") current.messages = current.messages.slice(0, -1);
  await respond(current, before, "");
};

const startNew = () => {
  closeDrawer();
  showConversation(current.messages.length ? newConversation() : current);
  $("prompt").focus();
};

const closeDrawer = () => {
  $("side").classList.remove("open");
  $("drawer").setAttribute("aria-expanded", "false");
};

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("prompt").value && !running) {
    const last = current.messages.findLastIndex((message) => message.role === "user");
    if (last >= 0) {
      event.preventDefault();
      edit(last);
    }
  }
});
$("stop").addEventListener("click", () => running?.controller.abort());
$("new").addEventListener("click", startNew);
$("edit-cancel").addEventListener("click", () => {
  setEditing(null);
  $("prompt").value = "";
  setAttached([]);
  $("prompt").focus();
});
$("drawer").addEventListener("click", () => {
  const open = $("side").classList.toggle("open");
  $("drawer").setAttribute("aria-expanded", String(open));
  if (open) $("new").focus();
});
$("forget").addEventListener("click", () => {
  running?.controller.abort();
  for (const one of newestFirst()) deleteConversation(one);
  showConversation(newConversation());
  $("settings").close();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) {
    if (running) running.controller.abort();
    else if (editing !== null) $("edit-cancel").click();
    else if ($("side").classList.contains("open")) {
      closeDrawer();
      $("drawer").focus();
    }
  } else if (event.key.toLowerCase() === "n" && event.ctrlKey && event.altKey) {
    event.preventDefault();
    location.hash = "#chat";
    startNew();
  }
});
addEventListener("pagehide", () => { if (running && conversations.has(running.conversation.id)) saveConversation(running.conversation); });
// Another tab has changed a conversation.
addEventListener("storage", (event) => {
  const id = event.key?.startsWith(PREFIX) ? event.key.slice(PREFIX.length) : "";
  if (!id || id === running?.conversation.id) return;
  const one = event.newValue && readConversation(event.key);
  if (one) conversations.set(id, one);
  else conversations.delete(id);
  if (one && id === current.id) showConversation(one);
  else showList();
});

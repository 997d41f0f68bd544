// Conversations, kept in the browser: a key for each, so that several tabs do not overwrite each other's.
//
// A conversation is {id, title, updated, left, messages}; `left` is the number of messages that have left the model's
// context. A message is {role, content}, for a question `files` where it has pictures (pictures.js), and for an answer
// reasoning, timings, counts, and `end` where it was cut off.

const PREFIX = "edgemoe:chat:";
const CURRENT = "edgemoe:current";

const stored = (read, fallback) => {
  try {
    return read() ?? fallback;
  } catch { // a browser without storage, or a damaged entry
    return fallback;
  }
};

const keep = (key, value) => {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
};

const areFiles = (files) => Array.isArray(files) && files.every((file) => typeof file?.id === "string");

const isConversation = (one) => one && typeof one.id === "string" && Array.isArray(one.messages)
  && one.messages.every((message) => message && ["user", "assistant"].includes(message.role) && typeof message.content === "string"
    && (message.files === undefined || areFiles(message.files)));

const readConversation = (key) => {
  const one = stored(() => JSON.parse(localStorage.getItem(key)), null);
  if (!isConversation(one) || PREFIX + one.id !== key) return null;
  const last = one.messages.at(-1);
  if (last?.role === "assistant" && !last.timings && !last.end) {
    last.end = "cut off as the page was left";
    if (!last.content && !last.reasoning) one.messages.pop();
  }
  return one;
};

const conversations = new Map();

const readConversations = () => {
  const keys = stored(() => Object.keys(localStorage), []).filter((key) => key.startsWith(PREFIX));
  for (const one of keys.map(readConversation)) if (one) conversations.set(one.id, one);
};

const newConversation = () => ({
  id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`,
  title: "New conversation", updated: Date.now(), left: 0, messages: [],
});

const saveConversation = (one) => {
  if (!one.messages.length) {
    deleteConversation(one);
    return;
  }
  const question = one.messages.find((message) => message.role === "user");
  const title = (question?.content || "").replaceAll(/\s+/g, " ").slice(0, 60);
  one.title = title || (question?.files ? "A picture" : one.title);
  conversations.set(one.id, one);
  if (!keep(PREFIX + one.id, one)) {
    fail("This browser has no room for the conversation: delete others, or it is gone after a reload.");
  }
};

const deleteConversation = (one) => {
  conversations.delete(one.id);
  stored(() => localStorage.removeItem(PREFIX + one.id), null);
  forgetPictures(one);
};

const rememberCurrent = (one) => stored(() => sessionStorage.setItem(CURRENT, one.id), null);

const newestFirst = () => [...conversations.values()].sort((a, b) => b.updated - a.updated);

const lastCurrent = () => conversations.get(stored(() => sessionStorage.getItem(CURRENT), "")) || newestFirst()[0];

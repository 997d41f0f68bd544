// Pictures of messages: how their files are made smaller, and where the browser keeps them.
//
// A message has `files`, {id, bytes, width, height} for each picture. The files themselves are data URLs: in `urls` by
// their id, and in IndexedDB under [conversation, id, bytes], since localStorage is too small for them.

const DATABASE = "edgemoe";
const PICTURES = "pictures";
const MOST_PIXELS = 1 << 20; // the server reduces larger ones to so many
const MOST_FILE_BYTES = 1_000_000;
const MOST_KEPT_BYTES = 100_000_000;
const MOST_SENT = 64; // of a prompt, as the server has it
const SENT_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

const urls = new Map();

const readUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

const bytesOf = (url) => Math.ceil(0.75 * (url.length - url.indexOf(",") - 1));

const drawn = (bitmap, scale, types) => {
  const canvas = make("canvas"), context = canvas.getContext("2d");
  canvas.width = Math.max(1, Math.floor(bitmap.width * scale));
  canvas.height = Math.max(1, Math.floor(bitmap.height * scale));
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const url = types.map((type) => canvas.toDataURL(type, 0.9)).find((one) => bytesOf(one) <= MOST_FILE_BYTES);
  return url && { url, width: canvas.width, height: canvas.height };
};

// The file as it is where the server takes it, otherwise drawn anew with fewer pixels.
const reduced = async (file, bitmap) => {
  const { width, height } = bitmap, types = file.type === "image/png" ? ["image/png", "image/jpeg"] : ["image/jpeg"];
  let scale = Math.min(1, Math.sqrt(MOST_PIXELS / (width * height)));
  if (scale === 1 && file.size <= MOST_FILE_BYTES && SENT_TYPES.includes(file.type)) return { url: await readUrl(file), width, height };
  for (;; scale *= 0.7) {
    const made = drawn(bitmap, scale, types);
    if (made) return made;
  }
};

const readPicture = async (file) => {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name || "The file"} is no picture that this browser can read.`);
  });
  const { url, width, height } = await reduced(file, bitmap).finally(() => bitmap.close());
  const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
  urls.set(id, url);
  return { id, bytes: bytesOf(url), width, height };
};

const openDatabase = () => new Promise((resolve, reject) => {
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(PICTURES);
  opening.onsuccess = () => resolve(opening.result);
  opening.onerror = () => reject(opening.error);
});

// Runs a transaction; returns the result of the request that `work` returns, once everything is written.
const inStore = async (mode, work) => {
  const database = await openDatabase();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(PICTURES, mode);
      transaction.onabort = () => reject(transaction.error);
      const last = work(transaction.objectStore(PICTURES));
      transaction.oncomplete = () => resolve(last?.result);
    });
  } finally {
    database.close();
  }
};

const keptKeys = () => inStore("readonly", (store) => store.getAllKeys());

const deleteKeys = (keys) => inStore("readwrite", (store) => { for (const key of keys) store.delete(key); });

const filesOf = (messages) => messages.flatMap((message) => message.files || []);

const keyOf = (one, file) => [one.id, file.id, file.bytes];

const bytesOfKeys = (keys) => keys.reduce((total, [, , bytes]) => total + bytes, 0);

// Writes the pictures of a conversation that are not kept yet, and deletes the ones that it has no more.
const writePictures = async (one) => {
  const files = filesOf(one.messages), keys = await keptKeys();
  const mine = keys.filter(([id]) => id === one.id), kept = new Set(mine.map(([, id]) => id));
  const gone = mine.filter(([, id]) => !files.some((file) => file.id === id));
  if (gone.length) await deleteKeys(gone);
  const fresh = files.filter((file) => !kept.has(file.id) && urls.has(file.id)).map((file) => keyOf(one, file));
  if (!fresh.length) return;
  if (bytesOfKeys(keys) - bytesOfKeys(gone) + bytesOfKeys(fresh) > MOST_KEPT_BYTES) throw new Error("full");
  await inStore("readwrite", (store) => { for (const key of fresh) store.put(urls.get(key[1]), key); });
};

let writing = Promise.resolve();

// Changes the kept pictures once the change before has ended: each sees what the one before has written.
const inTurn = (change) => {
  const done = writing.then(change);
  writing = done.catch(() => {});
  return done;
};

const savePictures = (one) => inTurn(() => writePictures(one)).catch(() => {
  fail(`This browser has no room for the pictures (at most ${size(MOST_KEPT_BYTES)} are kept): delete conversations, or they are gone after a reload.`);
});

const forgetPictures = (one) => inTurn(() => inStore("readwrite", (store) => store.delete(IDBKeyRange.bound([one.id], [one.id, []])))).catch(() => {});

// Deletes the pictures of conversations that the browser no longer has.
const tidyPictures = async () => {
  const keys = await keptKeys();
  await deleteKeys(keys.filter(([id]) => localStorage.getItem(PREFIX + id) === null));
};

const loadPictures = async (one) => {
  const absent = filesOf(one.messages).filter((file) => !urls.has(file.id));
  if (!absent.length) return;
  await inStore("readonly", (store) => {
    for (const file of absent) {
      const reading = store.get(keyOf(one, file));
      reading.onsuccess = () => { if (reading.result) urls.set(file.id, reading.result); };
    }
  }).catch(() => {});
};

// A picture of a message; `name` is what a screen reader says of it.
const pictureElement = (one, file, name) => {
  const image = make("img"), show = () => {
    if (urls.has(file.id)) image.src = urls.get(file.id);
    else image.replaceWith(make("span", "A picture that this browser no longer has: the model does not see it.", "note"));
  };
  Object.assign(image, { alt: `${name}, ${file.width} × ${file.height}`, width: file.width, height: file.height });
  if (urls.has(file.id)) show();
  else loadPictures(one).then(show);
  return image;
};

// The content of a message as a request has it: text, or its pictures and its text.
const contentOf = ({ content, files = [] }) => {
  const parts = (takesPictures() ? files : []).filter((file) => urls.has(file.id))
    .map((file) => ({ type: "image_url", image_url: { url: urls.get(file.id) } }));
  if (!parts.length) return content;
  return content ? [...parts, { type: "text", text: content }] : parts;
};

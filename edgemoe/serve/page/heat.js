// A picture of the experts: a row per layer, a column per expert.

const LEVELS = { 8: "--c0", 4: "--c1", 2: "--c2", 0: "--free" };
let pictures = null;
let cell = { row: 0, column: 0 };

// A colour of the style, as [red, green, blue], in the scheme that is shown.
const rgb = (name) => {
  const probe = make("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return found;
};

const heatAt = (row, column) => Number.parseInt(pictures.heat[row].slice(2 * column, 2 * column + 2), 16) / 255;

const drawPicture = () => {
  const canvas = $("heat-map"), { layers, experts } = pictures, kind = $("heat-kind").value;
  Object.assign(canvas, { width: experts, height: layers.length });
  canvas.style.height = `${Math.min(Math.max(layers.length * 8, 64), 480)}px`;
  const context = canvas.getContext("2d"), image = context.createImageData(experts, layers.length);
  const cold = rgb("--free"), hot = rgb("--c6"), colours = new Map(Object.entries(LEVELS).map(([level, name]) => [level, rgb(name)]));
  for (let row = 0, at = 0; row < layers.length; row += 1) {
    for (let column = 0; column < experts; column += 1, at += 4) {
      // Heat falls by powers of two, so the root shows more of the colder experts.
      const part = kind === "heat" ? Math.cbrt(heatAt(row, column)) : 0;
      const colour = kind === "heat" ? cold.map((c, i) => c + part * (hot[i] - c)) : colours.get(pictures.levels[kind][row][column]);
      image.data.set([...colour, 255], at);
    }
  }
  context.putImageData(image, 0, 0);
  describePicture();
};

const describePicture = () => {
  const { layers, experts, levels } = pictures, kind = $("heat-kind").value;
  const of = `${plural(layers.length, "layer")} of ${plural(experts, "expert")}`;
  if (kind === "heat") {
    const used = layers.reduce((sum, _, row) => sum + Array.from({ length: experts }, (__, i) => heatAt(row, i)).filter(Boolean).length, 0);
    $("heat-text").textContent = `${of}; ${used} of ${layers.length * experts} were used. The stronger the colour, the hotter the expert.`;
  } else {
    const counts = new Map();
    for (const digit of levels[kind].join("")) counts.set(digit, (counts.get(digit) || 0) + 1);
    const texts = ["8", "4", "2", "0"].filter((digit) => counts.has(digit))
      .map((digit) => (digit === "0" ? `${counts.get(digit)} absent` : `${counts.get(digit)} at ${digit} bits`));
    $("heat-text").textContent = `${of}: ${texts.join(", ")}.`;
  }
  $("heat-map").setAttribute("aria-label", $("heat-text").textContent);
};

const readCell = () => {
  const { layers, levels } = pictures, { row, column } = cell;
  const bits = Object.entries(levels).map(([tier, rows]) => `${rows[row][column] === "0" ? "absent" : `${rows[row][column]} bits`} in ${tier.toUpperCase()}`);
  const heat = heatAt(row, column);
  $("heat-cell").textContent = `Layer ${layers[row]}, expert ${column}: ${heat ? `heat ${percent(heat)} of the hottest` : "never used"}, ${bits.join(", ")}.`;
};

const moveCell = (rows, columns) => {
  cell.row = Math.min(Math.max(cell.row + rows, 0), pictures.layers.length - 1);
  cell.column = Math.min(Math.max(cell.column + columns, 0), pictures.experts - 1);
  readCell();
};

const showPictures = (found) => {
  const tiers = Object.keys(found.levels), select = $("heat-kind"), kind = select.value;
  pictures = found;
  if (select.options.length !== 1 + tiers.length) { // the first, and whenever another model has other tiers
    select.replaceChildren(select.options[0], ...tiers.map((tier) => {
      const option = make("option", `bits in ${tier.toUpperCase()}`);
      option.value = tier;
      return option;
    }));
    select.value = tiers.includes(kind) ? kind : "heat";
  }
  drawPicture();
};

$("heat-kind").addEventListener("change", () => { if (pictures) drawPicture(); });
$("heat-map").addEventListener("pointermove", (event) => {
  if (!pictures) return;
  const box = $("heat-map").getBoundingClientRect();
  cell = { row: 0, column: 0 };
  moveCell(Math.floor(pictures.layers.length * (event.clientY - box.top) / box.height),
    Math.floor(pictures.experts * (event.clientX - box.left) / box.width));
});
$("heat-map").addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (step && pictures) {
    event.preventDefault();
    moveCell(...step);
  }
});

// Bars, and figures over the time that the page is open.

const SVG = "http://www.w3.org/2000/svg";
const MOST_SAMPLES = 900;
const GAP_SECONDS = 20;

const shape = (tag, attributes) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

// A bar of parts: {colour, value}.
const bar = (target, parts, total) => {
  target.replaceChildren(...parts.map(({ colour, value }) => {
    const piece = make("span", undefined, `c${colour}`);
    piece.style.width = `${total ? 100 * value / total : 0}%`;
    return piece;
  }));
};

// A legend of parts: {colour, text}.
const drawLegend = (legend, parts) => {
  legend.replaceChildren(...parts.map(({ colour, text }) => {
    const item = make("li");
    item.append(make("i", undefined, `c${colour}`), text);
    return item;
  }));
};

// Stretches of samples without a gap: the page polls less often, or not at all, while it is hidden.
const stretches = (samples) => {
  const found = [];
  samples.forEach((sample, i) => {
    if (!i || sample.t - samples[i - 1].t > GAP_SECONDS) found.push([]);
    found.at(-1).push(sample);
  });
  return found;
};

const thinned = (samples, most) => {
  const every = Math.ceil(samples.length / most);
  return samples.filter((_, i) => (samples.length - 1 - i) % every === 0);
};

const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`);

// Draws lines, or areas on top of each other, over time.
//
// target: an element of the page; samples: [{t, …}] by time in seconds; series: [{name, colour, of}], where `of` takes a
// sample's value, or null where it has none; options: format of a value, most (the top of the scale), limit (a dashed
// line), stacked, and whether there is a legend.
const chart = (target, samples, series, { format, most = 0, limit = null, stacked = false, legend = true }) => {
  const shown = thinned(samples, 300), now = shown.at(-1)?.t ?? 0, span = Math.max(now - (shown[0]?.t ?? now), 30);
  const totals = shown.map((sample) => series.map((one) => one.of(sample) ?? 0).reduce((a, b) => (stacked ? a + b : Math.max(a, b)), 0));
  const highest = Math.max(most, limit ?? 0, ...totals), top = highest > most || limit !== null ? 1.05 * highest : most || 1;
  const x = (sample) => (100 - 100 * (now - sample.t) / span).toFixed(2);
  const y = (value) => (100 - 100 * value / top).toFixed(2);
  const svg = shape("svg", { class: "chart", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
  for (const stretch of stretches(shown)) svg.append(...(stacked ? areas(stretch, series, x, y) : lines(stretch, series, x, y)));
  if (limit !== null) svg.append(shape("line", { class: "sbad", x1: 0, x2: 100, y1: y(limit), y2: y(limit) }));
  const texts = series.map(({ name, of }) => {
    const value = shown.length ? of(shown.at(-1)) : null;
    return `${name}: ${value == null ? "–" : format(value)}`;
  });
  svg.setAttribute("aria-label", `${texts.join(", ")}${limit === null ? "" : `, limit: ${format(limit)}`}; the top is ${format(top)}`);
  const scale = make("div", undefined, "scale"), names = make("ul", undefined, "legend");
  scale.append(make("span", ago(span)), make("span", `top: ${format(top)}`), make("span", "now"));
  if (legend) drawLegend(names, series.map(({ colour }, i) => ({ colour, text: texts[i] })));
  target.replaceChildren(svg, scale, names);
};

const lines = (stretch, series, x, y) => series.map(({ colour, of }) => {
  const points = stretch.filter((sample) => of(sample) != null).map((sample) => `${x(sample)},${y(of(sample))}`);
  return shape("polyline", { class: `s${colour}`, points: [...points, ...points.slice(-1)].join(" ") }); // a point is a dot
});

const areas = (stretch, series, x, y) => {
  const below = stretch.map(() => 0);
  return series.map(({ colour, of }) => {
    const from = stretch.map((sample, k) => `${x(sample)},${y(below[k])}`);
    const to = stretch.map((sample, k) => {
      below[k] += of(sample) ?? 0;
      return `${x(sample)},${y(below[k])}`;
    });
    return shape("polygon", { class: `f${colour}`, points: [...to, ...from.reverse()].join(" ") });
  });
};

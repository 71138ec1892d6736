"use strict";
// The report's page: pure functions first, what touches the document after them.

const UNITS = {
  s: [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]],
  B: [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]],
  J: [["kJ", 1e3], ["J", 1], ["mJ", 1e-3], ["uJ", 1e-6]],
  FLOP: [["PFLOP", 1e15], ["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["kFLOP", 1e3], ["FLOP", 1]],
  USD: [["USD", 1], ["mUSD", 1e-3], ["uUSD", 1e-6]],
};

// An amount in base units with three digits: `4.04 ms`.
function written(amount, base) {
  const units = UNITS[base] || [["", 1]];
  const size = Math.abs(amount);
  const [name, unit] = size ? units.find((u) => size >= u[1] * (1 - 5e-4)) || units[units.length - 1]
    : [base, 1];
  return `${Number((amount / unit).toPrecision(3))} ${name}`.trim();
}

function signed(amount, base) {
  return amount ? (amount > 0 ? "+" : "-") + written(Math.abs(amount), base) : "";
}

// Which block of a dim every device holds: `axes` are [name, size], outermost first, `cut` the numbers
// of the axes that cut the dim, major to minor; devices are counted along the mesh, last axis first.
function blocks(axes, cut) {
  const sizes = axes.map((a) => a[1]);
  const devices = sizes.reduce((n, s) => n * s, 1);
  const found = [];
  for (let device = 0; device < devices; device++) {
    const at = [];
    for (let k = sizes.length - 1, rest = device; k >= 0; rest = Math.floor(rest / sizes[k]), k--) {
      at[k] = rest % sizes[k];
    }
    found.push(cut.reduce((n, a) => n * sizes[a] + at[a], 0));
  }
  return found;
}

// A tensor as a table of blocks: dims that are cut, at most the first as rows and all others as
// columns; every cell has the devices that hold it.
function cells(axes, dims) {
  const parts = (cut) => cut.reduce((n, a) => n * axes[a][1], 1);
  const cutDims = dims.map((cut, k) => [cut, k]).filter(([cut]) => parts(cut) > 1);
  const twoLast = cutDims.length === 1 && cutDims[0][1] === dims.length - 1 && dims.length > 1;
  const down = twoLast ? [] : cutDims.slice(0, 1);
  const across = twoLast ? cutDims : cutDims.slice(1);
  const numbered = (some) => {
    const each = some.map(([cut]) => [blocks(axes, cut), parts(cut)]);
    const devices = axes.reduce((n, a) => n * a[1], 1);
    const number = [];
    for (let d = 0; d < devices; d++) number.push(each.reduce((n, [of, p]) => n * p + of[d], 0));
    return [number, each.reduce((n, [, p]) => n * p, 1)];
  };
  const [row, rows] = numbered(down);
  const [column, columns] = numbered(across);
  const table = Array.from({ length: rows }, () => Array.from({ length: columns }, () => []));
  row.forEach((r, device) => table[r][column[device]].push(device));
  return table;
}

// What changes from one plan to another in lists of [key, amounts...]: [key, first, second], most
// first.
function changed(one, other, pick) {
  const sums = new Map();
  for (const [side, rows] of [[0, one], [1, other]]) {
    for (const row of rows) {
      const at = sums.get(row[0]) || [0, 0];
      at[side] += pick(row);
      sums.set(row[0], at);
    }
  }
  return [...sums].map(([key, [a, b]]) => [key, a, b]).filter(([, a, b]) => a !== b)
    .sort((x, y) => Math.abs(y[2] - y[1]) - Math.abs(x[2] - x[1]));
}

function layout(axes, dims) {
  return `[${dims.map((cut) => cut.map((a) => axes[a][0]).join("·") || ".").join(", ")}]`;
}

// Marks of a scale from `low` to `high`: powers of ten with 2 and 5 between, or even steps; of bytes
// powers of two with one between, or such steps.
function ticks(low, high, log, base) {
  const found = [];
  if (base === "B" && log) {
    for (let e = Math.floor(Math.log2(low)); e <= Math.ceil(Math.log2(high)); e++) {
      for (const m of [1, 1.5]) if (m * 2 ** e >= low && m * 2 ** e <= high) found.push(m * 2 ** e);
    }
    return found;
  }
  if (log && high > low * 1.5) {
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      for (const m of [1, 2, 5]) {
        const at = m * 10 ** e;
        if (at >= low && at <= high) found.push(at);
      }
    }
    if (found.length > 1) return found;
    found.length = 0;
  }
  const rough = (high - low) / 5 || high || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = base === "B" ? 2 ** Math.ceil(Math.log2(rough))
    : [1, 2, 5, 10].map((m) => m * size).find((s) => s >= rough);
  for (let at = Math.ceil(low / step) * step; at <= high * (1 + 1e-9); at += step) found.push(at);
  return found;
}

// Points of a chart: what is no plan of the front is no circle.
const SHAPES = {
  "": (cx, cy) => ["circle", { cx, cy, r: 5.5 }],
  "as given": (x, y) => ["path", { d: `M${x - 5} ${y - 5}h10v10h-10Z` }],
  baseline: (x, y) => ["path", { d: `M${x} ${y - 7}l7 7l-7 7l-7 -7Z` }],
};

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plans = data.plans;
  const find = (id) => document.getElementById(id);
  const say = (words) => { find("said").textContent = words; };
  const text = (k) => data.texts[k];
  const names = data.objectives.map((o) => o[1]);
  let chosen = null;

  function node(tag, attributes = {}, ...children) {
    const drawn = ["svg", "g", "line", "path", "rect", "circle", "text", "title"].includes(tag);
    const made = drawn && tag !== "title" || attributes.svg
      ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [k, v] of Object.entries(attributes)) if (k !== "svg") made.setAttribute(k, v);
    for (const c of children) if (c !== null) made.append(c);
    return made;
  }
  const hint = (words) => node("title", { svg: 1 }, words);
  const table = (rows, heads) => node("div", { class: "wide" }, node("table", {},
    node("thead", {}, node("tr", {}, ...heads.map((h) => node("th", { scope: "col" }, h)))),
    node("tbody", {}, ...rows.map((r) => node("tr", {}, ...r.map((c) => node("td", {}, c)))))));

  function told(plan) {
    const gap = plan.gap === "-" ? "no bound" : `gap ${plan.gap}`;
    const costs = plan.costs.slice(0, 3).map((c, k) => written(c, data.objectives[k][2])).join(", ");
    return `${plan.name}${plan.kind ? ` (${plan.kind})` : ""} on ${plan.mesh}: ${costs}, ${gap}${plan.fits ? "" : ", above the memory"}`;
  }

  function front() {
    const x = Number(find("across").value), y = Number(find("up").value);
    const width = Math.min(1000, Math.max(340, find("chart").clientWidth || 760)), height = 380, left = 74, bottom = 44, right = 18, top = 14;
    const xs = plans.map((p) => p.costs[x]), ys = plans.map((p) => p.costs[y]);
    if (y === 0) plans.forEach((p) => { if (p.bound > 0) ys.push(p.bound); });
    const scale = (values, from, to, base) => {
      let low = Math.min(...values), high = Math.max(...values);
      const log = low > 0 && high > 3 * low;
      if (low === high) { low *= 0.9; high = high * 1.1 || 1; }
      const f = log ? Math.log : (v) => v;
      const pad = 0.04 * (f(high) - f(low));
      const at = (v) => from + (to - from) * (f(v) - f(low) + pad) / (f(high) - f(low) + 2 * pad);
      return { at, marks: ticks(low, high, log, base) };
    };
    const sx = scale(xs, left, width - right, data.objectives[x][2]);
    const sy = scale(ys, height - bottom, top, data.objectives[y][2]);
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "group",
      "aria-label": `${names[y]} against ${names[x]}` });
    for (const m of sx.marks) {
      svg.append(node("line", { class: "grid", x1: sx.at(m), x2: sx.at(m), y1: top, y2: height - bottom }),
        node("text", { x: sx.at(m), y: height - bottom + 18, "text-anchor": "middle" },
          written(m, data.objectives[x][2])));
    }
    for (const m of sy.marks) {
      svg.append(node("line", { class: "grid", x1: left, x2: width - right, y1: sy.at(m), y2: sy.at(m) }),
        node("text", { x: left - 8, y: sy.at(m) + 4, "text-anchor": "end" },
          written(m, data.objectives[y][2])));
    }
    svg.append(node("text", { x: width - right, y: height - 8, "text-anchor": "end" }, names[x]),
      node("text", { x: 4, y: 11 }, names[y]));
    if (x === data.peak && data.usable && data.usable <= Math.max(...xs)) {
      const at = sx.at(data.usable);
      svg.append(node("line", { class: "limit", x1: at, x2: at, y1: top, y2: height - bottom },
        hint("usable memory of a device")));
    }
    const order = plans.map((p, k) => k).sort((a, b) => plans[a].costs[x] - plans[b].costs[x]);
    order.forEach((k) => {
      const p = plans[k], cx = sx.at(p.costs[x]), cy = sy.at(p.costs[y]);
      if (y === 0 && p.bound > 0) {
        svg.append(node("line", { class: "gap", x1: cx, x2: cx, y1: cy, y2: sy.at(p.bound) },
          hint(p.gap.startsWith("~") ? `${p.name}: its bound, ${written(p.bound, "s")}, is not proven`
            : `${p.name}: no plan within its other costs takes less than ${written(p.bound, "s")}`)));
      }
      const [tag, form] = SHAPES[p.kind](cx, cy);
      const dot = node(tag, { class: `dot${p.fits ? "" : " over"}${k === chosen ? " chosen" : ""}`,
        ...form, tabindex: 0, role: "button", "aria-label": told(p), "data-plan": k }, hint(told(p)));
      dot.addEventListener("focus", () => say(told(p)));
      dot.addEventListener("pointerenter", () => say(told(p)));
      dot.addEventListener("click", () => go(k));
      dot.addEventListener("keydown", (e) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
        if (e.key === "Enter" || e.key === " ") { e.preventDefault(); go(k); }
        if (step) {
          e.preventDefault();
          const next = order[(order.indexOf(k) + step + order.length) % order.length];
          svg.querySelector(`[data-plan="${next}"]`).focus();
        }
      });
      svg.append(dot);
    });
    find("chart").replaceChildren(svg);
  }

  function lanes(plan) {
    if (!plan.lanes) return null;
    const width = Math.max(340, find("plan").clientWidth || 900), left = 70, end = Math.max(...plan.costs.slice(0, 1), 1e-12);
    const at = (t) => left + (width - left - 8) * t / end;
    const most = Math.max(1, ...plan.memory.map((m) => m[1]));
    const rows = plan.lanes.length, floor = 40 * rows + 130;
    const svg = node("svg", { viewBox: `0 0 ${width} ${floor + 26}`, role: "img",
      "aria-label": "what runs when, and the bytes alive" });
    plan.lanes.forEach(([stream, bars], row) => {
      svg.append(node("text", { x: 4, y: 40 * row + 24 }, stream));
      for (const [a, b, name] of bars) {
        svg.append(node("rect", { class: stream, x: at(a), y: 40 * row + 4,
          width: Math.max(0.6, at(b) - at(a) - 0.4), height: 30 },
        hint(`${text(name)}: ${written(a, "s")} to ${written(b, "s")}`)));
      }
    });
    let path = "";
    plan.memory.forEach(([t, amount], k) => {
      const y = floor - 100 * amount / most;
      path += k ? `H${at(t).toFixed(1)}V${y.toFixed(1)}` : `M${at(t).toFixed(1)} ${y.toFixed(1)}`;
    });
    if (path) {
      svg.append(node("path", { class: "alive", d: `${path}H${at(end)}V${floor}H${left}Z` }),
        node("text", { x: 4, y: floor - 92 }, written(most, "B")), node("text", { x: 4, y: floor }, "0 B"));
    }
    for (const m of ticks(0, end, false, "s").filter((t, k) => width > 600 || k % 2 === 0)) {
      svg.append(node("text", { x: at(m), y: floor + 18, "text-anchor": "middle" }, written(m, "s")));
    }
    return node("div", { class: "wide" }, svg);
  }

  // A plan as it ran: planned beside compiled.
  function ran(run) {
    if (!run) return [];
    const row = (what, group, planned, compiled) => [what, group, written(planned, "B"),
      written(compiled, "B"), signed(compiled - planned, "B") || "equal"];
    const rows = run.collectives.map((c) => row(c.kind, String(c.group), c.planned_bytes, c.compiled_bytes));
    rows.push(row("peak memory", "", run.planned_peak_bytes, run.compiled_peak_bytes));
    const results = run.differing.length ? `Results differ by more than rounding: ${run.differing.join(", ")}. `
      : "Results are the program's own. ";
    return [node("h3", {}, "Planned against compiled"),
      node("p", {}, `${results}A step took ${written(run.seconds, "s")} on ${run.platform} devices; `
        + `the program on one of them ${written(run.original_seconds, "s")}.`),
      table(rows, ["a device's bytes", "devices", "planned", "compiled", "more or less"])];
  }

  // The pictures of a plan, which are unpacked when they are first shown and then stay as they are:
  // a window that gets another size closes none.
  const pictures = new Map();
  function picture(plan) {
    if (!pictures.has(plan)) pictures.set(plan, unpacked(plan.drawn));
    return pictures.get(plan);
  }

  function unpacked([packed, left]) {
    const place = node("div", { class: "wide" });
    const hint = `Tensors have the colours of their layouts. Boxes open: click, or Tab and Enter; Escape goes back.${
      left ? ` ${left} pictures deeper inside are left out here: save the plan, and \`tapestry-egg show --svg\` has all.` : ""}`;
    if (window.DecompressionStream) {
      const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      new Response(stream).text().then((svg) => {
        place.append(document.importNode(
          new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true));
        zoomable(place.firstChild);
      });
    }
    return [node("h3", {}, "The plan, drawn"), node("p", {}, hint), place];
  }

  function drawn(plan, [name, type, , dims, count]) {
    const grid = cells(plan.axes, dims), rows = grid.length, columns = grid[0].length;
    const width = 170, height = Math.min(120, Math.max(28, 26 * rows));
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `${text(name)} has layout ${layout(plan.axes, dims)}` });
    grid.forEach((line, r) => line.forEach((held, c) => {
      const hue = Math.round(360 * (r * columns + c) / (rows * columns));
      const words = held.length > 4 ? `${held[0]}-${held[held.length - 1]}` : held.join(",");
      const x = c * width / columns, y = r * height / rows;
      svg.append(node("rect", { class: "cell", x, y, width: width / columns, height: height / rows,
        fill: `hsl(${hue} 55% 60%)` }, hint(`devices ${held.join(", ")}`)));
      const label = node("text", { x: x + width / columns / 2, y: y + height / rows / 2 + 4,
        "text-anchor": "middle" }, words);
      label.style.fill = "#111827";
      if (6.5 * words.length < width / columns) svg.append(label);
    }));
    return node("figure", {}, svg, node("figcaption", {},
      `${count > 1 ? `${count}× ` : ""}${text(name)} ${text(type)} ${layout(plan.axes, dims)}`));
  }

  function show(plan) {
    const tensors = plan.inputs.map((i) => drawn(plan, i));
    const rules = plan.rules.map(([step, ...laws]) => node("li", {}, text(step),
      ...(laws.length ? [node("ul", {}, ...laws.map((l) => node("li", {}, text(l))))] : [])));
    const moves = plan.moves.slice().sort((a, b) => b[2] - a[2])
      .map(([what, times, sent]) => [text(what), `${times}×`, written(sent, "B")]);
    find("plan").replaceChildren(
      node("h2", { id: "shown", tabindex: -1 }, told(plan)),
      ...(plan.lanes ? [node("h3", {}, "What runs when, and memory"), lanes(plan)] : []),
      ...ran(plan.run),
      ...picture(plan),
      node("h3", {}, "Collectives"),
      moves.length ? table(moves, ["collective", "times", "sent"]) : node("p", {}, "None."),
      node("details", {}, node("summary", {}, `Layouts of ${tensors.length} kinds of arguments, drawn`),
        node("div", { class: "layouts" }, ...tensors)),
      ...(rules.length ? [node("h3", {}, "Rules, step by step"), node("ol", {}, ...rules)] : []),
      node("details", { open: "" }, node("summary", {}, "All about it, as `explain` says"),
        node("pre", { tabindex: 0 }, plan.text.map(text).join("\n"))));
    find("from").value = String(plans.indexOf(plan));
    compare();
  }

  function compare() {
    const a = plans[Number(find("from").value)], b = plans[Number(find("to").value)];
    const totals = names.map((name, k) => [name, a.costs[k], b.costs[k], data.objectives[k][2]])
      .filter((r) => r[1] || r[2])
      .map(([name, x, y, base]) => [name, written(x, base), written(y, base), signed(y - x, base)]);
    const seconds = changed(a.parts, b.parts, (r) => r[1]).slice(0, 12)
      .map(([k, x, y]) => [text(k), written(x, "s"), written(y, "s"), signed(y - x, "s")]);
    const sent = changed(a.moves, b.moves, (r) => r[2]).slice(0, 12)
      .map(([k, x, y]) => [text(k), written(x, "B"), written(y, "B"), signed(y - x, "B")]);
    const lies = (p) => new Map(p.inputs.map((i) => [text(i[0]), layout(p.axes, i[3])]));
    const one = lies(a), other = lies(b);
    const moved = [...one].filter(([name, l]) => other.has(name) && other.get(name) !== l)
      .map(([name, l]) => [name, l, other.get(name)]);
    const holds = changed(a.holds || [], b.holds || [], (r) => r[1])
      .map(([k, x, y]) => [k, written(x, "B"), written(y, "B"), signed(y - x, "B")]);
    const heads = [a.name, b.name, "change"];
    const part = (title, rows, first) => (rows.length
      ? [node("h3", {}, title), table(rows, [first, ...heads.slice(0, rows[0].length - 1)])] : []);
    find("difference").replaceChildren(...(a === b ? [node("p", {}, "Choose two plans.")] : [
      table(totals, ["", ...heads]), ...part("Seconds, by kernel and copy", seconds, "what"),
      ...part("Bytes sent, by collective", sent, "collective"), ...part("At the peak", holds, "memory"),
      ...part("Arguments that lie otherwise", moved, "argument")]));
  }

  function go(k) {
    if (location.hash === `#${plans[k].name}`) choose(k); else location.hash = plans[k].name;
  }

  function choose(k) {
    chosen = k;
    front();
    document.querySelectorAll("tr[data-row]").forEach((row) => {
      row.classList.toggle("chosen", Number(row.dataset.row) === k);
    });
    show(plans[k]);
  }

  function route() {
    const name = decodeURIComponent(location.hash.slice(1));
    const k = plans.findIndex((p) => p.name === name);
    choose(Math.max(0, k));
    if (k >= 0) find("shown").focus();
  }

  for (const id of ["across", "up"]) {
    names.forEach((name, k) => find(id).append(node("option", { value: k }, name)));
    find(id).addEventListener("change", front);
  }
  find("across").value = String(data.peak);
  find("up").value = "0";
  for (const id of ["from", "to"]) {
    plans.forEach((p, k) => find(id).append(node("option", { value: k }, p.name)));
    find(id).addEventListener("change", compare);
  }
  find("to").value = String(plans.length - 1);
  window.addEventListener("hashchange", route);
  window.addEventListener("resize", () => { if (chosen !== null) { front(); show(plans[chosen]); } });
  if (plans.length) route();
  document.body.classList.add("ready");
}

if (typeof module !== "undefined") {
  module.exports = { written, signed, blocks, cells, changed, layout, ticks };
}
if (typeof document !== "undefined") start();

"use strict";
// Enough of a browser's document to run a report's page: page.js of argv[2] on the data of argv[3].
// Prints what the page then shows, and what it shows after every plan was chosen.
const fs = require("fs");

class Node {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, style: {}, value: "" });
    this.classList = { toggle() {}, add() {} };
    this.dataset = {};
  }
  setAttribute(k, v) { this.attributes[k] = String(v); }
  append(...some) {
    for (const c of some) {
      if (c === undefined || c === null) throw new Error(`nothing appended to ${this.tag}`);
      this.children.push(c);
    }
  }
  replaceChildren(...some) { this.children = []; this.append(...some); }
  addEventListener(name, does) { this.listeners[name] = does; }
  focus() { if (this.listeners.focus) this.listeners.focus(); }
  set textContent(words) { this.children = [words]; }
  get textContent() { return this.children.map((c) => c.textContent ?? c).join(" "); }
  all() { return [this, ...this.children.flatMap((c) => (c instanceof Node ? c.all() : []))]; }
  querySelector(selector) {
    const [, name, value] = /\[([\w-]+)="(.*)"\]/.exec(selector);
    return this.all().find((n) => n.attributes[name] === value);
  }
}

const byId = new Map();
const find = (id) => {
  if (!byId.has(id)) byId.set(id, new Node(id));
  for (const node of byId.values()) {
    const inner = node.all().find((n) => n.attributes.id === id);
    if (inner) return inner;
  }
  return byId.get(id);
};
find("data").textContent = fs.readFileSync(process.argv[3], "utf8");
global.document = {
  getElementById: find,
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  querySelectorAll: () => [],
  body: new Node("body"),
};
const moves = {};
global.window = { addEventListener: (name, does) => { moves[name] = does; } };
global.location = { hash: "" };
const { blocks, cells, ticks } = require(process.argv[2]);

const data = JSON.parse(find("data").textContent);
const dots = () => find("chart").all().filter((n) => "data-plan" in n.attributes);
const MIB = 2 ** 20;
const out = { ticks: ticks(32 * MIB, 120 * MIB, true, "B"), dots: dots().length, shown: [], walked: [], numbers: [], blocks: [] };
for (const plan of data.plans) {
  location.hash = `#${plan.name}`;
  moves.hashchange();
  out.shown.push(find("plan").textContent);
  for (const node of find("plan").all()) {
    for (const [k, v] of Object.entries(node.attributes)) {
      if (/NaN|undefined|Infinity/.test(v)) out.numbers.push(`${node.tag} ${k}=${v}`);
    }
  }
}
let key = { key: "ArrowRight", preventDefault() {} };
for (const dot of dots()) {
  dot.listeners.keydown(key);
  out.walked.push(find("said").textContent);
}
const pairs = find("to");
out.differences = data.plans.map((p, k) => {
  pairs.value = String(k);
  pairs.listeners.change();
  return find("difference").textContent;
});
for (const plan of data.plans) {
  for (const [, , , dims] of plan.inputs) {
    out.blocks.push([plan.axes, dims, dims.map((cut) => blocks(plan.axes, cut)), cells(plan.axes, dims)]);
  }
}
process.stdout.write(JSON.stringify(out));


// The table of disks: a row each, made once and changed where something changed. A browser takes half
// a second to lay out a thousand: more are shown when one scrolls to the last.
const ROWS_STEP = 150;
const COLUMNS = [
  ["name", "Disk", row => row.disk.name, 1],
  ["state", "State", row => row.disk.state, 1],
  ["reads", "reads/s", row => row.now?.reads],
  ["writes", "writes/s", row => row.now?.writes],
  ["readBytes", "read MiB/s", row => row.now?.readBytes],
  ["writtenBytes", "write MiB/s", row => row.now?.writtenBytes],
  ["readMean", "read time", row => row.now?.readMean],
  ["writeMean", "write time", row => row.now?.writeMean],
  ["errors", "errors/h", row => row.disk.errors_lately],
  ["clients", "clients", row => row.disk.clients],
  ["length", "size", row => row.disk.length],
];
const rows = new Map();
const view = { sort: "problems", direction: -1, words: [], only: false, limit: ROWS_STEP };
let shownRows = [];
const heads = new Map();
let arrangedAt = -Infinity;
const totals = COLUMNS.map(() => make("td"));

function makeHead() {
  const cells = COLUMNS.map(([key, title, , direction = -1]) => {
    const button = make("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      view.direction = view.sort === key ? -view.direction : direction;
      view.sort = key;
      arrange();
    });
    const cell = make("th", { scope: "col" }, button);
    heads.set(key, cell);
    return cell;
  });
  byId("table").tHead.append(make("tr", {}, ...cells), make("tr", {}, ...totals));
}

function makeRow(name) {
  const button = make("button", { type: "button", class: "name", "aria-expanded": "false", title: name }, name);
  const cells = COLUMNS.slice(1).map(() => make("td"));
  const state = make("span", { class: "state" });
  cells[0].append(state);
  const element = make("tr", { class: "disk" }, make("th", { scope: "row" }, button), ...cells);
  button.addEventListener("click", () => toggle(name));
  return { name, button, cells, state, element, badges: "", details: null };
}

function drawRow(row) {
  const { disk, now, cells } = row;
  setText(row.state, disk.state);
  const isWell = disk.state === "serving" && rank(disk) < 3;
  const tone = isWell ? "good" : { failed: "bad", starting: "warn", draining: "warn" }[disk.state] ?? "";
  setClass(row.state, `state ${tone}`);
  const marks = badges(disk, now), key = JSON.stringify(marks);
  if (key !== row.badges) {
    row.badges = key;
    while (row.state.nextSibling) row.state.nextSibling.remove();
    for (const [kind, text, title] of marks) cells[0].append(make("span", { class: `badge ${kind}`, title }, text));
  }
  row.state.title = disk.failure ?? "";
  const known = (value, write) => value === undefined || value === null ? "–" : write(value);
  const mib = bytes => short(bytes / MIB);
  const texts = [
    known(now?.reads, count), known(now?.writes, count), known(now?.readBytes, mib), known(now?.writtenBytes, mib),
    time(now?.readMean ?? null), time(now?.writeMean ?? null), grouped(number(disk.errors_lately)),
    grouped(number(disk.clients)), size(number(disk.length)),
  ];
  texts.forEach((text, at) => {
    setText(cells[at + 1], text);
    const isBad = at === 6 && number(disk.errors_lately) > 0;
    setClass(cells[at + 1], isBad ? "bad" : text === "0" || text === "–" ? "zero" : "");
  });
}

function isWanted(row) {
  if (view.only && rank(row.disk) === 0) return false;
  return view.words.length === 0 || view.words.every(word => described(row).includes(word));
}

function compare(a, b) {
  const load = row => row.now?.load ?? 0;
  if (view.sort === "problems")
    return rank(b.disk) - rank(a.disk) || load(b) - load(a) || a.order - b.order;
  const value = COLUMNS.find(column => column[0] === view.sort)[2];
  const [x, y] = [value(a), value(b)];
  const known = v => v !== undefined && v !== null;
  if (!known(x) || !known(y)) return known(y) - known(x) || a.order - b.order;
  const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
  return view.direction * order || a.order - b.order;
}

// Puts rows in order. Rows that are where they belong are not moved.
function arrange() {
  arrangedAt = performance.now();
  const wanted = [...rows.values()].filter(isWanted).sort(compare);
  const shown = shownRows = wanted.slice(0, view.limit);
  shown.forEach(drawRow);
  const elements = shown.flatMap(row => row.details ? [row.element, row.details.element] : [row.element]);
  const body = byId("disks"), kept = new Set(elements);
  for (const element of [...body.children]) if (!kept.has(element)) element.remove();
  let next = body.firstChild;
  for (const element of elements) {
    if (element === next) next = next.nextSibling;
    else body.insertBefore(element, next);
  }
  for (const [key, cell] of heads) {
    if (key === view.sort) cell.setAttribute("aria-sort", view.direction < 0 ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  byId("first").setAttribute("aria-pressed", String(view.sort === "problems"));
  const left = wanted.length - shown.length;
  setText(byId("shown"), `${grouped(wanted.length)} of ${grouped(rows.size)} disks`);
  setText(byId("more"), left ? `${grouped(left)} more` : "");
  none(rows.size === 0 ? "This server has no disks." : wanted.length === 0 ? "No disk matches." : "");
  remember();
}

function none(text) { setText(byId("none"), text); byId("none").hidden = !text; }

// What is found by searching for words.
function described(row) {
  const { disk } = row, fact = facts.get(row.name);
  const places = fact ? [fact.image, fact.format, ...(fact.nbd ?? []), fact.export_name, fact.vhost_user, fact.fuse] : [];
  const marks = badges(disk, row.now).map(badge => badge[1]);
  return [disk.name, disk.state, disk.failure, ...marks, ...places].filter(Boolean).join("\n").toLowerCase();
}

function drawTotals() {
  const all = [...rows.values()];
  const sum = key => all.reduce((sum, row) => sum + number(row.now?.[key]), 0);
  const of = key => all.reduce((sum, row) => sum + number(row.disk[key]), 0);
  const states = new Map();
  for (const { disk } of all) states.set(disk.state, (states.get(disk.state) ?? 0) + 1);
  const errors = of("errors_lately");
  const said = [...states].map(([state, n]) => `${grouped(n)} ${state}`).join(", ");
  [`${grouped(all.length)} disks`, said, count(sum("reads")), count(sum("writes")), short(sum("readBytes") / MIB),
    short(sum("writtenBytes") / MIB), "", "", grouped(errors), grouped(of("clients")), size(of("length"))]
    .forEach((text, at) => setText(totals[at], text));
  setClass(totals[8], errors > 0 ? "bad" : "");
  return { reads: sum("reads"), writes: sum("writes"), errors, states, ill: all.filter(row => rank(row.disk) > 0).length,
    readBytes: sum("readBytes"), writtenBytes: sum("writtenBytes") };
}

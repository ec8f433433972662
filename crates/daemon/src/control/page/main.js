
// Asks, draws, and asks again. Whoever has many disks, or a slow browser, asks less often.
const PERIOD = 1000, WAIT = 5000, FACTS_PERIOD = 60000, HISTORY_PERIOD = 10000, ARRANGE_PERIOD = 2500;
let before = null, facts = new Map(), factsAt = 0, historyAt = 0, answered = null, seen = null, rated = false, wanted = null;
const tiles = new Map();
const charts = [bytesChart(), requestsChart(), chart("process", [
  ["other", "processors", "processors", n => n.toFixed(2)], ["read", "memory", "resident_bytes", size]])];

function tile(key, title) {
  const it = { root: make("div", { class: "tile" }), value: make("b", {}, "–"), more: make("span") };
  it.root.append(make("small", {}, title), it.value, it.more);
  tiles.set(key, it);
  byId("tiles").append(it.root);
}

function fill(key, value, more, tone = "") {
  const it = tiles.get(key);
  setText(it.value, value);
  setText(it.more, more);
  setClass(it.root, `tile ${tone}`.trim());
}

function drawTiles(answer, sums, seconds) {
  const of = state => sums.states.get(state) ?? 0;
  const others = [...sums.states].filter(([state]) => state !== "serving").map(([state, n]) => `${grouped(n)} ${state}`);
  fill("disks", `${grouped(of("serving"))} of ${grouped(answer.disks.length)}`, others.join(", ") || "all serve", of("failed") ? "bad" : "");
  fill("ill", grouped(sums.ill), `${grouped(sums.errors)} errors in an hour`, sums.ill ? "bad" : "");
  fill("reads", perSecond(sums.readBytes), `${count(sums.reads)} reads/s`);
  fill("writes", perSecond(sums.writtenBytes), `${count(sums.writes)} writes/s`);
  const { process } = answer, was = before?.process;
  fill("memory", size(process.resident_bytes), `${grouped(process.threads)} threads`);
  const used = was && seconds ? (process.cpu_seconds - was.cpu_seconds) / seconds : null;
  fill("cpu", used === null ? "–" : `${(100 * used).toFixed(0)} %`, "of one processor");
  const max = process.max_descriptors;
  const isShort = max && process.open_descriptors > .8 * max;
  fill("descriptors", grouped(process.open_descriptors), max ? `of ${grouped(max)}` : "no limit", isShort ? "warn" : "");
}

function show(answer) {
  const isSame = before && before.pid === answer.pid && answer.uptime_ms > before.uptime_ms;
  const seconds = isSame ? (answer.uptime_ms - before.uptime_ms) / 1000 : 0;
  if (!isSame) before = null;
  setText(byId("host"), `on ${answer.host}`);
  setText(byId("about"), `${answer.version} · pid ${answer.pid} · up ${span(answer.uptime_ms / 1000)}`);
  const old = new Map((before?.disks ?? []).map(disk => [disk.name, disk]));
  const names = new Set();
  // The second answer is the first with rates.
  let isChanged = !rated;
  rated = seconds > 0;
  answer.disks.forEach((disk, order) => {
    names.add(disk.name);
    if (!rows.has(disk.name)) { rows.set(disk.name, makeRow(disk.name)); isChanged = true; }
    const row = rows.get(disk.name);
    Object.assign(row, { disk, order, now: rates(old.get(disk.name), disk, seconds) });
  });
  for (const name of [...rows.keys()]) {
    if (names.has(name)) continue;
    if (open?.name === name) toggle(name);
    rows.delete(name);
    isChanged = true;
  }
  const sums = drawTotals();
  drawTiles(answer, sums, seconds);
  document.title = `${sums.ill ? `(${sums.ill}) ` : ""}${answer.host} · mica`;
  before = answer;
  // Rows that change places all the time cannot be read.
  if (isChanged || performance.now() - arrangedAt > ARRANGE_PERIOD) arrange();
  else shownRows.forEach(drawRow);
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(WAIT) });
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

function gone() {
  document.body.classList.add("gone");
  const since = (answered ?? new Date()).toLocaleTimeString();
  setText(byId("link"), answered ? `no answer since ${since}` : "the server does not answer");
  setText(tiles.get("disks").more, "unknown now");
  document.title = `no answer · ${before?.host ?? "mica"}`;
}

async function look() {
  const began = performance.now();
  try {
    const answer = await ask("/v1/overview");
    const isNew = answer.disks.some(disk => !facts.has(disk.name)) || answer.pid !== seen;
    if (isNew || began - factsAt > FACTS_PERIOD) {
      facts = new Map((await ask("/v1/status")).disks.map(disk => [disk.name, disk]));
      factsAt = began;
    }
    const isOther = answer.pid !== seen;
    seen = answer.pid;
    show(answer);
    if (isOther || began - historyAt > HISTORY_PERIOD) {
      const history = await ask("/v1/history");
      charts.forEach((each, at) => each.draw(history, at < 2));
      historyAt = began;
    }
    // A disk may have gone just now.
    await lookInto().catch(() => {});
    answered = new Date();
    document.body.classList.remove("gone");
    setText(byId("link"), "live");
  } catch (error) {
    console.error(error);
    gone();
  }
  // Drawing takes a fifth of the time at most. One that is gone is asked often.
  const took = document.body.classList.contains("gone") ? 0 : performance.now() - began;
  setTimeout(look, Math.max(document.hidden ? 5 * PERIOD : PERIOD, Math.min(4 * took, 10 * PERIOD)));
}

// The view is in the address, to be kept and passed on.
function remember() {
  const said = new URLSearchParams();
  if (view.sort !== "problems") said.set("sort", `${view.direction < 0 ? "-" : ""}${view.sort}`);
  if (byId("search").value) said.set("search", byId("search").value);
  if (view.only) said.set("only", "problems");
  if (open) said.set("open", open.name);
  const hash = said.size ? `#${said}` : location.pathname;
  if ((location.hash || location.pathname) !== hash) history.replaceState(null, "", hash);
}

function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  const sort = said.get("sort") ?? "problems", key = sort.replace(/^-/, "");
  if (COLUMNS.some(column => column[0] === key)) Object.assign(view, { sort: key, direction: sort === key ? 1 : -1 });
  byId("search").value = said.get("search") ?? "";
  byId("only").checked = said.get("only") === "problems";
  wanted = said.get("open");
  search();
}

function reopen() {
  if (rows.has(wanted) && open?.name !== wanted) toggle(wanted);
}

function search() {
  view.words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  view.only = byId("only").checked;
  view.limit = ROWS_STEP;
}

byId("search").addEventListener("input", () => { search(); arrange(); });
byId("only").addEventListener("change", () => { search(); arrange(); });
byId("first").addEventListener("click", () => { view.sort = "problems"; arrange(); });
document.addEventListener("keydown", event => {
  const field = byId("search"), isTyping = event.target === field;
  if (event.key === "/" && !isTyping) { field.focus(); field.select(); event.preventDefault(); }
  if (event.key === "Escape" && isTyping) { field.value = ""; search(); arrange(); field.blur(); }
});

for (const [key, title] of [["disks", "disks that serve"], ["ill", "disks with problems"], ["reads", "read"],
  ["writes", "written"], ["memory", "memory"], ["cpu", "processor time"], ["descriptors", "descriptors"]]) tile(key, title);
byId("charts").append(...charts.map(each => each.root));
makeHead();
new IntersectionObserver(seen => {
  if (view.limit >= rows.size || !seen.some(each => each.isIntersecting)) return;
  view.limit += ROWS_STEP;
  arrange();
}, { rootMargin: "600px" }).observe(byId("more"));
recall();
look().then(reopen);
addEventListener("hashchange", () => { recall(); arrange(); reopen(); });

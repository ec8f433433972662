
// What a row shows when it is opened. One is open at a time: it is asked for each time.
const KINDS = ["read", "write", "flush"], TREE_PERIOD = 30000;
let open = null;

function makeDetails(name) {
  const it = { name, before: null, charts: [bytesChart(), requestsChart(), chart("mean time", [
    ["read", "reads", "read_mean_us", time], ["write", "writes", "write_mean_us", time]])] };
  it.problems = make("div");
  it.facts = make("dl", { class: "facts" });
  it.cells = new Map(KINDS.map(kind => [kind, Array.from({ length: 6 }, () => make("td"))]));
  const head = ["", "/s", "mean", "50 %", "90 %", "99 %", "99.9 %"].map(text => make("th", { scope: "col" }, text));
  const lines = KINDS.map(kind => make("tr", {}, make("th", { scope: "row" }, `${kind}s`.replace("flushs", "flushes")), ...it.cells.get(kind)));
  it.when = make("th", { scope: "col" });
  head[0] = it.when;
  const table = make("table", { class: "latency" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines));
  it.figures = make("dl", { class: "figures" });
  it.tree = make("ul", { class: "tree" });
  const charts = make("div", { class: "charts" }, ...it.charts.map(each => each.root));
  const cell = make("td", { colspan: COLUMNS.length }, it.problems, it.facts, it.tree, charts, table, it.figures);
  it.element = make("tr", { class: "details" }, cell);
  return it;
}

// What has not changed stays, and so does what somebody selected in it to copy it.
function refill(element, data, build) {
  const key = JSON.stringify(data);
  if (element.shown === key) return;
  element.shown = key;
  element.replaceChildren(...data.flatMap(build));
}

function toggle(name) {
  const was = open;
  if (was) {
    const row = rows.get(was.name);
    open = null;
    was.element.remove();
    if (row) { row.details = null; row.button.setAttribute("aria-expanded", "false"); }
  }
  const row = rows.get(name);
  if (row && was?.name !== name) {
    open = row.details = makeDetails(name);
    row.button.setAttribute("aria-expanded", "true");
    lookInto().catch(() => {});
  }
  arrange();
}

function drawDetails(it, answer) {
  // In figures "nbd" are counters, in the status it is where clients connect.
  const { disks: [disk], status } = answer, before = it.before;
  it.before = { uptime_ms: answer.uptime_ms, pid: answer.pid, disk };
  const isSame = before && before.pid === answer.pid && answer.uptime_ms > before.uptime_ms;
  const seconds = isSame ? (answer.uptime_ms - before.uptime_ms) / 1000 : answer.uptime_ms / 1000;
  const texts = [disk.failure, disk.latch, disk.device_error, disk.weakness].filter(Boolean);
  refill(it.problems, texts, text => make("p", { class: "problem" }, `⚠ ${text}`));
  const below = status.layers - 1;
  const queues = status.queues ? `, ${status.queues} queues` : "";
  const limits = [status.iops && `${grouped(status.iops)} operations/s`, status.bps && perSecond(status.bps)].filter(Boolean);
  const facts = [
    ["image", `${status.image} (${status.format}${status.writable ? "" : ", read-only"})`],
    ["NBD", (status.nbd ?? []).join(" ")], ["export", status.export_name],
    ["vhost-user", status.vhost_user && status.vhost_user + queues], ["FUSE", status.fuse],
    ["layers", status.layers > 1 ? `${status.layers}${status.indexed_layers === null ? "" : `, index of ${status.indexed_layers} of ${below}`}` : ""],
    ["limits", limits.join(", ")], ["log", written(status.volume)], ["store", stored(status.volume)],
  ].filter(fact => fact[1]);
  refill(it.facts, facts, ([key, value]) => [make("dt", {}, key), make("dd", {}, value)]);
  const recent = KINDS.map(kind => latency(isSame ? before.disk : null, disk, kind));
  const isBusy = isSame && recent.some(each => each.requests > 0);
  setText(it.when, isBusy ? "now" : "since the start");
  KINDS.forEach((kind, at) => {
    const it_ = isBusy ? recent[at] : latency(null, disk, kind);
    const rate = it_.requests / (isBusy ? seconds : answer.uptime_ms / 1000);
    [count(rate), time(it_.mean), ...it_.parts.map(time)].forEach((text, cell) => setText(it.cells.get(kind)[cell], text));
  });
  const figures = ["map", "write", "volume", ...SERVERS].flatMap(section => Object.entries(disk[section] ?? {})
    .filter(([, value]) => value > 0).map(([name, value]) => [`${section}.${name}`, value]));
  refill(it.figures, figures, ([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, name.endsWith("bytes") ? size(value) : grouped(value))));
}

// How the write log of a volume does, and its store.
function written(volume) {
  if (!volume?.log_bytes) return "";
  const sync = volume.log_syncs ? `, 99 % of syncs within ${time(volume.log_sync_p99_us)}` : "";
  return `${size(volume.log_used_bytes)} of ${size(volume.log_bytes)}${volume.throttled ? ", writes wait" : ""}${sync}`;
}
function stored(volume) {
  if (!volume) return "";
  const lacks = volume.pending_records ? `lacks ${grouped(volume.pending_records)} writes, ${span(volume.pending_seconds)} old` : "has everything";
  const silent = volume.store_silent_seconds ? `, silent for ${span(volume.store_silent_seconds)}` : "";
  const puts = volume.extents ? `, 99 % of puts within ${time(volume.put_p99_us)}` : "";
  return (volume.fenced ? "another host has the volume; " : "") + lacks + silent + puts;
}

// A volume with its snapshots, as `mica volume tree` draws it; the newest of many.
function drawTree(it, { snapshots, snapshot_count: total, cloned_from: from }) {
  const older = total - snapshots.length;
  const rows = snapshots.map(({ label, sequence, time_ns }) =>
    [`@${label}`, `${sequence}, ${new Date(time_ns / 1e6).toISOString().slice(0, 19).replace("T", " ")}`]);
  if (older > 0) rows.unshift([`${grouped(older)} older`, ""]);
  const source = from ? make("small", {}, ` cloned from ${from}`) : "";
  refill(it.tree, rows.length || from ? [rows] : [], all => make("li", {}, it.name, source, make("ul", {},
    ...all.map(([name, more]) => make("li", {}, name, " ", make("small", {}, more))))));
}

// Its store may be slow: it is asked for when it may have changed, and what fails waits for then.
function lookAtTree(it, path, volume) {
  const key = JSON.stringify([volume?.snapshots, Math.floor(performance.now() / TREE_PERIOD)]);
  if (!volume || it.treeKey === key) return;
  it.treeKey = key;
  ask(`/v1/tree/${path}`).then(answer => drawTree(it, answer)).catch(() => {});
}

async function lookInto() {
  const it = open;
  if (!it) return;
  const path = encodeURIComponent(it.name);
  const answer = await ask(`/v1/stats/${path}`);
  drawDetails(it, answer);
  lookAtTree(it, path, answer.status.volume);
  const history = await ask(`/v1/history/${path}`);
  for (const each of it.charts) each.draw(history, true);
}

"use strict";
// Names, paths and errors come from images and clients: they are set as text, never as HTML.
const SERVERS = ["nbd", "vhost_user", "fuse"];
const SVG = "http://www.w3.org/2000/svg";
// What a request costs in the measure of load, besides its bytes.
const REQUEST_BYTES = 4096;

const byId = id => document.getElementById(id);
function make(name, attributes = {}, ...children) {
  const isDrawn = ["svg", "polyline", "line", "title"].includes(name);
  const element = isDrawn ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
// Only what has changed is touched: a browser lays out what was.
function setText(element, text) {
  if (element.shown !== text) { element.textContent = text; element.shown = text; }
}
function setClass(element, name) { if (element.className !== name) element.className = name; }

const number = value => typeof value === "number" ? value : 0;
const grouped = value => Math.round(value).toLocaleString("en");
const count = value => value > 0 && value < 10 ? value.toFixed(1) : grouped(value);
const short = value => value >= 99.95 || value === 0 ? grouped(value) : value.toFixed(1);
const MIB = 2 ** 20;

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = 0;
  while (bytes >= 1000 && unit + 1 < units.length) { bytes /= 1024; unit += 1; }
  return `${+bytes.toPrecision(3)} ${units[unit]}`;
}

function time(us) {
  if (us === null) return "–";
  if (us < 1000) return `${us > 0 && us < 10 ? us.toFixed(1) : Math.round(us)} µs`;
  if (us < 1e6) return `${+(us / 1000).toPrecision(3)} ms`;
  return `${+(us / 1e6).toPrecision(3)} s`;
}

function span(seconds) {
  const [d, h, m] = [seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60].map(Math.floor);
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

// What a disk did between two answers; nothing is known of the first.
function rates(old, disk, seconds) {
  if (!old) return null;
  // Less than before: it was opened again in between.
  const more = key => Math.max(0, number(disk[key]) - number(old[key]));
  const mean = (ns, requests) => requests > 0 ? ns / requests / 1000 : null;
  const now = {
    reads: more("reads") / seconds, writes: more("writes") / seconds,
    readBytes: more("read_bytes") / seconds, writtenBytes: more("written_bytes") / seconds,
    readMean: mean(more("read_ns"), more("reads")), writeMean: mean(more("write_ns"), more("writes")),
    errors: more("errors"), delayed: more("delayed"),
  };
  now.load = now.readBytes + now.writtenBytes + REQUEST_BYTES * (now.reads + now.writes);
  return now;
}

// How bad it is: 3 it does not serve all, 2 requests failed, 1 it promises less, 0 nothing.
function rank(disk) {
  if (disk.failure || disk.latch || disk.device_error || disk.state === "failed") return 3;
  if (number(disk.errors_lately) > 0) return 2;
  return disk.weakness ? 1 : 0;
}

// A merge of layers: how far it is, how fast, and when it will be done at this rate.
function merging(merge) {
  const share = merge.total > 0 ? Math.floor(merge.done * 100 / merge.total) : 0;
  const left = merge.estimate_ms === null ? "" : `, ${span(merge.estimate_ms / 1000)} left`;
  return ["", `${merge.kind} ${share} %`, `${merge.state}, ${size(merge.rate)}/s${left}`];
}

function badges(disk, now) {
  const all = [];
  if (disk.failure) all.push(["why", disk.failure, disk.failure]);
  if (disk.latch) all.push(["bad", "latched", disk.latch]);
  if (disk.device_error) all.push(["bad", "device broken", disk.device_error]);
  if (number(disk.errors_lately) > 0) all.push(["bad", disk.errors_lately === 1 ? "1 error" : `${grouped(disk.errors_lately)} errors`, "in the last hour"]);
  if (disk.weakness && !disk.latch) all.push(["warn", "weakened", disk.weakness]);
  if (now && now.delayed > 0) all.push(["warn", "throttled", "requests waited because of its rate limits"]);
  if (disk.writable === false && disk.state === "serving") all.push(["", "read-only", ""]);
  if (disk.merge) all.push(merging(disk.merge));
  const below = disk.layers - 1;
  if (disk.indexed_layers !== null && disk.indexed_layers < below)
    all.push(["", `index ${disk.indexed_layers}/${below}`, "layers that the index covers"]);
  return all;
}

// Percentiles of requests of a kind, since the older answer, or since the start.
function latency(old, disk, kind) {
  let requests = 0, ns = 0;
  const buckets = new Map();
  for (const server of SERVERS) {
    const now = disk.latency?.[server]?.[kind], was = old?.latency?.[server]?.[kind];
    if (!now) continue;
    requests += number(now.count) - number(was?.count);
    ns += number(now.sum_ns) - number(was?.sum_ns);
    const earlier = new Map(was?.buckets ?? []);
    for (const [below, n] of now.buckets)
      buckets.set(below, (buckets.get(below) ?? 0) + n - (earlier.get(below) ?? 0));
  }
  const sorted = [...buckets].sort((a, b) => a[0] - b[0]);
  const below = part => {
    let sum = 0;
    const enough = Math.ceil(requests * part);
    for (const [end, n] of sorted) { sum += n; if (sum >= enough) return end; }
    return null;
  };
  const known = requests > 0;
  return {
    requests, mean: known ? ns / requests / 1000 : null,
    parts: [.5, .9, .99, .999].map(part => known ? below(part) : null),
  };
}


// Lines over the last hour. `lines` are [class, name, column of the points, how it is written].
function chart(title, lines) {
  const height = 60;
  const values = lines.map(() => make("b"));
  const what = make("span", {}, title), legend = make("div", { class: "legend" }, what);
  lines.forEach(([kind, name], at) => legend.append(make("i", { class: kind }, make("span", {}, name + " "), values[at])));
  const most = make("span", { class: "most" });
  legend.append(most);
  const drawn = lines.map(([kind]) => make("polyline", { class: kind }));
  const svg = make("svg", { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", role: "img" },
    make("line", { class: "axis", x1: 0, x2: 100, y1: height - 1, y2: height - 1 }), ...drawn);
  const root = make("div", { class: "chart" }, legend, svg);
  // Scales of their own if the lines are of different things.
  const draw = (history, isShared) => {
    const { points, columns, points_max: most_points } = history;
    // A server that has just begun: its minutes are not squeezed into a corner.
    const width = Math.min(most_points, Math.max(points.length, 30));
    const of = column => points.map(point => number(point[columns.indexOf(column)]));
    const series = lines.map(line => of(line[2]));
    const peak = all => Math.max(0, ...all);
    const highest = isShared ? peak(series.map(peak)) : 0;
    series.forEach((all, at) => {
      const top = isShared ? highest : peak(all);
      const x = index => 100 * (width - all.length + index) / (width - 1);
      const y = value => top > 0 ? height - 1 - (height - 4) * value / top : height - 1;
      drawn[at].setAttribute("points", all.map((value, index) => `${x(index).toFixed(2)},${y(value).toFixed(1)}`).join(" "));
      setText(values[at], all.length ? lines[at][3](all[all.length - 1]) : "–");
    });
    const past = `${title}, ${Math.round(width * history.period_seconds / 60)} min`;
    const peaks = isShared && highest > 0 ? `≤ ${lines[0][3](highest)}` : "";
    setText(what, past);
    setText(most, points.length ? peaks : "at rest");
    svg.setAttribute("aria-label", `${past} ${peaks}`);
  };
  return { root, draw };
}

const perSecond = bytes => `${size(bytes)}/s`;
const bytesChart = () => chart("bytes", [["read", "read", "read_bytes", perSecond], ["write", "written", "written_bytes", perSecond]]);
const requestsChart = () => chart("requests", [["read", "reads", "reads", n => `${count(n)}/s`], ["write", "writes", "writes", n => `${count(n)}/s`]]);

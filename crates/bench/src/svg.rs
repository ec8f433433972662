//! Line charts as SVG, written by hand: no library, no script, readable in any browser.

use std::fmt::Write;

const WIDTH: f64 = 940.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 80.0;
/// Room for the legend.
const RIGHT: f64 = 280.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 60.0;
/// Colours of lines and bars, in order.
pub(super) const COLOURS: &[&str] =
    &["#0b6e4f", "#c0392b", "#2456a6", "#8e44ad", "#b9770e", "#555555"];

/// How values become places.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    Log,
}

/// A line of a chart.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<[f64; 2]>,
}

/// A chart.
pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    pub(super) x: (&'a str, Scale),
    pub(super) y: (&'a str, Scale),
    pub(super) lines: Vec<Line>,
}

/// An axis: from its least to its largest value.
#[derive(Clone, Copy)]
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Chart<'_> {
    /// The chart as a document, or `None` if there is nothing to draw.
    pub(super) fn draw(&self) -> Option<String> {
        let drawable = |point: &&[f64; 2]| {
            (self.x.1 == Scale::Linear || point[0] > 0.0)
                && (self.y.1 == Scale::Linear || point[1] > 0.0)
        };
        let points = || self.lines.iter().flat_map(|line| &line.points).filter(drawable);
        let x = Axis::around(self.x.1, points().map(|point| point[0]))?;
        let y = Axis::around(self.y.1, points().map(|point| point[1]))?;
        let mut svg = document(WIDTH, HEIGHT);
        text(&mut svg, [WIDTH / 2.0, 22.0], "middle", self.title, "font-weight=\"bold\"");
        self.draw_axes(&mut svg, x, y);
        for (number, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let place = |point: &[f64; 2]| [place_x(x, point[0]), place_y(y, point[1])];
            let places: Vec<_> = line.points.iter().filter(drawable).map(place).collect();
            let path: Vec<_> = places.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
            put(
                &mut svg,
                &format!(
                    "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                    path.join(" ")
                ),
            );
            for [x, y] in places {
                put(
                    &mut svg,
                    &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"),
                );
            }
            let row = TOP + 16.0 * f64::from(u32::try_from(number).unwrap_or(0));
            put(
                &mut svg,
                &format!(
                    "<rect x=\"{}\" y=\"{}\" width=\"12\" height=\"4\" fill=\"{colour}\"/>",
                    WIDTH - RIGHT + 12.0,
                    row + 6.0
                ),
            );
            text(&mut svg, [WIDTH - RIGHT + 30.0, row + 12.0], "start", &line.name, "");
        }
        svg.push_str("</svg>\n");
        Some(svg)
    }

    fn draw_axes(&self, svg: &mut String, x: Axis, y: Axis) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in x.ticks() {
            let at = place_x(x, tick);
            grid(svg, [at, TOP], [at, bottom]);
            text(svg, [at, bottom + 18.0], "middle", &number(tick), "");
        }
        for tick in y.ticks() {
            let at = place_y(y, tick);
            grid(svg, [LEFT, at], [right, at]);
            text(svg, [LEFT - 6.0, at + 4.0], "end", &number(tick), "");
        }
        text(svg, [f64::midpoint(LEFT, right), HEIGHT - 14.0], "middle", self.x.0, "");
        let turn = format!("transform=\"rotate(-90 18 {})\"", f64::midpoint(TOP, bottom));
        text(svg, [18.0, f64::midpoint(TOP, bottom)], "middle", self.y.0, &turn);
    }
}

impl Axis {
    /// One that has room for all `values`.
    pub(super) fn around(scale: Scale, values: impl Iterator<Item = f64>) -> Option<Self> {
        let (low, high) = values.fold(None, |range, value| match range {
            None => Some((value, value)),
            Some((low, high)) => Some((value.min(low), value.max(high))),
        })?;
        let axis = match scale {
            Scale::Linear => Self { scale, low: low.min(0.0), high: high * 1.05 + f64::EPSILON },
            Scale::Log => Self { scale, low: low / 1.2, high: high * 1.2 },
        };
        Some(axis)
    }

    /// Where `value` lies between the ends, from 0.0 to 1.0.
    pub(super) fn part(self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        }
    }

    /// Round values along it.
    pub(super) fn ticks(self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = [1.0, 2.0, 5.0]
                    .into_iter()
                    .cycle()
                    .zip(-27..60)
                    .map(|(digit, third)| digit * 10_f64.powi(i32::div_euclid(third, 3)));
                let step = step.into_iter().find(|step| (self.high - self.low) / step <= 7.0);
                let step = step.unwrap_or(self.high);
                (0..8).map(|n| f64::from(n) * step).filter(|tick| *tick <= self.high).collect()
            }
            Scale::Log => (-9..13)
                .map(|power| 10_f64.powi(power))
                .flat_map(|ten| [ten, 2.0 * ten, 5.0 * ten])
                .filter(|tick| (self.low..=self.high).contains(tick))
                .collect(),
        }
    }
}

fn place_x(axis: Axis, value: f64) -> f64 {
    LEFT + axis.part(value) * (WIDTH - LEFT - RIGHT)
}

fn place_y(axis: Axis, value: f64) -> f64 {
    HEIGHT - BOTTOM - axis.part(value) * (HEIGHT - TOP - BOTTOM)
}

/// The beginning of a document.
pub(super) fn document(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    )
}

/// A number without digits that nobody reads.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1e6 => format!("{}M", value / 1e6),
        size if size >= 1e4 => format!("{}k", value / 1e3),
        size if size >= 1.0 => format!("{value:.0}"),
        _ => format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned(),
    }
}

/// A thin line.
pub(super) fn grid(svg: &mut String, from: [f64; 2], to: [f64; 2]) {
    let ([x1, y1], [x2, y2]) = (from, to);
    put(
        svg,
        &format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#dddddd\"/>"
        ),
    );
}

/// Words at a place.
pub(super) fn text(svg: &mut String, at: [f64; 2], anchor: &str, words: &str, more: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let [x, y] = at;
    put(
        svg,
        &format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {more}>{words}</text>"),
    );
}

/// Adds an element.
pub(super) fn put(svg: &mut String, element: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(svg, "{element}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_its_lines_and_nothing_beyond_its_frame() {
        let line = Line { name: "a < b".to_owned(), points: vec![[1.0, 10.0], [1000.0, 0.5]] };
        let chart = Chart {
            title: "t",
            x: ("layers", Scale::Log),
            y: ("MiB", Scale::Log),
            lines: vec![line],
        };
        let svg = chart.draw().expect("points");
        assert!(svg.contains("a &lt; b") && svg.contains("<polyline"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn nothing_is_not_drawn() {
        let chart =
            Chart { title: "", x: ("", Scale::Log), y: ("", Scale::Linear), lines: Vec::new() };
        assert!(chart.draw().is_none());
    }

    #[test]
    fn linear_ticks_are_round() {
        let axis = Axis { scale: Scale::Linear, low: 0.0, high: 1300.0 };
        assert_eq!(axis.ticks()[..3], [0.0, 200.0, 400.0]);
    }
}

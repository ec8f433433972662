//! Bar charts as SVG: groups of bars, one bar for each server.

use super::svg::{self, Axis, COLOURS, Scale};

const WIDTH: f64 = 940.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 80.0;
/// Room for the legend.
const RIGHT: f64 = 200.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 60.0;
/// The part of a group's room that its bars take.
const FILLED: f64 = 0.8;

/// Bars that stand together.
pub(super) struct Group {
    /// What they are of.
    pub(super) name: String,
    /// Their heights, as many as the chart has series; nothing where nothing was measured.
    pub(super) values: Vec<Option<f64>>,
}

/// A chart.
pub(super) struct Bars<'a> {
    /// What it shows.
    pub(super) title: &'a str,
    /// The unit of the heights.
    pub(super) unit: &'a str,
    /// Names of the bars of each group.
    pub(super) series: Vec<String>,
    /// The groups, from left to right.
    pub(super) groups: Vec<Group>,
}

impl Bars<'_> {
    /// The chart as a document, or `None` if there is nothing to draw.
    pub(super) fn draw(&self) -> Option<String> {
        let heights = self.groups.iter().flat_map(|group| group.values.iter().flatten().copied());
        let axis = Axis::around(Scale::Linear, heights)?;
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let mut svg = svg::document(WIDTH, HEIGHT);
        svg::text(&mut svg, [WIDTH / 2.0, 22.0], "middle", self.title, "font-weight=\"bold\"");
        let place = |value| bottom - axis.part(value) * (bottom - TOP);
        for tick in axis.ticks() {
            svg::grid(&mut svg, [LEFT, place(tick)], [right, place(tick)]);
            let label = svg::number(tick);
            svg::text(&mut svg, [LEFT - 6.0, place(tick) + 4.0], "end", &label, "");
        }
        let turn = format!("transform=\"rotate(-90 18 {})\"", f64::midpoint(TOP, bottom));
        svg::text(&mut svg, [18.0, f64::midpoint(TOP, bottom)], "middle", self.unit, &turn);
        let room = (right - LEFT) / count(self.groups.len());
        let width = room * FILLED / count(self.series.len());
        for (number, group) in self.groups.iter().enumerate() {
            let start = LEFT + room * (count_from_zero(number) + (1.0 - FILLED) / 2.0);
            for (bar, value) in group.values.iter().enumerate() {
                let Some(value) = value else { continue };
                let (x, y) = (start + width * count_from_zero(bar), place(*value));
                let colour = COLOURS[bar % COLOURS.len()];
                rectangle(&mut svg, [x, y], [width * 0.92, bottom - y], colour);
            }
            let middle = LEFT + room * (count_from_zero(number) + 0.5);
            svg::text(&mut svg, [middle, bottom + 18.0], "middle", &group.name, "font-size=\"11\"");
        }
        for (number, name) in self.series.iter().enumerate() {
            let row = TOP + 16.0 * count_from_zero(number);
            let colour = COLOURS[number % COLOURS.len()];
            rectangle(&mut svg, [right + 12.0, row + 2.0], [12.0, 10.0], colour);
            svg::text(&mut svg, [right + 30.0, row + 12.0], "start", name, "");
        }
        svg.push_str("</svg>\n");
        Some(svg)
    }
}

fn rectangle(svg: &mut String, at: [f64; 2], size: [f64; 2], colour: &str) {
    let ([x, y], [width, height]) = (at, size);
    svg::put(
        svg,
        &format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
             fill=\"{colour}\"/>"
        ),
    );
}

fn count_from_zero(number: usize) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

/// How many there are, at least one.
fn count(number: usize) -> f64 {
    count_from_zero(number.max(1))
}

#[cfg(test)]
mod tests {
    use super::{Bars, Group};

    #[test]
    fn what_was_not_measured_has_no_bar() {
        let group = |name: &str, values| Group { name: name.to_owned(), values };
        let mut chart = Bars {
            title: "t",
            unit: "writes/s",
            series: vec!["mica".to_owned(), "other".to_owned()],
            groups: vec![group("raw", vec![Some(2.0), None]), group("empty", vec![Some(1.0); 2])],
        };
        let svg = chart.draw().expect("bars");
        // Two in the legend, three measured, one behind everything.
        assert_eq!(svg.matches("<rect").count(), 6);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        chart.groups.clear();
        assert!(chart.draw().is_none());
    }
}

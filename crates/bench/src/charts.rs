//! Line charts and bar charts as SVG, drawn by plotters.

use anyhow::Result;
use plotters::chart::{ChartBuilder, LabelAreaPosition};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, Rectangle};
use plotters::prelude::{IntoLogRange, SVGBackend};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoTextStyle, RGBColor, WHITE};
use std::ops::Range;

const SIZE: (u32, u32) = (940, 420);
const FONT: &str = "sans-serif";
/// Height of letters.
const TITLE_PX: u32 = 16;
const LABEL_PX: u32 = 13;
/// Room for the labels of an axis.
const AXIS_PX: u32 = 60;
const MARGIN_PX: u32 = 12;
/// Room for the legend, right of the chart.
const LEGEND_ROOM_PX: u32 = 220;
const LEGEND_AT: [i32; 2] = [740, 44];
const LEGEND_ROW_PX: usize = 18;
/// The part of a group's room that its bars take.
const FILLED: f64 = 0.8;
/// Colours of lines and bars, in order.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x0b, 0x6e, 0x4f),
    RGBColor(0xc0, 0x39, 0x2b),
    RGBColor(0x24, 0x56, 0xa6),
    RGBColor(0x8e, 0x44, 0xad),
    RGBColor(0xb9, 0x77, 0x0e),
    RGBColor(0x55, 0x55, 0x55),
];

/// How values are placed on an axis.
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

/// A chart of lines.
pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    /// Name and scale of each axis.
    pub(super) x: (&'a str, Scale),
    pub(super) y: (&'a str, Scale),
    pub(super) lines: Vec<Line>,
}

/// Bars that are drawn side by side.
pub(super) struct Group {
    pub(super) name: String,
    /// Their heights, as many as the chart has series; `None` if nothing was measured.
    pub(super) values: Vec<Option<f64>>,
}

/// A chart of bars.
pub(super) struct Bars<'a> {
    pub(super) title: &'a str,
    /// The unit of the heights.
    pub(super) unit: &'a str,
    /// Names of the bars of each group.
    pub(super) series: Vec<String>,
    /// The groups, from left to right.
    pub(super) groups: Vec<Group>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Chart<'_> {
    /// The chart as a document, or `None` if there is nothing to draw.
    ///
    /// # Errors
    /// If it cannot be drawn.
    pub(super) fn draw(&self) -> Result<Option<String>> {
        let drawable = |[x, y]: &&[f64; 2]| {
            (self.x.1 == Scale::Linear || *x > 0.0) && (self.y.1 == Scale::Linear || *y > 0.0)
        };
        let points = || self.lines.iter().flat_map(|line| &line.points).filter(drawable);
        let x = range_of(self.x.1, points().map(|[x, _]| *x));
        let y = range_of(self.y.1, points().map(|[_, y]| *y));
        let (Some(x), Some(y)) = (x, y) else { return Ok(None) };
        let svg = match (self.x.1, self.y.1) {
            (Scale::Linear, Scale::Linear) => self.draw_on(x, y),
            (Scale::Linear, Scale::Log) => self.draw_on(x, y.log_scale()),
            (Scale::Log, Scale::Linear) => self.draw_on(x.log_scale(), y),
            (Scale::Log, Scale::Log) => self.draw_on(x.log_scale(), y.log_scale()),
        };
        svg.map(Some)
    }

    fn draw_on<X, Y>(&self, x: X, y: Y) -> Result<String>
    where
        X: AsRangedCoord<Value = f64, CoordDescType: ValueFormatter<f64>>,
        Y: AsRangedCoord<Value = f64, CoordDescType: ValueFormatter<f64>>,
    {
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            area.fill(&WHITE)?;
            let mut chart = builder(&area, self.title).build_cartesian_2d(x, y)?;
            let mut mesh = chart.configure_mesh();
            mesh.x_desc(self.x.0).y_desc(self.y.0).label_style((FONT, LABEL_PX)).max_light_lines(0);
            mesh.x_label_formatter(&|x| number(*x)).y_label_formatter(&|y| number(*y)).draw()?;
            for (line, colour) in self.lines.iter().zip(COLOURS.into_iter().cycle()) {
                let points = || line.points.iter().map(|[x, y]| (*x, *y));
                let series = LineSeries::new(points(), colour.stroke_width(2));
                chart.draw_series(series)?;
                chart.draw_series(points().map(|at| Circle::new(at, 3, colour.filled())))?;
            }
            draw_legend(&area, self.lines.iter().map(|line| line.name.as_str()))?;
            area.present()?;
        }
        Ok(svg)
    }
}

impl Bars<'_> {
    /// The chart as a document, or `None` if there is nothing to draw.
    ///
    /// # Errors
    /// If it cannot be drawn.
    pub(super) fn draw(&self) -> Result<Option<String>> {
        let heights = self.groups.iter().flat_map(|group| group.values.iter().flatten().copied());
        let Some(heights) = range_of(Scale::Linear, heights) else { return Ok(None) };
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            area.fill(&WHITE)?;
            let groups = 0.0..place(self.groups.len());
            let mut chart = builder(&area, self.title).build_cartesian_2d(groups, heights)?;
            let mut mesh = chart.configure_mesh();
            mesh.disable_x_mesh().disable_x_axis().y_desc(self.unit);
            mesh.label_style((FONT, LABEL_PX))
                .max_light_lines(0)
                .y_label_formatter(&|y| number(*y))
                .draw()?;
            let width = FILLED / place(self.series.len());
            for (number, colour) in (0..self.series.len()).zip(COLOURS.into_iter().cycle()) {
                let bars = self.groups.iter().enumerate().filter_map(|(group, bars)| {
                    let left = place(group) + (1.0 - FILLED) / 2.0 + width * place(number);
                    let height = (*bars.values.get(number)?)?;
                    let corners = [(left, 0.0), (left + width * 0.92, height)];
                    Some(Rectangle::new(corners, colour.filled()))
                });
                chart.draw_series(bars)?;
            }
            for (number, group) in self.groups.iter().enumerate() {
                let (x, y) = chart.backend_coord(&(place(number) + 0.5, 0.0));
                let style = (FONT, LABEL_PX).into_text_style(&area);
                let style = style.pos(Pos::new(HPos::Center, VPos::Top));
                area.draw_text(&group.name, &style, (x, y + 6))?;
            }
            draw_legend(&area, self.series.iter().map(String::as_str))?;
            area.present()?;
        }
        Ok(Some(svg))
    }
}

/// What both kinds of chart have around them.
fn builder<'a, 'b>(area: &'a Area<'b>, title: &str) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.caption(title, (FONT, TITLE_PX)).margin(MARGIN_PX).margin_right(LEGEND_ROOM_PX);
    builder.set_label_area_size(LabelAreaPosition::Left, AXIS_PX);
    builder.set_label_area_size(LabelAreaPosition::Bottom, AXIS_PX - 20);
    builder
}

/// Draws a legend of `names` right of the chart: plotters keeps its own inside of the frame.
fn draw_legend<'a>(area: &Area<'_>, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let [left, top] = LEGEND_AT;
    for ((name, colour), y) in
        names.zip(COLOURS.into_iter().cycle()).zip((top..).step_by(LEGEND_ROW_PX))
    {
        area.draw(&Rectangle::new([(left, y), (left + 12, y + 8)], colour.filled()))?;
        let style = (FONT, LABEL_PX).into_text_style(area).pos(Pos::new(HPos::Left, VPos::Center));
        area.draw_text(name, &style, (left + 20, y + 4))?;
    }
    Ok(())
}

/// A range that has room for all `values`.
fn range_of(scale: Scale, values: impl Iterator<Item = f64>) -> Option<Range<f64>> {
    let (low, high) = values.fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((value.min(low), value.max(high))),
    })?;
    Some(match scale {
        Scale::Linear => low.min(0.0)..high * 1.05 + f64::EPSILON,
        Scale::Log => low / 1.2..high * 1.2,
    })
}

/// A number without digits that nobody reads.
fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1e6 => format!("{}M", value / 1e6),
        size if size >= 1e4 => format!("{}k", value / 1e3),
        size if size >= 1.0 => format!("{value:.0}"),
        _ => format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned(),
    }
}

fn place(number: usize) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_has_its_lines_and_their_names() {
        for (x, y) in [(Scale::Log, Scale::Log), (Scale::Log, Scale::Linear)] {
            let line = Line { name: "a < b".to_owned(), points: vec![[1.0, 10.0], [1000.0, 0.5]] };
            let chart = Chart { title: "t", x: ("layers", x), y: ("MiB", y), lines: vec![line] };
            let svg = chart.draw().expect("drawn").expect("points");
            assert!(svg.contains("a &lt; b") && svg.contains("<polyline"), "{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"));
        }
    }

    #[test]
    fn nothing_is_not_drawn() {
        let chart =
            Chart { title: "", x: ("", Scale::Log), y: ("", Scale::Linear), lines: Vec::new() };
        assert!(chart.draw().expect("drawn").is_none());
    }

    #[test]
    fn what_was_not_measured_has_no_bar() {
        let group = |name: &str, values| Group { name: name.to_owned(), values };
        let bars = |values: Vec<Option<f64>>| {
            let chart = Bars {
                title: "t",
                unit: "writes/s",
                series: vec!["mica".to_owned(), "other".to_owned()],
                groups: vec![group("raw", values)],
            };
            chart.draw().expect("drawn").expect("bars").matches("<rect").count()
        };
        assert_eq!(bars(vec![Some(2.0), Some(1.0)]), bars(vec![Some(2.0), None]) + 1);
        let chart = Bars { title: "t", unit: "", series: Vec::new(), groups: Vec::new() };
        assert!(chart.draw().expect("drawn").is_none());
    }
}

//! Charts as SVG: steps and dots over two axes.

use crate::svg::{Picture, escaped};
use std::fmt::Write as _;

const WIDTH: f64 = 620.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 42.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 52.0;
/// Radius of the largest dot.
const DOT: f64 = 15.0;

/// How values lie along an axis.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    Logarithmic,
}

/// An axis.
pub(super) struct Axis {
    pub(super) label: String,
    pub(super) scale: Scale,
    pub(super) from: f64,
    pub(super) to: f64,
    /// Where it is marked, and with what.
    pub(super) marks: Vec<(f64, String)>,
}

impl Axis {
    /// One from 0 to 1, in percent.
    pub(super) fn share(label: &str) -> Self {
        let marks = (0..=5).map(|fifth| f64::from(fifth) / 5.0);
        let marks = marks.map(|share| (share, format!("{:.0}%", share * 100.0))).collect();
        Self { label: label.to_owned(), scale: Scale::Linear, from: 0.0, to: 1.0, marks }
    }

    /// One from 1 on, by powers of ten.
    pub(super) fn counts(label: &str, to: f64) -> Self {
        let powers = (0..12).map(|power| 10_f64.powi(power)).take_while(|value| *value <= to);
        let marks = powers.map(|value| (value, format!("{value:.0}"))).collect();
        Self {
            label: label.to_owned(),
            scale: Scale::Logarithmic,
            from: 1.0,
            to: to.max(2.0),
            marks,
        }
    }

    /// One from 0 on.
    pub(super) fn linear(label: &str, to: f64) -> Self {
        let to = to.max(1.0);
        let power = 10_f64.powf((to / 4.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|part| part * power);
        let step = step.into_iter().find(|step| to / step <= 6.0).unwrap_or(to).max(1.0);
        let marks = (0..8).map(|mark| f64::from(mark) * step).take_while(|value| *value <= to);
        let marks = marks.map(|value| (value, format!("{value:.0}"))).collect();
        Self { label: label.to_owned(), scale: Scale::Linear, from: 0.0, to, marks }
    }

    /// Where `value` is, as a part of its length.
    fn place(&self, value: f64) -> f64 {
        let place = |value: f64| match self.scale {
            Scale::Linear => value,
            Scale::Logarithmic => value.max(f64::MIN_POSITIVE).ln(),
        };
        let span = place(self.to) - place(self.from);
        if span > 0.0 { ((place(value) - place(self.from)) / span).clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// A chart in the making.
pub(super) struct Chart<'a> {
    title: &'a str,
    x: &'a Axis,
    y: &'a Axis,
    body: String,
    lines: usize,
}

impl<'a> Chart<'a> {
    pub(super) fn new(title: &'a str, x: &'a Axis, y: &'a Axis) -> Self {
        let mut this = Self { title, x, y, body: String::new(), lines: 0 };
        this.draw_axes();
        this
    }

    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        (LEFT + self.x.place(x) * wide, TOP + (1.0 - self.y.place(y)) * high)
    }

    // Writing to a string does not fail, here and below.
    fn draw_axes(&mut self) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let mut body = String::new();
        for (value, text) in &self.x.marks {
            let (x, _) = self.at((*value, self.y.from));
            let _ = writeln!(body, "<path class=\"grid\" d=\"M{x:.1} {TOP}V{bottom}\"/>");
            let (text, y) = (escaped(text), bottom + 18.0);
            let _ = writeln!(
                body,
                "<text class=\"dim\" x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>"
            );
        }
        for (value, text) in &self.y.marks {
            let (_, y) = self.at((self.x.from, *value));
            let _ = writeln!(body, "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>");
            let (text, x, y) = (escaped(text), LEFT - 8.0, y + 4.0);
            let _ = writeln!(
                body,
                "<text class=\"dim\" x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{text}</text>"
            );
        }
        let (x, y) = ((LEFT + right) / 2.0, HEIGHT - 10.0);
        let label = escaped(&self.x.label);
        let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>");
        let label = escaped(&self.y.label);
        let _ = writeln!(body, "<text x=\"8\" y=\"16\">{label}</text>");
        self.body = body;
    }

    /// Draws a line of steps through points in order, up to the end of the axis.
    pub(super) fn steps(&mut self, name: &str, points: &[(f64, f64)]) {
        let class = ["one", "two", "three"][self.lines.min(2)];
        let (x, y) = self.at((self.x.from, self.y.from));
        let mut path = format!("M{x:.1} {y:.1}");
        for point in points {
            let (x, y) = self.at(*point);
            let _ = write!(path, "H{x:.1}V{y:.1}");
        }
        let _ = write!(path, "H{:.1}", WIDTH - RIGHT);
        let _ = writeln!(self.body, "<path class=\"{class}\" d=\"{path}\"/>");
        #[expect(clippy::cast_precision_loss, reason = "there are three lines")]
        let x = 230.0 + 190.0 * self.lines as f64;
        let (name, text_x) = (escaped(name), x + 36.0);
        let _ = writeln!(
            self.body,
            "<path class=\"{class}\" d=\"M{x} 12h28\"/><text x=\"{text_x}\" y=\"16\">{name}</text>"
        );
        self.lines += 1;
    }

    /// Draws a dot for each point, the larger the more it stands for.
    pub(super) fn dots(&mut self, points: &[((f64, f64), f64)]) {
        let most = points.iter().map(|(_, weight)| *weight).fold(1.0, f64::max);
        for (point, weight) in points {
            let (x, y) = self.at(*point);
            let radius = (DOT * (weight / most).sqrt()).max(2.0);
            let _ = writeln!(
                self.body,
                "<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius:.1}\"/>"
            );
        }
    }

    pub(super) fn finish(self) -> String {
        let picture = Picture { title: self.title, width: 620, height: 340, body: &self.body };
        picture.within()
    }
}

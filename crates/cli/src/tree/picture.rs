//! A forest as a picture: a row for each image, with a bar as long as its size on disk.

use super::rows::{Row, What, detail, folded};
use crate::svg::{Picture, escaped};
use mica_stack::forest::{Forest, ForestImage};

const ROW_HEIGHT: usize = 24;
const INDENT: usize = 22;
/// Levels beyond which nothing is moved further to the right.
const LEVELS_MAX: usize = 40;
/// Length of the longest bar.
const BAR: f64 = 90.0;
const MARGIN: usize = 16;
/// Room for a letter.
const LETTER: usize = 8;

pub(super) fn draw(
    forest: &Forest,
    rows: &[Row],
    shown: impl Fn(&ForestImage) -> String,
) -> String {
    let largest = forest.images().iter().map(|image| image.disk_bytes).max().unwrap_or(0).max(1);
    let mut levels: Vec<usize> = Vec::with_capacity(rows.len());
    let mut widest = 0;
    let mut body = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        let level = match row.parent {
            None => 0,
            Some(parent) if row.is_straight => levels[parent],
            Some(parent) => (levels[parent] + 1).min(LEVELS_MAX),
        };
        levels.push(level);
        let (x, y) = (MARGIN + level * INDENT, MARGIN + number * ROW_HEIGHT);
        if let Some(parent) = row.parent {
            let (from_x, from_y) =
                (MARGIN + levels[parent] * INDENT + 5, MARGIN + parent * ROW_HEIGHT);
            let (top, middle) = (from_y + 18, y + 12);
            body.push(format!("<path class=\"line\" d=\"M{from_x} {top}V{middle}H{x}\"/>"));
        }
        let (name, rest, bytes, class) = match row.what {
            What::Image(id) => {
                let image = forest.get(id);
                let class = if image.is_active() { "active" } else { "frozen" };
                (shown(image), detail(image), image.disk_bytes, class)
            }
            What::Folded { count, disk_bytes } => {
                (folded(count, disk_bytes), String::new(), 0, "folded")
            }
        };
        widest = widest.max(x + (name.chars().count() + rest.chars().count() + 6) * LETTER);
        #[expect(clippy::cast_precision_loss, reason = "it is drawn")]
        let bar = (bytes as f64 / largest as f64 * BAR).max(1.0);
        let (text_y, box_y, bar_y) = (y + 16, y + 6, y + 20);
        body.push(format!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{box_y}\" width=\"12\" height=\"12\" rx=\"2\"/>\
             <rect class=\"bar\" x=\"{}\" y=\"{bar_y}\" width=\"{bar:.1}\" height=\"3\"/>\
             <text x=\"{}\" y=\"{text_y}\">{}<tspan class=\"dim\" dx=\"10\">{}</tspan></text>",
            x + 20,
            x + 20,
            escaped(&name),
            escaped(&rest),
        ));
    }
    let height = 2 * MARGIN + rows.len() * ROW_HEIGHT;
    let title = format!("{} images and which of them stand on which", forest.images().len());
    Picture { title: &title, width: widest + MARGIN, height, body: &body.join("\n") }.alone()
}

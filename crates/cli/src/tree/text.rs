//! A forest as text, in the manner of tree(1).

use super::rows::{Row, What, detail, folded};
use mica_stack::forest::{Forest, ForestImage};
use std::fmt::Write as _;

/// Columns beyond which nothing is moved further to the right.
const INDENT_MAX: usize = 3 * 40;

pub(super) fn draw(
    forest: &Forest,
    rows: &[Row],
    shown: impl Fn(&ForestImage) -> String,
) -> String {
    let mut text = String::new();
    // What stands before each row, and before those that stand on it.
    let (mut outsides, mut insides) = (Vec::<String>::new(), Vec::<String>::new());
    for row in rows {
        let before = match row.parent {
            None => String::new(),
            Some(parent) if row.is_straight => outsides[parent].clone(),
            Some(parent) => insides[parent].clone(),
        };
        let branch = match (row.parent, row.is_last) {
            (None, _) => "",
            (Some(_), true) => "└─ ",
            (Some(_), false) => "├─ ",
        };
        let what = match row.what {
            What::Image(id) => {
                let image = forest.get(id);
                format!("{}  {}", shown(image), detail(image))
            }
            What::Folded { count, disk_bytes } => folded(count, disk_bytes),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{before}{branch}{what}");
        let inner = match (row.parent, row.is_last) {
            (None, _) => "",
            (Some(_), true) => "   ",
            (Some(_), false) => "│  ",
        };
        let is_far = before.chars().count() > INDENT_MAX;
        insides.push(if is_far { before.clone() } else { format!("{before}{inner}") });
        outsides.push(before);
    }
    text
}

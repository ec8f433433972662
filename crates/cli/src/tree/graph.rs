//! A forest in the language of graphviz.

use super::rows::{Row, What, detail, folded};
use mica_stack::forest::{Forest, ForestImage};
use std::fmt::Write as _;

pub(super) fn draw(
    forest: &Forest,
    rows: &[Row],
    shown: impl Fn(&ForestImage) -> String,
) -> String {
    let mut text = "digraph images {\n  rankdir=LR;\n  node [shape=box];\n".to_owned();
    for (number, row) in rows.iter().enumerate() {
        let (label, style) = match row.what {
            What::Image(id) => {
                let image = forest.get(id);
                let label = [shown(image), detail(image)].map(|part| escaped(&part)).join("\\n");
                (label, if image.is_active() { ", style=bold" } else { "" })
            }
            What::Folded { count, disk_bytes } => {
                (escaped(&folded(count, disk_bytes)), ", style=dashed")
            }
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "  i{number} [label=\"{label}\"{style}];");
        if let Some(parent) = row.parent {
            let _ = writeln!(text, "  i{parent} -> i{number};");
        }
    }
    text + "}\n"
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

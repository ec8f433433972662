//! Tables for people.

use comfy_table::{CellAlignment, Table};

/// A table without rules; `numbers` are the right-aligned columns.
pub(crate) fn table(head: &[&str], numbers: &[usize], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_header(head).add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if numbers.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().fold(String::new(), |text, line| text + line.trim_end() + "\n")
}

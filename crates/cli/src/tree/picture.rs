//! A forest as a picture: a row for each image, with a bar as long as its size on disk.

use super::rows::{Row, What, detail, folded};
use crate::svg::{DrawnRow, draw_rows};
use mica_stack::forest::{Forest, ForestImage};

pub(super) fn draw(
    forest: &Forest,
    rows: &[Row],
    shown: impl Fn(&ForestImage) -> String,
) -> String {
    let drawn = rows.iter().map(|row| {
        let (name, detail, bytes, class) = match row.what {
            What::Image(id) => {
                let image = forest.get(id);
                let class = if image.is_active() { "active" } else { "frozen" };
                (shown(image), detail(image), image.disk_bytes, class)
            }
            What::Folded { count, disk_bytes } => {
                (folded(count, disk_bytes), String::new(), 0, "folded")
            }
        };
        let Row { parent, is_straight, .. } = *row;
        DrawnRow { parent, is_straight, class, name, detail, bytes: Some(bytes) }
    });
    let title = format!("{} images and which of them stand on which", forest.images().len());
    draw_rows(&title, &drawn.collect::<Vec<_>>())
}

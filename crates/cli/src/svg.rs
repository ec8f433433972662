//! Pictures as SVG, which follow the reader's choice of dark or light.

/// A picture.
pub(crate) struct Picture<'a> {
    /// What it shows, for those who do not see it.
    pub(crate) title: &'a str,
    pub(crate) width: usize,
    pub(crate) height: usize,
    /// The elements in it, which name classes of [`STYLE`].
    pub(crate) body: &'a str,
}

/// The colours and letters of all pictures.
pub(crate) const STYLE: &str = "\
svg{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--dim:#59636e;--grid:#d8dee4;--one:#0b62c4;\
--two:#b3450a;--three:#1a7f37;font:13px system-ui,sans-serif}\
@media(prefers-color-scheme:dark){svg{--paper:#15191f;--ink:#e6edf3;--dim:#9aa4af;--grid:#343c46;\
--one:#6cb0ff;--two:#ff9b5e;--three:#5fd37d}}\
svg text{fill:var(--ink)}svg .dim{fill:var(--dim)}svg .paper{fill:var(--paper)}\
svg .line{fill:none;stroke:var(--dim)}svg .grid{stroke:var(--grid)}\
svg .one{stroke:var(--one);fill:none;stroke-width:2}svg .two{stroke:var(--two);fill:none;\
stroke-width:2;stroke-dasharray:7 3}svg .three{stroke:var(--three);fill:none;stroke-width:2;\
stroke-dasharray:2 3}\
svg .active{fill:var(--one)}svg .frozen{fill:none;stroke:var(--one);stroke-width:1.5}\
svg .folded{fill:none;stroke:var(--dim);stroke-dasharray:2 2}svg .bar,svg .dot{fill:var(--one)}\
svg .dot{fill-opacity:.45;stroke:var(--one)}";

impl Picture<'_> {
    /// As a part of a page that has [`STYLE`].
    pub(crate) fn within(&self) -> String {
        let Self { title, width, height, body } = self;
        let title = escaped(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{title}\" \
             viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\">\
             <title>{title}</title>\n{body}\n</svg>\n"
        )
    }

    /// As a file of its own.
    pub(crate) fn alone(&self) -> String {
        let paper = format!(
            "<style>{STYLE}</style><rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n{}",
            self.body
        );
        Picture { body: &paper, ..*self }.within()
    }
}

/// A row of a picture of what stands on what, which comes after that of what it stands on.
pub(crate) struct DrawnRow {
    pub(crate) parent: Option<usize>,
    /// Whether it is drawn below its parent and not beside it.
    pub(crate) is_straight: bool,
    /// Its class in [`STYLE`].
    pub(crate) class: &'static str,
    pub(crate) name: String,
    /// What is said of it behind its name.
    pub(crate) detail: String,
    /// How long its bar is, compared with the others; none if it has no bar.
    pub(crate) bytes: Option<u64>,
}

const ROW_HEIGHT: usize = 24;
const INDENT: usize = 22;
/// Levels beyond which nothing is moved further to the right.
const LEVELS_MAX: usize = 40;
/// Length of the longest bar.
const BAR: f64 = 90.0;
const MARGIN: usize = 16;
/// Room for a letter.
const LETTER: usize = 8;

/// A picture of `rows`.
pub(crate) fn draw_rows(title: &str, rows: &[DrawnRow]) -> String {
    let largest = rows.iter().filter_map(|row| row.bytes).max().unwrap_or(0).max(1);
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
        let DrawnRow { class, name, detail, .. } = row;
        widest = widest.max(x + (name.chars().count() + detail.chars().count() + 6) * LETTER);
        let (text_x, text_y, box_y) = (x + 20, y + 16, y + 6);
        body.push(format!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{box_y}\" width=\"12\" height=\"12\" rx=\"2\"/>\
             {}<text x=\"{text_x}\" y=\"{text_y}\">{}<tspan class=\"dim\" dx=\"10\">{}</tspan></text>",
            row.bytes.map_or(String::new(), |bytes| bar(bytes, largest, text_x, y + 20)),
            escaped(name),
            escaped(detail),
        ));
    }
    let height = 2 * MARGIN + rows.len() * ROW_HEIGHT;
    Picture { title, width: widest + MARGIN, height, body: &body.join("\n") }.alone()
}

fn bar(bytes: u64, largest: u64, x: usize, y: usize) -> String {
    #[expect(clippy::cast_precision_loss, reason = "it is drawn")]
    let width = (bytes as f64 / largest as f64 * BAR).max(1.0);
    format!("<rect class=\"bar\" x=\"{x}\" y=\"{y}\" width=\"{width:.1}\" height=\"3\"/>")
}

/// `text` as it stands in XML.
pub(crate) fn escaped(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut all, letter| {
        match letter {
            '&' => all.push_str("&amp;"),
            '<' => all.push_str("&lt;"),
            '>' => all.push_str("&gt;"),
            '"' => all.push_str("&quot;"),
            letter if letter.is_control() => all.push('\u{fffd}'),
            letter => all.push(letter),
        }
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_place() {
        assert_eq!(escaped("a<b>&\"\u{1b}"), "a&lt;b&gt;&amp;&quot;\u{fffd}");
        let picture = Picture { title: "<script>", width: 1, height: 1, body: "" };
        assert!(!picture.alone().contains("<script>"));
    }
}

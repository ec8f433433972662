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

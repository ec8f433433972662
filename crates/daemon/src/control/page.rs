//! The page for people: one document that needs nothing else.

/// Its parts are files of their own: what it is made of, what it looks like, and what it does.
pub(super) const PAGE: &str = concat!(
    include_str!("page/head.html"),
    "<style>\n",
    include_str!("page/style.css"),
    "</style>\n",
    include_str!("page/body.html"),
    "<script>\n",
    include_str!("page/figures.js"),
    include_str!("page/charts.js"),
    include_str!("page/table.js"),
    include_str!("page/details.js"),
    include_str!("page/main.js"),
    "</script>\n</body>\n</html>\n",
);

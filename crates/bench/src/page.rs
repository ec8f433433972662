//! The pages of all benches: what was measured and where, the goals, tables, the plots.

use super::goal::Goal;
use super::plots::Plot;
use super::samples::Samples;
use std::fmt::Write;

/// The findings of a bench.
pub(super) struct Found<'a> {
    /// Facts of the machine.
    pub(super) machine: &'a [(String, String)],
    /// Whether it was a smoke run.
    pub(super) quick: bool,
    /// The figures.
    pub(super) samples: &'a Samples,
    /// What they mean for the goals.
    pub(super) goals: &'a [Goal],
    /// Plots of them.
    pub(super) plots: &'a [Plot],
}

impl Found<'_> {
    /// The page, with `tables` between its goals and its plots.
    pub(super) fn page(
        &self,
        title: &str,
        verified: &str,
        tables: impl FnOnce(&mut String),
    ) -> String {
        let mut page = format!("# {title}\n\n");
        self.head(&mut page, verified);
        self.goals(&mut page);
        tables(&mut page);
        self.plots(&mut page);
        page
    }

    fn head(&self, page: &mut String, verified: &str) {
        if self.quick {
            page.push_str("**A smoke run: few runs, short loads. Not a result.**\n\n");
        }
        page.push_str(
            "Medians of runs in which the servers took turns; ratios count, absolute times belong \
             to the machine. ",
        );
        line(page, verified);
        page.push('\n');
        for (what, said) in self.machine {
            line(page, &format!("- {what}: {said}"));
        }
        if let Some(load) = self.samples.load_average() {
            line(page, &format!("- load average when runs began, median: {load:.2}"));
        }
    }

    fn goals(&self, page: &mut String) {
        page.push_str("\n## Goals\n\n| goal | wanted | measured | |\n|---|---|---|---|\n");
        for goal in self.goals {
            let measured =
                goal.measured.map_or("not measured".to_owned(), |value| digits(value, 3));
            let reached = match (goal.reached, &goal.note) {
                (Some(true), _) => "reached",
                (Some(false), _) => "**missed**",
                (None, note) => note.as_deref().unwrap_or_default(),
            };
            line(page, &format!("| {} | {} | {measured} | {reached} |", goal.what, goal.wanted));
        }
    }

    /// The plots, to be looked at beside the page.
    fn plots(&self, page: &mut String) {
        if !self.plots.is_empty() {
            page.push_str("\n## Plots\n");
        }
        for Plot { file, title } in self.plots {
            line(page, &format!("\n![{title}]({file})"));
        }
    }
}

/// A column of a table: what, figure, digits after the point.
pub(super) type Column = (&'static str, &'static str, usize);

/// A table of medians.
pub(super) struct Table<'a> {
    /// Its heading.
    pub(super) title: &'a str,
    /// The heading of its first column.
    pub(super) first: &'a str,
    /// The figures.
    pub(super) columns: &'a [Column],
}

/// Rows of a table: a part of the samples, with a row for each server.
pub(super) struct Rows {
    /// The entry in the first column.
    pub(super) name: String,
    /// The same, for the note that runs failed.
    pub(super) in_words: String,
    /// The part.
    pub(super) part: String,
    /// Layers of its images.
    pub(super) layers: u32,
}

impl Table<'_> {
    /// Adds it to `page`, followed by its failures; nothing if there are no rows.
    pub(super) fn put(&self, page: &mut String, samples: &Samples, rows: &[Rows]) {
        if rows.is_empty() {
            return;
        }
        line(page, &format!("\n## {}\n", self.title));
        let heads: Vec<_> = self.columns.iter().map(|(what, ..)| *what).collect();
        line(page, &format!("| {} | server | runs | {} |", self.first, heads.join(" | ")));
        line(page, &format!("|{}", "---|".repeat(self.columns.len() + 3)));
        let mut failures = Vec::new();
        for Rows { name, in_words, part, layers } in rows {
            for server in samples.servers(part) {
                let runs = samples.of(part, &server, *layers).count();
                if runs > 0 {
                    let cells = self.cells(samples, part, &server, *layers).join(" | ");
                    line(page, &format!("| {name} | {server} | {runs} | {cells} |"));
                }
                let errors = samples.errors(part, &server, *layers);
                if let Some(first) = errors.first() {
                    failures.push(format!("{server}, {in_words}, {} runs: {first}", errors.len()));
                }
            }
        }
        for failure in failures {
            line(page, &format!("\n**Failed:** {failure}"));
        }
    }

    fn cells(&self, samples: &Samples, part: &str, server: &str, layers: u32) -> Vec<String> {
        let cell = |(_, metric, after_point): &Column| {
            let value = samples.median(part, server, layers, metric);
            value.map_or("-".to_owned(), |value| format!("{value:.after_point$}"))
        };
        self.columns.iter().map(cell).collect()
    }
}

/// Adds a table of `part` in which each number of layers has its rows.
pub(super) fn by_layers(
    page: &mut String,
    samples: &Samples,
    part: &str,
    title: &str,
    columns: &[Column],
) {
    let rows = samples.layers(part).into_iter().map(|layers| Rows {
        name: layers.to_string(),
        in_words: format!("{layers} layers"),
        part: part.to_owned(),
        layers,
    });
    Table { title, first: "layers", columns }.put(page, samples, &rows.collect::<Vec<_>>());
}

/// A figure with its significant digits.
pub(super) fn digits(value: f64, significant: usize) -> String {
    let size = value.abs();
    let whole = if size >= 1000.0 {
        0
    } else if size >= 100.0 {
        1
    } else {
        2
    };
    if size > 0.0 && size < 0.01 {
        format!("{value:.significant$e}")
    } else {
        format!("{value:.whole$}")
    }
}

/// Adds a line.
pub(super) fn line(page: &mut String, words: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(page, "{words}");
}

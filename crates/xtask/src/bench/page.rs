//! What the pages of all benches have: what was measured and where, the goals, the plots.

use super::goal::Goal;
use super::plots::Plot;
use super::samples::Samples;
use std::fmt::Write;

/// The beginning of a page.
pub(super) fn head(
    title: &str,
    quick: bool,
    verified: &str,
    machine: &[(String, String)],
    samples: &Samples,
) -> String {
    let mut page = format!("# {title}\n\n");
    if quick {
        page.push_str("**A quick look: few runs, short loads. No result.**\n\n");
    }
    page.push_str(
        "Medians of runs in which the servers took turns; ratios count, absolute times belong to \
         the machine. ",
    );
    line(&mut page, verified);
    page.push('\n');
    for (what, said) in machine {
        line(&mut page, &format!("- {what}: {said}"));
    }
    if let Some(load) = samples.load_average() {
        line(&mut page, &format!("- load average when runs began, median: {load:.2}"));
    }
    page
}

/// The table of goals.
pub(super) fn goals(page: &mut String, goals: &[Goal]) {
    page.push_str("\n## Goals\n\n| goal | wanted | measured | |\n|---|---|---|---|\n");
    for goal in goals {
        let measured = goal.measured.map_or("not measured".to_owned(), |value| digits(value, 3));
        let reached = match (goal.reached, &goal.note) {
            (Some(true), _) => "reached",
            (Some(false), _) => "**missed**",
            (None, note) => note.as_deref().unwrap_or_default(),
        };
        line(page, &format!("| {} | {} | {measured} | {reached} |", goal.what, goal.wanted));
    }
}

/// The plots, to be looked at beside the page.
pub(super) fn plots(page: &mut String, plots: &[Plot]) {
    if !plots.is_empty() {
        page.push_str("\n## Plots\n");
    }
    for Plot { file, title } in plots {
        line(page, &format!("\n![{title}]({file})"));
    }
}

/// A figure with the digits that mean something.
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

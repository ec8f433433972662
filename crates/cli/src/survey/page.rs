//! The survey as a page: figures as pictures in it, the same numbers as tables beneath them. It
//! loads nothing, and runs nothing.

use super::chart::{Axis, Chart, Scale};
use super::figures::{Counts, Elapsed, Figures};
use crate::calendar::utc;
use crate::output::human_size;
use crate::svg::{STYLE, escaped};
use std::fmt::Write as _;

/// What every page begins with, and hardly any other.
pub(super) const START: &str = "\
<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
<title>Images in ";

const PAGE_STYLE: &str = "\
:root{color-scheme:light dark;--page:#fff;--text:#1b1f24;--soft:#59636e;--edge:#d8dee4}\
@media(prefers-color-scheme:dark){:root{--page:#15191f;--text:#e6edf3;--soft:#9aa4af;\
--edge:#343c46}}\
body{font:16px/1.5 system-ui,sans-serif;max-width:66rem;margin:2rem auto;padding:0 1rem;\
background:var(--page);color:var(--text)}\
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2.2rem}\
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:1rem;margin:1rem 0}\
dt{color:var(--soft);font-size:.85rem}dd{margin:0;font-size:1.4rem}\
figure{margin:1rem 0}figure svg{max-width:100%;height:auto}figcaption,.note{color:var(--soft)}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}\
th,td{padding:.2rem .9rem .2rem 0;text-align:left;border-bottom:1px solid var(--edge)}\
td.n,th.n{text-align:right}details{margin:.5rem 0}.wide{overflow-x:auto}";

/// A table: its head, the columns that are numbers, and its rows.
type Table<'a> = (&'a [&'a str], &'a [usize], Vec<Vec<String>>);

/// The page of what is in `folders`. `suffering` is a table of the chains that do.
pub(super) fn page(figures: &Figures, folders: &str, suffering: Vec<Vec<String>>) -> String {
    let (mut body, folders) = (String::new(), escaped(folders));
    let _ = write!(body, "<h1>Images in {folders}</h1>\n{}", summary(figures));
    body += "<p class=\"note\">Figures as in section 3 of <cite>Virtual Disk Snapshot Management at \
             Scale</cite>, of these images, by their headers alone.</p>\n";
    body += &sizes(figures);
    body += &growth(figures);
    body += &lengths(figures);
    body += &sharing(figures);
    body += &snapshots(figures);
    body += &streaming(figures);
    let head = &["Image", "Length", "Shared layers", "On disk", "Why"][..];
    let note = format!(
        "{} of {} chains. Those that are long and have no index come first: mica index build \
         writes one, and mica serve does so by itself.",
        figures.suffering_count,
        figures.chains(),
    );
    let _ = write!(
        body,
        "<section><h2>Chains that suffer</h2>\n<p class=\"note\">{}</p>\n{}</section>\n",
        escaped(&note),
        table(&(head, &[1, 2, 3], suffering)),
    );
    format!(
        "{START}{folders}</title>\n<style>{PAGE_STYLE}{STYLE}</style></head>\n<body><main>\n{body}\
         </main></body></html>\n",
    )
}

fn summary(figures: &Figures) -> String {
    let items = [
        ("Chains", figures.chains().to_string()),
        ("Images", figures.files().to_string()),
        ("Longest chain", figures.longest_now().to_string()),
        ("Length of all disks", human_size(figures.virtual_bytes)),
        ("On disk", human_size(figures.disk_bytes)),
        ("Chains that suffer", figures.suffering_count.to_string()),
    ];
    let items = items.map(|(name, value)| format!("<div><dt>{name}</dt><dd>{value}</dd></div>"));
    format!("<dl>{}</dl>\n", items.join("\n"))
}

/// A section with a figure, and its numbers behind a click.
fn section(title: &str, picture: &str, caption: &str, numbers: &Table<'_>) -> String {
    format!(
        "<section><h2>{0}</h2>\n<figure>{picture}<figcaption>{1}</figcaption></figure>\n\
         <details><summary>The numbers</summary>{2}</details></section>\n",
        escaped(title),
        escaped(caption),
        table(numbers)
    )
}

fn table((head, numbers, rows): &Table<'_>) -> String {
    let class = |column| if numbers.contains(&column) { " class=\"n\"" } else { "" };
    let cells = |tag: &str, row: &[String]| -> String {
        let cell = |(column, text): (usize, &String)| {
            format!("<{tag}{}>{}</{tag}>", class(column), escaped(text))
        };
        row.iter().enumerate().map(cell).collect()
    };
    let head: Vec<String> = head.iter().map(|&name| name.to_owned()).collect();
    let rows: String = rows.iter().map(|row| format!("<tr>{}</tr>\n", cells("td", row))).collect();
    format!(
        "<div class=\"wide\"><table><thead><tr>{}</tr></thead><tbody>\n{rows}</tbody></table></div>",
        cells("th", &head)
    )
}

#[expect(clippy::cast_precision_loss, reason = "it is drawn")]
fn float(number: u64) -> f64 {
    number as f64
}

/// Which part of all has at most each value.
pub(super) fn shares(counts: &Counts) -> Vec<(f64, f64)> {
    let all = float(counts.values().sum::<u64>()).max(1.0);
    let mut sum = 0.0;
    let point = |(value, count): (&u64, &u64)| {
        sum += float(*count);
        (float(*value), sum / all)
    };
    counts.iter().map(point).collect()
}

/// Counts of two kinds by value, as rows.
fn rows_of([one, other]: [&Counts; 2], shown: impl Fn(u64) -> String) -> Vec<Vec<String>> {
    let values: std::collections::BTreeSet<u64> = one.keys().chain(other.keys()).copied().collect();
    let count = |counts: &Counts, value| counts.get(&value).copied().unwrap_or(0).to_string();
    let row = |value| vec![shown(value), count(one, value), count(other, value)];
    values.into_iter().map(row).collect()
}

fn sizes(figures: &Figures) -> String {
    let [active, frozen] = &figures.sizes;
    let units =
        [(20, "1 MiB"), (30, "1 GiB"), (33, "8 GiB"), (36, "64 GiB"), (40, "1 TiB"), (43, "8 TiB")];
    let largest = active.keys().chain(frozen.keys()).max().copied().unwrap_or(1);
    let smallest = active.keys().chain(frozen.keys()).min().copied().unwrap_or(1).max(1);
    let marks = units.map(|(power, text)| (2_f64.powi(power), text.to_owned()));
    let inside = |(at, _): &(f64, String)| *at >= float(smallest) && *at <= float(largest) * 1.01;
    let x = Axis {
        label: "Length of the disk".to_owned(),
        scale: Scale::Logarithmic,
        from: float(smallest),
        to: float(largest).max(float(smallest) * 2.0),
        marks: marks.into_iter().filter(inside).collect(),
    };
    let y = Axis::share("Share of images");
    let mut chart = Chart::new("Shares of images by the length of their disk", &x, &y);
    chart.steps("active images", &shares(active));
    chart.steps("frozen layers", &shares(frozen));
    section(
        "Lengths of disks",
        &chart.finish(),
        "Which part of the images has a disk of at most this length (figure 4).",
        &(&["Length", "Active", "Frozen"], &[0, 1, 2], rows_of([active, frozen], human_size)),
    )
}

fn growth(figures: &Figures) -> String {
    let points = &figures.longest;
    let (first, last) = match (points.first(), points.last()) {
        (Some((first, _)), Some((last, _))) => (*first, (*last).max(first + 1)),
        _ => (0, 1),
    };
    let mark = |quarter: u64| {
        let at = first + (last - first) * quarter / 4;
        (float(at), utc(at)[..10].to_owned())
    };
    let x = Axis {
        label: "Date".to_owned(),
        scale: Scale::Linear,
        from: float(first),
        to: float(last),
        marks: (0..=4).map(mark).collect(),
    };
    let y = Axis::linear("Layers of the longest chain", float(figures.longest_now()));
    let mut chart = Chart::new("The longest chain over time", &x, &y);
    let places: Vec<_> = points.iter().map(|(at, length)| (float(*at), float(*length))).collect();
    chart.steps("longest chain", &places);
    let row = |(at, length): &(u64, u64)| vec![utc(*at), length.to_string()];
    section(
        "The longest chain",
        &chart.finish(),
        "As its layers, and those of others, were created; layers that were merged or removed do \
         not show (figure 5).",
        &(&["When", "Layers"], &[1], points.iter().map(row).collect()),
    )
}

fn lengths(figures: &Figures) -> String {
    let [chains, files] = &figures.lengths;
    let x = Axis::counts("Layers of the chain", float(figures.longest_now()));
    let y = Axis::share("Share");
    let mut chart = Chart::new("Shares of chains and of files by the length of the chain", &x, &y);
    chart.steps("chains", &shares(chains));
    chart.steps("files", &shares(files));
    let shown = |length: u64| length.to_string();
    section(
        "Lengths of chains",
        &chart.finish(),
        "Which part of the chains has at most so many layers, and which part of the files is in \
         such a chain; a file that several chains have counts with the longest (figure 6).",
        &(&["Layers", "Chains", "Files"], &[0, 1, 2], rows_of([chains, files], shown)),
    )
}

fn sharing(figures: &Figures) -> String {
    let most = figures.sharing.keys().map(|(_, shared)| *shared).max().unwrap_or(0);
    let x = Axis::counts("Layers of the chain", float(figures.longest_now()));
    let y = Axis::linear("Layers that other chains have, too", float(most));
    let mut chart = Chart::new("Chains by their length and the layers that they share", &x, &y);
    let point = |((length, shared), count): (&(u64, u64), &u64)| {
        ((float(*length), float(*shared)), float(*count))
    };
    chart.dots(&figures.sharing.iter().map(point).collect::<Vec<_>>());
    let all = figures.files().max(1);
    let row = |(chains, files): (&u64, &u64)| {
        let share = format!("{:.1}%", float(*files) / float(all) * 100.0);
        vec![chains.to_string(), files.to_string(), share]
    };
    section(
        "Sharing",
        &chart.finish(),
        "A dot for the chains of a length that share so many of their frozen layers (figures 7 \
         and 8). The numbers are files by how many chains have them.",
        &(
            &["Chains that have it", "Files", "Share"],
            &[0, 1, 2],
            figures.sharers.iter().map(row).collect(),
        ),
    )
}

fn snapshots(figures: &Figures) -> String {
    let furthest = figures.snapshots.keys().map(|(position, _)| *position).max().unwrap_or(1);
    let x = Axis::counts("Position in the chain", float(furthest));
    let marks = (0_u32..).zip(Elapsed::ALL);
    let marks = marks.map(|(place, elapsed)| (f64::from(place), elapsed.name().to_owned()));
    let y = Axis {
        label: "Time since the layer before, less than a".to_owned(),
        scale: Scale::Linear,
        from: -0.5,
        to: 5.5,
        marks: marks.collect(),
    };
    let mut chart = Chart::new("Snapshots by position and time since the one before", &x, &y);
    let place = |elapsed: Elapsed| {
        let at = Elapsed::ALL.iter().position(|one| *one == elapsed).unwrap_or(0);
        float(at as u64)
    };
    let point = |((position, elapsed), count): (&(u64, Elapsed), &u64)| {
        ((float(*position), place(*elapsed)), float(*count))
    };
    chart.dots(&figures.snapshots.iter().map(point).collect::<Vec<_>>());
    let all: u64 = figures.snapshots.values().sum();
    let row = |elapsed: Elapsed| {
        let counted = figures.snapshots.iter().filter(|((_, one), _)| *one == elapsed);
        let count: u64 = counted.map(|(_, count)| count).sum();
        let share = format!("{:.1}%", float(count) / float(all.max(1)) * 100.0);
        vec![elapsed.name().to_owned(), count.to_string(), share]
    };
    section(
        "Snapshots",
        &chart.finish(),
        "A dot for the snapshots that froze a layer at this position so long after the one before \
         it; the larger, the more (figure 9). By the times of files.",
        &(
            &["Less than a", "Snapshots", "Share"],
            &[1, 2],
            Elapsed::ALL.map(row).into_iter().collect(),
        ),
    )
}

fn streaming(figures: &Figures) -> String {
    let text = super::streaming_text(&figures.streaming);
    format!("<section><h2>What merging would free</h2>\n<p>{}</p></section>\n", escaped(&text))
}

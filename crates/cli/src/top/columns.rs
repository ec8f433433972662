//! The columns of the screen: as many as fit, each as a whole.

use super::order::{Problem, errors};
use super::rates::{Rates, number};
use crate::ctl::{duration, text};
use crate::output::human_size;
use crate::plain::plain;
use serde_json::Value;

/// Between two columns.
const GAP: usize = 2;
/// The least of a disk's name that is shown.
const NAME_MIN: usize = 12;
/// The least of the notes that is worth a column.
const NOTES_MIN: usize = 12;

struct Column {
    title: &'static str,
    /// What it usually needs: a column does not change its width at every update.
    width: usize,
    cell: fn(&Rates<'_>) -> String,
    total: fn(&[Rates<'_>]) -> String,
}

/// Columns between the name and the notes, as they stand.
const COLUMNS: [Column; 13] = [
    Column { title: "STATE", width: 9, cell: state, total: |_| String::new() },
    Column {
        title: "R/S",
        width: 5,
        cell: |it| rate(it.reads),
        total: |all| rate(sum(all, |it| it.reads)),
    },
    Column {
        title: "W/S",
        width: 5,
        cell: |it| rate(it.writes),
        total: |all| rate(sum(all, |it| it.writes)),
    },
    Column {
        title: "R MIB/S",
        width: 7,
        cell: |it| mib(it.read_bytes),
        total: |all| mib(sum(all, |it| it.read_bytes)),
    },
    Column {
        title: "W MIB/S",
        width: 7,
        cell: |it| mib(it.written_bytes),
        total: |all| mib(sum(all, |it| it.written_bytes)),
    },
    Column {
        title: "R MEAN",
        width: 6,
        cell: |it| time(it.read.mean_us()),
        total: |_| String::new(),
    },
    Column {
        title: "R P99",
        width: 6,
        cell: |it| time(it.read.p99_us()),
        total: |_| String::new(),
    },
    Column {
        title: "W MEAN",
        width: 6,
        cell: |it| time(it.write.mean_us()),
        total: |_| String::new(),
    },
    Column {
        title: "W P99",
        width: 6,
        cell: |it| time(it.write.p99_us()),
        total: |_| String::new(),
    },
    Column {
        title: "ERR",
        width: 4,
        cell: |it| whole(errors(it)),
        total: |all| whole(all.iter().map(errors).sum()),
    },
    Column { title: "HITS", width: 6, cell: |it| percent(it.hit_rate), total: |_| String::new() },
    // How full the write log of a volume is.
    Column { title: "LOG", width: 6, cell: |it| percent(log(it)), total: |_| String::new() },
    Column {
        title: "CLIENTS",
        width: 7,
        cell: |it| text(&it.disk["clients"]),
        total: |all| whole(all.iter().map(clients).sum()),
    },
];

/// The order in which columns are given room, by title.
const IMPORTANCE: [&str; 13] = [
    "STATE", "R/S", "W/S", "R MIB/S", "W MIB/S", "ERR", "R P99", "W P99", "R MEAN", "W MEAN",
    "CLIENTS", "HITS", "LOG",
];

/// Lines of equal columns.
pub(super) struct Table {
    pub(super) head: String,
    pub(super) total: String,
    pub(super) rows: Vec<String>,
}

/// The disks `shown` of `all`, in lines of at most `width` columns.
pub(super) fn table(all: &[Rates<'_>], shown: &[&Rates<'_>], width: usize) -> Table {
    let name = |it: &Rates<'_>| text(&it.disk["name"]);
    let names: Vec<_> = shown.iter().map(|it| name(it)).collect();
    let total_name = match all.len() {
        1 => "1 disk".to_owned(),
        count => format!("{count} disks"),
    };
    let longest = names.iter().chain([&total_name]).map(|name| length(name)).max().unwrap_or(0);
    let mut columns: Vec<_> =
        COLUMNS.iter().map(|column| Filled::new(column, all, shown)).collect();
    let mut left = width.saturating_sub(longest.clamp(4, NAME_MIN));
    for title in IMPORTANCE {
        let column = columns.iter_mut().find(|it| it.column.title == title);
        let Some(column) = column.filter(|it| it.width + GAP <= left) else { break };
        left -= column.width + GAP;
        column.is_shown = true;
    }
    columns.retain(|column| column.is_shown);
    // What is left is for the whole of the names, and then for notes.
    let more = longest.saturating_sub(NAME_MIN).min(left);
    let name_width = longest.clamp(4, NAME_MIN) + more;
    let notes_width = (left - more).saturating_sub(GAP);
    let has_notes = notes_width >= NOTES_MIN;
    let line = |name: &str, cell: &dyn Fn(&Filled) -> String, notes: String| {
        let mut line = padded(&shortened(name, name_width), name_width);
        for column in &columns {
            line += &" ".repeat(GAP);
            line += &column.aligned(&cell(column));
        }
        if has_notes && !notes.is_empty() {
            line += &" ".repeat(GAP);
            line += &shortened(&notes, notes_width);
        }
        line.trim_end().to_owned()
    };
    // A disk that could not be served has no figures, but a reason.
    let row = |at: usize, name: &str, it: &Rates<'_>| {
        let state = columns.first().filter(|_| has_only_reason(it));
        let Some(state) = state else {
            return line(name, &|column| column.cells[at].clone(), notes(it));
        };
        let begin = padded(&shortened(name, name_width), name_width)
            + &" ".repeat(GAP)
            + &state.aligned(&state.cells[at])
            + &" ".repeat(GAP);
        let reason_width = width.saturating_sub(length(&begin));
        (begin + &middle_cut(&notes(it), reason_width)).trim_end().to_owned()
    };
    let rows = names.iter().zip(shown).enumerate();
    Table {
        head: line("DISK", &|it| it.column.title.to_owned(), "NOTES".to_owned()),
        total: line(&total_name, &|it| it.total.clone(), String::new()),
        rows: rows.map(|(at, (name, it))| row(at, name, it)).collect(),
    }
}

struct Filled {
    column: &'static Column,
    cells: Vec<String>,
    total: String,
    width: usize,
    is_shown: bool,
}

impl Filled {
    fn new(column: &'static Column, all: &[Rates<'_>], shown: &[&Rates<'_>]) -> Self {
        let cells: Vec<_> = shown.iter().map(|it| (column.cell)(it)).collect();
        let total = (column.total)(all);
        let longest = cells.iter().chain([&total]).map(|cell| length(cell)).max().unwrap_or(0);
        let width = longest.max(column.width).max(column.title.len());
        Self { column, cells, total, width, is_shown: false }
    }

    fn aligned(&self, cell: &str) -> String {
        match self.column.title {
            "STATE" => padded(cell, self.width),
            _ => " ".repeat(self.width.saturating_sub(length(cell))) + cell,
        }
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

fn padded(text: &str, width: usize) -> String {
    text.to_owned() + &" ".repeat(width.saturating_sub(length(text)))
}

/// `text`, or as much of it as fits with a sign that it goes on.
pub(super) fn shortened(text: &str, width: usize) -> String {
    if length(text) <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).take(width).collect()
}

/// As [`shortened`], but what ends it is kept: what is wrong comes after a path.
fn middle_cut(text: &str, width: usize) -> String {
    let len = length(text);
    if len <= width || width < NOTES_MIN {
        return shortened(text, width);
    }
    let begin = width / 4;
    let end = text.chars().skip(len - (width - begin - 1));
    text.chars().take(begin).chain(['…']).chain(end).collect()
}

/// Whether nothing is to be said of a disk but why it is not served.
fn has_only_reason(it: &Rates<'_>) -> bool {
    it.disk["state"] == "failed" && it.disk["failure"].is_string()
}

fn sum(all: &[Rates<'_>], of: fn(&Rates<'_>) -> f64) -> f64 {
    all.iter().map(of).sum()
}

fn log(it: &Rates<'_>) -> Option<f64> {
    let volume = &it.disk["volume"];
    let len = volume["log_bytes"].as_f64().filter(|len| *len > 0.0)?;
    Some(volume["log_used_bytes"].as_f64()? / len)
}

fn clients(it: &Rates<'_>) -> u64 {
    number(&it.disk["clients"])
}

/// The state, or what is worse about a disk that serves.
fn state(it: &Rates<'_>) -> String {
    let disk = it.disk;
    let has = |key: &str| !disk[key].is_null();
    match () {
        () if disk["state"] != "serving" => text(&disk["state"]),
        () if has("latch") => "latched".to_owned(),
        () if has("device_error") => "broken".to_owned(),
        () if it.delayed > 0 || number(&disk["volume"]["throttled"]) > 0 => "throttled".to_owned(),
        () if Problem::of(it) == Problem::Weakened => "weakened".to_owned(),
        () => text(&disk["state"]),
    }
}

/// Why it is so, and what else is special.
pub(super) fn notes(it: &Rates<'_>) -> String {
    let disk = it.disk;
    let mut notes = Vec::new();
    let reasons = ["failure", "latch", "device_error"];
    notes.extend(reasons.iter().find_map(|key| disk[*key].as_str()).map(plain));
    if errors(it) > 0 {
        notes.push(format!("{} errors in the last hour", errors(it)));
    }
    if it.delayed > 0 {
        notes.push("throttled".to_owned());
    }
    if number(&disk["volume"]["throttled"]) > 0 {
        notes.push("its log or its store is too slow".to_owned());
    }
    if !disk["merge"].is_null() {
        notes.push(merging(&disk["merge"]));
    }
    if disk["writable"] == false && disk["state"] == "serving" {
        notes.push("read-only".to_owned());
    }
    let (layers, indexed) = (number(&disk["layers"]), disk["indexed_layers"].as_u64());
    let below = layers.saturating_sub(1);
    match indexed.filter(|indexed| *indexed < below) {
        Some(indexed) => notes.push(format!("index {indexed}/{below}")),
        None if below > 0 => notes.push(format!("{layers} layers")),
        None => {}
    }
    notes.extend(disk["weakness"].as_str().filter(|_| disk["latch"].is_null()).map(plain));
    notes.join(", ")
}

/// A merge of layers: how far it is, how fast, and when it will be done at this rate.
fn merging(merge: &Value) -> String {
    let (kind, state) = (text(&merge["kind"]), text(&merge["state"]));
    let share = (number(&merge["done"]) * 100).checked_div(number(&merge["total"])).unwrap_or(0);
    let rate = human_size(number(&merge["rate"]));
    let left = merge["estimate_ms"].as_u64().map(|ms| format!(", {} left", duration(ms / 1000)));
    let state = if state == "running" { String::new() } else { format!("{state} ") };
    format!("{state}{kind} {share} %, {rate}/s{}", left.unwrap_or_default())
}

fn whole(count: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "four digits are shown")]
    rate(count as f64)
}

fn rate(per_second: f64) -> String {
    match per_second {
        0.0..9999.5 => format!("{per_second:.0}"),
        0.0..99_950.0 => format!("{:.1}k", per_second / 1e3),
        0.0..999_500.0 => format!("{:.0}k", per_second / 1e3),
        0.0..99_950_000.0 => format!("{:.1}M", per_second / 1e6),
        _ => format!("{:.0}M", per_second / 1e6),
    }
}

fn mib(bytes_per_second: f64) -> String {
    let mib = bytes_per_second / f64::from(1 << 20);
    if mib < 9999.95 { format!("{mib:.1}") } else { format!("{mib:.0}") }
}

fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "-".to_owned(), |part| format!("{:.1}%", part * 100.0))
}

fn time(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 999.5 => format!("{us:.0}us"),
        Some(us) if us < 99_950.0 => format!("{:.1}ms", us / 1e3),
        Some(us) if us < 999_500.0 => format!("{:.0}ms", us / 1e3),
        Some(us) => format!("{:.1}s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::between;
    use super::*;
    use serde_json::json;

    #[test]
    fn merges_under_way_are_told_in_the_notes() {
        let merge = json!({"kind": "stream", "state": "running", "done": 1 << 30,
            "total": 4_u64 << 30, "rate": 12 << 20, "estimate_ms": 61_000});
        assert_eq!(merging(&merge), "stream 25 %, 12 MiB/s, 1 min 1 s left");
        let paused = json!({"kind": "commit", "state": "paused", "done": 0, "total": 0});
        assert_eq!(merging(&paused), "paused commit 0 %, 0 B/s");
    }

    #[test]
    fn every_width_shows_whole_columns() {
        let read = json!({"count": 2, "sum_ns": 130_000_000, "buckets": [[131_072, 2]]});
        let answer = json!({"pid": 1, "uptime_ms": 1000, "disks": [{
            "name": "a-disk-with-a-name-of-sixty-four-letters-which-is-the-most-0001",
            "state": "serving", "clients": 12, "layers": 100, "indexed_layers": 3,
            "writable": false, "errors_lately": 1_234_567, "latency": {"nbd": {"read": read}},
            "nbd": {"reads": 1_310_000, "read_bytes": 20_u64 << 30}, "map": {"hits": 1},
        }]});
        let rates = between(&Value::Null, &answer);
        for width in 0..300 {
            let Table { head, total, rows } = table(&rates, &[&rates[0]], width);
            let longest = [&head, &total, &rows[0]].map(|line| length(line)).into_iter().max();
            assert!(longest <= Some(width.max(NAME_MIN)), "{width}: {head}\n{total}\n{}", rows[0]);
            for (title, cell) in
                [("R/S", " 1.3M"), ("R MIB/S", " 20480"), ("R P99", " 131ms"), ("ERR", " 1.2M")]
            {
                assert_eq!(head.contains(title), rows[0].contains(cell), "{width}: {}", rows[0]);
            }
        }
        let Table { head, rows, .. } = table(&rates, &[&rates[0]], 80);
        for title in ["STATE", "R/S", "W/S", "R MIB/S", "W MIB/S", "ERR", "R P99", "W P99"] {
            assert!(head.contains(title), "{head}");
        }
        assert!(rows[0].starts_with("a-disk-with-") && rows[0].contains('…'), "{}", rows[0]);
        let wide = &table(&rates, &[&rates[0]], 300).rows[0];
        assert!(wide.starts_with("a-disk-with-a-name-of-sixty-four-letters-which"), "{wide}");
        assert!(wide.ends_with("errors in the last hour, read-only, index 3/99"), "{wide}");
    }

    #[test]
    fn disk_that_is_not_served_says_why_on_a_narrow_screen() {
        let path = "/a/folder/of/images/with/a/name/that/is/long/enough/for/once/vm-7.qcow2";
        let failure = format!("opening {path}: No such file or directory (os error 2)");
        let answer = json!({"pid": 1, "uptime_ms": 1, "disks": [
            {"name": "vm-7", "state": "failed", "failure": failure},
            {"name": "vm-8", "state": "serving"},
        ]});
        let rates = between(&Value::Null, &answer);
        let shown: Vec<_> = rates.iter().collect();
        for width in 0..200 {
            let rows = table(&rates, &shown, width).rows;
            assert!(length(&rows[0]) <= width.max(NAME_MIN), "{width}: {}", rows[0]);
        }
        let rows = table(&rates, &shown, 80).rows;
        assert!(rows[0].starts_with("vm-7     failed     opening "), "{}", rows[0]);
        assert!(rows[0].ends_with("No such file or directory (os error 2)"), "{}", rows[0]);
        assert!(rows[1].ends_with(" 0"), "{}", rows[1]);
    }

    #[test]
    fn what_is_wrong_with_a_disk_is_its_state_and_its_note() {
        let of = |more: Value| {
            let mut disk = json!({"name": "a", "state": "serving"});
            disk.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let answer = json!({"pid": 1, "uptime_ms": 1, "disks": [disk]});
            let rates = between(&Value::Null, &answer);
            (state(&rates[0]), notes(&rates[0]))
        };
        let both = |state: &str, note: &str| (state.to_owned(), note.to_owned());
        assert_eq!(of(json!({})), both("serving", ""));
        let failed = json!({"state": "failed", "failure": "no\u{1b}[31m such file"});
        assert_eq!(of(failed), both("failed", "no\u{fffd}[31m such file"));
        assert_eq!(of(json!({"latch": "x", "weakness": "y"})), both("latched", "x"));
        assert_eq!(of(json!({"weakness": "version 2"})), both("weakened", "version 2"));
        assert_eq!(of(json!({"device_error": "gone"})), both("broken", "gone"));
        let slow = json!({"volume": {"throttled": 1}});
        assert_eq!(of(slow), both("throttled", "its log or its store is too slow"));
        let delayed = json!({"delayed": 3, "layers": 2, "indexed_layers": 1});
        assert_eq!(of(delayed), both("throttled", "throttled, 2 layers"));
    }

    #[test]
    fn column_of_the_log_says_how_full_it_is() {
        let volume = json!({"log_bytes": 1 << 30, "log_used_bytes": 1 << 28});
        let disks = json!([{"name": "a", "volume": volume}, {"name": "b"}]);
        let answer = json!({"pid": 1, "uptime_ms": 1, "disks": disks});
        let rates = between(&Value::Null, &answer);
        assert_eq!([0, 1].map(|at| percent(log(&rates[at]))), ["25.0%", "-"]);
    }

    #[test]
    fn numbers_have_few_digits_and_whole_units() {
        assert_eq!(
            [0.0, 9999.4, 9999.6, 99_960.0, 1e6, 2.5e9].map(rate),
            ["0", "9999", "10.0k", "100k", "1.0M", "2500M"]
        );
        assert_eq!(
            [0.2, 999.4, 999.6, 99_960.0, 999_600.0, 6e7].map(|us| time(Some(us))),
            ["0us", "999us", "1.0ms", "100ms", "1.0s", "60.0s"]
        );
        assert_eq!(mib(f64::from(1 << 20) * 9999.96), "10000");
    }
}

//! In which order disks are shown.

use super::rates::{Rates, number};
use clap::ValueEnum;
use std::cmp::Ordering;

/// What a request costs in the measure of load, besides its bytes.
const REQUEST_BYTES: f64 = 4096.0;

/// What disks are sorted by: the most first, but names from the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Sort {
    Problems,
    Load,
    Reads,
    Writes,
    Time,
    Errors,
    Name,
}

impl Sort {
    /// All with the key that selects them, which is the first letter of their name.
    pub(super) const ALL: [(char, Self, &'static str); 7] = [
        ('p', Self::Problems, "problems"),
        ('l', Self::Load, "load"),
        ('r', Self::Reads, "reads"),
        ('w', Self::Writes, "writes"),
        ('t', Self::Time, "time"),
        ('e', Self::Errors, "errors"),
        ('n', Self::Name, "name"),
    ];

    /// The one that `key` selects.
    pub(super) fn of_key(key: char) -> Option<Self> {
        Self::ALL.iter().find(|(letter, ..)| *letter == key).map(|(_, sort, _)| *sort)
    }

    /// What it is called.
    pub(super) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, sort, _)| *sort == self).map_or("", |(.., name)| name)
    }

    /// Sorts `rates`; equals stay in the server's order.
    pub(super) fn apply(self, rates: &mut [Rates<'_>]) {
        let more = |a: f64, b: f64| b.total_cmp(&a);
        rates.sort_by(|a, b| match self {
            Self::Problems => {
                Problem::of(b).cmp(&Problem::of(a)).then_with(|| more(load(a), load(b)))
            }
            Self::Load => more(load(a), load(b)),
            Self::Reads => more(a.reads, b.reads),
            Self::Writes => more(a.writes, b.writes),
            Self::Time => more(slowest(a), slowest(b)),
            Self::Errors => errors(b).cmp(&errors(a)),
            Self::Name => by_name(a, b),
        });
    }
}

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Problem {
    None,
    /// It promises less than it should.
    Weakened,
    /// Requests failed in the last hour.
    Errors,
    /// It does not do all that it is there for.
    Broken,
}

impl Problem {
    pub(super) fn of(rates: &Rates<'_>) -> Self {
        let disk = rates.disk;
        let has = |key: &str| !disk[key].is_null();
        if disk["state"] == "failed" || has("failure") || has("latch") || has("device_error") {
            Self::Broken
        } else if errors(rates) > 0 {
            Self::Errors
        } else if has("weakness") {
            Self::Weakened
        } else {
            Self::None
        }
    }
}

/// Errors in the last hour.
pub(super) fn errors(rates: &Rates<'_>) -> u64 {
    number(&rates.disk["errors_lately"])
}

fn load(rates: &Rates<'_>) -> f64 {
    let requests = rates.reads + rates.writes;
    rates.read_bytes + rates.written_bytes + requests * REQUEST_BYTES
}

fn slowest(rates: &Rates<'_>) -> f64 {
    let p99 = [rates.read.p99_us(), rates.write.p99_us()];
    p99.into_iter().flatten().fold(0.0, f64::max)
}

/// Numbers in names count as numbers: vm-9 comes before vm-10.
fn by_name(a: &Rates<'_>, b: &Rates<'_>) -> Ordering {
    let [a, b] = [a, b].map(|rates| rates.disk["name"].as_str().unwrap_or_default());
    pieces(a).cmp(pieces(b)).then_with(|| a.cmp(b))
}

/// Runs of digits, by length and value, and single other letters.
fn pieces(name: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut rest = name;
    std::iter::from_fn(move || {
        let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
        let first = rest.chars().next()?;
        let (piece, left) = rest.split_at(if end > 0 { end } else { first.len_utf8() });
        rest = left;
        let digits = piece.trim_start_matches('0');
        Some(if end > 0 { (digits.len(), digits) } else { (0, piece) })
    })
}

#[cfg(test)]
mod tests {
    use super::super::rates::between;
    use super::*;
    use serde_json::{Value, json};

    fn disk(name: &str, reads: u64, more: &Value) -> Value {
        let mut disk = json!({"name": name, "state": "serving", "nbd": {"reads": reads}});
        let entries = more.as_object().expect("an object").clone();
        disk.as_object_mut().expect("an object").extend(entries);
        disk
    }

    #[track_caller]
    fn check(sort: Sort, expected: [&str; 6]) {
        let answer = json!({"pid": 1, "uptime_ms": 1000, "disks": [
            disk("vm-10", 50, &json!({})),
            disk("vm-9", 10, &json!({"weakness": "none"})),
            disk("b", 0, &json!({"state": "failed", "failure": "gone"})),
            disk("a", 20, &json!({"latch": "a sync failed"})),
            disk("c", 90, &json!({"latency": {"nbd": {"read": {"buckets": [[4, 9]]}}}})),
            disk("vm-09x", 0, &json!({"errors_lately": 3})),
        ]});
        let mut rates = between(&Value::Null, &answer);
        sort.apply(&mut rates);
        let names: Vec<_> =
            rates.iter().map(|rates| rates.disk["name"].as_str().expect("a name")).collect();
        assert_eq!(names, expected, "{sort:?}");
    }

    #[test]
    fn disks_are_sorted_by_each_key() {
        check(Sort::Problems, ["a", "b", "vm-09x", "vm-9", "c", "vm-10"]);
        check(Sort::Load, ["c", "vm-10", "a", "vm-9", "b", "vm-09x"]);
        check(Sort::Reads, ["c", "vm-10", "a", "vm-9", "b", "vm-09x"]);
        check(Sort::Writes, ["vm-10", "vm-9", "b", "a", "c", "vm-09x"]);
        check(Sort::Time, ["c", "vm-10", "vm-9", "b", "a", "vm-09x"]);
        check(Sort::Errors, ["vm-09x", "vm-10", "vm-9", "b", "a", "c"]);
        check(Sort::Name, ["a", "b", "c", "vm-9", "vm-09x", "vm-10"]);
    }

    #[test]
    fn each_key_is_the_first_letter_of_what_it_sorts_by() {
        for (key, sort, name) in Sort::ALL {
            assert_eq!((Sort::of_key(key), name.chars().next()), (Some(sort), Some(key)));
            assert!(sort.to_possible_value().is_some_and(|value| value.get_name() == name));
        }
        assert_eq!(Sort::of_key('x'), None);
    }
}

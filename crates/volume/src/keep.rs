//! Which snapshots are kept that were taken automatically: rules, and what they say.
//!
//! ```text
//! 60s/10ms,1h/1s,1d/1h      of the last minute one every 10 ms, of the last hour one a second, …
//! ```
//!
//! Automatic snapshots are those without a label. Whoever wants to keep one gives it a label.
//! `volume::Volume::keep_snapshots` and `volumes::Volumes::keep_snapshots` apply the rules.
//!
//! Invariants
//! - I1 A snapshot with a label is never dropped.
//! - I2 The newest snapshot without one is never dropped.
//! - I3 What is kept does not depend on when it was looked, or how often: each interval, counted
//!   from 1970, keeps its first snapshot for as long as the interval is in the rule's time.

use mica_block::{Error, ErrorKind, Result, SnapshotInfo};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Rules in one text, at most.
const RULES_MAX: usize = 16;

/// After what of its guest a volume takes a snapshot by itself.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum SnapshotPer {
    /// After nothing: rules say when.
    #[default]
    Interval,
    /// After each request that changes the disk.
    Write,
    /// Before each flush after which something else was changed: what it makes durable.
    Flush,
}

/// Rules that say which automatic snapshots are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Keep {
    rules: Vec<Rule>,
    /// As they were written.
    text: String,
}

/// For `span`, one snapshot of each interval of length `every` is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Rule {
    span_ns: u64,
    every_ns: u64,
}

impl Keep {
    /// The shortest interval of all rules: what is taken more often is dropped at once.
    pub fn shortest(&self) -> Duration {
        let every = self.rules.iter().map(|rule| rule.every_ns).min();
        Duration::from_nanos(every.expect("there is a rule"))
    }

    /// Those of `snapshots` that are to be dropped at `now_ns`; the oldest first.
    pub(crate) fn dropped(&self, now_ns: u64, snapshots: Vec<SnapshotInfo>) -> Vec<SnapshotInfo> {
        let numbers = self.drops(now_ns, &snapshots);
        let mut all: BTreeMap<u64, SnapshotInfo> =
            snapshots.into_iter().map(|snapshot| (snapshot.number, snapshot)).collect();
        numbers.into_iter().filter_map(|number| all.remove(&number)).collect()
    }

    /// The numbers of those of `snapshots` that are to be dropped at `now_ns`, nanoseconds since
    /// 1970; the oldest first.
    pub fn drops(&self, now_ns: u64, snapshots: &[SnapshotInfo]) -> Vec<u64> {
        let automatic = snapshots.iter().filter(|snapshot| snapshot.label.is_empty());
        let mut automatic: Vec<_> =
            automatic.map(|snapshot| (snapshot.time_ns, snapshot.number)).collect();
        automatic.sort_unstable();
        // It leaves when the next one comes.
        automatic.pop();
        // They come by time: an interval that was had is the last one that was.
        let mut taken = vec![None; self.rules.len()];
        automatic.retain(|(time_ns, _)| {
            let mut is_kept = false;
            for (rule, taken) in self.rules.iter().zip(&mut taken) {
                let interval = Some(time_ns / rule.every_ns);
                let is_first = std::mem::replace(taken, interval) != interval;
                // A clock that was set back makes it young, not old.
                is_kept |= is_first && now_ns.saturating_sub(*time_ns) <= rule.span_ns;
            }
            !is_kept
        });
        automatic.into_iter().map(|(_, number)| number).collect()
    }
}

/// As they were written.
impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Keep {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: &str| {
            let what = format!(
                "{text:?} does not say which snapshots to keep: {why}; use for example \
                 60s/10ms,1h/1s,1d/1h: for how long, and how far apart"
            );
            Error::new(ErrorKind::Invalid, what)
        };
        let mut rules = Vec::new();
        for rule in text.split(',') {
            let (span, every) =
                rule.trim().split_once('/').ok_or_else(|| refuse("a rule has a '/'"))?;
            let [span, every] = [span, every].map(nanoseconds);
            let (Some(span_ns), Some(every_ns)) = (span, every) else {
                return Err(refuse("a time is a number with one of ms, s, m, h, d, w"));
            };
            if every_ns > span_ns {
                return Err(refuse("the first time of a rule is the longer one"));
            }
            rules.push(Rule { span_ns, every_ns });
        }
        if rules.len() > RULES_MAX {
            return Err(refuse(&format!("there are at most {RULES_MAX} rules")));
        }
        Ok(Self { rules, text: text.to_owned() })
    }
}

/// A time that is longer than nothing.
fn nanoseconds(text: &str) -> Option<u64> {
    let text = text.trim();
    let unit_at = text.find(|char: char| !char.is_ascii_digit())?;
    let (count, unit) = text.split_at(unit_at);
    let unit: u64 = match unit {
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "d" => 86_400_000_000_000,
        "w" => 604_800_000_000_000,
        _ => return None,
    };
    count.parse::<u64>().ok()?.checked_mul(unit).filter(|time| *time > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::Rng;
    use std::collections::BTreeSet;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;

    fn snapshot(number: u64, time_ns: u64, label: &str) -> SnapshotInfo {
        SnapshotInfo { number, label: label.to_owned(), time_ns, len: 512, records: number }
    }

    fn keep(text: &str) -> Keep {
        text.parse().expect("rules")
    }

    #[test]
    fn rules_are_read_and_nonsense_is_refused() {
        let rule = |span_ns, every_ns| Rule { span_ns, every_ns };
        let rules = vec![
            rule(60 * SECOND, 10 * MS),
            rule(3600 * SECOND, SECOND),
            rule(86_400 * SECOND, 3600 * SECOND),
        ];
        assert_eq!(keep("60s/10ms,1h/1s,1d/1h").rules, rules);
        assert_eq!(keep("1h/1s").to_string(), "1h/1s");
        assert_eq!(keep(" 1m/10ms , 60m/1s, 24h/1h").rules, rules);
        assert_eq!(keep("60s/10ms,2w/1d").shortest(), Duration::from_millis(10));
        let many = vec!["1d/1h"; RULES_MAX + 1].join(",");
        for bad in [
            "",
            ",",
            "1h",
            "1h/",
            "/1s",
            "1h/0s",
            "0s/0s",
            "1s/1h",
            "1h/1",
            "1h/1y",
            "-1h/1s",
            "1h/1s,",
            "1.5h/1s",
            "99999999999999999999s/1s",
            "18446744073709551615w/1s",
            "1h/1s/1ms",
            &many,
        ] {
            let refused = bad.parse::<Keep>().expect_err(bad);
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn snapshots_with_a_label_and_the_newest_are_kept_whatever_their_age() {
        let now = 1_000_000 * SECOND;
        let all = [
            snapshot(1, 1, "first"),
            snapshot(2, 2, ""),
            snapshot(3, 3, "third"),
            snapshot(4, 4, ""),
        ];
        assert_eq!(keep("1h/1s").drops(now, &all), [2]);
        assert_eq!(keep("1h/1s").drops(now, &all[..2]), Vec::<u64>::new());
        assert_eq!(keep("1h/1s").drops(now, &[]), Vec::<u64>::new());
    }

    #[test]
    fn each_rule_keeps_the_first_of_each_of_its_intervals() {
        let times = [100, 100_400, 100_900, 101_000, 101_999, 102_500].map(|ms| ms * MS);
        let all: Vec<_> = (1..).zip(times).map(|(n, time)| snapshot(n, time, "")).collect();
        // 1 is too old for the seconds, and the first of its minute; 6 is the newest.
        assert_eq!(keep("10s/1s,1h/1m").drops(103 * SECOND, &all), [3, 5]);
        assert_eq!(keep("10s/1s").drops(103 * SECOND, &all), [1, 3, 5]);
        assert_eq!(keep("1h/1h").drops(103 * SECOND, &all), [2, 3, 4, 5]);
        // A clock that was set back: they are as if taken now.
        assert_eq!(keep("10s/1s").drops(0, &all), [3, 5]);
    }

    /// A day of snapshots, at random times about half a second apart, looked through at random
    /// moments: there is one for every interval of every rule, and not many more.
    #[test]
    fn what_is_kept_covers_the_time_and_does_not_grow() {
        let rules = keep("10s/1s,10m/30s,1d/1h");
        for seed in 0..4 {
            let mut rng = Rng::new(seed);
            let (mut now, mut next) = (1_700_000_000 * SECOND, 1);
            let start = now;
            let mut all: Vec<SnapshotInfo> = Vec::new();
            let mut looked = 0;
            while now < start + 30 * 3600 * SECOND {
                all.push(snapshot(
                    next,
                    now,
                    if next.is_multiple_of(50_000) { "mine" } else { "" },
                ));
                next += 1;
                now += rng.below(1000 * MS);
                if !rng.percent(5) {
                    continue;
                }
                looked += 1;
                let dropped: BTreeSet<_> = rules.drops(now, &all).into_iter().collect();
                all.retain(|snapshot| !dropped.contains(&snapshot.number));
                assert!(rules.drops(now, &all).is_empty(), "seed {seed}: not at once");
                let automatic = all.iter().filter(|snapshot| snapshot.label.is_empty()).count();
                assert!(automatic <= 12 + 22 + 26, "seed {seed}: {automatic} are kept");
                for (span, every) in [(10, 1), (600, 30), (86_400, 3600)] {
                    covers(&all, start, now, span * SECOND, every * SECOND);
                }
            }
            assert!(looked > 1000);
            let mine = all.iter().filter(|snapshot| snapshot.label == "mine").count();
            assert_eq!(mine as u64, (next - 1) / 50_000);
        }
    }

    /// At each time of the last `span` there is a snapshot that is not much older than `every`.
    fn covers(all: &[SnapshotInfo], start: u64, now: u64, span: u64, every: u64) {
        let from = start.max(now - span) + every + SECOND;
        let mut last = None;
        for snapshot in all.iter().filter(|snapshot| snapshot.time_ns + every + SECOND >= from) {
            if let Some(last) = last {
                let gap = snapshot.time_ns - last;
                assert!(gap <= 2 * every + SECOND, "{gap} ns between two snapshots");
            }
            last = Some(snapshot.time_ns);
        }
        assert!(last.is_some_and(|last| now - last <= 2 * every + SECOND));
    }
}

//! Prometheus's text format, version 0.0.4.

use crate::stats::{Figure, Kind, Section};
use mica_serve::Latency;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter, Write as _};

/// The content type.
pub(in crate::control) const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

const LATENCY: &str = "mica_request_duration_seconds";

/// Where buckets end, in microseconds: ends of buckets of [`Latency`], each eight times the one
/// before. A thousand disks have three histograms each, and every bucket is a series; the page and
/// `mica top` show finer percentiles.
const BUCKET_ENDS_US: [u64; 5] = [1 << 8, 1 << 11, 1 << 14, 1 << 17, 1 << 20];

/// The page by metric name: all samples of a name stand together.
#[derive(Default)]
pub(super) struct Page(BTreeMap<String, Family>);

struct Family {
    kind: &'static str,
    help: &'static str,
    samples: String,
}

impl Page {
    fn family(&mut self, name: &str, kind: &'static str, help: &'static str) -> &mut String {
        let new = || Family { kind, help, samples: String::new() };
        &mut self.0.entry(name.to_owned()).or_insert_with(new).samples
    }

    /// What goes up and down.
    pub(super) fn gauge<const N: usize>(
        &mut self,
        name: &str,
        help: &'static str,
        labels: [(&str, &str); N],
        value: impl Display,
    ) {
        let samples = self.family(name, "gauge", help);
        sample(samples, name, &labels, value);
    }

    /// What only grows.
    pub(super) fn counter<const N: usize>(
        &mut self,
        name: &str,
        help: &'static str,
        labels: [(&str, &str); N],
        value: impl Display,
    ) {
        let samples = self.family(name, "counter", help);
        sample(samples, name, &labels, value);
    }

    /// The map, the write path or a server of a disk, if it was used.
    pub(super) fn section(&mut self, disk: &str, section: &Section) {
        if !section.is_used() {
            return;
        }
        for figure in section.figures.iter().flatten() {
            let (kind, name) = (kind_of(figure), name_of(section, figure));
            let samples = self.family(&name, kind, figure.help);
            sample(samples, &name, &[("disk", disk)], figure.value);
        }
        if let Some(latencies) = &section.latencies {
            let help = "How long requests took, as seen by the server.";
            let samples = self.family(LATENCY, "histogram", help);
            let used = latencies.each().into_iter().filter(|(_, latency)| latency.count() > 0);
            for (request, latency) in used {
                let labels = [("disk", disk), ("server", section.name), ("request", request)];
                histogram(samples, &labels, latency);
            }
        }
    }
}

fn kind_of(figure: &Figure) -> &'static str {
    match figure.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
    }
}

/// `reads` of `nbd` is `mica_nbd_reads_total`.
fn name_of(section: &Section, figure: &Figure) -> String {
    let ending = match figure.kind {
        Kind::Counter => "_total",
        Kind::Gauge => "",
    };
    format!("mica_{}_{}{ending}", section.name, figure.name)
}

fn histogram(samples: &mut String, labels: &[(&str, &str); 3], latency: &Latency) {
    let [disk, server, request] = *labels;
    let name = format!("{LATENCY}_bucket");
    let mut count = 0;
    for (below_us, more) in latency.buckets() {
        count += more;
        if BUCKET_ENDS_US.contains(&below_us) {
            let below = Seconds { value: below_us, digits: 6 }.to_string();
            sample(samples, &name, &[disk, server, request, ("le", &below)], count);
        }
    }
    sample(samples, &name, &[disk, server, request, ("le", "+Inf")], count);
    let sum = Seconds { value: latency.sum_ns(), digits: 9 };
    sample(samples, &format!("{LATENCY}_sum"), labels, sum);
    sample(samples, &format!("{LATENCY}_count"), labels, count);
}

/// A number of decimal fractions of a second, written in seconds, exactly.
struct Seconds {
    value: u64,
    digits: u32,
}

impl Display for Seconds {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let unit = 10_u64.pow(self.digits);
        let (whole, part) = (self.value / unit, self.value % unit);
        let width = self.digits as usize;
        let text = format!("{whole}.{part:0width$}");
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// One line.
fn sample(samples: &mut String, name: &str, labels: &[(&str, &str)], value: impl Display) {
    samples.push_str(name);
    for (index, (label, value)) in labels.iter().enumerate() {
        samples.push(if index == 0 { '{' } else { ',' });
        // Writing to a string does not fail.
        let _ = write!(samples, "{label}=\"{}\"", Escaped(value));
    }
    samples.push_str(if labels.is_empty() { "" } else { "}" });
    let _ = writeln!(samples, " {value}");
}

/// A label's value, escaped as the format requires.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                letter => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}

impl Display for Page {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (name, Family { kind, help, samples }) in &self.0 {
            write!(f, "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}")?;
        }
        Ok(())
    }
}

/// Every name that samples of these sections may have.
#[cfg(test)]
pub(super) fn names_of(sections: &[Section]) -> Vec<String> {
    let figures = |section: &Section| {
        let figures = section.figures.iter().flatten();
        figures.map(|figure| name_of(section, figure)).collect::<Vec<_>>()
    };
    let histogram = ["_bucket", "_sum", "_count"].map(|ending| format!("{LATENCY}{ending}"));
    sections.iter().flat_map(figures).chain(histogram).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut samples = String::new();
        sample(&mut samples, "x", &[("a", "\"\\\n}"), ("b", "\u{e4}")], 5);
        assert_eq!(samples, "x{a=\"\\\"\\\\\\n}\",b=\"\u{e4}\"} 5\n");
    }

    #[test]
    fn buckets_end_where_those_of_the_server_do() {
        let fine: Vec<_> = Latency::default().buckets().map(|(below, _)| below).collect();
        assert!(BUCKET_ENDS_US.iter().all(|end| fine.contains(end)), "{fine:?}");
        let mut samples = String::new();
        let labels = [("disk", "a"), ("server", "nbd"), ("request", "read")];
        histogram(&mut samples, &labels, &Latency::default());
        assert_eq!(samples.lines().count(), BUCKET_ENDS_US.len() + 3, "{samples}");
        assert!(samples.contains("request=\"read\",le=\"0.000256\"} 0\n"), "{samples}");
        assert!(samples.contains("le=\"1.048576\"} 0\n"), "{samples}");
    }

    #[test]
    fn seconds_are_exact() {
        let text = |value, digits| Seconds { value, digits }.to_string();
        assert_eq!(text(1, 6), "0.000001");
        assert_eq!(text(33_554_432, 6), "33.554432");
        assert_eq!(text(0, 9), "0");
        assert_eq!(text(2_000_000_000, 9), "2");
        assert_eq!(text(u64::MAX, 9), "18446744073.709551615");
    }

    #[test]
    fn samples_of_a_name_stand_together_whatever_the_order() {
        let mut page = Page::default();
        for disk in ["b", "a"] {
            page.gauge("y", "Why.", [("disk", disk)], 1);
            page.gauge("x", "What.", [("disk", disk)], 2);
        }
        let expected = "# HELP x What.\n# TYPE x gauge\nx{disk=\"b\"} 2\nx{disk=\"a\"} 2\n\
                        # HELP y Why.\n# TYPE y gauge\ny{disk=\"b\"} 1\ny{disk=\"a\"} 1\n";
        assert_eq!(page.to_string(), expected);
    }
}

//! The figures in Prometheus's text format, version 0.0.4.
//!
//! The names are those of `/v1/stats`: `nbd.reads` is `mica_nbd_reads_total`.

use super::sources::Sources;
use crate::stats::{self, Kind, Section};
use mica_serve::Latency;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter, Write as _};

/// The content type.
pub(super) const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

const LATENCY: &str = "mica_request_duration_seconds";

/// All figures.
pub(super) fn text(sources: &Sources) -> String {
    let mut page = Page::default();
    page.gauge("mica_build_info", "The version of the server.", [("version", VERSION)], 1);
    let uptime = sources.uptime().as_secs();
    page.gauge("mica_uptime_seconds", "Seconds since the start.", [], uptime);
    for served in sources.shared.disks.all() {
        let name = &*served.name;
        let (image, format) = (served.image(), &*served.images.format);
        let info = [("disk", name), ("image", &*image.to_string_lossy()), ("format", format)];
        page.gauge("mica_disk_info", "Image and format of a disk.", info, 1);
        let disk = [("disk", name)];
        let is_served = u64::from(served.condition() == "serving");
        page.gauge("mica_disk_serving", "Whether a disk is served.", disk, is_served);
        let help = "Whether a disk should be served and cannot be; see `mica ctl status`.";
        let is_failed = u64::from(served.failure().is_some());
        page.gauge("mica_disk_failed", help, disk, is_failed);
        if served.counts().device.is_some() {
            let help =
                "Whether a machine's device is broken because its shared memory was taken away.";
            let is_broken = u64::from(served.device_error().is_some());
            page.gauge("mica_device_broken", help, disk, is_broken);
        }
        let shown = served.image_figures();
        let help = "Whether a disk gives weaker guarantees than it should; see `mica ctl status`.";
        let is_weak = u64::from(shown.weakness.is_some());
        page.gauge("mica_disk_weakened", help, disk, is_weak);
        page.gauge("mica_disk_length_bytes", "Length of a disk.", disk, shown.len);
        let clients = served.clients() as u64;
        let help = "Open connections to a disk, front ends included.";
        page.gauge("mica_disk_clients", help, disk, clients);
        let layers = shown.layers as u64;
        page.gauge("mica_disk_layers", "Layers of the chain of a disk.", disk, layers);
        if let Some(indexed) = shown.indexed_layers {
            let help = "Layers of the chain of a disk that an index covers.";
            page.gauge("mica_disk_indexed_layers", help, disk, indexed as u64);
        }
        for section in stats::sections(&shown, &served.counts()) {
            page.section(name, &section);
        }
    }
    page.to_string()
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The page by metric name: all samples of a name stand together.
#[derive(Default)]
struct Page(BTreeMap<String, Family>);

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

    fn gauge<const N: usize>(
        &mut self,
        name: &str,
        help: &'static str,
        labels: [(&str, &str); N],
        value: u64,
    ) {
        let samples = self.family(name, "gauge", help);
        sample(samples, name, &labels, value);
    }

    fn section(&mut self, disk: &str, section: &Section) {
        for figure in section.figures.iter().flatten() {
            let (kind, ending) = match figure.kind {
                Kind::Counter => ("counter", "_total"),
                Kind::Gauge => ("gauge", ""),
            };
            let name = format!("mica_{}_{}{ending}", section.name, figure.name);
            let samples = self.family(&name, kind, figure.help);
            sample(samples, &name, &[("disk", disk)], figure.value);
        }
        if let Some(latencies) = &section.latencies {
            let help = "How long requests took, as seen by the server.";
            let samples = self.family(LATENCY, "histogram", help);
            for (request, latency) in latencies.each() {
                let labels = [("disk", disk), ("server", section.name), ("request", request)];
                histogram(samples, &labels, latency);
            }
        }
    }
}

/// Writes one bucket per octave.
fn histogram(samples: &mut String, labels: &[(&str, &str); 3], latency: &Latency) {
    let [disk, server, request] = *labels;
    let name = format!("{LATENCY}_bucket");
    let mut count = 0;
    let last = latency.buckets().map(|(below_us, _)| below_us).max();
    for (below_us, more) in latency.buckets() {
        count += more;
        // Requests in the last bucket may have taken longer.
        if below_us.is_power_of_two() && Some(below_us) != last {
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

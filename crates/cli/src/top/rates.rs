//! Rates between two answers of `/v1/stats`.

use crate::ctl::disks;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

/// The servers of a disk, as sections of the answer.
const SERVERS: [&str; 3] = ["nbd", "vhost_user", "fuse"];

/// Rates of one disk, per second.
pub(super) struct Rates<'a> {
    /// Its entry in the later answer.
    pub(super) disk: &'a Value,
    pub(super) reads: f64,
    pub(super) writes: f64,
    pub(super) read_bytes: f64,
    pub(super) written_bytes: f64,
    pub(super) read: Latency,
    pub(super) write: Latency,
    /// Times since the earlier answer that a request waited because of rate limits.
    pub(super) delayed: u64,
    /// Fraction of look-ups that the map answered from memory.
    pub(super) hit_rate: Option<f64>,
}

/// Latencies of requests.
#[derive(Default)]
pub(super) struct Latency {
    count: u64,
    sum_ns: u64,
    /// Number of requests per bucket, by its upper bound in microseconds.
    buckets: BTreeMap<u64, u64>,
}

/// Rates of every disk of `now` since `before`, or since its start if the server restarted in
/// between.
pub(super) fn between<'a>(before: &Value, now: &'a Value) -> Vec<Rates<'a>> {
    let is_same = before["pid"] == now["pid"] && ms(now) >= ms(before);
    let since = if is_same { ms(before) } else { 0 };
    #[expect(clippy::cast_precision_loss, reason = "a rate is shown")]
    let seconds = (ms(now) - since).max(1) as f64 / 1000.0;
    // A screen of a thousand disks is computed at every key.
    let earlier = disks(before).filter(|_| is_same);
    let old: HashMap<_, _> =
        earlier.filter_map(|disk| Some((disk["name"].as_str()?, disk))).collect();
    let of_disk = |disk: &'a Value| {
        let same = disk["name"].as_str().and_then(|name| old.get(name));
        rates(same.copied().unwrap_or(&Value::Null), disk, seconds)
    };
    disks(now).map(of_disk).collect()
}

fn rates<'a>(before: &Value, disk: &'a Value, seconds: f64) -> Rates<'a> {
    let more = |section: &str, name: &str| {
        number(&disk[section][name]).saturating_sub(number(&before[section][name]))
    };
    let served = |name: &str| SERVERS.iter().map(|server| more(server, name)).sum::<u64>();
    #[expect(clippy::cast_precision_loss, reason = "a rate is shown")]
    let rate = |name: &str| served(name) as f64 / seconds;
    let (hits, misses) = (more("map", "hits"), more("map", "misses"));
    Rates {
        disk,
        reads: rate("reads"),
        writes: rate("writes"),
        read_bytes: rate("read_bytes"),
        written_bytes: rate("written_bytes"),
        read: Latency::between(before, disk, "read"),
        write: Latency::between(before, disk, "write"),
        delayed: number(&disk["delayed"]).saturating_sub(number(&before["delayed"])),
        hit_rate: ratio(hits, hits.saturating_add(misses)),
    }
}

impl Latency {
    fn between(before: &Value, now: &Value, kind: &str) -> Self {
        let mut latency = Self::default();
        for server in SERVERS {
            let [before, now] = [before, now].map(|disk| &disk["latency"][server][kind]);
            let more = |name: &str| number(&now[name]).saturating_sub(number(&before[name]));
            latency.count = latency.count.saturating_add(more("count"));
            latency.sum_ns = latency.sum_ns.saturating_add(more("sum_ns"));
            let earlier: BTreeMap<_, _> = buckets(before).collect();
            for (below, count) in buckets(now) {
                let more = count.saturating_sub(earlier.get(&below).copied().unwrap_or(0));
                let sum = latency.buckets.entry(below).or_default();
                *sum = sum.saturating_add(more);
            }
        }
        latency
    }

    pub(super) fn mean_us(&self) -> Option<f64> {
        ratio(self.sum_ns / 1000, self.count)
    }

    /// The 99th percentile, to within a quarter.
    pub(super) fn p99_us(&self) -> Option<f64> {
        let total = self.buckets.values().fold(0, |sum: u64, count| sum.saturating_add(*count));
        let enough = total - total / 100;
        let mut sum = 0_u64;
        let reached = self.buckets.iter().find(|(_, count)| {
            sum = sum.saturating_add(**count);
            sum >= enough
        });
        #[expect(clippy::cast_precision_loss, reason = "it is shown")]
        let p99 = reached.filter(|_| total > 0).map(|(below, _)| *below as f64);
        p99
    }
}

/// The rates as JSON.
pub(super) fn json(answer: &Value, rates: &[Rates<'_>]) -> Value {
    let latency = |latency: &Latency| json!({ "count": latency.count, "mean_us": latency.mean_us(), "p99_us": latency.p99_us() });
    let disks = rates.iter().map(|rates| {
        let disk = rates.disk;
        json!({
            "name": disk["name"],
            "state": disk["state"],
            "reads_per_second": rates.reads,
            "writes_per_second": rates.writes,
            "read_bytes_per_second": rates.read_bytes,
            "written_bytes_per_second": rates.written_bytes,
            "read_latency": latency(&rates.read),
            "write_latency": latency(&rates.write),
            "map_hit_rate": rates.hit_rate,
            "layers": disk["layers"],
            "indexed_layers": disk["indexed_layers"],
            "clients": disk["clients"],
            "merge": disk["merge"],
        })
    });
    json!({ "uptime_ms": answer["uptime_ms"], "disks": disks.collect::<Vec<_>>() })
}

fn ms(answer: &Value) -> u64 {
    number(&answer["uptime_ms"])
}

pub(super) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

fn buckets(latency: &Value) -> impl Iterator<Item = (u64, u64)> {
    let filled = latency["buckets"].as_array().into_iter().flatten();
    filled.map(|bucket| (number(&bucket[0]), number(&bucket[1])))
}

#[expect(clippy::cast_precision_loss, reason = "it is shown")]
pub(super) fn ratio(part: u64, whole: u64) -> Option<f64> {
    if whole == 0 { None } else { Some(part as f64 / whole as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(pid: u64, uptime_ms: u64, reads: u64, fast: u64, slow: u64) -> Value {
        let buckets = json!([[4, fast], [112, slow]]);
        let read = json!({"count": fast + slow, "sum_ns": fast * 3000 + slow * 100_000,
                          "buckets": buckets});
        json!({"pid": pid, "uptime_ms": uptime_ms, "disks": [{
            "name": "a", "map": {"hits": reads, "misses": reads / 4},
            "nbd": {"reads": reads, "read_bytes": reads * 4096}, "vhost_user": null,
            "latency": {"nbd": {"read": read}},
        }]})
    }

    #[test]
    fn rates_are_of_the_time_between_two_answers() {
        let (before, now) = (answer(1, 1000, 100, 100, 0), answer(1, 3000, 300, 200, 1));
        let rates = &between(&before, &now)[0];
        assert_eq!((rates.reads, rates.read_bytes), (100.0, 409_600.0));
        assert_eq!(rates.hit_rate, Some(0.8));
        assert_eq!((rates.read.count, rates.read.p99_us()), (101, Some(4.0)));
        assert_eq!(rates.read.mean_us(), Some(400.0 / 101.0));
        assert_eq!((rates.write.mean_us(), rates.write.p99_us()), (None, None));
        let slow = answer(1, 4000, 300, 240, 11);
        assert_eq!(between(&now, &slow)[0].read.p99_us(), Some(112.0), "10 of 50 were slow");
    }

    #[test]
    fn restarted_server_counts_from_zero() {
        let rates = answer(2, 500, 50, 50, 0);
        let before = answer(1, 90_000, 900, 800, 0);
        let rates = &between(&before, &rates)[0];
        assert_eq!((rates.reads, rates.read.count), (100.0, 50));
    }

    #[test]
    fn answers_that_are_none_give_no_rates() {
        let strange = json!({"pid": 1, "uptime_ms": 5, "disks": [{}, {"latency": [], "map": 3}]});
        assert!(between(&json!(null), &json!(null)).is_empty());
        for rates in between(&strange, &strange) {
            assert_eq!((rates.reads, rates.hit_rate), (0.0, None));
        }
    }
}

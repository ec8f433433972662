//! Random reads with everything cached. All lengths are served at the same time and read in turns,
//! for a short while each: what else the machine does hits them alike.

use super::{Options, REPEATS, SECONDS, system};
use crate::chains::Chain;
use crate::cost::Meter;
use crate::load::{Load, Pattern, Request, run};
use crate::measure::{DEPTH, RANDOM_BYTES};
use crate::peers::{MICA, Peer, Running};
use crate::samples::{Sample, Samples};
use crate::turns::{in_order, note};
use anyhow::Result;
use mica_tests::nbd;
use mica_tests::server::Server;
use std::time::Duration;

/// How long the first pass over a disk may take.
const WARM_LIMIT: Duration = Duration::from_secs(60);
/// Requests in flight, and the names of the figures.
const DEPTHS: [(usize, &str); 2] = [(1, "random_1"), (DEPTH, "random_32")];

/// A chain that is served.
struct Served<'a> {
    chain: &'a Chain,
    running: Running,
    places: system::Places,
}

/// Measures all `chains` as often as `options` say.
///
/// # Errors
/// If one cannot be served, or read past mica. Wrong answers become errors of their samples.
pub(super) fn measure(options: &Options, chains: &[&Chain], samples: &mut Samples) -> Result<()> {
    for repeat in 0..options.extent.repeats(REPEATS) {
        let served = chains.iter().map(|chain| Served::start(chain)).collect::<Result<Vec<_>>>()?;
        for round in 0..options.rounds() {
            let number = repeat * options.rounds() + round;
            for one in in_order(&served, round) {
                one.measure(options.extent.time(SECONDS), number, samples);
            }
        }
        for one in served {
            one.running.stop()?;
        }
    }
    Ok(())
}

impl<'a> Served<'a> {
    fn start(chain: &'a Chain) -> Result<Self> {
        chain.read_all()?;
        let places = system::Places::of(chain)?;
        let running = Peer::mica(&[]).start(&chain.image, "qcow2", &[])?;
        let pattern = Pattern::Warm { table_bytes: chain.table_bytes };
        let warm = Load { pattern, ..load(chain, 1, WARM_LIMIT) };
        put(&running.server, &warm)?;
        Ok(Self { chain, running, places })
    }

    fn measure(&self, limit: Duration, number: u32, samples: &mut Samples) {
        let mut sample = Sample::new("warm", MICA, self.chain.layers, number);
        note(&mut sample, |sample| {
            for (depth, name) in DEPTHS {
                let seed = u64::from(number) + 1;
                let load = Load { seed, ..load(self.chain, depth, limit) };
                let meter = Meter::start(&self.running.server);
                let outcome = put(&self.running.server, &load)?;
                let cost = meter.stop();
                sample.put_speed(name, outcome.per_second(), &outcome.latency);
                sample.put_cost(name, cost, &outcome.latency);
            }
            Ok(())
        });
        samples.push(sample);
        let mut sample = Sample::new("warm", system::NAME, self.chain.layers, number);
        note(&mut sample, |sample| self.places.measure(self.chain, limit, sample));
        samples.push(sample);
    }
}

fn load(chain: &Chain, depth: usize, limit: Duration) -> Load<'_> {
    Load {
        request: Request::Read,
        pattern: Pattern::Hits,
        bytes: RANDOM_BYTES,
        depth,
        limit,
        owners: Some(&chain.owners),
        seed: 1,
    }
}

fn put(server: &Server, load: &Load<'_>) -> Result<crate::load::Outcome> {
    let mut connection = server.connect(&nbd::Wish::default())?;
    let outcome = run(&mut connection, load)?;
    connection.disconnect()?;
    outcome.check()?;
    Ok(outcome)
}

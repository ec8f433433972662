//! Bytes of a stranger against a whole connection, from the greeting to the last reply.

use super::stats::Counters;
use super::testing::{PatternDisk, World, simulated_seeds};
use mica_rt::{Buf, Stream, sleep, spawn, timeout};
use std::cell::Cell;
use std::collections::VecDeque;
use std::time::Duration;

/// Throws `input` at a server and panics if the server did: its first byte says how far the
/// handshake was done properly before, the rest is sent as it is. Tells what the server counted.
pub fn survive(input: &[u8]) -> Counters {
    let counters = Cell::default();
    let disk = || PatternDisk::mixed(1 << 20);
    if let Some((stage, bytes)) = input.split_first() {
        simulated_seeds(0..1, disk, async |world| {
            survive_one(&world, *stage, bytes).await;
            counters.set(world.counters());
        });
    }
    counters.get()
}

async fn survive_one(world: &World, stage: u8, bytes: &[u8]) {
    let client = match stage % 4 {
        0 => world.connect(),
        1 => {
            let mut client = world.connect();
            client.greet(3).await;
            client
        }
        2 => world.session().await,
        _ => world.simple_session().await,
    };
    let stream = client.stream.clone();
    spawn(take_everything(client.stream.clone()));
    // A server that reads no more of it has a reason, and is left alone after a while.
    let sending = stream.send(VecDeque::from([Buf::from_slice(bytes)]));
    let _ = timeout(Duration::from_secs(10), sending).await;
    sleep(Duration::from_secs(1)).await;
    stream.shutdown();
    world.until_open(0).await;
    assert_eq!(world.counters().panics, 0, "the server panicked");
    assert_eq!(world.reading.now(), 0, "a read outlived its connection");
}

async fn take_everything(stream: Stream) {
    loop {
        let (result, _) = stream.recv(Buf::new(64 << 10)).await;
        if !matches!(result, Ok(1..)) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discard::Discard;
    use crate::nbd::testing::{
        MemoryDisk, info_data, meta_data, option_header, request, simulated_memory,
    };
    use crate::testing::random::Random;

    /// Inputs per run; `MICA_HOSTILE_INPUTS` sets another number.
    const INPUTS: u64 = 3000;

    fn option(random: &mut Random) -> Vec<u8> {
        let kind = u32::try_from(random.below(13)).expect("small");
        let name: &[u8] = [&b"disk"[..], b"", b"other"][usize::from(random.byte() % 3)];
        let data = match random.below(4) {
            0 => Vec::new(),
            1 => info_data(name, &[0, 3, 1]),
            2 => meta_data(name, &[b"base:allocation", b"base:"]),
            _ => (0..random.below(64)).map(|_| random.byte()).collect(),
        };
        let honest = u32::try_from(data.len()).expect("short");
        let len = if random.below(8) == 0 { random.number() } else { honest };
        [option_header(kind, len), data].concat()
    }

    fn command(random: &mut Random) -> Vec<u8> {
        let flags = if random.below(4) == 0 { 1 << random.below(16) } else { 0 };
        // Half of them are reads.
        let kind = u16::try_from(random.below(20).saturating_sub(10)).expect("small");
        let at = match random.below(8) {
            0 => u64::from(random.number()),
            1 => random.next(),
            _ => random.below(1 << 20),
        };
        let len = match random.below(3) {
            0 => random.number(),
            _ => u32::try_from(random.below(1 << 19)).expect("small"),
        };
        let mut out = request(flags, kind, random.next(), at, len);
        if kind == 1 {
            let sent = if random.below(4) == 0 { 5000 } else { 1 << 19 };
            out.extend(vec![0x25; len.min(sent) as usize]);
        }
        out
    }

    /// An input: messages that are nearly right, and a few bytes that are not.
    fn input(seed: u64) -> Vec<u8> {
        let mut random = Random(seed);
        let stage = random.byte();
        let mut out = vec![stage];
        if stage.is_multiple_of(4) && random.below(8) != 0 {
            out.extend([0, 0, 0, random.byte() % 4]);
        }
        // What does not belong in this phase comes now and then.
        let options_of_40 = if stage % 4 < 2 { 35 } else { 1 };
        for _ in 0..random.below(30) {
            let is_option = random.below(40) < options_of_40;
            out.extend(if is_option { option(&mut random) } else { command(&mut random) });
        }
        for _ in 0..random.below(6).saturating_sub(3) {
            let at = usize::try_from(random.below(out.len() as u64)).expect("small");
            out[at] = random.byte();
        }
        out
    }

    #[test]
    fn server_survives_messages_that_are_nearly_right() {
        let count = std::env::var("MICA_HOSTILE_INPUTS");
        let count = count.map_or(INPUTS, |count| count.parse().expect("a number"));
        let mut reads = 0;
        for seed in 0..count {
            let input = input(seed);
            match std::panic::catch_unwind(|| survive(&input)) {
                Ok(counters) => reads += counters.reads,
                Err(_) => panic!("input {seed}"),
            }
        }
        assert!(reads > count / 4, "only {reads} reads got through to the disk");
    }

    #[test]
    fn writable_export_survives_them_too() {
        let writes = Cell::new(0);
        for seed in 0..INPUTS / 10 {
            let input = input(seed);
            let (stage, bytes) = input.split_first().expect("a stage");
            let disk = || MemoryDisk::new(1 << 20);
            simulated_memory(disk, Discard::Unmap, async |world, disk| {
                survive_one(&world, *stage, bytes).await;
                assert!(disk.is_quiet(), "input {seed}: a request is still in flight");
                let counters = world.counters();
                writes.set(writes.get() + counters.writes + counters.zeroes + counters.discards);
            });
        }
        assert!(writes.get() > INPUTS / 10, "only {} changes got through", writes.get());
    }
}

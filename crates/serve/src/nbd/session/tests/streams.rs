//! Reads that are sent as they are read: what else a client asks for comes before or behind them.

use super::*;
use crate::discard::Discard;
use crate::nbd::limits::{PAYLOAD_BYTES_MAX, RESERVE_BYTES};
use crate::nbd::protocol::command_flag;
use crate::nbd::testing::{
    Client, MemoryDisk, Reply, assemble, request, simulated, simulated_memory, simulated_seeds,
};

const FLUSH: u16 = command::FLUSH;

async fn expect_success(client: &mut Client, of: u64) {
    assert_eq!(client.reply().await, Some(Reply::Simple { cookie: of, error: 0 }));
}

#[test]
fn request_that_costs_nothing_waits_for_the_end_of_a_streamed_read() {
    let quick =
        || PatternDisk { latency: Some(Duration::from_millis(1)), ..PatternDisk::data(64 * MIB) };
    let content = quick().content(0..32 * MIB);
    simulated_seeds(0..2, quick, async |world| {
        let mut client = world.simple_session().await;
        client.request(0, READ, 1, 0, PAYLOAD_BYTES_MAX).await;
        expect_success(&mut client, 1).await;
        let mut data = client.receive(256 << 10).await.expect("data");
        client.request(0, READ, 2, 0, 0).await;
        // One that is refused.
        client.request(0, READ, 3, 64 * MIB, 512).await;
        data.extend(client.receive((32 << 20) - data.len()).await.expect("data"));
        assert!(data == content, "another reply is within the data");
        expect_success(&mut client, 2).await;
        assert!(matches!(client.reply().await, Some(Reply::Simple { cookie: 3, error: 22 })));
    });
}

#[test]
fn flush_behind_a_streamed_read_is_answered_behind_it() {
    let disk = || MemoryDisk {
        latency: Some(Duration::from_micros(10)),
        read_latency: Some(Duration::from_millis(1)),
        ..MemoryDisk::new(8 * MIB)
    };
    simulated_memory(disk, Discard::Unmap, async |world, disk| {
        let _others = world.others();
        let mut client = world.simple_session().await;
        let read = request(0, READ, 1, 0, 4 << 20);
        client.send(&[read, request(0, FLUSH, 2, 0, 0)].concat()).await.expect("connected");
        expect_success(&mut client, 1).await;
        let data = client.receive(4 << 20).await.expect("data");
        assert!(data == disk.bytes(0..4 << 20), "another reply is within the data");
        expect_success(&mut client, 2).await;
    });
}

#[test]
fn chunk_that_is_streamed_is_not_interrupted_when_others_release_memory() {
    let content = slow().content(0..2 * MIB);
    simulated(slow, async |world| {
        let others = world.others();
        let mut client = world.session().await;
        client.request(command_flag::DF, READ, 1, 0, 2 << 20).await;
        mica_rt::sleep(Duration::from_millis(1)).await;
        assert!(world.reading.now() <= RESERVE_BYTES as u64, "it is not streamed");
        drop(others);
        for cookie in 2..10 {
            client.request(0, READ, cookie, 0, 512).await;
        }
        let chunks = client.chunks(1).await;
        assert_eq!(chunks.len(), 1);
        assert!(assemble(&chunks, 0) == content, "another reply is within the data");
        for _ in 2..10 {
            assert!(matches!(client.reply().await, Some(Reply::Chunk { is_last: true, .. })));
        }
    });
}

/// What is missing of a reply that failed is never filled with another one.
#[test]
fn nothing_follows_a_streamed_read_that_failed() {
    let bad = || PatternDisk {
        bad: 32 * MIB - 512..32 * MIB,
        latency: Some(Duration::from_micros(100)),
        ..PatternDisk::data(64 * MIB)
    };
    simulated_seeds(0..2, bad, async |world| {
        let mut client = world.simple_session().await;
        let mut bytes = request(0, READ, 1, 0, PAYLOAD_BYTES_MAX);
        // Their replies would be more than what is missing.
        (2..20_000).for_each(|cookie| bytes.extend(request(0, READ, cookie, 0, 0)));
        let sender = client.stream.clone();
        mica_rt::spawn(async move {
            // Most of them are never read.
            let _ = sender.send([mica_rt::Buf::from_slice(&bytes)].into()).await;
        });
        expect_success(&mut client, 1).await;
        let rest = 32 * MIB - (256 << 10);
        let rest = client.receive(usize::try_from(rest).expect("small")).await;
        assert!(rest.is_some());
        assert!(client.is_closed().await, "something follows");
    });
}

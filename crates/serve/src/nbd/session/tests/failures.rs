//! Disks that fail: what is reported, and what ends.

use super::*;
use crate::nbd::protocol::command_flag;
use crate::nbd::testing::{
    EIO, Reply, assemble, decode_error, simulated, simulated_with_broken_disk,
};

#[test]
fn failed_read_is_reported_with_its_offset_and_the_session_continues() {
    for latency in [None, Some(Duration::from_millis(1))] {
        let bad =
            move || PatternDisk { bad: 5 * 4096..6 * 4096, latency, ..PatternDisk::data(4 * MIB) };
        simulated(bad, async |world| {
            let mut client = world.session().await;
            client.request(0, READ, 1, 5 * 4096, 4096).await;
            assert_eq!(client.chunk_error(1).await, (EIO, Some(5 * 4096)));
            client.request(0, READ, 2, 0, 4096).await;
            assert_eq!(client.reply_data(2).await.len(), 4096);
            let mut client = world.simple_session().await;
            client.request(0, READ, 3, 4096, 1 << 20).await;
            assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 3, error: EIO }));
            client.request(0, READ, 4, 0, 16).await;
            assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 4, error: 0 }));
        });
    }
}

#[test]
fn failure_after_a_part_of_the_data_ends_the_reply_with_an_error() {
    let bad = || PatternDisk { bad: MIB..MIB + 1, ..slow() };
    simulated(bad, async |world| {
        let mut client = world.session().await;
        client.request(0, READ, 1, 0, 2 << 20).await;
        let mut chunks = client.chunks(1).await;
        let error = chunks.pop().expect("an error");
        let (code, offset) = decode_error(&error);
        assert_eq!((code, offset), (EIO, Some(MIB)));
        let data = assemble(&chunks, 0);
        assert!(data == bad().content(0..MIB));
        client.request(command_flag::DF, READ, 2, 0, 2 << 20).await;
        assert_eq!(client.chunk_error(2).await, (EIO, Some(MIB)));
    });
}

#[test]
fn failure_after_a_simple_header_ends_the_connection() {
    let bad = || PatternDisk { bad: 20 * MIB..20 * MIB + 1, ..PatternDisk::data(64 * MIB) };
    simulated(bad, async |world| {
        let mut client = world.simple_session().await;
        client.request(0, READ, 1, 0, 32 << 20).await;
        assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 1, error: 0 }));
        assert!(client.receive(32 << 20).await.is_none());
        world.assert_serves().await;
    });
}

#[test]
fn disk_that_cannot_plan_fails_requests_only() {
    simulated_with_broken_disk(async |world| {
        let mut client = world.session().await;
        for (cookie, len) in [(1, 512), (2, 1 << 20)] {
            client.request(0, READ, cookie, 0, len).await;
            assert_eq!(client.chunk_error(cookie).await, (EIO, Some(0)));
            client.request(0, STATUS, cookie, 0, len).await;
            assert_eq!(client.chunk_error(cookie).await, (EIO, Some(0)));
        }
    });
}

#[test]
fn panic_ends_only_its_own_connection() {
    let poisoned = || PatternDisk { poisoned: 0..4096, ..small() };
    simulated(poisoned, async |world| {
        let mut witness = world.session().await;
        let mut client = world.session().await;
        client.request(0, READ, 1, 0, 512).await;
        assert!(client.is_closed().await);
        assert_eq!(world.counters().panics, 1);
        witness.request(0, READ, 1, 8192, 512).await;
        assert_eq!(assemble(&witness.chunks(1).await, 8192).len(), 512);
    });
}

//! What is refused, and whether the session continues.

use super::*;
use crate::nbd::limits::PAYLOAD_BYTES_MAX;
use crate::nbd::protocol::command_flag;
use crate::nbd::testing::{EINVAL, EOVERFLOW, EPERM, Reply, request, simulated};

#[test]
fn reads_that_are_too_long_are_refused_without_memory() {
    let disk = || PatternDisk::data(8 << 30);
    simulated(disk, async |world| {
        let mut client = world.session().await;
        for len in [PAYLOAD_BYTES_MAX + 1, 0x8000_0000, u32::MAX] {
            client.request(0, READ, 1, 0, len).await;
            assert_eq!(client.chunk_error(1).await, (EINVAL, None));
        }
        for len in [16 << 20, PAYLOAD_BYTES_MAX + 1, u32::MAX] {
            client.request(command_flag::DF, READ, 2, 0, len).await;
            assert_eq!(client.chunk_error(2).await, (EOVERFLOW, None), "in one chunk");
        }
        let mut client = world.simple_session().await;
        client.request(0, READ, 3, 0, u32::MAX).await;
        assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 3, error: EINVAL }));
        assert_eq!(world.reading.most(), 0);
    });
}

#[test]
fn requests_that_make_no_sense_are_refused_and_the_session_continues() {
    simulated(small, async |world| {
        let mut client = world.session().await;
        let cases = [
            // Beyond the end, also where offset and length wrap.
            (0, READ, MIB, 1),
            (0, READ, MIB - 1, 2),
            (0, READ, u64::MAX, 1),
            (0, READ, u64::MAX - 511, 512),
            (0, READ, 1 << 63, 512),
            (0, STATUS, MIB, 1),
            (0, STATUS, 0, 0),
            (0, STATUS, u64::MAX, u32::MAX),
            // Flags of other commands, and of none.
            (command_flag::REQ_ONE, READ, 0, 1),
            (command_flag::DF, STATUS, 0, 1),
            (1 << 15, READ, 0, 1),
            (2, command::FLUSH, 0, 0),
            // CACHE, RESIZE and commands that do not exist.
            (0, 5, 0, 512),
            (0, 8, 0, 512),
            (0, 0xffff, 0, 0),
        ];
        for (index, (flags, kind, at, len)) in cases.into_iter().enumerate() {
            let cookie = index as u64;
            client.request(flags, kind, cookie, at, len).await;
            assert_eq!(client.chunk_error(cookie).await, (EINVAL, None), "case {index}");
        }
        client.request(0, READ, 99, 0, 512).await;
        assert_eq!(client.reply_data(99).await.len(), 512);
        assert_eq!(world.counters().errors, cases.len() as u64);
    });
}

#[test]
fn writes_are_refused_and_their_payload_is_skipped() {
    simulated(small, async |world| {
        let mut client = world.session().await;
        for len in [0, 1, 27, 28, 4096, 3 << 20] {
            client.request(0, command::WRITE, 7, 0, len).await;
            // The payload looks like requests: none of it may be taken for one.
            let bytes: Vec<u8> =
                request(0, READ, 666, 0, 1).into_iter().cycle().take(len as usize).collect();
            client.send(&bytes).await.expect("connected");
            assert_eq!(client.chunk_error(7).await, (EPERM, None));
        }
        for kind in [command::TRIM, command::WRITE_ZEROES] {
            client.request(0, kind, 8, 0, u32::MAX).await;
            assert_eq!(client.chunk_error(8).await, (EPERM, None));
        }
        world.assert_serves().await;
    });
}

#[test]
fn write_of_4_gib_ends_the_connection() {
    simulated(small, async |world| {
        let mut client = world.session().await;
        client.request(0, command::WRITE, 7, 0, u32::MAX).await;
        assert!(client.is_closed().await);
        assert_eq!(world.counters().protocol_errors, 1);
        world.assert_serves().await;
    });
}

#[test]
fn rubbish_ends_only_the_connection_that_sent_it() {
    simulated(small, async |world| {
        let mut witness = world.session().await;
        for rubbish in [&[0; 28][..], b"GET / HTTP/1.1\r\nHost: disk\r\n\r\n", &[0xff; 100]] {
            let mut client = world.session().await;
            client.send(rubbish).await.expect("connected");
            assert!(client.is_closed().await);
        }
        // An option where a request is due, and a request with extended headers.
        for magic in [*b"IHAV", [0x21, 0xe4, 0x1c, 0x71]] {
            let mut client = world.session().await;
            let mut bytes = request(0, READ, 1, 0, 512);
            bytes[..4].copy_from_slice(&magic);
            client.send(&bytes).await.expect("connected");
            assert!(client.is_closed().await);
        }
        assert_eq!(world.counters().protocol_errors, 5);
        witness.request(0, READ, 1, 0, 512).await;
        assert_eq!(witness.reply_data(1).await.len(), 512);
    });
}

#[test]
fn status_without_a_context_is_refused() {
    simulated(small, async |world| {
        let mut client = world.simple_session().await;
        client.request(0, STATUS, 1, 0, 512).await;
        assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 1, error: EINVAL }));
    });
}

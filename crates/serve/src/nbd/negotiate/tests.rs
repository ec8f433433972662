use super::*;
use crate::nbd::limits::HANDSHAKES_MAX;
use crate::nbd::testing::{
    Client, PatternDisk, World, info_data, meta_data, option_header, simulated,
};
use mica_rt::sleep;
use std::time::Duration;

const LEN: u64 = 1 << 20;

const UNSUP: u32 = 1;
const INVALID: u32 = 3;
const UNKNOWN: u32 = 6;
const TOO_BIG: u32 = 9;

fn disk() -> PatternDisk {
    PatternDisk::data(LEN)
}

async fn greeted(world: &World) -> Client {
    let mut client = world.connect();
    client.greet(3).await;
    client
}

async fn structured(world: &World) -> Client {
    let mut client = greeted(world).await;
    client.option(option::STRUCTURED_REPLY, &[]).await;
    client.expect_ack(option::STRUCTURED_REPLY).await;
    client
}

#[test]
fn export_name_is_padded_unless_declined() {
    simulated(disk, async |world| {
        for (flags, padding) in [(1, 124), (3, 0), (0, 124)] {
            let mut client = world.connect();
            client.greet(flags).await;
            client.option(option::EXPORT_NAME, b"disk").await;
            let reply = client.receive(10 + padding).await.expect("a reply");
            assert_eq!(reply[..8], LEN.to_be_bytes());
            // Read-only, flush, FUA, multi-conn.
            assert_eq!(reply[8..10], 0x010f_u16.to_be_bytes());
            client.request(0, 0, 5, 0, 16).await;
            assert_eq!(client.receive(32).await.expect("a reply")[8..16], 5_u64.to_be_bytes());
        }
    });
}

#[test]
fn unknown_export_in_the_old_way_ends_the_connection() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        client.option(option::EXPORT_NAME, b"other").await;
        assert!(client.is_closed().await);
        world.assert_serves().await;
    });
}

#[test]
fn go_returns_the_requested_information() {
    simulated(disk, async |world| {
        let mut client = structured(&world).await;
        for option in [option::INFO, option::GO] {
            client.option(option, &info_data(b"", &[3, 1, 2, 77])).await;
            let mut infos: Vec<Vec<u8>> =
                client.option_replies(option).await.into_iter().map(|(_, data)| data).collect();
            assert_eq!(infos.pop(), Some(Vec::new()));
            assert_eq!(infos[0][2..10], LEN.to_be_bytes());
            assert_eq!(infos[0][10..], 0x018f_u16.to_be_bytes());
            assert_eq!(infos[1], b"\x00\x01disk");
            assert_eq!(infos[2], b"\x00\x02a pattern");
            assert_eq!(infos[3][..], *b"\x00\x03\x00\x00\x00\x01\x00\x01\x00\x00\x02\x00\x00\x00");
            assert_eq!(infos.len(), 4);
        }
        client.request(0, 2, 0, 0, 0).await;
        assert!(client.is_closed().await);
    });
}

#[test]
fn list_names_the_export() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        client.option(option::LIST, &[]).await;
        let replies = client.option_replies(option::LIST).await;
        assert_eq!(replies[0], (2, b"\x00\x00\x00\x04diska pattern".to_vec()));
        assert_eq!(replies.len(), 2);
        client.option(option::LIST, b"x").await;
        assert_eq!(client.expect_error(option::LIST).await, INVALID);
        client.option(option::ABORT, b"ignored").await;
        client.expect_ack(option::ABORT).await;
        assert!(client.is_closed().await);
    });
}

#[test]
fn options_that_are_not_served_are_skipped_and_refused() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        // PEEK_EXPORT, STARTTLS, EXTENDED_HEADERS, and nonsense.
        for option in [4, 5, 11, 0, 4711, u32::MAX] {
            client.option(option, &vec![0xaa; 100_000]).await;
            assert_eq!(client.expect_error(option).await, UNSUP);
        }
        client.option(option::GO, &info_data(b"disk", &[])).await;
        assert_eq!(client.option_replies(option::GO).await.len(), 2);
    });
}

#[test]
fn long_and_unknown_names_get_a_short_answer() {
    // CVE-2017-15118, CVE-2020-10761.
    simulated(disk, async |world| {
        let mut client = structured(&world).await;
        for len in [5, 256, 257, 4095, 4096, 4097, 60_000] {
            let name = vec![b'n'; len];
            let expected = if len <= 4096 { UNKNOWN } else { INVALID };
            for option in [option::INFO, option::GO] {
                client.option(option, &info_data(&name, &[3])).await;
                assert_eq!(client.expect_error(option).await, expected, "{len} bytes");
            }
            for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
                client.option(option, &meta_data(&name, &[])).await;
                assert_eq!(client.expect_error(option).await, expected, "{len} bytes");
            }
        }
        client.option(option::GO, &vec![0; 70_000]).await;
        assert_eq!(client.expect_error(option::GO).await, TOO_BIG);
        client.option(option::GO, &info_data(b"disk", &[])).await;
        assert_eq!(client.option_replies(option::GO).await.len(), 2);
    });
}

#[test]
fn export_name_beyond_the_limit_ends_the_connection() {
    simulated(disk, async |world| {
        for len in [4096_u32, 4097, 100_000] {
            let mut client = greeted(&world).await;
            client.send(&option_header(option::EXPORT_NAME, len)).await.expect("connected");
            // The server may have gone at the length already.
            let _ = client.send(&vec![b'n'; len as usize]).await;
            assert!(client.is_closed().await);
        }
        world.until_open(0).await;
        world.assert_serves().await;
    });
}

#[test]
fn name_length_beyond_the_option_is_invalid() {
    // CVE-2022-26495, CVE-2022-26496.
    simulated(disk, async |world| {
        let mut client = structured(&world).await;
        for option in [option::INFO, option::GO, option::SET_META_CONTEXT] {
            client.option(option, b"\xff\xff\xff\xffdisk\x00\x00\x00\x00").await;
            assert_eq!(client.expect_error(option).await, INVALID);
        }
    });
}

#[test]
fn option_of_4_gib_ends_the_connection_at_once() {
    // CVE-2017-15119.
    simulated(disk, async |world| {
        for option in [option::EXPORT_NAME, option::GO, option::LIST, 4711] {
            let mut client = greeted(&world).await;
            client.send(&option_header(option, u32::MAX)).await.expect("connected");
            assert!(client.is_closed().await);
        }
        assert_eq!(world.counters().protocol_errors, 4);
        world.assert_serves().await;
    });
}

#[test]
fn flood_of_options_ends_the_connection() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        let mut answered = 0;
        while answered < 5000 {
            if client.send(&option_header(option::LIST, 0)).await.is_err() {
                break;
            }
            while let Some((reply, _)) = client.option_reply(option::LIST).await {
                if reply == 1 {
                    answered += 1;
                    break;
                }
            }
        }
        assert_eq!(answered, OPTIONS_MAX + OPTIONS_PER_EXPORT);
    });
}

#[test]
fn flood_of_option_bytes_ends_the_connection() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        let data = vec![0; 4 << 20];
        for _ in 0..4 {
            client.option(4711, &data).await;
            assert_eq!(client.expect_error(4711).await, UNSUP);
        }
        let _ = client.send(&option_header(4711, 1)).await;
        assert!(client.is_closed().await);
    });
}

#[test]
fn structured_replies_are_negotiated_once_and_without_data() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        client.option(option::STRUCTURED_REPLY, b"x").await;
        assert_eq!(client.expect_error(option::STRUCTURED_REPLY).await, INVALID);
        client.option(option::STRUCTURED_REPLY, &[]).await;
        client.expect_ack(option::STRUCTURED_REPLY).await;
        client.option(option::STRUCTURED_REPLY, &[]).await;
        assert_eq!(client.expect_error(option::STRUCTURED_REPLY).await, INVALID);
    });
}

#[test]
fn meta_contexts_need_structured_replies() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
            client.option(option, &meta_data(b"disk", &[])).await;
            assert_eq!(client.expect_error(option).await, INVALID);
        }
    });
}

/// An option, its queries, and the replies to it.
type Case<'a> = (u32, &'a [&'a [u8]], &'a [(u32, Vec<u8>)]);

#[test]
fn wildcard_lists_but_does_not_select() {
    simulated(disk, async |world| {
        let mut client = structured(&world).await;
        let listed = (4, b"\x00\x00\x00\x00base:allocation".to_vec());
        let selected = (4, b"\x00\x00\x00\x01base:allocation".to_vec());
        let ack = (1, Vec::new());
        let (list, set) = (option::LIST_META_CONTEXT, option::SET_META_CONTEXT);
        let cases: [Case<'_>; 8] = [
            (list, &[], &[listed.clone(), ack.clone()]),
            (list, &[b"base:"], &[listed.clone(), ack.clone()]),
            (list, &[b"x-unknown:", b"base:allocation"], &[listed, ack.clone()]),
            (list, &[b"qemu:", b"nonsense"], std::slice::from_ref(&ack)),
            (set, &[], std::slice::from_ref(&ack)),
            (set, &[b"base:"], std::slice::from_ref(&ack)),
            (set, &[b"base:other", b"qemu:dirty-bitmap:x"], std::slice::from_ref(&ack)),
            (
                set,
                &[b"base:allocation", b"base:allocation", b"qemu:allocation-depth"],
                &[selected, ack.clone()],
            ),
        ];
        for (option, queries, expected) in cases {
            client.option(option, &meta_data(b"disk", queries)).await;
            assert_eq!(client.option_replies(option).await, expected);
        }
    });
}

#[test]
fn meta_request_with_bytes_left_over_is_invalid() {
    // QEMU issue 4843.
    simulated(disk, async |world| {
        let mut client = structured(&world).await;
        for left_over in [1, 4, 9, 1000] {
            let mut data = meta_data(b"disk", &[b"base:allocation"]);
            data.extend(vec![0; left_over]);
            client.option(option::SET_META_CONTEXT, &data).await;
            assert_eq!(client.expect_error(option::SET_META_CONTEXT).await, INVALID);
        }
        client.option(option::GO, &info_data(b"disk", &[])).await;
        assert_eq!(client.option_replies(option::GO).await.len(), 2);
    });
}

/// Whether block status works after SET_META_CONTEXT for `set` and GO for `go`.
async fn status_works(world: &World, set: &[u8], go: &[u8], then: &[u8]) -> bool {
    let mut client = structured(world).await;
    client.option(option::SET_META_CONTEXT, &meta_data(set, &[b"base:allocation"])).await;
    client.option_replies(option::SET_META_CONTEXT).await;
    if !then.is_empty() {
        client.option(option::SET_META_CONTEXT, then).await;
        client.option_replies(option::SET_META_CONTEXT).await;
    }
    client.option(option::GO, &info_data(go, &[])).await;
    client.option_replies(option::GO).await;
    client.request(0, 7, 9, 0, 512).await;
    client.chunks(9).await[0].0 == 5
}

#[test]
fn context_is_selected_for_the_name_that_goes() {
    simulated(disk, async |world| {
        assert!(status_works(&world, b"disk", b"disk", &[]).await);
        assert!(status_works(&world, b"", b"", &[]).await);
        assert!(!status_works(&world, b"", b"disk", &[]).await);
        assert!(!status_works(&world, b"disk", b"", &[]).await);
        // A later selection replaces the earlier one, even when it fails.
        assert!(!status_works(&world, b"disk", b"disk", &meta_data(b"disk", &[])).await);
        assert!(!status_works(&world, b"disk", b"disk", b"nonsense").await);
    });
}

/// The story: 256 clients that connected and said nothing closed an address to everybody for half a
/// minute, again and again.
#[test]
fn clients_that_say_nothing_keep_out_nobody() {
    simulated(disk, async |world| {
        let mut speaks = greeted(&world).await;
        speaks.option(option::LIST, &[]).await;
        assert_eq!(speaks.option_replies(option::LIST).await.len(), 2);
        let silent: Vec<Client> = (1..HANDSHAKES_MAX).map(|_| world.connect()).collect();
        world.assert_serves().await;
        world.until_open(HANDSHAKES_MAX - 1).await;
        assert_eq!(world.counters().connections_refused, 1);
        speaks.option(option::LIST, &[]).await;
        assert_eq!(speaks.option_replies(option::LIST).await.len(), 2);
        drop((speaks, silent));
        world.until_open(0).await;
    });
}

#[test]
fn garbage_ends_only_the_connection_that_sent_it() {
    // CVE-2017-9524, CVE-2017-7539, CVE-2013-7441.
    simulated(disk, async |world| {
        let mut witness = world.session().await;
        drop(world.connect());
        let mut silent = world.connect();
        assert!(silent.receive(18).await.is_some());
        drop(silent);
        for garbage in [&b"GET / HTTP/1.0\r\n\r\n"[..], &[0xff; 4], &[0; 64], b"\x00\x00\x00\x07"] {
            let mut client = world.connect();
            assert!(client.receive(18).await.is_some());
            let _ = client.send(garbage).await;
            assert!(client.is_closed().await);
        }
        let client = greeted(&world).await;
        client.send(b"IHAVEOPTsomethingelse entirely").await.expect("connected");
        let mut client = greeted(&world).await;
        client.send(&[0x25; 500]).await.expect("connected");
        assert!(client.is_closed().await);

        witness.request(0, 0, 1, 0, 512).await;
        assert_eq!(witness.reply_data(1).await.len(), 512);
    });
}

#[test]
fn options_without_fixed_newstyle_end_the_connection() {
    simulated(disk, async |world| {
        let mut client = world.connect();
        client.greet(0).await;
        client.option(option::LIST, &[]).await;
        assert!(client.is_closed().await);
    });
}

#[test]
fn handshake_that_takes_too_long_is_broken_off() {
    // CVE-2024-7409: half-open connections do not stay.
    simulated(disk, async |world| {
        let mut silent = world.connect();
        let mut slow = greeted(&world).await;
        let bytes = option_header(option::GO, 4000);
        for byte in bytes {
            slow.send(&[byte]).await.expect("connected");
            sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(world.open(), 2);
        sleep(Duration::from_secs(20)).await;
        assert_eq!(world.open(), 0);
        assert_eq!(world.counters().deadlines_passed, 2);
        assert!(silent.receive(18).await.is_some());
        assert!(silent.is_closed().await);
        assert!(slow.is_closed().await);
    });
}

#[test]
fn handshake_is_broken_off_by_a_shutdown() {
    simulated(disk, async |world| {
        let _silent = world.connect();
        let _greeted = greeted(&world).await;
        world.stop();
        world.until_open(0).await;
    });
}

#[test]
fn requests_sent_right_behind_go_are_served() {
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        let data = info_data(b"disk", &[]);
        let mut bytes = option_header(option::GO, u32::try_from(data.len()).expect("short"));
        bytes.extend(data);
        bytes.extend(crate::nbd::testing::request(0, 0, 3, 0, 16));
        bytes.extend(&crate::nbd::testing::request(0, 0, 4, 16, 16)[..10]);
        client.send(&bytes).await.expect("connected");
        client.option_replies(option::GO).await;
        let reply = client.receive(32).await.expect("a reply");
        assert_eq!(reply[8..16], 3_u64.to_be_bytes());
    });
}

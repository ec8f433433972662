//! Clients that take more than their share.

use mica_tests::guest::{Answer, Guest};
use mica_tests::nbd::{Wish, request};
use mica_tests::server::Server;
use std::io::Write;

const CMD_WRITE: u16 = 1;
const MIB: usize = 1 << 20;
const PEERS: u64 = 96;

/// The server read the whole announced payload into memory, on every connection: with 256 of them
/// it took 8.2 GiB.
#[test]
fn clients_that_never_finish_their_payload_take_little_memory_and_delay_no_other() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = dir.path().join("disk.raw");
    let made = std::fs::File::create(&image).expect("made");
    made.set_len(64 << 20).expect("as long");
    let server = Server::mica_writable(&image, "raw", &[]).expect("serves");
    let before = server.memory().0;

    let mut peers = Vec::new();
    for cookie in 0..PEERS {
        let mut peer = server.connect(&Wish::default()).expect("shakes hands");
        let len = u32::try_from(32 * MIB).expect("fits");
        let head = request(CMD_WRITE, 0, cookie, 0, len);
        peer.stream.write_all(&head).expect("is read");
        peer.stream.write_all(&vec![7; MIB]).expect("is read");
        peers.push(peer);
    }

    let mut guest = Guest::connect(&server).expect("shakes hands");
    for at in 0..8 {
        let bytes = vec![9; 4096];
        assert_eq!(guest.write((40 + at) << 20, &bytes).expect("answers"), 0);
        let read = guest.read((40 + at) << 20, 4096).expect("answers");
        assert_eq!(read, Answer::Done(bytes));
    }
    let taken = (server.memory().1 - before) / MIB as u64;
    assert!(taken < 256, "{taken} MiB were taken for {PEERS} connections");
    drop(peers);
    assert_eq!(guest.write(0, &vec![1; 16 * MIB]).expect("answers"), 0);
    let stopped = server.stop().expect("stops");
    assert!(stopped.status.success());
}

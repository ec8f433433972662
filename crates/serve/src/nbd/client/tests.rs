use super::link::{Answers, Connection, Input};
use super::*;
use mica_units::Rng;
use parking_lot::Mutex;
use std::io::{self, Cursor, Read as _};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const BITMAP: &str = "qemu:dirty-bitmap:mon";
const DISK_BYTES: u64 = 16384;

/// A server that says what is written down, whatever it is asked.
struct Parrot(Mutex<Cursor<Vec<u8>>>);

impl Connection for Parrot {
    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.lock().read(bytes)
    }

    fn write(&self, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn limit(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn shut(&self) {}
}

fn parrot(said: Vec<u8>) -> Arc<dyn Connection> {
    Arc::new(Parrot(Mutex::new(Cursor::new(said))))
}

fn count(count: usize) -> [u8; 4] {
    u32::try_from(count).expect("short").to_be_bytes()
}

fn option_reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
    let len = count(payload.len());
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, payload].concat()
}

fn chunk(kind: u16, cookie: u64, payload: &[u8], is_last: bool) -> Vec<u8> {
    let (magic, flags) = (0x668e_33ef_u32.to_be_bytes(), u16::from(is_last).to_be_bytes());
    let len = count(payload.len());
    [&magic[..], &flags, &kind.to_be_bytes(), &cookie.to_be_bytes(), &len, payload].concat()
}

fn status(cookie: u64, id: u32, parts: &[(u32, u32)], is_last: bool) -> Vec<u8> {
    let parts = parts.iter().flat_map(|(len, flags)| [len.to_be_bytes(), flags.to_be_bytes()]);
    let payload: Vec<_> = id.to_be_bytes().into_iter().chain(parts.flatten()).collect();
    chunk(5, cookie, &payload, is_last)
}

fn data(cookie: u64, at: u64, bytes: &[u8], is_last: bool) -> Vec<u8> {
    chunk(1, cookie, &[&at.to_be_bytes()[..], bytes].concat(), is_last)
}

fn hole(cookie: u64, at: u64, len: u32, is_last: bool) -> Vec<u8> {
    chunk(2, cookie, &[&at.to_be_bytes()[..], &len.to_be_bytes()].concat(), is_last)
}

fn none(cookie: u64) -> Vec<u8> {
    chunk(0, cookie, &[], true)
}

/// Adds nothing, and is not the last.
fn nothing(cookie: u64) -> Vec<u8> {
    chunk(0, cookie, &[], false)
}

fn error(cookie: u64, number: u32, text: &[u8], is_last: bool) -> Vec<u8> {
    let text_len = u16::try_from(text.len()).expect("short").to_be_bytes();
    chunk(0x8001, cookie, &[&number.to_be_bytes()[..], &text_len, text].concat(), is_last)
}

/// What a server says that has an export with a bitmap.
fn session() -> Vec<u8> {
    let context = |id: u32, name: &str| [&id.to_be_bytes(), name.as_bytes()].concat();
    let export = [&0_u16.to_be_bytes()[..], &DISK_BYTES.to_be_bytes(), &[0, 3]].concat();
    let blocks = [&3_u16.to_be_bytes()[..], &count(1), &count(4096), &count(1024)].concat();
    [
        b"NBDMAGICIHAVEOPT\x00\x03".to_vec(),
        option_reply(8, 1, &[]),
        option_reply(10, 4, &context(7, BASE_ALLOCATION)),
        option_reply(10, 4, &context(9, BITMAP)),
        option_reply(10, 1, &[]),
        option_reply(7, 3, &export),
        option_reply(7, 3, &blocks),
        option_reply(7, 1, &[]),
        status(0, 9, &[(512, 1), (16384, 0)], false),
        status(0, 7, &[(1024, 0), (0, 9), (8192, 3)], true),
        // Answers to two reads, the second of which comes first; each of two requests.
        data(3, 4096, &[4; 512], true),
        data(1, 512, &[3; 512], false),
        hole(1, 1024, 512, false),
        none(1),
        data(2, 1536, &[5; 512], true),
    ]
    .concat()
}

/// What `future` comes to while `answers` are taken.
fn drive<F: Future>(future: F, answers: &mut Answers) -> F::Output {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
        answers.step();
    }
}

/// A client that is told what follows, and asked for two contexts.
fn client_of(said: &[Vec<u8>], block_min: u64) -> (Client, Answers) {
    let connection = parrot(said.concat());
    let input = Input::new(Arc::clone(&connection));
    let (link, answers) = Link::new(connection, input, vec![7, 9]);
    let description = String::new();
    let export = Export { len: DISK_BYTES, description, block_min, read_max: 4096, flags: 0 };
    (Client { link, export }, answers)
}

async fn read_all(client: &Client, ranges: &[(u64, usize)]) -> Result<Vec<Buf>> {
    let reads = ranges.iter().map(|(at, len)| client.read(*at, Buf::zeroed(*len)));
    join_all(reads.collect::<Vec<_>>())
        .await
        .into_iter()
        .map(|(result, buf)| result.map(|()| buf))
        .collect()
}

fn range(at: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(at), len).expect("fits")
}

/// What is understood of what a server says.
fn talk(said: Vec<u8>) -> Result<(Vec<Part>, Vec<Buf>)> {
    let mut greeting = Greeting::over(parrot(said), "web".to_owned(), None)?;
    let missing = greeting.select(&[BASE_ALLOCATION, BITMAP])?;
    if missing.is_some() {
        return Err(broken("missing"));
    }
    let export = greeting.choose()?;
    let (connection, input, contexts) = greeting.into_parts();
    let (link, mut answers) = Link::new(connection, input, contexts);
    let client = Client { link, export };
    let asked = range(0, client.export().len & !511);
    let parts = drive(client.status(asked), &mut answers)?;
    let read = drive(read_all(&client, &[(512, 1536), (4096, 512)]), &mut answers)?;
    Ok((parts, read))
}

#[test]
fn parts_and_data_are_put_together() {
    let (parts, read) = talk(session()).expect("a good server");
    let part = |len, allocation, bitmap| Part { len, allocation, bitmap };
    assert_eq!(parts, [part(512, 0, 1), part(512, 0, 0), part(8192, 3, 0)]);
    assert_eq!(&*read[0], [[3; 512], [0; 512], [5; 512]].concat());
    assert_eq!(&*read[1], [4; 512]);
}

/// Nothing else can be in a backup: such a part would be one that its reader refuses.
#[test]
fn parts_of_sectors_are_whole_sectors() {
    let told = |cookie, at: &[(u32, u32)], bitmap: &[(u32, u32)]| {
        [status(cookie, 7, at, false), status(cookie, 9, bitmap, true)].concat()
    };
    let said = [
        // A byte of data in zeros, a few that are dirty; it stops within a sector.
        told(0, &[(600, 2), (1, 0), (1200, 2)], &[(100, 0), (7, 1), (1694, 0)]),
        // The rest of that in two answers.
        told(1, &[(100, 0)], &[(100, 0)]),
        told(2, &[(147, 2)], &[(147, 1)]),
    ];
    let (client, mut answers) = client_of(&said, 1);
    let parts = drive(client.status(range(0, DISK_BYTES)), &mut answers).expect("it tells much");
    let part = |len, allocation, bitmap| Part { len, allocation, bitmap };
    assert_eq!(parts, [part(512, 2, 1), part(512, 0, 0), part(512, 2, 0), part(512, 0, 1)]);
    let (client, mut answers) = client_of(&[told(0, &[(100, 0)], &[(100, 0)])], 1);
    drive(client.status(range(0, DISK_BYTES)), &mut answers).unwrap_err();
    // It stops within the second sector, and reports an error for the rest of that.
    let said = [told(0, &[(700, 3)], &[(700, 0)]), error(1, 5, b"gone", true)];
    let (client, mut answers) = client_of(&said, 1);
    let parts = drive(client.status(range(0, DISK_BYTES)), &mut answers).expect("a sector");
    assert_eq!(parts, [part(512, 3, 0)]);
}

#[test]
fn requests_are_whole_blocks_of_the_server() {
    let said = [
        data(0, 4096, &[[1; 512], [2; 512], [3; 512], [4; 512]].concat(), true),
        status(1, 9, &[(2048, 0)], false),
        status(1, 7, &[(512, 3), (1024, 0), (512, 3)], true),
    ];
    let (client, mut answers) = client_of(&said, 2048);
    let read = drive(read_all(&client, &[(4608, 1024)]), &mut answers).expect("a read");
    assert_eq!(&*read[0], [[2; 512], [3; 512]].concat());
    let parts = drive(client.status(range(4608, 1024)), &mut answers).expect("a status");
    assert_eq!(parts, [Part { len: 1024, allocation: 0, bitmap: 0 }]);
    let (result, _) = drive(client.read(DISK_BYTES - 512, Buf::zeroed(1024)), &mut answers);
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Invalid, "it reaches beyond the end");
}

#[test]
fn answers_without_bytes_come_to_an_end() {
    let asked = |count| {
        let empty = option_reply(7, 3, &[0, 9]);
        let greeting = b"NBDMAGICIHAVEOPT\x00\x03".to_vec();
        let said = [greeting, option_reply(8, 1, &[]), empty.repeat(count)].concat();
        Greeting::over(parrot(said), String::new(), None).expect("a greeting").choose()
    };
    let ended = asked(1000).unwrap_err().to_string();
    assert!(ended.contains("ended the connection"), "{ended}");
    let refused = asked(1 << 20).unwrap_err().to_string();
    assert!(refused.contains("makes no sense"), "{refused}");
}

#[test]
fn each_byte_of_a_read_comes_once() {
    let half = |cookie, at, is_last| data(cookie, at, &[3; 512], is_last);
    let read = |said: &[Vec<u8>]| {
        let (client, mut answers) = client_of(said, 1);
        drive(read_all(&client, &[(0, 1024), (4096, 1024)]), &mut answers)
    };
    let first = [half(0, 512, false), half(0, 0, true)];
    let second = [half(1, 4096, false), half(1, 4608, true)];
    read(&[&first[..], &second].concat()).expect("in any order");
    for (said, why) in [
        (vec![half(0, 0, false), half(0, 0, true)], "twice"),
        (vec![half(0, 0, false), data(0, 256, &[3; 512], true)], "twice"),
        (vec![half(0, 0, true)], "too few"),
        (vec![data(0, 512, &[3; 1024], true)], "another place"),
        (vec![hole(0, 4096, 512, true)], "another place"),
        ([&first[..], &[none(0)]].concat(), "answer to nothing"),
        ([&first[..], &[half(0, 0, false)]].concat(), "answer to nothing"),
        (vec![status(0, 7, &[(512, 0)], true)], "another kind"),
        (vec![nothing(0), half(0, 0, false), half(0, 512, true)], "another kind"),
        (vec![data(0, 0, &[], false), half(0, 0, false), half(0, 512, true)], "no data"),
        (vec![hole(0, 512, 0, false), half(0, 0, false), half(0, 512, true)], "no data"),
    ] {
        let refused = read(&said).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}, not {why}");
    }
}

/// A server may divide an answer as it likes, within limits: each piece costs something here.
#[test]
fn a_reply_has_a_bounded_number_of_pieces() {
    const LEN: usize = 16384;
    let read = |said: Vec<Vec<u8>>| {
        let (client, mut answers) = client_of(&said, 1);
        drive(client.link.read(0, Buf::zeroed(LEN)), &mut answers).0
    };
    let pieces = |order: &mut dyn Iterator<Item = usize>| {
        order.map(|at| data(0, at as u64, &[3], false)).collect::<Vec<_>>()
    };
    let whole = |mut said: Vec<Vec<u8>>| {
        said.push(none(0));
        read(said)
    };
    whole(pieces(&mut (0..LEN))).expect("in order");
    whole(pieces(&mut (0..LEN).rev())).expect("back to front");
    let apart = whole(pieces(&mut (0..LEN).step_by(2))).unwrap_err().to_string();
    assert!(apart.contains("too many pieces"), "{apart}");
    let errors = |count| vec![error(0, 5, b"bad", false); count];
    let reported = whole(errors(100)).unwrap_err().to_string();
    assert!(reported.contains("bad"), "{reported}");
    let refused = whole(errors(5000)).unwrap_err().to_string();
    assert!(refused.contains("too many errors"), "{refused}");
    // A context that speaks twice.
    let said = [7, 9, 7].map(|id| status(0, id, &[(512, 0)], false));
    let (client, mut answers) = client_of(&said, 1);
    let twice = drive(client.status(range(0, 512)), &mut answers).unwrap_err().to_string();
    assert!(twice.contains("twice"), "{twice}");
}

/// What a server could not read is an error of that request alone; the end of the connection is one
/// of all requests.
#[test]
fn errors_belong_to_their_requests() {
    let said = [error(1, 5, b"bad\x1b[2J sector", false), data(0, 0, &[3; 512], true), none(1)];
    let (client, mut answers) = client_of(&said, 1);
    let both = async {
        let (first, second) = (client.read(0, Buf::new(512)), client.read(512, Buf::new(512)));
        join_all([first, second]).await
    };
    let outcomes: Vec<_> =
        drive(both, &mut answers).into_iter().map(|(result, _)| result).collect();
    outcomes[0].as_ref().expect("it came");
    let reported = outcomes[1].as_ref().unwrap_err().to_string();
    assert_eq!(reported, "the server reports an error: bad[2J sector");
    for _ in 0..2 {
        let (ended, buf) = drive(client.read(0, Buf::new(512)), &mut answers);
        assert!(ended.unwrap_err().to_string().contains("ended the connection"));
        assert_eq!(buf.len(), 512, "the buffer comes back");
    }
}

/// A server may have structured replies, and not tell what is allocated.
#[test]
fn a_server_that_refuses_contexts_has_none() {
    let select = |kind: u32| {
        let greeting = b"NBDMAGICIHAVEOPT\x00\x03".to_vec();
        let refusal = option_reply(10, 1 << 31 | kind, b"not here");
        let said = [greeting, option_reply(8, 1, &[]), refusal].concat();
        let mut greeting = Greeting::over(parrot(said), String::new(), None).expect("a greeting");
        greeting.select(&[BASE_ALLOCATION]).map(|missing| missing.map(str::to_owned))
    };
    for kind in [1, 2] {
        assert_eq!(select(kind).expect("no error"), Some(BASE_ALLOCATION.to_owned()));
    }
    let refused = select(3).unwrap_err().to_string();
    assert!(refused.contains("refuses contexts: not here"), "{refused}");
}

#[test]
fn any_server_is_survived() {
    let good = session();
    for end in 0..good.len() {
        assert!(talk(good[..end].to_vec()).is_err(), "{end} bytes");
    }
    for seed in 0..20_000 {
        let mut rng = Rng::new(seed);
        let mut said = good.clone();
        for _ in 0..=rng.below(3) {
            let at = usize::try_from(rng.below(said.len() as u64)).expect("fits");
            said[at] = u8::try_from(rng.below(256)).expect("a byte");
        }
        if let Ok((parts, read)) = talk(said) {
            let total: u64 = parts.iter().map(|part| part.len).sum();
            let are_whole = parts.iter().all(|part| part.len > 0 && part.len % SECTOR_BYTES == 0);
            assert!(total > 0 && are_whole, "seed {seed}");
            assert_eq!(read.iter().map(|buf| buf.len()).collect::<Vec<_>>(), [1536, 512]);
        }
    }
}

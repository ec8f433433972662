use super::*;
use mica_units::{GuestOffset, Rng};
use std::io::Cursor;

/// A server that says what is written down, whatever it is asked.
struct Parrot(Cursor<Vec<u8>>);

impl Read for Parrot {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Parrot {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn option_reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let magic = OPTION_REPLY_MAGIC.to_be_bytes();
    let len = count(payload.len());
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, payload].concat()
}

fn chunk(kind: u16, cookie: u64, payload: &[u8], is_last: bool) -> Vec<u8> {
    let (magic, flags) = (CHUNK_MAGIC.to_be_bytes(), u16::from(is_last).to_be_bytes());
    let len = count(payload.len());
    [&magic[..], &flags, &kind.to_be_bytes(), &cookie.to_be_bytes(), &len, payload].concat()
}

fn status(id: u32, parts: &[(u32, u32)]) -> Vec<u8> {
    let parts = parts.iter().flat_map(|(len, flags)| [len.to_be_bytes(), flags.to_be_bytes()]);
    id.to_be_bytes().into_iter().chain(parts.flatten()).collect()
}

/// What a server says that has an export of 16 KiB with a bitmap.
fn session() -> Vec<u8> {
    let context = |id: u32, name: &str| [&id.to_be_bytes(), name.as_bytes()].concat();
    let export = [&INFO_EXPORT.to_be_bytes()[..], &16384_u64.to_be_bytes(), &[0; 2]].concat();
    let data = |at: u64, bytes: &[u8]| [&at.to_be_bytes()[..], bytes].concat();
    let hole = [&1024_u64.to_be_bytes()[..], &512_u32.to_be_bytes()].concat();
    [
        GREETING.to_vec(),
        vec![0, 3],
        option_reply(OPT_STRUCTURED_REPLY, REP_ACK, &[]),
        option_reply(OPT_SET_META_CONTEXT, REP_META_CONTEXT, &context(7, "base:allocation")),
        option_reply(OPT_SET_META_CONTEXT, REP_META_CONTEXT, &context(9, "qemu:dirty-bitmap:mon")),
        option_reply(OPT_SET_META_CONTEXT, REP_ACK, &[]),
        option_reply(OPT_GO, REP_INFO, &export),
        option_reply(OPT_GO, REP_ACK, &[]),
        chunk(CHUNK_BLOCK_STATUS, 0, &status(9, &[(512, 1), (16384, 0)]), false),
        chunk(CHUNK_BLOCK_STATUS, 0, &status(7, &[(1024, 0), (0, 9), (8192, 3)]), true),
        // Answers to two reads, the second of which comes first.
        chunk(CHUNK_OFFSET_DATA, 1, &data(4096, &[4; 512]), true),
        chunk(CHUNK_OFFSET_DATA, 0, &data(512, &[3; 512]), false),
        chunk(CHUNK_OFFSET_HOLE, 0, &hole, false),
        chunk(CHUNK_NONE, 0, &[], true),
    ]
    .concat()
}

/// A client that is told what follows, and asked for two contexts.
fn client_of(said: &[Vec<u8>]) -> Client {
    let stream: Box<dyn Connection> = Box::new(Parrot(Cursor::new(said.concat())));
    let (stream, export) = (BufReader::new(stream), "web".to_owned());
    Client { stream, export, contexts: vec![7, 9], len: 16384 }
}

/// What is understood of what a server says.
fn talk(said: Vec<u8>) -> Result<(Vec<Part>, Vec<Buf>)> {
    let parrot = Box::new(Parrot(Cursor::new(said)));
    let mut client = Client::greet(parrot, "web".to_owned())?;
    let missing = client.select(&[BASE_ALLOCATION, "qemu:dirty-bitmap:mon"])?;
    if missing.is_some() {
        return Err(broken("missing"));
    }
    let export = client.go()?;
    let parts = client.status_of_sectors(0, export.len)?;
    let range = |at, len| GuestRange::new(GuestOffset::new(at), len).expect("fits");
    let read = client.read(&[range(512, 1024), range(4096, 512)])?;
    Ok((parts, read))
}

#[test]
fn parts_and_data_are_put_together() {
    let (parts, read) = talk(session()).expect("a good server");
    let part = |len, allocation, bitmap| Part { len, allocation, bitmap };
    assert_eq!(parts, [part(512, 0, 1), part(512, 0, 0), part(8192, 3, 0)]);
    assert_eq!(&*read[0], [[3; 512], [0; 512]].concat());
    assert_eq!(&*read[1], [4; 512]);
}

/// Nothing else can be in a backup: such a part would be one that its reader refuses.
#[test]
fn parts_of_sectors_are_whole_sectors() {
    let told = |at: &[(u32, u32)], bitmap: &[(u32, u32)]| {
        let at = chunk(CHUNK_BLOCK_STATUS, 0, &status(7, at), false);
        [at, chunk(CHUNK_BLOCK_STATUS, 0, &status(9, bitmap), true)].concat()
    };
    let mut client = client_of(&[
        // A byte of data in zeros, a few that are dirty; it stops within a sector.
        told(&[(600, 2), (1, 0), (1200, 2)], &[(100, 0), (7, 1), (1694, 0)]),
        // The rest of that in two answers.
        told(&[(100, 0)], &[(100, 0)]),
        told(&[(147, 2)], &[(147, 1)]),
    ]);
    let parts = client.status_of_sectors(0, 16384).expect("a server that tells much");
    let part = |len, allocation, bitmap| Part { len, allocation, bitmap };
    assert_eq!(parts, [part(512, 2, 1), part(512, 0, 0), part(512, 2, 0), part(512, 0, 1)]);
    let mut client = client_of(&[told(&[(100, 0)], &[(100, 0)])]);
    client.status_of_sectors(0, 16384).unwrap_err();
}

#[test]
fn answers_without_bytes_come_to_an_end() {
    let empty = option_reply(OPT_GO, REP_INFO, &[]);
    let last = option_reply(OPT_GO, REP_ACK, &[]);
    let asked = |count| client_of(&[empty.repeat(count), last.clone()]).option(OPT_GO, &[]);
    assert_eq!(asked(1000).expect("a few").len(), 1000);
    let refused = asked(1 << 20).unwrap_err();
    assert!(refused.to_string().contains("makes no sense"), "{refused}");
}

#[test]
fn each_byte_of_a_read_comes_once() {
    let data = |cookie, at: u64, is_last| {
        let payload = [&at.to_be_bytes()[..], &[3; 512]].concat();
        chunk(CHUNK_OFFSET_DATA, cookie, &payload, is_last)
    };
    let read = |said: &[Vec<u8>]| {
        let range = |at| GuestRange::new(GuestOffset::new(at), 1024).expect("fits");
        client_of(said).read(&[range(0), range(4096)])
    };
    let first = [data(0, 512, false), data(0, 0, true)];
    let second = [data(1, 4096, false), data(1, 4608, true)];
    read(&[&first[..], &second].concat()).expect("in any order");
    let done = chunk(CHUNK_NONE, 0, &[], true);
    for (said, why) in [
        (vec![data(0, 0, false), data(0, 0, true)], "twice"),
        (vec![data(0, 0, true)], "too few"),
        ([&first[..], &[done]].concat(), "was answered"),
        ([&first[..], &[data(0, 0, false)]].concat(), "was answered"),
    ] {
        let refused = read(&said).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}, not {why}");
    }
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
            assert_eq!(read.iter().map(|buf| buf.len()).collect::<Vec<_>>(), [1024, 512]);
        }
    }
}

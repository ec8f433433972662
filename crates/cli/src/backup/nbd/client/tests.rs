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

/// What is understood of what a server says.
fn talk(said: Vec<u8>) -> Result<(Vec<Part>, Vec<Buf>)> {
    let parrot = Box::new(Parrot(Cursor::new(said)));
    let mut client = Client::greet(parrot, "web".to_owned())?;
    let missing = client.select(&[BASE_ALLOCATION, "qemu:dirty-bitmap:mon"])?;
    if missing.is_some() {
        return Err(broken("missing"));
    }
    let export = client.go()?;
    let parts = client.status(0, export.len)?;
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
            assert!(total > 0 && parts.iter().all(|part| part.len > 0), "seed {seed}");
            assert_eq!(read.iter().map(|buf| buf.len()).collect::<Vec<_>>(), [1024, 512]);
        }
    }
}

//! A server with nothing behind it, in a thread of this process: the most that the load generator
//! can do, to separate the protocol's own cost from a server's.

use super::drive::{Load, Outcome, Request, run};
use super::pattern::Pattern;
use anyhow::{Context, Result, ensure};
use mica_tests::nbd;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// Length of the disk, which does not exist.
const DISK_BYTES: u64 = 8 << 30;
/// Replies gathered before they are sent.
const REPLIES_BYTES_MAX: usize = 1 << 20;

/// The load generator against an empty server: random 4 KiB reads, `depth` in flight.
pub(crate) fn ceiling(depth: usize, limit: Duration) -> Result<Outcome> {
    let load = Load {
        request: Request::Read,
        pattern: Pattern::Mix,
        bytes: 4096,
        depth,
        limit,
        owners: None,
        seed: 1,
    };
    with_clients(1, |clients| run(clients.first_mut().context("no client")?, &load))
}

/// Runs `drive` with this many connections to an empty server.
pub(crate) fn with_clients<T>(
    count: usize,
    drive: impl FnOnce(&mut [nbd::Connection]) -> Result<T>,
) -> Result<T> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("null");
    let listener = UnixListener::bind(&path)?;
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    for _ in 0..count {
        let listener = listener.try_clone()?;
        servers.push(std::thread::spawn(move || serve(listener.accept()?.0)));
        clients.push(nbd::Connection::open(&path, "", &nbd::Wish::default())?);
    }
    let outcome = drive(&mut clients)?;
    for client in clients {
        client.disconnect()?;
    }
    for server in servers {
        server.join().ok().context("the null server panicked")??;
    }
    Ok(outcome)
}

/// Serves one client, with only the few messages that the load generator sends.
fn serve(mut stream: UnixStream) -> Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    stream.read_exact(&mut [0; 4])?;
    let mut option = [0; 16];
    stream.read_exact(&mut option)?;
    let mut len = [0; 4];
    len.copy_from_slice(&option[12..]);
    let len = u32::from_be_bytes(len);
    ensure!(len < 4096, "an option of {len} bytes");
    stream.read_exact(&mut vec![0; len as usize])?;
    let reply = |kind: u32, data: &[u8]| {
        let mut reply = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        reply.extend_from_slice(&option[8..12]);
        reply.extend(kind.to_be_bytes());
        reply.extend(u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
        reply.extend_from_slice(data);
        reply
    };
    // NBD_INFO_EXPORT with flags HAS_FLAGS and SEND_FLUSH, then the end of the option.
    let mut export = vec![0, 0];
    export.extend(DISK_BYTES.to_be_bytes());
    export.extend([0, 5]);
    stream.write_all(&[reply(3, &export), reply(1, &[])].concat())?;
    transmit(&mut stream)
}

fn transmit(stream: &mut UnixStream) -> Result<()> {
    let mut requests = vec![0; 64 << 10];
    let mut end = 0;
    // Bytes of a write that are still to be received and discarded.
    let mut payload = 0;
    let mut replies = Vec::with_capacity(2 * REPLIES_BYTES_MAX);
    loop {
        let count = stream.read(&mut requests[end..])?;
        if count == 0 {
            return Ok(());
        }
        end += count;
        let mut at = 0;
        loop {
            let skipped = payload.min(end - at);
            (at, payload) = (at + skipped, payload - skipped);
            let Some(request) = requests[at..end].first_chunk::<{ nbd::REQUEST_BYTES }>() else {
                break;
            };
            at += request.len();
            let len = u32::from_be_bytes([request[24], request[25], request[26], request[27]]);
            ensure!(len as usize <= REPLIES_BYTES_MAX, "a request of {len} bytes");
            replies.extend(nbd::SIMPLE_REPLY_MAGIC.to_be_bytes());
            replies.extend([0; 4]);
            replies.extend_from_slice(&request[8..16]);
            match u16::from_be_bytes([request[6], request[7]]) {
                nbd::CMD_DISCONNECT => return Ok(()),
                nbd::CMD_READ => replies.resize(replies.len() + len as usize, 0),
                nbd::CMD_WRITE => payload = len as usize,
                _ => {}
            }
            if replies.len() >= REPLIES_BYTES_MAX {
                stream.write_all(&replies)?;
                replies.clear();
            }
        }
        stream.write_all(&replies)?;
        replies.clear();
        requests.copy_within(at..end, 0);
        end -= at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_served_fast_and_without_fail() {
        let outcome = ceiling(32, Duration::from_millis(300)).expect("served");
        assert_eq!((outcome.failed, outcome.wrong), (0, 0));
        assert!(outcome.per_second() > 20_000.0, "{} reads/s", outcome.per_second());
    }
}

//! Warnings that a client found no room. Whoever waits at a socket causes one after the other.

use mica_rt::LogLimit;
use rustix::io::Errno;
use std::io;

/// Says that `client` could not be let in, and what helps against that; at most once a minute,
/// whatever the client.
pub fn warn_of_lack(client: &str, error: &io::Error) {
    static LIMIT: LogLimit = LogLimit::once_a_minute();
    let Some(omitted) = LIMIT.admit() else { return };
    let cure = match Errno::from_io_error(error) {
        Some(Errno::MFILE) => {
            ": all files that this process may have open are, and none of them is idle: raise \
             LimitNOFILE= in its unit, or `ulimit -n`"
        }
        Some(Errno::NFILE) => ": all files that the system may have open are: raise fs.file-max",
        _ => "",
    };
    tracing::warn!("{client} has to wait: {error}{cure}{omitted}");
}

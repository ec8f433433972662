//! The host's side: what guests are given, the servers of their disks, and how the disks are
//! judged.

use mica_gen::Rng;
use mica_tests::server::Server;
use mica_tests::{command, qemu};
use std::fs;
use std::path::{Path, PathBuf};

pub(super) const MIB: usize = 1 << 20;

/// `len` bytes that differ for every `seed`.
pub(super) fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let words = std::iter::repeat_with(|| rng.next_u64().to_le_bytes());
    words.take(len.div_ceil(8)).flatten().take(len).collect()
}

/// Where the vhost-user server of a test in `dir` listens, whenever it is started.
pub(super) fn vhost_socket(dir: &Path) -> PathBuf {
    dir.join("vhost-user")
}

/// Serves `image` in `dir` as a vhost-user-blk device, and over NBD, with `more` options.
pub(super) fn serve(dir: &Path, image: &str, format: &str, more: &[&str]) -> Server {
    try_serve(dir, image, format, more).unwrap_or_else(|error| panic!("not served: {error:#}"))
}

pub(super) fn try_serve(
    dir: &Path,
    image: &str,
    format: &str,
    more: &[&str],
) -> anyhow::Result<Server> {
    let socket = vhost_socket(dir).display().to_string();
    let options = [&["--vhost-user", &socket], more].concat();
    Server::mica_writable(&dir.join(image), format, &options)
}

/// Stops `server`, which has to exit cleanly.
#[track_caller]
pub(super) fn stop(server: Server) {
    let stopped = server.stop().expect("it stops");
    assert!(stopped.status.success() && !stopped.socket_left, "{stopped:?}");
}

/// What QEMU may find in an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Clean,
    /// Unused clusters, at most: what a kill leaves.
    Leaks,
}

/// The content of `image` in `dir` as QEMU reads it, after it has found nothing worse than `worst`.
#[track_caller]
pub(super) fn content(dir: &Path, image: &str, format: &str, worst: Verdict) -> Vec<u8> {
    if format == "raw" {
        return fs::read(dir.join(image)).expect("there");
    }
    let said = qemu::img(dir, ["check", "-f", format, image]);
    let is_fine = said.code() == Some(0) || said.code() == Some(3) && worst == Verdict::Leaks;
    // It prints a line for each cluster on standard error, which can be thousands.
    assert!(is_fine, "{}: {}", said.status, said.stdout);
    qemu::flatten(dir, image, "flat.raw");
    fs::read(dir.join("flat.raw")).expect("just written")
}

/// The SHA-256 of file `name` in `dir`, by the host's own program.
pub(super) fn sha256(dir: &Path, name: &str) -> String {
    let file = dir.join(name).display().to_string();
    let said = command::run("sha256sum", [&file]).ok();
    said.split_whitespace().next().expect("a sum").to_owned()
}

/// What follows `name` on a line of `console`.
#[track_caller]
pub(super) fn said<'a>(console: &'a str, name: &str) -> &'a str {
    let mut words = console.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    words.next().unwrap_or_else(|| panic!("the guest does not say {name}:\n{console}")).trim()
}

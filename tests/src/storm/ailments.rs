//! What ails the storage of servers: options of `--inject`.

use mica_units::Rng;

/// Which operations on images are slow, and how slow.
pub(super) fn slowness(rng: &mut Rng) -> String {
    let operations = rng.choose(&["read", "write", "sync", "sync", "write+sync", "all"]);
    format!("delay={}us,op={operations}", 50 + rng.below(4000))
}

/// Which operations on images fail, and when.
pub(super) fn sickness(rng: &mut Rng) -> String {
    let operations = rng.choose(&["read", "write", "sync", "write+sync", "punch+zero", "all"]);
    let errno = rng.choose(&["EIO", "EIO", "ENOSPC", "EDQUOT"]);
    // A disk is read as a whole, by many operations.
    let is_read = ["read", "all"].contains(&operations);
    let when = match rng.below(4) {
        _ if is_read => format!("nth:{}", 1 + rng.below(4000)),
        0 => format!("nth:{}", 1 + rng.below(400)),
        1 => format!("from:{}", 20 + rng.below(400)),
        2 => format!("every:{}", 40 + rng.below(400)),
        _ => format!("0.{}%,seed={}", 1 + rng.below(9), rng.below(1 << 32)),
    };
    format!("error={when},op={operations},errno={errno}")
}

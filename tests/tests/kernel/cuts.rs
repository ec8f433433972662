//! Power cuts beneath the real kernel. mica serves an image that is on ext4, on a loop device whose
//! disk is QEMU's `blklogwrites`: a log of everything that reaches the disk, and of the flushes.
//! The log is replayed up to many points, and each time the disk is written as a power cut could
//! have left it at that point. ext4 replays its journal; the image has to be sound, and each of its
//! sectors has to hold what was durable, or something newer (`mica_tests::power`).
//!
//! `MICA_CUTS` says how many states of the disk are judged for each shape of image, `MICA_CUT_SEED`
//! where the random numbers begin. A run that fails says how to repeat it. The same seed makes the
//! same requests and cuts, but the kernel and the threads have no seed, so it is not the same run:
//! a failed run therefore also leaves the disk that it judged, `crash.img`, which can be mounted
//! again.
//!
//! The long form, with a program that was built for release, takes some minutes:
//!
//! ```text
//! MICA_BIN=target/release/mica MICA_CUTS=500 cargo test -p mica-tests --test kernel cuts
//! ```

mod load;
mod round;
mod shapes;

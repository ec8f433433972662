//! Random damage to the metadata of real images: mica reads what QEMU reads, or refuses, and never
//! dies.

use super::harm::Victim;
use mica_gen::Rng;
use mica_tests::server::Server;
use mica_tests::{judge, nbd, qemu};
use std::fs;

/// Damaged copies of each image; `MICA_MUTATED` sets another number, `SEED` the first seed.
const COPIES: u64 = 40;

#[test]
fn damaged_images_read_as_in_qemu_or_are_refused() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let copies = std::env::var("MICA_MUTATED");
    let copies = copies.map_or(COPIES, |copies| copies.parse().expect("a number"));
    let mut served = 0;
    for (number, options) in
        (0..).zip(["cluster_size=64k", "cluster_size=4k,extended_l2=off", "extended_l2=on"])
    {
        let Some(victim) = Victim::new(options) else { return };
        let good = fs::read(victim.path()).expect("read");
        for copy in 0..copies {
            let mut rng = Rng::for_part(seed, number << 32 | copy);
            fs::write(victim.path(), &good).expect("written");
            damage(&victim, &mut rng);
            println!("SEED={seed}, {options}, copy {copy}");
            served += u32::from(judge_copy(&victim));
        }
    }
    assert!(served > 20, "only {served} damaged images could be read: the damage is too great");
}

/// Changes one to three numbers of the header, the L1 table, an L2 table or the refcounts.
fn damage(victim: &Victim, rng: &mut Rng) {
    let tables = [0, victim.l1(), victim.l2(), victim.refcount_table(), victim.snapshots()];
    for _ in 0..=rng.below(3) {
        let table = rng.choose(&tables);
        let within = if table == 0 { rng.below(28) * 4 } else { rng.below(130) * 8 };
        let old = victim.number(table + within);
        let new = match rng.below(6) {
            0 => old ^ 1 << rng.below(64),
            1 => old.wrapping_add(rng.below(1024)),
            2 => rng.next_u64(),
            3 => u64::MAX,
            4 => 0,
            _ => old ^ rng.next_u64() & 0xffff,
        };
        victim.patch(table + within, new.to_be_bytes());
    }
}

/// Whether the copy could be read; it must then be as QEMU reads it.
fn judge_copy(victim: &Victim) -> bool {
    let server = match Server::mica(&victim.path(), "qcow2", &[]) {
        Ok(server) => server,
        Err(error) => {
            let text = format!("{error:#}");
            assert!(!text.contains("panicked") && !text.contains("signal"), "{text}");
            return false;
        }
    };
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    // A disk that became huge is examined only up to its old length.
    let len = client.len.min(8 << 20);
    let read = client.read(0, len);
    let stopped = server.stop().expect("it stops");
    assert!(stopped.status.success() && !stopped.log.contains("panicked"), "{stopped:?}");
    let Ok(bytes) = read else { return false };
    // Blocks as large as possible: with one sector each, they took most of the test's time.
    let block = 1 << len.trailing_zeros().min(20);
    let [block, count] = [format!("bs={block}"), format!("count={}", len / block)];
    let dd = ["dd", "-f", "qcow2", "-O", "raw", &block, &count, "if=disk.qcow2", "of=flat.raw"];
    let theirs = qemu::img(victim.dir(), dd);
    if theirs.stderr.contains("snapshot") {
        // QEMU reads the snapshot table of every image that it opens; mica only when asked for a
        // snapshot.
        return false;
    }
    assert_eq!(theirs.code(), Some(0), "mica serves what QEMU refuses: {theirs}");
    let mut flat = fs::read(victim.dir().join("flat.raw")).expect("read");
    flat.resize(bytes.len(), 0);
    judge::same_bytes("damaged", &bytes, &flat);
    true
}

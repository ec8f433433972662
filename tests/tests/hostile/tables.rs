//! Headers and tables that point where they must not, or claim impossible sizes.

use super::harm::{ADDRESS, Victim};
use mica_tests::qemu;

const COPIED: u64 = 1 << 63;

#[test]
fn absurd_sizes_of_tables_are_refused() {
    // CVE-2014-0143, CVE-2014-0144, CVE-2014-0145: L1, refcount and snapshot tables.
    let l1_entries = (36, 4);
    let refcount_clusters = (56, 4);
    let snapshots = (60, 4);
    for ((offset, width), value) in [
        (l1_entries, 0xffff_ffff_u64),
        (l1_entries, 0x7fff_ffff),
        (l1_entries, (32 << 20) / 8 + 1),
        (l1_entries, 0),
        (refcount_clusters, 0xffff_ffff),
        (refcount_clusters, 129),
        (refcount_clusters, 0),
        (snapshots, 0xffff_ffff),
        (snapshots, 65_537),
    ] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        let bytes = value.to_be_bytes();
        victim.patch(offset, &bytes[8 - width..]);
        println!("{value:#x} at {offset}");
        victim.refused();
    }
}

/// Each entry of the largest L1 table cost about 70 bytes, whatever it named: 312 MiB, and seconds.
#[test]
fn the_largest_l1_table_is_opened_for_writing_in_little_memory() {
    const ENTRIES: u64 = (32 << 20) / 8;
    const CLUSTER: u64 = 64 << 10;
    // Beyond the clusters that the table itself takes.
    let first = 1024;
    // Entries for adjacent clusters, for every second one in random order, for none in the file.
    let side_by_side = |index: u64| first + index;
    let strewn = |index: u64| first + 2 * (index * 0x9e37_79b1 % ENTRIES);
    let beyond = |index: u64| first + 977 * (index + 1);
    let shapes: [(&dyn Fn(u64) -> u64, u64); 3] =
        [(&side_by_side, ENTRIES), (&strewn, 2 * ENTRIES), (&beyond, 1)];
    for (cluster_of, clusters) in shapes {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        let entries = (0..ENTRIES).map(|index| COPIED | (cluster_of(index) * CLUSTER));
        let table: Vec<u8> = entries.flat_map(u64::to_be_bytes).collect();
        let at = 256 * CLUSTER;
        victim.patch(at, &table);
        victim.set_len((first + clusters) * CLUSTER);
        victim.patch(36, u32::try_from(ENTRIES).expect("4 Mi").to_be_bytes());
        victim.patch(40, at.to_be_bytes());
        victim.opens_for_writing();
    }
}

#[test]
fn tables_unaligned_or_beyond_all_limits_are_refused() {
    for offset in [40, 48, 64] {
        for place in [0x1_0001, 0x1_0200, 1 << 63, u64::MAX] {
            let Some(victim) = Victim::new("cluster_size=64k") else { return };
            victim.patch(offset, u64::to_be_bytes(place));
            println!("{place:#x} at {offset}");
            victim.refused();
        }
    }
}

#[test]
fn tables_beyond_the_file_read_as_in_qemu() {
    for offset in [40, 48] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        victim.patch(offset, (1_u64 << 45).to_be_bytes());
        victim.served_whole();
    }
    // Beyond what the system can read, where QEMU gives up; and a snapshot table without a place.
    for (offset, place) in [(40, 0x7fff_ffff_ffff_0000_u64), (64, 1 << 45)] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        victim.patch(offset, place.to_be_bytes());
        victim.served();
    }
}

#[test]
fn headers_that_contradict_themselves_are_refused() {
    for (offset, bytes) in [
        (0_u64, &b"QFI\xfc"[..]),
        // CVE-2014-0222: version 1, and versions that are not defined.
        (4, &1_u32.to_be_bytes()),
        (4, &0_u32.to_be_bytes()),
        (4, &4_u32.to_be_bytes()),
        (20, &8_u32.to_be_bytes()),
        (20, &22_u32.to_be_bytes()),
        (20, &0xffff_ffff_u32.to_be_bytes()),
        // A disk that is larger than its L1 table, or than anything.
        (24, &(1_u64 << 40).to_be_bytes()),
        (24, &u64::MAX.to_be_bytes()),
        // Encryption: never served as if it were data.
        (32, &1_u32.to_be_bytes()),
        (32, &2_u32.to_be_bytes()),
        (32, &3_u32.to_be_bytes()),
        // Unknown incompatible bits; a compression type without its bit; refcounts too wide.
        (72, &(1_u64 << 63).to_be_bytes()),
        (72, &(1_u64 << 20).to_be_bytes()),
        (72, &(1_u64 << 3).to_be_bytes()),
        (104, &[1]),
        (104, &[2]),
        (96, &7_u32.to_be_bytes()),
        // Header lengths.
        (100, &0_u32.to_be_bytes()),
        (100, &100_u32.to_be_bytes()),
        (100, &0xffff_fff8_u32.to_be_bytes()),
    ] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        victim.patch(offset, bytes);
        println!("{bytes:02x?} at {offset}");
        victim.refused();
    }
}

#[test]
fn extensions_beyond_the_header_are_refused() {
    for len in [0xffff_ffff_u32, 0x7fff_ffff, 65_536, 65_536 - 112 - 7] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        victim.patch(112, 0x6803_f857_u32.to_be_bytes()).patch(116, len.to_be_bytes());
        println!("{len:#x}");
        victim.refused();
    }
}

#[test]
fn a_malicious_snapshot_table_does_no_harm() {
    // CVE-2014-0143 and 0147: an L1 size, an offset, lengths of names, extra data.
    for (offset, bytes) in [
        (0, &u64::MAX.to_be_bytes()[..]),
        (0, &0x1_0001_u64.to_be_bytes()),
        (8, &0xffff_ffff_u32.to_be_bytes()),
        (12, &0xffff_u16.to_be_bytes()),
        (14, &0xffff_u16.to_be_bytes()),
        (36, &0xffff_ffff_u32.to_be_bytes()),
        (36, &1025_u32.to_be_bytes()),
    ] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        let table = victim.snapshots();
        victim.patch(table + offset, bytes);
        println!("{bytes:02x?} at {offset}");
        // Serving the present state does not need the snapshots; both answers are good.
        let said = mica_tests::mica::run(["info", &victim.path().display().to_string()]);
        if said.code() == Some(0) {
            victim.served();
        }
        let mut serve = std::process::Command::new(mica_tests::mica::binary());
        serve.arg("serve").arg("--nbd").arg(victim.dir().join("socket")).args(["-l", "one"]);
        serve.arg(victim.path());
        let limit = std::time::Duration::from_secs(60);
        mica_tests::command::finish_within(&mut serve, limit).refusal();
    }
}

/// What is planned ahead grew over the empty half, and the other half took 300 MB at once; with a
/// larger table 9 GB.
#[test]
fn a_disk_of_a_table_that_all_name_is_surveyed_in_little_memory() {
    const L1_ENTRIES: u64 = 1024;
    const L2_ENTRIES: u64 = 8192;
    const CLUSTER: u64 = 64 << 10;
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let (data, tables) = (64 * CLUSTER, [65 * CLUSTER, 66 * CLUSTER]);
    victim.set_len(67 * CLUSTER);
    let entries = |count: u64, entry: &dyn Fn(u64) -> u64| -> Vec<u8> {
        (0..count).flat_map(|index| entry(index).to_be_bytes()).collect()
    };
    let fragmented = |index: u64| if index.is_multiple_of(2) { data | COPIED } else { 0 };
    victim.patch(data, vec![1; usize::try_from(CLUSTER).expect("small")]);
    victim.patch(tables[0], entries(L2_ENTRIES, &fragmented));
    let half = |index: u64| if index < L1_ENTRIES / 2 { 0 } else { tables[0] };
    victim.patch(tables[1], entries(L1_ENTRIES, &half));
    victim.patch(24, (L1_ENTRIES * L2_ENTRIES * CLUSTER).to_be_bytes());
    victim.patch(36, u32::try_from(L1_ENTRIES).expect("few").to_be_bytes());
    victim.patch(40, tables[1].to_be_bytes());
    let half = L1_ENTRIES * L2_ENTRIES / 2;
    let measured = victim.run_within(250 << 20, &["measure", "--output", "json"]).json();
    // Every second cluster of a half, and the metadata of all.
    let required = measured["required"].as_u64().expect("a number");
    assert_eq!(required / CLUSTER / (half / 2), 1, "{measured}");
    let map = victim.run_within(250 << 20, &["map"]);
    assert_eq!(map.ok().lines().count() as u64, 1 + half / 2);
}

#[test]
fn an_l1_entry_without_a_place_reads_as_nothing() {
    // QEMU 7.2 and 10.0 abort at the first write after this; reading falls through.
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    victim.patch(victim.l1(), COPIED.to_be_bytes());
    victim.served_whole();
}

#[test]
fn an_unaligned_l1_entry_fails_only_what_it_covers() {
    for entry in [COPIED | 0x1_0200, COPIED | 0x1_fe00] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        victim.patch(victim.l1(), u64::to_be_bytes(entry));
        assert_eq!(victim.served().len(), 128, "one L2 table speaks for all of it");
    }
}

#[test]
fn an_l1_entry_beyond_the_file_reads_as_in_qemu() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    victim.patch(victim.l1(), (COPIED | 1 << 45).to_be_bytes());
    victim.served_whole();
}

#[test]
fn an_unaligned_l2_entry_fails_alone() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let at = victim.l2() + 5 * 8;
    victim.patch(at, (victim.number(at) | 512).to_be_bytes());
    assert_eq!(victim.served(), [5]);
}

#[test]
fn an_l2_entry_beyond_the_file_reads_as_in_qemu() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    victim.patch(victim.l2() + 5 * 8, (COPIED | 1 << 45).to_be_bytes());
    victim.served_whole();
}

#[test]
fn reserved_bits_are_ignored_by_readers() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let at = victim.l2();
    victim.patch(at, (victim.number(at) | 0x3f00_0000_0000_01fe).to_be_bytes());
    let l1 = victim.l1();
    victim.patch(l1, (victim.number(l1) | 0x7f00_0000_0000_01ff).to_be_bytes());
    victim.served_whole();
}

#[test]
fn a_zero_flag_in_version_2_fails_alone() {
    let Some(victim) = Victim::new("compat=0.10") else { return };
    victim.patch(victim.l2() + 5 * 8, 1_u64.to_be_bytes());
    assert_eq!(victim.served(), [5]);
}

#[test]
fn subclusters_both_allocated_and_zero_fail_alone() {
    let Some(victim) = Victim::new("cluster_size=64k,extended_l2=on") else { return };
    let at = victim.l2() + 5 * 16;
    victim.patch(at + 8, u64::MAX.to_be_bytes());
    assert_eq!(victim.served(), [5]);
}

#[test]
fn refcounts_that_make_no_sense_do_not_disturb_a_reader() {
    // Launchpad 1728615 and its class: a block at offset 0, unaligned, beyond the file, the L1
    // table.
    for block in [0, 0x7fff_fe00, 1 << 45, u64::MAX] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        victim.patch(victim.refcount_table(), u64::to_be_bytes(block));
        println!("{block:#x}");
        victim.served_whole();
    }
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let l1 = victim.l1();
    victim.patch(victim.refcount_table(), l1.to_be_bytes());
    victim.served_whole();
}

#[test]
fn a_dirty_image_whose_tail_was_lost_is_read_as_far_as_it_goes() {
    let Some(victim) = Victim::new("cluster_size=64k,lazy_refcounts=on") else { return };
    victim.patch(72, 1_u64.to_be_bytes());
    let len = std::fs::metadata(victim.path()).expect("there").len();
    victim.set_len(len - (200 << 10));
    victim.served_whole();
}

#[test]
fn an_image_that_is_marked_corrupt_is_read() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    victim.patch(72, 2_u64.to_be_bytes());
    victim.served_whole();
}

#[test]
fn overlapping_tables_are_read_as_they_are() {
    // The first L2 table is the L1 table itself, or the refcount table.
    for place in [0, 1] {
        let Some(victim) = Victim::new("cluster_size=64k") else { return };
        let l1 = victim.l1();
        let table = if place == 0 { l1 } else { victim.refcount_table() };
        victim.patch(l1, (COPIED | table & ADDRESS).to_be_bytes());
        victim.served();
    }
}

#[test]
fn a_data_file_entry_at_another_place_than_the_guests_fails_alone() {
    let Some(victim) = Victim::new("data_file=disk.data") else { return };
    victim.patch(victim.l2() + 5 * 8, (COPIED | 0x1_0000).to_be_bytes());
    assert_eq!(victim.served(), [5]);
}

#[test]
fn truncated_anywhere_it_is_refused_or_read_and_never_crashes() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let len = std::fs::metadata(victim.path()).expect("there").len();
    for len in [len - 1, len / 2, 0x5_0000, 0x3_0001, 0x1_0000, 4096, 113, 104, 72, 71, 4, 3] {
        victim.set_len(len);
        println!("{len} bytes");
        let convert = ["convert", "-f", "qcow2", "-O", "raw", "disk.qcow2", "flat.raw"];
        let same = qemu::img(victim.dir(), convert);
        match same.code() {
            Some(0) => victim.served_whole(),
            _ if len < 112 => drop(victim.refused()),
            _ => assert!(!victim.served().is_empty(), "QEMU cannot read all of it"),
        }
    }
}

#[test]
fn a_huge_disk_in_a_small_file_costs_little() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    for (size, options) in
        [("8E", "cluster_size=2M"), ("1P", "cluster_size=2M"), ("64T", "cluster_size=64k")]
    {
        let made = qemu::img(
            victim.dir(),
            ["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", size],
        );
        if made.code() == Some(0) {
            println!("{size}");
            victim.served();
        }
    }
}

//! Attacks with which a reviewer broke the log of a killed writer, and groups that found no space,
//! each with its story.

use crate::chain::ChainSubject;
use crate::plain::{Plain, range, read, write};
use crate::random::subject;
use mica_block::{Disk as _, ErrorKind, Images as _, Manage as _};
use mica_qcow2::{Chain, ChainOptions};
use mica_qcow2_format::Version;
use mica_qcow2_tools::create::ImageWish;
use mica_rt::join_all;
use mica_sim::crash::{Mode, Subject as _, load_at_random, loss_at_random, until_power_cut};
use mica_sim::{
    ChangeFault, ENOSPC, Errors, Guest, Load, Loss, ModelDisk, Operation, World, scenario,
};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 65536;
/// Where the autoclear bits are in a header.
const AUTOCLEAR_AT: u64 = 88;

fn full() -> ChangeFault {
    ChangeFault { operation: Operation::Write, nth: 1, lasting: true, errno: ENOSPC }
}

/// The story: a writer was killed, and another program wrote the image, so that nothing named its
/// log any more, but the log stayed. The next writer's log overwrote its start with the same
/// numbers, and when that writer was killed, groups of the old log after its own were trusted.
#[test]
fn groups_of_an_older_log_are_not_trusted() {
    scenario(8, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 4 * MIB).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 20 * CLUSTER, 1, 4096).await.unwrap();
        chain.flush().await.unwrap();
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        for cluster in 0..4 {
            write(&chain, cluster * CLUSTER, 7, 4096).await.unwrap();
        }
        drop(chain);
        world.kill();
        image.put(AUTOCLEAR_AT, 0);
        let own = 1 + world.random_below(3);
        let chain = image.open(Mode::Write).await;
        for cluster in 0..own {
            write(&chain, (10 + cluster) * CLUSTER, 9, 4096).await.unwrap();
        }
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        for cluster in 0..4 {
            let shown = read(&chain, cluster * CLUSTER, 512).await.unwrap();
            assert_eq!(shown, [0; 512], "cluster {cluster} is back from the dead");
        }
        for cluster in 0..own {
            let shown = read(&chain, (10 + cluster) * CLUSTER, 512).await.unwrap();
            assert_eq!(shown, [9; 512], "cluster {cluster} was acknowledged");
        }
        chain.close().await.unwrap();
        image.expect_uncorrupted("after both").await;
    });
}

/// The story: when the log became long, the transaction flushed before it published what it had
/// linked. The flush found no space, the disk continued, and readers and writers kept using
/// clusters that were freed and then belonged to others.
#[test]
fn change_is_published_though_the_flush_after_it_finds_no_space() {
    let wish = ImageWish { cluster_bytes: Some(512), ..ImageWish::default() };
    scenario(4, |world| {
        let wish = &wish;
        async move {
            let image = Plain::new(&world, wish, 4 * MIB).await;
            // Too small for the pages that change: it cannot be compacted for long.
            world.set_log_capacity(64 << 10);
            let chain = image.open(Mode::Write).await;
            write(&chain, 0, 7, 2 << 20).await.unwrap();
            chain.flush().await.unwrap();
            world.inject_change(full());
            let mut freed = None;
            for cluster in 0..4096 {
                if let Err(error) = chain.discard(range(cluster * 512, 512)).await {
                    assert_eq!(error.kind(), ErrorKind::NoSpace);
                    freed = Some(cluster * 512);
                    break;
                }
            }
            let freed = freed.expect("the log becomes long");
            world.heal_changes();
            for _ in 0..4 {
                chain.flush().await.unwrap();
            }
            // Everything that was freed is in use again.
            write(&chain, 2 << 20, 9, 1 << 20).await.unwrap();
            write(&chain, freed, 5, 512).await.unwrap();
            let shown = read(&chain, 2 << 20, 1 << 20).await.unwrap();
            assert!(shown.iter().all(|byte| *byte == 9), "a write went to a cluster of another");
            chain.close().await.unwrap();
            image.expect_sound().await;
            let chain = image.open(Mode::Read).await;
            assert_eq!(read(&chain, freed, 512).await.unwrap(), [5; 512]);
        }
    });
}

/// The story: a server that exited while its device was full removed the log, and with it what a
/// killed server would have kept.
#[test]
fn close_that_finds_no_space_loses_nothing() {
    scenario(8, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 4 * MIB).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, 4096).await.unwrap();
        world.inject_change(full());
        assert_eq!(chain.close().await.unwrap_err().kind(), ErrorKind::NoSpace);
        world.heal_changes();
        if world.random_below(2) == 0 {
            chain.close().await.unwrap();
            image.expect_sound().await;
        }
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        assert_eq!(read(&chain, 0, 4096).await.unwrap(), [7; 4096]);
        chain.close().await.unwrap();
        image.expect_uncorrupted("after the close").await;
    });
}

/// The story: the header of an image that shares its blocks with a copy found no space. The group
/// kept what it had freed, as the log still expected it, and the close waited for that until the
/// log was full: some thousand syncs later.
#[test]
fn close_ends_although_there_is_no_space_for_the_header() {
    scenario(8, |world| async move {
        let image = Plain::packed(&world, &ImageWish::default(), 8, 7).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 1, 4096).await.unwrap();
        chain.flush().await.unwrap();
        world.fill_before(512);
        // What was compressed is freed.
        write(&chain, CLUSTER, 2, 4096).await.unwrap();
        chain.flush().await.unwrap();
        write(&chain, 2 * CLUSTER, 3, 4096).await.unwrap();
        let before = world.steps_completed();
        assert_eq!(chain.close().await.unwrap_err().kind(), ErrorKind::NoSpace);
        assert!(world.steps_completed() < before + 100, "the close goes round and round");
        world.fill_before(0);
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        for (cluster, byte) in [1, 2, 3, 7].into_iter().enumerate() {
            let shown = read(&chain, cluster as u64 * CLUSTER, 4096).await.unwrap();
            assert_eq!(shown, [byte; 4096], "cluster {cluster}");
        }
        chain.close().await.unwrap();
        image.expect_uncorrupted("after the close").await;
    });
}

/// The story: the log was restarted only if nothing changed while a group was made durable. Under a
/// load that never pauses it grew until it was full, and from then on there was none.
#[test]
fn log_survives_a_load_that_never_pauses() {
    let wish = ImageWish { cluster_bytes: Some(512), ..ImageWish::default() };
    scenario(1, |world| {
        let wish = &wish;
        async move {
            let image = Plain::new(&world, wish, 8 * MIB).await;
            let chain = image.open(Mode::Write).await;
            let chain_ref = &chain;
            let task = |task: u64| async move {
                for number in 0..800 {
                    write(chain_ref, (number * 8 + task) * 512, 7, 512).await.unwrap();
                }
            };
            join_all((0..8).map(task)).await;
            drop(chain);
            world.kill();
            let chain = image.open(Mode::Write).await;
            let shown = read(&chain, 0, 6400 * 512).await.unwrap();
            let lost = shown.iter().step_by(512).filter(|byte| **byte != 7).count();
            assert_eq!(lost, 0, "writes were acknowledged");
            chain.close().await.unwrap();
        }
    });
}

/// The story: an image is put back in place, as `cp` does it, from a copy that was made while its
/// writer ran; the copy names the log, which continues from a later state.
#[test]
fn log_is_not_applied_to_an_older_copy() {
    scenario(4, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 32 * MIB).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 1, 4096).await.unwrap();
        chain.flush().await.unwrap();
        let copy = world.files().into_iter().find(|(path, _)| *path == Plain::top()).unwrap().1;
        for cluster in 1..200 {
            write(&chain, cluster * CLUSTER, 7, 4096).await.unwrap();
        }
        chain.flush().await.unwrap();
        for cluster in 200..210 {
            write(&chain, cluster * CLUSTER, 7, 4096).await.unwrap();
        }
        drop(chain);
        world.kill();
        world.change(Plain::top(), |file| *file = copy);
        let chain = image.open(Mode::Write).await;
        chain.close().await.unwrap();
        image.expect_uncorrupted("after the copy").await;
    });
}

/// The story: a copy was made while the writer ran and the guest did not flush, and was put back
/// after a kill. It named the log still, and got links to data that it did not have: zeros where
/// the guest had data before. Then the log got another name, but only some time after a change,
/// however long the copy had been there by then.
#[test]
fn log_that_went_on_for_a_while_is_not_applied_to_a_copy() {
    scenario(8, |world| async move {
        // Until the copy, from then to the last change, and to the kill, in milliseconds.
        let pauses = match world.random_below(2) {
            0 => [world.random_below(500), 0, 500],
            _ => [1_000, 100_000, 50],
        };
        let [until_copy, idle, until_kill] = pauses.map(Duration::from_millis);
        let image = Plain::packed(&world, &ImageWish::default(), 8, 9).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 1, 4096).await.unwrap();
        chain.flush().await.unwrap();
        write(&chain, CLUSTER, 2, 4096).await.unwrap();
        mica_rt::sleep(until_copy).await;
        let copy = world.files().into_iter().find(|(path, _)| *path == Plain::top()).unwrap().1;
        mica_rt::sleep(idle).await;
        write(&chain, 2 * CLUSTER, 3, 4096).await.unwrap();
        mica_rt::sleep(until_kill).await;
        drop(chain);
        world.kill();
        let is_as_long = image.file().len() == copy.len();
        assert!(is_as_long, "the length does not give it away");
        world.change(Plain::top(), |file| *file = copy);
        let chain = image.open(Mode::Write).await;
        for (cluster, byte) in [(0, 1), (1, 9), (2, 9)] {
            let shown = read(&chain, cluster * CLUSTER, 4096).await.unwrap();
            assert_eq!(shown, [byte; 4096], "cluster {cluster}");
        }
        chain.close().await.unwrap();
        image.expect_uncorrupted("after the copy").await;
    });
}

/// A guest that seldom flushes is killed while, or after, its log gets another name: nothing that
/// it wrote is lost. A power cut leaves what it flushed.
#[test]
fn log_that_gets_other_names_loses_nothing() {
    scenario(40, |world| async move {
        let image = Plain::packed(&world, &ImageWish::default(), 64, 9).await;
        let chain = image.open(Mode::Write).await;
        let written = 2 + world.random_below(30);
        let mut flushed = 0;
        for cluster in 0..written {
            write(&chain, cluster * CLUSTER, 1, 4096).await.unwrap();
            mica_rt::sleep(Duration::from_millis(world.random_below(150))).await;
            if world.random_below(16) == 0 {
                chain.flush().await.unwrap();
                flushed = cluster + 1;
            }
        }
        // It does not get one while there is no space, and keeps both.
        if world.random_below(4) == 0 {
            world.inject_change(ChangeFault { lasting: false, ..full() });
        }
        // A name is one write of the image and two of the log.
        let is_cut = world.random_below(4) == 0;
        let (steps, loss) = (1 + world.random_below(4), loss_at_random(&world));
        match is_cut {
            true => world.cut_power_after(steps, loss),
            false => world.kill_after(steps),
        }
        let ended = until_power_cut(&world, mica_rt::sleep(Duration::from_millis(400))).await;
        drop(chain);
        world.keep_power();
        world.heal_changes();
        match ended {
            Some(()) if is_cut => world.cut_power(loss),
            Some(()) => world.kill(),
            None => {}
        }
        let chain = image.open(Mode::Write).await;
        for cluster in 0..if is_cut { flushed } else { written } {
            let shown = read(&chain, cluster * CLUSTER, 4096).await.unwrap();
            assert_eq!(shown, [1; 4096], "cluster {cluster} of {written}");
        }
        chain.close().await.unwrap();
        image.expect_uncorrupted("afterwards").await;
    });
}

/// The story: a log that once found no memory stayed off for as long as the process lived.
#[test]
fn log_that_found_no_memory_is_restarted() {
    scenario(8, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 8 * MIB).await;
        let is_late = world.random_below(2) == 0;
        world.fill_memory(!is_late);
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 1, 4096).await.unwrap();
        world.fill_memory(true);
        write(&chain, CLUSTER, 2, 4096).await.unwrap();
        for _ in 0..world.random_below(3) {
            chain.flush().await.unwrap();
        }
        world.fill_memory(false);
        // How long it waits is at most doubled by each loss.
        for number in 0..8 {
            write(&chain, (2 + number) * CLUSTER, 3, 4096).await.unwrap();
            chain.flush().await.unwrap();
        }
        for number in 0..8 {
            write(&chain, (20 + number) * CLUSTER, 4, 4096).await.unwrap();
        }
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        for (cluster, byte) in [(0, 1), (1, 2), (2, 3), (9, 3), (20, 4), (27, 4)] {
            assert_eq!(read(&chain, cluster * CLUSTER, 4096).await.unwrap(), [byte; 4096]);
        }
        chain.close().await.unwrap();
        image.expect_sound().await;
    });
}

/// The story: a write of metadata failed, the log was discarded although nothing was wrong with it,
/// and what had been acknowledged was lost with the process.
#[test]
fn failed_write_of_metadata_keeps_the_log() {
    const EIO: i32 = 5;
    scenario(8, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 4 * MIB).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, 4096).await.unwrap();
        if world.random_below(2) == 0 {
            chain.flush().await.unwrap();
        }
        write(&chain, 5 * CLUSTER, 8, 4096).await.unwrap();
        let nth = 1 + world.random_below(2);
        world.inject_change(ChangeFault {
            operation: Operation::Write,
            nth,
            lasting: true,
            errno: EIO,
        });
        assert!(chain.flush().await.is_err() && chain.close().await.is_err());
        world.heal_changes();
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        assert_eq!(read(&chain, 0, 4096).await.unwrap(), [7; 4096]);
        assert_eq!(read(&chain, 5 * CLUSTER, 4096).await.unwrap(), [8; 4096]);
        chain.close().await.unwrap();
        image.expect_sound().await;
    });
}

/// The story: each kill leaked what was counted ahead, 4 MiB at a time.
#[test]
fn what_a_killed_writer_counted_ahead_is_free_again() {
    scenario(8, |world| async move {
        let wish = ImageWish {
            cluster_bytes: Some(512 << world.random_below(8)),
            refcount_bits: Some(1 << world.random_below(7)),
            ..ImageWish::default()
        };
        let image = Plain::new(&world, &wish, 16 * MIB).await;
        for kill in 0..4 {
            let chain = image.open(Mode::Write).await;
            for _ in 0..world.random_below(20) {
                let at = world.random_below(16 * MIB / 4096) * 4096;
                write(&chain, at, 7, 4096).await.unwrap();
                if world.random_below(4) == 0 {
                    chain.flush().await.unwrap();
                }
            }
            drop(chain);
            world.kill();
            if kill % 2 == 0 {
                // A reader sees no leak either.
                image.expect_sound().await;
            }
        }
        let chain = image.open(Mode::Write).await;
        drop(chain);
        image.expect_sound().await;
    });
}

/// The story: what requests had reserved when the process died was neither unused nor linked, and
/// leaked: eight clusters for each kill, and the file got longer.
#[test]
fn requests_that_a_kill_cuts_short_leak_nothing() {
    scenario(40, |world| async move {
        let wish =
            ImageWish { cluster_bytes: Some(512 << world.random_below(8)), ..ImageWish::default() };
        let image = Plain::new(&world, &wish, 16 * MIB).await;
        for _ in 0..3 {
            let chain = image.open(Mode::Write).await;
            let (dying, life) = (world.clone(), 1 + world.random_below(5000));
            mica_rt::spawn(async move {
                mica_rt::sleep(Duration::from_micros(life)).await;
                dying.kill();
            });
            let places = || world.random_below(16 * MIB / 4096) * 4096;
            let writer = async || loop {
                if write(&chain, places(), 7, 4096).await.is_err() {
                    return;
                }
            };
            let writers: Vec<_> = (0..8).map(|_| writer()).collect();
            until_power_cut(&world, join_all(writers)).await;
            drop(chain);
            image.open(Mode::Write).await.close().await.unwrap();
            image.expect_sound().await;
        }
    });
}

/// The story: a guest that never flushed had its disk flushed for it each time a quarter of the log
/// was used, and its requests waited for the device.
#[test]
fn log_of_a_guest_that_never_flushes_is_compacted_and_costs_no_sync() {
    const WRITES: u64 = 4000;
    scenario(8, |world| async move {
        let cluster_bytes = 4096 << world.random_below(5);
        let wish = ImageWish {
            cluster_bytes: Some(cluster_bytes),
            extended_l2: Some(cluster_bytes >= 16 << 10 && world.random_below(2) == 0),
            ..ImageWish::default()
        };
        // What changes fits into the log once.
        let blocks = (cluster_bytes * 1024).min(64 * MIB) / 4096;
        let image = Plain::new(&world, &wish, blocks * 4096).await;
        let chain = image.open(Mode::Write).await;
        let mut written = std::collections::BTreeMap::new();
        let mut syncs = 0;
        for number in 0..WRITES {
            let at = world.random_below(blocks) * 4096;
            let byte = u8::try_from(1 + number % 255).unwrap();
            write(&chain, at, byte, 4096).await.unwrap();
            written.insert(at, byte);
            if number == 0 {
                syncs = chain.write_stats().syncs;
            }
        }
        let stats = chain.write_stats();
        assert_eq!((stats.syncs, stats.groups), (syncs, 0), "{wish:?}");
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        for (at, byte) in written {
            let shown = read(&chain, at, 4096).await.unwrap();
            assert_eq!(shown, [byte; 4096], "at {at} of {wish:?}");
        }
        chain.close().await.unwrap();
        drop(chain);
        image.expect_sound().await;
    });
}

/// Bytes of the disk for which a table is, of clusters of 512 bytes; it is a page.
const TABLE: u64 = 64 * 512;
/// More than may wait for a flush.
const TABLES: u64 = 3000;

async fn image_of_tables(world: &World) -> Plain {
    let wish =
        ImageWish { cluster_bytes: Some(512), extended_l2: Some(false), ..ImageWish::default() };
    Plain::new(world, &wish, TABLES * TABLE).await
}

/// The story: of a large disk more pages of tables change than the log can be compacted with. Once
/// there were too many, each request waited for a flush, and so for the device.
#[test]
fn guest_that_never_flushes_is_answered_while_what_it_changed_is_made_durable() {
    scenario(4, |world| async move {
        let image = image_of_tables(&world).await;
        let chain = image.open(Mode::Write).await;
        let (mut last, mut answered_meanwhile) = (None, 0);
        for table in 0..TABLES {
            write(&chain, table * TABLE, 7, 512).await.unwrap();
            let stats = chain.write_stats();
            let (groups, syncs) = *last.get_or_insert((stats.groups, stats.syncs));
            if groups != stats.groups {
                last = Some((stats.groups, stats.syncs));
            } else if syncs != stats.syncs {
                // One has begun, and its group is not durable yet.
                answered_meanwhile += 1;
            }
        }
        let groups = chain.write_stats().groups;
        assert!(groups > 0, "what waits for a flush has a bound");
        assert!(answered_meanwhile > 0, "no request is answered while one of {groups} is made");
        drop(chain);
        world.kill();
        let chain = image.open(Mode::Write).await;
        for table in 0..TABLES {
            let shown = read(&chain, table * TABLE, 512).await.unwrap();
            assert_eq!(shown, [7; 512], "of table {table}");
        }
        chain.close().await.unwrap();
        drop(chain);
        image.expect_sound().await;
    });
}

/// The story: after a flush that was due one seemed to be due still, and whatever came next made
/// another.
#[test]
fn flush_that_was_due_is_not_due_any_more() {
    scenario(4, |world| async move {
        let image = image_of_tables(&world).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, 512).await.unwrap();
        let syncs = chain.write_stats().syncs;
        let mut tables = 1..TABLES;
        while chain.write_stats().syncs == syncs {
            let table = tables.next().expect("a flush is due at some time");
            write(&chain, table * TABLE, 7, 512).await.unwrap();
        }
        // It is under way, and nothing else.
        chain.idle().await;
        let groups = chain.write_stats().groups;
        chain.flush().await.unwrap();
        chain.idle().await;
        assert_eq!(chain.write_stats().groups, groups + 1);
        chain.close().await.unwrap();
        drop(chain);
        image.expect_sound().await;
    });
}

/// The story: blocks of refcounts are created several at once, and only the first one counts the
/// others; entries in two sectors of the table could survive a power cut one without the other.
#[test]
fn refcount_blocks_that_are_created_together_survive_power_cuts_together() {
    scenario(60, |world| async move {
        let wish =
            ImageWish { cluster_bytes: Some(512), refcount_bits: Some(64), ..ImageWish::default() };
        // A block counts 64 clusters, 32 KiB of the file, and a sector of the table has 64 blocks.
        let image = Plain::new(&world, &wish, 8 * MIB).await;
        let mut at = 0;
        while at < 6 * MIB {
            let chain = image.open(Mode::Write).await;
            world.cut_power_after(1 + world.random_below(400), loss_at_random(&world));
            let work = async {
                while at < 6 * MIB {
                    write(&chain, at, 7, 64 << 10).await?;
                    at += 64 << 10;
                    if world.random_below(3) == 0 {
                        chain.flush().await?;
                    }
                }
                Ok(())
            };
            let ended: Option<mica_block::Result<()>> = until_power_cut(&world, work).await;
            drop(chain);
            world.keep_power();
            match ended {
                Some(done) => done.unwrap(),
                None => at += 64 << 10,
            }
            image.expect_uncorrupted("after a power cut").await;
        }
    });
}

/// All files, and what the disk showed at that time.
struct Copy {
    files: Vec<(PathBuf, Vec<u8>)>,
    model: ModelDisk,
}

impl Copy {
    fn make(world: &World, model: &RefCell<ModelDisk>) -> Self {
        Self { files: world.files(), model: model.borrow().clone() }
    }

    /// The autoclear bits of the image at `top`.
    fn names(&self, top: &PathBuf) -> u64 {
        let file = self.files.iter().find(|(path, _)| path == top);
        let at = usize::try_from(AUTOCLEAR_AT).unwrap();
        u64::from_be_bytes(*file.unwrap().1[at..].first_chunk().unwrap())
    }

    /// Writes it over what is there.
    fn put_back(&self, world: &World) {
        let now = world.files();
        for (path, bytes) in &self.files {
            if now.iter().any(|(there, now)| there == path && now != bytes) {
                world.change(path, |file| file.clone_from(bytes));
            }
        }
    }
}

/// A guest works until its server is killed; copies are made meanwhile.
async fn work_and_die(
    world: &World,
    subject: &ChainSubject,
    model: &Rc<RefCell<ModelDisk>>,
) -> Vec<Copy> {
    work_until(world, subject, model, World::kill).await
}

/// A guest works until `end`, which ends its server; copies are made meanwhile.
async fn work_until(
    world: &World,
    subject: &ChainSubject,
    model: &Rc<RefCell<ModelDisk>>,
    end: impl FnOnce(&World) + 'static,
) -> Vec<Copy> {
    let disk = subject.open(world, Mode::Write).await.unwrap();
    let guest = Guest::new(world, disk, model, Errors::Unexpected);
    guest.settle().await.unwrap();
    let mut load = load_at_random(world, subject.shape.initial.len() as u64 / 512);
    load = Load { give_up_one_in: 0, ..load };
    let copies = Rc::new(RefCell::new(Vec::new()));
    // Some last long enough for the log to get other names.
    let life_max = if world.random_below(3) == 0 { 1_000_000 } else { 20_000 };
    let (kept, before, life) = (Rc::clone(&copies), world.cuts(), 1 + world.random_below(life_max));
    let (there, its_model) = (world.clone(), Rc::clone(model));
    mica_rt::spawn(async move {
        let mut left = life;
        while left > 0 {
            let pause = (1 + there.random_below(life)).min(left);
            mica_rt::sleep(Duration::from_micros(pause)).await;
            left -= pause;
            kept.borrow_mut().push(Copy::make(&there, &its_model));
        }
        end(&there);
    });
    let killed = async {
        guest.run(&load).await;
        world.power_cut().await;
    };
    assert!(until_power_cut(world, killed).await.is_none() && world.cuts() == before + 1);
    copies.take()
}

/// Checks that the disk of `subject` shows what `model` allows, and that nothing is wrong with it.
async fn settle(world: &World, subject: &ChainSubject, model: &Rc<RefCell<ModelDisk>>) {
    let disk = subject.open(world, Mode::Write).await.unwrap();
    let guest = Guest::new(world, disk, model, Errors::Unexpected);
    guest.settle().await.unwrap();
    guest.close().await.unwrap();
    subject.check(world).await.unwrap_or_else(|error| panic!("after it was put back: {error}"));
}

/// Whether the name in the autoclear `bits` of a copy is one of the log of the image at `top`
/// (`docs/formats/redo-log.md`): the one that the image has, or, while a flush is in flight, the
/// one before.
fn is_named_by(world: &World, top: &Path, bits: u64) -> bool {
    let Some(log) = world.redo_logs().log(top).unwrap() else { return false };
    let header = |at: u64| {
        let mut bytes = [0; 64];
        log.read_at(at, &mut bytes).unwrap();
        let name = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
        let sequence = u64::from_le_bytes(*bytes[52..].first_chunk().unwrap());
        (sequence, [name(12), name(48)])
    };
    let (_, names) = header(0).max(header(512));
    names.map(|name| u64::from(name) << 32).contains(&(bits & !u64::from(u32::MAX)))
}

/// A copy that was made at any moment is put back after the writer was killed at any other: it is
/// sound, and if it is from before the last name, it shows the same as before.
#[test]
fn older_copy_is_not_mixed_with_a_later_log() {
    scenario(100, |world| async move {
        let subject = subject(&world);
        let model = Rc::new(RefCell::new(subject.shape.model()));
        let copies = work_and_die(&world, &subject, &model).await;
        let copy = &copies[usize::try_from(world.random_below(copies.len() as u64)).unwrap()];
        copy.put_back(&world);
        let is_named = is_named_by(&world, &subject.shape.top, copy.names(&subject.shape.top));
        if is_named && subject.outlives_the_process() {
            // It lacks the data written since.
            let disk = subject.open(&world, Mode::Write).await.unwrap();
            disk.close().await.unwrap();
            subject.check(&world).await.unwrap_or_else(|error| panic!("since the flush: {error}"));
            return;
        }
        let model = Rc::new(RefCell::new(copy.model.clone()));
        model.borrow_mut().crash();
        settle(&world, &subject, &model).await;
    });
}

/// An image is copied while its writer is dead. A new writer takes the image over, and is killed,
/// too; the copy, put back in its place, names neither log.
#[test]
fn copy_made_while_the_writer_was_dead_is_independent() {
    scenario(60, |world| async move {
        let subject = subject(&world);
        let model = Rc::new(RefCell::new(subject.shape.model()));
        work_and_die(&world, &subject, &model).await;
        let mut copy = Copy::make(&world, &model);
        match subject.outlives_the_process() {
            true => model.borrow_mut().die(),
            false => model.borrow_mut().crash(),
        }
        work_and_die(&world, &subject, &model).await;
        if world.random_below(2) == 0 {
            match subject.outlives_the_process() {
                true => model.borrow_mut().die(),
                false => model.borrow_mut().crash(),
            }
            settle(&world, &subject, &model).await;
        }
        copy.put_back(&world);
        copy.model.crash();
        settle(&world, &subject, &Rc::new(RefCell::new(copy.model))).await;
    });
}

/// The story: a new table in a cluster of 2 MiB that was in use before is 2 MiB of zeros; a few of
/// them filled the log, and from then on there was none.
#[test]
fn tables_of_large_clusters_leave_room_in_the_log() {
    const GIB: u64 = 1 << 30;
    let wish = ImageWish { cluster_bytes: Some(2 << 20), ..ImageWish::default() };
    scenario(1, |world| {
        let wish = &wish;
        async move {
            // A table is for 512 GiB.
            let image = Plain::new(&world, wish, 2048 * GIB).await;
            let chain = image.open(Mode::Write).await;
            write(&chain, 0, 7, 4096).await.unwrap();
            drop(chain);
            world.kill();
            // What was counted ahead is free, but the file still includes it.
            let chain = image.open(Mode::Write).await;
            for table in 1..4 {
                write(&chain, table * 512 * GIB, 7, 4096).await.unwrap();
            }
            drop(chain);
            world.kill();
            let chain = image.open(Mode::Write).await;
            for table in 0..4 {
                let shown = read(&chain, table * 512 * GIB, 4096).await.unwrap();
                assert_eq!(shown, [7; 4096], "table {table}");
            }
            chain.close().await.unwrap();
            image.expect_sound().await;
        }
    });
}

/// The story: a server died, its file system's device went away and returned, and the machine kept
/// running. The log was trusted, and linked clusters whose data was lost with the page cache.
#[test]
fn log_is_not_trusted_when_its_device_went_away_and_returned() {
    scenario(150, |world| async move {
        world.report_remounts(world.random_below(2) == 0);
        let subject = subject(&world);
        let model = Rc::new(RefCell::new(subject.shape.model()));
        let loss = loss_at_random(&world);
        if world.random_below(2) == 0 {
            work_until(&world, &subject, &model, move |world| world.lose_device(loss)).await;
        } else {
            work_and_die(&world, &subject, &model).await;
            world.lose_device(loss);
        }
        model.borrow_mut().crash();
        if world.random_below(2) == 0 {
            let disk = subject.open(&world, Mode::Read).await.unwrap();
            let guest = Guest::new(&world, disk, &model, Errors::Unexpected);
            guest.settle().await.unwrap();
        }
        settle(&world, &subject, &model).await;
    });
}

/// The story: a client wrote, the server was killed, and the client asked the next server to flush,
/// which had written nothing and synced nothing. Then the power went.
#[test]
fn what_a_killed_writer_left_is_durable_once_the_next_one_has_flushed() {
    let old = ImageWish { version: Some(Version::V2), ..ImageWish::default() };
    for wish in [old, ImageWish::default()] {
        scenario(4, |world| {
            let wish = &wish;
            async move {
                let image = Plain::new(&world, wish, 4 * MIB).await;
                let chain = image.open(Mode::Write).await;
                write(&chain, 0, 7, 4096).await.unwrap();
                chain.flush().await.unwrap();
                write(&chain, 0, 9, 4096).await.unwrap();
                drop(chain);
                world.kill();
                let chain = image.open(Mode::Write).await;
                assert_eq!(
                    read(&chain, 0, 4096).await.unwrap(),
                    [9; 4096],
                    "the page cache has it"
                );
                chain.flush().await.unwrap();
                drop(chain);
                world.cut_power(Loss::Everything);
                let chain = image.open(Mode::Write).await;
                assert_eq!(read(&chain, 0, 4096).await.unwrap(), [9; 4096], "it was flushed");
                chain.close().await.unwrap();
            }
        });
    }
}

/// The story: the folder of the log went away and came back. Groups had become durable without the
/// log, but the image still named it: the next writer trusted it, and freed clusters in use.
#[test]
fn image_does_not_name_a_log_that_is_gone_once_a_group_is_written() {
    scenario(4, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 4 * MIB).await;
        let name = |image: &Plain| image.word(AUTOCLEAR_AT) >> 32;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, 4096).await.unwrap();
        chain.flush().await.unwrap();
        assert_ne!(name(&image), 0, "there is a log");
        world.fill_memory(true);
        write(&chain, MIB, 7, 4096).await.unwrap();
        assert!(chain.weakness().is_some(), "the log is lost");
        world.inject_change(ChangeFault { nth: 2, ..full() });
        drop(chain.flush().await);
        assert_eq!(name(&image), 0, "the name goes before any page");
        world.heal_changes();
        chain.flush().await.unwrap();
        assert_eq!(name(&image), 0);
        world.fill_memory(false);
        for number in 0..8 {
            write(&chain, 2 * MIB + number * CLUSTER, 9, 4096).await.unwrap();
            chain.flush().await.unwrap();
        }
        assert_ne!(name(&image), 0, "there is another log");
        assert!(chain.weakness().is_none());
        chain.close().await.unwrap();
        image.expect_sound().await;
    });
}

/// The story: a folder of logs was copied while its server lived, and the copy was put back after
/// the server had died. It lacked the groups whose pages a flush had begun to write, and what they
/// had linked was freed.
#[test]
fn copy_of_a_log_frees_nothing_that_is_linked() {
    let wish = ImageWish { cluster_bytes: Some(512), ..ImageWish::default() };
    for (steps, in_place) in (1..24).flat_map(|steps| [(steps, false), (steps, true)]) {
        scenario(1, |world| {
            let wish = &wish;
            async move {
                let image = Plain::new(&world, wish, 4 * MIB).await;
                let chain = image.open(Mode::Write).await;
                for at in [0, 2 * MIB] {
                    write(&chain, at, 7, 512).await.unwrap();
                }
                chain.flush().await.unwrap();
                let copies = world.copy_logs();
                write(&chain, 2 * MIB + 512, 9, 512).await.unwrap();
                world.kill_after(steps);
                let _ = until_power_cut(&world, chain.flush()).await;
                drop(chain);
                world.kill();
                world.pass_time(Duration::from_secs(2));
                world.put_back_logs(copies, in_place);
                let chain = image.open(Mode::Write).await;
                for at in [0, 2 * MIB] {
                    assert_eq!(read(&chain, at, 512).await.unwrap(), [7; 512], "it was flushed");
                }
                chain.close().await.unwrap();
                image.expect_uncorrupted("after the copy").await;
            }
        });
    }
}

/// The story: the data could not be made durable when the log was to be replayed, and the log was
/// removed without a word.
#[test]
fn log_whose_data_cannot_be_made_durable_is_set_aside() {
    scenario(1, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 4 * MIB).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, 4096).await.unwrap();
        drop(chain);
        world.kill();
        world.inject_change(ChangeFault {
            operation: Operation::Sync,
            nth: 1,
            lasting: false,
            errno: ENOSPC,
        });
        let options = ChainOptions { writable: true, ..ChainOptions::default() };
        let opened = Chain::open(Arc::new(world.clone()), &Plain::top(), &options).await;
        assert!(opened.is_err(), "the sync failed");
        assert_eq!(image.word(AUTOCLEAR_AT) >> 32, 0, "it is not looked for any more");
        let chain = image.open(Mode::Write).await;
        assert_eq!(read(&chain, 0, 512).await.unwrap(), [0; 512]);
        chain.close().await.unwrap();
        image.expect_uncorrupted("without the log").await;
    });
}

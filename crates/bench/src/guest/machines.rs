//! Machines on disks of many layers: how long one takes to boot, and what its programs read.
//!
//! Without KVM, QEMU emulates the guest's processor, and the guest is slow compared with the disk:
//! the ratios are then smaller than on a real machine. The processor time that serving took is
//! reported as well; it is not emulated.

use super::rootfs::{DATABASE, RootDisk, VALUE_BYTES};
use super::{BOOT, Context, DATABASE_PART, RANDOM};
use crate::chains::Chain;
use crate::load::ratio;
use crate::peers::{MICA, Peer, Running};
use crate::samples::{Sample, Samples};
use crate::turns::{in_order, note};
use anyhow::{Context as _, Result, ensure};
use mica_tests::clock;
use mica_tests::machine::{Disk, Machine, Work};
use std::fs;
use std::time::Duration;

/// What serves a machine's disk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// mica, over vhost-user.
    Mica,
    /// QEMU itself.
    Own,
}

/// QEMU's own device in tables.
pub(super) const OWN: &str = "QEMU virtio-blk";
/// How long a machine may take for any step before it counts as failed.
const LIMIT: Duration = Duration::from_secs(150);
/// Threads of the database's readers.
const READERS: u32 = 4;
/// Columns of a disk's `stat`: requests for reads, and milliseconds that they took together.
const STAT_READS: usize = 0;
const STAT_READ_MS: usize = 3;
/// Columns of fio's terse output: reads a second, and their median latency.
const TERSE_ERROR: usize = 4;
const TERSE_READS_PER_S: usize = 7;

/// What the machine does first: its root file system, read-only, is at `/mnt`.
const MOUNT: &str = "
mount -t ext4 -o ro /dev/vda /mnt
mount -t proc proc /mnt/proc
mount --bind /sys /mnt/sys
mount --bind /dev /mnt/dev
mount -t tmpfs tmp /mnt/tmp
";

impl Way {
    const ALL: [Self; 2] = [Self::Mica, Self::Own];

    /// Its name in tables.
    fn name(self) -> &'static str {
        match self {
            Self::Mica => MICA,
            Self::Own => OWN,
        }
    }
}

/// What is measured in a machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// The time to the login prompt.
    Boot,
    /// Random 4 KiB reads of the disk, by fio.
    Random,
    /// RocksDB, read-only, uniform keys (YCSB-C).
    Database,
}

impl Task {
    /// The part of the samples that it belongs to.
    fn part(self) -> &'static str {
        match self {
            Self::Boot => BOOT,
            Self::Random => RANDOM,
            Self::Database => DATABASE_PART,
        }
    }
}

/// Runs all `tasks` in machines on all `chains`, in turns.
pub(super) fn in_turns(
    context: &Context<'_>,
    root: &RootDisk,
    chains: &[Chain],
    tasks: &[Task],
    repeats: u32,
    samples: &mut Samples,
) {
    for &task in tasks {
        for repeat in 0..repeats {
            for chain in in_order(chains, repeat) {
                if !context.is_wanted(task, chain.layers) {
                    continue;
                }
                for way in in_order(&Way::ALL, repeat) {
                    let mut sample = Sample::new(task.part(), way.name(), chain.layers, repeat);
                    note(&mut sample, |sample| {
                        Guest { context, root, chain, way: *way }.measure(task, sample)
                    });
                    samples.push(sample);
                }
            }
        }
    }
}

/// A machine to be started, on a chain.
struct Guest<'a> {
    context: &'a Context<'a>,
    root: &'a RootDisk,
    chain: &'a Chain,
    way: Way,
}

impl Guest<'_> {
    fn measure(&self, task: Task, sample: &mut Sample) -> Result<()> {
        let script = match task {
            Task::Boot => format!("{MOUNT}\nexec chroot /mnt /sbin/boot\n"),
            Task::Random => self.random_script(),
            Task::Database => self.database_script(),
        };
        let start = clock::now();
        let server = self.serve()?;
        let own = [
            // Names its threads.
            "-name".to_owned(),
            "machine,debug-threads=on".to_owned(),
            "-object".to_owned(),
            "iothread,id=disk".to_owned(),
            "-blockdev".to_owned(),
            format!(
                "driver=qcow2,node-name=top,read-only=on,file.driver=file,file.aio=io_uring,\
                 file.filename={}",
                self.chain.image.display()
            ),
            "-device".to_owned(),
            "virtio-blk-pci,drive=top,iothread=disk,num-queues=2".to_owned(),
        ];
        let socket = self.context.socket(&Peer::mica(&[]));
        let disk = match self.way {
            Way::Mica => Disk::VhostUser(&socket),
            Way::Own => Disk::Own(&own),
        };
        let work = Work { script: &script, runs_in_parallel: true, ..Work::default() };
        let mut machine = Machine::boot(disk, &work)?;
        let up = |console: &str| console.contains("MACHINE-UP").then_some(());
        machine.wait_within(LIMIT, up)?;
        let up = start.elapsed();
        if task == Task::Boot {
            let login = |console: &str| console.contains("login:").then_some(());
            machine.wait_within(LIMIT, login)?;
            let login = start.elapsed();
            sample.put("login_s", login.as_secs_f64());
            sample.put("from_disk_s", (login - up).as_secs_f64());
        }
        let has_read = |console: &str| reads(console).or(failure(console));
        let (reads, took_ms) = machine.wait_within(LIMIT, has_read)?;
        let console = machine.console();
        ensure!(failure(&console).is_none(), "the machine failed:\n{}", tail(&console));
        let used = match &server {
            Some(running) => running.server.processor_time(),
            None => own_time(machine.pid()),
        };
        sample.put("disk_reads", ratio(reads, 1));
        sample.put("read_mean_us", ratio(took_ms * 1000, reads.max(1)));
        sample.put("server_cpu_us", used.as_secs_f64() * 1e6 / ratio(reads.max(1), 1));
        match task {
            Task::Boot => {}
            Task::Random => figures(&console, sample)?,
            Task::Database => database_figures(&console, sample)?,
        }
        drop(machine);
        if let Some(running) = server {
            running.stop()?;
        }
        Ok(())
    }

    fn serve(&self) -> Result<Option<Running>> {
        if self.way == Way::Own {
            return Ok(None);
        }
        let peer = self.context.over_vhost_user(Peer::mica(&[]));
        Ok(Some(peer.start(&self.chain.image, "qcow2", &[])?))
    }

    fn random_script(&self) -> String {
        let seconds = self.context.limit.as_secs().max(2);
        let mut script = MOUNT.to_owned();
        for depth in [1, 32] {
            script += &format!(
                "echo \"FIO-{depth} $(chroot /mnt fio --name=read --filename=/dev/vda --readonly \
                 --direct=1 --rw=randread --bs=4k --ioengine=io_uring --iodepth={depth} \
                 --time_based --runtime={seconds} --norandommap --randrepeat=0 \
                 --output-format=terse | tail -n 1)\"\n"
            );
        }
        script + &report_reads_script()
    }

    fn database_script(&self) -> String {
        let (entries, seconds) = (self.root.entries, self.context.limit.as_secs().max(3));
        // A cache that holds the index and little else: reads are the disk's, as in the paper,
        // where the database is larger than memory.
        format!(
            "{MOUNT}\nchroot /mnt db_bench --benchmarks=readrandom --use_existing_db=1 \
             --readonly=1 --db={DATABASE} --num={entries} --value_size={VALUE_BYTES} \
             --duration={seconds} --threads={READERS} --use_direct_reads=1 --cache_size=1048576 \
             --compression_type=none 2>/tmp/said || {{ cat /tmp/said; exit 1; }}\n{}",
            report_reads_script()
        )
    }
}

/// Prints how many requests for reads the disk had.
fn report_reads_script() -> String {
    "echo \"BOOT-STAT $(cat /sys/block/vda/stat)\"\n".to_owned()
}

/// How many requests for reads the disk had, and how long they took, if the machine has printed it.
fn reads(console: &str) -> Option<(u64, u64)> {
    let line = console.lines().find_map(|line| line.strip_prefix("BOOT-STAT "))?;
    let fields: Vec<_> = line.split_whitespace().collect();
    let field = |at: usize| fields.get(at)?.parse().ok();
    Some((field(STAT_READS)?, field(STAT_READ_MS)?))
}

fn failure(console: &str) -> Option<(u64, u64)> {
    (console.contains("MACHINE-FAILED") || console.contains("I/O error")).then_some((0, 0))
}

fn figures(console: &str, sample: &mut Sample) -> Result<()> {
    for depth in [1, 32] {
        let name = format!("FIO-{depth} ");
        let line = console.lines().find_map(|line| line.strip_prefix(&name)).context("no fio")?;
        let fields: Vec<_> = line.split(';').collect();
        let field = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok());
        ensure!(field(TERSE_ERROR) == Some(0.0), "fio: {line}");
        let rate = field(TERSE_READS_PER_S).with_context(|| format!("fio: {line}"))?;
        sample.put(format!("random_{depth}_per_s"), rate);
    }
    Ok(())
}

/// From `readrandom : 12.3 micros/op 81300 ops/sec ...; (4000 of 4000 found)`.
fn database_figures(console: &str, sample: &mut Sample) -> Result<()> {
    let said = || tail(console);
    let line = console.lines().find(|line| line.starts_with("readrandom")).with_context(said)?;
    let words: Vec<_> = line.split_whitespace().collect();
    let before = |unit: &str| {
        let at = words.iter().position(|word| *word == unit)?;
        words.get(at.checked_sub(1)?)?.trim_start_matches('(').parse::<f64>().ok()
    };
    sample.put("reads_per_s", before("ops/sec").with_context(said)?);
    let (found, of) = (before("of").with_context(said)?, before("found)").with_context(said)?);
    ensure!(found > 0.0 && found == of, "only {found} of {of} keys were found");
    Ok(())
}

fn tail(console: &str) -> String {
    let lines: Vec<_> = console.lines().collect();
    lines.get(lines.len().saturating_sub(6)..).unwrap_or_default().join("\n")
}

/// Processor time of the threads of QEMU that serve its disk.
fn own_time(pid: u32) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let nanoseconds = tasks.filter_map(|task| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        // The I/O thread, and the kernel's workers for its ring.
        if !name.starts_with("IO ") && !name.starts_with("iou-") {
            return None;
        }
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanoseconds.sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_programs_is_parsed() {
        let console = "x\nBOOT-STAT     812       0   64000 10 0 0\nrest";
        assert_eq!(reads(console), Some((812, 10)));
        let mut sample = Sample::new("part", "server", 1, 0);
        let said = "readrandom   :     123.4 micros/op 8100 ops/sec 10.0 seconds 81000 operations; \
                    8.0 MB/s (1000 of 1000 found)";
        database_figures(said, &mut sample).expect("figures");
        assert_eq!(sample.metrics.get("reads_per_s"), Some(&8100.0));
        let lost = said.replace("(1000", "(999");
        assert!(database_figures(&lost, &mut sample).is_err());
        let fio = "FIO-1 3;fio-3.33;read;0;0;100;50;25;2000\nFIO-32 3;fio;read;0;0;1;5;99;2000";
        figures(fio, &mut sample).expect("figures");
        assert_eq!(sample.metrics.get("random_32_per_s"), Some(&99.0));
    }
}

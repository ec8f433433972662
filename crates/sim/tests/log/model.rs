//! What a log may show: of each volume, the records that were pushed, and which of them it owes.

use mica_block::{ErrorKind, Images, Store};
use mica_sim::World;
use mica_volume::{Log, LogDevice, Record, Writer};
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const PATH: &str = "/log";
const BLOCK: usize = 4096;

/// A record that follows from a number.
pub(crate) struct Made {
    seed: u64,
    bytes: Box<[u8; BLOCK]>,
    label: String,
}

impl Made {
    pub(crate) fn new(seed: u64) -> Self {
        let mut bytes = Box::new([0; BLOCK]);
        for (at, chunk) in bytes.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&(seed.wrapping_mul(31) + at as u64).to_le_bytes());
        }
        let label = format!("label-{seed:0width$}", width = (seed % 200) as usize);
        Self { seed, bytes, label }
    }

    pub(crate) fn record(&self) -> Record<'_> {
        let (number, label) = (self.seed, &self.label[..]);
        match self.seed % 16 {
            0 => Record::Nothing { first: self.seed % 1000, count: 1 + self.seed % 77 },
            1 => Record::Length { bytes: 512 * (self.seed % 100_000) },
            2 => Record::Take { number, time_ns: self.seed * 3, label },
            3 => Record::Drop { number },
            4 => Record::Label { number, label },
            5..8 => Record::Nothing { first: self.seed % 10_000, count: 1 },
            _ => Record::Data { block: self.seed % 10_000, bytes: &self.bytes },
        }
    }
}

/// What is known of the log of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Life {
    /// There is none.
    None,
    /// There is one.
    There,
    /// It was being begun, or ended, when something happened.
    Unsure,
}

/// What a volume knows.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) id: [u8; 16],
    pub(crate) life: Life,
    /// The number of the first record of its log.
    pub(crate) base: u64,
    /// The numbers from which the records were made.
    pub(crate) records: Vec<u64>,
    /// Records below are in extents that were answered.
    pub(crate) stored: u64,
    /// Records below are durable.
    pub(crate) durable: u64,
    /// Records below survive the death of the process.
    pub(crate) written: u64,
    /// Who was named durably.
    pub(crate) writer: Option<Writer>,
}

impl Volume {
    pub(crate) fn new(number: u8) -> Self {
        let (base, stored, durable, written) = (0, 0, 0, 0);
        let (life, records, id) = (Life::None, Vec::new(), [number; 16]);
        Self { id, life, base, records, stored, durable, written, writer: None }
    }

    pub(crate) fn next(&self) -> u64 {
        self.base + self.records.len() as u64
    }

    fn record(&self, number: u64) -> Made {
        let at = number.checked_sub(self.base).expect("a record of this log");
        Made::new(self.records[usize::try_from(at).unwrap()])
    }

    /// Checks that `log` has a prefix of what was pushed, from what the state lacks on, with all
    /// that was promised; then that is what there is.
    pub(crate) async fn expect_recovered(&mut self, log: &Log) {
        let found = log.recovered();
        assert_eq!(found.start, self.stored);
        assert!(found.end >= self.written.max(self.durable).max(self.stored), "{found:?}: lost");
        assert!(found.end <= self.next().max(self.stored), "{found:?}: invented");
        assert_eq!(log.next(), found.end);
        let mut next = found.start;
        let read = log.read(found.start, |number, record| {
            assert_eq!(number, next);
            assert_eq!(record, self.record(number).record(), "record {number}");
            next += 1;
            Ok(())
        });
        read.await.expect("what was found can be read");
        assert_eq!(next, found.end);
        self.records.truncate(usize::try_from(found.end - self.base).unwrap());
        (self.written, self.durable) = (found.end, found.end);
    }
}

/// All volumes of a device, and the numbers that they are given.
pub(crate) struct Model {
    pub(crate) world: World,
    pub(crate) volumes: Vec<RefCell<Volume>>,
    next_writer: RefCell<u64>,
    next_seed: RefCell<u64>,
}

/// The chances of what is done with a log that is found, or missing.
#[derive(Clone, Copy)]
pub(crate) struct Chances {
    pub(crate) set_aside: u64,
    pub(crate) start: u64,
}

impl Model {
    /// A device of `segments` short segments, for as many `volumes`.
    pub(crate) fn new(world: &World, segments: usize, volumes: u8) -> Self {
        world.put(PATH, vec![0; BLOCK + segments * (16 << 10)]);
        let volumes = (1..=volumes).map(|number| RefCell::new(Volume::new(number))).collect();
        let (next_writer, next_seed) = (RefCell::new(1), RefCell::new(0));
        Self { world: world.clone(), volumes, next_writer, next_seed }
    }

    pub(crate) fn claim(&self) -> Writer {
        let mut next = self.next_writer.borrow_mut();
        *next += 1;
        Writer::new(*next).unwrap()
    }

    /// A record that was never made before.
    pub(crate) fn make(&self) -> (u64, Made) {
        let mut next = self.next_seed.borrow_mut();
        *next += 1;
        (*next, Made::new(*next))
    }

    /// The file, once what the last log had under way in the background lets go of it.
    pub(crate) async fn store(&self) -> Arc<dyn Store> {
        for _ in 0..100 {
            match self.world.open_writable(Path::new(PATH)) {
                Err(error) if error.kind() == ErrorKind::Denied => {
                    mica_rt::sleep(Duration::from_millis(10)).await;
                }
                opened => return opened.expect("it can be opened").store,
            }
        }
        panic!("somebody still has it open");
    }

    pub(crate) fn random_id(&self) -> [u8; 16] {
        std::array::from_fn(|_| u8::try_from(self.world.random_below(256)).unwrap())
    }

    /// Opens the device and the logs, and checks what is found. A volume without room has no log.
    pub(crate) async fn open(&self, chances: Chances) -> mica_block::Result<Vec<Option<Log>>> {
        let device = LogDevice::open(self.store().await, self.random_id()).await?;
        let mut logs = Vec::new();
        for volume in &self.volumes {
            logs.push(self.open_log(&device, volume, chances).await?);
        }
        Ok(logs)
    }

    #[expect(clippy::await_holding_refcell_ref, reason = "the volume is this task's for now")]
    async fn open_log(
        &self,
        device: &Arc<LogDevice>,
        volume: &RefCell<Volume>,
        chances: Chances,
    ) -> mica_block::Result<Option<Log>> {
        let mut volume = volume.borrow_mut();
        let found = device.found(volume.id);
        match volume.life {
            Life::None => assert_eq!(found, None, "it came back"),
            Life::There => assert!(found.is_some(), "it was lost"),
            Life::Unsure => {}
        }
        if let Some(found) = found {
            if let (Life::There, Some(writer)) = (volume.life, volume.writer) {
                assert!(found.writers.contains(&writer), "{writer:?} is not in {found:?}");
            }
            if self.world.random_below(100) < chances.set_aside {
                volume.life = Life::Unsure;
                device.set_aside(volume.id).await?;
                volume.life = Life::None;
                assert_eq!(device.found(volume.id), None);
                return Ok(None);
            }
            // The head is of the last one that is known to have named itself.
            let (last, writer) = (volume.writer.unwrap_or(Writer::FIRST), self.claim());
            let log = device.go_on(volume.id, (last, writer), volume.stored).await?;
            (volume.life, volume.writer) = (Life::There, Some(writer));
            volume.expect_recovered(&log).await;
            if self.world.random_below(2) == 0 {
                log.only(writer);
            }
            return Ok(Some(log));
        }
        volume.life = Life::None;
        if self.world.random_below(100) >= chances.start {
            return Ok(None);
        }
        let first = self.world.random_below(1000);
        (volume.base, volume.stored, volume.durable, volume.written) = (first, first, first, first);
        volume.records.clear();
        volume.life = Life::Unsure;
        let writer = self.claim();
        match device.start([9; 16], volume.id, writer, first).await {
            Ok(log) => {
                (volume.life, volume.writer) = (Life::There, Some(writer));
                Ok(Some(log))
            }
            Err(error) if error.kind() == mica_block::ErrorKind::NoSpace => {
                volume.life = Life::None;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// After a power cut, only what is durable is owed.
    pub(crate) fn crash(&self) {
        for volume in &self.volumes {
            // One that was being opened is locked by a task that is gone.
            let mut volume = volume.borrow_mut();
            volume.written = volume.durable;
        }
    }
}

//! Copies a disk: several coroutines on several threads, each of which takes a piece, reads,
//! classifies, compresses and writes it.
//!
//! Pieces are taken, and get their places in the target, in disk order; reading, compressing and
//! writing run in parallel. So the target is laid out as if a single coroutine had done it all.

use super::content::{ContentRules, contents};
use super::progress::Progress;
use crate::cursor::{Cursor, Piece};
use crate::output::monotonic;
use mica_block::{Disk, Error, ErrorKind, Manage, Result, Store, read_whole, write_all};
use mica_qcow2_tools::layout::{CompressionLevel, Compressor, Content, ImageWriter, Place, Write};
use mica_rt::sync::Turns;
use mica_rt::{Backend, Buf, Executor, join_all};
use mica_units::{GuestOffset, HostOffset};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of a piece; a multiple of every cluster size but the largest.
const PIECE_BYTES: u64 = 1 << 20;

/// What to copy, and how.
pub(super) struct Job {
    /// The source.
    pub(super) source: Arc<dyn Disk>,
    /// The disk of the target's backing file; only differences from it are copied.
    pub(super) backing: Option<Arc<dyn Disk>>,
    /// The target.
    pub(super) target: Target,
    /// How clusters are classified.
    pub(super) rules: ContentRules,
    /// Pieces in flight.
    pub(super) coroutines: usize,
    /// How I/O is done.
    pub(super) backend: Backend,
    /// Bytes of the disk a second at most; 0 for as many as there can be.
    pub(super) rate: u64,
}

/// What a disk is copied to.
pub(super) enum Target {
    /// An empty file.
    Raw(Arc<dyn Store>),
    /// A disk that is there already.
    Disk(Arc<dyn Manage>),
    /// Empty files.
    Qcow2 { image: Arc<dyn Store>, data: Option<Arc<dyn Store>>, writer: Box<Mutex<ImageWriter>> },
}

/// Copies everything.
pub(super) fn copy(job: &Job, progress: &Progress) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.min(job.coroutines);
    let shared = Shared::new(job);
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for number in 0..threads {
            let count = (job.coroutines - number).div_ceil(threads);
            let shared = &shared;
            let body = move || run_thread(job, shared, count, progress);
            match std::thread::Builder::new().spawn_scoped(scope, body) {
                Ok(worker) => workers.push(worker),
                Err(error) if number == 0 => {
                    shared.fail(Error::from_io("starting a thread for the copy", error));
                    break;
                }
                // Those that there are copy all of it.
                Err(_) => break,
            }
        }
        for worker in workers {
            if worker.join().is_err() {
                shared.fail(Error::new(ErrorKind::Io, "a thread of the copy failed"));
            }
        }
    });
    shared.outcome()
}

fn run_thread(job: &Job, shared: &Shared, count: usize, progress: &Progress) {
    // A coroutine that fails or panics keeps no other waiting.
    let _ending = EndTurns(shared);
    match Executor::new(job.backend) {
        Ok(executor) => {
            let coroutines = (0..count).map(|_| async {
                if let Err(error) = run(job, shared, progress).await {
                    shared.fail(error);
                }
            });
            executor.block_on(async {
                join_all(coroutines).await;
                if let Target::Disk(disk) = &job.target {
                    // What its requests began in the background would end with this executor, and
                    // nobody would know what it has done.
                    disk.idle().await;
                }
            });
        }
        Err(error) => shared.fail(Error::from_io("starting the I/O backend", error)),
    }
}

/// State that the coroutines share.
struct Shared {
    cursor: Mutex<Option<Cursor>>,
    tickets: AtomicU64,
    reading: Turns,
    placing: Turns,
    error: Mutex<Option<Error>>,
    rate: u64,
    /// Bytes that were taken, and since when, if there is a rate.
    taken: Mutex<(Option<Duration>, u64)>,
}

/// Ends the turns if its thread panics.
struct EndTurns<'a>(&'a Shared);

impl Drop for EndTurns<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Error::new(ErrorKind::Io, "a thread of the copy failed"));
        }
    }
}

impl Shared {
    fn new(job: &Job) -> Self {
        let piece = PIECE_BYTES.max(job.rules.cluster_bytes as u64);
        let (source, backing) = (Arc::clone(&job.source), job.backing.clone());
        let cursor = Cursor::new(source, backing, piece, job.rules.with_zeros());
        Self {
            cursor: Mutex::new(Some(cursor)),
            tickets: AtomicU64::new(0),
            reading: Turns::default(),
            placing: Turns::default(),
            error: Mutex::new(None),
            rate: job.rate,
            taken: Mutex::default(),
        }
    }

    /// The first error, which is the one reported.
    fn fail(&self, error: Error) {
        self.error.lock().get_or_insert(error);
        self.reading.end();
        self.placing.end();
    }

    fn outcome(self) -> Result<()> {
        self.error.into_inner().map_or(Ok(()), Err)
    }

    /// Waits until `bytes` more are due. The caller has the turn, so that all others wait, too.
    async fn keep_rate(&self, bytes: u64) {
        if self.rate == 0 {
            return;
        }
        let due = {
            let (since, taken) = &mut *self.taken.lock();
            let since = *since.get_or_insert_with(monotonic);
            let nanoseconds = u128::from(*taken) * 1_000_000_000 / u128::from(self.rate);
            *taken += bytes;
            since + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
        };
        mica_rt::sleep(due.saturating_sub(monotonic())).await;
    }

    /// The next piece with its ticket; `None` at the end of the disk or of the copy.
    async fn next(&self, progress: &Progress) -> Result<Option<(u64, Piece)>> {
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        if !self.reading.wait(ticket).await {
            return Ok(None);
        }
        // It is this ticket's turn, so nobody else has taken the cursor.
        let Some(mut cursor) = self.cursor.lock().take() else { return Ok(None) };
        let piece = cursor.next().await;
        progress.at(cursor.position());
        *self.cursor.lock() = Some(cursor);
        if let Ok(Some(piece)) = &piece {
            self.keep_rate(piece.len).await;
        }
        self.reading.advance();
        Ok(piece?.map(|piece| (ticket, piece)))
    }
}

/// One coroutine: processes pieces until there are none.
async fn run(job: &Job, shared: &Shared, progress: &Progress) -> Result<()> {
    let kind = job.rules.compress;
    let mut compressor =
        kind.map(|kind| Compressor::new(kind, CompressionLevel::Usual)).transpose()?;
    while let Some((ticket, piece)) = shared.next(progress).await? {
        let start = piece.start;
        let bytes = read_padded(&*job.source, &piece, job.rules.cluster_bytes).await?;
        let beneath = match &job.backing {
            None => None,
            Some(backing) => Some(read_backing(&**backing, &piece, bytes.len()).await?),
        };
        let kinds = contents(&job.rules, &bytes, beneath.as_deref(), compressor.as_mut())?;
        match &job.target {
            Target::Raw(store) => {
                let write = async |part, at| write_all(&**store, part, HostOffset::new(at)).await;
                write_runs((start, piece.len), bytes, &kinds, progress, write).await?;
            }
            Target::Disk(disk) => {
                let write = async |part, at| disk.write(GuestOffset::new(at), part).await.0;
                write_runs((start, piece.len), bytes, &kinds, progress, write).await?;
            }
            Target::Qcow2 { image, data, writer } => {
                if !shared.placing.wait(ticket).await {
                    return Ok(());
                }
                let writes = writer.lock().place(GuestOffset::new(start), bytes, kinds)?;
                shared.placing.advance();
                for Write { place, at, bytes } in writes {
                    let store = match (place, data) {
                        (Place::DataFile, Some(data)) => data,
                        _ => image,
                    };
                    let len = bytes.len() as u64;
                    write_all(&**store, bytes, at).await?;
                    progress.wrote(len);
                }
            }
        }
    }
    Ok(())
}

/// The bytes of a piece, with zeros up to the end of its last cluster.
async fn read_padded(disk: &dyn Disk, piece: &Piece, cluster_bytes: usize) -> Result<Buf> {
    let bytes = read_whole(disk, &piece.first).await?;
    let whole = bytes.len().next_multiple_of(cluster_bytes);
    Ok(pad(bytes, whole))
}

/// The backing file's bytes for a piece, with zeros beyond its end.
async fn read_backing(disk: &dyn Disk, piece: &Piece, len: usize) -> Result<Buf> {
    Ok(pad(read_whole(disk, &piece.second).await?, len))
}

fn pad(bytes: Buf, len: usize) -> Buf {
    if bytes.len() == len {
        return bytes;
    }
    let mut padded = Buf::zeroed(len);
    padded.put(0, &bytes);
    padded
}

/// Writes the runs of a piece, which has a start and a length, that hold data at their offsets.
async fn write_runs(
    (start, len): (u64, u64),
    mut bytes: Buf,
    contents: &[Content],
    progress: &Progress,
    write: impl AsyncFn(Buf, u64) -> Result<()>,
) -> Result<()> {
    let unit = bytes.len() / contents.len().max(1);
    bytes.truncate(usize::try_from(len).expect("a piece"));
    let mut at = start;
    for run in contents.chunk_by(|a, b| a == b) {
        let part = bytes.split_to((run.len() * unit).min(bytes.len()));
        let part_len = part.len() as u64;
        if run.first() == Some(&Content::Data) && !part.is_empty() {
            write(part, at).await?;
            progress.wrote(part_len);
        }
        at += part_len;
    }
    Ok(())
}

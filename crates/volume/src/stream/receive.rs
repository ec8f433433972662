//! Receives a snapshot.

use super::format::{BEGIN_BYTES, Begin, DATA_BYTES_MAX, PART_BYTES, Part};
use crate::format::Id;
use crate::format::frame::Malformed;
use crate::format::head::Head;
use crate::format::snapshot::Record;
use crate::heads::{Claimed, End};
use crate::known::Change;
use crate::names::VolumeName;
use crate::properties::{Encryption, NewVolume, Properties};
use crate::segment::Cut;
use crate::snapshots::{all, check_new_label};
use crate::state::{Root, State};
use crate::volume::Volume;
use crate::volumes::Volumes;
use mica_block::{Disk as _, Error, ErrorKind, Manage as _, Result, SnapshotInfo, Which, Zeroes};
use mica_rt::{Buf, join_all};
use mica_units::{GuestOffset, GuestRange};
use std::io::Read;
use std::sync::Arc;

/// Parts that are written at the same time.
const WRITES_MAX: usize = 8;

/// What to do where a volume is not what a stream goes on from.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReceiveOptions {
    /// Give up what was written to the volume since the snapshot that the stream goes on from.
    pub force: bool,
    /// What a new volume is.
    pub new: NewVolume,
}

/// What one step of a stream became.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Received {
    /// The snapshot.
    pub snapshot: SnapshotInfo,
    /// Whether the volume had it before: nothing was changed then.
    pub was_there: bool,
    /// Bytes of data.
    pub data_bytes: u64,
}

impl Volumes {
    /// Makes of a stream what was sent into it ([`Self::send`]): a new volume if the stream begins
    /// with a whole snapshot, otherwise newer snapshots of `name`, which nobody must have open. The
    /// volume is what the last snapshot has then. `each` is called after each step. A step of which
    /// the volume has the snapshot already changes nothing, so that a stream that was cut off can
    /// be received again.
    ///
    /// # Errors
    /// `NotFound` if the volume does not have the snapshot that the stream goes on from; `Invalid`
    /// if there is a volume `name` and the stream is of a new one, or another snapshot has the
    /// label; `Denied` if the volume is open, was handed over, or was written since that snapshot
    /// and that is not to be given up; `Corrupt` if the stream is damaged or ends too early;
    /// otherwise what the store reports. The volume has what the steps before made then, unless it
    /// cannot be taken back: with the next try and `force` it is.
    pub async fn receive(
        &self,
        name: &VolumeName,
        options: ReceiveOptions,
        source: &mut dyn Read,
        mut each: impl FnMut(&Received),
    ) -> Result<()> {
        let mut stream = Stream { source, position: 0 };
        let mut is_first = true;
        while let Some(begin) = stream.begin(is_first)? {
            is_first = false;
            each(&self.receive_step(name, options, &begin, &mut stream).await?);
        }
        Ok(())
    }

    async fn receive_step(
        &self,
        name: &VolumeName,
        options: ReceiveOptions,
        begin: &Begin,
        stream: &mut Stream<'_>,
    ) -> Result<Received> {
        let present = self.present(name).await?;
        if let Some(present) = &present {
            present.check_as(name, options.new)?;
        }
        let snapshots = present.as_ref().map_or(Root::default(), |there| there.state.snapshots);
        let had = present.as_ref().and_then(|present| present.snapshot_of(begin));
        if let Some(record) = had {
            let data_bytes = Step::new(begin, stream).skip()?;
            return Ok(Received { snapshot: record.info.clone(), was_there: true, data_bytes });
        }
        let (base, made) = match (&present, &begin.base) {
            (None, None) => (None, Some(self.make_unfinished(name, begin.len, options.new).await?)),
            (Some(present), Some(_)) => {
                (Some(self.base(name, options, begin, present).await?), None)
            }
            (Some(_), None) => {
                let what = format!(
                    "there is a volume {} already, and the stream is of a whole one: give it \
                     another name",
                    name.as_str()
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            (None, Some(_)) => return Err(no_base(name, begin)),
        };
        let content = base.as_ref().map_or((Root::default(), begin.len), |base| base.content());
        let volume = self.open_as_seen(name, made.as_ref(), (content, snapshots)).await?;
        let made = made.map(|made| made.volume);
        let received = match write(&volume, begin, stream).await {
            Ok(received) => volume.close().await.map(|()| received),
            Err(error) => {
                // The first failure is reported.
                let is_back = take_back(&volume, base.as_deref()).await.is_ok();
                let left = made.filter(|_| !is_back);
                return Err(self.unmade(name, left, &volume, error).await);
            }
        };
        match received {
            Ok(received) => Ok(received),
            Err(error) => Err(self.unmade(name, made, &volume, error).await),
        }
    }

    /// Opens a volume that has this content and these snapshots, or was just `made`.
    pub(super) async fn open_as_seen(
        &self,
        name: &VolumeName,
        made: Option<&Head>,
        (content, snapshots): ((Root, u64), Root),
    ) -> Result<Volume> {
        // What was just made is nobody else's, and no whole volume if this dies now.
        let claimed = made.map_or(Claimed::OnlyIfClosed, |made| Claimed::JustMade(made.volume));
        let volume = match self.open_volume(name, claimed).await {
            Ok(volume) => volume,
            Err(error) => {
                if let Some(made) = made {
                    // The first failure is reported.
                    let _ = self.heads(name).delete_just_made(made).await;
                }
                return Err(error);
            }
        };
        let state = volume.shared().now().state;
        if ((state.map, state.len), state.snapshots) == (content, snapshots) {
            return Ok(volume);
        }
        let changed = changed_meanwhile(name);
        match made {
            // One that is not whole must not look so: it is not closed.
            Some(made) => Err(self.unmade(name, Some(made.volume), &volume, changed).await),
            None => {
                volume.close().await?;
                Err(changed)
            }
        }
    }

    /// Deletes a volume that was `made` for a stream if its writer could not, as the store has no
    /// room for its extents: a head is short. What others have of this name by now is theirs, and
    /// one that was closed after all is whole. Returns why it was not received.
    async fn unmade(
        &self,
        name: &VolumeName,
        made: Option<Id>,
        volume: &Volume,
        error: Error,
    ) -> Error {
        let (Some(made), Some(writer)) = (made, volume.writer()) else { return error };
        match self.heads(name).delete_unclosed(made, writer).await {
            Ok(()) => error,
            Err(other) => {
                let (name, what, other) = (name.as_str(), error.in_one_line(), other.in_one_line());
                let what = format!("{what}; volume {name} is incomplete, delete it: {other}");
                Error::new(error.kind(), what)
            }
        }
    }

    /// What there is of volume `name`.
    async fn present(&self, name: &VolumeName) -> Result<Option<Present>> {
        let heads = self.heads(name);
        let present = heads.with_counting(async |head, state| {
            let records = all(&self.tree, state.snapshots).await?;
            let (volume, properties) = (head.volume, head.properties);
            Ok(Present { volume, properties, state: *state, records })
        });
        match present.await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            outcome => outcome.map(Some),
        }
    }

    /// What the step goes on from. If the volume is something else, it is rolled back to that, or
    /// refused.
    async fn base(
        &self,
        name: &VolumeName,
        options: ReceiveOptions,
        begin: &Begin,
        present: &Present,
    ) -> Result<Arc<Record>> {
        let mut records = present.records.iter();
        let base = records.find(|record| begin.base == Some(record.identity(present.volume)));
        let Some(base) = base else { return Err(no_base(name, begin)) };
        if base.info.len > begin.len {
            return Err(Malformed::Content.of_stream(0));
        }
        check_new_label(&begin.label, present.records.iter().map(|record| &*record.info.label))?;
        let state = &present.state;
        if (state.map, state.len) != base.content() {
            if !options.force {
                return Err(changed(name));
            }
            self.rollback(name, &Which::Number(base.info.number)).await?;
        }
        Ok(Arc::clone(base))
    }
}

impl Record {
    /// What a volume has that was rolled back to the snapshot: its map and its length.
    fn content(&self) -> (Root, u64) {
        (self.map, self.info.len)
    }
}

/// Makes the volume what it was before the step, as its writer (I4): `base`, or nothing.
async fn take_back(volume: &Volume, base: Option<&Record>) -> Result<()> {
    let shared = volume.shared();
    let Some(base) = base else { return shared.end(&End::Deleted).await };
    let number = base.info.number;
    let rolled_back = shared.change_once(Change::Cut(Cut::Rollback { number })).await;
    let closed = volume.close().await;
    rolled_back.and(closed)
}

/// Writes what a step has, and takes the snapshot.
async fn write(volume: &Volume, begin: &Begin, stream: &mut Stream<'_>) -> Result<Received> {
    if begin.len > volume.geometry().len {
        volume.resize(begin.len).await?;
    }
    let mut step = Step::new(begin, stream);
    loop {
        let mut parts = Vec::new();
        while parts.len() < WRITES_MAX
            && let Some(part) = step.next()?
        {
            parts.push(part);
        }
        if parts.is_empty() {
            break;
        }
        let writes = parts.into_iter().map(|(part, data)| put(volume, part, data));
        for written in join_all(writes.collect::<Vec<_>>()).await {
            written?;
        }
    }
    let (label, origin) = (begin.label.clone(), Some(begin.snapshot));
    let snapshot = volume.shared().record_snapshot(label, begin.time_ns, origin).await?;
    Ok(Received { snapshot, was_there: false, data_bytes: step.data_bytes })
}

async fn put(volume: &Volume, part: Part, data: Buf) -> Result<()> {
    match part {
        Part::Data { start, .. } => volume.write(GuestOffset::new(start), data).await.0,
        Part::Nothing { start, len } => {
            let range = GuestRange::new(GuestOffset::new(start), len).expect("on the disk");
            volume.write_zeroes(range, Zeroes { may_unmap: true, fast: false }).await
        }
        Part::End { .. } => Ok(()),
    }
}

/// A volume that is there.
struct Present {
    volume: Id,
    properties: Properties,
    state: State,
    records: Vec<Arc<Record>>,
}

impl Present {
    /// Checks that what is received is encrypted if that was asked for.
    fn check_as(&self, name: &VolumeName, new: NewVolume) -> Result<()> {
        if new.encryption == Encryption::None || self.properties.key().is_some() {
            return Ok(());
        }
        let what = format!(
            "there is a volume {} already, which is not encrypted: give the new one another name",
            name.as_str()
        );
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// Its snapshot that `begin` would make.
    fn snapshot_of(&self, begin: &Begin) -> Option<&Arc<Record>> {
        self.records.iter().find(|record| record.identity(self.volume) == begin.snapshot)
    }
}

fn changed(name: &VolumeName) -> Error {
    let what = format!(
        "volume {} was written since the snapshot on which the stream is based: --force discards \
         those writes",
        name.as_str()
    );
    Error::new(ErrorKind::Denied, what)
}

fn changed_meanwhile(name: &VolumeName) -> Error {
    let name = name.as_str();
    let what =
        format!("volume {name} was changed by somebody else in this moment: receive it again");
    Error::new(ErrorKind::Denied, what)
}

fn no_base(name: &VolumeName, begin: &Begin) -> Error {
    let what = format!(
        "there is no volume {} with the snapshot on which the stream is based: receive that one \
         first (this is of {:?})",
        name.as_str(),
        begin.label
    );
    Error::new(ErrorKind::NotFound, what)
}

/// A stream that is read.
struct Stream<'a> {
    source: &'a mut dyn Read,
    /// Bytes that were read.
    position: u64,
}

impl Stream<'_> {
    /// What the next step begins with; `None` at the end, which must not be the start.
    fn begin(&mut self, is_first: bool) -> Result<Option<Begin>> {
        let at = self.position;
        let mut bytes = [0; BEGIN_BYTES];
        let read = self.read(&mut bytes)?;
        if read == 0 && !is_first {
            return Ok(None);
        }
        Begin::decode(&bytes[..read]).map(Some).map_err(|why| why.of_stream(at))
    }

    /// Reads as much as there is, up to all of `bytes`; returns how much.
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let mut read = 0;
        while read < bytes.len() {
            match self.source.read(&mut bytes[read..]) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let what = format!("reading the stream: {error}");
                    return Err(Error::new(ErrorKind::Io, what));
                }
            }
        }
        self.position += read as u64;
        Ok(read)
    }

    fn read_whole(&mut self, bytes: &mut [u8], at: u64) -> Result<()> {
        match self.read(bytes)? == bytes.len() {
            true => Ok(()),
            false => Err(Malformed::Truncated.of_stream(at)),
        }
    }
}

/// The parts of a step.
struct Step<'a, 'b> {
    stream: &'a mut Stream<'b>,
    disk_len: u64,
    /// How many were read.
    count: u64,
    /// Up to where they reach on the disk.
    end: u64,
    data_bytes: u64,
    is_over: bool,
}

impl<'a, 'b> Step<'a, 'b> {
    fn new(begin: &Begin, stream: &'a mut Stream<'b>) -> Self {
        let (count, end, data_bytes, is_over) = (0, 0, 0, false);
        Self { stream, disk_len: begin.len, count, end, data_bytes, is_over }
    }

    /// The next part and its data, both checked; `None` at the step's end.
    fn next(&mut self) -> Result<Option<(Part, Buf)>> {
        if self.is_over {
            return Ok(None);
        }
        let at = self.stream.position;
        let mut head = [0; PART_BYTES];
        self.stream.read_whole(&mut head, at)?;
        let part = Part::announced(&head, self.count, self.end, self.disk_len)
            .map_err(|why| why.of_stream(at))?;
        assert!(part.data_len() <= DATA_BYTES_MAX, "what was announced is bounded");
        let mut data = Buf::new(usize::try_from(part.data_len()).expect("bounded"));
        self.stream.read_whole(data.own_bytes(), at)?;
        Part::check(&head, &data).map_err(|why| why.of_stream(at))?;
        match part {
            Part::Data { start, len } | Part::Nothing { start, len } => {
                self.count += 1;
                self.end = start + len;
                self.data_bytes += part.data_len();
                Ok(Some((part, data)))
            }
            Part::End { data_bytes, parts }
                if (data_bytes, parts) == (self.data_bytes, self.count) =>
            {
                self.is_over = true;
                Ok(None)
            }
            Part::End { .. } => Err(Malformed::Content.of_stream(at)),
        }
    }

    /// Reads all of it; returns how many bytes of data that were.
    fn skip(mut self) -> Result<u64> {
        while self.next()?.is_some() {}
        Ok(self.data_bytes)
    }
}

impl Malformed {
    /// As an error of a stream, in what begins at byte `at` of it.
    fn of_stream(self, at: u64) -> Error {
        let kind = match self {
            Self::Version(_) => ErrorKind::Unsupported,
            _ => ErrorKind::Corrupt,
        };
        let what = match self {
            Self::Magic => "this is not a stream of a volume".to_owned(),
            Self::Truncated => "the stream ends too early".to_owned(),
            _ => format!("the stream is damaged at byte {at}: {self}"),
        };
        Error::new(kind, what)
    }
}

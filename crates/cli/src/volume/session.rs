//! What all verbs about volumes share: how a store is reached, and what is said of a volume.

use super::keys::add_properties;
use crate::failure::{Failure, tell};
use clap::Args;
use indicatif::ProgressBar;
use mica_block::{ClonedFrom, Error, ErrorKind, SourceNow};
use mica_daemon::{ImageSettings, IoSettings};
use mica_rt::Executor;
use mica_stack::{Patience, Store, StoreUrl, Stores, VolumeUrl};
use mica_volume::{Listed, Progress, VolumeInfo, VolumeName, Volumes};
use serde_json::{Map, Value, json};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

// Options of verbs about volumes. (A doc comment would become the help of the verb.)
#[derive(Args, Default)]
pub(super) struct SessionArgs {
    #[command(flatten)]
    pub(super) io: IoSettings,
}

/// The stores that a verb uses.
pub(super) struct Session {
    pub(super) executor: Executor,
    pub(super) stores: Stores,
}

/// What a URL names that may be either.
pub(super) enum Subject {
    Store(Arc<Store>),
    Volume(Arc<Store>, VolumeName),
}

/// Something is damaged, as with `mica check`.
const EXIT_DAMAGED: u8 = 2;

/// How a volume is called whose newest head cannot be read.
pub(super) const DAMAGED: &str = "damaged";
pub(super) const NEWER: &str = "of a newer version";

/// Memory for what is read of maps.
const CACHE_BYTES: u64 = 32 << 20;

/// The stores of a verb.
pub(super) fn stores() -> Stores {
    Stores::new(ImageSettings::handles(), CACHE_BYTES, Patience::Verb)
}

impl SessionArgs {
    pub(super) fn start(&self) -> Result<Session, Failure> {
        let executor = Executor::new(self.io.backend())
            .map_err(|error| Failure::new(format!("starting the I/O backend: {error}")))?;
        Ok(Session { executor, stores: stores() })
    }
}

impl Session {
    /// Changes the volume at `url` by `act`, while nobody on this machine opens it.
    ///
    /// # Errors
    /// `Denied` if a writer has it; otherwise what the store or `act` reports.
    pub(super) fn change<T>(
        &self,
        url: &VolumeUrl,
        act: impl AsyncFnOnce(&Volumes) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.executor.block_on(async {
            let store = self.stores.open(&url.store).await?;
            let _held = store.settle(&url.name).await?;
            act(store.volumes()).await
        })
    }

    /// What `url` names, which may be a store, or a volume in one, for `verb`.
    pub(super) async fn subject(&self, url: &str, verb: &str) -> Result<Subject, Failure> {
        let whole = StoreUrl::from_str(url);
        if let Ok(whole) = &whole {
            whole.check_lasting()?;
            if let Some(store) = self.stores.find(whole).await? {
                return Ok(Subject::Store(store));
            }
        }
        let one = volume(url).and_then(|one| Ok(one.without_snapshot(verb)?.clone()));
        if let Ok(VolumeUrl { store, name, .. }) = &one
            && let Some(store) = self.stores.find(store).await?
        {
            return Ok(Subject::Volume(store, name.clone()));
        }
        // Neither is a store any more: why is looked for now, as that takes longer.
        if let Ok(whole) = &whole {
            match self.stores.open(whole).await {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                opened => return Ok(Subject::Store(opened?)),
            }
        }
        let VolumeUrl { store, name, .. } = one?;
        Ok(Subject::Volume(self.stores.open(&store).await?, name))
    }
}

/// Shows how many extents were looked at.
pub(super) fn show_on(bar: &ProgressBar) -> impl FnMut(Progress) + use<'_> {
    |at| {
        bar.set_length(at.of_extents.max(at.extents));
        bar.set_position(at.extents);
    }
}

/// The URL of a volume.
pub(super) fn volume(text: &str) -> Result<VolumeUrl, Failure> {
    let url: VolumeUrl = text.parse()?;
    url.store.check_lasting()?;
    Ok(url)
}

/// The URL of a store.
pub(super) fn store(text: &str) -> Result<StoreUrl, Failure> {
    let url: StoreUrl = text.parse()?;
    url.check_lasting()?;
    Ok(url)
}

/// The URL of a volume in `store`.
pub(super) fn url_in(store: &StoreUrl, name: &VolumeName) -> String {
    VolumeUrl { store: store.clone(), name: name.clone(), snapshot: None }.to_string()
}

/// What is known of a volume without opening it, as JSON.
pub(super) fn described(store: &StoreUrl, info: &VolumeInfo) -> Map<String, Value> {
    let mut all = Map::new();
    let mut set = |key: &str, value: Value| all.insert(key.to_owned(), value);
    set("name", info.name.as_str().into());
    set("url", url_in(store, &info.name).into());
    set("virtual-size", info.state.len.into());
    set("state", state_word(info).into());
    set("open-on", json!(info.open_on));
    set("log", json!(info.log));
    set("handed-to", json!(info.heir));
    set("time", json!((info.state.time_ns > 0).then(|| instant(info.state.time_ns))));
    add_properties(&mut all, &info.properties);
    all
}

/// The volumes of a store whose newest heads cannot be read, as JSON.
pub(super) fn described_unread(store: &StoreUrl, listed: &Listed) -> Vec<Map<String, Value>> {
    let described = |state: &'static str| {
        move |(name, error): &(VolumeName, Error)| described_as(state, (store, name), error)
    };
    let damaged = listed.damaged.iter().map(described(DAMAGED));
    damaged.chain(listed.newer.iter().map(described("newer-version"))).collect()
}

fn described_as(
    state: &str,
    (store, name): (&StoreUrl, &VolumeName),
    error: &Error,
) -> Map<String, Value> {
    let mut all = Map::new();
    let mut set = |key: &str, value: Value| all.insert(key.to_owned(), value);
    set("name", name.as_str().into());
    set("url", url_in(store, name).into());
    set("state", state.into());
    set("error", error.in_one_line().into());
    all
}

/// Says what is wrong with volumes that could not be read, and how a verb ends that has told all of
/// the others.
pub(super) fn exit_code_of(listed: &Listed) -> ExitCode {
    for (name, error) in &listed.damaged {
        let (name, error) = (name.as_str(), error.in_one_line());
        tell(&format!("mica: volume {name} is damaged: {error}"));
    }
    exit_code_with(&listed.newer, listed.damaged.len() as u64)
}

/// How a verb ends that has found so much damage, after it has named what it could not look at.
pub(super) fn exit_code_with(newer: &[(VolumeName, Error)], damaged_count: u64) -> ExitCode {
    tell_newer(newer);
    match damaged_count {
        0 if newer.is_empty() => ExitCode::SUCCESS,
        0 => ExitCode::FAILURE,
        _ => ExitCode::from(EXIT_DAMAGED),
    }
}

/// Names the volumes that this version of mica cannot read, which is no damage.
fn tell_newer(newer: &[(VolumeName, Error)]) {
    for (name, error) in newer {
        let (name, error) = (name.as_str(), error.in_one_line());
        tell(&format!("mica: volume {name} was made by a newer version of mica: {error}"));
    }
}

/// A time, by ISO 8601.
pub(super) fn instant(time_ns: u64) -> String {
    let (seconds, nanoseconds) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000);
    let text = crate::calendar::utc(seconds).replace(' ', "T");
    format!("{text}.{nanoseconds:09}Z")
}

/// The time as text for people.
pub(super) fn time_text(time_ns: u64) -> String {
    match time_ns {
        0 => "-".to_owned(),
        time_ns => crate::calendar::utc(time_ns / 1_000_000_000),
    }
}

/// What a volume was cloned from, for programs.
pub(super) fn source_json(from: Option<&ClonedFrom>) -> Value {
    let Some(ClonedFrom { volume, snapshot, now }) = from else { return Value::Null };
    let (state, label) = match now {
        SourceNow::There { label } => ("there", Some(label)),
        SourceNow::SnapshotDropped => ("snapshot-dropped", None),
        SourceNow::VolumeDeleted => ("deleted", None),
        SourceNow::Unknown => ("unknown", None),
    };
    let label = label.filter(|_| snapshot.is_some());
    json!({ "name": volume, "sequence": snapshot, "label": label, "state": state })
}

/// The same for people.
pub(super) fn source_text(from: &ClonedFrom) -> String {
    crate::plain::plain(&from.to_string())
}

/// Whether somebody has a volume open, for programs.
fn state_word(info: &VolumeInfo) -> &'static str {
    match (&info.open_on, &info.heir, info.is_ready) {
        (Some(_), _, true) => "open",
        (Some(_), _, false) => "importing",
        (None, _, false) => "cloning",
        (None, Some(_), true) => "handed-over",
        (None, None, true) => "closed",
    }
}

/// The state of a volume as text for people.
pub(super) fn state_text(info: &VolumeInfo) -> String {
    let on = |host: &str| crate::plain::plain(host);
    match (&info.open_on, &info.heir, info.is_ready) {
        (Some(host), _, true) => format!("open on {}", on(host)),
        (Some(host), _, false) => format!("being imported on {}", on(host)),
        (None, _, false) => "a clone that is not finished".to_owned(),
        (None, Some(heir), true) => format!("handed over to {}", on(heir)),
        (None, None, true) => "closed".to_owned(),
    }
}

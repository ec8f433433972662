//! Checks a configuration as far as that goes without serving it: everything that the start of the
//! process does, but it writes nothing, takes no locks and listens nowhere, so that this can be
//! done beside a server.

use crate::address::Address;
use crate::config::{Config, DiskConfig};
use crate::contexts;
use crate::helper::Outside;
use crate::opening::chain_options;
use crate::places::{nbd_addresses, socket_addresses};
use crate::settings::{ImageSettings, MapBudgets};
use crate::sockets::check_metrics;
use crate::tls::Security;
use mica_block::{Disk, Error, ErrorKind, Manage, Result};
use mica_qcow2::MapCache;
use mica_rt::{Backend, Executor};
use mica_serve::{Workers, check_socket_place};
use mica_stack::{Patience, Stores, Window};
use mica_store::{Handles, Locking};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// All that is wrong with `config`. Its images are opened for reading, whoever has them open.
///
/// # Errors
/// If nothing can be checked.
pub fn check_config(config: &Config) -> Result<Vec<Error>> {
    let mut all = config.problems(false);
    all.extend(of_process(config).into_iter().map(|error| match &config.named {
        Some(file) => error.wrap(file.display().to_string()),
        None => error,
    }));
    let handles = ImageSettings::handles();
    let executor = Executor::new(Backend::Pool)
        .map_err(|error| Error::from_io("checking a configuration", error))?;
    let cache = MapCache::default();
    let mut images = Images::default();
    for (index, disk) in config.disks.iter().enumerate() {
        let problems = of_places(disk)
            .into_iter()
            .chain(executor.block_on(open(disk, &handles, &cache)).err())
            .chain(images.add(config, index).err());
        all.extend(problems.map(|error| error.wrap(config.place(index))));
    }
    Ok(all)
}

/// What is wrong with what belongs to no disk.
fn of_process(config: &Config) -> Vec<Error> {
    let process = &config.process;
    let queues = process.queues.map_or(Ok(()), Workers::check_count);
    let metrics = process.metrics.map(|address| check_metrics(address, process.metrics_public));
    let control = process.control.as_deref().map(check_socket_place);
    [Some(queues), metrics, control].into_iter().flatten().filter_map(Result::err).collect()
}

/// What is wrong with where the clients of `disk` are to come in.
fn of_places(disk: &DiskConfig) -> Vec<Error> {
    let (settings, outside) = (&disk.settings, Outside::default());
    let security = Security::of(settings);
    let mut all: Vec<Error> = Vec::new();
    for at in nbd_addresses(settings) {
        let open: mica_serve::OpenFile<'_> = &|file: &Path| outside.open_certificate(file);
        let error = security.check(&at, open).err();
        // The same certificates are those of all its addresses.
        let is_said =
            |error: &Error| all.iter().any(|other| other.in_one_line() == error.in_one_line());
        let new = error.filter(|error| !is_said(error));
        all.extend(new);
    }
    for address in socket_addresses(settings) {
        if let Address::Unix(path) = address {
            all.extend(check_socket_place(&path).err());
        }
    }
    all.extend(settings.fuse.as_deref().and_then(|file| mica_serve::fuse::check_file(file).err()));
    all
}

/// The images of the disks that were looked at, by file: the disk, and whether it writes.
#[derive(Default)]
struct Images(BTreeMap<(u64, u64), (usize, bool)>);

impl Images {
    /// Adds that of a disk.
    ///
    /// # Errors
    /// If another disk has it and one of them writes it.
    fn add(&mut self, config: &Config, index: usize) -> Result<()> {
        let Some(disk) = config.disks.get(index) else { return Ok(()) };
        // An ephemeral disk writes to an overlay of its own, and who shares by force is not kept
        // from anything.
        let writes = disk.writes() && !disk.settings.ephemeral;
        if !disk.is_file() || (!writes && disk.images.force_share) {
            return Ok(());
        }
        let Ok(found) = disk.image.metadata() else { return Ok(()) };
        let entry = self.0.entry((found.dev(), found.ino())).or_insert((index, writes));
        let (other, other_writes) = *entry;
        if writes && !other_writes {
            *entry = (index, true);
        }
        if other == index || !(writes || other_writes) {
            return Ok(());
        }
        let name = config.disks.get(other).map_or("", |disk| &disk.name);
        let line = config.lines.get(other).map(|line| format!(" (line {line})"));
        let what = format!(
            "{} is the image of the disk {name:?}{}, too, and only one may have it that is \
             written: give each an overlay of its own, or make both read-only",
            disk.image.display(),
            line.unwrap_or_default()
        );
        Err(Error::new(ErrorKind::Denied, what))
    }
}

async fn open(disk: &DiskConfig, handles: &Arc<Handles>, cache: &MapCache) -> Result<()> {
    let DiskConfig { image, settings, images, volume, .. } = disk;
    let opened = match volume.url()? {
        Some(url) => {
            let cache_bytes = MapBudgets::largest([images.index_cache].into_iter()).volumes;
            let stores = Stores::new(Arc::clone(handles), cache_bytes, Patience::Verb);
            stores.open_volume(&url, &volume.options(false)).await?
        }
        None => {
            let chain = chain_options(settings, images, cache)?;
            let mut options = images.image_options(Arc::clone(handles))?;
            options.secrets.load()?;
            options.locking = Locking::ForceShare;
            mica_stack::open(image, images.format, options, &chain).await?
        }
    };
    let looked = look(&opened, disk).await;
    // The first failure is the one to report.
    looked.and(opened.close().await)
}

/// Whether clients can be shown of a disk what its settings say.
async fn look(opened: &Arc<dyn Manage>, disk: &DiskConfig) -> Result<()> {
    if let Some(place) = contexts::part_of(&**opened, &disk.settings).await? {
        let disk: Arc<dyn Disk> = Arc::clone(opened) as _;
        Window::new(disk, place)?;
    }
    contexts::of_settings(opened, &disk.settings).await.map(drop)
}

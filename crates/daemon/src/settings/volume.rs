//! How a volume is opened.

use super::{FlushDurability, KeepRules, Size, SnapshotAfter};
use clap::Args;
use mica_block::Result;
use mica_stack::{LOG_BYTES_MIN, LogPlace, StoreUrl, VolumeAccess, VolumeOptions, VolumeUrl};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A heading in the help.
const VOLUME: &str = "Volume";
/// Memory for boots of an image by default, in a store that is far.
const BOOT_FETCH: Size = Size(128 << 20);
/// The default length of a log.
const LOG_SIZE: Size = Size(1 << 30);

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has these options"
)]
#[derive(Args, Deserialize, Serialize, Clone, PartialEq, Eq, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct VolumeSettings {
    /// Serve this volume, instead of an image.
    ///
    /// file:///DIR/NAME, s3://BUCKET/PREFIX/NAME or rados://POOL/PREFIX/NAME; append @LABEL for a
    /// snapshot, which is read-only. `mica volume create` makes a volume.
    #[arg(long, value_name = "URL")]
    pub volume: Option<String>,
    /// Log writes that the store does not have yet in this file or device.
    ///
    /// A flush is then answered as soon as the log has them. Volumes of one server may share it. If
    /// the server is killed, start it again with the same log: it has everything that was
    /// acknowledged.
    #[arg(long, requires = "volume", value_name = "FILE", help_heading = VOLUME)]
    #[arg(hide_short_help = true)]
    pub log_device: Option<PathBuf>,
    /// Length of the log if it is created; 1G by default.
    ///
    /// It has to hold what guests write faster than the store takes it. A device has its own
    /// length.
    #[arg(long, requires = "log_device", value_name = "SIZE", help_heading = VOLUME)]
    #[arg(hide_short_help = true)]
    pub log_size: Option<Size>,
    /// What a completed flush guarantees: host, that the log has the data; store, that the store
    /// does.
    ///
    /// host by default if there is a log: the loss of this machine then loses what the store did
    /// not have yet.
    #[arg(long, requires = "volume", value_enum, value_name = "host|store", help_heading = VOLUME)]
    #[arg(hide_short_help = true)]
    pub durability: Option<FlushDurability>,
    /// The file with the volume's key, if it is encrypted.
    ///
    /// 32 bytes, or 64 hexadecimal digits; read whenever the volume is opened. No option takes the
    /// key itself, because other users can see command lines.
    #[arg(long, requires = "volume", value_name = "FILE", help_heading = VOLUME)]
    #[arg(hide_short_help = true)]
    pub volume_key: Option<PathBuf>,
    /// Take snapshots while the volume is written, and keep them by these rules.
    ///
    /// 60s/10ms,1h/1s,1d/1h: one every 10 ms for the last minute, one a second for the last hour,
    /// one an hour for the last day. They have no label; one that gets a label is kept for good.
    #[arg(long, requires = "volume", value_name = "RULES", help_heading = VOLUME)]
    #[arg(hide_short_help = true)]
    pub keep: Option<KeepRules>,
    /// Take a snapshot after each write, or before each flush: the volume can be rolled back to
    /// any.
    ///
    /// --keep says for how long they are kept. flush costs little; write costs a record in the log
    /// and in the store for each write.
    #[arg(long, requires = "keep", value_enum, value_name = "write|flush", help_heading = VOLUME)]
    #[arg(hide_short_help = true, hide_possible_values = true)]
    pub snapshot_per: Option<SnapshotAfter>,
    /// Memory for prefetching what boots read first; 0: neither record nor prefetch.
    ///
    /// What is read in the first two minutes after opening is recorded in the store, once for a
    /// volume and its clones, and prefetched in that order the next time, beside what the guest
    /// requests. 128M by default in a bucket or a pool, and 0 in a folder, which is near.
    #[arg(long, requires = "volume", value_name = "SIZE", help_heading = VOLUME)]
    #[arg(hide_short_help = true)]
    pub boot_fetch: Option<Size>,
    /// Take the volume over from a host that has it open and may be alive.
    ///
    /// That host can write no more, and notices it. Writes that it has not put into the store are
    /// lost. A server of this machine that was killed needs no force, unless the machine restarted
    /// since and the volume is in a bucket or a pool, without a log. Applies to the first opening
    /// only; it cannot be set in a configuration.
    #[arg(long, requires = "volume", help_heading = VOLUME, hide_short_help = true)]
    pub force: bool,
}

impl VolumeSettings {
    /// The volume, if it is one.
    ///
    /// # Errors
    /// `Invalid` if that is no URL of one.
    pub fn url(&self) -> Result<Option<VolumeUrl>> {
        let Some(text) = &self.volume else { return Ok(None) };
        let url: VolumeUrl = text.parse()?;
        url.store.check_lasting()?;
        Ok(Some(url))
    }

    /// Whether it is a snapshot, which is never written.
    pub(crate) fn is_snapshot(&self) -> bool {
        self.url().ok().flatten().is_some_and(|url| url.snapshot.is_some())
    }

    /// Whether it is in a pool of Ceph.
    pub(crate) fn is_in_pool(&self) -> bool {
        self.url().ok().flatten().is_some_and(|url| matches!(url.store, StoreUrl::Pool { .. }))
    }

    /// Memory for what boots of the volume at `url` read first.
    pub(crate) fn boot_fetch(&self, url: &VolumeUrl) -> u64 {
        let is_far = matches!(url.store, StoreUrl::Bucket { .. } | StoreUrl::Pool { .. });
        self.boot_fetch.unwrap_or(if is_far { BOOT_FETCH } else { Size(0) }).0
    }

    /// Where its log is, if it has one.
    pub(crate) fn log(&self) -> Option<LogPlace> {
        let len = self.log_size.unwrap_or(LOG_SIZE).0;
        self.log_device.clone().map(|path| LogPlace { path, len })
    }

    /// How it is opened, for reading only or not, without force.
    pub(crate) fn options(&self, is_written: bool) -> VolumeOptions {
        let key = self.volume_key.clone();
        if !is_written {
            return VolumeOptions { key, ..VolumeOptions::default() };
        }
        let (access, durability) =
            (VolumeAccess::Write, self.durability.map(FlushDurability::into));
        let keep = self.keep.clone().map(|rules| rules.0);
        let snapshot_per = self.snapshot_per.map(SnapshotAfter::into).unwrap_or_default();
        let log = self.log();
        let options = VolumeOptions { access, key, log, durability, ..VolumeOptions::default() };
        VolumeOptions { keep, snapshot_per, ..options }
    }

    /// An option that has no effect on what is only read, as the snapshot of a volume is.
    pub(crate) fn option_of_writers(&self) -> Option<&'static str> {
        let all = [
            (self.log_device.is_some(), "log-device"),
            (self.log_size.is_some(), "log-size"),
            (self.durability.is_some(), "durability"),
            (self.keep.is_some(), "keep"),
            (self.snapshot_per.is_some(), "snapshot-per"),
            (self.force, "force"),
        ];
        all.into_iter().find_map(|(is_given, option)| is_given.then_some(option))
    }

    /// Why no log can be made, as far as its settings say.
    pub(crate) fn log_problem(&self) -> Option<String> {
        let Size(len) = self.log_size.filter(|len| len.0 < LOG_BYTES_MIN)?;
        Some(format!("log-size {len}: a log has at least {LOG_BYTES_MIN} bytes"))
    }

    /// An option that has no effect, and why.
    pub(crate) fn ineffective_option(&self) -> Option<String> {
        let (has_volume, has_log) = (self.volume.is_some(), self.log_device.is_some());
        let volume = "a volume: add volume";
        let log = "a log: add log-device";
        let all = [
            (has_log, "log-device", has_volume, volume),
            (self.log_size.is_some(), "log-size", has_log, log),
            (self.durability.is_some(), "durability", has_volume, volume),
            (self.durability == Some(FlushDurability::Host), "durability host", has_log, log),
            (self.volume_key.is_some(), "volume-key", has_volume, volume),
            (self.keep.is_some(), "keep", has_volume, volume),
            (self.boot_fetch.is_some(), "boot-fetch", has_volume, volume),
            (self.snapshot_per.is_some(), "snapshot-per", self.keep.is_some(), "keep: add keep"),
            (self.force, "force", has_volume, volume),
        ];
        let (_, option, _, of) =
            all.into_iter().find(|(is_given, _, has_effect, _)| *is_given && !has_effect)?;
        Some(format!("{option} belongs to {of}, or leave {option} out"))
    }

    /// Starts relative paths from `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        let files = self.log_device.iter_mut().chain(&mut self.volume_key);
        files.for_each(|path| *path = folder.join(&*path));
    }
}

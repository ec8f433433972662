//! How a volume is opened.

use clap::Args;
use mica_block::Result;
use mica_stack::{StoreUrl, VolumeUrl};
use serde::{Deserialize, Serialize};

/// A heading in the help.
const VOLUME: &str = "Volume";

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has these options"
)]
#[derive(Args, Deserialize, Serialize, Clone, PartialEq, Eq, Default, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct VolumeSettings {
    /// Serve this volume, and no image.
    ///
    /// file:///DIR/NAME, s3://BUCKET/PREFIX/NAME or rados://POOL/PREFIX/NAME; with @LABEL behind it
    /// a snapshot, read-only. `mica volume create` makes one.
    #[arg(long, value_name = "URL", help_heading = VOLUME)]
    pub volume: Option<String>,
    /// Take the volume over from a host that has it open and may be alive.
    ///
    /// That host can write no more, and learns it. What it has not put into the store yet is lost.
    /// A writer of this machine that was killed needs no force.
    #[arg(long, requires = "volume", help_heading = VOLUME, hide_short_help = true)]
    pub force: bool,
}

impl VolumeSettings {
    /// The volume, if it is one.
    ///
    /// # Errors
    /// `Invalid` if that is no URL of one.
    pub fn url(&self) -> Result<Option<VolumeUrl>> {
        self.volume.as_deref().map(str::parse).transpose()
    }

    /// Whether it is in a pool of Ceph.
    pub(crate) fn is_in_pool(&self) -> bool {
        self.url().ok().flatten().is_some_and(|url| matches!(url.store, StoreUrl::Pool { .. }))
    }

    /// An option that belongs to a volume where there is none.
    pub(crate) fn ineffective_option(&self) -> Option<String> {
        let is_lost = self.volume.is_none() && self.force;
        is_lost.then(|| "force belongs to a volume: add volume, or leave force out".to_owned())
    }
}

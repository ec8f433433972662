//! Checks a configuration as far as that goes without serving it.

use crate::config::{Config, DiskConfig};
use crate::opening::chain_options;
use crate::settings::ImageSettings;
use mica_block::{Error, Result};
use mica_qcow2::MapCache;
use mica_rt::{Backend, Executor};
use mica_stack::{Patience, Stores};
use mica_store::{Handles, Locking};
use std::sync::Arc;

/// All that is wrong with `config`. Its images are opened for reading, whoever has them open.
///
/// # Errors
/// If nothing can be checked.
pub fn check_config(config: &Config) -> Result<Vec<Error>> {
    let mut all = config.problems(false);
    let handles = ImageSettings::handles();
    let executor = Executor::new(Backend::Pool)
        .map_err(|error| Error::from_io("checking a configuration", error))?;
    let cache = MapCache::default();
    for disk in &config.disks {
        let opened = executor.block_on(open(disk, &handles, &cache));
        all.extend(opened.err().map(|error| error.wrap(format!("disk {:?}", disk.name))));
    }
    Ok(all)
}

async fn open(disk: &DiskConfig, handles: &Arc<Handles>, cache: &MapCache) -> Result<()> {
    let DiskConfig { image, settings, images, volume, .. } = disk;
    if let Some(url) = volume.url()? {
        let stores = Stores::new(Arc::clone(handles), images.index_cache.0, Patience::Verb);
        let options = volume.options(false);
        return stores.open_volume(&url, &options).await?.close().await;
    }
    let chain = chain_options(settings, images, cache)?;
    let mut options = images.image_options(Arc::clone(handles))?;
    options.secrets.load()?;
    options.locking = Locking::ForceShare;
    mica_stack::open(image, images.format()?, options, &chain).await?.close().await
}

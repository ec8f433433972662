//! `mica ctl add` and `mica ctl remove`: disks come and go while a server runs.

use super::saved::{Saved, listed};
use crate::client::{Client, disk_path};
use crate::failure::Failure;
use crate::serve::named;
use clap::{Args, Command, Id};
use mica_daemon::{Config, DiskConfig, DiskSettings, ImageSettings, VolumeSettings};
use serde_json::{Value, json};
use std::path::PathBuf;

// What is added. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(crate) struct AddArgs {
    /// Add the disks that this TOML file lists.
    ///
    /// One table "disk" each, as in a server's configuration.
    #[arg(long, conflicts_with_all = of_one_disk(), value_name = "FILE")]
    config: Option<PathBuf>,
    /// Also write it into the server's configuration.
    ///
    /// It is then served again after a restart.
    #[arg(long)]
    save: bool,
    #[command(flatten)]
    disk: DiskArgs,
}

// What a configuration file would say. (A doc comment would become the help of the verb.)
#[derive(Args)]
struct DiskArgs {
    /// The name of the disk.
    ///
    /// By default the image's name without its extension.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    settings: DiskSettings,
    #[command(flatten)]
    images: ImageSettings,
    #[command(flatten)]
    volume: VolumeSettings,
    /// The image: for a chain, its active layer.
    #[arg(value_name = "IMAGE", conflicts_with = "volume")]
    #[arg(required_unless_present_any = ["config", "volume"])]
    image: Option<PathBuf>,
}

// What is removed. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(crate) struct RemoveArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// Also remove it from the server's configuration.
    ///
    /// It is then no longer served after a restart.
    #[arg(long)]
    save: bool,
}

/// The options that exclude a configuration.
fn of_one_disk() -> Vec<Id> {
    let options = DiskArgs::augment_args(Command::new(""));
    options.get_arguments().map(|option| option.get_id().clone()).collect()
}

impl AddArgs {
    /// Adds the disks one after the other, until one is refused.
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let config = self.config()?;
        let saved = self.save.then(|| Saved::of(client)).transpose()?;
        saved.iter().try_for_each(|saved| saved.refuse_others(&config.disks))?;
        let mut names = Vec::new();
        for disks in config.disks.chunks(SAVED_TOGETHER) {
            let first = names.len();
            let added = self.add(client, &config, disks, &mut names);
            // Those before one that is refused are served.
            let new = &config.disks[first..names.len()];
            let is_saved = saved.as_ref().map_or(Ok(()), |saved| saved.add(new));
            match (added, is_saved) {
                (Err(refused), Err(unsaved)) => return Err(unsaved.within(refused.message())),
                (added, is_saved) => added.and(is_saved)?,
            }
        }
        let mut answer = json!({ "added": names });
        if let Some(saved) = saved {
            answer["saved"] = json!(saved.file().to_string_lossy());
        }
        Ok(answer)
    }

    /// Adds some `disks`, and the names of those that are served then.
    fn add(
        &self,
        client: &Client,
        config: &Config,
        disks: &[DiskConfig],
        names: &mut Vec<String>,
    ) -> Result<(), Failure> {
        for disk in disks {
            let table = disk.to_table().map_err(Failure::from);
            let added = table.and_then(|table| client.post("/v1/disks", &Value::Object(table)));
            added.map_err(|failure| {
                let failure = match self.config.is_some() {
                    true => failure.within(config.place(names.len())),
                    false => failure,
                };
                match &**names {
                    [] => failure,
                    names => failure.within(format!("after {} (added)", listed(names))),
                }
            })?;
            names.push(disk.name.clone());
        }
        Ok(())
    }

    /// What is added, as a configuration.
    fn config(&self) -> Result<Config, Failure> {
        let DiskArgs { name, settings, images, volume, image } = &self.disk;
        match &self.config {
            Some(file) => Ok(Config::read(file)?),
            None => {
                let mut disk = named(name.clone(), image.clone(), volume.clone())?;
                (disk.settings, disk.images) = (settings.clone(), images.clone());
                let here = std::env::current_dir().map_err(Failure::from)?;
                // The server has a working directory of its own.
                disk.resolve(&here);
                let mut config = Config::default();
                config.disks = vec![disk];
                Ok(config)
            }
        }
    }
}

/// Disks that are saved at once: the file is written whole for it. Fewer would make adding a
/// thousand slow; more would leave more unsaved if the client is killed.
const SAVED_TOGETHER: usize = 64;

impl RemoveArgs {
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let saved = self.save.then(|| Saved::of(client)).transpose()?;
        let mut answer = client.delete(&disk_path(&self.disk))?;
        if let Some(saved) = saved {
            saved.remove(&self.disk)?;
            answer["saved"] = json!(saved.file().to_string_lossy());
        }
        Ok(answer)
    }
}

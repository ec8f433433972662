//! `mica ctl add` and `mica ctl remove`: disks come and go while a server runs.

use super::saved::{Saved, listed};
use crate::client::{Client, disk_path};
use crate::failure::Failure;
use crate::serve::named;
use clap::{Args, Command, Id};
use mica_daemon::{Config, DiskSettings, ImageSettings, VolumeSettings};
use serde_json::{Value, json};
use std::ops::Range;
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
    /// The disks.
    #[arg(value_name = "DISK", required = true)]
    disks: Vec<String>,
    /// Also remove them from the server's configuration.
    ///
    /// They are then no longer served after a restart.
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
        let names: Vec<_> = config.disks.iter().map(|disk| disk.name.clone()).collect();
        let add = |index: usize| {
            let table = config.disks[index].to_table().map_err(Failure::from);
            let added = table.and_then(|table| client.post("/v1/disks", &Value::Object(table)));
            added.map(drop).map_err(|failure| match self.config.is_some() {
                true => failure.within(config.place(index)),
                false => failure,
            })
        };
        let save = |done: Range<usize>| {
            saved.as_ref().map_or(Ok(()), |saved| saved.add(&config.disks[done]))
        };
        one_by_one(&names, "added", add, save)?;
        Ok(answer("added", &names, saved.as_ref()))
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

/// Acts on the disks of these `names`, by their index, until one is refused. What was `done` to
/// those before it is saved, so many at once.
fn one_by_one(
    names: &[String],
    done: &str,
    act: impl Fn(usize) -> Result<(), Failure>,
    save: impl Fn(Range<usize>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut count = 0;
    while count < names.len() {
        let first = count;
        let last = names.len().min(first + SAVED_TOGETHER);
        let acted = (first..last).try_for_each(|index| {
            act(index).map_err(|failure| match &names[..index] {
                [] => failure,
                before => failure.within(format!("after {} ({done})", listed(before))),
            })?;
            count += 1;
            Ok::<_, Failure>(())
        });
        match (acted, save(first..count)) {
            (Err(refused), Err(unsaved)) => {
                return Err(unsaved.within(refused.message()));
            }
            (acted, saved) => acted.and(saved)?,
        }
    }
    Ok(())
}

fn answer(done: &str, names: &[String], saved: Option<&Saved>) -> Value {
    let mut answer = json!({ done: names });
    if let Some(saved) = saved {
        answer["saved"] = json!(saved.file().to_string_lossy());
    }
    answer
}

/// Disks that are saved at once: the file is written whole for it. Fewer would make adding a
/// thousand slow; more would leave more unsaved if the client is killed.
const SAVED_TOGETHER: usize = 64;

impl RemoveArgs {
    /// Removes the disks one after the other, until one is refused.
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let saved = self.save.then(|| Saved::of(client)).transpose()?;
        let remove = |index: usize| client.delete(&disk_path(&self.disks[index])).map(drop);
        let save = |done: Range<usize>| {
            saved.as_ref().map_or(Ok(()), |saved| saved.remove(&self.disks[done]))
        };
        one_by_one(&self.disks, "removed", remove, save)?;
        Ok(answer("removed", &self.disks, saved.as_ref()))
    }
}

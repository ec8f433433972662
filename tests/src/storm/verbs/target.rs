//! What verbs make of a disk elsewhere: copies, backups and what is restored from them; and what a
//! killed one may leave there.

use crate::storm::chain::Chain;
use crate::storm::foreign;
use crate::storm::judge;
use crate::storm::model::{Model, View};
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong};
use std::fs;

/// What became of an earlier copy where the verb is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meanwhile {
    /// There is nothing, or all of the new one.
    Nothing,
    /// There is the old one, or the new one.
    Old,
    /// It may have some of both.
    Both,
    /// It is no image.
    Folder,
}

/// What a verb makes.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) name: String,
    pub(super) format: &'static str,
    /// What it is to hold.
    pub(super) model: Model,
    pub(super) meanwhile: Meanwhile,
    /// Whether that is what the chain holds when the verb begins.
    pub(super) is_of_present: bool,
    /// What is there before.
    pub(super) before: Option<Vec<u8>>,
    /// The folder that it is in, or comes from.
    pub(super) folder: String,
}

impl Target {
    /// The verb begins once more, and this is what the chain holds.
    pub(super) fn follow(&mut self, present: &Model) {
        if self.is_of_present {
            self.model = present.clone();
        }
    }

    /// All of it is there.
    pub(super) fn judge_done(&self, chain: &Chain<'_>, what: &str) -> Outcome {
        if self.meanwhile == Meanwhile::Folder {
            return self.judge_backup(chain, what);
        }
        self.check(chain, what)?;
        let bytes = self.read(chain)?;
        self.judge(&bytes, what)?;
        self.remove(chain)
    }

    /// What a killed verb may leave.
    pub(super) fn judge_killed(&self, chain: &Chain<'_>, what: &str) -> Outcome {
        match self.meanwhile {
            Meanwhile::Folder => return Ok(()),
            Meanwhile::Nothing if !chain.path(&self.name).exists() => return Ok(()),
            _ => {}
        }
        self.check(chain, what)?;
        if self.meanwhile == Meanwhile::Both {
            return Ok(());
        }
        let bytes = self.read(chain)?;
        match self.before.as_ref() == Some(&bytes) {
            true => Ok(()),
            false => self.judge(&bytes, what),
        }
    }

    fn check(&self, chain: &Chain<'_>, what: &str) -> Outcome {
        if self.format != "qcow2" {
            return Ok(());
        }
        let (corruptions, leaks) = foreign::check(&chain.world.images, &self.name)?;
        if corruptions > 0 {
            let what = format!("{what}: the target has {corruptions} corruptions, {leaks} leaks");
            return Err(Fault::new(Wrong::Corrupt, what));
        }
        Ok(())
    }

    pub(super) fn read(&self, chain: &Chain<'_>) -> Outcome<Vec<u8>> {
        let raw = chain.world.run.join("target.raw");
        foreign::flatten_as(&chain.world.images, (self.format, &self.name), &[], &raw)
    }

    fn judge(&self, bytes: &[u8], what: &str) -> Outcome {
        let wanted = self.model.len();
        if bytes.len() as u64 != wanted * SECTOR as u64 {
            let sectors = bytes.len() / SECTOR;
            let what = format!("{what}: the target has {sectors} sectors, not {wanted}");
            return Err(Fault::new(Wrong::Length, what));
        }
        let judged = self.model.judge(0, bytes, View::Kept).map(drop);
        judged.map_err(|bad| judge::fault(&bad, &format!("{what}: the target")))
    }

    /// What is restored from a backup is the disk.
    fn judge_backup(&self, chain: &Chain<'_>, what: &str) -> Outcome {
        let folder = format!("{}@{}", self.folder, self.name);
        let restored = Self { name: "restored.qcow2".to_owned(), ..self.clone() };
        let args = ["restore", "-q", &folder, &restored.name];
        foreign::succeeded(chain.world.mica_alone(&args)?)?;
        restored.check(chain, what)?;
        restored.judge(&restored.read(chain)?, what)?;
        restored.remove(chain)
    }

    fn remove(&self, chain: &Chain<'_>) -> Outcome {
        Ok(fs::remove_file(chain.path(&self.name))?)
    }
}

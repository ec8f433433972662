//! What only a chain of images can do: its owner changes which layers it has, under running
//! requests.

use crate::{Disk, LocalFuture, Result, SnapshotGroup};
use mica_units::{GuestRange, LayerNumber};
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How a layer got on top of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pushed {
    /// For how long changes of the disk waited. Reads did not.
    pub pause: Duration,
}

/// A chain whose active layer is written, as its owner sees it.
pub trait ManageChain {
    /// Puts the image at `path` on top, an empty overlay of the active layer: from then on it is
    /// the one that is written, and `names` say so to the next process. What was acknowledged
    /// before is durable in the layer beneath when this returns. Reads continue; changes wait for
    /// as long as it takes to change the names, and flushes until everything is durable. In a
    /// `group` it happens at one instant with its other chains: if one of them fails, all do.
    ///
    /// Errors: `Denied` if the policy forbids the image, or while a merge is under way; `Invalid`
    /// if it is no such overlay; `Limit` if the chain already has as many layers as it may have;
    /// why the group has failed; otherwise as [`crate::Disk::flush`], and those of the names. The
    /// chain is then as it was, unless something could not be made durable: then the layer is on
    /// top, and nothing more is acknowledged.
    fn push<'a>(
        &'a self,
        path: &'a Path,
        names: &'a dyn Renaming,
        group: Option<&'a SnapshotGroup>,
    ) -> LocalFuture<'a, Result<Pushed>>;

    /// Makes durable what is waiting to be written out, if that is much: a [`Self::push`] soon
    /// after has little left to do. For the time in which the new layer's file is made.
    ///
    /// Errors: as for [`crate::Disk::flush`].
    fn write_ahead(&self) -> LocalFuture<'_, Result<()>>;

    /// Bytes of a cluster of the active layer; `None` if that is a raw image, on top of which
    /// nothing is yet.
    fn cluster_bytes(&self) -> Option<u64>;

    /// The disk as the frozen layer at `position`, counted from the base, has it, for reading: it
    /// shares the layers' files with this one, and nothing else. The layers have to stay in the
    /// chain, or at least unchanged, for as long as it is used.
    ///
    /// Errors: `NotFound` if no frozen layer is there.
    fn view(&self, position: usize) -> LocalFuture<'_, Result<View>>;

    /// Copies into the active layer what the disk shows through the layers between it and `base`,
    /// a layer of the chain, and takes these out of the chain; with no `base` all layers beneath.
    /// Their files are not changed. `control` is asked between two steps.
    ///
    /// Errors: `Invalid` if `base` is no layer beneath the active one; `Denied` while another merge
    /// is under way; otherwise those of reading and writing. The chain then shows what it did, and
    /// what was copied need not be copied again.
    fn stream<'a>(
        &'a self,
        base: Option<&'a Path>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>>;

    /// As [`Self::stream`], into a frozen layer: what that shows stays the same at every instant,
    /// in its file, too. What it had copied before an error or the end by `control` stays its own.
    ///
    /// Errors: as [`Self::stream`]; `Denied` if somebody else has that layer open.
    fn raise<'a>(
        &'a self,
        layers: RaiseLayers<'a>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>>;

    /// Copies into the base of `layers` what the layers above it, up to the top of `layers`, own,
    /// and takes these out of the chain. Their files are not changed, but show something else if
    /// they are read on top of that base. The active layer stays in the chain, and is emptied; what
    /// is written meanwhile goes down, too. `control` is asked between two steps.
    ///
    /// Errors: as [`Self::stream`]; `Denied` if somebody else has the base open.
    fn commit<'a>(
        &'a self,
        layers: CommitLayers<'a>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>>;

    /// Makes sure that a merge of these `layers` is not refused for what is known before it begins:
    /// which layers there are, and what they look like. Nothing changes.
    ///
    /// Errors: as the merge, of that.
    fn check_merge<'a>(&'a self, layers: MergeLayers<'a>) -> LocalFuture<'a, Result<()>>;

    /// Makes sure that [`Self::close_on`] with this `base` would have room for the name, as far as
    /// that is known now.
    ///
    /// Errors: `Limit` or `Unsupported` if the header has none; otherwise those of reading it.
    fn check_name<'a>(&'a self, base: NamedBacking<'a>) -> LocalFuture<'a, Result<()>>;

    /// Makes the active layer name `base` as its backing file, durably, and ends the writing, as
    /// [`crate::Manage::close`]: nobody else can open the layer for writing between what was
    /// written here, because the new base does not show it, and its name. The chain shows the
    /// layers that it had until it is dropped.
    ///
    /// Errors: `Denied` while a merge is under way; `Limit` or `Unsupported` if the header has no
    /// room for the name; otherwise as [`crate::Disk::flush`]. It is closed then, if it can be.
    fn close_on<'a>(&'a self, base: NamedBacking<'a>) -> LocalFuture<'a, Result<()>>;
}

/// A backing file, as an image names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamedBacking<'a> {
    /// The name.
    pub name: &'a OsStr,
    /// The format, if the image states it.
    pub format: Option<&'a str>,
}

/// The dirty bitmaps that a chain's layers have.
pub trait ManageBitmaps {
    /// Which parts of `range` are dirty in a bitmap called `name`, of any layer: lengths in bytes,
    /// from its start, as far as that takes a bounded amount of memory. Of a layer that is written
    /// and keeps the bitmap true, now.
    ///
    /// Errors: `NotFound` if no layer has such a bitmap, with the names that there are; `Corrupt`
    /// if one is inconsistent; otherwise why it cannot be read.
    fn dirty<'a>(
        &'a self,
        name: &'a str,
        range: GuestRange,
    ) -> LocalFuture<'a, Result<Vec<(u64, bool)>>>;
}

/// A disk as a frozen layer has it.
pub struct View {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// The numbers of its layers, from the base.
    pub layers: Vec<LayerNumber>,
}

/// How names of files say which layer is written, while one is put on top of a chain.
pub trait Renaming {
    /// If what is put on top takes the name of the active layer's file: the second name of that,
    /// under which it is kept.
    fn kept(&self) -> Option<&Path>;

    /// Changes the names: whoever looks from then on, also after this process was killed, finds
    /// that what is put on top is written. What is already durable of it is a whole image.
    ///
    /// Errors: what the system reports; nothing has changed then.
    fn rename(&self) -> LocalFuture<'_, Result<()>>;

    /// Takes [`Self::rename`] back.
    ///
    /// Errors: what the system reports.
    fn undo(&self) -> LocalFuture<'_, Result<()>>;

    /// Makes [`Self::rename`] durable.
    ///
    /// Errors: what the system reports.
    fn sync(&self) -> LocalFuture<'_, Result<()>>;
}

/// The layers of a merge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MergeLayers<'a> {
    /// Of [`ManageChain::stream`]: those above this one, or all.
    Stream(Option<&'a Path>),
    /// Of [`ManageChain::raise`].
    Raise(RaiseLayers<'a>),
    /// Of [`ManageChain::commit`].
    Commit(CommitLayers<'a>),
}

/// The layers that go up into a frozen one: all beneath it, down to the base.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RaiseLayers<'a> {
    /// The one that takes over.
    pub into: &'a Path,
    /// The one on which it stands afterwards; by default none.
    pub base: Option<&'a Path>,
}

/// The layers that are merged into one of them: all above the base, up to the top.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommitLayers<'a> {
    /// The uppermost; by default the active layer, which is empty afterwards and stays on top of
    /// the base.
    pub top: Option<&'a Path>,
    /// The one that is written; by default the one beneath the top.
    pub base: Option<&'a Path>,
    /// What becomes of the active layer, if that is the top.
    pub active: ActiveAfter,
}

/// What becomes of an active layer that was merged into another one.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ActiveAfter {
    /// It is empty, on top of what it was merged into.
    #[default]
    Emptied,
    /// It stays as it is, and so does the chain.
    Kept,
}

/// How far a merge is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MergeProgress {
    /// Bytes of the disk that need not be looked at again.
    pub done: u64,
    /// Bytes of the disk.
    pub total: u64,
    /// Bytes that were copied.
    pub copied: u64,
    /// Bytes that are likely to be copied in all, at least and at most: as many as the largest of
    /// the merged layers has, and as all of them have.
    pub expected: (u64, u64),
    /// Whether little or nothing is left to copy: it must not wait for a rate now, as the guest may
    /// be slowed down until it ends.
    pub is_ending: bool,
}

/// Controls a merge: how fast it goes, and whether it goes on.
pub trait MergeControl {
    /// Called before each step. Whatever it waits for the merge waits for; if it breaks, the merge
    /// ends, and the chain has the layers that it had.
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>>;
}

/// How a merge ended that did not fail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Merged {
    /// The layers at these paths are not in the chain any more.
    Done {
        /// From the base.
        dropped: Vec<PathBuf>,
        /// Bytes that were copied.
        copied: u64,
    },
    /// It was told to end.
    Cancelled,
}

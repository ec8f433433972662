//! The dirty bitmaps of layers that leave a chain: what they say goes into the bitmaps of the same
//! names of the layer that takes over their data, so that together the bitmaps of a name still have
//! everything. A merge does not fail for lack of one: it is said which bitmaps end, and why.
//!
//! Invariants
//! - What a bitmap has that is there after a merge is never less than what was changed. If what a
//!   layer says cannot be used, or it does not say everything, the whole disk is dirty.
//! - What the base of a commit cannot be told, the active layer is.

use super::target::Target;
use crate::bitmaps::open_bitmap;
use crate::chain::Chain;
use crate::header_io::read_header;
use crate::layer::Layer;
use crate::open::named_bitmaps;
use crate::snapshots::list_bitmaps;
use crate::write::Writer;
use crate::write::bitmaps::NewBitmap;
use mica_block::Result;
use mica_qcow2_format::{BitmapEntry, Header};
use mica_units::{GuestOffset, GuestRange};
use std::path::Path;
use std::sync::Arc;

/// The bitmaps of a layer that leaves.
struct Leaving<'a> {
    layer: &'a Arc<Layer>,
    /// None if nobody knows which there are, or what they would have to say.
    known: Option<(Header, Vec<BitmapEntry>)>,
}

impl Leaving<'_> {
    fn entries(&self) -> &[BitmapEntry] {
        self.known.as_ref().map_or(&[], |known| &known.1)
    }
}

impl Chain {
    /// Puts into the `target` of a commit, which is about to be `len` bytes long, what the bitmaps
    /// of the `leaving` layers say. It gets those that it lacks. Nothing was written to it yet.
    ///
    /// # Errors
    /// Only what keeps the target, or the active layer, from being written.
    pub(super) async fn bitmaps_go_down(
        &self,
        leaving: &[Arc<Layer>],
        target: &Target,
        len: u64,
    ) -> Result<()> {
        let all = bitmaps_of(leaving).await;
        if all.is_empty() {
            return Ok(());
        }
        let Target::Qcow2(writer) = target else {
            return self.bitmaps_go_up(leaving.to_vec()).await;
        };
        let put = async |writer: Arc<Writer>| {
            let mut wanted: Vec<NewBitmap> = Vec::new();
            for entry in all.iter().flat_map(Leaving::entries) {
                if !wanted.iter().any(|known| known.name == entry.name) {
                    wanted.push(NewBitmap::like(entry));
                }
            }
            writer.take_disabled_bitmaps();
            if let Err(error) = writer.add_bitmaps(&wanted).await {
                writer.check_usable()?;
                tracing::warn!(%error, "the base of a merge gets no dirty bitmaps");
            }
            Ok(())
        };
        Arc::clone(writer).complete(put).await?;
        // A bitmap has bits only as far as its disk goes.
        target.grow_to(len).await?;
        let merge = async |writer: Arc<Writer>| Ok(merge_into(&writer, &all).await?.is_empty());
        match Arc::clone(writer).complete(merge).await? {
            true => Ok(()),
            // The active layer may have those that the base cannot be told.
            false => self.bitmaps_go_up(leaving.to_vec()).await,
        }
    }

    /// Puts into the bitmaps of the active layer what those of the `leaving` layers say, before
    /// these go up into it.
    ///
    /// # Errors
    /// As [`Self::bitmaps_go_down`].
    pub(super) async fn bitmaps_go_up(&self, leaving: Vec<Arc<Layer>>) -> Result<()> {
        self.change(async move |writer: Arc<Writer>| {
            let all = bitmaps_of(&leaving).await;
            if all.is_empty() {
                return Ok(());
            }
            let ended = merge_into(&writer, &all).await?;
            let reasons = Reasons::of(writer.layer()).await;
            ended.iter().for_each(|ended| ended.warn(&reasons));
            Ok(())
        })
        .await
    }
}

/// Bitmaps of a layer that leaves which end with it: nothing that stays is told what they say.
struct Ended<'a> {
    layer: &'a Layer,
    /// None if nobody knows which there are.
    names: Option<Vec<&'a str>>,
}

impl Ended<'_> {
    fn warn(&self, reasons: &Reasons) {
        let image = self.layer.path.display();
        let Some(names) = &self.names else {
            tracing::warn!(%image, "its dirty bitmaps end with it: which there were is not known");
            return;
        };
        for reason in [Reason::Missing, Reason::Disabled, Reason::Broken] {
            let such = names.iter().copied().filter(|name| reasons.reason(name) == reason);
            let such: Vec<_> = such.collect();
            if !such.is_empty() {
                let (names, why) = (named_bitmaps(&such), reason.said());
                let above = reasons.path.display();
                tracing::warn!(%image, "its dirty bitmaps {names} end with it: {above} {why}");
            }
        }
    }
}

/// Why a bitmap cannot go on in the layer that takes over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reason {
    Missing,
    Disabled,
    Broken,
}

impl Reason {
    fn said(self) -> &'static str {
        match self {
            Self::Missing => "has none of that name",
            Self::Disabled => "has them disabled",
            Self::Broken => "has them, too, but not in a form that could be kept",
        }
    }
}

/// What the layer at `path`, which takes over, has of bitmaps.
struct Reasons {
    path: Arc<Path>,
    entries: Vec<BitmapEntry>,
}

impl Reasons {
    async fn of(layer: &Layer) -> Self {
        let entries = async {
            let header = read_header(&*layer.store).await?;
            list_bitmaps(&*layer.store, &header).await
        };
        let entries: Result<_> = entries.await;
        Self { path: Arc::clone(&layer.path), entries: entries.unwrap_or_default() }
    }

    fn reason(&self, name: &str) -> Reason {
        match self.entries.iter().find(|entry| entry.name == name) {
            None => Reason::Missing,
            Some(entry) if !entry.auto => Reason::Disabled,
            Some(_) => Reason::Broken,
        }
    }
}

/// The layers among `leaving` that have bitmaps, or may have had some.
async fn bitmaps_of(leaving: &[Arc<Layer>]) -> Vec<Leaving<'_>> {
    let mut all = Vec::new();
    for layer in leaving.iter().filter(|layer| layer.tables.is_some()) {
        let read = async {
            let header = read_header(&*layer.store).await?;
            let entries = list_bitmaps(&*layer.store, &header).await?;
            Ok::<_, mica_block::Error>((header, entries))
        };
        let image = layer.path.display();
        match read.await {
            Ok((header, _)) if header.stale_bitmaps => {
                let why = "a program that does not know them has written it";
                tracing::warn!(%image, why, "the dirty bitmaps of a merged layer are not true");
                all.push(Leaving { layer, known: None });
            }
            Ok((_, entries)) if entries.is_empty() => {}
            Ok(known) => all.push(Leaving { layer, known: Some(known) }),
            Err(error) => {
                tracing::warn!(%image, %error, "the dirty bitmaps of a merged layer are lost");
                all.push(Leaving { layer, known: None });
            }
        }
    }
    all
}

/// Makes dirty in the bitmaps of `writer` what is dirty in those of `all`, or may be. Returns those
/// that it does not keep.
async fn merge_into<'a>(writer: &Writer, all: &'a [Leaving<'_>]) -> Result<Vec<Ended<'a>>> {
    writer.begin_change().await?;
    let whole = GuestRange::new(GuestOffset::ZERO, writer.layer_len()).expect("a disk");
    let mut ended = Vec::new();
    for Leaving { layer, known } in all {
        let Some((header, entries)) = known else {
            for name in writer.recorded_bitmaps() {
                writer.make_dirty(&name, whole).await?;
            }
            // There may be others.
            ended.push(Ended { layer, names: None });
            continue;
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = &entry.name;
            let merged = match entry.in_use {
                true => None,
                false => Some(merge_one(writer, layer, (header, name)).await),
            };
            let is_kept = match merged {
                Some(Ok(is_kept)) => is_kept,
                None => writer.make_dirty(name, whole).await?,
                Some(Err(error)) => {
                    writer.check_usable()?;
                    let image = layer.path.display();
                    tracing::warn!(%image, name, %error, "all of a dirty bitmap is dirty now");
                    writer.make_dirty(name, whole).await?
                }
            };
            if !is_kept {
                names.push(name.as_str());
            }
        }
        if !names.is_empty() {
            ended.push(Ended { layer, names: Some(names) });
        }
    }
    Ok(ended)
}

/// Makes dirty in the bitmap `name` of `writer` what is dirty in that of `layer`. Returns whether
/// there is one that is kept.
async fn merge_one(
    writer: &Writer,
    layer: &Layer,
    (header, name): (&Header, &str),
) -> Result<bool> {
    let bitmap = open_bitmap(&layer.store, header, name).await?;
    let end = GuestOffset::new(bitmap.disk_bytes());
    let mut at = GuestOffset::ZERO;
    // One of which nothing is dirty would end, too.
    let nothing = GuestRange::new(at, 0).expect("no part of the disk");
    let mut is_kept = writer.make_dirty(name, nothing).await?;
    while let Some(left) = GuestRange::between(at, end).filter(|left| !left.is_empty()) {
        for (len, is_dirty) in bitmap.runs(left).await? {
            let part = GuestRange::new(at, len).expect("a part of the disk");
            if is_dirty {
                is_kept &= writer.make_dirty(name, part).await?;
            }
            at = part.end();
        }
    }
    Ok(is_kept)
}

//! The dirty bitmaps of layers that leave a chain: what they say goes into the bitmaps of the same
//! names of the layer that takes over their data, so that together the bitmaps of a name still have
//! everything. A merge does not fail for lack of one: it is said that a bitmap ends.

use super::target::Target;
use crate::bitmaps::open_bitmap;
use crate::chain::Chain;
use crate::header_io::read_header;
use crate::layer::Layer;
use crate::snapshots::list_bitmaps;
use crate::write::Writer;
use crate::write::bitmaps::NewBitmap;
use mica_block::Result;
use mica_qcow2_format::{BitmapEntry, Header};
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// The bitmaps of a layer that leaves.
struct Leaving<'a> {
    layer: &'a Arc<Layer>,
    header: Header,
    entries: Vec<BitmapEntry>,
}

impl Chain {
    /// Puts into the `target` of a commit what the bitmaps of the `leaving` layers say. It gets
    /// those that it lacks. Nothing was written to it yet.
    ///
    /// # Errors
    /// Only what keeps the target from being written.
    pub(super) async fn bitmaps_go_down(
        &self,
        leaving: &[Arc<Layer>],
        target: &Target,
    ) -> Result<()> {
        let all = bitmaps_of(leaving).await;
        if all.is_empty() {
            return Ok(());
        }
        let Target::Qcow2(writer) = target else {
            warn_of_end(&all, "a raw image has no bitmaps");
            return Ok(());
        };
        let put = async |writer: Arc<Writer>| {
            let mut wanted: Vec<NewBitmap> = Vec::new();
            for entry in all.iter().flat_map(|leaving| &leaving.entries) {
                if !wanted.iter().any(|known| known.name == entry.name) {
                    wanted.push(NewBitmap::like(entry));
                }
            }
            writer.take_disabled_bitmaps();
            if let Err(error) = writer.add_bitmaps(&wanted).await {
                writer.check_usable()?;
                warn_of_end(&all, &error.to_string());
            }
            merge_into(&writer, &all).await
        };
        Arc::clone(writer).complete(put).await
    }

    /// Puts into the bitmaps of the active layer what those of the `leaving` layers say, before
    /// these go up into it.
    ///
    /// # Errors
    /// As [`Self::bitmaps_go_down`].
    pub(super) async fn bitmaps_go_up(&self, leaving: Vec<Arc<Layer>>) -> Result<()> {
        self.change(async move |writer: Arc<Writer>| {
            let all = bitmaps_of(&leaving).await;
            if all.is_empty() { Ok(()) } else { merge_into(&writer, &all).await }
        })
        .await
    }
}

/// The layers among `leaving` that have bitmaps that are true, with these.
async fn bitmaps_of(leaving: &[Arc<Layer>]) -> Vec<Leaving<'_>> {
    let mut all = Vec::new();
    for layer in leaving.iter().filter(|layer| layer.tables.is_some()) {
        let read = async {
            let header = read_header(&*layer.store).await?;
            let entries = list_bitmaps(&*layer.store, &header).await?;
            Ok::<_, mica_block::Error>((header, entries))
        };
        let (header, mut entries) = match read.await {
            Ok(read) => read,
            Err(error) => {
                let image = layer.path.display();
                tracing::warn!(%image, %error, "the dirty bitmaps of a merged layer are lost");
                continue;
            }
        };
        entries.retain(|entry| !entry.in_use);
        if !entries.is_empty() {
            all.push(Leaving { layer, header, entries });
        }
    }
    all
}

/// Makes dirty in the bitmaps of `writer` what is dirty in those of `all`.
async fn merge_into(writer: &Writer, all: &[Leaving<'_>]) -> Result<()> {
    writer.begin_change().await?;
    for Leaving { layer, header, entries } in all {
        for entry in entries {
            let merged = async {
                let bitmap = open_bitmap(&layer.store, header, &entry.name).await?;
                let end = GuestOffset::new(bitmap.disk_bytes());
                let mut at = GuestOffset::ZERO;
                let mut is_kept = true;
                while let Some(left) = GuestRange::between(at, end).filter(|left| !left.is_empty())
                {
                    for (len, is_dirty) in bitmap.runs(left).await? {
                        let part = GuestRange::new(at, len).expect("a part of the disk");
                        if is_dirty {
                            is_kept &= writer.make_dirty(&entry.name, part).await?;
                        }
                        at = part.end();
                    }
                }
                Ok::<_, mica_block::Error>(is_kept)
            };
            let why = match merged.await {
                Ok(true) => continue,
                Ok(false) => "the layer that takes over has none of this name".to_owned(),
                Err(error) => error.to_string(),
            };
            writer.check_usable()?;
            let (image, name) = (layer.path.display(), &entry.name);
            tracing::warn!(%image, name, why, "a dirty bitmap of a merged layer ends with it");
        }
    }
    Ok(())
}

fn warn_of_end(all: &[Leaving<'_>], why: &str) {
    for Leaving { layer, entries, .. } in all {
        let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
        let (image, names) = (layer.path.display(), names.join(", "));
        tracing::warn!(%image, names, why, "dirty bitmaps of a merged layer may end with it");
    }
}

//! What the dirty bitmaps of a chain say.
//!
//! A bitmap belongs to a layer. When a layer is put on top, the new one gets an empty bitmap for
//! each that the one beneath keeps true: so together all bitmaps of one name have what was changed
//! since the first of them was added, and that is what this tells. It is refused where a layer
//! without one lies between, or above while it is written: nothing recorded what changed there.

use super::Chain;
use crate::bitmaps::{BitmapPlace, open_bitmap, unknown};
use crate::header_io::read_header;
use crate::layer::Layer;
use crate::write::Writer;
use mica_block::{Disk as _, Error, ErrorKind, LocalFuture, ManageBitmaps, Result};
use mica_units::{GuestRange, LayerNumber};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Weak};

/// Runs of a bitmap that are told at once.
const RUNS_MANY: usize = 4096;

/// The bitmaps of frozen layers that were looked for, by layer and name. They keep no file open: a
/// merge may be about to write it.
#[derive(Default)]
pub(super) struct StoredBitmaps(Mutex<HashMap<(LayerNumber, String), Known>>);

type Known = (Weak<Layer>, Stored);

/// What the file of a layer has of a bitmap.
#[derive(Clone)]
enum Stored {
    There(BitmapPlace),
    /// Not this one; if it is stale, another program has written the layer and its bitmaps.
    Missing {
        is_stale: bool,
    },
}

impl StoredBitmaps {
    /// What is known of the bitmap called `name` of `layer`.
    fn get(&self, layer: &Arc<Layer>, name: &str) -> Option<Stored> {
        let known = self.0.lock();
        let (of, bitmap) = known.get(&(layer.number, name.to_owned()))?;
        std::ptr::eq(of.as_ptr(), Arc::as_ptr(layer)).then(|| bitmap.clone())
    }

    fn put(&self, layer: &Arc<Layer>, name: &str, bitmap: Stored) {
        let mut known = self.0.lock();
        known.retain(|_, (of, _)| of.strong_count() > 0);
        known.insert((layer.number, name.to_owned()), (Arc::downgrade(layer), bitmap));
    }
}

/// What a layer says of a bitmap.
enum Said {
    Runs {
        runs: Vec<(u64, bool)>,
        is_enabled: bool,
    },
    /// It has none; if it is stale, another program has written it and recorded nothing.
    Nothing {
        is_stale: bool,
    },
}

/// A layer that has no bitmap of a name.
struct Passed<'a> {
    layer: &'a Layer,
    /// Whether that, or one beneath it up to the next that has it, has bitmaps that are stale.
    is_stale: bool,
}

impl ManageBitmaps for Chain {
    fn dirty<'a>(
        &'a self,
        name: &'a str,
        range: GuestRange,
    ) -> LocalFuture<'a, Result<Vec<(u64, bool)>>> {
        Box::pin(async move {
            let (mut all, mut there) = (None::<Vec<_>>, Vec::new());
            // The uppermost layer without it since the last one that has it.
            let mut passed: Option<Passed<'_>> = None;
            let layers = self.map.layers();
            for layer in layers.all().iter().rev().take_while(|layer| layer.tables.is_some()) {
                let said = self.dirty_in(layer, name, range, &mut there).await;
                let (runs, is_enabled) = match said.map_err(|error| layer.explain(error))? {
                    Said::Runs { runs, is_enabled } => (runs, is_enabled),
                    Said::Nothing { is_stale } => {
                        let passed = passed.get_or_insert(Passed { layer, is_stale });
                        passed.is_stale |= is_stale;
                        continue;
                    }
                };
                if let Some(Passed { layer: above, is_stale }) = passed.take()
                    && (is_stale || all.is_some() || is_enabled && self.is_writable())
                {
                    let context = format!(
                        "its bitmap {name:?} lacks changes: the layer {} above it does not record \
                         them",
                        above.path.display()
                    );
                    return Err(layer.explain(Error::new(ErrorKind::Corrupt, context)));
                }
                all = Some(match all {
                    Some(all) => united(&all, &runs),
                    None => runs,
                });
            }
            all.ok_or_else(|| unknown(name, &there))
        })
    }
}

impl Chain {
    /// What `layer` says of the bitmap called `name`; `there` gets its other ones.
    async fn dirty_in(
        &self,
        layer: &Arc<Layer>,
        name: &str,
        range: GuestRange,
        there: &mut Vec<String>,
    ) -> Result<Said> {
        let writer = self.writer.load_full().filter(|writer| writer.layer().number == layer.number);
        let recorded = writer.and_then(|writer| writer.dirty_runs(name, range, RUNS_MANY));
        if let Some((runs, is_enabled)) = recorded {
            return Ok(Said::Runs { runs, is_enabled });
        }
        let is_frozen = layer.live.is_none();
        let known = self.stored_bitmaps.get(layer, name).filter(|_| is_frozen);
        let stored = match known {
            Some(known) => known,
            None => {
                let stored = look_for(layer, name, there).await?;
                if is_frozen {
                    self.stored_bitmaps.put(layer, name, stored.clone());
                }
                stored
            }
        };
        match stored {
            Stored::There(bitmap) => {
                let bitmap = bitmap.of(&layer.store);
                let is_enabled = bitmap.is_enabled();
                Ok(Said::Runs { runs: bitmap.runs(range).await?, is_enabled })
            }
            Stored::Missing { is_stale } => Ok(Said::Nothing { is_stale }),
        }
    }

    /// Gives `next`, which is about to be the writer of the active layer, at `path`, an empty
    /// bitmap for each that `writer` keeps true. A snapshot does not fail for lack of one.
    ///
    /// # Errors
    /// If `next` cannot be used any more.
    pub(super) async fn continue_bitmaps(
        &self,
        writer: &Writer,
        next: &Writer,
        path: &Path,
    ) -> Result<()> {
        let continued = async {
            let wanted = writer.enabled_bitmaps().await?;
            // One that comes with bitmaps was made by somebody who takes care of them.
            if wanted.is_empty() || next.has_bitmaps() {
                return Ok(());
            }
            next.add_bitmaps(&wanted).await
        };
        let Err(error): Result<()> = continued.await else { return Ok(()) };
        tracing::warn!(
            image = %path.display(),
            %error,
            "the dirty bitmaps of the layer beneath are not continued in the new one"
        );
        // Nothing may be left that the log, which begins with the first write, does not have.
        next.flush().await
    }
}

/// What the file of `layer` has of the bitmap called `name`; `there` gets its other ones.
async fn look_for(layer: &Layer, name: &str, there: &mut Vec<String>) -> Result<Stored> {
    let header = read_header(&*layer.store).await?;
    let missing = Stored::Missing { is_stale: header.stale_bitmaps };
    if header.bitmaps.is_none() {
        return Ok(missing);
    }
    match open_bitmap(&layer.store, &header, name).await {
        Ok(bitmap) => Ok(Stored::There(bitmap.place())),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let all = crate::snapshots::list_bitmaps(&*layer.store, &header).await?;
            there.extend(all.into_iter().map(|entry| entry.name));
            Ok(missing)
        }
        Err(error) => Err(error),
    }
}

/// What is dirty in one of two lists, as far as both go.
fn united(one: &[(u64, bool)], other: &[(u64, bool)]) -> Vec<(u64, bool)> {
    let mut united: Vec<(u64, bool)> = Vec::new();
    let (mut one, mut other) = (one.iter().copied(), other.iter().copied());
    let (mut left, mut right) = (one.next(), other.next());
    while let (Some((left_len, is_left)), Some((right_len, is_right))) = (left, right) {
        let (len, is_dirty) = (left_len.min(right_len), is_left || is_right);
        match united.last_mut() {
            Some((before, was_dirty)) if *was_dirty == is_dirty => *before += len,
            _ => united.push((len, is_dirty)),
        }
        let rest =
            |len_before: u64, is_dirty| (len_before > len).then(|| (len_before - len, is_dirty));
        left = rest(left_len, is_left).or_else(|| one.next());
        right = rest(right_len, is_right).or_else(|| other.next());
    }
    united
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dirty_in_one_of_two_is_dirty_as_far_as_both_go() {
        let one = [(4, false), (4, true), (8, false)];
        let other = [(2, true), (10, false)];
        assert_eq!(united(&one, &other), [(2, true), (2, false), (4, true), (4, false)]);
        assert_eq!(united(&one, &[]), []);
    }
}

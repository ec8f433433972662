//! What dirty bitmaps have to say, as QEMU reports it: all that has changed on the disk of a layer
//! since a bitmap of it was made, or cleared, while it was enabled; and what was merged into it.
//! They may have more.
//!
//! What the bitmaps of a layer had to say that a commit takes out of the chain is up to the layer
//! that its data went into, if that has such bitmaps, or else to the active one.

use super::look::info;
use crate::storm::chain::Chain;
use crate::storm::foreign;
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::tools;
use serde_json::Value;
use std::collections::BTreeMap;

/// Sectors of a disk.
type Sectors = Vec<bool>;

/// What a verb does to bitmaps of the active layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Marking {
    /// This one has nothing any more.
    Clear(String),
    /// What one has goes into another one.
    Merge { from: String, into: String },
    /// None of them can be used any more: the disk went back in time.
    End,
    /// A commit writes to the layer of this name. What those in between show changes with that, and
    /// their bitmaps do not record it.
    Write(String),
}

/// Who changed disks since the last look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum By {
    /// Somebody whose changes bitmaps record, and who was not killed: they stay usable.
    Recorded,
    /// The same, but they need not stay usable.
    Broken,
    /// Somebody whose changes they do not record: QEMU where it goes back to a snapshot.
    Silent,
}

/// A layer that has bitmaps.
#[derive(Debug, Default)]
struct Known {
    /// What its disk held at the last look.
    disk: Vec<u8>,
    bitmaps: BTreeMap<String, Bitmap>,
}

#[derive(Debug, Default)]
struct Bitmap {
    /// What it has to have.
    must: Sectors,
    /// Whether QEMU could use it at the last look.
    is_usable: bool,
}

/// What is known of the bitmaps of all layers.
#[derive(Debug, Default)]
pub(super) struct Bitmaps {
    layers: BTreeMap<String, Known>,
    /// Which one a commit has written since the last look.
    written: Option<String>,
}

/// A bitmap as QEMU describes it.
struct Described {
    name: String,
    is_enabled: bool,
    is_usable: bool,
}

impl Described {
    fn of(layer: &Value) -> Vec<Self> {
        let all = layer["format-specific"]["data"]["bitmaps"].as_array();
        let one = |bitmap: &Value| {
            let flags = bitmap["flags"].as_array().cloned().unwrap_or_default();
            Self {
                name: bitmap["name"].as_str().unwrap_or_default().to_owned(),
                is_enabled: flags.iter().any(|flag| flag == "auto"),
                is_usable: !flags.iter().any(|flag| flag == "in-use"),
            }
        };
        all.into_iter().flatten().map(one).collect()
    }
}

impl Bitmaps {
    /// A verb was done that does this to bitmaps, or, if it was killed, may have been.
    pub(super) fn mark(&mut self, layer: &str, marking: &Marking, is_done: bool) {
        if let Marking::Write(base) = marking {
            self.written = Some(base.clone());
        }
        let Some(Known { bitmaps, .. }) = self.layers.get_mut(layer) else { return };
        match marking {
            Marking::Clear(name) => drop(bitmaps.get_mut(name).map(|one| one.must.clear())),
            Marking::Merge { from, into } if is_done => {
                let from = bitmaps.get(from).map(|one| one.must.clone()).unwrap_or_default();
                bitmaps.entry(into.clone()).or_default().add(&from);
            }
            Marking::Merge { .. } | Marking::Write(_) | Marking::End => {}
        }
    }

    /// Holds them against what has changed since the last look.
    pub(super) fn look(&mut self, chain: &Chain<'_>, by: By, what: &str) -> Outcome {
        if !tools::NBDINFO.is_there() || !tools::QEMU_NBD.is_there() {
            return Ok(());
        }
        let active = chain.active().name.clone();
        let layers = info(chain, &active)?;
        let mut present = BTreeMap::new();
        for layer in &layers {
            let file = layer["filename"].as_str().unwrap_or_default();
            let described = Described::of(layer);
            if !described.is_empty() {
                present.insert(file.rsplit('/').next().unwrap_or_default().to_owned(), described);
            }
        }
        let left = self.take_left(&present);
        for (layer, described) in &present {
            self.look_at(chain, layer, (described, by), what)?;
        }
        if self.written.take().is_some() {
            let beneath = layers.get(1).and_then(|layer| layer["filename"].as_str());
            let beneath = beneath.and_then(|file| file.rsplit('/').next());
            self.go_on(left, [beneath, Some(&active)]);
        }
        for (layer, described) in &present {
            self.judge(chain, layer, described, what)?;
        }
        Ok(())
    }

    /// What is known of layers that are not there any more, or have no bitmaps.
    fn take_left(&mut self, present: &BTreeMap<String, Vec<Described>>) -> Vec<Known> {
        self.layers
            .extract_if(.., |layer, _| !present.contains_key(layer))
            .map(|(_, known)| known)
            .collect()
    }

    fn look_at(
        &mut self,
        chain: &Chain<'_>,
        layer: &str,
        (described, by): (&[Described], By),
        what: &str,
    ) -> Outcome {
        let raw = chain.world.run.join("bitmaps.raw");
        let disk = foreign::flatten(&chain.world.images, layer, &[], &raw)?;
        let is_written = layer == chain.active().name || self.written.as_deref() == Some(layer);
        let is_new = !self.layers.contains_key(layer);
        let known = self.layers.entry(layer.to_owned()).or_default();
        let changed = if is_new { Vec::new() } else { differing(&known.disk, &disk) };
        known.bitmaps.retain(|name, _| described.iter().any(|described| described.name == *name));
        for Described { name, is_enabled, is_usable } in described {
            let bitmap = known.bitmaps.entry(name.clone()).or_default();
            bitmap.must.truncate(disk.len() / SECTOR);
            if *is_enabled && is_written && by != By::Silent {
                bitmap.add(&changed);
            }
            if bitmap.is_usable && !is_usable && by == By::Recorded {
                let what = format!("{what}: bitmap {name} of {layer} cannot be used any more");
                return Err(Fault::new(Wrong::Untold, what));
            }
            bitmap.is_usable = *is_usable;
        }
        known.disk = disk;
        Ok(())
    }

    /// What bitmaps had to say that `left` is up to the first of these layers that has them.
    fn go_on(&mut self, left: Vec<Known>, layers: [Option<&str>; 2]) {
        for (name, Bitmap { must, .. }) in left.into_iter().flat_map(|known| known.bitmaps) {
            let has = |layer: &&str| {
                self.layers.get(*layer).is_some_and(|l| l.bitmaps.contains_key(&name))
            };
            let heir = layers.into_iter().flatten().find(has).map(str::to_owned);
            let heir = heir.and_then(|layer| self.layers.get_mut(&layer)?.bitmaps.get_mut(&name));
            heir.into_iter().for_each(|bitmap| bitmap.add(&must));
        }
    }

    fn judge(
        &self,
        chain: &Chain<'_>,
        layer: &str,
        described: &[Described],
        what: &str,
    ) -> Outcome {
        let Some(Known { disk, bitmaps }) = self.layers.get(layer) else { return Ok(()) };
        for Described { name, .. } in described.iter().filter(|described| described.is_usable) {
            let Some(Bitmap { must, .. }) = bitmaps.get(name) else { continue };
            if !must.contains(&true) {
                continue;
            }
            let sectors = disk.len() / SECTOR;
            let is_dirty = foreign::dirty(&chain.world.images, layer, name, sectors)?;
            chain.world.counts.bitmaps.add();
            let missed = |at: &usize| must[*at] && !is_dirty.get(*at).copied().unwrap_or(false);
            let missed: Vec<_> = (0..must.len().min(sectors)).filter(missed).collect();
            if let Some(first) = missed.first() {
                let what = format!(
                    "{what}: {} sectors have changed that are not in bitmap {name} of {layer}, \
                     first sector {first}",
                    missed.len()
                );
                return Err(Fault::new(Wrong::Untold, what));
            }
        }
        Ok(())
    }
}

impl Bitmap {
    fn add(&mut self, more: &[bool]) {
        let len = self.must.len().max(more.len());
        self.must.resize(len, false);
        self.must.iter_mut().zip(more).for_each(|(must, more)| *must |= more);
    }
}

/// The sectors of `after` that are not as in `before`; what was beyond its end was zeros.
fn differing(before: &[u8], after: &[u8]) -> Sectors {
    let zeros = [0; SECTOR];
    let before = before.chunks(SECTOR).chain(std::iter::repeat(&zeros[..]));
    before.zip(after.chunks(SECTOR)).map(|(before, after)| before != after).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_beyond_the_end_was_zeros_and_what_is_cut_off_is_no_change() {
        let disk = |sectors: &[u8]| -> Vec<u8> {
            sectors.iter().flat_map(|byte| [*byte; SECTOR]).collect()
        };
        assert_eq!(differing(&disk(&[1, 2]), &disk(&[1, 3, 0, 4])), [false, true, false, true]);
        assert_eq!(differing(&disk(&[1, 2]), &disk(&[1])), [false]);
    }

    #[test]
    fn what_a_bitmap_has_to_say_goes_where_it_is_merged_and_is_gone_when_it_is_cleared() {
        let mut bitmaps = Bitmaps::default();
        let of = |must: &[bool]| Bitmap { must: must.to_vec(), is_usable: true };
        let all = [("a", of(&[true, false])), ("b", of(&[false, true]))];
        let all = all.map(|(name, one)| (name.to_owned(), one)).into();
        bitmaps.layers.insert("layer".to_owned(), Known { disk: Vec::new(), bitmaps: all });
        let must =
            |bitmaps: &Bitmaps, name: &str| bitmaps.layers["layer"].bitmaps[name].must.clone();
        let merge = Marking::Merge { from: "a".to_owned(), into: "b".to_owned() };
        bitmaps.mark("layer", &merge, false);
        assert_eq!(must(&bitmaps, "b"), [false, true], "it may not have been done");
        bitmaps.mark("layer", &merge, true);
        assert_eq!(must(&bitmaps, "b"), [true, true]);
        bitmaps.mark("layer", &Marking::Clear("a".to_owned()), false);
        assert!(must(&bitmaps, "a").is_empty(), "it may have been done");
    }
}

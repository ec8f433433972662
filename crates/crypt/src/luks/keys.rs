//! Keys that are added and removed, without touching the payload.
//!
//! ```text
//! add:    material ─▶ slot, inactive ─▶ sync ─▶ slot, active ─▶ sync
//! remove: slot, inactive ─▶ sync ─▶ material, random ─▶ sync
//! ```
//!
//! Invariants
//! - I1 A slot is active only while its material is whole: a power cut leaves a header that is as
//!   before or as after, for every passphrase.

use super::format::{NewSlot, fill_random, iterations_of, new_material};
use super::header::{LuksHeader, SLOTS};
use super::unlock::{HeaderPlace, unlock};
use crate::compute::compute;
use mica_block::{Error, ErrorKind, Passphrase, Result, write_all};
use mica_rt::Buf;
use mica_units::{HostOffset, SECTOR_BYTES};
use std::num::NonZeroU32;
use std::sync::Arc;

/// Which slots are meant.
#[derive(Clone)]
pub enum Slot {
    /// The one with this number.
    Number(usize),
    /// Those that a passphrase opens.
    OpenedBy(Arc<Passphrase>),
}

/// Adds the passphrase `new` to the `header` at `place`, in slot `number` or the first that is
/// free; `known` opens one that is there. Durable when this returns. Returns the slot's number.
///
/// # Errors
/// `Denied` if `known` opens no slot; `Invalid` if the slot is in use or there is none, `Limit` if
/// none is free; any error of the store.
pub async fn add_key(
    header: &mut LuksHeader,
    place: HeaderPlace<'_>,
    known: &Arc<Passphrase>,
    (new, number, how): (&Arc<Passphrase>, Option<usize>, NewSlot),
) -> Result<usize> {
    let HeaderPlace { store, at } = place;
    if new.bytes().is_empty() {
        let what = format!("the passphrase in {} is empty", new.from());
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let number = match number {
        Some(number) => {
            if slot_of(header, number)? {
                let what = format!("key slot {number} is in use: make it inactive first");
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            number
        }
        None => header.slots.iter().position(|slot| !slot.is_active()).ok_or_else(|| {
            Error::new(ErrorKind::Limit, format!("all {SLOTS} key slots are in use"))
        })?,
    };
    let unlocked = unlock(header, place, known).await?;
    let (of, with) = (header.clone(), Arc::clone(new));
    // How long a measured one takes is not known yet.
    let long = match how {
        NewSlot::Iterations(count) => count,
        NewSlot::Time(_) => NonZeroU32::MAX,
    };
    let (changed, material) = compute([long], move || {
        let mut header = of;
        let iterations = iterations_of(header.hash, header.key_bytes, how);
        let master = unlocked.key.bytes();
        let material = new_material(&mut header, number, iterations, &with, master)?;
        Ok::<_, Error>((header, material))
    })
    .await??;
    write_all(store, Buf::from_slice(&material), material_at(&changed, at, number)?).await?;
    let (within, entry) = changed.slot_bytes(number);
    // Its first four bytes say whether it is active.
    let (active, rest) = entry.split_at(4);
    write_all(store, Buf::from_slice(rest), plus(at, within as u64 + 4)?).await?;
    store.sync().await?;
    write_all(store, Buf::from_slice(active), plus(at, within as u64)?).await?;
    store.sync().await?;
    *header = changed;
    Ok(number)
}

/// Removes the keys that `which` means. Durable when this returns: their passphrases are worth
/// nothing then. Returns how many slots were in use.
///
/// A slot with a number may be inactive: a power cut may have ended its removal before its material
/// was gone, and only this ends it. It does not count: whoever named another slot than that of the
/// key to be removed has to learn it.
///
/// # Errors
/// `Invalid` if there is no such slot; `Denied` if the passphrase opens none, or if none would be
/// left and `last_too` does not allow that; any error of the store.
pub async fn remove_keys(
    header: &mut LuksHeader,
    place: HeaderPlace<'_>,
    which: &Slot,
    last_too: bool,
) -> Result<usize> {
    let HeaderPlace { store, at } = place;
    let mut gone = Vec::new();
    match which {
        Slot::Number(number) => {
            slot_of(header, *number)?;
            gone.push(*number);
        }
        Slot::OpenedBy(passphrase) => {
            // It may open several; each that is found is left out of the next look.
            let mut left = header.clone();
            loop {
                match unlock(&left, place, passphrase).await {
                    Ok(unlocked) => {
                        left.slots[unlocked.slot].iterations = None;
                        gone.push(unlocked.slot);
                    }
                    Err(error) if error.kind() == ErrorKind::Denied && !gone.is_empty() => break,
                    Err(error) => return Err(error),
                }
            }
        }
    }
    let is_gone = |(number, _)| gone.contains(&number);
    let removed = header.active_slots().filter(|slot| is_gone(*slot)).count();
    if removed > 0 && header.active_slots().all(is_gone) && !last_too {
        let what = "no key would be left, and nobody could ever read the image: --force does it";
        return Err(Error::new(ErrorKind::Denied, what));
    }
    for number in &gone {
        header.slots[*number].iterations = None;
        let (within, entry) = header.slot_bytes(*number);
        write_all(store, Buf::from_slice(&entry[..4]), plus(at, within as u64)?).await?;
    }
    store.sync().await?;
    for number in &gone {
        let mut noise = vec![0; header.material_len()];
        fill_random(&mut noise)?;
        write_all(store, Buf::from_slice(&noise), material_at(header, at, *number)?).await?;
        let (within, entry) = header.slot_bytes(*number);
        write_all(store, Buf::from_slice(&entry), plus(at, within as u64)?).await?;
    }
    store.sync().await?;
    Ok(removed)
}

/// Whether slot `number` is in use.
fn slot_of(header: &LuksHeader, number: usize) -> Result<bool> {
    header.slots.get(number).map(super::KeySlot::is_active).ok_or_else(|| {
        let what = format!("there is no key slot {number}: they are 0 to {}", SLOTS - 1);
        Error::new(ErrorKind::Invalid, what)
    })
}

fn material_at(header: &LuksHeader, at: HostOffset, number: usize) -> Result<HostOffset> {
    plus(at, u64::from(header.slots[number].material_sectors) * SECTOR_BYTES)
}

fn plus(at: HostOffset, bytes: u64) -> Result<HostOffset> {
    at.checked_add(bytes)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "the LUKS header ends beyond 64 bits"))
}

#[cfg(test)]
mod tests;

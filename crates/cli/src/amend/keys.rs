//! `-o encrypt.…`: keys are added to an encrypted image, or removed from it.

use crate::create::options::{number, wrong};
use crate::failure::Failure;
use mica_crypt::luks::{NewSlot, Slot};
use mica_stack::{KeyChange, Secret};
use std::time::Duration;

/// What `-o encrypt.…` says, in the words of qemu-img; of secrets the file is named.
#[derive(Default)]
pub(super) struct KeyOptions {
    /// Whether a key is to be there, or not.
    is_active: Option<bool>,
    new: Option<Secret>,
    old: Option<Secret>,
    slot: Option<usize>,
    time: Option<Duration>,
}

impl KeyOptions {
    /// Sets what `key` names; false if there is no such option.
    pub(super) fn set(&mut self, key: &str, value: &str) -> Result<bool, Failure> {
        let secret = || Ok::<_, Failure>(Some(value.parse::<Secret>()?));
        match key {
            "encrypt.state" => {
                self.is_active = match value {
                    "active" => Some(true),
                    "inactive" => Some(false),
                    _ => return Err(wrong(key, value, "active or inactive")),
                }
            }
            "encrypt.new-secret" => self.new = secret()?,
            "encrypt.old-secret" => self.old = secret()?,
            "encrypt.keyslot" => {
                let slot = usize::try_from(number(key, value)?).ok().filter(|slot| *slot < 8);
                self.slot = Some(slot.ok_or_else(|| wrong(key, value, "0 to 7"))?);
            }
            "encrypt.iter-time" => {
                self.time = match number(key, value)? {
                    0 => return Err(wrong(key, value, "a number of milliseconds")),
                    milliseconds => Some(Duration::from_millis(milliseconds)),
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What is to happen, if anything is said. The last key goes only if `force` says so.
    pub(super) fn change(self, force: bool) -> Result<Option<KeyChange>, Failure> {
        let Self { is_active, new, old, slot, time } = self;
        let none = new.is_none() && old.is_none() && slot.is_none() && time.is_none();
        let refuse = |what: &str| Err(Failure::new(format!("-o encrypt.{what}")));
        match (is_active, new, old) {
            (None, ..) if none => Ok(None),
            (None, ..) => refuse("state is missing: active adds a key, inactive removes it"),
            (Some(true), Some(new), None) => {
                let how = time.map_or_else(NewSlot::default, NewSlot::Time);
                Ok(Some(KeyChange::Add { new: new.read()?, slot, how }))
            }
            (Some(true), None, _) => refuse("new-secret=FILE is missing: the key to be added"),
            (Some(true), _, Some(_)) => refuse("old-secret: a key is added, or removed"),
            (Some(false), Some(_), _) => refuse("new-secret: a key is added, or removed"),
            (Some(false), None, _) if time.is_some() => {
                refuse("iter-time is for a key to be added")
            }
            (Some(false), None, old) => {
                let which = match (old, slot) {
                    (Some(old), None) => Slot::OpenedBy(old.read()?),
                    (None, Some(slot)) => Slot::Number(slot),
                    _ => return refuse("old-secret=FILE or keyslot=NUMBER says which key goes"),
                };
                Ok(Some(KeyChange::Remove { which, last_too: force }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(words: &[(&str, &str)]) -> Result<Option<KeyChange>, Failure> {
        let mut options = KeyOptions::default();
        for (key, value) in words {
            assert!(options.set(key, value)?, "{key} is known");
        }
        options.change(false)
    }

    #[test]
    fn what_is_said_makes_sense_or_is_refused() {
        assert!(matches!(said(&[]), Ok(None)));
        let state = |value| ("encrypt.state", value);
        for (words, cure) in [
            (&[("encrypt.keyslot", "1")][..], "state is missing"),
            (&[state("active")], "new-secret=FILE is missing"),
            (&[state("inactive")], "old-secret=FILE or keyslot"),
            (&[state("gone")], "active or inactive"),
            (&[state("inactive"), ("encrypt.keyslot", "8")], "0 to 7"),
            (&[state("inactive"), ("encrypt.new-secret", "f")], "added, or removed"),
            (&[state("inactive"), ("encrypt.iter-time", "9")], "to be added"),
            (&[state("active"), ("encrypt.new-secret", "data=x")], "put it into a file"),
        ] {
            let refused = said(words).err().expect(cure);
            assert!(refused.message().contains(cure), "{}: {cure}", refused.message());
        }
        let removed = said(&[state("inactive"), ("encrypt.keyslot", "7")]);
        assert!(matches!(
            removed,
            Ok(Some(KeyChange::Remove { which: Slot::Number(7), last_too: false }))
        ));
    }
}

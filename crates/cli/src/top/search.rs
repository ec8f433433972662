//! Searching for disks by words, as on the page: what was typed after `/`.

use super::columns::notes;
use super::rates::Rates;
use super::screen::Key;
use crate::ctl::text;

/// What is searched for.
#[derive(Default)]
pub(super) struct Search {
    typed: String,
    is_typing: bool,
}

/// What a key was to a search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Use {
    /// Other disks may be found now.
    Changed,
    /// It belongs to what is typed.
    Taken,
    /// It is not for the search.
    None,
}

impl Search {
    /// Longer than any name that makes sense, and than a line of most terminals.
    const LETTERS_MAX: usize = 200;

    pub(super) fn press(&mut self, key: Key) -> Use {
        match key {
            Key::Escape if self.is_on() => *self = Self::default(),
            Key::Letter('/') if !self.is_typing => {
                *self = Self { typed: String::new(), is_typing: true };
            }
            Key::Letter(letter) if self.is_typing => {
                if self.typed.chars().count() < Self::LETTERS_MAX {
                    self.typed.push(letter);
                }
            }
            Key::Backspace if self.is_typing => drop(self.typed.pop()),
            Key::Enter if self.is_typing => {
                self.is_typing = false;
                return Use::Taken;
            }
            _ => return Use::None,
        }
        Use::Changed
    }

    /// Whether it is being typed, or disks are left out because of it.
    pub(super) fn is_on(&self) -> bool {
        self.is_typing || self.words().next().is_some()
    }

    /// Whether the disk has all the words: in its name, its state or what is noted of it.
    pub(super) fn finds(&self, rates: &Rates<'_>) -> bool {
        if self.words().next().is_none() {
            return true;
        }
        let (name, state) = (text(&rates.disk["name"]), text(&rates.disk["state"]));
        let described = [name, state, notes(rates)].join("\n").to_lowercase();
        self.words().all(|word| described.contains(&word.to_lowercase()))
    }

    fn words(&self) -> impl Iterator<Item = &str> {
        self.typed.split_whitespace()
    }

    /// A line about it, which has `found` so many of `all` disks.
    pub(super) fn said(&self, found: usize, all: usize) -> String {
        let (cursor, keys) = match self.is_typing {
            true => ("_", "Enter: keys sort again, Esc: all disks"),
            false => ("", "Esc: all disks"),
        };
        format!("/{}{cursor}  {found} of {all} disks; {keys}", self.typed)
    }
}

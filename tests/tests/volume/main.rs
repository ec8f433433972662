//! Volumes, judged from outside: their verbs, and what serves them.

mod bucket;
mod copies;
mod kill;
mod life;
mod snapshots;
mod urls;

//! Volumes, judged from outside: their verbs, and what serves them.

mod boot;
mod bucket;
mod collection;
mod collectors;
mod compacting;
mod copies;
mod encryption;
mod faults;
mod full;
mod given_up;
mod guide;
mod handover;
mod hosts;
mod kill;
mod life;
mod live;
mod readme;
mod signals;
mod snapshots;
mod streams;
mod urls;

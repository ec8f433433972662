//! Volumes, judged from outside: their verbs, and what serves them.

mod kill;
mod life;
mod urls;

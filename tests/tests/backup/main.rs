//! Backups to folders and streams, and what is given back of them.

mod at_once;
mod beside_merges;
mod damage;
mod night;
mod offline;
mod restored;
mod served;
mod under_load;

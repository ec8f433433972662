//! Backups to folders and streams, and what is given back of them.

mod damage;
mod night;
mod offline;
mod served;
mod world;

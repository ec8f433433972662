//! Faults of a disk that is written: no space, failing storage, files that change under the server,
//! and tables that an attacker made. Guests get errors; the server lives, and what was good stays
//! so.

mod image;
mod storage;
mod tables;

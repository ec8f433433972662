//! Images that an enemy made, and clients that are one: what broke others must not break mica.
//! Every verb ends by itself, in bounded time and memory, without a panic; what is served stays
//! served for the others.

mod clients;
mod compressed;
mod harm;
mod mutated;
mod names;
mod tables;

//! Images that an attacker made, and hostile clients: what broke others must not break mica. Every
//! verb ends by itself, in bounded time and memory, without a panic; what is served stays available
//! to the others.

mod clients;
mod compressed;
mod harm;
mod mutated;
mod names;
mod tables;

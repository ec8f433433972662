//! Servers and their users: clients, kernels, operators, systemd.

mod addresses;
mod background;
mod backup;
mod clients;
mod contexts;
mod control;
mod ephemeral;
mod fuse;
mod kept;
mod life;
mod locks;
mod many;
mod membership;
mod mistakes;
mod monitoring;
mod parts;
mod renewal;
mod rights;
mod sandbox;
mod systemd;
mod tls;

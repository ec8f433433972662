//! Servers and their users: clients, kernels, operators, systemd.

mod clients;
mod control;
mod fuse;
mod life;
mod locks;
mod membership;
mod sandbox;
mod systemd;
mod tls;

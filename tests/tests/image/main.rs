//! The verbs for images at rest, beside `qemu-img`: what each creates, finds, repairs and reports.

mod amend;
mod bitmap;
mod check;
mod compare;
mod convert;
mod copying;
mod create;
mod encrypted;
mod existing;
mod exports;
mod foreign;
mod info;
mod inputs;
mod names;
mod no_exchange;
mod repair;
mod resize;
mod snapshots;
mod verbs;

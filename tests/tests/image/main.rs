//! The verbs for images at rest, beside `qemu-img`: what each makes, finds, mends and says.

mod check;
mod compare;
mod convert;
mod create;
mod info;
mod repair;
mod resize;

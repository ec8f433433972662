//! Random requests of guests against a plain copy of the disk in memory, for every shape of image.
//! After each session QEMU judges the image, reads it, and writes it too.
//!
//! `MICA_FSX_OPS` says how many requests each shape gets, `MICA_FSX_SEED` where the random numbers
//! begin, `MICA_FSX_SHAPE` restricts it to one shape. A run that fails says how to repeat it.

mod burst;
mod round;
mod shapes;

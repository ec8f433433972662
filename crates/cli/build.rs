//! Places what servers run side by side in the program.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=text-order.ld");
    // Only what is delivered is worth the seconds that this costs.
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        let folder = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
        println!("cargo::rustc-link-arg-bins=-Wl,-T,{folder}/text-order.ld");
        // A start reads the list of what it has to relocate: 13 KiB this way instead of 900.
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

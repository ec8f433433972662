//! Images in a folder, found by their headers. See `mica_stack::hostile::forest`.

#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("mica-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| mica_stack::hostile::forest(&FOLDER, input));

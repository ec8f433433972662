//! QEMU as a judge, if it is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs `qemu-img` in `folder`; `None` if it is not installed.
fn qemu_img(folder: &Path, arguments: &[&str]) -> Option<Output> {
    Command::new("qemu-img").args(arguments).current_dir(folder).output().ok()
}

/// Takes an internal snapshot of `image`. Returns whether that was possible.
pub(crate) fn snapshot(image: &Path) -> bool {
    let name = image.file_name().unwrap().to_str().unwrap();
    // It is refused, halfway, if the refcounts are too narrow for two.
    let before = std::fs::read(image).unwrap();
    let output = qemu_img(image.parent().unwrap(), &["snapshot", "-c", "before", name]);
    let done = output.is_some_and(|output| output.status.success());
    if !done {
        std::fs::write(image, before).unwrap();
    }
    done
}

/// Checks the image at `top` among `files` with `qemu-img`, and compares it with `bytes`.
pub(crate) fn judge(files: &[(PathBuf, Vec<u8>)], top: &Path, bytes: &[u8], about: &str) {
    let folder = tempfile::tempdir().unwrap();
    for (path, bytes) in files {
        std::fs::write(folder.path().join(path.file_name().unwrap()), bytes).unwrap();
    }
    let name = top.file_name().unwrap().to_str().unwrap();
    let Some(output) = qemu_img(folder.path(), &["check", "-f", "qcow2", name]) else {
        eprintln!("skipped: qemu-img is missing");
        return;
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{about}: qemu-img check: {said}");
    std::fs::write(folder.path().join("model.raw"), bytes).unwrap();
    let compare = ["compare", "-f", "raw", "-F", "qcow2", "model.raw", name];
    let output = qemu_img(folder.path(), &compare).unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{about}: qemu-img compare: {said}");
}

//! The formats of images, by the names of their files.

/// Whether it is a raw image.
pub(super) fn is_raw(file: &str) -> bool {
    file.ends_with(".raw")
}

/// Whether it is a qcow2 image.
pub(super) fn is_qcow2(file: &str) -> bool {
    format_of(file) == "qcow2"
}

/// The format of an image.
pub(super) fn format_of(file: &str) -> &'static str {
    match file.rsplit_once('.') {
        Some((_, "raw")) => "raw",
        Some((_, "luks")) => "luks",
        _ => "qcow2",
    }
}

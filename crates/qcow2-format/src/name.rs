//! Names of backing files and data files, as stored in images.
//!
//! - I1. A name never leads to anything but a file: no protocol is followed, no option is honoured.
//! - I2. What is not fully understood is refused by name; no part of it is used.
//!
//! QEMU takes a name with a colon before the first slash for `protocol:rest`, and `json:{…}` for a
//! description of a whole graph of devices. Both have let images read any file of the host and talk
//! to the network (CVE-2024-4467, CVE-2024-32498, CVE-2015-5163 and others), so mica accepts only
//! the plainest description of an image in a file.

use super::unsupported;
use mica_block::{Error, ErrorKind, Result};
use serde_json::{Map, Value};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bytes of a name that a message shows.
const SHOWN_CHARS_MAX: usize = 100;
/// Longest name that is parsed; a header cannot hold a longer one for a backing file.
const NAME_BYTES_MAX: usize = 4096;

/// Where an image is, and in which format.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageName {
    /// Path of its file; a relative one starts at the directory of the image that names it.
    pub path: PathBuf,
    /// Its format, if the name says so: `qcow2` or `raw`.
    pub format: Option<String>,
}

/// Reads a backing file's name: a path, or `json:` with nothing but an image in a file.
///
/// # Errors
/// `Unsupported` for protocols and for everything else that `json:` can say, `Invalid` for anything
/// that is neither.
pub fn parse_image_name(name: &OsStr) -> Result<ImageName> {
    check_len(name)?;
    match name.as_bytes().strip_prefix(b"json:") {
        Some(json) => parse_json(json),
        None => Ok(ImageName { path: plain_path(name)?, format: None }),
    }
}

/// Reads a data file's name: always a path.
///
/// # Errors
/// As [`parse_image_name`].
pub fn parse_data_file_name(name: &OsStr) -> Result<PathBuf> {
    check_len(name)?;
    plain_path(name)
}

fn check_len(name: &OsStr) -> Result<()> {
    match name.len() {
        0 => Err(Error::new(ErrorKind::Invalid, "a file's name is empty")),
        1..=NAME_BYTES_MAX => Ok(()),
        len => Err(Error::new(
            ErrorKind::Limit,
            format!("a file's name has {len} bytes, the maximum is {NAME_BYTES_MAX}"),
        )),
    }
}

fn plain_path(name: &OsStr) -> Result<PathBuf> {
    let bytes = name.as_bytes();
    if bytes.contains(&0) {
        return Err(Error::new(ErrorKind::Invalid, "a file's name contains a NUL"));
    }
    let mark = bytes.iter().find(|byte| matches!(byte, b':' | b'/'));
    if mark == Some(&b':') {
        return Err(unsupported(format!(
            "{} names a protocol, and mica opens files only; a file of this name is written ./name",
            shown(name)
        )));
    }
    Ok(Path::new(name).to_owned())
}

fn parse_json(json: &[u8]) -> Result<ImageName> {
    let refuse = |why: &str| {
        unsupported(format!(
            "json:{}: {why}; only an image of format qcow2 or raw in a file is supported, as in \
             json:{{\"driver\":\"qcow2\",\"file\":{{\"driver\":\"file\",\"filename\":\"/path\"}}}}",
            shown(OsStr::from_bytes(json))
        ))
    };
    // serde_json bounds the depth; the length is bounded by the caller.
    let mut options: Map<String, Value> =
        serde_json::from_slice(json).map_err(|error| refuse(&error.to_string()))?;
    let mut file = match options.remove("file") {
        None => Map::new(),
        Some(Value::Object(file)) => file,
        Some(_) => return Err(refuse("file is not an object")),
    };
    for key in ["driver", "filename"] {
        if let Some(value) = options.remove(&format!("file.{key}"))
            && file.insert(key.to_owned(), value).is_some()
        {
            return Err(refuse(&format!("file.{key} is given twice")));
        }
    }
    let format = text(options.remove("driver")).map_err(|()| refuse("driver is not a string"))?;
    let driver = text(file.remove("driver")).map_err(|()| refuse("file.driver is not a string"))?;
    let path = text(file.remove("filename")).map_err(|()| refuse("filename is not a string"))?;
    if let Some(key) = options.keys().next() {
        return Err(refuse(&format!("option {key:?} is not known")));
    }
    if let Some(key) = file.keys().next() {
        return Err(refuse(&format!("option {:?} is not known", format!("file.{key}"))));
    }
    if !matches!(format.as_deref(), None | Some("qcow2" | "raw")) {
        return Err(refuse("driver is neither qcow2 nor raw"));
    }
    if !matches!(driver.as_deref(), None | Some("file")) {
        return Err(refuse("file.driver is not file"));
    }
    let path = path.ok_or_else(|| refuse("file.filename is missing"))?;
    if !path.starts_with('/') {
        // QEMU would look in the directory in which it happens to run.
        return Err(refuse("the file's path is not absolute"));
    }
    Ok(ImageName { path: plain_path(OsStr::new(&path))?, format })
}

fn text(value: Option<Value>) -> std::result::Result<Option<String>, ()> {
    match value {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(()),
    }
}

/// A possibly hostile name as a message may show it: quoted and short.
fn shown(name: &OsStr) -> String {
    let text = name.to_string_lossy();
    let cut: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    let dots = if cut.len() < text.len() { "…" } else { "" };
    format!("{cut:?}{dots}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> Result<ImageName> {
        parse_image_name(OsStr::new(name))
    }

    fn kind(name: &str) -> Option<ErrorKind> {
        parse(name).err().map(|error| error.kind())
    }

    #[test]
    fn plain_paths_are_taken_as_they_are() {
        for path in ["base.qcow2", "/a/b:c", "./a:b", "../x", "a b\"c"] {
            let name = parse(path).expect("a path");
            assert_eq!(name, ImageName { path: path.into(), format: None });
        }
    }

    #[test]
    fn every_protocol_is_refused() {
        for name in [
            "nbd:localhost:10809",
            "file:/etc/shadow",
            "http://host/x",
            "ssh://host/x",
            "a:b",
            "fat:rw:/tmp",
            "blkdebug::x",
            "nbd+unix:///?socket=/x",
            ":x",
            "host_device:/dev/sda",
        ] {
            assert_eq!(kind(name), Some(ErrorKind::Unsupported), "{name}");
        }
    }

    #[test]
    fn json_for_an_image_in_a_file_is_understood() {
        let nested = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/a:b"}}"#;
        let flat = r#"json:{"driver":"qcow2","file.driver":"file","file.filename":"/a:b"}"#;
        let expected = ImageName { path: "/a:b".into(), format: Some("qcow2".to_owned()) };
        assert_eq!(parse(nested).expect("nested"), expected);
        assert_eq!(parse(flat).expect("flat"), expected);
    }

    #[test]
    fn json_that_says_more_is_refused_by_name() {
        for json in [
            r#"{"driver":"nbd","host":"x"}"#,
            r#"{"driver":"qcow2","file":{"driver":"nbd","filename":"/x"}}"#,
            r#"{"driver":"qcow2","file":{"driver":"file","filename":"/x","aio":"native"}}"#,
            r#"{"driver":"qcow2","backing":null,"file":{"driver":"file","filename":"/x"}}"#,
            r#"{"driver":"qcow2","file":"node"}"#,
            r#"{"driver":"qcow2","file":{"driver":"file","filename":"x"}}"#,
            r#"{"driver":"qcow2","file.filename":"/x","file":{"filename":"/y"}}"#,
            r#"{"driver":"qcow2","file":{"driver":"file"}}"#,
            r#"{"driver":7,"file.filename":"/x"}"#,
            r#"{"driver":"raw","offset":512,"file.filename":"/x"}"#,
            "{",
            "",
            "[]",
            "null",
        ] {
            assert_eq!(kind(&format!("json:{json}")), Some(ErrorKind::Unsupported), "{json}");
        }
    }

    #[test]
    fn deep_json_does_not_exhaust_the_stack() {
        let deep = format!("json:{}", "[".repeat(4000));
        assert_eq!(kind(&deep), Some(ErrorKind::Unsupported));
    }

    #[test]
    fn data_file_name_is_never_json() {
        let name = OsStr::new(r#"json:{"driver":"raw","file.filename":"/x"}"#);
        let error = parse_data_file_name(name).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn message_about_a_long_name_is_short() {
        let name = format!("a:{}", "x".repeat(4000));
        let error = parse(&name).expect_err("refused");
        assert!(error.to_string().len() < 400);
    }
}

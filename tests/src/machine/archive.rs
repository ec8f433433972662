//! An initramfs: a cpio archive of the kind that Linux unpacks into its first file system.

use std::collections::BTreeSet;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// Files for a machine to begin with.
#[derive(Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<String>,
}

impl Archive {
    /// Adds a folder, and those that it lies in.
    pub(super) fn folder(&mut self, path: &str) {
        let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        for end in ends {
            self.entry(&path[..end], FOLDER, &[]);
        }
    }

    /// Adds a file, and the folders that it lies in. The first file of a name stays.
    pub(super) fn file(&mut self, path: &str, bytes: &[u8]) {
        self.parent(path);
        self.entry(path, PROGRAM, bytes);
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.parent(path);
        self.entry(path, LINK, target.as_bytes());
    }

    /// The archive.
    #[must_use]
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn parent(&mut self, path: &str) {
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder);
        }
    }

    fn entry(&mut self, path: &str, mode: u32, bytes: &[u8]) {
        let path = path.trim_start_matches('/');
        if path.is_empty() || !self.names.insert(path.to_owned()) {
            return;
        }
        // inode, mode, owner, group, links, time, length, four device numbers, length of the name
        // with its NUL, checksum.
        let fields = [self.names.len(), mode as usize, 0, 0, 1, 0, bytes.len()];
        let fields = fields.into_iter().chain([0; 4]).chain([path.len() + 1, 0]);
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(bytes);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[test]
fn the_bytes_are_those_of_newc() {
    let mut archive = Archive::default();
    archive.file("/bin/x", b"hello");
    let bytes = archive.finish();
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.starts_with("07070100000001000041ed"), "{text}");
    assert!(text.contains("bin/x\0hello\0\0\x00070701"), "{text}");
    assert!(bytes.len().is_multiple_of(4) && text.contains("TRAILER!!!\0"), "{text}");
}

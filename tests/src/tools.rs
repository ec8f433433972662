//! Foreign programs that judge mica, and the Debian packages that have them.

use std::io::Write;
use std::path::{Path, PathBuf};

/// A foreign program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tool {
    /// What it is called.
    pub program: &'static str,
    /// Debian packages that may have it, the likeliest first.
    pub packages: &'static [&'static str],
}

macro_rules! tools {
    ($($name:ident = $program:literal in $packages:expr;)+) => {
        $(
            #[doc = concat!("`", $program, "`")]
            pub const $name: Tool = Tool { program: $program, packages: &$packages };
        )+
        /// All of them.
        pub const ALL: &[Tool] = &[$($name),+];
    };
}

tools! {
    QEMU_IMG = "qemu-img" in ["qemu-utils"];
    QEMU_IO = "qemu-io" in ["qemu-utils"];
    QEMU_NBD = "qemu-nbd" in ["qemu-utils"];
    QEMU_STORAGE_DAEMON = "qemu-storage-daemon" in ["qemu-utils", "qemu-system-common", "qemu-block-extra"];
    NBDINFO = "nbdinfo" in ["libnbd-bin"];
    NBDCOPY = "nbdcopy" in ["libnbd-bin"];
    NBDFUSE = "nbdfuse" in ["libnbd-bin", "nbdfuse"];
    NBDSH = "nbdsh" in ["python3-libnbd"];
    NBDKIT = "nbdkit" in ["nbdkit"];
    FIO = "fio" in ["fio"];
    STRACE = "strace" in ["strace"];
    MKE2FS = "mke2fs" in ["e2fsprogs"];
    DEBUGFS = "debugfs" in ["e2fsprogs"];
    E2FSCK = "e2fsck" in ["e2fsprogs"];
    MKFS_XFS = "mkfs.xfs" in ["xfsprogs"];
    XFS_IO = "xfs_io" in ["xfsprogs"];
    XFS_REPAIR = "xfs_repair" in ["xfsprogs"];
    QEMU_SYSTEM = "qemu-system-x86_64" in ["qemu-system-x86"];
    SGDISK = "sgdisk" in ["gdisk"];
    BLKDISCARD = "blkdiscard" in ["util-linux"];
    PROMTOOL = "promtool" in ["prometheus"];
    DB_BENCH = "db_bench" in ["rocksdb-tools"];
    JQ = "jq" in ["jq"];
    XXD = "xxd" in ["xxd", "vim-common"];
    OPENSSL = "openssl" in ["openssl"];
    MAN = "man" in ["man-db"];
    MANDOC = "mandoc" in ["mandoc"];
    DPKG = "dpkg" in ["dpkg"];
    DPKG_DEB = "dpkg-deb" in ["dpkg"];
    SCRIPT = "script" in ["bsdutils"];
    CEPH = "ceph" in ["ceph-common"];
    CEPH_MON = "ceph-mon" in ["ceph-mon"];
    CEPH_OSD = "ceph-osd" in ["ceph-osd"];
}

impl Tool {
    /// Where it is, if it is installed.
    pub fn find(self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path)
            .chain(["/usr/sbin".into(), "/sbin".into()])
            .map(|folder: PathBuf| folder.join(self.program))
            .find(|file| is_program(file))
    }

    /// Whether it is installed.
    pub fn is_there(self) -> bool {
        self.find().is_some()
    }
}

fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Whether all `tools` are there, so that a test can run. If not, the test says SKIPPED and why,
/// past the test harness's capture; under CI, where nothing may be skipped, it fails.
///
/// # Panics
/// Under CI, if a tool is missing.
#[must_use = "a test without its tools has to end"]
pub fn present(tools: &[Tool]) -> bool {
    none_missing(&missing(tools))
}

/// What of `tools` is not there, in words.
pub fn missing(tools: &[Tool]) -> Vec<String> {
    let missing = tools.iter().filter(|tool| !tool.is_there());
    missing
        .map(|tool| format!("{} (Debian: {})", tool.program, tool.packages.join(" or ")))
        .collect()
}

/// Whether nothing is `missing`; says and does else what [`present`] does.
///
/// # Panics
/// Under CI, if anything is missing.
#[must_use = "a test without its tools has to end"]
pub fn none_missing(missing: &[String]) -> bool {
    if missing.is_empty() {
        return true;
    }
    let message = format!("needs {}; `cargo xtask setup` installs it", missing.join(", "));
    assert!(std::env::var_os("CI").is_none(), "{message}");
    skip(&message);
    false
}

/// Says that the calling test is skipped and why, past the test harness's capture.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // Nobody listens to standard error: then nobody misses the line.
    let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {why}");
}

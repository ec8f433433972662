//! The texts that Debian asks of a package.

use super::output;
use super::stage::Stage;
use anyhow::{Context, Result};
use mica_tests::shell;
use std::path::Path;
use std::process::Command;

/// Who answers for the package, unless DEBFULLNAME and DEBEMAIL say so.
const MAINTAINER: (&str, &str) = ("mica maintainers", "maintainers@mica.invalid");

const DESCRIPTION: &str = "\
virtual disks at one speed, however many snapshots are beneath
 mica serves qcow2 chains that QEMU made, and raw images, to virtual machines
 (vhost-user-blk), over NBD, and as files (FUSE), as fast with a thousand
 layers as with one. It also creates, converts, checks, compares and measures
 images, with the options of qemu-img.
 .
 The service serves what /etc/mica.toml lists; an upgrade of the package
 replaces the server while its guests pause for a moment.
";

/// The control file.
pub(super) fn control(
    stage: &Stage,
    program: &Path,
    version: &str,
    architecture: &str,
) -> Result<String> {
    let maintainer = maintainer();
    let kib = stage.kib()?;
    let libraries = libraries(program)?;
    Ok(format!(
        "Package: mica\nVersion: {version}\nArchitecture: {architecture}\n\
         Maintainer: {maintainer}\nInstalled-Size: {kib}\n\
         Depends: {libraries}, systemd | systemd-standalone-sysusers | systemd-sysusers\n\
         Suggests: fuse3, libnbd-bin, qemu-utils\nSection: admin\nPriority: optional\n\
         Description: {DESCRIPTION}"
    ))
}

/// The packages of the libraries that `program` is linked with. That of the C library has to be as
/// new as the newest symbol that is used.
fn libraries(program: &Path) -> Result<String> {
    let symbols = output(Command::new("readelf").args(["--wide", "--version-info"]).arg(program))?;
    let newest = newest_glibc(&symbols).context("the program names no version of the C library")?;
    let needed = output(Command::new("readelf").args(["--wide", "--dynamic"]).arg(program))?;
    let gcc = if needed.contains("[libgcc_s.so.1]") { ", libgcc-s1" } else { "" };
    Ok(format!("libc6 (>= {}.{}){gcc}", newest.0, newest.1))
}

/// The newest version among the symbols that `readelf` lists.
fn newest_glibc(symbols: &str) -> Option<(u32, u32)> {
    let versions = symbols.split_whitespace().filter_map(|word| word.strip_prefix("GLIBC_"));
    let versions = versions.filter_map(|version| {
        let mut parts = version.split('.').map(str::parse);
        Some((parts.next()?.ok()?, parts.next()?.ok()?))
    });
    versions.max()
}

/// Debian's own log of the package.
pub(super) fn changelog(version: &str, epoch: &str) -> Result<String> {
    let date = output(Command::new("date").args(["--utc", "-R", "-d", &format!("@{epoch}")]))?;
    let maintainer = maintainer();
    Ok(format!(
        "mica ({version}) unstable; urgency=medium\n\n  * See NEWS.md.gz.\n\n \
         -- {maintainer}  {date}\n"
    ))
}

/// Who may do what with it, in the form that programs can read.
pub(super) fn copyright() -> Result<String> {
    let mit = std::fs::read_to_string(shell::root().join("LICENSE-MIT"))?;
    let holder = mit.lines().find_map(|line| line.strip_prefix("Copyright (c) "));
    let holder = holder.context("LICENSE-MIT names nobody")?;
    let terms = mit.split_once("\n\n").and_then(|(_, rest)| rest.split_once("\n\n"));
    let (_, terms) = terms.context("LICENSE-MIT has no text")?;
    let terms: String = terms
        .trim()
        .lines()
        .map(|line| if line.is_empty() { " .\n".to_owned() } else { format!(" {line}\n") })
        .collect();
    Ok(format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: mica\n\n\
         Files: *\nCopyright: {holder}\nLicense: Expat or Apache-2.0\n\
         Comment: Libraries in Rust are part of the program. third-party.gz beside this file lists\n \
         them, with their licences.\n\n\
         License: Expat\n{terms}\n\
         License: Apache-2.0\n On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.\n"
    ))
}

fn maintainer() -> String {
    let told = |name, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    format!("{} <{}>", told("DEBFULLNAME", MAINTAINER.0), told("DEBEMAIL", MAINTAINER.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_symbol_counts_by_number_and_not_by_letter() {
        let symbols = "0x01: Name: GLIBC_2.9  Flags: none\n 0x02: Name: GLIBC_2.34 \
                       GLIBC_2.2.5 GCC_4.2.0 GLIBC_ABI_DT_RELR";
        assert_eq!(newest_glibc(symbols), Some((2, 34)));
        assert_eq!(newest_glibc("GCC_3.0"), None);
    }
}

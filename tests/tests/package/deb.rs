//! The Debian package, made from the program under test.

use mica_tests::command::{self, Finished};
use mica_tests::tools::{self, DPKG, DPKG_DEB, MAN};
use mica_tests::{mica, shell};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Making it may build the program that does so.
const LIMIT: Duration = Duration::from_secs(1800);

/// Makes the package in `dir`.
fn package(dir: &Path) -> PathBuf {
    let mut make = shell::cargo(["xtask", "deb", "--compression", "none", "--program"]);
    make.arg(mica::binary()).arg("--into").arg(dir).env("SOURCE_DATE_EPOCH", "1795222902");
    let said = command::finish_within(&mut make, LIMIT).ok();
    said.lines().last().expect("a package").into()
}

/// Runs dpkg on the root in `root`. Scripts of the package run outside of it, as it has no shell,
/// and are told to leave this machine alone.
fn dpkg(root: &Path, words: &[&str]) -> Finished {
    let mut dpkg = Command::new("dpkg");
    dpkg.arg(format!("--root={}", root.display())).args(["--force-script-chrootless"]);
    // The root has neither libraries nor, in a container, documentation.
    dpkg.args(["--force-depends", "--path-include=/usr/share/*"]).args(words);
    command::finish(&mut dpkg)
}

#[test]
fn package_is_installed_shows_its_pages_and_leaves_nothing_when_purged() {
    if !tools::present(&[DPKG, DPKG_DEB, MAN]) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return tools::skip("dpkg installs as root");
    }
    let dir = tempfile::tempdir().expect("a folder");
    let package = package(dir.path());
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("var/lib/dpkg/updates")).expect("a root");
    fs::create_dir_all(root.join("var/lib/dpkg/info")).expect("a root");
    fs::create_dir_all(root.join("etc")).expect("a root");
    fs::write(root.join("var/lib/dpkg/status"), "").expect("a root");
    dpkg(&root, &["--install", package.to_str().expect("text")]).ok();

    let version = |program: &Path| command::finish(Command::new(program).arg("--version")).ok();
    assert_eq!(version(&root.join("usr/bin/mica")), version(mica::binary()));
    let mut man = Command::new("man");
    man.arg("-M").arg(root.join("usr/share/man")).arg("mica-ctl-add");
    let page = command::finish(man.env("MANWIDTH", "80").env("LC_ALL", "C.UTF-8")).ok();
    assert!(page.starts_with("MICA-CTL-ADD(1)"), "{page}");
    let users = fs::read_to_string(root.join("etc/passwd")).expect("users");
    assert!(users.lines().any(|user| user.starts_with("mica:")), "{users}");
    let wanted = root.join("etc/systemd/system/multi-user.target.wants/mica.service");
    assert!(wanted.is_symlink(), "its service is not enabled");
    // Once more is an upgrade.
    for _ in 0..2 {
        let verified = dpkg(&root, &["--verify", "mica"]).ok();
        assert_eq!(verified, "", "files are not those of the package");
        dpkg(&root, &["--install", package.to_str().expect("text")]).ok();
        assert!(wanted.is_symlink(), "its service is not enabled");
    }

    fs::write(root.join("etc/mica.toml"), "").expect("a configuration");
    dpkg(&root, &["--remove", "mica"]).ok();
    dpkg(&root, &["--purge", "mica"]).ok();
    assert!(!root.join("usr/bin/mica").exists() && !wanted.is_symlink(), "something is left");
    assert!(root.join("etc/mica.toml").exists(), "what an administrator wrote is theirs");
}

#[test]
fn package_has_everything_in_its_place_and_is_the_same_each_time() {
    if !tools::present(&[DPKG_DEB]) {
        return;
    }
    let dirs = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
    let packages = dirs.each_ref().map(|dir| package(dir.path()));
    let [first, second] = packages.each_ref().map(|package| fs::read(package).expect("a package"));
    assert!(first == second, "two packages of the same program differ");

    let list = command::run("dpkg-deb", ["--contents".as_ref(), packages[0].as_os_str()]).ok();
    for (mode, name) in [
        ("-rwxr-xr-x", "./usr/bin/mica"),
        ("-rw-r--r--", "./usr/share/man/man1/mica.1.gz"),
        ("-rw-r--r--", "./usr/share/man/man1/mica-ctl-add.1.gz"),
        ("-rw-r--r--", "./usr/share/bash-completion/completions/mica"),
        ("-rw-r--r--", "./usr/share/zsh/vendor-completions/_mica"),
        ("-rw-r--r--", "./usr/share/fish/vendor_completions.d/mica.fish"),
        ("-rw-r--r--", "./usr/lib/systemd/system/mica.service"),
        ("-rw-r--r--", "./usr/lib/systemd/system/mica@.socket"),
        ("-rw-r--r--", "./usr/lib/sysusers.d/mica.conf"),
        ("-rw-r--r--", "./usr/share/doc/mica/docs/volumes.md.gz"),
        ("-rw-r--r--", "./usr/share/doc/mica/docs/monitoring/alerts.yml"),
        ("-rw-r--r--", "./usr/share/doc/mica/docs/monitoring/dashboard.json"),
        ("-rw-r--r--", "./usr/share/doc/mica/copyright"),
        ("-rw-r--r--", "./usr/share/doc/mica/changelog.gz"),
        ("-rw-r--r--", "./usr/share/doc/mica/third-party.gz"),
    ] {
        let line = list.lines().find(|line| line.ends_with(&format!(" {name}")));
        let line = line.unwrap_or_else(|| panic!("no {name}:\n{list}"));
        assert!(line.starts_with(mode) && line.contains(" root/root "), "{line}");
    }
    // What the README names is there, compressed or not.
    let readme = fs::read_to_string(shell::root().join("README.md")).expect("the README");
    for named in readme.split("](docs/").skip(1).filter_map(|rest| rest.split(')').next()) {
        let is_there = |name: &str| list.lines().any(|line| line.ends_with(name));
        let doc = format!("/doc/mica/docs/{named}");
        let unit = format!("/systemd/system/{named}");
        assert!([&doc, &format!("{doc}.gz"), &unit].iter().any(|name| is_there(name)), "{named}");
    }
    let field = |name: &str| {
        let asked = ["--field".as_ref(), packages[0].as_os_str(), name.as_ref()];
        command::run("dpkg-deb", asked).ok().trim().to_owned()
    };
    assert_eq!(format!("mica {}", field("Version")), mica::run(["--version"]).ok().trim());
    assert!(field("Depends").starts_with("libc6 (>= 2."), "{}", field("Depends"));
}

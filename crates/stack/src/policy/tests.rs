use super::*;
use std::os::unix::fs::{MetadataExt, symlink};
use tempfile::TempDir;

/// `chain/` with a top image and a base, `outside/` with a secret, both in one folder.
struct Folder {
    folder: TempDir,
}

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for directory in ["chain/below", "outside", "pool"] {
            std::fs::create_dir_all(folder.path().join(directory)).expect("a folder");
        }
        let made = Self { folder };
        for file in ["chain/top", "chain/base", "chain/below/deep", "outside/secret", "pool/real"] {
            std::fs::write(made.path(file), file).expect("a file");
        }
        made
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().expect("a folder").join(name)
    }

    fn link(&self, from: &str, to: &str) {
        symlink(self.path(to), self.path(from)).expect("a link");
    }

    fn policy(&self, named: &str, allow: &[&str]) -> Policy {
        let allow: Vec<PathBuf> = allow.iter().map(|name| self.path(name)).collect();
        Policy::new(&self.path(named), Names::Beside, &allow).expect("a policy")
    }

    /// What the top image of `policy` gets for `name`.
    fn get(&self, policy: &Policy, name: &str) -> Result<PathBuf> {
        let path = policy.resolve(&self.path("chain/top"), Path::new(name))?;
        policy.find(&path)?.real_path()
    }
}

#[test]
fn files_beside_and_below_the_named_image_are_opened() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &[]);
    for (name, real) in [
        ("base", "chain/base"),
        ("./base", "chain/base"),
        ("below/deep", "chain/below/deep"),
        ("below/../base", "chain/base"),
        ("../chain/base", "chain/base"),
    ] {
        assert_eq!(folder.get(&policy, name).unwrap(), folder.path(real), "{name}");
    }
    let absolute = folder.path("chain/base");
    assert_eq!(folder.get(&policy, absolute.to_str().unwrap()).unwrap(), absolute);
}

#[test]
fn file_that_was_resolved_and_not_opened_is_looked_up_again_after_a_name_that_was_refused() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &[]);
    let top = folder.path("chain/top");
    let base = policy.resolve(&top, Path::new("base")).unwrap();
    std::fs::write(folder.path("chain/new"), "another").unwrap();
    std::fs::rename(folder.path("chain/new"), &base).unwrap();
    policy.resolve(&top, Path::new("nbd://host")).unwrap_err();
    let inode = std::fs::metadata(&base).unwrap().ino();
    assert_eq!(policy.find(&base).unwrap().identity(0).inode, inode);
}

/// CVE-2015-5163, CVE-2024-32498 and their kin: a name in an image that leads elsewhere.
#[test]
fn files_elsewhere_are_refused_and_the_option_is_named() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &[]);
    let secret = folder.path("outside/secret");
    for name in ["../outside/secret", secret.to_str().unwrap(), "below/../../outside/secret"] {
        let error = folder.get(&policy, name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{name}");
        let option = format!("--allow-path {}", folder.path("outside").display());
        assert!(error.to_string().ends_with(&option), "{error}");
    }
    assert_eq!(folder.get(&policy, "/etc/shadow").unwrap_err().kind(), ErrorKind::Denied);
    let allowed = folder.policy("chain/top", &["outside"]);
    assert_eq!(folder.get(&allowed, "../outside/secret").unwrap(), secret);
}

#[test]
fn single_file_can_be_allowed() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &["outside/secret"]);
    assert!(folder.get(&policy, "../outside/secret").is_ok());
    assert_eq!(folder.get(&policy, "../pool/real").unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn directory_whose_name_starts_alike_is_elsewhere() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("chain2")).unwrap();
    std::fs::write(folder.path("chain2/file"), "x").unwrap();
    let policy = folder.policy("chain/top", &[]);
    assert_eq!(folder.get(&policy, "../chain2/file").unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn symbolic_links_that_lead_out_are_refused_unless_allowed() {
    let folder = Folder::new();
    folder.link("chain/link", "outside/secret");
    folder.link("chain/folder", "outside");
    folder.link("chain/inside", "chain/base");
    let policy = folder.policy("chain/top", &[]);
    assert_eq!(folder.get(&policy, "link").unwrap_err().kind(), ErrorKind::Denied);
    assert_eq!(folder.get(&policy, "folder/secret").unwrap_err().kind(), ErrorKind::Denied);
    assert!(folder.get(&policy, "inside").is_ok());
    let allowed = folder.policy("chain/top", &["outside"]);
    assert!(folder.get(&allowed, "link").is_ok());
    assert!(folder.get(&allowed, "folder/secret").is_ok());
}

/// The user's own link is the user's word, and the image has its chain where it really is.
#[test]
fn named_link_is_followed_and_both_its_folders_are_open() {
    let folder = Folder::new();
    folder.link("chain/named", "pool/real");
    std::fs::write(folder.path("pool/base"), "x").unwrap();
    let policy = folder.policy("chain/named", &[]);
    assert!(policy.find(&folder.path("chain/named")).is_ok());
    assert!(folder.get(&policy, "base").is_ok());
    assert!(folder.get(&policy, folder.path("pool/base").to_str().unwrap()).is_ok());
    assert_eq!(folder.get(&policy, "../outside/secret").unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn name_with_a_protocol_is_never_followed() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &[]);
    std::fs::write(folder.path("chain/a:b"), "x").unwrap();
    for name in ["nbd:unix:/tmp/x", "json:{}", "file:/etc/passwd", "fat:rw:/", "a:b", "https://x/y"]
    {
        assert_eq!(folder.get(&policy, name).unwrap_err().kind(), ErrorKind::Unsupported, "{name}");
    }
    // A slash before the colon makes it a path, as in QEMU.
    assert!(folder.get(&policy, "./a:b").is_ok());
}

#[test]
fn empty_name_and_name_with_a_zero_byte_are_refused() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &[]);
    for name in ["", "base\0", "\0"] {
        assert_eq!(folder.get(&policy, name).unwrap_err().kind(), ErrorKind::Invalid, "{name:?}");
    }
}

#[test]
fn missing_files_are_reported_only_in_allowed_places() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &[]);
    assert_eq!(folder.get(&policy, "missing").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(folder.get(&policy, "missing/deep").unwrap_err().kind(), ErrorKind::NotFound);
    for name in ["../outside/missing", "/missing/deep", "missing/../../outside/secret"] {
        assert_eq!(folder.get(&policy, name).unwrap_err().kind(), ErrorKind::Denied, "{name}");
    }
}

#[test]
fn what_is_not_an_image_is_refused_even_in_an_allowed_place() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &[]);
    assert_eq!(folder.get(&policy, "below").unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(folder.get(&policy, "/dev/zero").unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn devices_and_the_root_are_never_allowed_by_what_lies_in_them() {
    assert!(may_be_implied(Path::new("/var/lib/images")));
    for place in ["/", "/dev", "/dev/mapper", "/proc/self/fd", "/sys"] {
        assert!(!may_be_implied(Path::new(place)), "{place}");
    }
}

#[test]
fn missing_named_image_is_reported() {
    let folder = Folder::new();
    let error = Policy::new(&folder.path("chain/missing"), Names::Beside, &[]).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let allow = [folder.path("missing")];
    let error = Policy::new(&folder.path("chain/top"), Names::Beside, &allow).err().unwrap();
    assert!(error.to_string().contains("--allow-path"), "{error}");
}

#[test]
fn hostile_bytes_of_a_name_do_not_reach_the_terminal() {
    let folder = Folder::new();
    let policy = folder.policy("chain/top", &[]);
    let error = folder.get(&policy, "../\u{1b}[2J\n/x y").unwrap_err();
    let text = error.to_string();
    assert!(!text.contains('\u{1b}') && !text.contains('\n'), "{text:?}");
}

#[test]
fn image_that_may_name_no_files_names_none_and_learns_nothing() {
    let folder = Folder::new();
    let policy = Policy::new(&folder.path("chain/top"), Names::None, &[]).expect("a policy");
    policy.find(&folder.path("chain/top")).expect("the user's own word");
    let mut told = Vec::new();
    for name in ["base", "missing", "../outside/secret"] {
        let error = folder.get(&policy, name).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Denied, "{name}: {error}");
        told.push(error.to_string().replace(name, "NAME"));
    }
    assert!(told[0].contains("--names none") && told.iter().all(|line| *line == told[0]));
    assert!(policy.find(&folder.path("chain/base")).is_err());
}

#[test]
fn directories_that_are_given_take_the_place_of_the_images_own() {
    let folder = Folder::new();
    let given = [folder.path("pool")];
    let policy = Policy::new(&folder.path("chain/top"), Names::Given, &given).expect("a policy");
    assert_eq!(folder.get(&policy, "../pool/real").expect("allowed"), folder.path("pool/real"));
    for name in ["base", "below/deep"] {
        let error = folder.get(&policy, name).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Denied, "{name}: {error}");
    }
}

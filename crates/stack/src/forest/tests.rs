use super::{Below, Forest, ForestImage, Lost, ScanDepth, ScanOptions, images_on};
use mica_block::Passphrase;
use mica_crypt::luks::{NewLuks, NewSlot, Wish};
use mica_qcow2_format::{BackingName, Compression, Header, L2Format, Version};
use mica_units::{ClusterBits, HostOffset, Rng};
use std::fs;
use std::num::NonZeroU32;
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// The header of an image of 1 MiB that stands on `backing`, in this format if it states one.
fn header(backing: Option<(&str, Option<&str>)>) -> Vec<u8> {
    let l2 = L2Format {
        cluster_bits: ClusterBits::new(16).expect("64 KiB"),
        version: Version::V3,
        extended: false,
        data_file: false,
    };
    let header = Header {
        size: 1 << 20,
        l1_entries: 1,
        l1_offset: HostOffset::new(3 << 16),
        refcount_table_offset: HostOffset::new(1 << 16),
        refcount_table_clusters: 1,
        backing: backing.map(|(name, format)| BackingName {
            name: name.into(),
            format: format.map(str::to_owned),
        }),
        ..Header::new(l2, Compression::Deflate)
    };
    header.encode().expect("a header")
}

fn image(path: &Path, backing: Option<&str>) {
    let backing = backing.map(|name| (name, Some("qcow2")));
    fs::write(path, header(backing)).expect("there is room");
}

fn scan(folder: &Path) -> Forest {
    scan_with(&[folder], &ScanOptions::default())
}

fn scan_with(folders: &[&Path], options: &ScanOptions) -> Forest {
    let folders: Vec<PathBuf> = folders.iter().map(PathBuf::from).collect();
    Forest::scan(&folders, options, |_| ControlFlow::Continue(())).expect("the folders are there")
}

#[track_caller]
fn named<'a>(forest: &'a Forest, ending: &str) -> &'a ForestImage {
    let found = forest.images().iter().find(|image| image.path().ends_with(ending));
    found.unwrap_or_else(|| panic!("no {ending} in {forest:?}"))
}

/// The file names of the chain of the image with this ending, from the top.
#[track_caller]
fn chain(forest: &Forest, ending: &str) -> Vec<String> {
    let at = forest.of_file(named(forest, ending).file).expect("an image");
    let name = |id| forest.get(id).path().file_name().expect("a file").display().to_string();
    forest.chain(at).map(name).collect()
}

#[track_caller]
fn lost(forest: &Forest, ending: &str) -> Lost {
    match &named(forest, ending).below {
        Below::Lost { why, .. } => why.clone(),
        other => panic!("{ending} stands on {other:?}"),
    }
}

#[test]
fn chains_are_found_by_relative_and_absolute_names_and_json() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::create_dir(dir.join("gold")).expect("a folder");
    image(&dir.join("gold/base.qcow2"), None);
    image(&dir.join("one.qcow2"), Some("gold/base.qcow2"));
    image(&dir.join("two.qcow2"), Some(&dir.join("one.qcow2").display().to_string()));
    let json = format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{}"}}}}"#,
        dir.join("one.qcow2").display()
    );
    image(&dir.join("three.qcow2"), Some(&json));
    fs::write(dir.join("notes.txt"), "no image").expect("there is room");
    let forest = scan(dir);
    assert_eq!(forest.images().len(), 4);
    assert_eq!(forest.problems(), []);
    assert_eq!(chain(&forest, "two.qcow2"), ["two.qcow2", "one.qcow2", "base.qcow2"]);
    assert_eq!(chain(&forest, "three.qcow2"), ["three.qcow2", "one.qcow2", "base.qcow2"]);
    let one = named(&forest, "one.qcow2");
    assert_eq!((one.depth, one.overlays.len(), one.chains), (1, 2, 2));
    assert_eq!(named(&forest, "two.qcow2").depth, 2);
    assert_eq!(forest.roots().len(), 1);
    assert_eq!(forest.active().count(), 2);
    assert_eq!(one.virtual_bytes, 1 << 20);
}

/// The story: after a kill in a snapshot every commit into that layer was refused.
#[test]
fn layers_that_a_killed_server_was_about_to_add_are_no_images() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(&dir.join("vm.qcow2"), None);
    let of_old = ".vm@monday.qcow2.new";
    for name in [
        ".vm-1.qcow2.mica-new",
        ".vm.qcow2.mica-new",
        ".vm-2.qcow2.mica-unfinished",
        of_old,
        ".other.qcow2",
    ] {
        image(&dir.join(name), Some("vm.qcow2"));
    }
    let forest = scan(dir);
    let paths = forest.images().iter().map(|image| image.path().to_owned());
    let mut paths: Vec<_> = paths.collect();
    paths.sort();
    assert_eq!(paths, [dir.join(".other.qcow2"), dir.join("vm.qcow2")]);
    let on = images_on(&[dir.join("vm.qcow2")], &[dir.to_owned()], ScanDepth::OneLevel);
    assert_eq!(on.expect("listed").found.len(), 1);
}

#[test]
fn names_that_mica_would_not_follow_are_understood_and_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(&dir.join("base.qcow2"), None);
    let base = dir.join("base.qcow2").display().to_string();
    image(&dir.join("file.qcow2"), Some(&format!("file:{base}")));
    let json = format!(r#"json:{{"file":{{"driver":"file","filename":"{base}","aio":"native"}}}}"#);
    image(&dir.join("json.qcow2"), Some(&json));
    image(&dir.join("nbd.qcow2"), Some("nbd:localhost:10809"));
    image(&dir.join("relative.qcow2"), Some("file:base.qcow2"));
    let forest = scan(dir);
    for name in ["file.qcow2", "json.qcow2"] {
        assert_eq!(chain(&forest, name), [name, "base.qcow2"]);
        let is_named = forest.problems().iter().any(|problem| problem.path.ends_with(name));
        assert!(is_named, "{name}: {:?}", forest.problems());
    }
    for name in ["nbd.qcow2", "relative.qcow2"] {
        assert!(matches!(lost(&forest, name), Lost::Other(_)), "{name}");
    }
}

#[test]
fn links_of_both_kinds_are_names_of_one_image() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::create_dir(dir.join("other")).expect("a folder");
    image(&dir.join("base.qcow2"), None);
    image(&dir.join("other/base.qcow2"), None);
    image(&dir.join("top.qcow2"), Some("base.qcow2"));
    symlink("base.qcow2", dir.join("link.qcow2")).expect("a link");
    image(&dir.join("by-link.qcow2"), Some("link.qcow2"));
    fs::hard_link(dir.join("top.qcow2"), dir.join("other/top.qcow2")).expect("a link");
    symlink("none.qcow2", dir.join("dead.qcow2")).expect("a link");
    symlink(".", dir.join("self")).expect("a link");
    let forest = scan(dir);
    assert_eq!(forest.images().len(), 4, "{forest:?}");
    assert_eq!(chain(&forest, "by-link.qcow2"), ["by-link.qcow2", "base.qcow2"]);
    assert_eq!(named(&forest, "top.qcow2").names.len(), 2);
    assert!(forest.problems()[0].what.contains("under this name it stands on"));
    // Whoever changes either of the two bases must know of it.
    for base in ["base.qcow2", "other/base.qcow2"] {
        let on = images_on(&[dir.join(base)], &[dir.to_owned()], ScanDepth::All).expect("asked");
        let uppers: Vec<_> = on.found.iter().map(|(upper, _)| upper.clone()).collect();
        assert!(uppers.contains(&dir.join("top.qcow2")), "{base}: {uppers:?}");
    }
}

#[test]
fn what_is_missing_or_elsewhere_or_broken_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let secret = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(&secret.path().join("base.qcow2"), None);
    let there = secret.path().join("base.qcow2").display().to_string();
    let not_there = secret.path().join("none.qcow2").display().to_string();
    image(&dir.join("missing.qcow2"), Some("none.qcow2"));
    image(&dir.join("outside.qcow2"), Some(&there));
    image(&dir.join("outside-none.qcow2"), Some(&not_there));
    let mut broken = header(None);
    broken[20..24].copy_from_slice(&99_u32.to_be_bytes());
    fs::write(dir.join("broken.qcow2"), broken).expect("there is room");
    image(&dir.join("on-broken.qcow2"), Some("broken.qcow2"));
    let forest = scan(dir);
    assert_eq!(lost(&forest, "missing.qcow2"), Lost::Missing);
    assert_eq!(lost(&forest, "outside.qcow2"), Lost::Outside);
    assert_eq!(lost(&forest, "outside-none.qcow2"), Lost::Outside, "nothing is told of elsewhere");
    assert!(matches!(lost(&forest, "on-broken.qcow2"), Lost::Other(_)));
    assert!(forest.problems().iter().any(|problem| problem.path.ends_with("broken.qcow2")));
    let allowed = vec![secret.path().to_owned()];
    let options = ScanOptions { allow_paths: allowed, ..ScanOptions::default() };
    let forest = scan_with(&[dir], &options);
    assert_eq!(chain(&forest, "outside.qcow2"), ["outside.qcow2", "base.qcow2"]);
    assert_eq!(lost(&forest, "outside-none.qcow2"), Lost::Missing);
}

#[test]
fn raw_bases_join_and_formats_that_contradict_are_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("disk.raw"), vec![0; 3000]).expect("there is room");
    fs::write(dir.join("unused.raw"), vec![0; 3000]).expect("there is room");
    image(&dir.join("base.qcow2"), None);
    let over = |name: &str, backing: &str, format: Option<&str>| {
        fs::write(dir.join(name), header(Some((backing, format)))).expect("there is room");
    };
    over("good.qcow2", "disk.raw", Some("raw"));
    over("unstated.qcow2", "base.qcow2", None);
    over("lies.qcow2", "disk.raw", Some("qcow2"));
    let forest = scan(dir);
    assert_eq!(chain(&forest, "good.qcow2"), ["good.qcow2", "disk.raw"]);
    let raw = named(&forest, "disk.raw");
    assert_eq!((raw.virtual_bytes, raw.qcow2.is_none(), raw.overlays.len()), (3072, true, 2));
    let named: Vec<_> = forest.problems().iter().map(|problem| &problem.path).collect();
    assert_eq!(named, [&dir.join("lies.qcow2"), &dir.join("unstated.qcow2")]);
    assert!(forest.images().iter().all(|image| !image.path().ends_with("unused.raw")));
}

/// The story: the LUKS image beneath a chain was called raw, and as long as its file.
#[test]
fn luks_image_is_known_by_what_stands_on_it_and_by_nothing_else() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let slot = NewSlot::Iterations(NonZeroU32::MIN);
    let passphrase = Passphrase::new("a test", Zeroizing::new(b"words".to_vec()));
    let luks = NewLuks::make(Wish { slot, ..Wish::default() }, &passphrase).expect("made");
    let mut bytes = luks.bytes().to_vec();
    bytes.resize(usize::try_from(luks.header().payload_offset()).expect("small") + 5120, 0);
    for name in ["disk.luks", "guest.raw"] {
        fs::write(dir.join(name), &bytes).expect("there is room");
    }
    fs::write(dir.join("other.raw"), vec![0; 3000]).expect("there is room");
    for (name, backing, format) in [
        ("good.qcow2", "disk.luks", "luks"),
        ("again.qcow2", "disk.luks", "luks"),
        ("raw.qcow2", "guest.raw", "raw"),
        ("lies.qcow2", "other.raw", "luks"),
    ] {
        fs::write(dir.join(name), header(Some((backing, Some(format))))).expect("there is room");
    }
    let forest = scan(dir);
    let found = |name| {
        let image = named(&forest, name);
        (image.is_luks, image.virtual_bytes)
    };
    assert_eq!(found("disk.luks"), (true, 5120));
    assert_eq!(found("guest.raw"), (false, bytes.len() as u64), "a guest may encrypt, too");
    assert_eq!(found("other.raw"), (false, 3072));
    let odd: Vec<_> = forest.problems().iter().map(|problem| &problem.path).collect();
    assert_eq!(odd, [&dir.join("lies.qcow2")]);
}

#[test]
fn loops_are_cut_and_what_stands_on_them_stays() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(&dir.join("self.qcow2"), Some("self.qcow2"));
    for (name, below) in [("a", "b"), ("b", "c"), ("c", "a"), ("top", "b")] {
        image(&dir.join(format!("{name}.qcow2")), Some(&format!("{below}.qcow2")));
    }
    let forest = scan(dir);
    assert_eq!(forest.roots().len(), 2);
    assert_eq!(lost(&forest, "self.qcow2"), Lost::Loop);
    assert_eq!(forest.problems().len(), 2);
    assert!(chain(&forest, "top.qcow2").len() >= 2);
    let all: usize = forest.roots().iter().map(|root| forest.get(*root).chains).sum();
    assert_eq!(all, forest.active().count());
}

#[test]
fn one_level_is_one_folder_and_layers_elsewhere_are_known_by_their_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for folder in ["vm", "vm/deep", "gold"] {
        fs::create_dir(dir.join(folder)).expect("a folder");
    }
    image(&dir.join("gold/base.qcow2"), None);
    image(&dir.join("vm/a.qcow2"), Some("../gold/base.qcow2"));
    image(&dir.join("vm/deep/b.qcow2"), Some("../../gold/base.qcow2"));
    let uppers = |depth| {
        let on = images_on(&[dir.join("gold/base.qcow2")], &[dir.join("vm")], depth);
        let found = on.expect("asked").found.into_iter();
        found.map(|(upper, layer)| (upper, layer.ends_with("base.qcow2"))).collect::<Vec<_>>()
    };
    assert_eq!(uppers(ScanDepth::OneLevel), [(dir.join("vm/a.qcow2"), true)]);
    assert_eq!(uppers(ScanDepth::All).len(), 2);
    let none = images_on(&[dir.join("none.qcow2")], &[dir.join("vm")], ScanDepth::All);
    assert!(none.is_err(), "a layer that is not there");
}

#[test]
fn random_forests_are_found_as_they_were_made() {
    for seed in 0..20 {
        println!("seed {seed}");
        let dir = tempfile::tempdir().expect("a folder");
        let mut rng = Rng::new(seed);
        let count = 1 + rng.below(60);
        // What each stands on; some names form loops.
        let below: Vec<Option<u64>> =
            (0..count).map(|_| rng.percent(80).then(|| rng.below(count))).collect();
        for (number, below) in below.iter().enumerate() {
            let path = dir.path().join(format!("{number}.qcow2"));
            image(&path, below.map(|below| format!("{below}.qcow2")).as_deref());
        }
        let forest = scan(dir.path());
        assert_eq!(forest.images().len() as u64, count);
        let mut cut = 0;
        for (number, expected) in below.iter().enumerate() {
            let found = named(&forest, &format!("{number}.qcow2"));
            match (&found.below, expected) {
                (Below::Nothing, None) => {}
                (Below::Image(id), Some(below)) => {
                    assert!(forest.get(*id).path().ends_with(format!("{below}.qcow2")));
                    assert_eq!(found.depth, forest.get(*id).depth + 1);
                    assert!(forest.get(*id).chains >= found.chains);
                }
                (Below::Lost { why: Lost::Loop, .. }, Some(_)) => cut += 1,
                other => panic!("{number}: {other:?}"),
            }
        }
        assert_eq!(cut, forest.problems().len());
        let reached: usize = forest.active().map(|id| forest.chain(id).count()).max().unwrap_or(0);
        assert!(reached as u64 <= count);
    }
}

/// What strangers wrote: nothing panics, and each file is an image, a problem, or nothing.
#[test]
fn headers_that_were_tampered_with_are_named_or_left_out() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut rng = Rng::new(7);
    for number in 0..400 {
        let mut bytes = header(Some(("json:{\"file\":{\"filename\":\"/x\"}}", Some("raw"))));
        for _ in 0..1 + rng.below(12) {
            let at = usize::try_from(rng.below(bytes.len().min(600) as u64)).expect("small");
            bytes[at] = u8::try_from(rng.below(256)).expect("a byte");
        }
        bytes.truncate(usize::try_from(rng.below(bytes.len() as u64 + 1)).expect("small"));
        fs::write(dir.path().join(format!("{number}.qcow2")), bytes).expect("there is room");
    }
    let forest = scan(dir.path());
    let magic = |image: &&ForestImage| image.qcow2.is_some();
    assert_eq!(forest.files_seen(), 400);
    assert!(forest.images().iter().filter(magic).count() > 10);
    assert!(forest.problems().len() > 10);
}

use super::*;
use crate::settings::{Aio, Discards, IndexMode, NbdPlace, Size};
use mica_serve::Rates;
use mica_stack::Names;

fn read(text: &str) -> Result<Config> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("mica.toml");
    std::fs::write(&file, text).expect("writes");
    let checked = |config: Config| config.check().map(|()| config);
    Config::read(&file).and_then(checked).map(|mut config| {
        // Tests write paths as if the folder were /vm.
        let moved = |path: &mut PathBuf| {
            if let Ok(rest) = path.strip_prefix(folder.path()) {
                *path = Path::new("/vm").join(rest);
            }
        };
        for disk in &mut config.disks {
            moved(&mut disk.image);
            disk.settings.vhost_user.iter_mut().for_each(moved);
            disk.settings.fuse.iter_mut().for_each(moved);
            disk.images.allow_path.iter_mut().for_each(moved);
            for place in &mut disk.settings.nbd {
                if let NbdPlace::Unix(path) = place {
                    moved(path);
                }
            }
        }
        config
    })
}

/// Where NBD clients of a disk connect.
fn places(disk: &DiskConfig) -> Vec<String> {
    disk.settings.nbd.iter().map(NbdPlace::to_string).collect()
}

/// The error message for a configuration that is refused.
fn refused(text: &str) -> String {
    let error = read(text).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    let message = format!("{error:?}");
    assert!(!message.contains('\n'), "one line: {message}");
    message
}

#[test]
fn words_are_those_of_the_command_line_and_paths_start_from_the_folder() {
    let config = read(
        r#"
        queues = 3
        aio = "io_uring"
        [[disk]]
        name = "web1"
        image = "web1.qcow2"
        vhost-user = "run/web1.sock"
        nbd = ["web1.nbd", "tcp:127.0.0.1:0", "/abs/web1.nbd"]
        fuse = "web1.raw"
        num-queues = 2
        read-only = true
        discard = "ignore"
        index = "off"
        index-cache = "64M"
        iops = 100
        bps = "1M"
        bps-burst = 4096
        allow-path = ["bases"]
        redo-dir = "off"
        [[disk]]
        name = "zeros"
        image = "8G"
        format = "null"
        nbd = ["zeros.nbd"]
        "#,
    )
    .expect("understood");

    assert_eq!((config.process.queues, config.io.aio), (Some(3), Aio::IoUring));
    let web1 = &config.disks[0];
    assert_eq!(web1.image, Path::new("/vm/web1.qcow2"));
    assert_eq!(web1.settings.vhost_user.as_deref(), Some(Path::new("/vm/run/web1.sock")));
    assert_eq!(places(web1), ["/vm/web1.nbd", "tcp:127.0.0.1:0", "/abs/web1.nbd"]);
    assert_eq!(web1.settings.fuse.as_deref(), Some(Path::new("/vm/web1.raw")));
    assert_eq!((web1.settings.num_queues, web1.settings.read_only), (Some(2), true));
    assert_eq!((web1.settings.discard, web1.settings.index), (Discards::Ignore, IndexMode::Off));
    assert_eq!(web1.images.index_cache, Some(Size(64 << 20)));
    let rates = Rates { iops: 100, bps: 1 << 20, iops_burst: 0, bps_burst: 4096 };
    assert_eq!(web1.settings.rates(), rates);
    assert_eq!(web1.images.allow_path, [Path::new("/vm/bases")]);
    assert_eq!(web1.images.redo_dir, Path::new("off"));
    assert_eq!(config.disks[1].image, Path::new("8G"), "no path");
}

#[test]
fn disk_that_nothing_is_said_of_is_as_the_command_line_has_it() {
    let text = "[[disk]]\nname = 'a'\nimage = '/a.qcow2'\nnbd = ['/a.sock']\n";
    let read = read(text).expect("understood").disks.remove(0);
    let mut made = DiskConfig::new("a".to_owned(), PathBuf::from("/a.qcow2"));
    made.settings.nbd = vec![NbdPlace::Unix("/a.sock".into())];
    assert_eq!(format!("{read:?}"), format!("{made:?}"));
}

#[test]
fn what_is_not_understood_is_said_with_its_line() {
    let message = refused("[[disk]]\nname = 'a'\nimage = 'a'\nnbdd = ['x']\n");
    assert!(message.contains("line 4") && message.contains("`nbdd`"), "{message}");
    let message = refused("[[disk]]\nname = 'a'\nimage = 'a'\nnbd = ['x']\nbps = 'fast'\n");
    assert!(message.contains("line 5") && message.contains("invalid size \"fast\""), "{message}");
    let message = refused("[[disk]]\nname = 'a'\nimage = 'a'\nnbd = ['x']\nbps = -1\n");
    assert!(message.contains("cannot be negative"), "{message}");
    let message = refused("[[disk]]\nname = 'a'\nimage = 'a'\nnbd = ':10809'\n");
    let parts = ["mica.toml: line 4: disk \"a\": ", "write tcp:127.0.0.1:10809"];
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    // Its line is where its table begins.
    let message = refused("queues = 1\n[[disk]]\nname = 'a'\nimage = 'a'\n");
    assert!(message.contains("line 2: disk \"a\": nowhere to serve it"), "{message}");
    let message = refused("queues = [\n");
    assert!(message.contains("line"), "{message}");
}

#[test]
fn one_place_needs_no_list() {
    let at = |written: &str| {
        let text = format!("[[disk]]\nname = 'a'\nimage = 'i'\nnbd = {written}\n");
        places(&read(&text).expect("understood").disks[0])
    };
    assert_eq!(at("'a.sock'"), ["/vm/a.sock"]);
    assert_eq!(at("['unix:a.sock', 'unix:/b']"), ["/vm/a.sock", "/b"]);
    assert_eq!(at("'tcp:localhost:10809'"), ["tcp:127.0.0.1:10809"]);
}

#[test]
fn option_without_the_server_that_it_belongs_to_is_refused() {
    let at = |place: &str, option: &str| {
        format!("[[disk]]\nname = 'a'\nimage = 'i'\n{place}\n{option}\n")
    };
    let (nbd, machine, file) = ("nbd = ['/s']", "vhost-user = '/s'", "fuse = '/s'");
    let tcp = "nbd = ['tcp:127.0.0.1:0']";
    for (option, places, others) in [
        ("num-queues = 4", &[machine][..], &[nbd, file][..]),
        ("serial = 'a'", &[machine], &[nbd, file]),
        ("iops = 5", &[machine, nbd, file], &[]),
        ("bps = '1M'", &[machine, nbd, file], &[]),
        ("detect-zeroes = 'on'", &[machine, nbd, file], &[]),
        ("allow-other = 'auto'", &[file], &[nbd, machine]),
        ("export-name = ''", &[nbd, tcp], &[machine, file]),
        ("description = 'text'", &[nbd, tcp], &[machine, file]),
        ("shared = 256", &[nbd, tcp], &[machine, file]),
        ("tls = 'off'", &[nbd, tcp], &[machine, file]),
        ("tls-certificates = 'd'", &[nbd, tcp], &[machine, file]),
        ("allow-plain-tcp = true", &[tcp], &[nbd, machine, file]),
        ("tls-verify-peer = 'on'", &[], &[nbd, tcp, machine, file]),
        ("tls-certificates = 'd'\ntls-verify-peer = 'on'", &[nbd, tcp], &[]),
        ("iops-burst = 5", &[], &[machine]),
        ("iops = 5\niops-burst = 5", &[machine, nbd], &[]),
        ("bps-burst = 5", &[], &[machine]),
    ] {
        for place in places {
            read(&at(place, option)).expect(option);
        }
        for place in others {
            let message = refused(&at(place, option));
            let name = option.split(' ').next().expect("a name");
            assert!(message.contains(&format!("leave {name} out")), "{place}, {option}: {message}");
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let disk = |name: &str, rest: &str| format!("[[disk]]\nname = '{name}'\nimage = 'i'\n{rest}\n");
    let one = disk("a", "nbd = ['/s']");
    for (text, what) in [
        (String::new(), "no disk"),
        (disk("", "nbd = ['/s']"), "a name has"),
        (disk("../a", "nbd = ['/s']"), "a name has"),
        (disk(&"a".repeat(65), "nbd = ['/s']"), "a name has"),
        (disk("a", ""), "nowhere to serve"),
        (
            "stats-file = 'f'\n".to_owned() + &one + &disk("b", "nbd = ['/t']"),
            "stats-file covers a single disk",
        ),
        (disk("a", "nbd = ['/s', '/s']"), "used twice"),
        (disk("a", "nbd = ['/s']\nvhost-user = '/s'"), "used twice"),
        (one.clone() + &disk("b", "vhost-user = '/s'"), "the disk \"a\" (line 1) is served at /s"),
        (one.clone() + &disk("b", "fuse = '/s'"), "the disk \"a\" (line 1) is served at /s"),
        (
            one.clone() + &disk("b", "nbd = ['/s']\nexport-name = 'a'"),
            "line 5: disk \"b\": the disk \"a\" (line 1) is served at /s, too, with the same \
             export name \"a\"",
        ),
        (
            one.clone() + &disk("b", "nbd = ['/s']\ntls-certificates = 'pki'"),
            "line 5: disk \"b\": the disk \"a\" (line 1) is served at /s, too, with other settings \
             of TLS",
        ),
        (one.clone() + &disk("a", "nbd = ['/t']"), "another disk has this name"),
    ] {
        let message = refused(&text);
        assert!(message.contains(what), "{text}: {message}");
    }
    read(&(one + &disk("b", "nbd = ['/s', '/t']\nread-only = true"))).expect("they share /s");
    let ports = "nbd = ['tcp:127.0.0.1:0', 'tcp:127.0.0.1:0']";
    read(&disk("a", ports)).expect("the system chooses two ports");
}

#[test]
fn files_that_images_may_name_are_none_beside_or_given() {
    let disk = |names: &str| format!("[[disk]]\nname = 'a'\nimage = 'a'\nnbd = ['s']\n{names}");
    let named = |names: &str| {
        let config = read(&disk(names)).expect("understood");
        config.disks[0].images.named_files()
    };
    assert_eq!(named("").expect("sound"), (Names::Beside, Vec::new()));
    assert_eq!(named("names = 'beside'").expect("sound"), (Names::Beside, Vec::new()));
    assert_eq!(named("names = 'none'").expect("sound"), (Names::None, Vec::new()));
    let bases = vec![PathBuf::from("/bases")];
    assert_eq!(named("names = '/bases'").expect("sound"), (Names::Given, bases.clone()));
    assert_eq!(named("names = ['beside', '/bases']").expect("sound"), (Names::Beside, bases));
    let (names, given) = named("names = ['bases']").expect("sound");
    assert_eq!((names, given[0].is_absolute()), (Names::Given, true), "from the folder");
    let more = "names = ['/bases']\nallow-path = ['/more']";
    assert_eq!(named(more).expect("sound").1, ["/bases", "/more"].map(PathBuf::from));
    for contradiction in ["names = ['none', '/x']", "names = 'none'\nallow-path = ['/x']"] {
        let error = named(contradiction).expect_err("it contradicts itself");
        assert!(error.to_string().contains("--names none"), "{error}");
    }
}

/// With qemu-nbd 0 is no limit; here every client was turned away.
#[test]
fn number_that_admits_no_client_is_refused_by_name() {
    let message = refused("[[disk]]\nname = 'a'\nimage = 'i'\nnbd = ['/s']\nshared = 0\n");
    assert!(message.contains("shared 0"), "{message}");
}

fn drained(name: &str, image: &str) -> HandedOver {
    let image = Some(image.to_owned());
    HandedOver { name: name.to_owned(), is_closed: true, image, ..HandedOver::default() }
}

/// What stays drained when the process before has told of these disks.
fn left_drained(text: &str, told: Vec<HandedOver>) -> Vec<String> {
    let mut config = read(text).expect("understood");
    config.take_over(told).expect("it fits");
    config.drained.into_keys().collect()
}

#[test]
fn drained_disk_is_known_by_its_image_if_its_name_is_gone() {
    let writes = "[[disk]]\nname = 'x'\nimage = 'i'\nnbd = ['s']\n";
    assert_eq!(left_drained(writes, vec![drained("b", "/vm/i")]), ["x"]);
    let none: [&str; 0] = [];
    assert_eq!(left_drained(writes, vec![drained("b", "/vm/other")]), none);
    let reads = writes.to_owned() + "read-only = true\n";
    assert_eq!(left_drained(&reads, vec![drained("b", "/vm/i")]), none);
    // Its name is still there: another disk of the image is none of its business.
    let both = writes.to_owned() + "[[disk]]\nname = 'b'\nimage = 'i'\nnbd = ['t']\n";
    assert_eq!(left_drained(&both, vec![drained("b", "/vm/i")]), ["b"]);
    // One that the other process has, whether it serves it or failed to, is not the one that went.
    for is_served in [true, false] {
        let beside = HandedOver { name: "x".to_owned(), is_served, ..HandedOver::default() };
        assert_eq!(left_drained(writes, vec![drained("b", "/vm/i"), beside]), none);
    }
    // Of two of one image, the loss is what counts, whichever is told of first.
    let lossy = || HandedOver { loss: Some("lost".to_owned()), ..drained("c", "/vm/i") };
    for told in [vec![drained("b", "/vm/i"), lossy()], vec![lossy(), drained("b", "/vm/i")]] {
        let mut config = read(writes).expect("understood");
        config.take_over(told).expect("it fits");
        assert_eq!(config.drained["x"].loss.as_deref(), Some("lost"));
    }
}

#[test]
fn force_is_refused_in_a_file_where_it_stands() {
    let text = "[[disk]]\nname = 'a'\nvolume = 'file:///d/a'\nnbd = '/s'\nforce = true\n";
    let message = refused(text);
    assert!(message.contains("line 5: disk \"a\": force applies once"), "{message}");
}

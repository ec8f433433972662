//! What every store of objects has to do: one suite for all of them.

use mica_block::{Entry, ErrorKind, LIST_MAX, ObjectName, Objects, Put};
use mica_rt::{Backend, Buf, Executor, join_all, spawn};
use std::sync::{Arc, Barrier};

/// Hosts that put at the same time, as threads or as simulated ones.
const RACERS: usize = 8;
/// Names that they race for.
const NAMES: usize = 200;
/// Requests that are under way at one time, otherwise.
const AT_ONCE: usize = 64;

/// Checks that `objects`, which has no folder `conformance`, keeps all that [`Objects`] promises as
/// long as nothing fails. Its requests are made on executors with `backend`: one after the other,
/// and then by several hosts at the same time.
///
/// # Panics
/// If it does not.
pub fn conform(backend: Backend, objects: &Arc<dyn Objects>) {
    let executor = Executor::new(backend).expect("the backend is to be had");
    executor.block_on(async {
        let objects = &**objects;
        check_puts(objects).await;
        check_reads(objects).await;
        check_names(objects).await;
        check_listing(objects).await;
        check_holes(objects).await;
        check_no_folders(objects).await;
    });
    let contestants = match backend {
        Backend::Sim { .. } => executor.block_on(race_tasks(objects)),
        _ => race_threads(backend, objects),
    };
    executor.block_on(async {
        check_race(&**objects, &contestants).await;
        check_no_folders(&**objects).await;
    });
}

fn name(text: &str) -> ObjectName {
    ObjectName::new(&format!("conformance/{text}")).expect("a name")
}

/// Bytes of which no two neighbours are the same, nor two objects with different numbers.
fn content(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at * 7 + number) % 251).expect("below 256")).collect()
}

async fn put(objects: &dyn Objects, name: &ObjectName, bytes: &[u8]) -> Put {
    let (put, content) = objects.put_if_absent(name, Buf::from_slice(bytes)).await;
    assert_eq!(*content, *bytes, "the buffer comes back as it was");
    put.expect("put")
}

/// All of an object, with its length; `None` if there is none.
async fn read(objects: &dyn Objects, name: &ObjectName) -> Option<Vec<u8>> {
    let object = objects.open(name);
    let (len, _) = object.read_end(Buf::new(1)).await;
    let len = match len {
        Ok(len) => usize::try_from(len).expect("a short object"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error:?}");
            return None;
        }
    };
    let (read, buf) = object.read_at(Buf::new(len), 0).await;
    read.expect("read");
    Some(buf.to_vec())
}

async fn delete(objects: &dyn Objects, name: &ObjectName) {
    objects.delete(name).await.expect("deleted");
}

async fn check_puts(objects: &dyn Objects) {
    for (number, len) in [0, 1, 4095, 4096, 100_000, 3 << 20].into_iter().enumerate() {
        let name = name(&format!("puts/{len}"));
        assert_eq!(read(objects, &name).await, None);
        let (first, second) = (content(number, len), content(number + 100, len + 1));
        assert_eq!(put(objects, &name, &first).await, Put::Done);
        assert!(read(objects, &name).await.is_some_and(|found| found == first));
        assert_eq!(put(objects, &name, &second).await, Put::Exists);
        assert!(read(objects, &name).await.is_some_and(|found| found == first), "unchanged");
        delete(objects, &name).await;
        assert_eq!(read(objects, &name).await, None);
        // Nothing is left to delete, and the name is free.
        delete(objects, &name).await;
        assert_eq!(put(objects, &name, &second).await, Put::Done);
        assert!(read(objects, &name).await.is_some_and(|found| found == second));
        delete(objects, &name).await;
    }
    delete(objects, &name("none/whatever")).await;
}

async fn check_reads(objects: &dyn Objects) {
    const LEN: usize = 10_000;
    let bytes = content(1, LEN);
    let name_of_it = name("reads");
    // It is looked for when it is read, not when it is opened.
    let object = objects.open(&name_of_it);
    for offset in [0, 5, u64::MAX] {
        let (missing, buf) = object.read_at(Buf::new(10), offset).await;
        assert_eq!(missing.expect_err("missing").kind(), ErrorKind::NotFound);
        assert_eq!(buf.len(), 10, "the buffer comes back");
    }
    let (missing, _) = object.read_end(Buf::new(10)).await;
    assert_eq!(missing.expect_err("missing").kind(), ErrorKind::NotFound);
    assert_eq!(put(objects, &name_of_it, &bytes).await, Put::Done);
    for (offset, len) in [
        (0, LEN),
        (0, 1),
        (1, 4096),
        (4000, 5000),
        (9_999, 1),
        (9_990, 100),
        (LEN, 50),
        (0, 20_000),
    ] {
        let mut expected = bytes[offset..(offset + len).min(LEN)].to_vec();
        expected.resize(len, 0);
        // What was in the buffer before shows nowhere.
        let mut buf = Buf::new(len);
        buf.fill(0xee);
        let (read, buf) = object.read_at(buf, offset as u64).await;
        read.expect("read");
        assert!(*buf == *expected, "{len} bytes at {offset}");
    }
    for offset in [1 << 40, u64::MAX - 8, u64::MAX] {
        let (read, buf) = object.read_at(Buf::new(100), offset).await;
        read.expect("beyond the end there are zeros");
        assert!(buf.iter().all(|byte| *byte == 0));
    }
    for len in [0, 1, 24, LEN, LEN + 1, 2 * LEN] {
        let (end, buf) = object.read_end(Buf::new(len)).await;
        assert_eq!(end.expect("read"), LEN as u64);
        let there = len.min(LEN);
        assert!(buf[..there] == bytes[LEN - there..], "the last {len} bytes");
    }
    let many = (0..AT_ONCE).map(|at| object.read_at(Buf::new(16), at as u64));
    for (at, (read, buf)) in join_all(many).await.into_iter().enumerate() {
        read.expect("read");
        assert_eq!(*buf, bytes[at..at + 16]);
    }
    delete(objects, &name_of_it).await;
}

/// Names of every shape, side by side.
async fn check_names(objects: &dyn Objects) {
    let part = "p".repeat(ObjectName::PART_LEN_MAX);
    let left = ObjectName::LEN_MAX - name(&format!("names/{part}")).as_str().len() - 2;
    let longest = format!("{part}/{}/{}", &part[..left / 2], &part[..left - left / 2]);
    assert_eq!(name(&format!("names/{longest}")).as_str().len(), ObjectName::LEN_MAX);
    let texts = ["0", "a.b", "a..b", "a-b", "a_b", "-", "_", "x/y/z/w", "ab/c", "ab.c", &longest];
    for (number, text) in texts.into_iter().enumerate() {
        let name = name(&format!("names/{text}"));
        assert_eq!(put(objects, &name, &content(number, 10)).await, Put::Done, "{name}");
    }
    for (number, text) in texts.into_iter().enumerate() {
        let name = name(&format!("names/{text}"));
        assert_eq!(read(objects, &name).await, Some(content(number, 10)), "{name}");
        delete(objects, &name).await;
    }
}

async fn list(
    objects: &dyn Objects,
    folder: &ObjectName,
    after: Option<&ObjectName>,
) -> Vec<Entry> {
    objects.list(Some(folder), after).await.expect("listed")
}

async fn check_listing(objects: &dyn Objects) {
    let folder = name("list");
    assert!(list(objects, &folder, None).await.is_empty());
    // Folders in front of others, in the order of names though not of keys; and objects among them.
    let folders = ["0", "2", "2-1", "2.5", "web", "web-1", "web-1-2", "web.x", "web0"];
    let mut expected: Vec<Entry> =
        folders.iter().map(|part| Entry::Folder(name(&format!("list/{part}")))).collect();
    let mut names: Vec<_> = folders.iter().map(|part| name(&format!("list/{part}/a/b"))).collect();
    for number in 0..LIST_MAX + 20 {
        let name = name(&format!("list/1{number:05}"));
        expected.push(Entry::Object { name: name.clone(), len: (number % 5) as u64 });
        names.push(name);
    }
    expected.sort_by(|one, other| one.name().cmp(other.name()));
    // In a folder of which no more than an empty one is left.
    let gone = name("list/gone/a");
    put(objects, &gone, b"a").await;
    delete(objects, &gone).await;
    for some in names.chunks(AT_ONCE) {
        let puts = some.iter().map(async |name| {
            let number: usize =
                name.as_str().rsplit("list/1").next().unwrap_or("").parse().unwrap_or(0);
            assert_eq!(put(objects, name, &content(0, number % 5)).await, Put::Done);
        });
        join_all(puts).await;
    }
    let first = list(objects, &folder, None).await;
    assert_eq!(first.len(), LIST_MAX, "a full page");
    assert!(first == expected[..LIST_MAX]);
    let rest = list(objects, &folder, first.last().map(Entry::name)).await;
    assert!(rest == expected[LIST_MAX..], "the second page");
    for (at, entry) in expected.iter().enumerate().skip(LIST_MAX - 3) {
        assert!(list(objects, &folder, Some(entry.name())).await == expected[at + 1..]);
    }
    // From a name that is not there, and from outside of the folder.
    let after = name("list/100999-");
    assert!(list(objects, &folder, Some(&after)).await.len() > 20);
    assert!(list(objects, &folder, Some(&name("a"))).await == first, "before it");
    assert!(list(objects, &folder, Some(&name("m"))).await.is_empty(), "behind it");
    let inner = list(objects, &name("list/web"), None).await;
    assert_eq!(inner, [Entry::Folder(name("list/web/a"))]);
    check_listing_all(objects, &folder, &names).await;
    let top = objects.list(None, None).await.expect("listed");
    let own = ObjectName::new("conformance").expect("a name");
    assert!(top.contains(&Entry::Folder(own)));
    for some in names.chunks(AT_ONCE) {
        join_all(some.iter().map(|name| delete(objects, name))).await;
    }
    assert!(list(objects, &folder, None).await.is_empty());
}

/// Where all of a folder's folders are listed at once: `names` are what `folder` has.
async fn check_listing_all(objects: &dyn Objects, folder: &ObjectName, names: &[ObjectName]) {
    let list = async |after: Option<&ObjectName>| objects.list_all(folder, after).await;
    let first = match list(None).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => return,
        first => first.expect("listed"),
    };
    let mut expected = names.to_vec();
    expected.sort();
    let is = |found: &[Entry], wanted: &[ObjectName]| {
        let are_objects = found.iter().all(|entry| matches!(entry, Entry::Object { .. }));
        are_objects && found.iter().map(Entry::name).eq(wanted)
    };
    assert!(is(&first, &expected[..LIST_MAX]), "a full page");
    let rest = list(first.last().map(Entry::name)).await.expect("listed");
    assert!(is(&rest, &expected[LIST_MAX..]), "the second page");
    // From a folder on, whose objects come behind those of others that begin with its name.
    let web = name("list/web");
    let from = expected.iter().position(|name| *name > web).expect("they are there");
    let found = list(Some(&web)).await.expect("listed");
    assert!(is(&found, &expected[from..]), "{found:?}");
    assert!(is(&list(Some(&name("a"))).await.expect("listed"), &expected[..LIST_MAX]), "before");
    assert!(list(Some(&name("m"))).await.expect("listed").is_empty(), "behind it");
    let inner = objects.list_all(&name("list/web-1"), None).await.expect("listed");
    assert!(is(&inner, &[name("list/web-1/a/b")]), "{inner:?}");
    let none = objects.list_all(&name("none"), None).await.expect("listed");
    assert!(none.is_empty(), "{none:?}");
}

/// Nothing is left, and so no folder either.
/// Where parts can be given back, all others stay.
async fn check_holes(objects: &dyn Objects) {
    let name = name("holes");
    if objects.punch(&name, &[]).await.is_err() {
        return;
    }
    let bytes = content(5, 70_000);
    assert_eq!(put(objects, &name, &bytes).await, Put::Done);
    match objects.punch(&name, &[4096..8192, 12_288..65_536]).await {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}"),
    }
    let left = read(objects, &name).await.expect("it is there");
    assert_eq!(left.len(), bytes.len());
    for kept in [0..4096, 8192..12_288, 65_536..bytes.len()] {
        assert_eq!(left[kept.clone()], bytes[kept.clone()], "{kept:?}");
    }
    assert_eq!(put(objects, &name, &bytes).await, Put::Exists);
    delete(objects, &name).await;
    let missing = objects.punch(&name, std::slice::from_ref(&(0..4096))).await;
    assert!(missing.is_ok_and(|bytes| bytes == 0), "nothing is there");
}

async fn check_no_folders(objects: &dyn Objects) {
    let top = objects.list(None, None).await.expect("listed");
    assert!(top.iter().all(|entry| entry.name().as_str() != "conformance"), "{top:?}");
}

fn contested(number: usize) -> ObjectName {
    name(&format!("race/{:02x}/{number:04}", number % 16))
}

/// What racer `racer` puts under the contested name `number`.
fn contestant(racer: usize, number: usize) -> Vec<u8> {
    content(racer, 1000 + 100 * number)
}

/// Puts an object under each contested name; returns what became of each.
async fn race(objects: &dyn Objects, racer: usize) -> Vec<Put> {
    let mut puts = Vec::new();
    for number in 0..NAMES {
        puts.push(put(objects, &contested(number), &contestant(racer, number)).await);
    }
    puts
}

async fn race_tasks(objects: &Arc<dyn Objects>) -> Vec<Vec<Put>> {
    join_all((0..RACERS).map(|racer| {
        let objects = Arc::clone(objects);
        spawn(async move { race(&*objects, racer).await })
    }))
    .await
}

fn race_threads(backend: Backend, objects: &Arc<dyn Objects>) -> Vec<Vec<Put>> {
    let barrier = Barrier::new(RACERS);
    let racer = |racer| {
        let executor = Executor::new(backend).expect("the backend is to be had");
        barrier.wait();
        executor.block_on(race(&**objects, racer))
    };
    std::thread::scope(|scope| {
        let racer = &racer;
        let threads: Vec<_> =
            (0..RACERS).map(|number| scope.spawn(move || racer(number))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

async fn check_race(objects: &dyn Objects, contestants: &[Vec<Put>]) {
    assert!(contestants.iter().all(|puts| puts.len() == NAMES));
    for number in 0..NAMES {
        let won = |(racer, puts): (usize, &Vec<Put>)| (puts[number] == Put::Done).then_some(racer);
        let winners: Vec<_> = contestants.iter().enumerate().filter_map(won).collect();
        assert_eq!(winners.len(), 1, "{winners:?} won object {number}");
        let stored = read(objects, &contested(number)).await;
        assert!(stored.is_some_and(|stored| stored == contestant(winners[0], number)));
        delete(objects, &contested(number)).await;
    }
}

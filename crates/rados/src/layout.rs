//! Where an object is, and its folder's name.
//!
//! RADOS lists a pool in the order of hashes, all of it, and knows no folders. But objects may be
//! given a *locator*, whose hash is then theirs; those of one locator are listed alone, by name. So
//! an object's locator is its folder and one of [`BUCKETS`] numbers, which follows from its name:
//! a folder is listed with that many requests, whatever else is in the pool, and its objects are
//! spread over as many placement groups. More of them make listings slower, fewer the pool uneven.
//!
//! A folder of folders has no objects to be found by. So each folder has a *marker* where an
//! object of its name would be: an empty object that is put before the first object in the folder,
//! and stays for ever, as another host may know that it is there. docs/formats/pool.md says it all.
//!
//! Invariants
//! - I1 Names in a bucket are in the order of [`ObjectName`], markers among them: what a marker
//!   ends with comes before every byte of a name.
//! - I2 Nothing here may ever change: hosts would not find each other's objects. What a store was
//!   made with is in its object [`LAYOUT_NAME`].

use mica_block::ObjectName;
use std::ffi::CString;

/// Parts of a folder.
pub(crate) const BUCKETS: u32 = 32;
/// What the object is called that says how a store is laid out.
pub(crate) const LAYOUT_NAME: &str = "!layout";
/// Its content.
pub(crate) const LAYOUT: &[u8] = b"mica objects 1\n";
/// What the name of a marker ends with.
const MARKER: char = '!';

/// Where an object is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// What RADOS calls it.
    pub(crate) name: CString,
    pub(crate) locator: CString,
}

impl Place {
    fn new(name: String, locator: String) -> Self {
        let terminated = |text| CString::new(text).expect("names have no zero byte");
        Self { name: terminated(name), locator: terminated(locator) }
    }

    /// The place of the object `name`.
    pub(crate) fn of(name: &ObjectName) -> Self {
        Self::new(name.to_string(), locator_of(name))
    }

    /// The place of the marker of `folder`.
    pub(crate) fn of_marker(folder: &ObjectName) -> Self {
        Self::new(format!("{folder}{MARKER}"), locator_of(folder))
    }

    /// The place of the object that says how a store is laid out.
    pub(crate) fn of_layout() -> Self {
        Self::new(LAYOUT_NAME.to_owned(), locator(None, 0))
    }
}

/// The folders that `name` is in, the outermost first.
pub(crate) fn folders_of(name: &ObjectName) -> impl Iterator<Item = ObjectName> {
    let text = name.as_str();
    text.match_indices('/')
        .map(|(end, _)| ObjectName::new(&text[..end]).expect("parts of a name are one"))
}

fn locator_of(name: &ObjectName) -> String {
    let (folder, part) = match name.as_str().rsplit_once('/') {
        Some((folder, part)) => (Some(folder), part),
        None => (None, name.as_str()),
    };
    locator(folder, bucket_of(part))
}

/// The locator of the objects in a bucket of `folder`.
pub(crate) fn locator(folder: Option<&str>, bucket: u32) -> String {
    format!("{}:{bucket:02x}", folder.unwrap_or_default())
}

/// FNV-1a: any function does that spreads numbers.
fn bucket_of(part: &str) -> u32 {
    const START: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x100_0000_01b3;
    let hash = part.bytes().fold(START, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    // The upper bits depend on all bytes.
    u32::try_from(hash >> 40).expect("24 bits") % BUCKETS
}

/// What is found in a folder: `None` if it is neither an object nor a marker.
pub(crate) fn decode(name: &[u8]) -> Option<Found> {
    let text = str::from_utf8(name).ok()?;
    match text.strip_suffix(MARKER) {
        Some(folder) => ObjectName::new(folder).ok().map(Found::Folder),
        None => ObjectName::new(text).ok().map(Found::Object),
    }
}

/// What may be in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// There was an object.
    Object(ObjectName),
    /// There is a folder, or was one.
    Folder(ObjectName),
}

impl Found {
    pub(crate) fn name(&self) -> &ObjectName {
        match self {
            Self::Object(name) | Self::Folder(name) => name,
        }
    }
}

/// The hash by which RADOS places what has this locator: Robert Jenkins's of 1996, which all pools
/// use. Ceph knows others; a pool that has one is refused, because the object [`LAYOUT_NAME`] is
/// not found where it has to be.
pub(crate) fn hash_of(namespace: &str, locator: &str) -> u32 {
    const SEPARATOR: &str = "\u{1f}";
    match namespace {
        "" => jenkins(locator.as_bytes()),
        _ => jenkins([namespace, SEPARATOR, locator].concat().as_bytes()),
    }
}

fn jenkins(bytes: &[u8]) -> u32 {
    const START: u32 = 0x9e37_79b9;
    let mut state = [START, START, 0];
    let chunks = bytes.chunks_exact(12);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (at, word) in chunk.chunks_exact(4).enumerate() {
            let word = u32::from_le_bytes(word.try_into().expect("four bytes"));
            state[at] = state[at].wrapping_add(word);
        }
        mix(&mut state);
    }
    state[2] = state[2].wrapping_add(u32::try_from(bytes.len()).expect("a short text"));
    for (at, byte) in rest.iter().enumerate() {
        // The lowest byte of the third word is the length's.
        let at = if at < 8 { at } else { at + 1 };
        state[at / 4] = state[at / 4].wrapping_add(u32::from(*byte) << (8 * (at % 4)));
    }
    mix(&mut state);
    state[2]
}

fn mix([a, b, c]: &mut [u32; 3]) {
    let step = |target: &mut u32, one: u32, other: u32, shifted: u32| {
        *target = target.wrapping_sub(one).wrapping_sub(other) ^ shifted;
    };
    for [first, second, third] in [[13, 8, 13], [12, 16, 5], [3, 10, 15]] {
        step(a, *b, *c, *c >> first);
        step(b, *c, *a, *a << second);
        step(c, *a, *b, *b >> third);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ObjectName {
        ObjectName::new(text).expect("a name")
    }

    const PAGE: &str = include_str!("../../../docs/formats/pool.md");

    #[test]
    fn page_of_the_layout_says_what_the_code_does() {
        let layout = str::from_utf8(LAYOUT).expect("text").trim_end();
        for (constant, value) in [
            ("BUCKETS", BUCKETS.to_string()),
            ("LAYOUT_NAME", format!("`{LAYOUT_NAME}`")),
            ("LAYOUT", format!("`{layout}\\n`")),
            ("MARKER", format!("`{MARKER}`")),
        ] {
            let row = format!("| `{constant}` | {value} |");
            assert!(PAGE.contains(&row), "{row}");
        }
        let mut rows = 0;
        for line in PAGE.lines() {
            let cells: Vec<_> = line.split('`').collect();
            let [what, text, _, rados, _, locator, _] = cells[..] else { continue };
            let place = match what {
                "| object " => Place::of(&name(text)),
                "| folder " => Place::of_marker(&name(text)),
                _ => continue,
            };
            assert_eq!(place, Place::new(rados.to_owned(), locator.to_owned()));
            rows += 1;
        }
        assert_eq!(rows, 4);
        assert_eq!(Place::of_layout(), Place::new(LAYOUT_NAME.to_owned(), ":00".to_owned()));
        let folders: Vec<_> = folders_of(&name("a/b/c")).collect();
        assert_eq!(folders, [name("a"), name("a/b")]);
    }

    #[test]
    fn markers_are_in_the_order_of_names() {
        let mut names: Vec<_> =
            ["web", "web-1", "web.x", "web0", "web_"].into_iter().map(name).collect();
        let mut markers: Vec<_> = names.iter().map(|name| Place::of_marker(name).name).collect();
        names.sort();
        markers.sort();
        let decoded: Vec<_> = markers.iter().filter_map(|name| decode(name.as_bytes())).collect();
        assert!(decoded.iter().map(Found::name).eq(&names));
        assert_eq!(decode(b"a/b"), Some(Found::Object(name("a/b"))));
        for foreign in [&b"!layout"[..], b"rbd_directory!", b"A", b"\xff", b"", b"!"] {
            let found = decode(foreign);
            assert!(!matches!(found, Some(Found::Object(_))), "{found:?}");
        }
    }

    #[test]
    fn numbered_names_are_spread_evenly() {
        let mut counts = [0; BUCKETS as usize];
        for number in 0..3200 {
            counts[bucket_of(&format!("{number:08x}")) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (50..150).contains(count)), "{counts:?}");
    }

    #[test]
    fn hash_is_the_one_of_ceph() {
        // What `ceph osd map POOL NAME [NAMESPACE]` says.
        for (namespace, locator, hash) in HASHES {
            assert_eq!(hash_of(namespace, locator), *hash, "{namespace} {locator}");
        }
    }

    const HASHES: &[(&str, &str, u32)] = &[
        ("", "a", 0x29ee_c818),
        ("ns1", "a", 0x8b6b_b4ad),
        ("", "abcd", 0x5ae6_1fa5),
        ("ns1", "abcd", 0xb458_1918),
        ("", "hello-world-of-rados", 0xd94a_14b2),
        ("ns1", "hello-world-of-rados", 0x1e17_8989),
        ("", "123456789012", 0xf7e4_5e60),
        ("ns1", "123456789012", 0x4d20_7396),
        ("", "12345678901", 0x79f3_2d84),
        ("ns1", "12345678901", 0xb2c8_c301),
    ];
}

//! The names of a store's objects, and what they say.
//!
//! | name | object |
//! |---|---|
//! | `format` | the store itself |
//! | `writers/<w>` | the claim of writer `w` (7 and 3 hexadecimal digits, with a `/` between) |
//! | `boundaries/<b>` | claims below writer `b` (10 digits) are void |
//! | `extents/<w>/<s>` | extent `s` (8 digits) of writer `w` (10 digits), or a fence |
//! | `volumes/<name>/<n>` | head `n` (16 digits) of a volume |
//! | `boots/<image>/<n>` | boot record `n` (16 digits) of an image (32 digits) |

use crate::format::Id;
use crate::place::{ExtentId, Writer};
use mica_block::{Error, ErrorKind, ObjectName, Result};
use ring::digest;

/// A volume's name: a part of an object's name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct VolumeName(ObjectName);

impl VolumeName {
    /// The volume `text`, which may come from outside.
    ///
    /// # Errors
    /// `Invalid` if no volume can have this name.
    pub fn new(text: &str) -> Result<Self> {
        let name = ObjectName::new(text).ok().filter(|_| !text.contains('/'));
        let refuse = || {
            let what = format!(
                "{text:?} is not a valid name of a volume: use a-z, 0-9, '-', '_' and '.', at most \
                 {} bytes, without a leading dot",
                ObjectName::PART_LEN_MAX
            );
            Error::new(ErrorKind::Invalid, what)
        };
        name.map(Self).ok_or_else(refuse)
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// What its heads say of it: the first bytes of SHA-256. It is that of the name in the store,
    /// which may be anywhere.
    pub(crate) fn sum(&self) -> Id {
        let digest = digest::digest(&digest::SHA256, self.as_str().as_bytes());
        *digest.as_ref().first_chunk().expect("it is longer")
    }

    /// The folder of its heads.
    pub fn folder(&self) -> ObjectName {
        name(format!("{VOLUMES}/{}", self.0))
    }

    /// Its head `number`.
    pub fn head(&self, number: u64) -> ObjectName {
        name(format!("{VOLUMES}/{}/{number:016x}", self.0))
    }
}

const VOLUMES: &str = "volumes";
const EXTENTS: &str = "extents";
const WRITERS: &str = "writers";
const BOUNDARIES: &str = "boundaries";
const BOOTS: &str = "boots";
/// Claims in one folder: a listing of the newest is short.
const CLAIMS_BITS: u32 = 12;

/// The object that says that this is a store of volumes.
pub(crate) fn format() -> ObjectName {
    name("format".to_owned())
}

/// The folder of all volumes.
pub(crate) fn volumes() -> ObjectName {
    name(VOLUMES.to_owned())
}

/// The folder of all extents.
pub(crate) fn extents() -> ObjectName {
    name(EXTENTS.to_owned())
}

/// The folder of all claims.
pub(crate) fn claims() -> ObjectName {
    name(WRITERS.to_owned())
}

/// The folder of all boundaries.
pub(crate) fn boundaries() -> ObjectName {
    name(BOUNDARIES.to_owned())
}

/// The folder of all boot records.
pub(crate) fn all_boots() -> ObjectName {
    name(BOOTS.to_owned())
}

/// The folder of the boot records of an image.
pub(crate) fn boots(image: Id) -> ObjectName {
    name(format!("{BOOTS}/{:032x}", u128::from_be_bytes(image)))
}

/// Boot record `number` of an image.
pub(crate) fn boot(image: Id, number: u64) -> ObjectName {
    name(format!("{}/{number:016x}", boots(image)))
}

/// The image whose boot record has this name; `None` if it is the name of something else.
pub(crate) fn image_of_record(name: &ObjectName) -> Option<Id> {
    let (folder, _) = name.as_str().rsplit_once('/')?;
    let (_, image) = folder.rsplit_once('/')?;
    let image = u128::from_str_radix(image, 16).ok()?.to_be_bytes();
    (boot(image, number(name)?) == *name).then_some(image)
}

impl Writer {
    /// The boundary that voids all claims below its number.
    pub fn boundary(self) -> ObjectName {
        name(format!("{BOUNDARIES}/{:010x}", self.number()))
    }

    /// The writer with this boundary; `None` if it is the name of something else.
    pub fn from_boundary(name: &ObjectName) -> Option<Self> {
        let (_, number) = name.as_str().rsplit_once('/')?;
        let this = Self::new(u64::from_str_radix(number, 16).ok()?)?;
        (this.boundary() == *name).then_some(this)
    }

    /// The claim of its number.
    pub fn claim(self) -> ObjectName {
        let (high, low) = (self.number() >> CLAIMS_BITS, self.number() & ((1 << CLAIMS_BITS) - 1));
        name(format!("{WRITERS}/{high:07x}/{low:03x}"))
    }

    /// The folder of claims before that of its own, whether it is there or not; `None` if its own
    /// is the first.
    pub(crate) fn folder_before(self) -> Option<ObjectName> {
        let high = (self.number() >> CLAIMS_BITS).checked_sub(1)?;
        Some(name(format!("{WRITERS}/{high:07x}")))
    }

    /// The writer with this claim; `None` if it is the name of something else.
    pub fn from_claim(name: &ObjectName) -> Option<Self> {
        let (rest, low) = name.as_str().rsplit_once('/')?;
        let (_, high) = rest.rsplit_once('/')?;
        let [high, low] = [high, low].map(|digits| u64::from_str_radix(digits, 16).ok());
        let this = Self::new(high?.checked_mul(1 << CLAIMS_BITS)?.checked_add(low?)?)?;
        (this.claim() == *name).then_some(this)
    }
}

impl ExtentId {
    /// The name of the extent, or of the fence in its place.
    pub fn name(self) -> ObjectName {
        name(format!("{EXTENTS}/{:010x}/{:08x}", self.writer.number(), self.sequence))
    }

    /// The extent with this name; `None` if it is the name of something else.
    pub fn from_name(name: &ObjectName) -> Option<Self> {
        let mut parts = name.as_str().split('/');
        let (folder, writer, sequence) = (parts.next()?, parts.next()?, parts.next()?);
        let writer = Writer::new(u64::from_str_radix(writer, 16).ok()?)?;
        let this = Self { writer, sequence: u32::from_str_radix(sequence, 16).ok()? };
        // There is one way to write it.
        (folder == EXTENTS && this.name() == *name).then_some(this)
    }
}

/// The number of a head with this name in a volume's folder, or of a boot record in its image's.
pub(crate) fn number(name: &ObjectName) -> Option<u64> {
    let (_, number) = name.as_str().rsplit_once('/')?;
    let value = u64::from_str_radix(number, 16).ok()?;
    (format!("{value:016x}") == number).then_some(value)
}

/// A name that is put together here.
fn name(text: String) -> ObjectName {
    ObjectName::new(&text).expect("made of parts that are allowed")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer(number: u64) -> Writer {
        Writer::new(number).expect("a writer")
    }

    #[test]
    fn names_say_what_they_are_of() {
        let extent = ExtentId { writer: writer(0xabc), sequence: 17 };
        assert_eq!(extent.name().as_str(), "extents/0000000abc/00000011");
        assert_eq!(ExtentId::from_name(&extent.name()), Some(extent));
        assert_eq!(writer(0x1_234_567).claim().as_str(), "writers/0001234/567");
        let (image, folder) = ([0xab; 16], boots([0xab; 16]));
        assert_eq!(folder.as_str(), format!("boots/{}", "ab".repeat(16)));
        let record = boot(image, 7);
        assert_eq!((image_of_record(&record), number(&record)), (Some(image), Some(7)));
        for number in [1, 4095, 4096, (1 << 40) - 1] {
            let claimed = Writer::from_claim(&writer(number).claim());
            assert_eq!(claimed, Some(writer(number)));
            let boundary = Writer::from_boundary(&writer(number).boundary());
            assert_eq!(boundary, Some(writer(number)));
        }
        let web = VolumeName::new("web-1").expect("a name");
        assert_eq!(web.head(26).as_str(), "volumes/web-1/000000000000001a");
        assert_eq!(number(&web.head(26)), Some(26));
    }

    #[test]
    fn other_names_are_not_taken_for_these() {
        for other in [
            "extents/0000000000/00000000",
            "extents/abc/00000011",
            "extents/0000000abc/0000001g",
            "extents/0000000abc/+0000011",
            "volumes/0000000abc/00000011",
            "extents/0000000abc",
        ] {
            let other = ObjectName::new(&other.replace('+', "0"));
            let other = other.expect("a name");
            if let Some(extent) = ExtentId::from_name(&other) {
                assert_eq!(extent.name(), other);
            }
        }
        for bad in ["", "a/b", ".hidden", "Web", "ä", &"a".repeat(201)] {
            assert_eq!(VolumeName::new(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
        assert_eq!(number(&ObjectName::new("volumes/web/1a").expect("a name")), None);
    }

    #[test]
    fn names_sort_as_their_numbers_do() {
        let numbers = [1, 9, 15, 16, 255, 1 << 24, (1 << 24) + 1, (1 << 40) - 1];
        let names: Vec<_> = numbers.map(|number| writer(number).claim()).into();
        assert!(names.is_sorted());
        let web = VolumeName::new("web").expect("a name");
        let heads: Vec<_> = [0, 9, 10, 4095, u64::MAX].map(|number| web.head(number)).into();
        assert!(heads.is_sorted());
    }
}

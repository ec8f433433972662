//! A head: what a volume is from now on. The head with the highest number counts.
//!
//! docs/formats/head.md specifies it.

use super::Id;
use super::frame::{Frame, Malformed};
use super::origin::{ORIGIN_BYTES, Origin};
use crate::place::Writer;
use crate::properties::{Properties, RawProperties};
use crate::state::{RawState, State};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of the object.
pub(crate) const HEAD_BYTES: usize = 1024;

pub(crate) const MAGIC: [u8; 8] = *b"MICAHED\n";
pub(crate) const VERSION: u32 = 1;
/// That of a volume with properties.
pub(crate) const VERSION_WITH_PROPERTIES: u32 = VERSION + 1;
/// What is read of a head: what a clone was made of may stand behind it.
pub(crate) const HEAD_READ_BYTES: usize = HEAD_BYTES + ORIGIN_BYTES;
const FRAME: Frame = Frame { magic: MAGIC, version: VERSION, len: HEAD_BYTES };

/// Longest name of a host, in bytes.
pub(crate) const HOST_LEN_MAX: usize = 255;

/// The flag of [`Head::is_unfinished`].
const UNFINISHED: u8 = 1;

/// What a volume is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Life {
    /// Nobody writes it: its state is that of the head.
    Closed,
    /// This writer does. Its extents go on from the state of the head, from this one on.
    Open {
        /// Who.
        writer: Writer,
        /// The first of its extents that is not in the head's state.
        sequence: u32,
    },
    /// It is gone, and its name may be used again.
    Deleted,
    /// A clone that is not ready: collectors keep what its state names, and nobody opens it.
    Pinned,
    /// As closed, but meant for the host that [`Head::heir`] names.
    HandedOver,
}

/// Longest name of a client, in bytes.
pub(crate) const CLIENT_LEN_MAX: usize = 64;

/// Longest path of a log, in bytes; of a longer one a head has the end.
pub(crate) const LOG_LEN_MAX: usize = 160;

/// A head.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Head {
    /// Its number, which is in its name too.
    pub(crate) number: u64,
    pub(crate) store: Id,
    /// Which volume: another one if the name is used again.
    pub(crate) volume: Id,
    /// Differs from put to put, so that a put whose answer was lost can be recognised.
    pub(crate) nonce: Id,
    pub(crate) life: Life,
    /// Whether the volume is open for the first time, for content that follows: nobody takes it for
    /// a whole one before it is closed. Older versions see only that it is open.
    pub(crate) is_unfinished: bool,
    pub(crate) state: State,
    /// What the volume was made with.
    pub(crate) properties: Properties,
    /// The volume that this one comes from by clones, however many; `None` if it is no clone.
    pub(crate) image: Option<Id>,
    /// What it was cloned from; `None` if it is no clone, or an older version of mica has put a
    /// head of it.
    pub(crate) origin: Option<Origin>,
    /// What the store calls the client of the writer, if it can shut one out.
    pub(crate) client: Option<String>,
    /// Where the log of the writer is, on its host, if it has one: for people. What is in it the
    /// store may lack.
    pub(crate) log: Option<String>,
    /// Of the name of the volume ([`VolumeName::sum`]): a head that got among those of another
    /// volume is not taken for one of its own. `None` in what older versions of mica put.
    ///
    /// [`VolumeName::sum`]: crate::names::VolumeName::sum
    pub(crate) name_sum: Option<Id>,
    /// When it was put, in nanoseconds since 1970: for people.
    pub(crate) time_ns: u64,
    /// The host that put it: for people.
    pub(crate) host: String,
    /// The host that the volume was handed to; empty in every other life.
    pub(crate) heir: String,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawHead {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) life: u8,
    pub(super) host_len: u8,
    pub(super) heir_len: u8,
    pub(super) flags: u8,
    pub(super) number: U64,
    pub(super) store: Id,
    pub(super) volume: Id,
    pub(super) nonce: Id,
    pub(super) writer: U64,
    pub(super) sequence: U32,
    pub(super) reserved_too: [u8; 4],
    pub(super) state: RawState,
    pub(super) time_ns: U64,
    pub(super) host: [u8; 256],
    pub(super) heir: [u8; 256],
    pub(super) properties: RawProperties,
    /// Zeros if it is no clone. Older versions of mica leave it out of the heads that they put:
    /// then the volume has boot records of its own.
    pub(super) image: Id,
    /// Text, with zeros after it.
    pub(super) client: [u8; CLIENT_LEN_MAX],
    /// Zeros in what older versions of mica put.
    pub(super) name_sum: Id,
    /// Text, with zeros after it.
    pub(super) log: [u8; LOG_LEN_MAX],
    pub(super) padding: [u8; 8],
    /// CRC-32C of all bytes before this field.
    pub(super) checksum: U32,
}

const _: () = assert!(size_of::<RawHead>() == HEAD_BYTES);

impl Head {
    /// Who writes the volume.
    pub(crate) fn writer(&self) -> Option<Writer> {
        match self.life {
            Life::Open { writer, .. } => Some(writer),
            Life::Closed | Life::Deleted | Life::Pinned | Life::HandedOver => None,
        }
    }

    /// Whose boot records are those of the volume.
    pub(crate) fn boot_image(&self) -> Id {
        self.image.unwrap_or(self.volume)
    }

    /// The object.
    ///
    /// # Panics
    /// If the name of a host is too long.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (life, writer, sequence) = match self.life {
            Life::Closed => (0, 0, 0),
            Life::Open { writer, sequence } => (1, writer.number(), sequence),
            Life::Deleted => (2, 0, 0),
            Life::Pinned => (3, 0, 0),
            Life::HandedOver => (4, 0, 0),
        };
        let ((host, host_len), (heir, heir_len)) = (padded(&self.host), padded(&self.heir));
        let raw = RawHead {
            magic: MAGIC,
            version: match self.properties == Properties::default() {
                true => VERSION,
                false => VERSION_WITH_PROPERTIES,
            }
            .into(),
            life,
            host_len,
            heir_len,
            flags: if self.is_unfinished { UNFINISHED } else { 0 },
            number: self.number.into(),
            store: self.store,
            volume: self.volume,
            nonce: self.nonce,
            writer: writer.into(),
            sequence: sequence.into(),
            reserved_too: [0; 4],
            state: RawState::encode(&self.state),
            time_ns: self.time_ns.into(),
            host,
            heir,
            properties: RawProperties::encode(&self.properties),
            image: self.image.unwrap_or_default(),
            client: padded_client(self.client.as_deref()),
            log: padded_log(self.log.as_deref()),
            name_sum: self.name_sum.unwrap_or_default(),
            padding: [0; 8],
            checksum: 0.into(),
        };
        let mut bytes = raw.as_bytes().to_vec();
        FRAME.seal(&mut bytes);
        // Older versions of mica read no more than the head.
        bytes.extend(self.origin.iter().flat_map(Origin::encode));
        bytes
    }

    /// The head that `bytes` begin with.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (framed, version) = FRAME.open_with_next(bytes)?;
        let raw = RawHead::read_from_bytes(framed).map_err(|_| Malformed::Truncated)?;
        let head = Self::of_raw(&raw).ok_or(Malformed::Content)?;
        let head = Self { origin: Origin::decode(&bytes[HEAD_BYTES..]), ..head };
        let has_properties = version == VERSION_WITH_PROPERTIES;
        match has_properties == (head.properties != Properties::default()) {
            true => Ok(head),
            false => Err(Malformed::Content),
        }
    }

    /// Gives bytes the sums that they should have, if they are as long as a head.
    pub(crate) fn mend(bytes: &mut [u8]) {
        if let Some((head, behind)) = bytes.split_at_mut_checked(HEAD_BYTES) {
            FRAME.seal(head);
            Origin::mend(behind);
        }
    }

    fn of_raw(raw: &RawHead) -> Option<Self> {
        let text = |bytes: &[u8], len: u8| {
            std::str::from_utf8(bytes.get(..len.into())?).ok().map(str::to_owned)
        };
        Some(Self {
            number: raw.number.get(),
            store: raw.store,
            volume: raw.volume,
            nonce: raw.nonce,
            life: match raw.life {
                0 => Life::Closed,
                1 => Life::Open {
                    writer: Writer::new(raw.writer.get())?,
                    sequence: raw.sequence.get(),
                },
                2 => Life::Deleted,
                3 => Life::Pinned,
                4 => Life::HandedOver,
                _ => return None,
            },
            is_unfinished: match (raw.flags, raw.life) {
                (0, _) => false,
                (UNFINISHED, 1) => true,
                _ => return None,
            },
            state: raw.state.decode()?,
            properties: raw.properties.decode()?,
            client: client_of(&raw.client),
            log: log_of(&raw.log),
            image: Some(raw.image).filter(|image| *image != Id::default()),
            origin: None,
            name_sum: Some(raw.name_sum).filter(|sum| *sum != Id::default()),
            time_ns: raw.time_ns.get(),
            host: text(&raw.host, raw.host_len)?,
            heir: text(&raw.heir, raw.heir_len)?,
        })
    }
}

/// A client as heads have it. One whose name is too long is none: nobody can shut it out.
fn padded_client(client: Option<&str>) -> [u8; CLIENT_LEN_MAX] {
    let mut bytes = [0; CLIENT_LEN_MAX];
    if let Some(client) = client.filter(|client| client.len() <= CLIENT_LEN_MAX) {
        bytes[..client.len()].copy_from_slice(client.as_bytes());
    }
    bytes
}

/// `None` if these bytes name none: a volume can be opened in any case.
fn client_of(bytes: &[u8; CLIENT_LEN_MAX]) -> Option<String> {
    let text = bytes.split(|byte| *byte == 0).next()?;
    let text = std::str::from_utf8(text).ok().filter(|text| !text.is_empty())?;
    text.bytes().all(|byte| byte.is_ascii_graphic()).then(|| text.to_owned())
}

/// The path of a log as heads have it.
fn padded_log(log: Option<&str>) -> [u8; LOG_LEN_MAX] {
    let mut bytes = [0; LOG_LEN_MAX];
    let Some(log) = log else { return bytes };
    let mut start = log.len().saturating_sub(LOG_LEN_MAX);
    while !log.is_char_boundary(start) {
        start += 1;
    }
    let log = &log.as_bytes()[start..];
    bytes[..log.len()].copy_from_slice(log);
    bytes
}

/// `None` if these bytes name none: a volume can be opened in any case.
fn log_of(bytes: &[u8; LOG_LEN_MAX]) -> Option<String> {
    let text = bytes.split(|byte| *byte == 0).next()?;
    let text = String::from_utf8_lossy(text);
    (!text.is_empty()).then(|| text.into_owned())
}

/// The name of a host as heads have it, and its length.
fn padded(host: &str) -> ([u8; 256], u8) {
    let mut bytes = [0; 256];
    bytes[..host.len()].copy_from_slice(host.as_bytes());
    (bytes, u8::try_from(host.len()).expect("at most HOST_LEN_MAX bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::VolumeName;
    use crate::properties::Compression;
    use crate::testing::key;

    fn head() -> Head {
        let writer = Writer::new(7).expect("a writer");
        Head {
            number: 12,
            store: [1; 16],
            volume: [2; 16],
            nonce: [3; 16],
            life: Life::Open { writer, sequence: 5 },
            is_unfinished: false,
            state: State::empty(10 << 30),
            properties: Properties::default(),
            image: None,
            origin: None,
            client: None,
            log: None,
            name_sum: None,
            time_ns: 99,
            host: "host-1".to_owned(),
            heir: String::new(),
        }
    }

    #[test]
    fn head_survives_in_each_life() {
        let heads = [Life::Closed, head().life, Life::Deleted, Life::Pinned]
            .map(|life| Head { life, ..head() });
        let unfinished = Head { is_unfinished: true, ..head() };
        assert_eq!(Head::decode(&unfinished.encode()), Ok(unfinished));
        let heir = "host-2".to_owned();
        let handed = Head { life: Life::HandedOver, heir, ..head() };
        for head in heads.into_iter().chain([handed]) {
            let bytes = head.encode();
            assert_eq!(bytes.len(), HEAD_BYTES);
            assert_eq!(Head::decode(&bytes), Ok(head));
        }
        let (_, secret) = key().new_secret(|| [9; 16]);
        for properties in [
            Properties { compression: Compression::Zstd, secret: None },
            Properties { compression: Compression::None, secret: Some(secret) },
            Properties { compression: Compression::Zstd, secret: Some(secret) },
        ] {
            let with = Head { properties, ..head() };
            let bytes = with.encode();
            assert_eq!((head().encode()[8], bytes[8]), (1, 2), "others are as they were");
            assert_eq!(Head::decode(&bytes), Ok(with));
        }
        let clone = Head { image: Some([8; 16]), ..head() };
        assert_eq!(clone.encode()[8], 1, "older versions read it");
        assert_eq!(Head::decode(&clone.encode()), Ok(clone));
        let name = VolumeName::new("gold").expect("a name");
        let origin = Some(Origin { volume: [7; 16], name, snapshot: Some(3) });
        let from = Head { origin, ..head() };
        let bytes = from.encode();
        assert_eq!(bytes[..HEAD_BYTES], head().encode(), "older versions read the head alone");
        assert_eq!((bytes.len(), Head::decode(&bytes)), (HEAD_READ_BYTES, Ok(from)));
        let client = "x".repeat(CLIENT_LEN_MAX);
        let with_client = Head { client: Some(client), ..head() };
        assert_eq!(Head::decode(&with_client.encode()), Ok(with_client));
        let with_log = Head { log: Some("/var/lib/mica/log".to_owned()), ..head() };
        assert_eq!(with_log.encode()[8], 1, "older versions read it");
        assert_eq!(Head::decode(&with_log.encode()), Ok(with_log));
        let long = Head { log: Some(format!("/ä{}", "b".repeat(LOG_LEN_MAX - 1))), ..head() };
        let end = "b".repeat(LOG_LEN_MAX - 1);
        assert_eq!(Head::decode(&long.encode()).map(|head| head.log), Ok(Some(end)));
        let with_name = Head { name_sum: Some([4; 16]), ..head() };
        assert_eq!(with_name.encode()[8], 1, "older versions read it");
        assert_eq!(Head::decode(&with_name.encode()), Ok(with_name));
        let named = Head { host: "h".repeat(HOST_LEN_MAX), ..head() };
        assert_eq!(Head::decode(&named.encode()), Ok(named));
    }

    #[test]
    fn head_with_a_flipped_bit_or_a_lost_end_is_refused() {
        let good = head().encode();
        for bit in 0..HEAD_BYTES * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::decode(&bad).is_err(), "bit {bit}");
        }
        for len in 0..HEAD_BYTES {
            assert_eq!(Head::decode(&good[..len]), Err(Malformed::Truncated));
        }
    }

    #[test]
    fn head_that_counts_further_than_anybody_is_refused() {
        let most = State::COUNT_MAX;
        for (records, next_snapshot, is_good) in [
            (most, most, true),
            (most + 1, 0, false),
            (u64::MAX, 0, false),
            (0, most + 1, false),
            (0, u64::MAX, false),
        ] {
            let state = State { records, next_snapshot, ..head().state };
            let decoded = Head::decode(&Head { state, ..head() }.encode());
            let wanted =
                if is_good { Ok(Head { state, ..head() }) } else { Err(Malformed::Content) };
            assert_eq!(decoded, wanted, "{records} {next_snapshot}");
        }
    }

    #[test]
    fn head_that_contradicts_itself_is_refused() {
        // A life that there is not, a host that is not text, a writer without a number.
        // Properties in a head that has none by its version, or the other way round.
        // A flag that there is not.
        for (at, byte) in
            [(12, 9), (15, 2), (24 + 48 + 16 + 72 + 8, 0xff), (680, 1), (681, 1), (8, 2)]
        {
            let mut bad = head().encode();
            bad[at] = byte;
            FRAME.seal(&mut bad);
            assert_eq!(Head::decode(&bad), Err(Malformed::Content), "byte {at}");
        }
    }
}

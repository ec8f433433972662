//! Sizes in bytes, as people write them.

use mica_block::{Error, ErrorKind, Result};
use mica_stack::parse_size;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A number of bytes: 4096, or "64k", "8G".
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse_size(text).map(Self).ok_or_else(|| {
            let context = format!("invalid size {text:?}; use for example 64k or 8G");
            Error::new(ErrorKind::Invalid, context)
        })
    }
}

impl fmt::Display for Size {
    /// In the form that [`Self::from_str`] reads, with the largest exact unit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "T"), (30, "G"), (20, "M"), (10, "k")];
        let is_whole = |bits: u32| self.0 > 0 && self.0.trailing_zeros() >= bits;
        let (bits, unit) = units.into_iter().find(|(bits, _)| is_whole(*bits)).unwrap_or_default();
        write!(f, "{}{unit}", self.0 >> bits)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size like 4096, \"64k\" or \"8G\"")
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> std::result::Result<Size, E> {
                let size =
                    u64::try_from(value).map_err(|_| E::custom("a size cannot be negative"))?;
                Ok(Size(size))
            }

            fn visit_u64<E>(self, value: u64) -> std::result::Result<Size, E> {
                Ok(Size(value))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Size, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_is_read_as_it_is_written() {
        for (bytes, text) in
            [(0, "0"), (512, "512"), (4096, "4k"), (32 << 20, "32M"), (3 << 29, "1536M")]
        {
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.parse::<Size>().expect("a size"), Size(bytes));
        }
    }
}

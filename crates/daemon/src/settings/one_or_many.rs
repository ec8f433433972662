//! Keys of a configuration whose value is a list, or its only element.

use serde::de::{Deserialize, Deserializer, Error, IntoDeserializer, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Reads a list of what is written as text, or its only element.
pub(super) fn one_or_many<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_any(OneOrMany(PhantomData))
}

struct OneOrMany<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOrMany<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text in quotes, or a list of such")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Vec<T>, E> {
        T::deserialize(text.into_deserializer()).map(|one| vec![one])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Vec<T>, A::Error> {
        let mut many = Vec::new();
        while let Some(one) = all.next_element()? {
            many.push(one);
        }
        Ok(many)
    }
}

//! Which automatic snapshots are kept, as people write it.

use mica_block::Error;
use mica_stack::Keep;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::str::FromStr;

/// Rules like 60s/10ms,1h/1s,1d/1h.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeepRules(pub Keep);

impl FromStr for KeepRules {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        text.parse().map(Self)
    }
}

impl Serialize for KeepRules {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for KeepRules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

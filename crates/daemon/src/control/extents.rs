//! `GET /v1/disks/NAME/extents`: what of a disk is allocated, or has changed since a state, as
//! CSI's SnapshotMetadata service tells it (GetMetadataAllocated, GetMetadataDelta).

use super::perform::{self, Answer, find};
use super::reply::{Refusal, json};
use super::sources::Sources;
use crate::served::{Asked, Refused};
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use serde_json::{Value, json as value};

/// Extents in an answer unless the client says otherwise.
const EXTENTS_DEFAULT: usize = 1024;

pub(super) async fn extents(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let asked = asked(query.as_deref().unwrap_or_default())?;
    let ask = move || match served.extents(&asked) {
        Ok(found) => Ok(Ok(found)),
        Err(Refused { why, again: None }) => Err(why),
        Err(refused) => Ok(Err(refused)),
    };
    let found = perform::asked(&sources, ask).await?;
    let found = found.map_err(|refused| Refusal::from(refused.why).again(refused.again))?;
    let blocks =
        found.list.iter().map(|(offset, len)| value!({ "byte_offset": offset, "size_bytes": len }));
    Ok(json(&value!({
        "block_metadata_type": "VARIABLE_LENGTH",
        "volume_capacity_bytes": found.len,
        "block_metadata": blocks.collect::<Vec<Value>>(),
        "next_byte_offset": found.next,
    })))
}

/// Understands a query.
fn asked(query: &str) -> Result<Asked, Refusal> {
    let refuse = |what: String| Err(Refusal::new(StatusCode::BAD_REQUEST, what));
    let mut asked = Asked { state: None, since: None, start: 0, max: EXTENTS_DEFAULT };
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, text) = pair.split_once('=').unwrap_or((pair, ""));
        let Some(text) = decoded(text) else { return refuse(format!("malformed: {pair}")) };
        let Ok(number) = text.parse::<u64>().or_else(|error| match key {
            "start" | "max" => Err(error),
            _ => Ok(0),
        }) else {
            return refuse(format!("{key}={text}: not a number"));
        };
        match key {
            "state" => asked.state = Some(text),
            "since" => asked.since = Some(text),
            "start" => asked.start = number,
            "max" => asked.max = usize::try_from(number).unwrap_or(usize::MAX),
            _ => return refuse(format!("unknown parameter {key}: use state, since, start or max")),
        }
    }
    Ok(asked)
}

/// The text of a value in a query, or `None` if its escapes are malformed.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_understood_or_refused() {
        let found = asked("since=mon%2Fday+1&start=4096&max=7").expect("valid");
        assert_eq!((found.since.as_deref(), found.start, found.max), (Some("mon/day 1"), 4096, 7));
        assert!(asked("").expect("valid").state.is_none());
        assert_eq!(asked("state=7").expect("valid").state.as_deref(), Some("7"));
        for bad in ["start=x", "start=-1", "since=%4", "since=%ff", "since=%+f", "sinc=mon", "max="]
        {
            assert!(asked(bad).is_err(), "{bad}");
        }
    }
}

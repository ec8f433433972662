//! Faults of a store of volumes that the user requested: `--inject delay=20ms,op=put`, `--inject
//! lost=1%`, `--inject slow=5%,by=2s`.

use crate::inject::parse_duration;
use mica_block::{Error, ErrorKind, Objects, Result};
use mica_store::object::{FaultyObjects, FaultyOptions, Lie, ObjectOperation, Throttle};
use std::sync::Arc;
use std::time::Duration;

/// Faults of the requests to a store, one stacked on the other; usually none.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct StoreFaults(Vec<String>);

/// How long a slow or late request takes more, if it is not said.
const SLOW_BY: Duration = Duration::from_secs(1);

impl StoreFaults {
    /// None.
    pub const NONE: Self = Self(Vec::new());
    /// How one is written, for messages and help.
    pub const SYNTAX: &str = "delay=TIME | error=SHARE | lost=SHARE | hang=SHARE | \
        slow=SHARE[,by=TIME] | late=SHARE[,by=TIME] | throttle=SERVED:REFUSED | lie=NAME, each with \
        [,op=read|put|list|delete][,seed=NUMBER], where TIME is like 500us, 2ms or 1s, and SHARE is \
        like 1% or 0.1%";

    /// The faults with these `texts`; the last is the first that a request meets.
    ///
    /// # Errors
    /// `Invalid` if one is not understood.
    pub fn new(texts: &[String]) -> Result<Self> {
        texts.iter().try_for_each(|text| parse(text).map(drop))?;
        Ok(Self(texts.to_vec()))
    }

    /// `objects` with these faults.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn stack_on(&self, objects: Arc<dyn Objects>) -> Result<Arc<dyn Objects>> {
        self.0.iter().try_fold(objects, |inner, text| {
            Ok(Arc::new(FaultyObjects::new(inner, parse(text)?)) as Arc<dyn Objects>)
        })
    }
}

fn parse(text: &str) -> Result<FaultyOptions> {
    options(text).ok_or_else(|| {
        let syntax = StoreFaults::SYNTAX;
        let what = format!("invalid --inject {text:?} for a volume; use {syntax}");
        Error::new(ErrorKind::Invalid, what)
    })
}

fn options(text: &str) -> Option<FaultyOptions> {
    let mut options = FaultyOptions { slow_by: SLOW_BY, ..FaultyOptions::default() };
    let mut parts = text.split(',').map(|part| part.split_once('='));
    let (fault, value) = parts.next()??;
    match fault {
        "delay" => options.latency = parse_duration(value)?,
        "error" => options.refused = share(value)?,
        "lost" => options.lost = share(value)?,
        "hang" => options.hung = share(value)?,
        "slow" => options.slow = share(value)?,
        "late" => options.late = share(value)?,
        "throttle" => {
            let (served, refused) = value.split_once(':')?;
            let (served, refused) = (served.parse().ok()?, refused.parse().ok()?);
            options.throttle = Some(Throttle { served, refused });
        }
        "lie" => options.lie = Some(lie(value)?),
        _ => return None,
    }
    for part in parts {
        match part? {
            ("by", time) if matches!(fault, "slow" | "late") => {
                options.slow_by = parse_duration(time)?;
            }
            ("op", name) => options.only = Some(operation(name)?),
            ("seed", number) => options.seed = number.parse().ok()?,
            _ => return None,
        }
    }
    Some(options)
}

fn share(text: &str) -> Option<f64> {
    let share = text.strip_suffix('%')?.parse::<f64>().ok()? / 100.0;
    (0.0..=1.0).contains(&share).then_some(share)
}

fn operation(name: &str) -> Option<ObjectOperation> {
    Some(match name {
        "read" => ObjectOperation::Read,
        "put" => ObjectOperation::Put,
        "list" => ObjectOperation::List,
        "delete" => ObjectOperation::Delete,
        _ => return None,
    })
}

fn lie(name: &str) -> Option<Lie> {
    Some(match name {
        "stores-nothing" => Lie::StoresNothing,
        "stores-half" => Lie::StoresHalf,
        "ignores-condition" => Lie::IgnoresCondition,
        "racers-win" => Lie::RacersWin,
        "replaces-quietly" => Lie::ReplacesQuietly,
        "nothing-is-first" => Lie::NothingIsFirst,
        "lists-less" => Lie::ListsLess,
        "deletes-nothing" => Lie::DeletesNothing,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_understood_and_others_named_with_the_syntax() {
        let parsed = parse("slow=5%,by=200ms,op=put,seed=7").expect("one");
        let expected = FaultyOptions {
            slow: 0.05,
            slow_by: Duration::from_millis(200),
            only: Some(ObjectOperation::Put),
            seed: 7,
            ..FaultyOptions::default()
        };
        assert_eq!(parsed, expected);
        assert_eq!(parse("delay=20ms").expect("one").latency, Duration::from_millis(20));
        let throttle = Throttle { served: 100, refused: 20 };
        assert_eq!(parse("throttle=100:20").expect("one").throttle, Some(throttle));
        for wrong in [
            "",
            "delay",
            "delay=20",
            "error=101%",
            "error=1",
            "lost=1%,op=write",
            "delay=1s,by=1s",
            "lie=always",
            "throttle=5",
            "log=-",
        ] {
            let refused = parse(wrong).expect_err("none").in_one_line();
            assert!(refused.contains(wrong) && refused.contains("lost=SHARE"), "{refused}");
        }
    }
}

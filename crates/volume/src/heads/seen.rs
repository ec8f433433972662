//! A head that was read by whoever is about to open its volume, so that it is not read again.
//!
//! Invariants
//! - I1 It is a guess. It opens the volume only if it is the newest still, which the put of the
//!   next head decides, as always; and it refuses nothing: what it would refuse is looked at again.
//! - I2 With a log, one counts only if it was read while this process had that log already.
//!   Otherwise another process may have gone on with the volume and the log in between, and what
//!   the log has now would be judged by a head from before.

use super::Heads;
use crate::format::head::Head;
use crate::names::VolumeName;
use crate::turn::Turn;
use mica_block::Result;

/// The newest head of a volume, as it was read a moment ago.
#[derive(Clone, Debug)]
pub struct Seen {
    name: VolumeName,
    head: Head,
    /// Before it was read.
    turn: Turn,
}

impl Seen {
    pub(crate) fn head(&self) -> &Head {
        &self.head
    }

    /// The head, if it counts for who opens the volume `name` with a log that was opened at
    /// `log_opened`, if with one (I2).
    pub(crate) fn head_for(self, name: &VolumeName, log_opened: Option<Turn>) -> Option<Head> {
        let is_since = log_opened.is_none_or(|opened| opened < self.turn);
        (self.name == *name && is_since).then_some(self.head)
    }
}

impl Heads {
    /// As [`Self::newest`], to go on from.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn look(&self) -> Result<Seen> {
        let turn = Turn::next();
        Ok(Seen { name: self.name.clone(), head: self.newest().await?, turn })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{memory, name, run, volumes};
    use std::sync::Arc;

    /// I2: another process may have gone on with the log between the look and the log's opening.
    #[test]
    fn head_that_was_seen_before_a_log_was_opened_does_not_count_beside_the_log() {
        run(1, async {
            let volumes =
                volumes(&(Arc::new(memory()) as Arc<dyn mica_block::Objects>), "host").await;
            volumes.create(&name("web"), 1 << 20).await.expect("made");
            let heads = volumes.heads(&name("web"));
            let before = heads.look().await.expect("there");
            let log_opened = Some(Turn::next());
            let after = heads.look().await.expect("there");
            assert!(before.clone().head_for(&name("web"), log_opened).is_none());
            assert!(before.head_for(&name("web"), None).is_some());
            assert!(after.clone().head_for(&name("web"), log_opened).is_some());
            assert!(after.head_for(&name("mail"), None).is_none());
        });
    }
}

//! Taking back a volume that was handed over, before its heir opens it.

use super::{Heads, ROUNDS_MAX, host_name};
use crate::format::head::{Head, Life};
use mica_block::{Error, ErrorKind, Result};

impl Heads {
    /// Gives a volume back that this host handed over: nobody has it then. Its heir may be opening
    /// it at the same time: of the two heads that follow the one that was read, only one is put.
    ///
    /// # Errors
    /// `Invalid` if it is handed over to nobody; `Denied` if its heir, or somebody else, has opened
    /// it by now, or another host handed it over; otherwise what the store reports.
    pub(crate) async fn take_back(&self) -> Result<()> {
        for _ in 0..ROUNDS_MAX {
            let before = self.ready().await?;
            self.check_ours_to_take_back(&before)?;
            let head = self.after(&before, Life::Closed, before.state)?;
            if self.put_highest(&head).await? {
                return Ok(());
            }
        }
        Err(self.too_busy())
    }

    fn check_ours_to_take_back(&self, head: &Head) -> Result<()> {
        let (name, host, heir) = (self.name.as_str(), &head.host, &head.heir);
        let (kind, what) = match head.life {
            Life::HandedOver if *host == host_name(self.environment.host()) => return Ok(()),
            Life::HandedOver => {
                let what = format!(
                    "volume {name} was handed over to {heir} by {host}: only {host} can take it \
                     back; or serve it with --force"
                );
                (ErrorKind::Denied, what)
            }
            Life::Open { writer, .. } => return Err(self.in_use(head, writer)),
            Life::Closed | Life::Deleted | Life::Pinned => {
                let what = format!(
                    "volume {name} is handed over to no host: there is nothing to take back"
                );
                (ErrorKind::Invalid, what)
            }
        };
        Err(Error::new(kind, what))
    }
}

//! Another key for a volume that nobody has open: one put, and the heads with the old one go.

use super::{Heads, ROUNDS_MAX};
use crate::format::head::Head;
use crate::properties::Properties;
use crate::put::{Patience, list};
use mica_block::{LIST_MAX, ObjectName, Result};

impl Heads {
    /// Gives the volume, which nobody has open, the properties that `change` makes of its own, and
    /// deletes the heads below, which have others; false if `change` makes none.
    ///
    /// # Errors
    /// `Denied` if it is open, or meant for another host; as `change`; what the store reports.
    pub(crate) async fn rekey(
        &self,
        change: impl Fn(&Properties) -> Result<Option<Properties>>,
    ) -> Result<bool> {
        for _ in 0..ROUNDS_MAX {
            let before = self.ready().await?;
            self.check_free(&before)?;
            let Some(properties) = change(&before.properties)? else {
                // Whoever did it may have been killed before the others went.
                self.delete_older(before.number).await;
                return Ok(false);
            };
            let heir = before.heir.clone();
            let head = Head { properties, heir, ..self.after(&before, before.life, before.state)? };
            if self.put_highest(&head).await? {
                self.delete_older(head.number).await;
                return Ok(true);
            }
        }
        Err(self.too_busy())
    }

    /// Deletes all heads below one that was the highest. What could not be deleted, a collector
    /// deletes.
    async fn delete_older(&self, number: u64) {
        if let Err(error) = self.delete_below(number).await {
            let (volume, error) = (self.name.as_str(), error.in_one_line());
            tracing::warn!(volume, error, "heads with the old key stay until collection");
        }
    }

    async fn delete_below(&self, number: u64) -> Result<()> {
        let mut after: Option<ObjectName> = None;
        loop {
            let folder = self.name.folder();
            let page = list(&*self.objects, &folder, after.as_ref(), Patience::VERB).await?;
            for entry in &page {
                if self.number_of(entry.name())? < number {
                    self.objects.delete(entry.name()).await?;
                }
            }
            after = page.last().map(|entry| entry.name().clone());
            if page.len() < LIST_MAX {
                return Ok(());
            }
        }
    }
}

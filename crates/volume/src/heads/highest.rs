//! The highest head of a volume, found without a look at all of them: a volume that no collector
//! has seen for long has many.

use super::Heads;
use crate::format::head::Head;
use crate::names;
use crate::put::{Patience, last_after, list};
use mica_block::{Entry, Error, ErrorKind, LIST_MAX, ObjectName, Result};

const PAGE: u64 = LIST_MAX as u64;

impl Heads {
    /// The name of the highest head.
    ///
    /// # Errors
    /// `Corrupt` if something else is among the heads; otherwise what the store reports.
    pub(super) async fn highest(&self) -> Result<Option<ObjectName>> {
        let page = self.list_after(None).await?;
        let Some(mut last) = page.last().map(|entry| entry.name().clone()) else {
            return Ok(None);
        };
        if page.len() < LIST_MAX {
            return Ok(Some(last));
        }
        // Strides double as long as there is something beyond, and shrink where there is not.
        let mut stride = PAGE;
        loop {
            let beyond = self.name.head(self.number_of(&last)?.saturating_add(stride));
            let page = self.list_after(Some(&beyond)).await?;
            match page.last() {
                Some(entry) if page.len() < LIST_MAX => return Ok(Some(entry.name().clone())),
                Some(entry) => {
                    last = entry.name().clone();
                    stride = stride.saturating_mul(2);
                }
                None if stride > PAGE => stride = (stride / 4).max(PAGE),
                None => {
                    let rest = last_after(&*self.objects, &self.name.folder(), &last).await?;
                    return Ok(rest.or(Some(last)));
                }
            }
        }
    }

    /// Whether there is none above `head`, which was there.
    ///
    /// # Errors
    /// What the store reports.
    pub(crate) async fn is_highest(&self, head: &Head) -> Result<bool> {
        let above = self.list_after(Some(&self.name.head(head.number))).await?;
        Ok(above.is_empty())
    }

    /// The number of the head with this name.
    ///
    /// # Errors
    /// `Corrupt` if it is the name of something else.
    pub(super) fn number_of(&self, name: &ObjectName) -> Result<u64> {
        names::number(name).ok_or_else(|| {
            let what = format!("{name} of {} is not a valid head", self.objects.name());
            Error::new(ErrorKind::Corrupt, what)
        })
    }

    async fn list_after(&self, after: Option<&ObjectName>) -> Result<Vec<Entry>> {
        list(&*self.objects, &self.name.folder(), after, Patience::VERB).await
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{memory, name, run, volumes};
    use mica_block::Objects;
    use mica_rt::Buf;
    use mica_store::object::{FaultyObjects, FaultyOptions, ObjectOperation};
    use mica_units::Rng;
    use std::sync::Arc;

    #[test]
    fn highest_of_any_number_of_heads_is_found_with_few_listings() {
        for seed in 0..10 {
            run(seed, async {
                let mut rng = Rng::new(seed);
                let only = Some(ObjectOperation::List);
                let options = FaultyOptions { only, ..FaultyOptions::default() };
                let counting = FaultyObjects::new(Arc::new(memory()), options);
                let objects: Arc<dyn Objects> = Arc::new(counting.clone());
                let heads = volumes(&objects, "host").await.heads(&name("web"));
                let (mut number, mut last) = (rng.below(1 << 40), None);
                for _ in 0..rng.below(20_000) {
                    let head = name("web").head(number);
                    objects.put_if_absent(&head, Buf::new(0)).await.0.expect("put");
                    last = Some(head);
                    number += if rng.percent(99) { 1 } else { 1 + rng.below(100) };
                }
                let before = counting.requests();
                assert_eq!(heads.highest().await.expect("listed"), last, "seed {seed}");
                let listings = counting.requests() - before;
                assert!(listings <= 16, "seed {seed}: {listings}");
            });
        }
    }
}

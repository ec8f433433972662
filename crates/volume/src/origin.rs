//! What a clone was made of, and what became of that.
//!
//! Invariants
//! - I1 It is for people: a clone needs nothing of its source.
//! - I2 A volume is the source only if it has the source's identity: its name may be used again.

use crate::format::origin::Origin;
use crate::heads::Heads;
use crate::snapshots::find;
use crate::tree::Tree;
use mica_block::{ClonedFrom, ErrorKind, Result, SourceNow, Which};

impl Origin {
    /// With what is known of the source.
    pub fn with(&self, now: SourceNow) -> ClonedFrom {
        let (volume, snapshot) = (self.name.as_str().to_owned(), self.snapshot);
        ClonedFrom { volume, snapshot, now }
    }

    /// With what `heads`, those of its name, say of it.
    pub(crate) async fn looked_up(&self, heads: &Heads, tree: &Tree) -> ClonedFrom {
        // The clone is what it is, whatever is wrong with its source.
        self.with(self.look_up(heads, tree).await.unwrap_or(SourceNow::Unknown))
    }

    async fn look_up(&self, heads: &Heads, tree: &Tree) -> Result<SourceNow> {
        match heads.newest().await {
            Ok(head) if head.volume == self.volume => {}
            // Another volume may have its name by now.
            Ok(_) => return Ok(SourceNow::VolumeDeleted),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(SourceNow::VolumeDeleted);
            }
            Err(error) => return Err(error),
        }
        let Some(number) = self.snapshot else {
            return Ok(SourceNow::There { label: String::new() });
        };
        let found = heads.with_counting(async |head, state| {
            if head.volume != self.volume {
                return Ok(SourceNow::VolumeDeleted);
            }
            let found = find(tree, state.snapshots, &Which::Number(number)).await?;
            Ok(found.map_or(SourceNow::SnapshotDropped, |record| SourceNow::There {
                label: record.info.label.clone(),
            }))
        });
        found.await
    }
}

#[cfg(test)]
mod tests {
    use crate::format::head::HEAD_BYTES;
    use crate::heads::Claimed;
    use crate::testing::{memory, name, run, volumes, write};
    use crate::volumes::Volumes;
    use mica_block::{Manage, ManageVolume, Objects, Which};
    use mica_rt::Buf;
    use std::sync::Arc;

    /// What is said of a volume.
    async fn source(volumes: &Volumes, text: &str) -> String {
        let info = volumes.info(&name(text)).await.expect("there");
        volumes.cloned_from(&info).await.map_or("-".to_owned(), |from| from.to_string())
    }

    #[test]
    fn source_of_a_clone_is_told_as_it_is_now() {
        run(1, async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let volumes = volumes(&objects, "host").await;
            let (gold, web, copy) = (name("gold"), name("web"), name("copy"));
            volumes.create(&gold, 1 << 20).await.expect("made");
            let first = volumes.take_snapshot(&gold, "v1").await.expect("taken").number;
            volumes.clone_volume(&gold, Some(&Which::Number(first)), &web).await.expect("cloned");
            assert_eq!(source(&volumes, "gold").await, "-");
            assert_eq!(source(&volumes, "web").await, "gold@v1");
            // A clone of a clone, of what it has now.
            volumes.clone_volume(&web, None, &copy).await.expect("cloned");
            assert_eq!(source(&volumes, "copy").await, "web");

            // Writers come and go; one that has it open says the same.
            let open = volumes.open_volume(&web, Claimed::Refuse).await.expect("open");
            write(&open, 0, &[1; 4096]).await;
            open.checkpoint().await.expect("in a head");
            let said = ManageVolume::cloned_from(&open).await.map(|from| from.to_string());
            assert_eq!(said.as_deref(), Some("gold@v1"));
            open.close().await.expect("closed");
            assert_eq!(source(&volumes, "web").await, "gold@v1");

            // Its label goes to another snapshot.
            let which = Which::Number(first);
            volumes.label_snapshot(&gold, &which, "").await.expect("labelled");
            assert_eq!(source(&volumes, "web").await, "gold@1");
            volumes.take_snapshot(&gold, "v1").await.expect("taken");
            volumes.label_snapshot(&gold, &which, "old").await.expect("labelled");
            assert_eq!(source(&volumes, "web").await, "gold@old");
            volumes.drop_snapshot(&gold, &which).await.expect("dropped");
            assert_eq!(source(&volumes, "web").await, "gold, snapshot 1 (since dropped)");

            // Its name goes to another volume, which has a snapshot of that number, too.
            volumes.delete(&gold, Claimed::Refuse).await.expect("deleted");
            assert_eq!(source(&volumes, "web").await, "gold (since deleted), snapshot 1");
            volumes.create(&gold, 1 << 20).await.expect("made");
            volumes.take_snapshot(&gold, "v1").await.expect("taken");
            assert_eq!(source(&volumes, "web").await, "gold (since deleted), snapshot 1");
            volumes.delete(&web, Claimed::Refuse).await.expect("deleted");
            assert_eq!(source(&volumes, "copy").await, "web (since deleted)");
        });
    }

    #[test]
    fn source_that_cannot_be_read_is_no_obstacle() {
        run(1, async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let volumes = volumes(&objects, "host").await;
            let (gold, web) = (name("gold"), name("web"));
            volumes.create(&gold, 1 << 20).await.expect("made");
            volumes.take_snapshot(&gold, "v1").await.expect("taken");
            let label = Which::Label("v1".to_owned());
            volumes.clone_volume(&gold, Some(&label), &web).await.expect("cloned");
            let number = volumes.heads(&gold).newest().await.expect("there").number;
            let garbage = Buf::from_slice(&[7; HEAD_BYTES]);
            let damaged = gold.head(number + 1);
            objects.put_if_absent(&damaged, garbage).await.0.expect("put");
            assert_eq!(source(&volumes, "web").await, "gold, snapshot 1");
        });
    }

    /// An older version of mica puts the head alone.
    #[test]
    fn source_is_not_known_of_a_clone_that_an_older_version_wrote() {
        run(1, async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let volumes = volumes(&objects, "host").await;
            let (gold, web) = (name("gold"), name("web"));
            volumes.create(&gold, 1 << 20).await.expect("made");
            volumes.clone_volume(&gold, None, &web).await.expect("cloned");
            let heads = volumes.heads(&web);
            let head = heads.newest().await.expect("there");
            let (place, mut whole) = heads.as_object(&head);
            whole.truncate(HEAD_BYTES);
            objects.delete(&place).await.expect("deleted");
            objects.put_if_absent(&place, whole).await.0.expect("put");
            assert_eq!(source(&volumes, "web").await, "-");
            let open = volumes.open_volume(&web, Claimed::Refuse).await.expect("open");
            open.close().await.expect("closed");
            assert_eq!(source(&volumes, "web").await, "-");
        });
    }
}

//! What becomes of the client of a writer that is fenced.

use super::Claimed;
use crate::testing::{memory, name, read, run, volumes, write};
use crate::volumes::Volumes;
use mica_block::{
    Entry, Error, ErrorKind, LocalFuture, Manage, Object, ObjectName, Objects, PutFuture, Result,
};
use mica_rt::Buf;
use mica_store::object::MemoryObjects;
use std::future::ready;
use std::sync::{Arc, Mutex};

/// A store that knows its clients, as one of them sees it.
#[derive(Clone)]
struct Clients {
    inner: MemoryObjects,
    client: &'static str,
    /// Whether it lets clients shut others out.
    is_allowed: bool,
    shut_out: Arc<Mutex<Vec<String>>>,
}

impl Objects for Clients {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        self.inner.open(name)
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.inner.put_if_absent(name, content)
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.inner.list(folder, after)
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        self.inner.delete(name)
    }

    fn client(&self) -> Option<String> {
        Some(self.client.to_owned())
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        self.shut_out.lock().expect("no panic").push(client.to_owned());
        let denied = || Error::new(ErrorKind::Denied, "the key does not allow it");
        Box::pin(ready(if self.is_allowed { Ok(()) } else { Err(denied()) }))
    }
}

async fn of(store: &Clients, client: &'static str) -> Volumes {
    let objects: Arc<dyn Objects> = Arc::new(Clients { client, ..store.clone() });
    volumes(&objects, client).await
}

#[test]
fn client_of_a_writer_is_shut_out_only_by_those_who_take_its_volume_over() {
    for is_allowed in [true, false] {
        run(u64::from(is_allowed), async {
            let store =
                Clients { inner: memory(), client: "", is_allowed, shut_out: Arc::default() };
            let said = || store.shut_out.lock().expect("no panic").clone();
            let (one, two) = (of(&store, "one").await, of(&store, "two").await);
            let web = name("web");
            one.create(&web, 1 << 20).await.expect("made");
            let old = one.open_volume(&web, Claimed::Refuse).await.expect("open");
            write(&old, 0, &[1; 4096]).await;
            let refused = two.open_volume(&web, Claimed::Refuse).await.map(drop);
            assert_eq!(refused.expect_err("it is open").kind(), ErrorKind::Denied);
            assert_eq!(said(), [""; 0], "nobody takes it over");
            let new = two.open_volume(&web, Claimed::TakeOver).await.expect("fenced all the same");
            assert_eq!(said(), ["one"]);
            write(&new, 0, &[2; 4096]).await;
            assert_eq!(read(&new, 0, 4096).await, [2; 4096]);
            new.close().await.expect("closed");
            // One that is closed is nobody's; and who was killed here does not shut itself out.
            drop(one.open_volume(&web, Claimed::TakeOver).await.expect("open"));
            let again = one.open_volume(&web, Claimed::TakeOver).await.expect("open");
            assert_eq!(said(), ["one"]);
            drop(again);
            two.delete(&web, Claimed::TakeOver).await.expect("deleted");
            assert_eq!(said(), ["one", "one"]);
        });
    }
}

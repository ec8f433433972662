//! Making what has to be there before an object is: each folder's marker, and the object that says
//! how the store is laid out.

use crate::ffi::{Answer, Errno, Request};
use crate::layout::{LAYOUT, Place};
use crate::shared::Shared;
use mica_block::{Error, ErrorKind, ObjectName, Result};
use mica_rt::{Buf, join_all};

impl Shared {
    /// Whether [`Self::make_folders`] has nothing to do for `name`.
    pub(crate) fn knows_folders_of(&self, name: &ObjectName) -> bool {
        self.folders.is_ours() && self.folders.unknown(name).is_empty()
    }

    /// Makes the folders that `name` is in, and the store if it is new.
    pub(crate) async fn make_folders(&self, name: &ObjectName) -> Result<()> {
        if !self.folders.is_ours() {
            self.put_new(Place::of_layout(), LAYOUT).await?;
            self.check_layout().await?;
        }
        let missing = self.folders.unknown(name);
        let puts = missing.iter().map(|folder| self.put_new(Place::of_marker(folder), b""));
        join_all(puts).await.into_iter().collect::<Result<()>>()?;
        for folder in missing {
            self.folders.learn(folder);
        }
        Ok(())
    }

    /// Puts what anybody may have put already.
    async fn put_new(&self, place: Place, content: &[u8]) -> Result<()> {
        let text = place.name.to_string_lossy().into_owned();
        let creating = self.requests.begin(place, Request::Create(Buf::from_slice(content)));
        match creating.await.result {
            Ok(()) | Err(Errno(libc::EEXIST)) => Ok(()),
            Err(errno) => Err(self.error("putting", &text, errno).await),
        }
    }

    /// Whether there is something in the store, which then is laid out as this one does it.
    ///
    /// # Errors
    /// `Unsupported` if it is laid out in another way.
    pub(crate) async fn check_layout(&self) -> Result<bool> {
        if self.folders.is_ours() {
            return Ok(true);
        }
        const LEN: usize = LAYOUT.len() + 1;
        let place = Place::of_layout();
        let name = place.name.to_string_lossy().into_owned();
        let Answer { result, buf, count, .. } =
            self.requests.begin(place, Request::Read(Buf::new(LEN), 0)).await;
        match result {
            Ok(()) => {}
            Err(errno) => match self.error("reading", &name, errno).await {
                error if error.kind() == ErrorKind::NotFound => return Ok(false),
                error => return Err(error),
            },
        }
        let store = &self.name;
        if buf[..count] != *LAYOUT {
            let what = format!(
                "{store} was made by another version of mica, or by something else: {name} there \
                 says {:?}",
                String::from_utf8_lossy(&buf[..count])
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        if !self.lists.has_layout().await.map_err(|errno| self.listing_failed(errno))? {
            let what = format!(
                "{store}: this pool places objects in a way that mica does not know: use another \
                 pool"
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        self.folders.set_ours();
        Ok(true)
    }
}

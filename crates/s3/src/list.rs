//! Listing a folder of a bucket.
//!
//! A bucket lists by keys, where a folder counts as its name and a `/`; [`Objects::list`] by names.
//! They differ for `web` and `web-1`: `web-1/` comes before `web/`. So a folder whose name is the
//! beginning of the last key of a page may come later, though its name belongs before: it is looked
//! for. There are as many of them as the name has `-` and `.`.
//!
//! [`Objects::list`]: mica_block::Objects::list

use mica_block::{Entry, ObjectName};
use object_store::Result;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use std::collections::BTreeMap;

/// A folder that is listed.
pub(crate) struct Listing<'a> {
    pub(crate) client: &'a dyn PaginatedListStore,
    /// What keys begin with, before the names of objects.
    pub(crate) prefix: &'a str,
    pub(crate) folder: Option<&'a ObjectName>,
    pub(crate) after: Option<&'a ObjectName>,
    pub(crate) depth: Depth,
    /// How many entries are returned at most.
    pub(crate) count_max: usize,
}

/// How deep is looked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Depth {
    /// At what is directly in the folder.
    Folder,
    /// At all objects in it and in its folders.
    All,
}

type Entries = BTreeMap<ObjectName, Entry>;

impl Listing<'_> {
    pub(crate) async fn run(&self) -> Result<Vec<Entry>> {
        match self.depth {
            Depth::Folder => self.folder().await,
            Depth::All => self.all().await,
        }
    }

    async fn folder(&self) -> Result<Vec<Entry>> {
        let inside = self.inside();
        let Some(after) = self.after_in(&inside) else { return Ok(Vec::new()) };
        let prefix = format!("{}{inside}", self.prefix);
        let offset = after.map(|after| format!("{}{after}", self.prefix));
        let mut entries = Entries::new();
        let is_wanted = |name: &ObjectName| after.is_none_or(|after| name.as_str() > after);
        let mut page_token = None;
        loop {
            let options = PaginatedListOptions {
                offset: offset.clone(),
                delimiter: Some("/".into()),
                page_token,
                ..Default::default()
            };
            let last = self.page(&prefix, options, &mut entries).await?;
            entries.retain(|name, _| is_wanted(name));
            page_token = last.token;
            if page_token.is_none() {
                break;
            }
            if entries.len() >= self.count_max {
                self.look_for_folders(&inside, &last.name, &mut entries).await?;
                break;
            }
        }
        entries.retain(|name, _| is_wanted(name));
        Ok(entries.into_values().take(self.count_max).collect())
    }

    /// Keys have the order of names here.
    async fn all(&self) -> Result<Vec<Entry>> {
        let inside = self.inside();
        let Some(after) = self.after_in(&inside) else { return Ok(Vec::new()) };
        let prefix = format!("{}{inside}", self.prefix);
        let offset = after.map(|after| format!("{}{after}", self.prefix));
        let (mut entries, mut page_token) = (Entries::new(), None);
        loop {
            let options =
                PaginatedListOptions { offset: offset.clone(), page_token, ..Default::default() };
            page_token = self.page(&prefix, options, &mut entries).await?.token;
            // Whoever asks for page after page comes to an end, whatever the service says.
            entries.retain(|name, _| after.is_none_or(|after| name.as_str() > after));
            if page_token.is_none() || entries.len() >= self.count_max {
                return Ok(entries.into_values().take(self.count_max).collect());
            }
        }
    }

    /// What the names of all that is in the folder begin with.
    fn inside(&self) -> String {
        self.folder.map_or(String::new(), |folder| format!("{folder}/"))
    }

    /// The name in the folder that all have to be behind, if there is one; `None` if none of them
    /// is.
    fn after_in(&self, inside: &str) -> Option<Option<&str>> {
        match self.after.map(ObjectName::as_str) {
            Some(after) if after.starts_with(inside) => Some(Some(after)),
            Some(after) if *after > *inside => None,
            _ => Some(None),
        }
    }

    /// Takes in one page of the bucket.
    async fn page(
        &self,
        prefix: &str,
        options: PaginatedListOptions,
        entries: &mut Entries,
    ) -> Result<Page> {
        let page = self.client.list_paginated(Some(prefix), options).await?;
        let name_of = |key: &str| key.strip_prefix(self.prefix).map(ObjectName::new);
        let mut last = String::new();
        for object in page.result.objects {
            let key = object.location.as_ref();
            last = last.max(key.to_owned());
            // Other keys are no objects'.
            if let Some(Ok(name)) = name_of(key) {
                let entry = Entry::Object { name: name.clone(), len: object.size };
                entries.insert(name, entry);
            }
        }
        for folder in page.result.common_prefixes {
            last = last.max(format!("{folder}/"));
            if let Some(Ok(name)) = name_of(folder.as_ref()) {
                entries.insert(name.clone(), Entry::Folder(name));
            }
        }
        let name = last.strip_prefix(self.prefix).unwrap_or(&last).trim_end_matches('/').to_owned();
        Ok(Page { token: page.page_token, name })
    }

    /// Looks for folders that come later in the order of keys than `last`, not in that of names.
    async fn look_for_folders(
        &self,
        inside: &str,
        last: &str,
        entries: &mut Entries,
    ) -> Result<()> {
        for (end, _) in last.match_indices(['-', '.']).filter(|(end, _)| *end > inside.len()) {
            let Ok(folder) = ObjectName::new(&last[..end]) else { continue };
            let options = PaginatedListOptions { max_keys: Some(1), ..Default::default() };
            let prefix = format!("{}{folder}/", self.prefix);
            let found = self.client.list_paginated(Some(&prefix), options).await?.result;
            if !found.objects.is_empty() {
                entries.insert(folder.clone(), Entry::Folder(folder));
            }
        }
        Ok(())
    }
}

/// A page of a bucket.
struct Page {
    /// Where the next one begins.
    token: Option<String>,
    /// The last name in the order of keys.
    name: String,
}

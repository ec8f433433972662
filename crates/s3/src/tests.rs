//! A bucket of moto, a server for tests; and what needs no server.

use crate::list::{Depth, Listing};
use crate::outcome::{error_of, says_exists};
use crate::{Bucket, BucketOptions, Credentials};
use mica_block::{Entry, ErrorKind, ObjectName, Objects};
use mica_rt::{Backend, Buf, Executor};
use mica_store::object::{probe, testing::conform};
use mica_tests::bucket::BucketServer;
use object_store::list::{PaginatedListOptions, PaginatedListResult, PaginatedListStore};
use object_store::path::Path;
use object_store::{Error as ClientError, ListResult, ObjectMeta};
use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;

fn open(server: &BucketServer, bucket: &str, folder: Option<&str>) -> Bucket {
    let any = || "any".to_owned();
    Bucket::open(BucketOptions {
        bucket: bucket.to_owned(),
        folder: folder.map(|folder| ObjectName::new(folder).expect("a name")),
        endpoint: Some(server.endpoint()),
        region: Some("us-east-1".to_owned()),
        credentials: Some(Credentials { key_id: any(), secret: any() }),
    })
    .expect("opened")
}

#[test]
fn bucket_keeps_the_promises_of_a_store() {
    let Some(server) = BucketServer::start() else { return };
    server.make_bucket("one");
    for folder in [None, Some("in/it")] {
        let bucket = open(&server, "one", folder);
        assert!(bucket.name().starts_with("s3://one/"));
        let executor = Executor::new(Backend::Auto).expect("a backend");
        executor.block_on(probe(&bucket, 1)).expect("it passes the probe");
    }
    conform(Backend::Auto, &(Arc::new(open(&server, "one", Some("in/it"))) as _));
}

#[test]
fn missing_bucket_is_no_missing_object_and_a_dead_server_may_come_back() {
    let Some(server) = BucketServer::start() else { return };
    let bucket = open(&server, "none", None);
    let executor = Executor::new(Backend::Pool).expect("threads");
    let name = ObjectName::new("a").expect("a name");
    let put = || executor.block_on(bucket.put_if_absent(&name, Buf::from_slice(b"bytes")));
    let (missing, content) = put();
    assert_eq!(missing.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(*content, *b"bytes");
    drop(server);
    let (dead, content) = put();
    let dead = dead.unwrap_err();
    assert_eq!(dead.kind(), ErrorKind::Io, "{dead:?}");
    assert!(!dead.in_one_line().contains('\n'));
    assert_eq!(*content, *b"bytes");
}

#[test]
fn conflict_is_no_proof_that_there_is_an_object() {
    let refused = || ClientError::Precondition { path: "a".into(), source: "412".into() };
    let exists = |source| ClientError::AlreadyExists { path: "a".into(), source };
    assert!(says_exists(&exists(refused().into())));
    assert!(!says_exists(&exists("409".into())));
    assert!(!says_exists(&refused()));
    assert_eq!(error_of("putting".into(), exists("409".into())).kind(), ErrorKind::Io);
}

/// A bucket with these keys, which lists a few at a time.
struct Keys {
    keys: BTreeSet<String>,
    page_len: usize,
}

impl Keys {
    fn page(&self, prefix: &str, options: &PaginatedListOptions) -> PaginatedListResult {
        let from = options.page_token.as_ref().or(options.offset.as_ref());
        let mut found = BTreeSet::new();
        for key in self.keys.iter().filter(|key| from.is_none_or(|from| *key > from)) {
            let Some(rest) = key.strip_prefix(prefix) else { continue };
            let end = options.delimiter.as_ref().and_then(|_| rest.find('/'));
            let entry = end.map_or(key.clone(), |end| key[..=prefix.len() + end].to_owned());
            // What a page ends with is not returned again.
            if from.is_none_or(|from| entry > *from) {
                found.insert(entry);
            }
        }
        let count = self.page_len.min(options.max_keys.unwrap_or(usize::MAX));
        let page: Vec<_> = found.iter().take(count).cloned().collect();
        let page_token = (found.len() > count).then(|| page[count - 1].clone());
        let (folders, objects): (Vec<_>, Vec<_>) =
            page.into_iter().partition(|entry| entry.ends_with('/'));
        let object = |key: String| ObjectMeta {
            location: Path::from(key),
            last_modified: Default::default(),
            size: 3,
            e_tag: None,
            version: None,
        };
        let result = ListResult {
            common_prefixes: folders.into_iter().map(Path::from).collect(),
            objects: objects.into_iter().map(object).collect(),
            extensions: Default::default(),
        };
        PaginatedListResult { result, page_token }
    }
}

impl PaginatedListStore for Keys {
    fn list_paginated<'own, 'prefix, 'future>(
        &'own self,
        prefix: Option<&'prefix str>,
        options: PaginatedListOptions,
    ) -> Pin<Box<dyn Future<Output = object_store::Result<PaginatedListResult>> + Send + 'future>>
    where
        'own: 'future,
        'prefix: 'future,
        Self: 'future,
    {
        let page = self.page(prefix.unwrap_or(""), &options);
        Box::pin(std::future::ready(Ok(page)))
    }
}

/// All that `keys` list in `folder`, this deep, `count_max` at a time.
async fn list_all(
    keys: &Keys,
    (folder, depth): (Option<&ObjectName>, Depth),
    count_max: usize,
) -> Vec<Entry> {
    let mut all: Vec<Entry> = Vec::new();
    loop {
        let after = all.last().map(|entry| entry.name().clone());
        let after = after.as_ref();
        let page = Listing { client: keys, prefix: "in/", folder, after, depth, count_max };
        let page = page.run().await.expect("listed");
        let is_last = page.len() < count_max;
        all.extend(page);
        if is_last {
            return all;
        }
    }
}

#[test]
fn pages_are_in_the_order_of_names_though_the_bucket_has_another() {
    let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
    executor.block_on(async {
        let folder = ObjectName::new("f").expect("a name");
        let mut state = 1;
        for _ in 0..3000 {
            let mut random = |below: u64| {
                usize::try_from(mica_units::next_random(&mut state) % below).expect("small")
            };
            let mut keys = BTreeSet::new();
            let mut expected = BTreeSet::new();
            for _ in 0..random(30) {
                let part: String =
                    (0..=random(4)).map(|_| ["w", "-", ".", "0"][random(4)]).collect();
                let Ok(name) = ObjectName::new(&format!("f/{part}")) else { continue };
                expected.insert(name);
            }
            for name in &expected {
                // Whether a name is a folder's follows from it.
                match name.as_str().len() % 2 {
                    0 => keys.insert(format!("in/{name}/-a/b")),
                    _ => keys.insert(format!("in/{name}")),
                };
            }
            keys.extend(["in/e/x", "in/f-/x", "in/g", "f/other", "out"].map(str::to_owned));
            let keys = Keys { keys, page_len: 1 + random(6) };
            let listed = list_all(&keys, (Some(&folder), Depth::Folder), 1 + random(6)).await;
            assert!(listed.iter().map(Entry::name).eq(&expected), "{:?}: {listed:?}", keys.keys);
            let is_right = |entry: &Entry| match entry {
                Entry::Folder(name) => name.as_str().len().is_multiple_of(2),
                Entry::Object { name, len } => !name.as_str().len().is_multiple_of(2) && *len == 3,
            };
            assert!(listed.iter().all(is_right));
            let inside = list_all(&keys, (Some(&folder), Depth::All), 1 + random(6)).await;
            let own = keys.keys.iter().filter_map(|key| key.strip_prefix("in/"));
            let own = own.filter(|name| name.starts_with("f/"));
            assert!(own.eq(inside.iter().map(|entry| entry.name().as_str())), "{inside:?}");
            let top = list_all(&keys, (None, Depth::Folder), 1 + random(3)).await;
            let top: Vec<_> = top.iter().map(|entry| entry.name().as_str()).collect();
            let folder = if expected.is_empty() { None } else { Some("f") };
            let all = ["e"].into_iter().chain(folder).chain(["f-", "g"]);
            assert!(all.eq(top.iter().copied()), "{top:?}");
        }
    });
}

//! A bucket, or a folder of one, as a store of objects.

use crate::list::{Depth, Listing};
use crate::outcome::{error_of, is_missing_bucket, says_exists};
use crate::runtime::Runtime;
use bytes::Bytes;
use futures_util::TryStreamExt;
use mica_block::{
    EndFuture, Entry, Error, ErrorKind, IoFuture, LIST_MAX, LocalFuture, Object, ObjectName,
    Objects, Put, PutFuture, Result, ready,
};
use mica_rt::Buf;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    ClientOptions, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    RetryConfig,
};
use std::sync::Arc;
use std::time::Duration;

/// Where a bucket is, and who asks.
pub struct BucketOptions {
    /// Its name.
    pub bucket: String,
    /// The folder of it that objects are in; all of it if it is `None`.
    pub folder: Option<ObjectName>,
    /// The address of a service other than Amazon's.
    pub endpoint: Option<String>,
    /// Its region.
    pub region: Option<String>,
    /// If they are not given, they are those of the environment (`AWS_…`), or the machine's.
    pub credentials: Option<Credentials>,
}

/// The credentials of a client. They are never printed.
pub struct Credentials {
    /// The name of the key.
    pub key_id: String,
    /// The key.
    pub secret: String,
}

/// A bucket as a store of objects.
pub struct Bucket {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    /// What keys begin with.
    prefix: String,
    client: AmazonS3,
    runtime: Runtime,
}

/// How long a request may take. A store that never answers is asked again.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Reads from here on are beyond the end of any object: some services fail at larger numbers.
const OFFSET_MAX: u64 = 1 << 50;

impl Bucket {
    /// The store in a bucket. Asks it nothing.
    ///
    /// # Errors
    /// `Invalid` if the options make no sense; any error of the system.
    pub fn open(options: BucketOptions) -> Result<Self> {
        let BucketOptions { bucket, folder, endpoint, region, credentials } = options;
        // It fails if another was chosen before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let may_be_plain = endpoint.as_deref().is_some_and(|url| url.starts_with("http://"));
        let client = ClientOptions::new()
            .with_timeout(REQUEST_LIMIT)
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_allow_http(may_be_plain);
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&bucket)
            .with_client_options(client)
            .with_retry(retry)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_disable_bulk_delete(true);
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(region) = region {
            builder = builder.with_region(region);
        }
        if let Some(Credentials { key_id, secret }) = credentials {
            builder = builder.with_access_key_id(key_id).with_secret_access_key(secret);
        }
        let prefix = folder.map_or(String::new(), |folder| format!("{folder}/"));
        let name = format!("s3://{bucket}/{prefix}");
        let client = builder
            .build()
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("{name}: {error}")))?;
        let runtime = Runtime::start()?;
        Ok(Self { shared: Arc::new(Shared { name, prefix, client, runtime }) })
    }

    fn list_to(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
        depth: Depth,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let (folder, after) = (folder.cloned(), after.cloned());
        let shared = Arc::clone(&self.shared);
        Box::pin(self.shared.runtime.run(async move {
            let Shared { client, prefix, name, .. } = &*shared;
            let (folder, after) = (folder.as_ref(), after.as_ref());
            let listing = Listing { client, prefix, folder, after, depth, count_max: LIST_MAX };
            let listed = listing.run().await;
            listed.map_err(|error| {
                let is_missing = is_missing_bucket(&error);
                let error = error_of(format!("listing objects of {name}"), error);
                match is_missing {
                    true => Error::new(ErrorKind::Invalid, "there is no such bucket").wrap(name),
                    false => error,
                }
            })
        }))
    }
}

impl Shared {
    fn key(&self, name: &ObjectName) -> Path {
        Path::from(format!("{}{name}", self.prefix))
    }

    fn doing(&self, doing: &str, name: &ObjectName) -> String {
        format!("{doing} {name} of {}", self.name)
    }

    async fn put(&self, name: &ObjectName, content: Bytes) -> Result<Put> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.client.put_opts(&self.key(name), content.into(), options).await {
            Ok(_) => Ok(Put::Done),
            Err(error) if says_exists(&error) => Ok(Put::Exists),
            // The bucket is missing: an answer, but none that looks like a missing object.
            Err(error @ object_store::Error::NotFound { .. }) => {
                let what = format!("{}: {error}", self.doing("putting", name));
                Err(Error::new(ErrorKind::Invalid, what))
            }
            Err(error) => Err(error_of(self.doing("putting", name), error)),
        }
    }

    /// Reads `range` to the beginning of `buf`; returns how many bytes that are, and how many the
    /// object has.
    async fn read(
        &self,
        name: &ObjectName,
        range: GetRange,
        buf: &mut Buf,
    ) -> object_store::Result<(usize, u64)> {
        let options = GetOptions { range: Some(range), ..GetOptions::default() };
        let got = self.client.get_opts(&self.key(name), options).await?;
        let len = got.meta.size;
        let mut chunks = got.into_stream();
        let mut filled = 0;
        while let Some(chunk) = chunks.try_next().await? {
            // A service that sends more than was asked for is cut off.
            let count = chunk.len().min(buf.len() - filled);
            buf.put(filled, &chunk[..count]);
            filled += count;
        }
        Ok((filled, len))
    }

    /// The length of an object.
    async fn len(&self, name: &ObjectName) -> Result<u64> {
        let head = self.client.head(&self.key(name)).await;
        head.map(|head| head.size).map_err(|error| error_of(self.doing("reading", name), error))
    }

    async fn read_at(&self, name: &ObjectName, buf: &mut Buf, offset: u64) -> Result<()> {
        let asked = buf.len();
        let end = offset.saturating_add(asked as u64);
        let read = match offset < OFFSET_MAX {
            true => Some(self.read(name, GetRange::Bounded(offset..end), buf).await),
            false => None,
        };
        let (filled, len) = match read {
            Some(Ok(read)) => read,
            Some(Err(error @ object_store::Error::NotFound { .. })) => {
                return Err(error_of(self.doing("reading", name), error));
            }
            // It may have failed because nothing is there.
            failed => match (self.len(name).await?, failed) {
                (len, Some(Err(error))) if len > offset => {
                    return Err(error_of(self.doing("reading", name), error));
                }
                (len, _) => (0, len),
            },
        };
        let there = len.saturating_sub(offset).min(asked as u64);
        if filled as u64 != there {
            return Err(self.cut_off(name));
        }
        buf.fill_part(filled..asked, 0);
        Ok(())
    }

    async fn read_end(&self, name: &ObjectName, buf: &mut Buf) -> Result<u64> {
        if buf.is_empty() {
            return self.len(name).await;
        }
        let asked = buf.len() as u64;
        let (filled, len) = match self.read(name, GetRange::Suffix(asked), buf).await {
            Ok(read) => read,
            Err(error @ object_store::Error::NotFound { .. }) => {
                return Err(error_of(self.doing("reading", name), error));
            }
            // An empty object has no last byte.
            Err(error) => match self.len(name).await? {
                0 => (0, 0),
                _ => return Err(error_of(self.doing("reading", name), error)),
            },
        };
        if filled as u64 != len.min(asked) {
            return Err(self.cut_off(name));
        }
        Ok(len)
    }

    fn cut_off(&self, name: &ObjectName) -> Error {
        let what = format!("{}: the answer is not as long as it says", self.doing("reading", name));
        Error::new(ErrorKind::Io, what)
    }
}

/// The bytes of a put, while the client has them.
struct Content(Arc<Buf>);

impl AsRef<[u8]> for Content {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Objects for Bucket {
    fn name(&self) -> String {
        self.shared.name.clone()
    }

    fn is_far(&self) -> bool {
        true
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        Arc::new(BucketObject { shared: Arc::clone(&self.shared), name: name.clone() })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let (shared, name) = (Arc::clone(&self.shared), name.clone());
        let content = Arc::new(content);
        let bytes = Bytes::from_owner(Content(Arc::clone(&content)));
        let put = async move { shared.put(&name, bytes).await };
        let putting = self.shared.runtime.run(put);
        Box::pin(async move {
            let put = putting.await;
            // The client may let go of it a moment later.
            (put, Arc::try_unwrap(content).unwrap_or_else(|content| Buf::from_slice(&content)))
        })
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.list_to(folder, after, Depth::Folder)
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.list_to(Some(folder), after, Depth::All)
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        let (shared, name) = (Arc::clone(&self.shared), name.clone());
        Box::pin(self.shared.runtime.run(async move {
            match shared.client.delete(&shared.key(&name)).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(error_of(shared.doing("deleting", &name), error)),
            }
        }))
    }
}

struct BucketObject {
    shared: Arc<Shared>,
    name: ObjectName,
}

impl Object for BucketObject {
    fn read_at(&self, mut buf: Buf, offset: u64) -> IoFuture {
        if buf.is_empty() {
            return ready(Ok(()), buf);
        }
        let (shared, name) = (Arc::clone(&self.shared), self.name.clone());
        IoFuture::boxed(self.shared.runtime.run(async move {
            let read = shared.read_at(&name, &mut buf, offset).await;
            (read, buf)
        }))
    }

    fn read_end(&self, mut buf: Buf) -> EndFuture {
        let (shared, name) = (Arc::clone(&self.shared), self.name.clone());
        Box::pin(self.shared.runtime.run(async move {
            let read = shared.read_end(&name, &mut buf).await;
            (read, buf)
        }))
    }
}

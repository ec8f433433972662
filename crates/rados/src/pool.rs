//! A namespace of a pool as a store of objects.

use crate::ffi::{Answer, Cluster, Errno, Request};
use crate::known::Folders;
use crate::layout::Place;
use crate::lists::Lists;
use crate::outcome::{error_of, error_of_connecting};
use crate::requests::{BYTES_MAX, COUNT_MAX, Home, Requests};
use crate::shared::{Read, Shared};
use mica_block::{
    EndFuture, Entry, Error, ErrorKind, IoFuture, LocalFuture, Object, ObjectName, Objects, Put,
    PutFuture, Result,
};
use mica_rt::{Buf, spawn};
use std::ffi::{CStr, CString};
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Where a pool is, and who asks.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Its name.
    pub pool: String,
    /// The namespace of it that objects are in: a store of its own. The pool's default namespace if
    /// it is `None`.
    pub namespace: Option<ObjectName>,
    /// The configuration file; where Ceph's programs look for it if it is `None`.
    pub config: Option<PathBuf>,
    /// Who asks: `admin` if it is `None`. Where the key is, the configuration says.
    pub user: Option<String>,
    /// How long a request may take, in whole seconds. A cluster that never answers is asked again.
    pub timeout: Duration,
}

impl PoolOptions {
    /// The pool `pool`, found as Ceph's programs find it.
    pub fn new(pool: &str) -> Self {
        let pool = pool.to_owned();
        Self { pool, namespace: None, config: None, user: None, timeout: TIMEOUT }
    }
}

/// How long a request may take, if nothing else was said: longer than a cluster needs to notice
/// that one of its daemons died.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest object: what storage daemons take in one write (`osd_max_write_size`).
const LEN_MAX: usize = 90 << 20;
/// Reads from here on are beyond the end of any object: larger numbers are refused.
const OFFSET_MAX: u64 = 1 << 30;
/// An object's end is guessed to be this near to its beginning, so that one request does.
const GUESS_MAX: usize = 64 << 10;

/// A namespace of a pool as a store of objects.
pub struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    /// The store in a namespace of a pool. Connects, and waits for that: up to the time that
    /// requests have.
    ///
    /// # Errors
    /// `Unsupported` if librados is not installed; otherwise what is wrong with the configuration,
    /// the key, the monitors, or the pool's name.
    pub fn open(options: PoolOptions) -> Result<Self> {
        let PoolOptions { pool, namespace, config, user, timeout } = options;
        let namespace = namespace.map_or(String::new(), |namespace| namespace.to_string());
        let name = format!("rados://{pool}/{namespace}");
        let user = format!("client.{}", user.as_deref().unwrap_or("admin"));
        let config_name = match &config {
            Some(path) => path.display().to_string(),
            None => "ceph.conf ($CEPH_CONF, /etc/ceph/ceph.conf)".to_owned(),
        };
        let terminated = |text: &str| {
            CString::new(text)
                .map_err(|_| Error::new(ErrorKind::Invalid, format!("{name}: a zero byte")))
        };
        let config = config.map(|path| CString::new(path.into_os_string().into_vec()));
        let config = config
            .transpose()
            .map_err(|_| Error::new(ErrorKind::Invalid, format!("{config_name}: a zero byte")))?;
        let options = options_of(timeout);
        let cluster = Cluster::connect(&terminated(&user)?, config.as_deref(), &options);
        let cluster =
            cluster.map_err(|why| error_of_connecting(&name, &user, &config_name, why))?;
        let id =
            cluster.pool(&terminated(&pool)?).map_err(|errno| missing(&name, &cluster, errno))?;
        let home =
            Home { cluster: Arc::new(cluster), pool: id, namespace: terminated(&namespace)? };
        let requests = Requests::new(home)?;
        let listing = requests
            .listing_context()
            .map_err(|errno| error_of(&format!("opening {name}"), errno))?;
        let lists = Lists::new(listing, namespace)?;
        let (folders, is_blocklisted) = (Folders::default(), AtomicBool::new(false));
        let shared = Shared { name, requests, folders, lists, is_blocklisted };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// By which address the cluster knows this client: what [`Pool::blocklist`] needs if another
    /// host takes over from it. Each open pool has its own.
    ///
    /// # Errors
    /// What the cluster reports.
    pub fn address(&self) -> Result<String> {
        let Shared { name, requests, .. } = &*self.shared;
        let addresses = requests.home.cluster.addresses();
        let addresses = addresses
            .map_err(|errno| error_of(&format!("asking for the address at {name}"), errno))?;
        // `[v2:1.2.3.4:0/567,v1:1.2.3.4:0/567]`, or one without brackets and version.
        let first = addresses.trim_matches(['[', ']']).split(',').next().unwrap_or_default();
        let address = first.split_once(':').filter(|(version, _)| version.starts_with('v'));
        Ok(address.map_or(first, |(_, address)| address).to_owned())
    }

    /// Lets the cluster refuse whatever the client at `address` does from now on, for `lasts`
    /// (whole seconds; an hour if it is zero). When this is done, what is read from here on does
    /// not change by that client any more.
    ///
    /// # Errors
    /// `Denied` if the key does not allow it: it needs the capability
    /// `mon 'allow command "osd blocklist"'`, as `profile rbd` has it.
    pub fn blocklist(&self, address: &str, lasts: Duration) -> LocalFuture<'static, Result<()>> {
        let shared = Arc::clone(&self.shared);
        let address = address.to_owned();
        Box::pin(async move {
            let doing = format!("blocklisting {address} at {}", shared.name);
            let Some(address) = client_address(&address) else {
                let what = format!("{doing}: that is no client's address (1.2.3.4:0/567)");
                return Err(Error::new(ErrorKind::Invalid, what));
            };
            let seconds = u32::try_from(lasts.as_secs()).unwrap_or(u32::MAX);
            let cluster = Arc::clone(&shared.requests.home.cluster);
            let listed = shared.lists.wait(move || cluster.blocklist(&address, seconds)).await;
            listed.map_err(|errno| shared.noted(&doing, errno))
        })
    }

    /// Whether a request was refused because the cluster has blocklisted this client.
    pub(crate) fn is_blocklisted(&self) -> bool {
        self.shared.is_blocklisted.load(Ordering::Relaxed)
    }
}

/// `address` as monitors take it, if it is that of one client. It may come from an object that
/// anybody could write, and goes into a command as it is: so it is put together again from its
/// parts. A nonce of zero would be a whole host, and a port other than zero is a daemon's.
fn client_address(address: &str) -> Option<CString> {
    let (address, nonce) = address.rsplit_once('/')?;
    let (ip, port) = address.rsplit_once(':')?;
    let ip: IpAddr = ip.trim_matches(['[', ']']).parse().ok()?;
    let nonce: u32 = nonce.parse().ok().filter(|nonce| *nonce != 0)?;
    let client = format!("{}/{nonce}", SocketAddr::new(ip, 0));
    CString::new(client).ok().filter(|_| port == "0")
}

/// What librados is told. It must never wait without end, nor in a call (requests, I2).
fn options_of(timeout: Duration) -> [(&'static CStr, CString); 5] {
    let number = |number: usize| CString::new(number.to_string()).expect("digits");
    let seconds = number(usize::try_from(timeout.as_secs()).unwrap_or(usize::MAX).max(1));
    [
        (c"client_mount_timeout", seconds.clone()),
        (c"rados_mon_op_timeout", seconds.clone()),
        (c"rados_osd_op_timeout", seconds),
        // Listings come on top of requests.
        (c"objecter_inflight_ops", number(4 * COUNT_MAX)),
        (c"objecter_inflight_op_bytes", number(2 * BYTES_MAX)),
    ]
}

/// Why there is no such pool.
fn missing(name: &str, cluster: &Cluster, errno: Errno) -> Error {
    if errno != Errno(libc::ENOENT) {
        return error_of(&format!("opening {name}"), errno);
    }
    let what = match cluster.pools() {
        Ok(pools) if pools.is_empty() => {
            "there are no pools: make one with `ceph osd pool create`".to_owned()
        }
        Ok(pools) => format!("there is no such pool, but {}", pools.join(", ")),
        Err(_) => "there is no such pool".to_owned(),
    };
    Error::new(ErrorKind::NotFound, format!("{name}: {what}"))
}

impl Shared {
    /// Puts an object whose folders are known. It begins now.
    fn put(
        self: &Arc<Self>,
        name: &ObjectName,
        content: Buf,
    ) -> impl Future<Output = (Result<Put>, Buf)> + 'static {
        let putting = self.requests.begin(Place::of(name), Request::Create(content));
        let (shared, name) = (Arc::clone(self), name.clone());
        async move {
            let Answer { result, buf, .. } = putting.await;
            let put = match result {
                Ok(()) => Ok(Put::Done),
                Err(Errno(libc::EEXIST)) => Ok(Put::Exists),
                Err(errno) => Err(shared.error("putting", &name, errno).await),
            };
            (put, buf)
        }
    }

    fn read_at(self: &Arc<Self>, name: &ObjectName, buf: Buf, offset: u64) -> IoFuture {
        // Beyond the end there are zeros: of these it is enough to know that there is an end.
        let (own, given) = match offset < OFFSET_MAX {
            true => own_memory(buf),
            false => (Buf::new(0), Some(buf)),
        };
        let reading = self.read(name, own, offset.min(OFFSET_MAX));
        IoFuture::boxed(async move {
            let (read, own) = reading.await;
            let mut buf = back(own, given);
            if let Ok(Read { count, .. }) = read {
                buf.fill_part(count..buf.len(), 0);
            }
            (read.map(drop), buf)
        })
    }

    fn read_end(self: &Arc<Self>, name: &ObjectName, buf: Buf) -> EndFuture {
        let (mut own, given) = own_memory(buf);
        let guess = if own.len() <= GUESS_MAX { own.len() } else { 0 };
        let first = own.split_to(guess);
        let reading = self.read(name, first, 0);
        let (shared, name) = (Arc::clone(self), name.clone());
        Box::pin(async move {
            let (read, mut first) = reading.await;
            first.join(own);
            let (end, own) = match read {
                Ok(Read { object_len, count }) if (count as u64) < object_len => {
                    shared.read_last(&name, first, object_len).await
                }
                read => (read.map(|read| read.object_len), first),
            };
            (end, back(own, given))
        })
    }

    /// Reads the last bytes of an object that has `len`.
    async fn read_last(
        self: &Arc<Self>,
        name: &ObjectName,
        mut buf: Buf,
        len: u64,
    ) -> (Result<u64>, Buf) {
        if buf.is_empty() {
            return (Ok(len), buf);
        }
        let count = buf.len().min(usize::try_from(len).unwrap_or(usize::MAX));
        let (offset, mut head) = (len - count as u64, buf.split_to(count));
        let (read, back) = self.read(name, head, offset).await;
        head = back;
        head.join(buf);
        let end = match read {
            Ok(Read { object_len, .. }) if object_len == len => Ok(len),
            Ok(_) => {
                let doing = self.doing("reading", name);
                Err(Error::new(ErrorKind::Io, format!("{doing}: it was replaced meanwhile")))
            }
            Err(error) => Err(error),
        };
        (end, head)
    }
}

/// Memory of our own as long as `buf`, and `buf` if that is not.
fn own_memory(buf: Buf) -> (Buf, Option<Buf>) {
    match buf.is_foreign() {
        true => (Buf::new(buf.len()), Some(buf)),
        false => (buf, None),
    }
}

/// The buffer that was given, with what was read to memory of our own.
fn back(own: Buf, given: Option<Buf>) -> Buf {
    let Some(mut given) = given else { return own };
    given.put(0, &own);
    given
}

/// For how long a writer is shut out whose volume was taken over: as long as Ceph does it by
/// default.
const SHUT_OUT: Duration = Duration::from_secs(3600);

impl Objects for Pool {
    fn name(&self) -> String {
        self.shared.name.clone()
    }

    fn is_far(&self) -> bool {
        true
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        Arc::new(PoolObject { shared: Arc::clone(&self.shared), name: name.clone() })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let (shared, name) = (Arc::clone(&self.shared), name.clone());
        if content.len() > LEN_MAX {
            let what = format!("{}: longer than {LEN_MAX} bytes", shared.doing("putting", &name));
            return Box::pin(std::future::ready((
                Err(Error::new(ErrorKind::Limit, what)),
                content,
            )));
        }
        if shared.knows_folders_of(&name) {
            return Box::pin(shared.put(&name, content));
        }
        // It goes on without the future.
        Box::pin(spawn(async move {
            match shared.make_folders(&name).await {
                Ok(()) => shared.put(&name, content).await,
                Err(error) => (Err(error), content),
            }
        }))
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let shared = Arc::clone(&self.shared);
        let (folder, after) = (folder.cloned(), after.cloned());
        Box::pin(spawn(async move { shared.list(folder, after).await }))
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        let (shared, name) = (Arc::clone(&self.shared), name.clone());
        let removing = shared.requests.begin(Place::of(&name), Request::Remove);
        Box::pin(async move {
            match removing.await.result {
                Ok(()) => Ok(()),
                Err(errno) => match shared.error("deleting", &name, errno).await {
                    error if error.kind() == ErrorKind::NotFound => Ok(()),
                    error => Err(error),
                },
            }
        })
    }

    fn client(&self) -> Option<String> {
        self.address().ok()
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        self.blocklist(client, SHUT_OUT)
    }
}

struct PoolObject {
    shared: Arc<Shared>,
    name: ObjectName,
}

impl Object for PoolObject {
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture {
        self.shared.read_at(&self.name, buf, offset)
    }

    fn read_end(&self, buf: Buf) -> EndFuture {
        self.shared.read_end(&self.name, buf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_address_of_one_client_is_blocklisted() {
        let clients = [
            ("10.0.0.5:0/567", c"10.0.0.5:0/567"),
            ("10.0.0.5:0/4294967295", c"10.0.0.5:0/4294967295"),
            ("[2001:db8::5]:0/567", c"[2001:db8::5]:0/567"),
            ("2001:db8::5]:0/567", c"[2001:db8::5]:0/567"),
        ];
        for (address, taken) in clients {
            assert_eq!(client_address(address).as_deref(), Some(taken), "{address}");
        }
        let others = [
            "10.0.0.5:0/0",
            "10.0.0.5:0/00",
            "10.0.0.5:0/4294967296",
            "10.0.0.5:0/-1",
            "10.0.0.5:0/",
            "10.0.0.5:6800/567",
            "10.0.0.5:00/567",
            "10.0.0.5/567",
            "10.0.0.0/8",
            "10.0.0.5:0",
            "v2:10.0.0.5:0/567",
            "10.0.0.5\":0/567",
            "10.0.0.5:0/567\"",
            "10.0.0.5:0/567\0",
            "",
        ];
        for address in others {
            assert_eq!(client_address(address), None, "{address}");
        }
    }
}

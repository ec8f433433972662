//! librados, called. All `unsafe` of this crate is here.
//!
//! librados is C++ with an interface of C, and there is no other way to speak to a cluster. It is
//! loaded when it is first needed, so that mica runs where there is no Ceph.
//!
//! Invariants
//! - I1 The library is never unloaded: its threads run as long as it likes.
//! - I2 A cluster is shut down when no context of it is left, never on a thread of librados, which
//!   would wait for itself, and never while the process ends (`end`).
//! - I3 A context is not changed once it is made, so that threads may share it.
//! - I4 Until a request is answered, what librados reads and writes for it (buffer, numbers) is in
//!   a record on the heap that nothing else refers to; the callback takes the record back. Each
//!   request that was begun is answered once: also one that runs out of time.
//! - I5 A cursor is freed once, with the context that it was made by.

use functions::Functions;
use libc::{c_char, c_int, c_void};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::Buf;
use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};

mod end;
mod functions;

/// A negative number of the system's errors, made positive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) i32);

type Answered<T> = std::result::Result<T, Errno>;

fn check(code: c_int) -> Answered<()> {
    if code < 0 { Err(Errno(-code)) } else { Ok(()) }
}

/// The functions of librados, which is loaded if it was not.
fn librados() -> Result<&'static Functions> {
    static LOADED: OnceLock<std::result::Result<Functions, String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(functions::load);
    loaded.as_ref().map_err(|why| Error::new(ErrorKind::Unsupported, why.as_str()))
}

/// A connection to a cluster.
pub(crate) struct Cluster {
    raw: *mut c_void,
    functions: &'static Functions,
}

// SAFETY: librados locks what is in a cluster.
unsafe impl Send for Cluster {}
// SAFETY: as before.
unsafe impl Sync for Cluster {}

/// What went wrong on the way to a cluster.
pub(crate) enum ConnectError {
    /// There is no librados.
    Library(Error),
    /// The configuration file cannot be read.
    Config(Errno),
    /// librados does not take this option.
    Option(String, Errno),
    /// The monitors do not answer, or refuse.
    Connect(Errno),
}

impl Cluster {
    /// Connects as `user` (`client.admin`). Waits for the monitors.
    pub(crate) fn connect(
        user: &CStr,
        config: Option<&CStr>,
        options: &[(&CStr, CString)],
    ) -> std::result::Result<Self, ConnectError> {
        let functions = librados().map_err(ConnectError::Library)?;
        let mut raw = null_mut();
        // SAFETY: the strings are terminated, and `raw` takes what is made.
        let made =
            unsafe { (functions.rados_create2)(&raw mut raw, c"ceph".as_ptr(), user.as_ptr(), 0) };
        check(made).map_err(ConnectError::Connect)?;
        // From here on it is released: whatever fails.
        let cluster = Self { raw, functions };
        let path = config.map_or(null(), CStr::as_ptr);
        // SAFETY: the cluster was made; the path is terminated, or null for the usual places.
        let read = unsafe { (functions.rados_conf_read_file)(cluster.raw, path) };
        match check(read) {
            // The monitors may be named in the environment.
            Err(Errno(libc::ENOENT)) if config.is_none() => {}
            read => read.map_err(ConnectError::Config)?,
        }
        // SAFETY: as before; null means CEPH_ARGS.
        let read = unsafe { (functions.rados_conf_parse_env)(cluster.raw, null()) };
        check(read).map_err(ConnectError::Config)?;
        for (option, value) in options {
            // SAFETY: as before.
            let set =
                unsafe { (functions.rados_conf_set)(cluster.raw, option.as_ptr(), value.as_ptr()) };
            let name = || option.to_string_lossy().into_owned();
            check(set).map_err(|errno| ConnectError::Option(name(), errno))?;
        }
        // SAFETY: as before.
        check(unsafe { (functions.rados_connect)(cluster.raw) }).map_err(ConnectError::Connect)?;
        Ok(cluster)
    }

    /// The number of a pool.
    pub(crate) fn pool(&self, name: &CStr) -> Answered<i64> {
        // SAFETY: the cluster is connected, the name terminated.
        let id = unsafe { (self.functions.rados_pool_lookup)(self.raw, name.as_ptr()) };
        if id < 0 { Err(Errno(i32::try_from(-id).unwrap_or(libc::EIO))) } else { Ok(id) }
    }

    /// Whether there is still a pool of this number.
    pub(crate) fn has_pool(&self, id: i64) -> bool {
        let mut name: [c_char; 1] = [0];
        // SAFETY: as before; a name that is too long for the buffer is an error.
        let len = unsafe {
            (self.functions.rados_pool_reverse_lookup)(self.raw, id, name.as_mut_ptr(), name.len())
        };
        len != -libc::ENOENT
    }

    /// The names of all pools.
    pub(crate) fn pools(&self) -> Answered<Vec<String>> {
        const BYTES_MAX: usize = 1 << 20;
        let mut names = vec![0_u8; BYTES_MAX];
        // SAFETY: librados writes at most as many bytes as it is told.
        let len = unsafe {
            (self.functions.rados_pool_list)(self.raw, names.as_mut_ptr().cast(), names.len())
        };
        check(len)?;
        let names = names.split(|byte| *byte == 0).take_while(|name| !name.is_empty());
        Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    /// By which addresses the cluster knows this client.
    pub(crate) fn addresses(&self) -> Answered<String> {
        let mut text = null_mut();
        // SAFETY: the cluster is connected; `text` takes a string that librados allocates.
        check(unsafe { (self.functions.rados_getaddrs)(self.raw, &raw mut text) })?;
        if text.is_null() {
            return Err(Errno(libc::ENOTCONN));
        }
        // SAFETY: it is a terminated string; freed once, after it was copied.
        let copy = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        // SAFETY: as before.
        unsafe { (self.functions.rados_buffer_free)(text) };
        Ok(copy)
    }

    /// Lets no storage daemon serve the client at `address` for a time. Waits for the monitors.
    pub(crate) fn blocklist(&self, address: &CStr, seconds: u32) -> Answered<()> {
        // It is passed as memory that may be written to.
        let mut address = address.to_bytes_with_nul().to_vec();
        // SAFETY: the cluster is connected, the address terminated, and ours.
        check(unsafe {
            (self.functions.rados_blocklist_add)(self.raw, address.as_mut_ptr().cast(), seconds)
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        end::shut_down(self.raw.expose_provenance(), self.functions.rados_shutdown);
    }
}

/// A namespace of a pool, and where its objects are: all that a request needs to know.
pub(crate) struct Context {
    raw: *mut c_void,
    cluster: Arc<Cluster>,
}

// SAFETY: it is never changed (I3), and librados lets threads share it.
unsafe impl Send for Context {}
// SAFETY: as before.
unsafe impl Sync for Context {}

/// What is done with an object.
pub(crate) enum Request {
    /// It is created with this content, unless it exists.
    Create(Buf),
    /// The buffer is filled from the offset on, as far as there is something. Our own memory.
    Read(Buf, u64),
    /// It is removed.
    Remove,
}

impl Request {
    /// Bytes that are sent or asked for.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Create(buf) | Self::Read(buf, _) => buf.len(),
            Self::Remove => 0,
        }
    }

    fn into_buf(self) -> Buf {
        match self {
            Self::Create(buf) | Self::Read(buf, _) => buf,
            Self::Remove => Buf::new(0),
        }
    }
}

/// What became of a [`Request`].
pub(crate) struct Answer {
    pub(crate) result: Answered<()>,
    /// The buffer of the request.
    pub(crate) buf: Buf,
    /// Bytes that were read.
    pub(crate) count: usize,
    /// Length of the object that was read.
    pub(crate) object_len: u64,
}

impl Answer {
    /// The answer to a request that could not be begun.
    pub(crate) fn failed(request: Request, errno: Errno) -> Self {
        Self { result: Err(errno), buf: request.into_buf(), count: 0, object_len: 0 }
    }
}

type Done = Box<dyn FnOnce(Answer) + Send>;

/// A request under way (I4).
struct UnderWay {
    means: Arc<Means>,
    buf: Buf,
    object_len: u64,
    count: usize,
    read_result: c_int,
    done: Done,
}

/// What a request is made with. Also whoever begins it keeps this until librados has returned, as
/// the request may be over by then.
struct Means {
    context: Context,
    /// The operation, if it is a read.
    read: *mut c_void,
}

// SAFETY: the operation is only released by the last that has this.
unsafe impl Send for Means {}
// SAFETY: as before.
unsafe impl Sync for Means {}

impl Context {
    /// The objects of `namespace` in the pool `pool` that are placed by `locator`, or by their
    /// names.
    pub(crate) fn new(
        cluster: &Arc<Cluster>,
        pool: i64,
        namespace: &CStr,
        locator: Option<&CStr>,
    ) -> Answered<Self> {
        let functions = cluster.functions;
        let mut raw = null_mut();
        // SAFETY: the cluster is connected; `raw` takes what is made.
        check(unsafe { (functions.rados_ioctx_create2)(cluster.raw, pool, &raw mut raw) })?;
        let context = Self { raw, cluster: Arc::clone(cluster) };
        // SAFETY: nobody else knows the context yet (I3); the strings are terminated, and copied.
        unsafe { (functions.rados_ioctx_set_namespace)(raw, namespace.as_ptr()) };
        if let Some(locator) = locator {
            // SAFETY: as before.
            unsafe { (functions.rados_ioctx_locator_set_key)(raw, locator.as_ptr()) };
        }
        Ok(context)
    }

    /// Begins `request` with the object `name`. `done` is called with the answer, on a thread of
    /// librados, which must not wait. That of a request that cannot be begun comes back.
    pub(crate) fn begin(
        self,
        name: &CStr,
        request: Request,
        done: Done,
    ) -> std::result::Result<(), (Answer, Done)> {
        let functions = self.cluster.functions;
        let read = if let Request::Read(_, offset) = request { Some(offset) } else { None };
        let write = match &request {
            Request::Create(content) => functions.creation(content),
            Request::Remove => functions.removal(),
            Request::Read(..) => null_mut(),
        };
        // SAFETY: made here, released by `Means`.
        let operation = read.map_or(null_mut(), |_| unsafe { (functions.rados_create_read_op)() });
        let means = Arc::new(Means { context: self, read: operation });
        let record = Box::into_raw(Box::new(UnderWay {
            means: Arc::clone(&means),
            buf: request.into_buf(),
            object_len: 0,
            count: 0,
            read_result: 0,
            done,
        }));
        if let Some(offset) = read {
            // SAFETY: nobody else has the record yet, and what it gets to refer to is in it (I4).
            unsafe { (*record).prepare_read(offset) };
        }
        let mut completion = null_mut();
        // SAFETY: the record lives until the callback takes it back (I4).
        let mut begun = unsafe {
            let record = record.cast();
            (functions.rados_aio_create_completion2)(record, Some(completed), &raw mut completion)
        };
        if begun == 0 {
            // SAFETY: the context, the completion and the operation are there.
            begun = unsafe { means.begin(name, completion, write) };
        }
        if !write.is_null() {
            // SAFETY: librados has taken over what was in it; released once.
            unsafe { (functions.rados_release_write_op)(write) };
        }
        let Err(errno) = check(begun) else { return Ok(()) };
        // SAFETY: the request was not begun, so that the callback is never called.
        let under_way = unsafe {
            if !completion.is_null() {
                (functions.rados_aio_release)(completion);
            }
            Box::from_raw(record)
        };
        let UnderWay { buf, done, .. } = *under_way;
        Err((Answer { result: Err(errno), buf, count: 0, object_len: 0 }, done))
    }
}

impl Means {
    /// Begins the operation `write`, or the one that reads.
    ///
    /// # Safety
    /// Both are whole; the completion's record lives until it is called back.
    unsafe fn begin(&self, name: &CStr, completion: *mut c_void, write: *mut c_void) -> c_int {
        let (functions, context) = (self.context.cluster.functions, self.context.raw);
        let name = name.as_ptr();
        // SAFETY: the caller's promise; the name is terminated, and copied.
        unsafe {
            match write.is_null() {
                true => {
                    (functions.rados_aio_read_op_operate)(self.read, context, completion, name, 0)
                }
                false => (functions.rados_aio_write_op_operate)(
                    write,
                    context,
                    completion,
                    name,
                    null_mut(),
                    functions::FULL_TRY,
                ),
            }
        }
    }
}

impl Drop for Means {
    fn drop(&mut self) {
        if !self.read.is_null() {
            // SAFETY: it was made for this request, which is over; released once.
            unsafe { (self.context.cluster.functions.rados_release_read_op)(self.read) }
        }
    }
}

impl UnderWay {
    /// Makes the operation read into the buffer from `offset` on.
    ///
    /// # Safety
    /// The record stays where it is until the request is over.
    unsafe fn prepare_read(&mut self, offset: u64) {
        let functions = self.means.context.cluster.functions;
        let operation = self.means.read;
        let (object_len, none) = (&raw mut self.object_len, null_mut());
        // SAFETY: the caller's promise; the buffer's memory does not move with the buffer.
        unsafe {
            // What does not exist fails here, whatever is read.
            (functions.rados_read_op_stat)(operation, object_len, none, null_mut());
            if !self.buf.is_empty() {
                let (len, memory) = (self.buf.len(), self.buf.own_bytes().as_mut_ptr());
                (functions.rados_read_op_read)(
                    operation,
                    offset,
                    len,
                    memory.cast(),
                    &raw mut self.count,
                    &raw mut self.read_result,
                );
            }
        }
    }
}

/// Called by librados once for each request that was begun.
extern "C" fn completed(completion: *mut c_void, record: *mut c_void) {
    // SAFETY: the record was made by `begin`, and nobody has it but this call (I4).
    let under_way = unsafe { Box::from_raw(record.cast::<UnderWay>()) };
    let UnderWay { means, buf, object_len, count, read_result, done } = *under_way;
    let functions = means.context.cluster.functions;
    // SAFETY: the completion is the one of the record, and is released once.
    let code = unsafe {
        let code = (functions.rados_aio_get_return_value)(completion);
        (functions.rados_aio_release)(completion);
        code
    };
    let result = check(code).and_then(|()| check(read_result));
    drop(means);
    done(Answer { result, buf, count, object_len });
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; requests under way own theirs (I4).
        unsafe { (self.cluster.functions.rados_ioctx_destroy)(self.raw) }
    }
}

/// Where a listing of a pool is.
pub(crate) struct Cursor {
    raw: *mut c_void,
    context: Arc<Context>,
}

// SAFETY: a cursor is plain memory.
unsafe impl Send for Cursor {}

/// An object that was listed.
pub(crate) struct Listed {
    pub(crate) name: Vec<u8>,
    pub(crate) locator: Vec<u8>,
}

impl Cursor {
    fn begin(context: &Arc<Context>) -> Answered<Self> {
        // SAFETY: the context lives; what is made is freed once (I5).
        let raw = unsafe { (context.cluster.functions.rados_object_list_begin)(context.raw) };
        if raw.is_null() {
            return Err(Errno(libc::ENOENT));
        }
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// The range of the listing that has the objects whose hash is `hash`.
    pub(crate) fn range(context: &Arc<Context>, hash: u32) -> Answered<(Self, Self)> {
        const HASHES: usize = 1 << u32::BITS;
        let (first, mut from, mut to) =
            (Self::begin(context)?, Self::begin(context)?, Self::begin(context)?);
        let functions = context.cluster.functions;
        // SAFETY: the context lives; the end that is made is freed once (I5).
        let raw = unsafe { (functions.rados_object_list_end)(context.raw) };
        if raw.is_null() {
            return Err(Errno(libc::ENOENT));
        }
        let last = Self { raw, context: Arc::clone(context) };
        // Listings go by the hash with its bits reversed.
        let number = hash.reverse_bits() as usize;
        // SAFETY: all cursors are of this context; the last two are written to.
        unsafe {
            (functions.rados_object_list_slice)(
                context.raw,
                first.raw,
                last.raw,
                number,
                HASHES,
                &raw mut from.raw,
                &raw mut to.raw,
            );
        }
        Ok((from, to))
    }

    /// Lists `count` objects at most from here to `end`, in order; returns where to go on, if there
    /// may be more. Waits for the cluster.
    pub(crate) fn list(&self, end: &Self, count: usize) -> Answered<(Vec<Listed>, Option<Self>)> {
        let (context, functions) = (&self.context, self.context.cluster.functions);
        let mut next = Self::begin(context)?;
        let mut items = vec![functions::ListItem::EMPTY; count];
        // SAFETY: there is room for `count` items, which are freed once, after they were copied;
        // all cursors are of this context.
        let listed = unsafe {
            let code = (functions.rados_object_list)(
                context.raw,
                self.raw,
                end.raw,
                count,
                null(),
                0,
                items.as_mut_ptr(),
                &raw mut next.raw,
            );
            let found = usize::try_from(code).unwrap_or(0).min(count);
            let copies = items[..found]
                .iter()
                .map(|item| Listed { name: item.name(), locator: item.locator() });
            let listed = check(code).map(|()| copies.collect());
            (functions.rados_object_list_free)(count, items.as_mut_ptr());
            listed?
        };
        // SAFETY: both are of this context.
        let order =
            unsafe { (functions.rados_object_list_cursor_cmp)(context.raw, next.raw, end.raw) };
        Ok((listed, (order < 0).then_some(next)))
    }
}

impl Drop for Cursor {
    fn drop(&mut self) {
        let context = &self.context;
        // SAFETY: made by this context, freed once (I5).
        unsafe { (context.cluster.functions.rados_object_list_cursor_free)(context.raw, self.raw) }
    }
}

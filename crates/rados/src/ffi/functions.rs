//! The functions of librados that are called, and how they are found.

use libc::{c_char, c_int, c_void, size_t, time_t};
use libloading::Library;
use mica_rt::Buf;
use std::error::Error;
use std::ptr::{null, null_mut};

/// What the library is called everywhere.
const LIBRARY: &str = "librados.so.2";
/// Fail if an object exists.
const CREATE_EXCLUSIVE: c_int = 1;
/// Fail rather than wait if the pool is full, and let removals pass.
pub(super) const FULL_TRY: c_int = 64;

type Callback = extern "C" fn(*mut c_void, *mut c_void);

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)+) => {
        /// Functions of librados, by their names there.
        #[derive(Clone, Copy)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)+
        }

        impl Functions {
            /// # Safety
            /// The library is librados, and stays loaded.
            unsafe fn find(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: these are the types that its header gives.
                unsafe {
                    Ok(Self { $($name: *library.get(concat!(stringify!($name), "\0"))?,)+ })
                }
            }
        }
    };
}

functions! {
    rados_create2(*mut *mut c_void, *const c_char, *const c_char, u64) -> c_int;
    rados_conf_read_file(*mut c_void, *const c_char) -> c_int;
    rados_conf_parse_env(*mut c_void, *const c_char) -> c_int;
    rados_conf_set(*mut c_void, *const c_char, *const c_char) -> c_int;
    rados_connect(*mut c_void) -> c_int;
    rados_shutdown(*mut c_void);
    rados_pool_lookup(*mut c_void, *const c_char) -> i64;
    rados_pool_reverse_lookup(*mut c_void, i64, *mut c_char, size_t) -> c_int;
    rados_pool_list(*mut c_void, *mut c_char, size_t) -> c_int;
    rados_getaddrs(*mut c_void, *mut *mut c_char) -> c_int;
    rados_buffer_free(*mut c_char);
    rados_blocklist_add(*mut c_void, *mut c_char, u32) -> c_int;
    rados_ioctx_create2(*mut c_void, i64, *mut *mut c_void) -> c_int;
    rados_ioctx_destroy(*mut c_void);
    rados_ioctx_set_namespace(*mut c_void, *const c_char);
    rados_ioctx_locator_set_key(*mut c_void, *const c_char);
    rados_aio_create_completion2(*mut c_void, Option<Callback>, *mut *mut c_void) -> c_int;
    rados_aio_get_return_value(*mut c_void) -> c_int;
    rados_aio_release(*mut c_void);
    rados_create_write_op() -> *mut c_void;
    rados_release_write_op(*mut c_void);
    rados_write_op_create(*mut c_void, c_int, *const c_char);
    rados_write_op_write_full(*mut c_void, *const c_char, size_t);
    rados_write_op_remove(*mut c_void);
    rados_aio_write_op_operate(
        *mut c_void, *mut c_void, *mut c_void, *const c_char, *mut time_t, c_int
    ) -> c_int;
    rados_create_read_op() -> *mut c_void;
    rados_release_read_op(*mut c_void);
    rados_read_op_stat(*mut c_void, *mut u64, *mut time_t, *mut c_int);
    rados_read_op_read(*mut c_void, u64, size_t, *mut c_char, *mut size_t, *mut c_int);
    rados_aio_read_op_operate(
        *mut c_void, *mut c_void, *mut c_void, *const c_char, c_int
    ) -> c_int;
    rados_object_list_begin(*mut c_void) -> *mut c_void;
    rados_object_list_end(*mut c_void) -> *mut c_void;
    rados_object_list_cursor_free(*mut c_void, *mut c_void);
    rados_object_list_cursor_cmp(*mut c_void, *mut c_void, *mut c_void) -> c_int;
    rados_object_list_slice(
        *mut c_void, *mut c_void, *mut c_void, size_t, size_t, *mut *mut c_void, *mut *mut c_void
    );
    rados_object_list(
        *mut c_void, *mut c_void, *mut c_void, size_t, *const c_char, size_t, *mut ListItem,
        *mut *mut c_void
    ) -> c_int;
    rados_object_list_free(size_t, *mut ListItem);
}

/// Loads the library; says what to do if that fails.
pub(super) fn load() -> Result<Functions, String> {
    // SAFETY: what runs when librados is loaded may run at any time.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
        let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        format!("librados2 is not installed: apt install librados2 ({why})")
    })?;
    // Never unloaded: forgotten.
    let library = std::mem::ManuallyDrop::new(library);
    super::end::prepare();
    // SAFETY: it is librados, and stays.
    unsafe { Functions::find(&library) }
        .map_err(|error| format!("{LIBRARY} is too old: Ceph 16 is the first that does ({error})"))
}

impl Functions {
    /// An operation that creates an object with `content`, unless it exists.
    pub(super) fn creation(&self, content: &Buf) -> *mut c_void {
        // SAFETY: the content is copied before this returns.
        unsafe {
            let operation = (self.rados_create_write_op)();
            (self.rados_write_op_create)(operation, CREATE_EXCLUSIVE, null());
            let (bytes, len) = (content.as_ptr(), content.len());
            (self.rados_write_op_write_full)(operation, bytes.cast(), len);
            operation
        }
    }

    /// An operation that removes an object.
    pub(super) fn removal(&self) -> *mut c_void {
        // SAFETY: the operation was just made.
        unsafe {
            let operation = (self.rados_create_write_op)();
            (self.rados_write_op_remove)(operation);
            operation
        }
    }
}

/// An object in the answer to a listing.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ListItem {
    name_len: size_t,
    name: *mut c_char,
    namespace_len: size_t,
    namespace: *mut c_char,
    locator_len: size_t,
    locator: *mut c_char,
}

impl ListItem {
    pub(super) const EMPTY: Self = Self {
        name_len: 0,
        name: null_mut(),
        namespace_len: 0,
        namespace: null_mut(),
        locator_len: 0,
        locator: null_mut(),
    };

    /// A copy of the object's name.
    ///
    /// # Safety
    /// librados filled this in, and it was not freed.
    pub(super) unsafe fn name(&self) -> Vec<u8> {
        // SAFETY: the caller's promise.
        unsafe { copied(self.name, self.name_len) }
    }

    /// A copy of the object's locator.
    ///
    /// # Safety
    /// As for the name.
    pub(super) unsafe fn locator(&self) -> Vec<u8> {
        // SAFETY: the caller's promise.
        unsafe { copied(self.locator, self.locator_len) }
    }
}

/// # Safety
/// There are `len` bytes, unless it is null.
unsafe fn copied(bytes: *const c_char, len: size_t) -> Vec<u8> {
    if bytes.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), len) }.to_vec()
}

//! What an error of RADOS means.

use crate::ffi::{ConnectError, Errno};
use mica_block::{Error, ErrorKind};
use std::io;

/// The error of `doing` something.
///
/// An error of kind `Io` may pass, and says nothing of what was done: an operation that ran out of
/// time may still happen.
pub(crate) fn error_of(doing: &str, Errno(errno): Errno) -> Error {
    let (kind, advice) = match errno {
        libc::ENOENT => (ErrorKind::NotFound, None),
        // Ceph's name for it is EBLOCKLISTED.
        libc::ESHUTDOWN => (ErrorKind::Denied, Some(BLOCKLISTED)),
        libc::EPERM | libc::EACCES => (ErrorKind::Denied, Some(CAPABILITIES)),
        libc::ENOSPC => (ErrorKind::NoSpace, Some("the pool or the cluster is full")),
        libc::EDQUOT => (ErrorKind::NoSpace, Some("the pool has used up its quota")),
        libc::EFBIG | libc::EMSGSIZE => (ErrorKind::Limit, Some(TOO_LONG)),
        libc::EOPNOTSUPP => (ErrorKind::Unsupported, None),
        libc::ETIMEDOUT => (ErrorKind::Io, Some("no answer in time: see `ceph health detail`")),
        _ => (ErrorKind::Io, None),
    };
    let said = io::Error::from_raw_os_error(errno);
    let what = match advice {
        Some(advice) => format!("{doing}: {advice} ({said})"),
        None => format!("{doing}: {said}"),
    };
    Error::new(kind, what)
}

const BLOCKLISTED: &str = "the cluster has blocklisted this client, as is done when another host \
                           takes over: nothing that it does counts any more";
const CAPABILITIES: &str = "the key of this client does not allow it: see `ceph auth get`";
const TOO_LONG: &str = "longer than the storage daemons take: see osd_max_object_size and \
                        osd_max_write_size";

/// The error of connecting as `user` to what `name` is in.
pub(crate) fn error_of_connecting(
    name: &str,
    user: &str,
    config: &str,
    why: ConnectError,
) -> Error {
    let said = |Errno(errno)| io::Error::from_raw_os_error(errno);
    let (kind, what) = match why {
        ConnectError::Library(error) => return error.wrap(name),
        ConnectError::Config(errno) => {
            (ErrorKind::Invalid, format!("reading {config}: {}", said(errno)))
        }
        ConnectError::Option(option, errno) => {
            (ErrorKind::Unsupported, format!("librados refuses {option}: {}", said(errno)))
        }
        ConnectError::Connect(errno) => {
            let (kind, advice) = match errno.0 {
                libc::ENOENT => (
                    ErrorKind::NotFound,
                    format!(
                        "no monitors or no key for {user} are known: both are named in {config}"
                    ),
                ),
                libc::EPERM | libc::EACCES | libc::EOPNOTSUPP => (
                    ErrorKind::Denied,
                    format!(
                        "the monitors do not accept {user}: its keyring is wrong or missing \
                         ({config} says where it is)"
                    ),
                ),
                libc::EINVAL => {
                    (ErrorKind::Invalid, format!("{config} or the keyring of {user} is wrong"))
                }
                libc::ETIMEDOUT => (
                    ErrorKind::Io,
                    format!("the monitors do not answer: are those that {config} names running?"),
                ),
                _ => (ErrorKind::Io, "connecting".to_owned()),
            };
            (kind, format!("{advice} ({})", said(errno)))
        }
    };
    Error::new(kind, format!("{name}: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let kind = |errno| error_of("putting a", Errno(errno)).kind();
        for errno in [libc::ETIMEDOUT, libc::EIO, libc::EAGAIN, libc::ENOTCONN, libc::EINVAL] {
            assert_eq!(kind(errno), ErrorKind::Io);
        }
        assert_eq!(kind(libc::ESHUTDOWN), ErrorKind::Denied);
        assert_eq!(kind(libc::EPERM), ErrorKind::Denied);
        assert_eq!(kind(libc::ENOSPC), ErrorKind::NoSpace);
        assert_eq!(kind(libc::EDQUOT), ErrorKind::NoSpace);
        assert_eq!(kind(libc::EFBIG), ErrorKind::Limit);
        assert_eq!(kind(libc::ENOENT), ErrorKind::NotFound);
    }
}

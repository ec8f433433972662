//! The system calls that remain to a server and to its helper.
//!
//! The kernel applies the strictest of several filters. One allows the listed calls, some only with
//! certain arguments, and answers ENOSYS to unknown ones, so that a library falls back. Another
//! answers EPERM to known calls that a server must not make.
//!
//! In a build with assertions an unlisted call kills the process: a call that mica itself makes
//! must not go unnoticed in tests.

mod lists;

use super::HelperDoes;
use lists::{FOR_LINKS, FOR_MOUNTS, FOR_NETWORK, OF_BOTH, OF_SERVERS, REFUSED};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter, apply_filter_all_threads,
};
use std::collections::BTreeMap;
use std::io;

/// Which threads are restricted, besides those that they start.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Threads {
    /// The calling thread.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests are threads among others"))]
    This,
    /// All threads of this process.
    All,
}

/// What happens to a thread that makes an unlisted call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unlisted {
    Error,
    Kill,
}

impl Unlisted {
    pub(super) const OF_THIS_BUILD: Self =
        if cfg!(debug_assertions) { Self::Kill } else { Self::Error };
}

/// What not every server may do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Allowed {
    /// Listen at TCP ports.
    pub(super) has_tcp: bool,
    /// Give files a second name.
    pub(super) has_links: bool,
    /// Connect to others over the network.
    pub(super) has_network: bool,
}

/// Restricts threads of a server to what a server needs.
///
/// # Errors
/// If the kernel or the processor supports no filters.
pub(super) fn restrict_server(
    allowed: Allowed,
    threads: Threads,
    unlisted: Unlisted,
) -> io::Result<()> {
    let links = if allowed.has_links { FOR_LINKS } else { &[] };
    let network = if allowed.has_network { FOR_NETWORK } else { &[] };
    let mut rules = listed(&[OF_BOTH, OF_SERVERS, links, network]);
    server_rules(&mut rules, allowed).map_err(io::Error::other)?;
    apply(rules, threads, unlisted)
}

/// Restricts threads of a helper to what a helper needs.
///
/// # Errors
/// As [`restrict_server`].
pub(super) fn restrict_helper(
    does: HelperDoes,
    threads: Threads,
    unlisted: Unlisted,
) -> io::Result<()> {
    let mut rules = listed(&[OF_BOTH, if does.mounts { FOR_MOUNTS } else { &[] }]);
    helper_rules(&mut rules, does).map_err(io::Error::other)?;
    apply(rules, threads, unlisted)
}

/// Whether a server may make this call, perhaps only with certain arguments.
#[cfg(test)]
pub(super) fn knows(call: i64) -> bool {
    let mut rules = listed(&[OF_BOTH, OF_SERVERS]);
    let allowed = Allowed { has_tcp: true, has_links: false, has_network: false };
    server_rules(&mut rules, allowed).expect("rules");
    rules.contains_key(&call)
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn listed(lists: &[&[i64]]) -> Rules {
    // A call with an empty list of rules is allowed whatever its arguments.
    lists.iter().flat_map(|list| list.iter()).map(|call| (*call, Vec::new())).collect()
}

fn apply(mut allowed: Rules, threads: Threads, unlisted: Unlisted) -> io::Result<()> {
    let is_allowed = |call: &&i64| allowed.contains_key(*call);
    let refused: Rules =
        REFUSED.iter().filter(|call| !is_allowed(call)).map(|call| (*call, Vec::new())).collect();
    let older = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    // The other filters answer these; this one lets them pass.
    allowed.extend(refused.clone());
    allowed.extend(older.clone());
    let for_unlisted = match unlisted {
        Unlisted::Error => SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        Unlisted::Kill => SeccompAction::KillProcess,
    };
    let errno = |errno: libc::c_int| SeccompAction::Errno(errno.unsigned_abs());
    // The list of allowed calls comes last: it does not allow installing another filter.
    for (rules, matched, other) in [
        (refused, errno(libc::EPERM), SeccompAction::Allow),
        // clone3 has its flags in memory, where no filter sees them; libraries fall back to clone.
        (older, errno(libc::ENOSYS), SeccompAction::Allow),
        (allowed, SeccompAction::Allow, for_unlisted),
    ] {
        let architecture = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
        let filter = SeccompFilter::new(rules, other, matched, architecture);
        let program = filter.and_then(BpfProgram::try_from).map_err(io::Error::other)?;
        match threads {
            Threads::This => apply_filter(&program),
            Threads::All => apply_filter_all_threads(&program),
        }
        .map_err(io::Error::other)?;
    }
    Ok(())
}

type Condition = Result<SeccompCondition, BackendError>;

fn is(argument: u8, value: libc::c_int) -> Condition {
    SeccompCondition::new(argument, Dword, Eq, number(value))
}

/// Of the bits of `mask`, exactly those of `value` are set.
fn has(argument: u8, mask: libc::c_int, value: libc::c_int) -> Condition {
    SeccompCondition::new(argument, Dword, MaskedEq(number(mask)), number(value))
}

fn is_null(argument: u8) -> Condition {
    SeccompCondition::new(argument, Qword, Eq, 0)
}

fn all<const N: usize>(conditions: [Condition; N]) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(conditions.into_iter().collect::<Result<_, _>>()?)
}

/// The bits of a constant, for an argument of 32 bits.
fn number(constant: libc::c_int) -> u64 {
    constant.cast_unsigned().into()
}

/// One rule for each value that an argument may have.
fn any(argument: u8, values: &[libc::c_int]) -> Result<Vec<SeccompRule>, BackendError> {
    values.iter().map(|value| all([is(argument, *value)])).collect()
}

fn common_rules(rules: &mut Rules) -> Result<(), BackendError> {
    // No executable memory but the program's code.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![all([has(2, libc::PROT_EXEC, 0)])?]);
    }
    // New threads may be started; new processes and namespaces may not.
    let spaces = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    let thread = all([has(0, spaces | libc::CLONE_THREAD, libc::CLONE_THREAD)])?;
    rules.insert(libc::SYS_clone, vec![thread]);
    rules.insert(libc::SYS_prctl, any(0, PRCTLS)?);
    // A process may signal itself, as abort does.
    let own = libc::c_int::try_from(std::process::id()).unwrap_or_default();
    rules.insert(libc::SYS_tgkill, vec![all([is(0, own)])?]);
    rules.insert(libc::SYS_fcntl, any(1, FCNTLS)?);
    Ok(())
}

fn server_rules(rules: &mut Rules, allowed: Allowed) -> Result<(), BackendError> {
    common_rules(rules)?;
    rules.insert(libc::SYS_socket, socket_rules(allowed)?);
    send_rules(rules, allowed)?;
    rules.insert(libc::SYS_setsockopt, option_rules(allowed)?);
    if allowed.has_network {
        // Landlock says which TCP ports.
        rules.insert(libc::SYS_connect, Vec::new());
    }
    // An ioctl request has 32 bits, whatever the type of the constant.
    rules.insert(libc::SYS_ioctl, any(1, IOCTLS)?);
    // A mode may only be set to private. Only the helper gives a new file more, and no more than
    // one has that this process may write.
    rules.insert(libc::SYS_fchmod, vec![all([is(1, 0o600)])?]);
    // Limits may only be read.
    rules.insert(libc::SYS_prlimit64, vec![all([is_null(2)])?]);
    rules.insert(libc::SYS_io_uring_register, any(1, RING_REGISTERS)?);
    Ok(())
}

/// Stream sockets to listen on: an unconnected one reaches nobody. Who has a store behind a network
/// also connects, and looks up addresses. Only TCP itself: landlock does not see the ports of other
/// protocols, such as MPTCP.
fn socket_rules(allowed: Allowed) -> Result<Vec<SeccompRule>, BackendError> {
    let kind = |kind| has(1, SOCKET_KIND, kind);
    let mut sockets = vec![all([is(0, libc::AF_UNIX), kind(libc::SOCK_STREAM)])?];
    let mut inet = |socket, protocols: [libc::c_int; 2]| -> Result<(), BackendError> {
        for family in [libc::AF_INET, libc::AF_INET6] {
            for protocol in protocols {
                sockets.push(all([is(0, family), kind(socket), is(2, protocol)])?);
            }
        }
        Ok(())
    };
    if allowed.has_tcp || allowed.has_network {
        inet(libc::SOCK_STREAM, [libc::IPPROTO_IP, libc::IPPROTO_TCP])?;
    }
    if allowed.has_network {
        inet(libc::SOCK_DGRAM, [libc::IPPROTO_IP, libc::IPPROTO_UDP])?;
        // Whoever looks up an address wants to know which families this machine has.
        sockets.push(all([is(0, libc::AF_NETLINK), is(2, libc::NETLINK_ROUTE)])?);
    }
    Ok(sockets)
}

/// No implicit connecting, which landlock may not see; and no address, except for who looks up
/// addresses.
fn send_rules(rules: &mut Rules, allowed: Allowed) -> Result<(), BackendError> {
    let Allowed { has_tcp, has_network, .. } = allowed;
    let no_open = |argument| has(argument, libc::MSG_FASTOPEN, 0);
    let send = match has_network {
        true => all([no_open(3)])?,
        false => all([is_null(4), no_open(3)])?,
    };
    rules.insert(libc::SYS_sendto, vec![send]);
    let messages = match has_tcp || has_network {
        true => vec![all([no_open(2)])?],
        false => Vec::new(),
    };
    rules.insert(libc::SYS_sendmsg, messages);
    if has_network {
        rules.insert(libc::SYS_sendmmsg, vec![all([no_open(3)])?]);
    }
    Ok(())
}

fn option_rules(allowed: Allowed) -> Result<Vec<SeccompRule>, BackendError> {
    let all_of = |level, names: &'static [libc::c_int]| {
        names.iter().map(move |name| all([is(1, level), is(2, *name)]))
    };
    let of_servers = all_of(libc::SOL_SOCKET, SOCKET_OPTIONS)
        .chain(all_of(libc::IPPROTO_TCP, TCP_OPTIONS))
        .collect::<Result<Vec<_>, _>>()?;
    if !allowed.has_network {
        return Ok(of_servers);
    }
    let of_clients = all_of(libc::IPPROTO_TCP, CLIENT_TCP_OPTIONS)
        .chain(all_of(libc::IPPROTO_IP, LOOKUP_IP_OPTIONS))
        .chain(all_of(libc::IPPROTO_IPV6, LOOKUP_IPV6_OPTIONS))
        .collect::<Result<Vec<_>, _>>()?;
    Ok([of_servers, of_clients].concat())
}

fn helper_rules(rules: &mut Rules, does: HelperDoes) -> Result<(), BackendError> {
    common_rules(rules)?;
    if does.removes {
        // No folders.
        rules.insert(libc::SYS_unlinkat, vec![all([is(2, 0)])?]);
    }
    let socket = |kind| all([is(0, libc::AF_UNIX), has(1, SOCKET_KIND, kind)]);
    rules.insert(libc::SYS_socket, vec![socket(libc::SOCK_SEQPACKET)?, socket(libc::SOCK_DGRAM)?]);
    rules.insert(libc::SYS_connect, Vec::new());
    rules.insert(libc::SYS_sendmsg, Vec::new());
    // Of new files that the server opened.
    let rights =
        [libc::SYS_fchmod, libc::SYS_fgetxattr, libc::SYS_fsetxattr, libc::SYS_fremovexattr];
    rules.extend(rights.map(|call| (call, Vec::new())));
    // The group alone.
    rules.insert(libc::SYS_fchown, vec![all([is(1, -1)])?]);
    if !does.mounts {
        // Files of other processes may only be read.
        let changing = libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC;
        // New ones that never get a name may be written.
        let nameless = libc::O_TMPFILE | libc::O_EXCL;
        let opens = |flags: u8| {
            let reading = all([has(flags, changing, 0)])?;
            Ok::<_, BackendError>(vec![reading, all([has(flags, nameless, nameless)])?])
        };
        rules.insert(libc::SYS_openat, opens(2)?);
        #[cfg(target_arch = "x86_64")]
        rules.insert(libc::SYS_open, opens(1)?);
    }
    Ok(())
}

/// The bits of a socket's type that are not flags.
const SOCKET_KIND: libc::c_int = 0xf;
/// Linux's IORING_REGISTER_EVENTFD and IORING_UNREGISTER_EVENTFD.
const RING_REGISTERS: &[libc::c_int] = &[4, 5];

const FCNTLS: &[libc::c_int] = &[
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// Names of threads; Linux's PR_SET_VMA, by which an allocator names its memory, and PR_GET_AUXV,
/// by which a library reads the auxiliary vector.
const PRCTLS: &[libc::c_int] = &[libc::PR_SET_NAME, libc::PR_GET_NAME, 0x5356_4d41, 0x4155_5856];

/// Linux's FIONBIO, BLKSSZGET, BLKGETSIZE64 and TCGETS.
const IOCTLS: &[libc::c_int] = &[0x5421, 0x1268, 0x8008_1272_u32.cast_signed(), 0x5401];

const SOCKET_OPTIONS: &[libc::c_int] = &[
    libc::SO_REUSEADDR,
    libc::SO_SNDBUF,
    libc::SO_RCVBUF,
    libc::SO_KEEPALIVE,
    libc::SO_RCVTIMEO,
    libc::SO_SNDTIMEO,
    // The variants with 64-bit time on all platforms.
    66,
    67,
];

const TCP_OPTIONS: &[libc::c_int] =
    &[libc::TCP_NODELAY, libc::TCP_KEEPIDLE, libc::TCP_KEEPINTVL, libc::TCP_KEEPCNT];

/// What clients of HTTP set in addition.
const CLIENT_TCP_OPTIONS: &[libc::c_int] = &[libc::TCP_USER_TIMEOUT];

/// What the C libraries set on the sockets by which they look up addresses.
const LOOKUP_IP_OPTIONS: &[libc::c_int] = &[libc::IP_RECVERR];
const LOOKUP_IPV6_OPTIONS: &[libc::c_int] = &[libc::IPV6_RECVERR, libc::IPV6_V6ONLY];

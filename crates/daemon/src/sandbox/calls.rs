//! System calls that a server never needs, which is what somebody needs who has got into it.

use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule, apply_filter,
};
use std::collections::BTreeMap;
use std::io;

/// Refuses them to this thread and all that it starts from now on.
///
/// # Errors
/// Where the kernel or the processor knows no filters.
pub(super) fn restrict() -> io::Result<()> {
    apply(rules().map_err(io::Error::other)?, libc::EPERM)?;
    // Its flags are in memory, where no filter sees them. Who is told that there is no such call
    // takes the older one.
    apply(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)
}

fn apply(rules: Rules, errno: libc::c_int) -> io::Result<()> {
    let architecture = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let refused = SeccompAction::Errno(errno.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, architecture);
    let program = filter.and_then(BpfProgram::try_from).map_err(io::Error::other)?;
    apply_filter(&program).map_err(io::Error::other)
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn rules() -> Result<Rules, seccompiler::BackendError> {
    // A call without a rule is refused whatever its arguments are.
    let mut rules: Rules = REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    let all = |conditions| SeccompRule::new(conditions);
    let is = |argument, value| SeccompCondition::new(argument, Dword, Eq, value);
    let is_not = |argument, value| SeccompCondition::new(argument, Dword, Ne, value);
    let has = |argument, bits| SeccompCondition::new(argument, Qword, MaskedEq(bits), bits);
    let number = |constant: libc::c_int| u64::from(constant.unsigned_abs());

    // Stream sockets of this machine and of TCP, and the datagrams of this machine.
    let [unix, inet, inet6] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6].map(number);
    let mut sockets = vec![all(vec![is_not(0, unix)?, is_not(0, inet)?, is_not(0, inet6)?])?];
    for family in [inet, inet6] {
        for kind in [libc::SOCK_DGRAM, libc::SOCK_RAW, libc::SOCK_SEQPACKET].map(number) {
            let kind = SeccompCondition::new(1, Dword, MaskedEq(SOCKET_KIND), kind)?;
            sockets.push(all(vec![is(0, family)?, kind])?);
        }
        let (any, tcp) = (number(libc::IPPROTO_IP), number(libc::IPPROTO_TCP));
        sockets.push(all(vec![is(0, family)?, is_not(2, any)?, is_not(2, tcp)?])?);
    }
    rules.insert(libc::SYS_socket, sockets);
    // No code but the program's.
    let executable = number(libc::PROT_EXEC);
    for call in [libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_pkey_mprotect] {
        rules.insert(call, vec![all(vec![has(2, executable)?])?]);
    }
    // Typing into the terminal that the server was started from.
    let typing = [libc::TIOCSTI, libc::TIOCLINUX].map(|what| all(vec![is(1, what)?]));
    rules.insert(libc::SYS_ioctl, typing.into_iter().collect::<Result<_, _>>()?);
    // New threads are started, new name spaces are not.
    let spaces = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWCGROUP;
    let each = (0..u64::BITS).map(|bit| 1 << bit).filter(|bit| number(spaces) & bit != 0);
    let clones = each.map(|bit| all(vec![has(0, bit)?])).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_clone, clones);
    if cfg!(target_arch = "x86_64") {
        // The same calls by their other numbers.
        let twins: Vec<_> = rules.iter().map(|(call, rules)| (call | X32, rules.clone())).collect();
        rules.extend(twins);
    }
    Ok(rules)
}

/// The bits of a socket's type that are no flags.
const SOCKET_KIND: u64 = 0xf;
/// What the numbers of calls of 64 bits with pointers of 32 have more.
const X32: i64 = 0x4000_0000;

#[rustfmt::skip]
const REFUSED: &[i64] = &[
    // Other programs.
    libc::SYS_execve, libc::SYS_execveat,
    libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_kcmp,
    libc::SYS_pidfd_getfd, libc::SYS_process_madvise, libc::SYS_process_mrelease,
    libc::SYS_personality,
    // Other users, and what only the system's administrator may do.
    libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid, libc::SYS_setregid,
    libc::SYS_setresuid, libc::SYS_setresgid, libc::SYS_setfsuid, libc::SYS_setfsgid,
    libc::SYS_setgroups, libc::SYS_capset, libc::SYS_setns, libc::SYS_unshare,
    libc::SYS_chroot, libc::SYS_pivot_root, libc::SYS_setsid, libc::SYS_setpgid,
    libc::SYS_mknodat, libc::SYS_fchownat, libc::SYS_fchown,
    libc::SYS_linkat, libc::SYS_symlinkat,
    libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at,
    // Mounts.
    libc::SYS_mount, libc::SYS_umount2, libc::SYS_move_mount, libc::SYS_open_tree,
    libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount, libc::SYS_fspick,
    libc::SYS_mount_setattr, libc::SYS_swapon, libc::SYS_swapoff,
    libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_fanotify_init,
    // The kernel itself.
    libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_userfaultfd, libc::SYS_syslog,
    libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module,
    libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_reboot, libc::SYS_acct,
    libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl,
    libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_adjtimex, libc::SYS_clock_adjtime,
    libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")] libc::SYS_fork,
    #[cfg(target_arch = "x86_64")] libc::SYS_vfork,
    #[cfg(target_arch = "x86_64")] libc::SYS_mknod,
    #[cfg(target_arch = "x86_64")] libc::SYS_chown,
    #[cfg(target_arch = "x86_64")] libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")] libc::SYS_link,
    #[cfg(target_arch = "x86_64")] libc::SYS_symlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")] libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")] libc::SYS_modify_ldt,
    #[cfg(target_arch = "x86_64")] libc::SYS_uselib,
];

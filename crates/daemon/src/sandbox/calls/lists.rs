//! Lists of system calls, with those that glibc and musl use for the same purpose.

/// What both servers and helpers need.
#[rustfmt::skip]
pub(super) const OF_BOTH: &[i64] = &[
    // Descriptors.
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_close,
    libc::SYS_lseek, libc::SYS_ppoll, libc::SYS_recvmsg,
    // Files; landlock says which.
    libc::SYS_openat, libc::SYS_fstat, libc::SYS_statx, libc::SYS_newfstatat,
    libc::SYS_readlinkat, libc::SYS_getdents64, libc::SYS_getcwd,
    // Memory.
    libc::SYS_munmap, libc::SYS_mremap, libc::SYS_madvise, libc::SYS_brk,
    // Threads, signals, and the end.
    libc::SYS_futex, libc::SYS_set_robust_list, libc::SYS_rseq, libc::SYS_membarrier,
    libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_gettid, libc::SYS_getpid,
    libc::SYS_set_tid_address, libc::SYS_sigaltstack, libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_restart_syscall,
    libc::SYS_exit, libc::SYS_exit_group,
    // Time, randomness and identity.
    libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_gettimeofday,
    libc::SYS_clock_nanosleep, libc::SYS_nanosleep, libc::SYS_getrandom,
    libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid, libc::SYS_getppid,
    #[cfg(target_arch = "x86_64")] libc::SYS_poll,
    #[cfg(target_arch = "x86_64")] libc::SYS_open,
    #[cfg(target_arch = "x86_64")] libc::SYS_stat,
    #[cfg(target_arch = "x86_64")] libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")] libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_time,
];

/// What a server needs in addition.
#[rustfmt::skip]
pub(super) const OF_SERVERS: &[i64] = &[
    // Images, sidecars, logs.
    libc::SYS_pread64, libc::SYS_pwrite64, libc::SYS_preadv, libc::SYS_pwritev,
    libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_fadvise64, libc::SYS_fsync, libc::SYS_fdatasync,
    libc::SYS_sync_file_range, libc::SYS_ftruncate, libc::SYS_fallocate, libc::SYS_flock,
    libc::SYS_openat2,
    libc::SYS_statfs, libc::SYS_fstatfs, libc::SYS_faccessat, libc::SYS_faccessat2,
    libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_unlinkat, libc::SYS_mkdirat,
    // Memory shared with virtual machines.
    libc::SYS_memfd_create, libc::SYS_msync,
    // Existing rings.
    libc::SYS_io_uring_enter,
    // Waiting.
    libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    // Where the output of a server in the background goes.
    libc::SYS_dup3,
    // Sockets.
    libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4, libc::SYS_shutdown,
    libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_getsockopt, libc::SYS_recvfrom,
    // Checking whether another process of ours is alive, without signalling it.
    libc::SYS_pidfd_open, libc::SYS_wait4, libc::SYS_waitid,
    libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrusage,
    #[cfg(target_arch = "x86_64")] libc::SYS_access,
    #[cfg(target_arch = "x86_64")] libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")] libc::SYS_rename,
    #[cfg(target_arch = "x86_64")] libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")] libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")] libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")] libc::SYS_getrlimit,
];

/// What a server in addition needs whose volumes are in a directory.
pub(super) const FOR_LINKS: &[i64] = &[libc::SYS_linkat, libc::SYS_syncfs];

/// What a server in addition needs whose volumes are behind a network, besides what it may do with
/// certain arguments only.
pub(super) const FOR_NETWORK: &[i64] = &[libc::SYS_recvmmsg];

/// What a helper that mounts as root needs in addition.
#[rustfmt::skip]
pub(super) const FOR_MOUNTS: &[i64] = &[
    libc::SYS_mount, libc::SYS_umount2, libc::SYS_flock, libc::SYS_statfs, libc::SYS_fstatfs,
];

/// Known calls that a server must not make: EPERM.
#[rustfmt::skip]
pub(super) const REFUSED: &[i64] = &[
    // Other programs.
    libc::SYS_execve, libc::SYS_execveat, libc::SYS_kill, libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo, libc::SYS_pidfd_send_signal,
    libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_kcmp,
    libc::SYS_pidfd_getfd, libc::SYS_process_madvise, libc::SYS_process_mrelease,
    libc::SYS_personality,
    // Sockets of others.
    libc::SYS_connect, libc::SYS_socketpair, libc::SYS_sendmmsg, libc::SYS_recvmmsg,
    // What landlock does not cover: modes, owners, times and attributes of files anywhere.
    libc::SYS_fchmodat, FCHMODAT2, libc::SYS_fchownat, libc::SYS_fchown, libc::SYS_utimensat,
    libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, SETXATTRAT,
    libc::SYS_removexattr, libc::SYS_lremovexattr, libc::SYS_fremovexattr, REMOVEXATTRAT,
    FILE_SETATTR, libc::SYS_truncate,
    // Other names for files, and special files.
    libc::SYS_linkat, libc::SYS_symlinkat, libc::SYS_mknodat,
    libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at,
    // Rings, old and new.
    libc::SYS_io_uring_setup, libc::SYS_io_setup, libc::SYS_io_submit,
    // Other users, and what is reserved to the administrator.
    libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid, libc::SYS_setregid,
    libc::SYS_setresuid, libc::SYS_setresgid, libc::SYS_setfsuid, libc::SYS_setfsgid,
    libc::SYS_setgroups, libc::SYS_capset, libc::SYS_setns, libc::SYS_unshare,
    libc::SYS_chroot, libc::SYS_pivot_root, libc::SYS_setsid, libc::SYS_setpgid,
    libc::SYS_setpriority, libc::SYS_sched_setscheduler, libc::SYS_sched_setattr,
    libc::SYS_setrlimit,
    // Mounts.
    libc::SYS_mount, libc::SYS_umount2, libc::SYS_move_mount, libc::SYS_open_tree,
    libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount, libc::SYS_fspick,
    libc::SYS_mount_setattr, libc::SYS_swapon, libc::SYS_swapoff,
    libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_fanotify_init,
    libc::SYS_inotify_init1,
    // The kernel itself.
    libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_userfaultfd, libc::SYS_syslog,
    libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module,
    libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_reboot, libc::SYS_acct,
    libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl,
    libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_adjtimex, libc::SYS_clock_adjtime,
    libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_vhangup,
    libc::SYS_pkey_mprotect, libc::SYS_remap_file_pages, libc::SYS_shmat, libc::SYS_shmget,
    #[cfg(target_arch = "x86_64")] libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")] libc::SYS_utime,
    #[cfg(target_arch = "x86_64")] libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")] libc::SYS_futimesat,
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

/// Calls too new for the libc crate, with the same number on all processors.
const FCHMODAT2: i64 = 452;
const SETXATTRAT: i64 = 463;
const REMOVEXATTRAT: i64 = 466;
const FILE_SETATTR: i64 = 469;

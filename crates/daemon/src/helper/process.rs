//! The helper's side.

use super::{
    Errands, Kind, LockHolder, MESSAGE_BYTES_MAX, OtherUsers, Reply, Request, Setup, connect,
    find_holder, is_certificate, is_dead, open_config, open_file, path_of, send,
};
use crate::messages::receive_with_fds;
use crate::overlay::nameless_file;
use crate::sandbox::{self, HelperDoes};
use crate::takeover::{RENDEZVOUS_FOLDER, RENDEZVOUS_SOCKET};
use mica_block::{Error, ErrorKind, Result};
use mica_serve::fuse::{AllowOther, MountRequest, Mounted, Mounts, MountsHere};
use mica_stack::NewLog;
use mica_store::{Holder, LockQuestion};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Serves requests of the server at the other end of standard input until that is gone.
///
/// # Errors
/// If there is no server, or no sandbox.
pub fn run_helper() -> Result<()> {
    let failed = |error| Error::from_io("sandbox helper failed", error);
    let link = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    // Signals, also to the whole process group, are for the server to handle: it may still need the
    // helper.
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::default()).map_err(failed)?;
    }
    // For people who look at the process list; failure is harmless.
    let _ = rustix::thread::set_name(c"mica-helper");
    let mut errands = Errands::default();
    loop {
        match receive(&link)? {
            Some(Setup::File(path)) => errands.files.push(path_of(path)),
            Some(Setup::Config(path)) => errands.config = Some(path_of(path)),
            Some(Setup::Certificates(path)) => errands.certificates.push(path_of(path)),
            Some(Setup::NewLog { path, device, inode }) => {
                errands.new_logs.push(NewLog { path: path_of(path), device, inode });
            }
            Some(Setup::Begin) => break,
            None => return Ok(()),
        }
    }
    let (mounts, removes) = (!errands.files.is_empty(), !errands.new_logs.is_empty());
    sandbox::restrict_helper(HelperDoes { mounts, removes })?;
    let (mounts, opener) = (MountsHere::default(), Opener::default());
    while let Some(request) = receive_with(&link)? {
        let (reply, fd) = answer(request, &errands, (&mounts, &opener)).unwrap_or_else(|error| {
            let kind = match error.kind() {
                ErrorKind::Denied => Kind::Denied,
                ErrorKind::Invalid => Kind::Invalid,
                ErrorKind::NotFound => Kind::NotFound,
                _ => Kind::Io,
            };
            (Reply::Refused { kind, what: error.in_one_line() }, None)
        });
        let has_fd = fd.is_some();
        let mut sent = send(&link, &reply, fd.as_ref().map(AsFd::as_fd).as_slice());
        drop(fd);
        if has_fd {
            sent = sent.and_then(|()| send(&link, &Reply::Released, &[]));
        }
        if sent.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// The next message; `None` at the end.
fn receive<T: serde::de::DeserializeOwned>(link: &OwnedFd) -> Result<Option<T>> {
    Ok(receive_with(link)?.map(|(message, _)| message))
}

/// The same with its descriptors.
fn receive_with<T: serde::de::DeserializeOwned>(
    link: &OwnedFd,
) -> Result<Option<(T, Vec<OwnedFd>)>> {
    let malformed = |_| Error::new(ErrorKind::Invalid, "a malformed message");
    match receive_with_fds(link, MESSAGE_BYTES_MAX) {
        Ok((bytes, fds)) if !bytes.is_empty() => {
            serde_json::from_slice(&bytes).map(|message| Some((message, fds))).map_err(malformed)
        }
        _ => Ok(None),
    }
}

fn answer(
    (request, fds): (Request, Vec<OwnedFd>),
    errands: &Errands,
    (mounts, opener): (&MountsHere, &Opener),
) -> Result<(Reply, Option<OwnedFd>)> {
    let file = |number: usize| {
        let unknown = || Error::new(ErrorKind::Invalid, "no such file");
        errands.files.get(number).cloned().ok_or_else(unknown)
    };
    Ok(match request {
        Request::Holder { device, inode, byte, process, descriptor } => {
            let question = LockQuestion { device, inode, byte, process, descriptor };
            (Reply::Holder(holder(&question)), None)
        }
        Request::IsDead { path } => (Reply::IsDead(is_dead(&path_of(path))), None),
        Request::Config => {
            let none = || Error::new(ErrorKind::Invalid, "there is no configuration file");
            let path = errands.config.clone().ok_or_else(none)?;
            (Reply::Config, Some(opener.open(path, open_config)?))
        }
        Request::Certificate { path } => {
            let path = path_of(path);
            if !is_certificate(&path, &errands.certificates) {
                let what = format!("{} is not a file of certificates", path.display());
                return Err(Error::new(ErrorKind::Denied, what));
            }
            (Reply::Certificate, Some(opener.open(path, open_file)?))
        }
        Request::Temporary => {
            let folder = std::env::temp_dir();
            (Reply::Temporary, Some(opener.open(folder, nameless_file)?))
        }
        Request::Alike => {
            let [old, new] = <[OwnedFd; 2]>::try_from(fds)
                .map_err(|_| Error::new(ErrorKind::Invalid, "not two files"))?;
            opener.run_within(OPEN_LIMIT, "the file of a layer", move || {
                mica_stack::make_alike(old, new)
            })?;
            (Reply::Alike, None)
        }
        Request::RemoveLog { log } => {
            let unknown = || Error::new(ErrorKind::Invalid, "no such log");
            errands.new_logs.get(log).ok_or_else(unknown)?.remove()?;
            (Reply::LogRemoved, None)
        }
        Request::Connect { path } => {
            let path = path_of(path);
            if !is_rendezvous(&path) {
                let what = format!("{} is not a socket of a takeover", path.display());
                return Err(Error::new(ErrorKind::Denied, what));
            }
            (Reply::Connected, Some(connect(&path)?))
        }
        Request::Mount { file: number, is_writable, others, image } => {
            let allow_other = match others {
                OtherUsers::On => AllowOther::On,
                OtherUsers::Off => AllowOther::Off,
                OtherUsers::Auto => AllowOther::Auto,
            };
            let request = MountRequest { file: file(number)?, is_writable, allow_other, image };
            let Mounted { device, is_for_others, cleared } = mounts.mount(&request)?;
            (Reply::Mounted { is_for_others, cleared }, Some(device))
        }
        Request::Unmount { file: number } => {
            mounts.unmount(&file(number)?)?;
            (Reply::Unmounted, None)
        }
    })
}

fn holder(question: &LockQuestion) -> LockHolder {
    match find_holder(question) {
        Holder::Living(name) => LockHolder::Living(name),
        Holder::Dying(name) => LockHolder::Dying(name),
        Holder::Nobody => LockHolder::Nobody,
        Holder::Unknown => LockHolder::Unknown,
    }
}

/// Opens files, each on a thread: storage that hangs must not keep the server from everything else
/// that it asks for.
#[derive(Default)]
struct Opener {
    /// Whether one is being opened. There is no second thread that hangs.
    is_busy: Arc<AtomicBool>,
}

impl Opener {
    fn open(&self, path: PathBuf, open: fn(&Path) -> Result<OwnedFd>) -> Result<OwnedFd> {
        let named = path.display().to_string();
        self.run_within(OPEN_LIMIT, &named, move || open(&path))
    }

    /// What `open` gives, unless that takes longer than `limit`.
    fn run_within<T: Send + 'static>(
        &self,
        limit: Duration,
        named: &str,
        open: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let hangs = |what: &str| {
            let what = format!("{named}: {what}: check its storage, and try again");
            Error::new(ErrorKind::Io, what)
        };
        if self.is_busy.swap(true, Ordering::AcqRel) {
            return Err(hangs("a file that was opened before still hangs"));
        }
        let (sender, opened) = mpsc::channel();
        let is_busy = Arc::clone(&self.is_busy);
        let body = move || {
            let opened = open();
            is_busy.store(false, Ordering::Release);
            // If nobody waits any more, the file is closed here.
            let _ = sender.send(opened);
        };
        std::thread::Builder::new().name("mica-open".to_owned()).spawn(body).map_err(|error| {
            self.is_busy.store(false, Ordering::Release);
            Error::from_io(format!("opening {named}"), error)
        })?;
        let late = || hangs(&format!("opening it takes longer than {} s", limit.as_secs()));
        opened.recv_timeout(limit).unwrap_or_else(|_| Err(late()))
    }
}

/// Limit for opening a file.
const OPEN_LIMIT: Duration = Duration::from_secs(10);

/// Whether a process that takes over may wait at `path`.
fn is_rendezvous(path: &Path) -> bool {
    let folder = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    path.file_name().is_some_and(|name| name == RENDEZVOUS_SOCKET)
        && folder.is_some_and(|folder| folder.starts_with(RENDEZVOUS_FOLDER))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_stack::LogPlace;

    #[test]
    fn only_sockets_of_takeovers_are_connected_to() {
        assert!(is_rendezvous(Path::new("/run/mica/mica-takeover-12-0/socket")));
        for elsewhere in [
            "/run/udev/control",
            "/run/mica/mica-takeover-12-0/../../udev/control",
            "/run/mica/mica-takeover-12-0/..",
            "/run/mica-takeover-1/other",
            "mica-takeover-",
            "",
        ] {
            assert!(!is_rendezvous(Path::new(elsewhere)), "{elsewhere}");
        }
    }

    #[test]
    fn file_that_the_configuration_does_not_have_is_not_mounted_over() {
        let mounts = MountsHere::default();
        let errands = Errands { files: vec!["/nowhere/disk".into()], ..Errands::default() };
        let request = Request::Unmount { file: 1 };
        let refused = answer((request, Vec::new()), &errands, (&mounts, &Opener::default()))
            .err()
            .map(|error| error.kind());
        assert_eq!(refused, Some(ErrorKind::Invalid));
    }

    #[test]
    fn only_logs_that_the_start_made_are_removed_and_only_while_they_are_empty() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let made = LogPlace { path: path.clone(), len: 1 << 20 }.make().expect("made");
        let errands = Errands { new_logs: made.into_iter().collect(), ..Errands::default() };
        let ask = |log| {
            let (mounts, opener) = (MountsHere::default(), Opener::default());
            let answer =
                answer((Request::RemoveLog { log }, Vec::new()), &errands, (&mounts, &opener));
            answer.map(drop).map_err(|error| error.kind())
        };
        assert_eq!(ask(1), Err(ErrorKind::Invalid));
        std::fs::write(&path, "records").expect("written");
        assert!(ask(0).is_ok() && path.exists());
        std::fs::write(&path, "").expect("emptied");
        assert!(ask(0).is_ok() && !path.exists());
    }

    /// The story: one certificate on storage that hangs, and the server could ask for nothing else
    /// until it was started again.
    #[test]
    fn file_that_hangs_is_given_up_and_the_next_is_opened_once_it_no_longer_does() {
        let opener = Opener::default();
        let (release, held) = mpsc::channel::<()>();
        let hangs = move || {
            let _ = held.recv();
            Err::<OwnedFd, _>(Error::new(ErrorKind::Io, "it came back"))
        };
        let late = opener.run_within(Duration::ZERO, "/far/key", hangs).expect_err("it hangs");
        assert!(late.to_string().contains("/far/key: opening it takes longer"), "{late}");
        let next = || opener.open("/proc/self/stat".into(), open_file);
        let busy = next().expect_err("the other one hangs");
        assert!(busy.to_string().contains("still hangs"), "{busy}");
        drop(release);
        while opener.is_busy.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        next().expect("nothing hangs");
    }

    #[test]
    fn only_certificates_of_folders_in_the_configuration_are_opened() {
        let folders = [std::path::PathBuf::from("/etc/mica/tls")];
        assert!(is_certificate(Path::new("/etc/mica/tls/server-key.pem"), &folders));
        for elsewhere in [
            "/etc/mica/tls/shadow",
            "/etc/mica/tls/../server-key.pem",
            "/etc/mica/server-key.pem",
            "/etc/mica/tls",
            "server-key.pem",
        ] {
            assert!(!is_certificate(Path::new(elsewhere), &folders), "{elsewhere}");
        }
    }
}

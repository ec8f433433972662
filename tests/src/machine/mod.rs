//! A virtual machine: QEMU, Debian's kernel, and an initramfs with a busybox and a script.
//!
//! It runs under KVM if that boots a guest, else under TCG, where it takes some seconds to start.
//! Its console carries its output to the host; a line written to the console is its input.

mod archive;
pub mod parts;

use crate::server::Server;
use crate::tools::{self, Tool};
use crate::{clock, command};
use anyhow::{Context, Result, bail, ensure};
use archive::Archive;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

const INIT: &str = include_str!("init.sh");
/// In the order in which they need each other. A kernel may have some of them built in.
const MODULES: &[&str] = &[
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "crc16",
    "crc32c_generic",
    "crc32c-cryptoapi",
    "mbcache",
    "jbd2",
    "ext4",
];
const MEMORY: &str = "256M";
/// How long a machine may take to start under KVM; if it takes longer, there is no KVM for us.
const KVM_LIMIT: Duration = Duration::from_secs(6);
/// How long a machine may take between two outputs that its test waits for.
const LIMIT: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(10);
/// Text that never appears on the console of a healthy machine.
const BAD_SIGNS: &[&str] = &[
    "MACHINE-FAILED",
    "I/O error",
    "EXT4-fs error",
    "Kernel panic",
    "BUG:",
    "blocked for more than",
    "Call Trace",
];

/// How a machine gets its disk.
#[derive(Clone, Copy, Debug)]
pub enum Disk<'a> {
    /// None at all.
    None,
    /// From the vhost-user server at this socket, to which QEMU connects again if it has to.
    VhostUser(&'a Path),
    /// From this NBD server; QEMU is its client and makes the device itself.
    Nbd(&'a Server),
    /// From QEMU itself, which gets these options for it.
    Own(&'a [String]),
}

/// What a machine does.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work<'a> {
    /// Run by a shell that ends at the first command that fails.
    pub script: &'a str,
    /// Files for it, by name, in `/host`.
    pub files: &'a [(&'a str, &'a [u8])],
    /// Programs of the host for it, in `/host`, with their libraries.
    pub programs: &'a [Tool],
    /// Whether emulated processors run side by side. QEMU 10.0's assertion `section_index <
    /// d->map.sections_nb` fails in one of some hundred boots then, beside other load.
    pub runs_in_parallel: bool,
}

/// A running machine. Dropping it pulls the plug.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    stdin: Option<ChildStdin>,
    folder: TempDir,
}

/// Whether machines are available, and `more` tools; as [`tools::present`].
#[must_use = "a test without its tools has to end"]
pub fn present(more: &[Tool]) -> bool {
    let tools = [&[tools::QEMU_SYSTEM], more].concat();
    let mut missing = tools::missing(&tools);
    if !parts::are_there() {
        missing.push("a kernel and a busybox for virtual machines".to_owned());
    }
    tools::none_missing(&missing)
}

impl Machine {
    /// Starts a machine with `disk` that does `work`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn boot(disk: Disk<'_>, work: &Work<'_>) -> Result<Self> {
        Self::boot_with(accelerator(), disk, work)
    }

    fn boot_with(accelerator: &str, disk: Disk<'_>, work: &Work<'_>) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("mica-").tempdir()?;
        fs::write(folder.path().join("initrd"), initramfs(disk, work)?)?;
        let console = File::create(folder.path().join("console"))?;
        let mut qemu = Command::new(tools::QEMU_SYSTEM.program);
        let threads = match accelerator {
            "tcg" if work.runs_in_parallel => ",thread=multi",
            "tcg" => ",thread=single",
            _ => "",
        };
        qemu.args(["-machine", "q35,memory-backend=memory"]);
        qemu.args(["-accel", &format!("{accelerator}{threads}")]);
        qemu.args(["-object", &format!("memory-backend-memfd,id=memory,size={MEMORY},share=on")]);
        qemu.args(["-m", MEMORY, "-cpu", "max", "-smp", "2", "-nodefaults", "-no-user-config"]);
        qemu.args(["-no-reboot", "-display", "none", "-monitor", "none", "-serial", "stdio"]);
        qemu.arg("-kernel").arg(parts::kernel()?).arg("-initrd").arg(folder.path().join("initrd"));
        qemu.args(["-append", "console=ttyS0 quiet panic=-1 no_timer_check"]).args(device(disk)?);
        qemu.stdin(Stdio::piped()).stdout(console.try_clone()?).stderr(console);
        let mut child = qemu.spawn().with_context(|| format!("starting {qemu:?}"))?;
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, folder })
    }

    /// Its output so far, and QEMU's.
    pub fn console(&self) -> String {
        let said = fs::read(self.folder.path().join("console")).unwrap_or_default();
        String::from_utf8_lossy(&said).replace('\r', "")
    }

    /// Waits until `found` finds what it is looking for on the console.
    ///
    /// # Panics
    /// If the machine ends first, or never prints it.
    #[track_caller]
    pub fn wait_for<T>(&mut self, found: impl Fn(&str) -> Option<T>) -> T {
        self.wait_within(LIMIT, found).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// The same for at most `limit`.
    ///
    /// # Errors
    /// If the machine ends first, or never prints it; with its console.
    pub fn wait_within<T>(
        &mut self,
        limit: Duration,
        found: impl Fn(&str) -> Option<T>,
    ) -> Result<T> {
        let there = clock::poll(limit, PAUSE, || {
            let has_ended = !matches!(self.child.try_wait(), Ok(None));
            found(&self.console()).map(Some).or(has_ended.then_some(None))
        });
        let there = there.flatten();
        there.with_context(|| format!("the machine ended or said no more:\n{}", self.console()))
    }

    /// QEMU's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to its console.
    ///
    /// # Errors
    /// If it has ended.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("it listens until it is dropped")?;
        Ok(writeln!(stdin, "{line}")?)
    }

    /// Waits until its work is done; its console.
    ///
    /// # Panics
    /// If its script failed, its kernel complained, or it does not end in time.
    #[track_caller]
    pub fn finish(mut self) -> String {
        let status = command::wait(&mut self.child, LIMIT);
        let console = self.console();
        assert!(status.is_some_and(|status| status.success()), "{status:?}:\n{console}");
        let sign = BAD_SIGNS.iter().find(|sign| console.contains(**sign));
        assert!(sign.is_none(), "{sign:?}:\n{console}");
        assert!(console.contains("MACHINE-PASSED"), "{console}");
        console
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The accelerator for machines. `/dev/kvm` may exist and still boot nothing, so it is tried.
pub fn accelerator() -> &'static str {
    static ACCELERATOR: OnceLock<&str> = OnceLock::new();
    ACCELERATOR.get_or_init(|| {
        let boots = || -> Result<bool> {
            OpenOptions::new().read(true).write(true).open("/dev/kvm")?;
            let mut machine = Machine::boot_with("kvm", Disk::None, &Work::default())?;
            let ended = command::wait(&mut machine.child, KVM_LIMIT);
            Ok(ended.is_some() && machine.console().contains("MACHINE-PASSED"))
        };
        if boots().unwrap_or(false) { "kvm" } else { "tcg" }
    })
}

/// QEMU's options for `disk`.
fn device(disk: Disk<'_>) -> Result<Vec<String>> {
    let options = match disk {
        Disk::None => vec![],
        Disk::Own(options) => options.to_vec(),
        Disk::VhostUser(socket) => vec![
            "-chardev".to_owned(),
            format!("socket,id=vhost,path={},{}", socket.display(), reconnect()?),
            "-device".to_owned(),
            "vhost-user-blk-pci,chardev=vhost,num-queues=2".to_owned(),
        ],
        Disk::Nbd(server) => vec![
            "-blockdev".to_owned(),
            format!(
                "driver=nbd,node-name=nbd,server.type=unix,server.path={},discard=unmap",
                server.socket().display()
            ),
            "-device".to_owned(),
            "virtio-blk-pci,drive=nbd,num-queues=2,serial=over-nbd".to_owned(),
        ],
    };
    Ok(options)
}

/// QEMU's option to reconnect: it counts milliseconds since 9.2, and seconds before.
fn reconnect() -> Result<&'static str> {
    let said = Command::new(tools::QEMU_SYSTEM.program).arg("--version").output()?.stdout;
    let said = String::from_utf8_lossy(&said);
    let version = said.split_whitespace().find(|word| word.starts_with(|c: char| c.is_numeric()));
    let version = version.with_context(|| format!("no version of QEMU: {said}"))?;
    let numbers: Vec<u32> = version.split('.').filter_map(|part| part.parse().ok()).collect();
    Ok(if numbers >= vec![9, 2] { "reconnect-ms=100" } else { "reconnect=1" })
}

/// The machine's initial files.
fn initramfs(disk: Disk<'_>, work: &Work<'_>) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.file("/init", INIT.as_bytes());
    archive.file("/script", work.script.as_bytes());
    archive.file("/bin/busybox", &parts::busybox()?);
    if !matches!(disk, Disk::None) {
        archive.file("/wants-disk", &[]);
    }
    let mut order = String::new();
    for name in MODULES {
        if let Some(bytes) = parts::module(name)? {
            archive.file(&format!("/modules/{name}.ko"), &bytes);
            order.push_str(&format!("{name}\n"));
        }
    }
    archive.file("/modules/order", order.as_bytes());
    for (name, bytes) in work.files {
        archive.file(&format!("/host/{name}"), bytes);
    }
    for tool in work.programs {
        let file = tool.find().with_context(|| format!("{} is not there", tool.program))?;
        archive.file(&format!("/host/{}", tool.program), &fs::read(&file)?);
        for library in libraries(&file)? {
            archive.file(&library, &fs::read(&library)?);
        }
    }
    archive.link("/etc/mtab", "/proc/mounts");
    Ok(archive.finish())
}

/// The libraries that `program` loads, by the names that it uses.
///
/// # Errors
/// If some of them are missing.
pub fn libraries(program: &Path) -> Result<Vec<String>> {
    let output = Command::new("ldd").arg(program).output().context("ldd")?;
    ensure!(output.status.success(), "ldd {}: {}", program.display(), output.status);
    let said = String::from_utf8(output.stdout)?;
    if said.contains("not found") {
        bail!("{}: {said}", program.display());
    }
    let words = said.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(words.map(str::to_owned).collect())
}

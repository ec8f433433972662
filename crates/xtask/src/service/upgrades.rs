//! The package is installed, and then its server is replaced in every way there is, under a client.

use super::container::Container;
use super::load::{DISK, DISK_BYTES, IMAGE, Load, Written, socket};
use super::packages::{Package, Packages};
use super::step;
use super::unit::Unit;
use anyhow::{Context, Result, ensure};
use mica_tests::clock;
use std::fs;
use std::os::unix::fs::MetadataExt;

pub(super) const CONFIGURATION: &str = "/etc/mica.toml";
/// The second disk, which nobody writes while the server is replaced.
const OTHER: &str = "/var/lib/vm/other.qcow2";
/// Where it has what is not flushed.
const UNFLUSHED: &str = "write -P 9 1M 1M";

/// The package alone: nothing is configured.
pub(super) fn install(container: &Container, packages: &Packages) -> Result<()> {
    let unit = Unit::new(container);
    step("is installed, enabled, and does not start without a configuration", || {
        packages.old.install(container)?;
        let user = container.ok(["getent", "passwd", "mica"])?;
        container.ok(["getent", "group", "kvm"])?;
        container.ok(["systemctl", "is-enabled", "mica.service"])?;
        let state = unit.state()?;
        let is_idle = (state.of("ActiveState"), state.of("Result")) == ("inactive", "success");
        ensure!(is_idle, "{}: {}", state.of("ActiveState"), unit.log()?);
        ensure!(state.main().is_none(), "it has a main process");
        Ok(user.trim().to_owned())
    })?;
    step("units have no mistakes", || {
        let units = ["mica.service", "mica@web.socket"];
        let said =
            container.run(["systemd-analyze", "--man=no", "verify"].into_iter().chain(units))?;
        // It looks at units of others, too.
        let ours = format!("{}{}", said.stdout, said.stderr);
        let ours: Vec<_> = ours.lines().filter(|line| line.contains("mica")).collect();
        ensure!(ours.is_empty(), "{}", ours.join("; "));
        Ok(())
    })?;
    Ok(())
}

/// Serves two disks, and replaces the server; returns what a client wrote meanwhile.
pub(super) fn run(container: &Container, packages: &Packages) -> Result<Written> {
    let unit = Unit::new(container);
    step("serves two disks", || serve(container))?;
    let socket = socket();
    let socket = socket.to_str().context("no text")?;
    let load = Load::start(container, socket, Written::default());
    load.gets_further()?;
    let replaced = |package: &Package| replace(&unit, &load, || package.install(container));

    step("upgrade", || replaced(&packages.new))?;
    step("kill -9: starts again, with the sockets it had", || killed(container, &load, socket))?;
    step("reload", || replace(&unit, &load, || container.ok(["systemctl", "reload", "mica"])))?;
    step("a broken configuration: the old process serves on", || {
        broken(container, &packages.new, &load)
    })?;
    step("downgrade", || replaced(&packages.old))?;
    step("reinstallation", || replaced(&packages.old))?;
    step("upgrade, again", || replaced(&packages.new))?;
    step("restart", || replace(&unit, &load, || container.ok(["systemctl", "restart", "mica"])))?;
    let written = step("the client ends", || load.end())?;
    step("stop: flushes, and is clean", || stopped(container))?;
    Ok(written)
}

fn serve(container: &Container) -> Result<String> {
    let size = DISK_BYTES.to_string();
    container.ok(["install", "-d", "-o", "mica", "-g", "kvm", "/var/lib/vm"])?;
    for image in [IMAGE, OTHER] {
        container.ok(["mica", "create", "-q", image, &size])?;
        container.ok(["chown", "mica:kvm", image])?;
    }
    fs::write(container.path(CONFIGURATION), configuration())?;
    container.ok(["systemctl", "start", "mica"])?;
    let unit = Unit::new(container);
    let main = unit.runs_again(None)?;
    let status = container.ok(["mica", "ctl", "status"])?;
    ensure!(status.contains(IMAGE) && status.contains(OTHER), "status: {status}");
    container.shell(&format!("{} -c 'write -P 7 0 1M' -c flush", qemu_io("other")))?;
    Ok(format!("process {main}"))
}

fn configuration() -> String {
    format!(
        "control = \"/run/mica/control.sock\"\nmetrics = \"127.0.0.1:9184\"\n\
         [[disk]]\nname = \"{DISK}\"\nimage = \"{IMAGE}\"\n\
         vhost-user = \"/run/mica/{DISK}.sock\"\nnbd = [\"/run/mica/{DISK}.nbd\"]\n\
         [[disk]]\nname = \"other\"\nimage = \"{OTHER}\"\nnbd = [\"/run/mica/other.nbd\"]\n"
    )
}

/// qemu-io on a disk that is served.
fn qemu_io(disk: &str) -> String {
    format!("qemu-io -f raw 'nbd+unix:///{disk}?socket=/run/mica/{disk}.nbd'")
}

/// Another process serves, soon, after `change`, and answers the client.
pub(super) fn replace<T>(
    unit: &Unit<'_>,
    load: &Load,
    change: impl FnOnce() -> Result<T>,
) -> Result<String> {
    let old = unit.main()?;
    let since = clock::now();
    change()?;
    let main = unit.runs_again(Some(old))?;
    let took = since.elapsed();
    load.gets_further()?;
    // Once the old process has ended, nothing of that has changed.
    unit.runs_still(main)?;
    Ok(format!("process {old} -> {main}, {:.1} s", took.as_secs_f64()))
}

/// The main process is killed.
fn killed(container: &Container, load: &Load, socket: &str) -> Result<String> {
    let unit = Unit::new(container);
    let inode = || {
        let file = fs::symlink_metadata(container.path(socket)).with_context(|| socket.to_owned());
        file.map(|file| file.ino())
    };
    let before = (inode()?, restarts(&unit)?);
    let said = replace(&unit, load, || {
        container.ok(["systemctl", "kill", "--kill-who=main", "--signal=KILL", "mica"])
    })?;
    let after = (inode()?, restarts(&unit)?);
    ensure!(after.0 == before.0, "{socket} is another socket");
    ensure!(after.1 == before.1 + 1, "it was restarted {} times", after.1 - before.1);
    Ok(said)
}

fn restarts(unit: &Unit<'_>) -> Result<u64> {
    unit.state()?.of("NRestarts").parse().context("NRestarts")
}

/// Neither a reload nor a package replaces a server whose configuration is broken.
fn broken(container: &Container, package: &Package, load: &Load) -> Result<String> {
    let unit = Unit::new(container);
    let main = unit.main()?;
    fs::write(container.path(CONFIGURATION), configuration() + "broken = [\n")?;
    let reload = container.run(["systemctl", "reload", "mica"])?;
    ensure!(reload.code != 0, "the reload succeeds");
    load.gets_further()?;
    unit.runs_still(main)?;
    let log = unit.log()?;
    let why = log.lines().rev().find(|line| line.contains(CONFIGURATION));
    let why = why.with_context(|| format!("its log does not say why: {log}"))?.to_owned();
    let said = package.install(container)?;
    ensure!(said.contains("mica: the server of before continues"), "dpkg: {said}");
    load.gets_further()?;
    unit.runs_still(main)?;
    fs::write(container.path(CONFIGURATION), configuration())?;
    replace(&unit, load, || container.ok(["systemctl", "reload", "mica"]))?;
    Ok(why)
}

/// It is stopped by systemd after a write that nobody flushed.
fn stopped(container: &Container) -> Result<String> {
    container.shell(&format!("{} -c '{UNFLUSHED}'", qemu_io("other")))?;
    let since = clock::now();
    container.ok(["systemctl", "stop", "mica"])?;
    let took = since.elapsed();
    Unit::new(container).has_stopped()?;
    let left = container.shell("find /run/mica /dev/shm -mindepth 1 2>/dev/null || true")?;
    ensure!(!left.contains(".nbd") && !left.contains(".sock"), "sockets are left: {left}");
    for image in [IMAGE, OTHER] {
        container.ok(["qemu-img", "check", image])?;
    }
    let reads = "-c 'read -P 7 0 1M' -c 'read -P 9 1M 1M'";
    let said = container.shell(&format!("qemu-io -r -f qcow2 {OTHER} {reads} 2>&1"))?;
    ensure!(!said.contains("failed"), "{OTHER}: {said}");
    Ok(format!("{:.1} s", took.as_secs_f64()))
}

//! mica is stopped and restarted under a guest that writes. The guest only waits: it sees no error,
//! and everything acknowledged to it is there.

use super::host::{self, MIB, Verdict};
use mica_gen::Rng;
use mica_tests::machine::{self, Disk, Machine, Work};
use mica_tests::server::Server;
use mica_tests::{clock, qemu, tools};
use std::fs;
use std::path::Path;
use std::time::Duration;

const RESTARTS_DEFAULT: u64 = 4;
const SLOTS: usize = 16;
const IMAGE: &str = "disk";
const DISK_SIZE: &str = "48M";

/// Two writers at a time, each with requests of 4 KiB to half of a slot of 2 MiB. Nothing is
/// flushed until the end: what was acknowledged has to outlive the server all the same. Slots are
/// reused in turn, so that old content is overwritten.
const SCRIPT: &str = r#"
D=/dev/vda
(read line; touch /tmp/stop) < /dev/console &

now() {
    read now rest < /proc/uptime
    now=${now%.*}${now#*.}
}

# Says whenever no read came back for 100 ms, and how long none did.
probe() {
    now
    while [ ! -f /tmp/stop ]; do
        before=$now
        dd if=$D of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null
        now
        if [ $((now - before)) -ge 10 ]; then echo "STALL $((now - before))0"; fi
        usleep 10000
    done
}
probe &

put() {
    dd if=/tmp/data-$1 of=$D bs=4k seek=$(($1 * 256)) oflag=direct 2>/dev/null
}
same() {
    dd if=$D bs=64k skip=$(($1 * 16)) count=16 iflag=direct 2>/dev/null | cmp - /tmp/data-$1
}

round=0
while [ ! -f /tmp/stop ]; do
    one=$((round % 16 * 2))
    other=$((one + 1))
    dd if=/dev/urandom of=/tmp/data-$one bs=64k count=16 2>/dev/null
    dd if=/dev/urandom of=/tmp/data-$other bs=64k count=16 2>/dev/null
    put $one &
    writer=$!
    put $other
    wait $writer
    same $one
    same $other
    round=$((round + 1))
    echo "ROUND $round"
done
for file in /tmp/data-*; do
    same ${file#/tmp/data-}
    echo "HALF ${file#/tmp/data-} $(sha256sum < $file)"
done
"#;

/// How mica is ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// SIGKILL.
    Killed,
    /// SIGTERM.
    Asked,
    /// Another process takes over.
    TakenOver,
}

/// Rounds that the guest has written.
fn rounds(console: &str) -> u64 {
    let said = console.lines().filter_map(|line| line.strip_prefix("ROUND "));
    said.filter_map(|number| number.parse().ok()).max().unwrap_or(0)
}

/// Ends `server` and, some time later, starts another on the same image and socket.
fn restart(server: Server, dir: &Path, format: &str, end: End, away: Duration) -> Server {
    match end {
        End::Killed => drop(server),
        End::Asked => host::stop(server),
        End::TakenOver => {
            let control = control(dir);
            let new = host::serve(dir, IMAGE, format, &["--control", &control, "--takeover"]);
            // It ends by itself. Its NBD socket, if the new one does not serve it, is removed
            // later.
            let stopped = server.stop().expect("it ends");
            assert!(stopped.status.success(), "{stopped:?}");
            return new;
        }
    }
    clock::sleep(away);
    // It waits for what the kernel still holds for a dead process.
    host::try_serve(dir, IMAGE, format, &[])
        .unwrap_or_else(|refusal| panic!("mica does not come back: {refusal:?}"))
}

fn control(dir: &Path) -> String {
    dir.join("control").display().to_string()
}

#[track_caller]
fn a_guest_only_waits(format: &str, end: End) {
    if !machine::present(&[tools::QEMU_IMG]) {
        return;
    }
    let restarts = std::env::var("MICA_GUEST_KILLS").ok().map(|text| text.parse().expect("one"));
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::img(dir, ["create", "-q", "-f", format, IMAGE, DISK_SIZE]).ok();
    let mut server = host::serve(dir, IMAGE, format, &["--control", &control(dir)]);
    let socket = host::vhost_socket(dir);
    let work = Work { script: SCRIPT, ..Work::default() };
    let mut machine = Machine::boot(Disk::VhostUser(&socket), &work).expect("a machine");
    let mut rng = Rng::new(4);
    let mut waits = Vec::new();
    for _ in 0..restarts.unwrap_or(RESTARTS_DEFAULT) {
        let before = rounds(&machine.console());
        machine.wait_for(|console| (rounds(console) > before).then_some(()));
        clock::sleep(Duration::from_millis(rng.below(500)));
        let start = clock::now();
        server = restart(server, dir, format, end, Duration::from_millis(rng.below(400)));
        waits.push(start.elapsed().as_millis());
    }
    let before = rounds(&machine.console());
    machine.wait_for(|console| (rounds(console) > before + 1).then_some(()));
    machine.tell("stop").expect("it runs");
    let console = machine.finish();
    host::stop(server);
    let stalls = console.lines().filter_map(|line| line.strip_prefix("STALL ")?.parse().ok());
    let longest: u64 = stalls.max().unwrap_or(0);
    println!(
        "{format}, {end:?}: mica was away for {waits:?} ms; the guest for {longest} ms at most"
    );
    let worst = if end == End::Killed { Verdict::Leaks } else { Verdict::Clean };
    judge(dir, &host::content(dir, IMAGE, format, worst), &console);
}

/// Compares the disk with the checksums of what the guest wrote last.
#[track_caller]
fn judge(dir: &Path, disk: &[u8], console: &str) {
    let halves: Vec<_> =
        console.lines().filter_map(|line| line.strip_prefix("HALF ")?.split_once(' ')).collect();
    let written = usize::try_from(rounds(console)).expect("few").min(SLOTS) * 2;
    assert_eq!(halves.len(), written, "{console}");
    for (number, said) in halves {
        let at = number.parse::<usize>().expect("a number") * MIB;
        fs::write(dir.join("half"), &disk[at..at + MIB]).expect("written");
        let sum = host::sha256(dir, "half");
        assert!(said.starts_with(&sum), "half {number} is {sum}, and was written as {said}");
    }
}

#[test]
fn a_raw_disk_outlives_kills_of_its_server() {
    a_guest_only_waits("raw", End::Killed);
}

#[test]
fn a_raw_disk_outlives_restarts_of_its_server() {
    a_guest_only_waits("raw", End::Asked);
}

#[test]
fn a_qcow2_disk_outlives_restarts_of_its_server() {
    a_guest_only_waits("qcow2", End::Asked);
}

#[test]
fn a_qcow2_disk_goes_from_one_server_to_the_next() {
    a_guest_only_waits("qcow2", End::TakenOver);
}

#[test]
fn a_qcow2_disk_outlives_kills_of_its_server() {
    a_guest_only_waits("qcow2", End::Killed);
}

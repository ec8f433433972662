//! Others at an image that is served: they may look if they insist on it (`-U`), and nobody may
//! serve or change it. What clients read shows whether they did; and while nobody asks for anything
//! no byte of the chain changes.

use super::chain::Chain;
use super::foreign;
use super::layers::files;
use super::served::Served;
use super::story::{Fault, Outcome, Wrong};
use crate::command::{self, Finished};
use crate::guest::Guest;
use crate::nbd::{Connection, Wish};
use mica_units::Rng;
use std::fs;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Who looks: a program and its arguments, where `@` is the image.
struct Look {
    by_qemu: bool,
    args: &'static [&'static str],
    /// It must be refused; otherwise it may find anything, since what it reads changes.
    is_refused: bool,
}

const fn look(by_qemu: bool, args: &'static [&'static str]) -> Look {
    Look { by_qemu, args, is_refused: false }
}

const fn refused(by_qemu: bool, args: &'static [&'static str]) -> Look {
    Look { by_qemu, args, is_refused: true }
}

const LOOKS: [Look; 22] = [
    look(true, &["info", "-U", "-f", "qcow2", "--backing-chain", "@"]),
    look(true, &["check", "-U", "-q", "-f", "qcow2", "@"]),
    look(true, &["compare", "-U", "-q", "-f", "qcow2", "-F", "qcow2", "@", "@"]),
    look(true, &["map", "-U", "-f", "qcow2", "@"]),
    look(true, &["snapshot", "-U", "-l", "@"]),
    look(false, &["info", "-U", "-f", "qcow2", "@"]),
    look(false, &["check", "-U", "-f", "qcow2", "@"]),
    look(false, &["map", "-U", "-f", "qcow2", "@"]),
    look(false, &["compare", "-U", "-f", "qcow2", "-F", "qcow2", "@", "@"]),
    refused(true, &["info", "-f", "qcow2", "@"]),
    refused(true, &["check", "-f", "qcow2", "@"]),
    refused(true, &["check", "-f", "qcow2", "-r", "all", "@"]),
    refused(true, &["resize", "-f", "qcow2", "@", "+1M"]),
    refused(true, &["commit", "-f", "qcow2", "@"]),
    refused(true, &["snapshot", "-c", "looked", "@"]),
    refused(true, &["rebase", "-u", "-f", "qcow2", "-b", "", "@"]),
    refused(false, &["info", "-f", "qcow2", "@"]),
    refused(false, &["check", "-f", "qcow2", "@"]),
    refused(false, &["check", "-f", "qcow2", "-r", "all", "@"]),
    refused(false, &["resize", "-f", "qcow2", "@", "+1M"]),
    refused(false, &["serve", "--nbd", "other-socket", "--control", "other-control", "@"]),
    refused(false, &["serve", "--read-only", "--nbd", "other-socket", "@"]),
];

/// Some of them while clients work.
pub(super) fn while_busy(chain: &Chain<'_>, rng: &mut Rng) -> Outcome {
    for _ in 0..1 + rng.below(3) {
        take(chain, rng)?;
    }
    Ok(())
}

/// Some of them while nobody asks for anything: nothing changes.
pub(super) fn while_idle(chain: &Chain<'_>, rng: &mut Rng, served: &Served) -> Outcome {
    let mut guest = Guest::on(Connection::open(&served.socket, "", &Wish::default())?);
    // What is not written yet might be, meanwhile.
    let errno = guest.flush()?;
    guest.disconnect()?;
    chain.tell(format_args!("  others look at what is flushed ({errno})"));
    let before = bytes(chain)?;
    while_busy(chain, rng)?;
    let after = bytes(chain)?;
    for ((name, before), (_, after)) in before.iter().zip(&after) {
        let is_same = before.len() == after.len();
        let at = before.iter().zip(after).position(|(one, other)| one != other);
        if at.is_some() || !is_same {
            let what = format!("{name} is changed by a look: at {at:?}, same length: {is_same}");
            return Err(Fault::new(Wrong::Looked, what));
        }
    }
    Ok(())
}

fn bytes(chain: &Chain<'_>) -> Outcome<Vec<(String, Vec<u8>)>> {
    let read = |name: String| Ok(fs::read(chain.path(&name)).map(|bytes| (name, bytes))?);
    files(&chain.state.layers).into_iter().map(read).collect()
}

fn take(chain: &Chain<'_>, rng: &mut Rng) -> Outcome {
    let at = usize::try_from(rng.below(LOOKS.len() as u64)).expect("few");
    let Look { by_qemu, args, is_refused } = LOOKS[at];
    let world = &chain.world;
    world.counts.peeks.add();
    let name = chain.active().name.clone();
    let args = args.iter().map(|arg| if *arg == "@" { name.as_str() } else { arg });
    let mut command = match by_qemu {
        true => Command::new("qemu-img"),
        false => Command::new(world.binary),
    };
    command.current_dir(&world.images).args(args);
    if !by_qemu {
        command.args(world.image_args());
    }
    let said = command::finish_within(&mut command, LIMIT);
    chain.tell(format_args!("  {}: {:?}", said.command, said.code()));
    judge(&said, by_qemu, is_refused)
}

fn judge(said: &Finished, by_qemu: bool, is_refused: bool) -> Outcome {
    // QEMU need not cope with tables that change while it reads them.
    if !by_qemu && (said.code().is_none() || said.stderr.contains("panicked")) {
        return Err(Fault::new(Wrong::Panicked, said.to_string()));
    }
    if is_refused && (said.status.success() || !foreign::is_held(&said.stderr)) {
        return Err(Fault::new(Wrong::Looked, format!("not refused: {said}")));
    }
    Ok(())
}

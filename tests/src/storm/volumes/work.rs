//! Clients of a server at work, and what happens to it meanwhile.

use super::disk::{Disk, Known};
use super::guest::{self, CLIENTS, End, Stage};
use super::host::{Server, command};
use super::{Fleet, VOLUMES_MAX};
use super::{look, taking};
use crate::clock;
use crate::storm::kinds::Kind;
use crate::storm::model::View;
use crate::storm::place::{Filler, Ground, mount_of};
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use crate::storm::world::text;
use mica_units::Rng;
use rustix::process::Signal;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// How many things happen to a server.
const EVENTS: [u64; 5] = [0, 1, 2, 3, 5];
/// How long clients may go on that have lost their disk to another host.
const FENCED_LIMIT: Duration = Duration::from_secs(30);

/// What a life is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Course {
    Random,
    /// This volume is served, and closed, so that it can be judged.
    Quiet(usize),
}

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Finale {
    Kill,
    Stop,
    /// Another host takes this one of its disks; it is stopped or not meanwhile.
    Taken {
        plan: usize,
        is_stopped: bool,
    },
}

type Clients<'scope> = Vec<(usize, ScopedJoinHandle<'scope, Outcome<End>>)>;

/// Clients work, and things happen. Returns the server, unless it was killed, and the one on
/// another host that took one of its disks, with what that showed first.
pub(super) fn work(
    fleet: &Fleet<'_>,
    rng: &mut Rng,
    server: Server,
    end: Finale,
    course: Course,
) -> Outcome<(Option<Server>, Option<taking::Taken>)> {
    let stage = Stage {
        is_over: AtomicBool::new(false),
        may_fail: AtomicBool::new(false),
        counts: fleet.world.counts,
        last: &fleet.last,
        stamp: fleet.stamp(),
    };
    let seed = rng.next_u64();
    std::thread::scope(|scope| {
        let mut clients: Clients<'_> = Vec::new();
        for (at, plan) in server.plans.iter().enumerate() {
            for number in 0..CLIENTS {
                let (socket, disk) = (server.socket(&fleet.site(), plan), plan.disk.clone());
                let (stage, seed) = (&stage, seed ^ (at as u64) << 32);
                let work = move || guest::work(stage, &disk, &socket, (number, seed));
                clients.push((at, scope.spawn(work)));
            }
        }
        let mut server = server;
        let happened = events(fleet, rng, &mut server, (&stage, course, end), &clients);
        let ended = happened.and_then(|taken| match end {
            Finale::Kill => {
                fleet.world.counts.kills.add();
                server.kill().map(|()| (None, None))
            }
            _ => Ok((Some(server), taken)),
        });
        stage.is_over.store(true, Ordering::Relaxed);
        let mut fault = None;
        for (at, client) in clients {
            match client.join() {
                Ok(Ok(End::Gone)) if end != Finale::Kill && ended.is_ok() => {
                    let is_taken = matches!(end, Finale::Taken { plan, .. } if plan == at);
                    if !is_taken {
                        fault = Some(Fault::new(Wrong::Died, "a client has lost its server"));
                    }
                }
                Ok(Ok(_)) => {}
                Ok(Err(wrong)) => fault = Some(wrong),
                Err(_) => fault = Some(Fault::new(Wrong::Trouble, "a client panicked")),
            }
        }
        // What a client found is most informative.
        match (fault, ended) {
            (Some(fault), Ok((Some(server), _))) => {
                fleet.tell(format_args!("    {}", server.said()));
                Err(fault)
            }
            (Some(fault), _) => Err(fault),
            (None, ended) => ended,
        }
    })
}

fn events(
    fleet: &Fleet<'_>,
    rng: &mut Rng,
    server: &mut Server,
    (stage, course, end): (&Stage<'_>, Course, Finale),
    clients: &Clients<'_>,
) -> Outcome<Option<taking::Taken>> {
    let pause = |rng: &mut Rng| clock::sleep(Duration::from_micros(rng.below(120_000)));
    pause(rng);
    if course != Course::Random {
        return Ok(None);
    }
    for _ in 0..rng.choose(&EVENTS) {
        fleet.relieve()?;
        let at = usize::try_from(rng.below(server.plans.len() as u64)).unwrap_or(0);
        let disk = server.plans[at].disk.clone();
        match rng.below(10) {
            0..3 => snapshot(fleet, server, &disk, rng)?,
            3 => drop_snapshot(fleet, server, &disk, rng)?,
            4 if fleet.does(rng, Kind::Collect, 100) => collect(fleet, rng)?,
            5 => pause_server(rng, server),
            6 => look::while_served(fleet, rng, &disk)?,
            7 if fleet.does(rng, Kind::Space, 60) => fill(fleet, rng, stage)?,
            8 => fleet.check_all()?,
            9 if fleet.does(rng, Kind::LiveClone, 100) => clone(fleet, server, &disk, rng)?,
            _ => {}
        }
        pause(rng);
        server.check()?;
    }
    match end {
        Finale::Taken { plan, is_stopped } => {
            taking::take(fleet, rng, server, (plan, is_stopped), stage).and_then(|taken| {
                wait_until_fenced(server, plan, clients)?;
                Ok(Some(taken))
            })
        }
        _ => Ok(None),
    }
}

/// The clients of a disk that another host has learn that.
fn wait_until_fenced(server: &Server, plan: usize, clients: &Clients<'_>) -> Outcome {
    let learn = || {
        let mut own = clients.iter().filter(|(at, _)| *at == plan);
        own.all(|(_, client)| client.is_finished()).then_some(())
    };
    match clock::poll(FENCED_LIMIT, Duration::from_millis(10), learn) {
        Some(()) => Ok(()),
        None => {
            let what = format!("clients of a fenced writer still write: {}", server.said());
            Err(Fault::new(Wrong::Silent, what))
        }
    }
}

/// `mica ctl`, which has to succeed; what it printed.
pub(super) fn ctl(fleet: &Fleet<'_>, server: &Server, words: &[&str]) -> Outcome<String> {
    let said = ctl_to_end(fleet, server, words)?;
    match said.status.success() {
        true => Ok(said.stdout),
        false => Err(Fault::new(Wrong::Failed, said.to_string())),
    }
}

fn ctl_to_end(
    fleet: &Fleet<'_>,
    server: &Server,
    words: &[&str],
) -> Outcome<crate::command::Finished> {
    fleet.tell(format_args!("  ctl {words:?}"));
    let mut ctl = command(fleet.world.binary, &fleet.store, false);
    ctl.args(["ctl", "--control", text(&server.control)?]).args(words);
    fleet.run(ctl, None)?.ok_or_else(|| trouble("it was not killed"))
}

/// A snapshot while clients write.
fn snapshot(fleet: &Fleet<'_>, server: &Server, disk: &Disk, rng: &mut Rng) -> Outcome {
    let label = format!("s{}", rng.next_u64() % 1_000_000);
    if disk.known().snapshot(&label).is_some() {
        return Ok(());
    }
    let (moment, mark) = {
        let known = disk.known();
        (known.moment(), known.model.mark())
    };
    ctl(fleet, server, &["snapshot", &disk.name, &label])?;
    let mut known = disk.known();
    known.took(&label, &moment, true);
    // It is as durable as after a flush.
    known.flushed(mark);
    fleet.world.counts.volume_snapshots.add();
    Ok(())
}

fn drop_snapshot(fleet: &Fleet<'_>, server: &Server, disk: &Disk, rng: &mut Rng) -> Outcome {
    let Some(label) = look::any_label(disk, rng) else { return Ok(()) };
    ctl(fleet, server, &["drop", &disk.name, &label])?;
    disk.known().dropped(&label, true);
    Ok(())
}

/// A clone while clients write, of the volume as it is or of a snapshot. It is served later.
fn clone(fleet: &Fleet<'_>, server: &Server, disk: &Disk, rng: &mut Rng) -> Outcome {
    let mut clones = fleet.clones.lock();
    if fleet.entries.len() + clones.len() >= VOLUMES_MAX {
        return Ok(());
    }
    let name = format!("live-{}", rng.next_u64() % 100_000_000);
    let label = look::any_label(disk, rng).filter(|_| rng.percent(50));
    let source = label.map_or_else(|| disk.name.clone(), |label| format!("{}@{label}", disk.name));
    let wanted = match source.split_once('@') {
        Some((_, label)) => match look::content(fleet, disk, label)? {
            Some(content) => Some(content),
            None => return Ok(()),
        },
        None => None,
    };
    let moment = disk.known().moment();
    ctl(fleet, server, &["clone", &source, &name])?;
    let url = fleet.url(&name)?;
    let bytes = look::exported_to(fleet, &url, "clone.raw")?;
    let bytes = bytes.map_err(|said| Fault::new(Wrong::Failed, said))?;
    let known = disk.known();
    let seen = known.seen(&bytes, &url)?;
    match wanted {
        Some(wanted) if wanted != seen => {
            let what = format!("{url} is not what {source} has");
            return Err(Fault::new(Wrong::Snapshot, what));
        }
        Some(_) => {}
        None => {
            let allowed = known.allowed_since(&moment, View::Kept);
            known.judge_reading(&bytes, &allowed, &url)?;
        }
    }
    clones.push((name, Known::with_content(fleet.stamp(), &seen)));
    fleet.world.counts.live_clones.add();
    Ok(())
}

/// One or two collections at once.
fn collect(fleet: &Fleet<'_>, rng: &mut Rng) -> Outcome {
    let url = fleet.store_url()?;
    let fates = [fleet.fate(rng), fleet.fate(rng)];
    let count = usize::try_from(1 + rng.below(2)).unwrap_or(1);
    std::thread::scope(|scope| {
        let url = &*url;
        let runs: Vec<_> = fates
            .into_iter()
            .take(count)
            .map(|fate| scope.spawn(move || fleet.verb(&["gc", "-q", url], fate)))
            .collect();
        for run in runs {
            let said =
                run.join().map_err(|_| Fault::new(Wrong::Trouble, "a thread panicked"))??;
            if let Some(said) = said.filter(|said| !said.status.success()) {
                return Err(Fault::new(Wrong::Failed, said.to_string()));
            }
            fleet.world.counts.collections.add();
        }
        Ok(())
    })
}

fn pause_server(rng: &mut Rng, server: &Server) {
    server.signal(Signal::STOP);
    clock::sleep(Duration::from_micros(rng.below(200_000)));
    server.signal(Signal::CONT);
}

/// The store's file system is full for a while.
fn fill(fleet: &Fleet<'_>, rng: &mut Rng, stage: &Stage<'_>) -> Outcome {
    if fleet.world.ground == Ground::Folder {
        return Ok(());
    }
    fleet.tell("  full");
    stage.may_fail.store(true, Ordering::Relaxed);
    fleet.world.counts.full.add();
    let mount: &Path = mount_of(&fleet.world.images);
    let filler = Filler::new(mount, rng.below(1 << 20))?;
    clock::sleep(Duration::from_millis(200 + rng.below(800)));
    drop(filler);
    Ok(())
}

//! A verb runs to its end, or is killed on its way.

use super::deed::Deed;
use crate::clock;
use crate::command;
use crate::storm::ailments::slowness;
use crate::storm::chain::Chain;
use crate::storm::cue::Moment;
use crate::storm::foreign;
use crate::storm::story::{Fault, Outcome, Wrong};
use mica_units::Rng;
use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long a verb may take.
const LIMIT: Duration = Duration::from_secs(60);
/// What it says.
const SAID: &str = "verb.log";

/// How a verb ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Done,
    /// It said why, as it may.
    Refused,
    Killed,
}

/// Runs the verb of `deed`, which may be killed.
pub(super) fn run(
    chain: &Chain<'_>,
    rng: &mut Rng,
    deed: &Deed,
    is_killed: bool,
) -> Outcome<Ending> {
    let world = &chain.world;
    // Others may have a killed one's locks for a moment.
    loop {
        let slow = is_killed && rng.percent(50);
        let inject = if slow && deed.takes_faults { Some(slowness(rng)) } else { None };
        let log = world.run.join(SAID);
        let mut verb = Command::new(world.binary);
        verb.current_dir(&world.images).args(&deed.args).stdin(Stdio::null());
        if deed.takes_faults {
            verb.args(world.image_args());
        }
        verb.args(inject.iter().flat_map(|fault| ["--inject", fault]));
        chain.tell(format_args!("  {:?} {inject:?}", deed.args));
        let verb = verb.stdout(Stdio::null()).stderr(File::create(&log)?).spawn()?;
        let code = end(chain, rng, verb, is_killed)?;
        let said = fs::read_to_string(&log)?;
        if !said.is_empty() {
            chain.tell(format_args!("    {}", said.trim()));
        }
        if said.contains("panicked") {
            return Err(Fault::new(Wrong::Panicked, said));
        }
        return match code {
            None => Ok(Ending::Killed),
            Some(0) => Ok(Ending::Done),
            Some(_) if foreign::is_held(&said) => continue,
            Some(_) => refusal(deed, &said),
        };
    }
}

/// A refusal says why in one line, and for a reason that is known.
fn refusal(deed: &Deed, said: &str) -> Outcome<Ending> {
    let errors = said.lines().filter(|line| line.starts_with("mica: ")).count();
    if errors != 1 {
        let what = format!("{:?} is refused in {errors} lines: {said}", deed.args);
        return Err(Fault::new(Wrong::Failed, what));
    }
    match deed.may_be_refused(said) {
        true => Ok(Ending::Refused),
        false => Err(Fault::new(Wrong::Failed, format!("{:?}: {said}", deed.args))),
    }
}

/// Waits for its end, or kills it; its exit code, if it was not killed.
fn end(chain: &Chain<'_>, rng: &mut Rng, mut verb: Child, is_killed: bool) -> Outcome<Option<i32>> {
    if is_killed {
        wait_for_moment(chain, rng, &mut verb)?;
        // It may have ended.
        let _ = verb.kill();
    }
    let status = command::wait(&mut verb, LIMIT);
    let status = status.ok_or_else(|| Fault::new(Wrong::Hang, "a verb does not end"))?;
    match status.code() {
        None if !is_killed => Err(Fault::new(Wrong::Died, format!("a verb: {status}"))),
        code => Ok(code),
    }
}

fn wait_for_moment(chain: &Chain<'_>, rng: &mut Rng, verb: &mut Child) -> Outcome {
    if rng.percent(40) {
        let moment = Moment::random(rng);
        chain.tell(format_args!("  killed at {moment:?}"));
        let path = chain.path(&chain.active().name);
        return moment.wait_while(&path, || verb.try_wait().is_ok_and(|status| status.is_none()));
    }
    let most = rng.choose(&[4_000, 10_000, 25_000, 100_000]);
    let pause = Duration::from_micros(rng.below(most));
    chain.tell(format_args!("  killed after {pause:?}"));
    clock::sleep(pause);
    Ok(())
}

//! What is done to the layers of a disk while a guest works on it, and the power goes, or the
//! process dies.

use mica_rt::join_all;
use mica_sim::crash::{Crashes, Cut, load_at_random};
use mica_sim::{Guest, Loss, World};
use std::time::Duration;

/// How rounds end.
pub(crate) struct Ends<C> {
    pub(crate) cut: C,
    /// As [`Load::give_up_one_in`](mica_sim::crash::Load::give_up_one_in).
    pub(crate) give_up_one_in: u64,
}

/// Ends of rounds that nothing cuts short.
pub(crate) fn never() -> Ends<impl Fn() -> (Cut, Loss)> {
    Ends { cut: || (Cut::Never, Loss::Nothing), give_up_one_in: 0 }
}

/// Ends by a power cut within the first 200 operations.
pub(crate) fn power(world: &World) -> Ends<impl Fn() -> (Cut, Loss)> {
    let cut = || {
        let loss = [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn];
        let loss = loss[usize::try_from(world.random_below(4)).unwrap()];
        (Cut::After(1 + world.random_below(200)), loss)
    };
    Ends { cut, give_up_one_in: 10 }
}

/// Ends by the death of the process within so many microseconds.
pub(crate) fn death(world: &World, within_us: u64) -> Ends<impl Fn() -> (Cut, Loss)> {
    let cut = move || {
        let after = Duration::from_micros(1 + world.random_below(within_us));
        (Cut::KillAt(after), Loss::Nothing)
    };
    Ends { cut, give_up_one_in: 0 }
}

/// Ends by the one or the other: what a process leaves that died is not durable yet when the power
/// goes under the next one.
pub(crate) fn either(world: &World, within_us: u64) -> Ends<impl Fn() -> (Cut, Loss)> {
    let (power, death) = (power(world).cut, death(world, within_us).cut);
    let cut = move || if world.random_below(2) == 0 { power() } else { death() };
    Ends { cut, give_up_one_in: 0 }
}

/// Three rounds of a guest's work on a disk of so many `sectors`. Beside it `act` is done up to
/// four times in each; it gets a number that no other call gets.
pub(crate) async fn rounds(
    world: &World,
    (crashes, sectors): (&mut Crashes<'_>, u64),
    ends: Ends<impl Fn() -> (Cut, Loss)>,
    act: impl AsyncFn(u64),
) {
    for round in 0..3 {
        let mut load = load_at_random(world, sectors);
        load.give_up_one_in = ends.give_up_one_in;
        let times = 1 + world.random_below(4);
        let (cut, loss) = (ends.cut)();
        let work = async |guest: &Guest| {
            let acts = async {
                for number in 0..times {
                    mica_rt::sleep(Duration::from_micros(world.random_below(3000))).await;
                    act(round * 100 + number).await;
                }
            };
            let both: [mica_block::LocalFuture<'_, ()>; 2] =
                [Box::pin(acts), Box::pin(guest.run(&load))];
            join_all(both).await;
            guest.read_all().await;
        };
        crashes.round(cut, loss, work).await;
    }
}

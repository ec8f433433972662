//! Processor time that a load costs: the server's, and the load generator's own.

use mica_tests::server::Server;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Measures from its start.
pub(super) struct Meter<'a> {
    server: &'a Server,
    server_before: Duration,
    own_before: Duration,
}

/// What a load cost.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Cost {
    /// The server's processor time.
    pub(super) server: Duration,
    /// The load generator's.
    pub(super) load: Duration,
}

impl Cost {
    /// The cost of both.
    pub(super) fn plus(self, other: Self) -> Self {
        Self { server: self.server + other.server, load: self.load + other.load }
    }
}

impl<'a> Meter<'a> {
    /// Starts.
    pub(super) fn start(server: &'a Server) -> Self {
        Self { server, server_before: server.processor_time(), own_before: own_time() }
    }

    /// What was used since.
    pub(super) fn stop(self) -> Cost {
        Cost {
            server: self.server.processor_time().saturating_sub(self.server_before),
            load: own_time().saturating_sub(self.own_before),
        }
    }
}

/// Processor time of this process, threads that have ended included: while a load runs, it does
/// nothing else.
fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

//! A flag for which other threads wait, as of a guest that works until a test is done with it.
//!
//! It is raised whatever happens: a scope waits for its threads before a panic leaves it, and would
//! wait for ever for those that nobody told.

use std::sync::atomic::{AtomicBool, Ordering};

/// Raises a flag when it is dropped, by a panic, too.
#[derive(Debug)]
pub struct RaisedAtEnd<'a>(pub &'a AtomicBool);

impl Drop for RaisedAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn who_waits_is_told_of_a_panic() {
        let is_over = AtomicBool::new(false);
        let scope = || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    }
                });
                let _over = RaisedAtEnd(&is_over);
                panic!("it went wrong");
            })
        };
        assert!(catch_unwind(AssertUnwindSafe(scope)).is_err());
        assert!(is_over.load(Ordering::Relaxed));
    }
}

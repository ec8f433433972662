//! Whether what clients saw of one register is linearizable, durably: across crashes and take-overs
//! of its server.
//!
//! A history is a row of eras; a server, or its loss, ends one. Within an era, operations take
//! effect one after the other, each between its call and its answer (Wing and Gong 1993, with the
//! memory of Lowe 2017); one without an answer may have, at any later time of its era, or not at
//! all. At the end of an era some of the last operations may be lost, none of which is *owed*: the
//! next era begins with what a prefix left that has all that is owed.

use std::collections::{BTreeSet, HashMap};

/// What is in the register; each write has a number of its own.
pub type Value = u64;

/// What a client did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    /// It read this.
    Read(Value),
    /// It wrote this.
    Write(Value),
}

/// An operation of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operation {
    /// What was done.
    pub act: Act,
    /// When it was called.
    pub called: u64,
    /// When it was answered; `None` if it was not, or with an error.
    pub answered: Option<u64>,
    /// Whether it has to outlive its era.
    pub is_owed: bool,
}

/// Operations of an era, at most.
pub const OPERATIONS_MAX: usize = 64;

/// Whether there is an order of the operations of `eras` that explains all answers, if the register
/// has one of `first` at the beginning. What it may have at the end; nothing if there is no order.
///
/// # Panics
/// If an era has more than [`OPERATIONS_MAX`] operations.
pub fn explain(first: &BTreeSet<Value>, eras: &[Vec<Operation>]) -> BTreeSet<Value> {
    eras.iter().fold(first.clone(), |values, era| {
        // A read without an answer says nothing.
        let says = |op: &&Operation| op.answered.is_some() || matches!(op.act, Act::Write(_));
        let operations: Vec<_> = era.iter().filter(says).copied().collect();
        assert!(operations.len() <= OPERATIONS_MAX, "{} operations", operations.len());
        let mut search = Search::new(&operations);
        for value in values {
            search.completes(0, value);
        }
        search.left
    })
}

struct Search<'a> {
    operations: &'a [Operation],
    /// A bit for each operation that was answered; for each that is owed.
    answered: u64,
    owed: u64,
    known: HashMap<(u64, Value), bool>,
    /// What may be left by a crash.
    left: BTreeSet<Value>,
}

impl<'a> Search<'a> {
    fn new(operations: &'a [Operation]) -> Self {
        let bits = |has: &dyn Fn(&Operation) -> bool| {
            let all = operations.iter().enumerate().filter(|(_, operation)| has(operation));
            all.fold(0, |bits, (at, _)| bits | 1 << at)
        };
        let answered = bits(&|operation| operation.answered.is_some());
        let owed = bits(&|operation| operation.is_owed);
        Self { operations, answered, owed, known: HashMap::new(), left: BTreeSet::new() }
    }

    /// Whether all that was answered can be explained from here, where the operations in `done`
    /// took effect and left `value`.
    fn completes(&mut self, done: u64, value: Value) -> bool {
        if let Some(known) = self.known.get(&(done, value)) {
            return *known;
        }
        let mut completes = done & self.answered == self.answered;
        for (at, operation) in self.operations.iter().enumerate() {
            if done & 1 << at != 0 || !self.may_be_next(done, operation) {
                continue;
            }
            let next = match operation.act {
                Act::Read(seen) if seen != value => continue,
                Act::Read(_) => value,
                Act::Write(new) => new,
            };
            completes |= self.completes(done | 1 << at, next);
        }
        self.known.insert((done, value), completes);
        if completes && done & self.owed == self.owed {
            self.left.insert(value);
        }
        completes
    }

    /// Whether nothing that has to come first was answered before this was called.
    fn may_be_next(&self, done: u64, operation: &Operation) -> bool {
        let is_before = |other: &Operation| other.answered.is_some_and(|at| at < operation.called);
        let mut others = self.operations.iter().enumerate();
        !others.any(|(at, other)| done & 1 << at == 0 && is_before(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(act: Act, called: u64, answered: u64) -> Operation {
        let answered = (answered > 0).then_some(answered);
        Operation { act, called, answered, is_owed: false }
    }

    fn write(value: Value, called: u64, answered: u64) -> Operation {
        operation(Act::Write(value), called, answered)
    }

    fn read(value: Value, called: u64, answered: u64) -> Operation {
        operation(Act::Read(value), called, answered)
    }

    fn is_right(eras: &[Vec<Operation>]) -> bool {
        !explain(&BTreeSet::from([0]), eras).is_empty()
    }

    #[test]
    fn concurrent_operations_have_any_order_and_others_have_theirs() {
        assert!(is_right(&[vec![write(1, 1, 4), read(0, 2, 3)]]));
        assert!(is_right(&[vec![write(1, 1, 4), read(1, 2, 3)]]));
        assert!(!is_right(&[vec![write(1, 1, 2), read(0, 3, 4)]]));
        let two = [write(1, 1, 5), write(2, 1, 5)];
        assert!(is_right(&[[&two[..], &[read(2, 2, 3), read(1, 4, 6)]].concat()]));
        assert!(!is_right(&[[&two[..], &[read(1, 6, 7), read(2, 8, 9)]].concat()]));
    }

    #[test]
    fn operation_without_an_answer_happens_at_any_later_time_or_never() {
        let lost = write(1, 1, 0);
        assert!(is_right(&[vec![lost, read(0, 2, 3), read(1, 4, 5)]]));
        assert!(is_right(&[vec![lost, read(0, 2, 3)], vec![read(1, 9, 10)]]));
        assert!(!is_right(&[vec![lost, read(1, 2, 3), read(0, 4, 5)]]));
        assert!(is_right(&[vec![lost], vec![read(0, 4, 5)]]));
        assert!(!is_right(&[vec![lost], vec![read(0, 4, 5), read(1, 6, 7)]]));
    }

    #[test]
    fn crash_loses_a_suffix_and_nothing_that_is_owed() {
        let owed = Operation { is_owed: true, ..write(1, 1, 2) };
        let later = write(2, 3, 4);
        assert!(is_right(&[vec![owed, later], vec![read(1, 9, 10)]]));
        assert!(is_right(&[vec![owed, later], vec![read(2, 9, 10)]]));
        assert!(!is_right(&[vec![owed, later], vec![read(0, 9, 10)]]));
        let both = [owed, Operation { is_owed: true, ..later }];
        assert!(!is_right(&[both.to_vec(), vec![read(1, 9, 10)]]));
    }
}

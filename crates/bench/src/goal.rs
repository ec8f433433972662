//! A goal and its bound.

use serde::Serialize;

/// A goal and how far it is met.
#[derive(Debug, Serialize)]
pub(super) struct Goal {
    /// The goal, in words.
    pub(super) what: String,
    /// The required figure, in words.
    pub(super) wanted: String,
    /// What was measured; `None` if it was not.
    pub(super) measured: Option<f64>,
    /// Whether it is met.
    pub(super) reached: Option<bool>,
    /// Why there is no figure.
    pub(super) note: Option<String>,
}

/// A bound for a figure.
#[derive(Clone, Copy)]
pub(super) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    /// Judges what was `measured`, in `unit`.
    pub(super) fn new(what: &str, bound: Bound, unit: &str, measured: Option<f64>) -> Self {
        let (sign, limit) = match bound {
            Bound::AtLeast(limit) => ("≥", limit),
            Bound::AtMost(limit) => ("≤", limit),
        };
        let reached = measured.map(|measured| match bound {
            Bound::AtLeast(limit) => measured >= limit,
            Bound::AtMost(limit) => measured <= limit,
        });
        let wanted = format!("{sign} {limit}{unit}");
        Self { what: what.to_owned(), wanted, measured, reached, note: None }
    }
}

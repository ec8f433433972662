//! A goal and its bound.

use serde::Serialize;

/// A server's rate by its peer's, at least, in every cell of a table.
pub(super) const RATE_MIN: f64 = 1.2;
/// Its processor time of a request by the peer's, at most.
pub(super) const CPU_MAX: f64 = 0.9;
/// Its 99th percentile by the peer's, at most.
pub(super) const P99_MAX: f64 = 1.0;

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

    /// Judges all cells of a table, each a name and what was measured, by the worst, which it
    /// names; `None` if there is no cell.
    pub(super) fn worst(
        what: &str,
        bound: Bound,
        cells: impl Iterator<Item = (String, f64)>,
    ) -> Option<Self> {
        let worse = |one: f64, other: f64| match bound {
            Bound::AtLeast(_) => one.total_cmp(&other),
            Bound::AtMost(_) => other.total_cmp(&one),
        };
        let (cell, value) = cells.min_by(|one, other| worse(one.1, other.1))?;
        Some(Self::new(&format!("{what}, worst: {cell}"), bound, "", Some(value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_as_good_as_its_worst_cell() {
        let cells = || [("a", 0.5), ("b", 2.0), ("c", 1.0)].map(|(name, of)| (name.to_owned(), of));
        let least = Goal::worst("rate", Bound::AtLeast(1.2), cells().into_iter()).expect("cells");
        assert_eq!((least.what.as_str(), least.measured), ("rate, worst: a", Some(0.5)));
        assert_eq!(least.reached, Some(false));
        let most = Goal::worst("CPU", Bound::AtMost(2.0), cells().into_iter()).expect("cells");
        assert_eq!((most.what.as_str(), most.reached), ("CPU, worst: b", Some(true)));
        assert!(Goal::worst("p99", Bound::AtMost(1.0), std::iter::empty()).is_none());
    }
}

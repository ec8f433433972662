//! What a store says and does when something fails.

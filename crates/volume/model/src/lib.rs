#![doc = include_str!("../README.md")]

#[cfg(test)]
mod collect;
#[cfg(test)]
mod model;
#[cfg(test)]
mod open;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod rules;
#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod store;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
#[cfg(test)]
mod write;

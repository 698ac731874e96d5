//! Scenarios on a real cluster with simulated GPUs: `make e2e`, or, with a cluster up
//! (`make up install`), `cargo test -p highwater-scenarios`.
//!
//! A test whose name begins with a row of the acceptance table (`b16_...`) is that row.

// A JSON value indexed by a name that it lacks is null; it does not panic.
#![allow(clippy::indexing_slicing)]

mod accounting;
mod actions;
mod admission;
mod drain;
mod endings;
mod faults;
mod flaps;
mod fleet;
mod freeze;
mod guard;
mod keeper;
mod kills;
mod leaks;
mod modes;
mod observability;
mod pool;
mod steady;
mod story;
mod trouble;
mod waits;

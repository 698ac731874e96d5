//! The guard as programs meet it: loaded before a program of the driver, against the simulated
//! driver, with an agent that is played here.
//!
//! Every test has a host of its own. The programs are `examples/probe.rs`, told what to call line by
//! line; a line of answers begins with the driver's code.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "tests"
)]

mod agent;
mod host;

mod crowds;
mod families;
mod faults;
mod information;
mod links;
mod lookups;
mod releases;
mod sharing;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What a context takes of the simulated device, and of the quotas here.
const CONTEXT: u64 = 518 * MIB;

/// `CUDA_ERROR_OUT_OF_MEMORY`
const REFUSED: &str = "2";

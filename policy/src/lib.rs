//! Every decision of Highwater, as functions of values and a given `now`.
//!
//! Nothing here sleeps, logs, reads a clock or calls anything: what the agent and the operator
//! do is decided here and can be replayed from values alone.

pub mod acts;
pub mod breaker;
pub mod budget;
pub mod drain;
pub mod episode;
pub mod host_memory;
pub mod host_status;
pub mod leak;
pub mod leak_acts;
pub mod leak_episode;
pub mod leak_tickets;
pub mod ledger;
pub mod node_labels;
pub mod node_status;
pub mod park;
pub mod pod;
pub mod policy_status;
pub mod pool;
pub mod quota;
pub mod redirect;
pub mod remediation;
pub mod resolve;
pub mod rise;
pub mod taint;
pub mod time;
pub mod victim;

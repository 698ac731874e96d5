//! What the guard in a pod and the agent on its node share: two pages of memory, the rules by
//! which they are written, and the messages on their socket.
//!
//! - [`page`]: the quota page, which the pod can only read, and the usage page, which both sides
//!   write. Both are sealed memory files, so their size never changes under a mapping.
//! - [`charge`]: how many processes charge one quota without a lock, so that a process which is
//!   stopped or killed anywhere delays nobody and loses nothing.
//! - [`wire`]: the frames of the socket.
//!
//! The guard lives inside of programs that it does not know, so this crate needs no standard
//! library and allocates nothing. The feature `std` adds what only the agent needs.
//!
//! Everything that the other side can write is untrusted: it is read by single atomic loads,
//! clamped, and never used as an index unchecked.

#![cfg_attr(not(any(test, feature = "std")), no_std)]

#[cfg(not(all(
    target_os = "linux",
    target_endian = "little",
    target_pointer_width = "64",
    target_has_atomic = "64"
)))]
compile_error!("the pages are laid out for 64-bit little-endian Linux only");

// The workspace has it under two names, with and without the standard library.
extern crate rustix_bare as rustix;

pub mod charge;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod page;
#[cfg(any(test, feature = "std"))]
mod reap;
#[cfg(any(test, feature = "fuzz"))]
mod sim;
pub mod wire;

#[cfg(test)]
mod model;

/// Version of the pages and messages that this crate writes.
pub const ABI: u32 = 1;

/// Oldest version that this crate still speaks: the one before [`ABI`], once there is one.
///
/// A pod keeps the version that it started with for its whole life, while the agent beside it is
/// upgraded; a guard that stays mounted may also be older than the agent that it meets.
pub const ABI_OLDEST: u32 = if ABI > 1 { ABI - 1 } else { ABI };

/// Devices that a page has room for.
pub const MAX_DEVICES: usize = 16;

/// Slots in a usage page; slot 0 is the agent's own, so one fewer processes can be guarded.
pub const MAX_SLOTS: usize = 1024;

/// The slot that the agent charges through.
pub const AGENT_SLOT: usize = 0;

/// The versions that one side speaks, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Versions {
    /// The oldest.
    pub oldest: u32,
    /// The newest.
    pub newest: u32,
}

impl Versions {
    /// What this crate speaks.
    pub const OURS: Self = Self { oldest: ABI_OLDEST, newest: ABI };

    /// The newest version that both sides speak, or `None` where there is none.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u32> {
        let newest = self.newest.min(other.newest);
        (newest != 0 && newest >= self.oldest && newest >= other.oldest).then_some(newest)
    }

    /// Whether `version` is among them.
    #[must_use]
    pub fn contain(self, version: u32) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn speaks(oldest: u32, newest: u32) -> Versions {
        Versions { oldest, newest }
    }

    #[test]
    fn an_older_guard_and_a_newer_agent_meet_at_the_older_version() {
        assert_eq!(speaks(2, 3).common(speaks(1, 2)), Some(2));
        assert_eq!(speaks(1, 2).common(speaks(2, 3)), Some(2));
    }

    #[test]
    fn two_releases_apart_have_nothing_in_common() {
        assert_eq!(speaks(3, 4).common(speaks(1, 2)), None);
        assert_eq!(speaks(1, 2).common(speaks(3, 4)), None);
    }

    #[test]
    fn a_range_that_makes_no_sense_is_met_by_nobody() {
        assert_eq!(speaks(0, 0).common(Versions::OURS), None);
        assert_eq!(speaks(u32::MAX, 0).common(Versions::OURS), None);
        assert_eq!(speaks(0, u32::MAX).common(Versions::OURS), Some(ABI));
    }
}

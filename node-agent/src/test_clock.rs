//! A clock that tests set.

use std::{
    cell::Cell,
    sync::LazyLock,
    time::{Duration, Instant},
};

use jiff::{SignedDuration, Timestamp};

thread_local! {
    /// Milliseconds since the test began.
    pub(crate) static TIME: Cell<u64> = const { Cell::new(0) };
}
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The time that the test of this thread says it is.
pub(crate) fn clock() -> (Instant, Timestamp) {
    let since = Duration::from_millis(TIME.get());
    let wall = Timestamp::from_second(1_800_000_000).unwrap() + SignedDuration::try_from(since).unwrap();
    (*START + since, wall)
}

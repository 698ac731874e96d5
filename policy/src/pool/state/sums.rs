//! Sums over a pool, and what is remembered of failures and of takers.

use highwater_crds::ByteSize;

use crate::{pool::size::Size, time::Millis};

/// Bytes by which what nobody was granted may vary without anybody having taken something.
const NOISE: u64 = 64 * ByteSize::MI;
/// Waiting after a failure.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pause {
    pub(super) until: Option<Millis>,
    pub(super) length: u64,
    /// What was free at the failure.
    pub(super) free: u64,
}

impl Pause {
    pub(super) fn begin(&mut self, first: u64, most: u64, free: u64, now: Millis) {
        self.length = self.length.saturating_mul(2).clamp(first, most);
        self.until = Some(now.plus(self.length));
        self.free = free;
    }

    pub(super) fn holds(&self, now: Millis) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

/// Watches whether anybody takes what was not granted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Takers {
    /// Held by pods without a grant, and by nobody known, when last seen.
    ungranted: u64,
    nameless: u64,
    last: Option<Millis>,
    /// Something was made up for from the ballast, and not taken since.
    made_up: bool,
    /// How often that was taken again,
    again: u32,
    /// and what both of the above were together before it was made up for first.
    before: u64,
}

/// When what was made up for was taken again, the calm must last so many times longer. After a second
/// time nothing is made up for until it returned: whoever waits for each calm would have the whole
/// ballast in the end.
const AGAIN_LONGER: u64 = 8;

impl Takers {
    pub(super) fn see(&mut self, ungranted: u64, nameless: u64, now: Millis) {
        if ungranted.saturating_add(nameless).saturating_add(NOISE) < self.before {
            // It returned.
            (self.made_up, self.again, self.before) = (false, 0, 0);
        }
        let grew = |before: u64, after: u64| after > before.saturating_add(NOISE);
        if grew(self.ungranted, ungranted) || grew(self.nameless, nameless) {
            self.last = Some(now);
            (self.ungranted, self.nameless) = (ungranted, nameless);
        }
        // A slow growth is one too, so what is compared with follows downwards only.
        self.ungranted = self.ungranted.min(ungranted);
        self.nameless = self.nameless.min(nameless);
    }

    /// What was taken is made up for from the ballast.
    pub(super) fn make_up(&mut self) {
        if !self.made_up && self.again == 0 {
            self.before = self.ungranted.saturating_add(self.nameless);
        }
        self.made_up = true;
    }

    /// Something that was granted was taken.
    pub(super) fn take_again(&mut self) {
        if std::mem::take(&mut self.made_up) {
            self.again = self.again.saturating_add(1);
        }
    }

    pub(super) fn calm(&self, calm_ms: u64, now: Millis) -> bool {
        let calm_ms = match self.again {
            0 => calm_ms,
            1 => calm_ms.saturating_mul(AGAIN_LONGER),
            _ => return false,
        };
        self.ungranted <= NOISE && self.last.is_none_or(|last| now.since(last) >= calm_ms)
    }
}

/// Sums over a pool, in bytes. Signed: what was taken by others makes them negative.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    pub(super) size: Size,
    pub(super) entitled: u64,
    pub(super) owed: u64,
    /// Must be free for pods.
    pub(super) unused: u64,
    /// Free for pods.
    pub(super) free: u64,
    /// Free as well, but the keeper was told to hold it back.
    pub(super) moving: u64,
    /// Can be given out.
    pub(super) ballast: u64,
}

impl Sums {
    /// Free or held back, and of no pod yet.
    pub(super) fn physical(&self) -> i128 {
        i128::from(self.ballast) + i128::from(self.moving) + self.loose()
    }

    /// Free and of no pod yet.
    pub(super) fn loose(&self) -> i128 {
        i128::from(self.free) - i128::from(self.unused)
    }

    /// What can be granted above guarantees to a pod that holds so much without a grant.
    pub(super) fn spare(&self, ungranted: u64) -> u64 {
        let room = i128::from(self.size.pool) - i128::from(self.entitled) - i128::from(self.owed);
        positive(room.min(self.physical() - i128::from(self.owed) + i128::from(ungranted)))
    }

    /// What should be held back. For what is owed the pool may be as large as its cap.
    pub(super) fn target(&self) -> u64 {
        let owed = self.owed.min(self.size.cap.saturating_sub(self.entitled));
        self.size.pool.saturating_sub(self.entitled).max(owed)
    }

    /// Above this something held back is too much.
    pub(super) fn most(&self) -> u64 {
        self.size.undisturbed.saturating_sub(self.entitled).max(self.owed)
    }
}

pub(super) fn positive(bytes: i128) -> u64 {
    u64::try_from(bytes.max(0)).unwrap_or(u64::MAX)
}

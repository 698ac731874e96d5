//! The two pages of a guarded pod, as the agent has them.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use highwater_guard_abi::{
    MAX_DEVICES,
    page::{MapError, QuotaPage, QuotaView, UsagePage},
    wire::{NotGrantedReason, RefusedReason},
};

/// The pages of a pod, with the descriptors that its guards are given.
pub(crate) struct Pages {
    /// What it may have.
    pub(crate) quota: QuotaPage,
    /// What it has. The pod writes it as well: whatever is read here is untrusted.
    pub(crate) usage: UsagePage,
    /// What was counted of its guards.
    pub(crate) tally: Tally,
    quota_descriptor: OwnedFd,
    usage_descriptor: OwnedFd,
}

/// Why a guard refused an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It would have gone over the pod's limit.
    OverLimit,
    /// The limit does not even hold a context and 64 MiB.
    QuotaBelowContext,
    /// It was managed memory, which is refused for this pod.
    Managed,
    /// Within the limit, and the device had none that the pod could have.
    NoMemory,
    /// Within the limit, and there was none in the time that it would wait: the pool's, or an agent's.
    Timeout,
    /// Within the limit, and the agent does not know the pod on that device.
    UnknownDevice,
    /// It could not be charged at all.
    Invalid,
}

impl Refusal {
    /// Every one.
    pub(crate) const ALL: [Self; 7] = [
        Self::OverLimit,
        Self::QuotaBelowContext,
        Self::Managed,
        Self::NoMemory,
        Self::Timeout,
        Self::UnknownDevice,
        Self::Invalid,
    ];

    /// What a guard said; and why it was not granted more, where it was told that.
    pub(crate) fn of(said: RefusedReason, told: Option<NotGrantedReason>) -> Self {
        match (said, told) {
            (RefusedReason::OverLimit, _)
            | (RefusedReason::NotGranted, Some(NotGrantedReason::OverLimit)) => Self::OverLimit,
            (RefusedReason::QuotaBelowContext, _) => Self::QuotaBelowContext,
            (RefusedReason::Managed, _) => Self::Managed,
            (RefusedReason::Invalid, _) => Self::Invalid,
            (RefusedReason::NotGranted, Some(NotGrantedReason::NoMemory)) => Self::NoMemory,
            (RefusedReason::NotGranted, Some(NotGrantedReason::UnknownDevice)) => Self::UnknownDevice,
            // One that was told nothing has waited for an agent in vain.
            (
                RefusedReason::NotGranted,
                Some(NotGrantedReason::Timeout | NotGrantedReason::Stopping) | None,
            ) => Self::Timeout,
        }
    }

    /// As metrics say it.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::OverLimit => "OverLimit",
            Self::QuotaBelowContext => "QuotaBelowContext",
            Self::Managed => "Managed",
            Self::NoMemory => "NoMemory",
            Self::Timeout => "Timeout",
            Self::UnknownDevice => "UnknownDevice",
            Self::Invalid => "Invalid",
        }
    }
}

/// What was counted of a pod's guards.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// By ordinal, and by why in the order of [`Refusal::ALL`].
    refused: [[AtomicU64; Refusal::ALL.len()]; MAX_DEVICES],
    /// Connections that sent what is no frame.
    pub(crate) garbage: AtomicU64,
}

impl Tally {
    fn place(&self, ordinal: usize, why: Refusal) -> Option<&AtomicU64> {
        let mut all = self.refused.get(ordinal)?.iter().zip(Refusal::ALL);
        all.find_map(|(count, of)| (of == why).then_some(count))
    }

    /// A guard refused an allocation on the device of this ordinal.
    pub(crate) fn refuse(&self, ordinal: usize, why: Refusal) {
        if let Some(count) = self.place(ordinal, why) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many allocations its guards refused on the device of this ordinal, as far as they said so.
    pub(crate) fn refused(&self, ordinal: usize, why: Refusal) -> u64 {
        self.place(ordinal, why).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

/// Why the pages of an earlier agent cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PagesError {
    /// The usage page is none.
    #[error(transparent)]
    Map(#[from] MapError),
    /// No new quota page could be made.
    #[error("making a page: {0}")]
    Io(#[from] io::Error),
}

impl Pages {
    /// New ones.
    pub(crate) fn create() -> io::Result<Self> {
        let (usage, usage_descriptor) = UsagePage::create()?;
        let (quota, quota_descriptor) = QuotaPage::create()?;
        Ok(Self { quota, usage, tally: Tally::default(), quota_descriptor, usage_descriptor })
    }

    /// Those of an earlier agent: what the pod has charged stands. Nobody can write the old quota page
    /// any more, so there is a new one, for which the guards connect again.
    pub(crate) fn resume(usage_descriptor: OwnedFd) -> Result<Self, PagesError> {
        let usage = UsagePage::map(usage_descriptor.as_fd())?;
        usage.recover();
        let (quota, quota_descriptor) = QuotaPage::create()?;
        Ok(Self { quota, usage, tally: Tally::default(), quota_descriptor, usage_descriptor })
    }

    /// What a guard is given: quota page and usage page.
    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.quota_descriptor.as_fd(), self.usage_descriptor.as_fd()]
    }

    /// What is kept for a later agent: the usage page, and the quota page for its order of the devices.
    pub(crate) fn kept(&self) -> [BorrowedFd<'_>; 2] {
        [self.usage_descriptor.as_fd(), self.quota_descriptor.as_fd()]
    }
}

/// The devices by ordinal that an earlier agent's quota page has, which alone says whose the charges in the
/// usage page are.
pub(crate) fn devices(quota: BorrowedFd<'_>) -> Result<Vec<[u8; 16]>, MapError> {
    let view = QuotaView::map(quota)?;
    Ok((0..view.len()).filter_map(|ordinal| view.device(ordinal)).map(|device| device.uuid).collect())
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").field("devices", &self.quota.len()).finish_non_exhaustive()
    }
}

/// Bits of a token that are the PID: larger than any that the kernel gives (2^22).
const PID_BITS: u32 = 23;

/// What marks a slot as that of a process: its PID, and when it started, so that a PID that is used
/// again is not taken for its former owner.
pub(crate) fn token(pid: u32, start_ticks: u64) -> u64 {
    start_ticks << PID_BITS | u64::from(pid & ((1 << PID_BITS) - 1))
}

/// The PID of a token. The pod could have written anything there.
pub(crate) fn token_pid(token: u64) -> u32 {
    u32::try_from(token & ((1 << PID_BITS) - 1)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use highwater_guard_abi::charge::Charge;

    use super::*;

    #[test]
    fn what_was_charged_outlives_the_agent_and_its_quota_page() {
        let first = Pages::create().unwrap();
        let slot = first.usage.claim_any(token(7, 9)).unwrap();
        assert_eq!(first.usage.charge(slot, 0, 4096, u64::MAX, u64::MAX), Charge::Granted);
        let kept = first.kept()[0].try_clone_to_owned().unwrap();
        drop(first);
        let second = Pages::resume(kept).unwrap();
        assert_eq!(second.usage.charged(0), 4096);
        assert_eq!(second.usage.slots_in_use().collect::<Vec<_>>(), [(slot, token(7, 9))]);
        assert!(QuotaView::map(second.descriptors()[0]).unwrap().is_empty());
    }

    #[test]
    fn what_the_agent_told_says_why_more_was_not_granted() {
        use NotGrantedReason::{NoMemory, OverLimit, Timeout};
        let of = |told| Refusal::of(RefusedReason::NotGranted, told).as_str();
        assert_eq!(
            [Some(NoMemory), Some(OverLimit), Some(Timeout), None].map(of),
            ["NoMemory", "OverLimit", "Timeout", "Timeout"]
        );
        // What the guard knows by itself counts more than an earlier answer.
        assert_eq!(Refusal::of(RefusedReason::QuotaBelowContext, Some(NoMemory)), Refusal::QuotaBelowContext);
        let tally = Tally::default();
        for why in Refusal::ALL {
            tally.refuse(1, why);
            tally.refuse(MAX_DEVICES, why);
        }
        assert!(Refusal::ALL.iter().all(|why| (tally.refused(0, *why), tally.refused(1, *why)) == (0, 1)));
    }

    #[test]
    fn what_is_no_page_is_not_taken_for_one() {
        let other = QuotaPage::create().unwrap().1;
        assert!(matches!(Pages::resume(other), Err(PagesError::Map(_))));
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(matches!(Pages::resume(file), Err(PagesError::Map(_))));
    }

    #[test]
    fn a_token_tells_a_process_from_a_later_one_of_the_same_pid() {
        assert_ne!(token(7, 9), token(7, 10));
        assert_eq!(token_pid(token(4_194_304, 1 << 40)), 4_194_304);
        assert_ne!(token(1, 0), 0);
    }
}

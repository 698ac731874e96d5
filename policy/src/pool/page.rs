//! What a guarded pod is shown as its device: a card of the size of its limit.

/// The numbers of a pod's quota page for one device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// What the pod may ever have: the size of the card as it sees it.
    pub limit: u64,
    /// What it may have charged now without asking. Above `limit` only while a limit that was
    /// lowered has not been reached yet: those bytes are in use.
    pub granted: u64,
    /// What it could get now beyond what it has charged.
    pub free: u64,
}

/// The numbers on a device without a pool: nothing to ask for, and what is free is free for all.
pub fn without_pool(limit: u64, charged: u64, device_free: Option<u64>) -> Numbers {
    Numbers { limit, granted: limit, free: left(limit, charged, device_free) }
}

/// What a pod is shown as free: within its limit, and of what can be had now.
pub(super) fn left(limit: u64, charged: u64, obtainable: Option<u64>) -> u64 {
    limit.saturating_sub(charged).min(obtainable.unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_pool_the_device_and_the_limit_bound_what_is_free() {
        assert_eq!(without_pool(16, 4, Some(100)).free, 12);
        assert_eq!(without_pool(16, 4, Some(3)).free, 3);
        assert_eq!(without_pool(16, 4, None).free, 12, "the driver does not say");
        assert_eq!(without_pool(16, 20, Some(3)), Numbers { limit: 16, granted: 16, free: 0 });
    }
}

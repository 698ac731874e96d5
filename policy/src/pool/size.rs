//! How large the pool of a device is.
//!
//! The pool is ballast and grants together. Its size is a share of what is left of the device
//! after the driver's reserve and after everything that the pool does not rule: foreign, zombie
//! and unexplained bytes, and pods without a quota.

use crate::{
    ledger::{Ledger, Memory},
    pool::{Settings, ladder},
};

/// A whole in parts per million.
pub const WHOLE: u32 = 1_000_000;

/// Who has the bytes of a device, as far as the pool must know. All in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceBytes {
    /// All of it.
    pub total: u64,
    /// Set aside for the driver: what it keeps itself, and `set_aside`.
    pub driver_reserved: u64,
    /// What policy sets aside beyond what the driver keeps itself; part of `free`.
    pub set_aside: u64,
    /// Held by pods, with and without a quota.
    pub pods: u64,
    /// Held by processes of no pod.
    pub foreign: u64,
    /// Held by nobody that lives.
    pub zombie: u64,
    /// In use and explained by nothing; 0 where more is explained than used.
    pub unexplained: u64,
    /// Free as the driver says it.
    pub free: u64,
}

impl DeviceBytes {
    /// From a ledger that knows the ballast, and the driver's numbers that it was made of. `None`
    /// where one of them is missing: the pool then stands still.
    pub fn of(ledger: &Ledger, memory: &Memory) -> Option<Self> {
        let driver_reserved = ledger.driver_reserved?;
        let set_aside = driver_reserved.saturating_sub(memory.reserved.unwrap_or(0));
        Some(Self {
            total: ledger.total?,
            driver_reserved,
            set_aside,
            pods: ledger.pods?,
            foreign: ledger.foreign?,
            zombie: ledger.zombie?,
            unexplained: u64::try_from(ledger.unexplained?).unwrap_or(0),
            free: ledger.free?.saturating_add(set_aside),
        })
    }

    /// Free, and not set aside for the driver.
    pub fn usable_free(&self) -> u64 {
        self.free.saturating_sub(self.set_aside)
    }

    /// Held by nobody whom the pool knows by name.
    pub fn nameless(&self) -> u64 {
        self.foreign.saturating_add(self.zombie).saturating_add(self.unexplained)
    }
}

/// The size of a pool in bytes, multiples of 2 MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// What the pool is: the most that may be granted and held back together.
    pub pool: u64,
    /// What it would be if nobody outside the pool held anything. The ballast is never given up
    /// because somebody outside took more: that would hand the rest to whoever took it.
    pub undisturbed: u64,
    /// The most that it may come to now.
    pub cap: u64,
    /// The most that it can come to at all: what exceeds this is not worth waiting for.
    pub ever: u64,
    /// What the pool is a share of.
    pub base: u64,
}

/// The size of the pool at a share in parts per million. `ungoverned` are bytes of pods that have
/// no quota.
pub fn size(settings: &Settings, share: u32, device: &DeviceBytes, ungoverned: u64) -> Size {
    let usable = device.total.saturating_sub(device.driver_reserved);
    let base = usable.saturating_sub(device.nameless()).saturating_sub(ungoverned);
    let most = |base: u64| ladder::floor(part(base, percent(settings.max_percent)));
    let of = |base: u64| ladder::floor(part(base, share).max(settings.min_size).min(most(base)));
    let ever = if settings.adaptive.is_some() { most(usable) } else { of(usable) };
    Size { pool: of(base), undisturbed: of(usable), cap: most(base), ever, base }
}

/// Percent as parts per million, at most the whole.
pub fn percent(percent: u32) -> u32 {
    percent.saturating_mul(WHOLE / 100).min(WHOLE)
}

/// So many parts per million of some bytes.
pub fn part(bytes: u64, parts: u32) -> u64 {
    let part = u128::from(bytes) * u128::from(parts) / u128::from(WHOLE);
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// Some bytes as parts per million of others, rounded up; the whole where it is more.
pub fn share_of(bytes: u64, of: u64) -> u32 {
    let parts = (u128::from(bytes) * u128::from(WHOLE)).div_ceil(u128::from(of.max(1)));
    u32::try_from(parts).unwrap_or(WHOLE).min(WHOLE)
}

#[cfg(test)]
mod tests {
    use highwater_crds::{ByteSize, DriverReserve};
    use proptest::prelude::*;

    use super::*;
    use crate::{
        ledger::{Account, Charge, Holder, Sample},
        time::Millis,
    };

    const GI: u64 = ByteSize::GI;

    fn settings(size: u32, min: u64, max: u32) -> Settings {
        Settings { size_percent: size, min_size: min, max_percent: max, ..Settings::default() }
    }

    fn device(nameless: u64) -> DeviceBytes {
        DeviceBytes {
            total: 100 * GI,
            driver_reserved: 4 * GI,
            foreign: nameless,
            free: 100 * GI - nameless - GI,
            set_aside: 3 * GI,
            ..DeviceBytes::default()
        }
    }

    fn pool(settings: &Settings, nameless: u64) -> u64 {
        size(settings, percent(settings.size_percent), &device(nameless), 0).pool
    }

    #[test]
    fn the_size_is_a_share_of_what_is_left_within_its_bounds() {
        assert_eq!(pool(&settings(50, 0, 75), 0), 48 * GI);
        assert_eq!(pool(&settings(50, 60 * GI, 75), 0), 60 * GI, "at least so much");
        assert_eq!(pool(&settings(50, 90 * GI, 75), 0), 72 * GI, "the cap wins");
        assert_eq!(pool(&settings(80, 0, 75), 0), 72 * GI);
        assert_eq!(pool(&settings(80, 0, 400), 0), ladder::floor(part(96 * GI, 800_000)));
    }

    #[test]
    fn a19_memory_of_nobody_subtracts_from_the_pool() {
        let settings = settings(50, 0, 75);
        assert_eq!(pool(&settings, 10 * GI), 43 * GI);
        let size = size(&settings, 500_000, &device(10 * GI), 6 * GI);
        assert_eq!(size.pool, 40 * GI, "and so do pods without a quota");
        assert_eq!(size.undisturbed, 48 * GI, "yet nothing held back is given up for it");
    }

    #[test]
    fn a13_a_percentage_is_of_each_card_and_never_rounds_to_nothing() {
        let one = DeviceBytes { total: 24 * GI, ..DeviceBytes::default() };
        assert_eq!(size(&settings(50, 0, 75), 500_000, &one, 0).pool, 12 * GI);
        assert_eq!(size(&settings(1, 0, 75), 10_000, &one, 0).pool, ladder::floor(24 * GI / 100));
    }

    #[test]
    fn the_ledger_gives_what_the_pool_needs() {
        let memory = Memory { total: Some(80 * GI), used: Some(30 * GI), reserved: Some(GI) };
        let charges = [Charge { pid: 1, bytes: Some(8 * GI), holder: Holder::Foreign }];
        let sample = Sample { memory, charges: Some(&charges), ballast: 0, torn: false, managed: false };
        let reserve = DriverReserve { percent: 5, min_size: None };
        let mut ledger = Account::default().step(sample, Some(&reserve), |_| 0, Millis(0));
        let device = DeviceBytes::of(&ledger, &memory).unwrap();
        assert_eq!(device.free, 49 * GI, "as the driver says it");
        assert_eq!(device.usable_free(), 46 * GI);
        assert_eq!(device.nameless(), 30 * GI);
        ledger.foreign = None;
        assert_eq!(DeviceBytes::of(&ledger, &memory), None);
    }

    proptest! {
        #[test]
        fn no_numbers_make_a_pool_larger_than_its_cap(
            total in any::<u64>(), reserved in any::<u64>(), nameless in any::<u64>(), ungoverned in any::<u64>(),
            size_percent in any::<u32>(), min in any::<u64>(), max in 0u32..200, share in any::<u32>(),
        ) {
            let device = DeviceBytes { total, driver_reserved: reserved, unexplained: nameless, ..DeviceBytes::default() };
            let sizes = size(&settings(size_percent, min, max), share, &device, ungoverned);
            let left = total.saturating_sub(reserved).saturating_sub(nameless).saturating_sub(ungoverned);
            prop_assert!(sizes.pool <= part(left, percent(max)) && sizes.pool <= sizes.undisturbed);
            prop_assert!(sizes.undisturbed <= total.saturating_sub(reserved));
        }
    }
}

//! Charging the pod's quota, and what that says about memory that is left.

use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU64, Ordering};

use highwater_guard_abi::charge::{Charge, DRIVER_GRANULE, UNIT, Units};
use highwater_guard_abi::page::{DeviceQuota, Managed, QuotaView, UsagePage};
use highwater_guard_abi::wire::{NotGrantedReason, RefusedReason};

use crate::client::{self, Answer};
use crate::state::{Device, State};
use crate::sys::{self, Guard, MILLISECOND, Moment, Zeroed};
use crate::{graphs, pools, virtual_memory};

/// What a context is taken to need while no agent has said it: as measured on an H200.
const DEFAULT_CONTEXT: u64 = 518 << 20;

/// What a quota must hold beside a context to be of any use.
const CONTEXT_HEADROOM: u64 = 64 << 20;

/// The longest wait for the first grant, and the shortest for any.
const PATIENCE: u64 = 2 * sys::SECOND;

/// How often a newer agent is looked for.
const REFRESH: u64 = 50 * MILLISECOND;

/// The pages that the agent gave this process.
pub(crate) struct Pages {
    pub(crate) quota: QuotaView,
    pub(crate) usage: UsagePage,
    pub(crate) slot: usize,
    pub(crate) epoch: u64,
    /// UID of the pod as text, filled up with zeroes.
    pub(crate) pod: [u8; 40],
}

/// The pages in use, if any.
#[repr(C)]
pub(crate) struct Accounts {
    /// How many sets of pages there were; 0 while there is none.
    generation: u32,
    pages: MaybeUninit<Pages>,
    refreshed: Moment,
}

// SAFETY: generation 0 says that the pages are not there.
unsafe impl Zeroed for Accounts {}
// SAFETY: the pages are memory that every thread may read.
unsafe impl Send for Accounts {}

impl Accounts {
    /// The pages in use.
    pub(crate) fn pages(&self) -> Option<&Pages> {
        // SAFETY: they are written before the generation is.
        (self.generation != 0).then(|| unsafe { self.pages.assume_init_ref() })
    }

    /// The place of a device in the quota page.
    fn ordinal(&self, device: &Device) -> Option<usize> {
        let pages = self.pages()?;
        if device.generation.load(Ordering::Relaxed) != self.generation {
            let found = pages.quota.find(&device.uuid()?);
            let ordinal = found.and_then(|ordinal| u32::try_from(ordinal + 1).ok()).unwrap_or(0);
            device.ordinal.store(ordinal, Ordering::Relaxed);
            device.generation.store(self.generation, Ordering::Relaxed);
        }
        usize::try_from(device.ordinal.load(Ordering::Relaxed)).ok()?.checked_sub(1)
    }

    /// Goes over to new pages, and makes them say what this process holds.
    pub(crate) fn replace(&mut self, state: &'static State, pages: Pages) {
        if self.generation != 0 {
            // SAFETY: generation 0 would say that they are not there.
            unsafe { self.pages.assume_init_drop() };
        }
        self.pages = MaybeUninit::new(pages);
        self.generation = self.generation.wrapping_add(1).max(1);
        for device in &state.devices {
            let Some((pages, ordinal)) = self.pages().zip(self.ordinal(device)) else { continue };
            let (ours, theirs) = (device.held.load(Ordering::Relaxed), pages.usage.held(pages.slot, ordinal));
            if ours > theirs {
                // What is held is held, whatever the limit says now.
                let _granted = pages.usage.charge(pages.slot, ordinal, ours - theirs, u64::MAX, u64::MAX);
            } else if theirs > ours {
                pages.usage.uncharge(pages.slot, ordinal, theirs - ours);
            }
        }
    }

    /// Follows the agent's estimate of what a context takes.
    fn follow_estimate(pages: &Pages, ordinal: usize, device: &Device, estimate: u64) {
        let contexts = device.contexts.load(Ordering::Relaxed);
        let before = device.context_bytes.load(Ordering::Relaxed);
        let after = rounded(estimate);
        if contexts == 0 || before == after {
            return;
        }
        device.context_bytes.store(after, Ordering::Relaxed);
        if after > before {
            let more = (after - before).saturating_mul(contexts);
            let _granted = pages.usage.charge(pages.slot, ordinal, more, u64::MAX, u64::MAX);
            add(&device.held, more);
        } else {
            let less = (before - after).saturating_mul(contexts);
            pages.usage.uncharge(pages.slot, ordinal, less);
            subtract(&device.held, less);
        }
    }
}

/// Only ever changed while the accounts are locked.
fn add(number: &AtomicU64, bytes: u64) {
    number.store(number.load(Ordering::Relaxed).saturating_add(bytes), Ordering::Relaxed);
}

fn subtract(number: &AtomicU64, bytes: u64) {
    number.store(number.load(Ordering::Relaxed).saturating_sub(bytes), Ordering::Relaxed);
}

fn rounded(bytes: u64) -> u64 {
    Units::of(bytes).bytes()
}

/// What an allocation of `bytes` takes of the device.
///
/// The driver gives large ones in steps of 2 MiB, and puts small ones together into blocks of 2 MiB:
/// as many as fit.
pub(crate) fn footprint(bytes: u64) -> u64 {
    if bytes == 0 || bytes >= DRIVER_GRANULE {
        return bytes.div_ceil(DRIVER_GRANULE).saturating_mul(DRIVER_GRANULE);
    }
    let fit = DRIVER_GRANULE / rounded(bytes);
    rounded(DRIVER_GRANULE / fit.max(1))
}

/// Why memory was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused;

/// How one try to charge ended.
enum Attempt {
    Granted,
    OverLimit,
    NeedsGrant { ordinal: usize, wanted_total: u64, wait: u64 },
    NoPages,
    Invalid,
}

/// The accounts, after a look at whether there is a newer agent.
fn fresh(state: &'static State) -> Guard<'static, Accounts> {
    let mut accounts = state.accounts.lock();
    let outdated = accounts.pages().is_some_and(|pages| pages.usage.epoch() != pages.epoch);
    if outdated {
        let now = sys::now();
        if now >= accounts.refreshed.saturating_add(REFRESH) {
            accounts.refreshed = now;
            drop(accounts);
            client::refresh(state);
            accounts = state.accounts.lock();
            // An agent that takes long to answer is asked the less often.
            let took = sys::now().saturating_sub(now);
            accounts.refreshed = accounts.refreshed.saturating_add(took.saturating_mul(4));
        }
    }
    accounts
}

/// Counts `bytes` for a device of which no page says anything.
fn count(device: &Device, bytes: u64) {
    add(&device.held, bytes);
}

fn attempt(state: &'static State, device: &Device, bytes: u64, unbounded: bool) -> Attempt {
    let accounts = fresh(state);
    let Some(pages) = accounts.pages() else { return Attempt::NoPages };
    let Some((ordinal, quota)) =
        accounts.ordinal(device).and_then(|ordinal| Some((ordinal, pages.quota.device(ordinal)?)))
    else {
        // The pod has no quota on this device.
        count(device, bytes);
        return Attempt::Granted;
    };
    Accounts::follow_estimate(pages, ordinal, device, quota.context);
    let (limit, granted) = if unbounded { (u64::MAX, u64::MAX) } else { (quota.limit, quota.granted) };
    match pages.usage.charge(pages.slot, ordinal, bytes, limit, granted) {
        Charge::Granted => {
            add(&device.held, bytes);
            Attempt::Granted
        }
        Charge::OverLimit { .. } => Attempt::OverLimit,
        Charge::NeedsGrant { wanted_total } => {
            let wait = u64::from(quota.wait_milliseconds).saturating_mul(MILLISECOND);
            Attempt::NeedsGrant { ordinal, wanted_total, wait }
        }
        Charge::Invalid => Attempt::Invalid,
    }
}

/// Charges `bytes`; waits for a grant if need be.
pub(crate) fn charge(state: &'static State, device: &Device, bytes: u64) -> Result<(), Refused> {
    let bytes = rounded(bytes);
    if bytes == 0 {
        return Ok(());
    }
    virtual_memory::settle_sometimes(state);
    match attempt(state, device, bytes, false) {
        Attempt::Granted => Ok(()),
        first => charge_slowly(state, device, bytes, first, None),
    }
}

/// Charges what was allocated already, whatever the limit says.
pub(crate) fn charge_anyway(state: &'static State, device: &Device, bytes: u64) {
    let bytes = rounded(bytes);
    if bytes != 0 && !matches!(attempt(state, device, bytes, true), Attempt::Granted) {
        let _accounts = state.accounts.lock();
        count(device, bytes);
    }
}

/// Gives `bytes` back.
pub(crate) fn uncharge(state: &'static State, device: &Device, bytes: u64) {
    let bytes = rounded(bytes);
    if bytes == 0 {
        return;
    }
    let accounts = state.accounts.lock();
    subtract(&device.held, bytes);
    if let Some((pages, ordinal)) = accounts.pages().zip(accounts.ordinal(device)) {
        pages.usage.uncharge(pages.slot, ordinal, bytes);
    }
}

/// Charges a context; returns what for.
pub(crate) fn charge_context(state: &'static State, device: &Device) -> Result<(), Refused> {
    let deadline = sys::now().saturating_add(PATIENCE);
    if state.accounts.lock().pages().is_none() {
        // Without them it is counted, and charged when they come.
        let _here = client::await_agent(state);
    }
    let bytes = {
        let accounts = fresh(state);
        let quota =
            accounts.ordinal(device).zip(accounts.pages()).and_then(|(at, pages)| pages.quota.device(at));
        let bytes = quota.map_or(DEFAULT_CONTEXT, |quota| quota.context);
        if device.contexts.load(Ordering::Relaxed) == 0 {
            device.context_bytes.store(rounded(bytes), Ordering::Relaxed);
        }
        device.context_bytes.load(Ordering::Relaxed)
    };
    match attempt(state, device, bytes, false) {
        Attempt::Granted => {}
        first => charge_slowly(state, device, bytes, first, Some(deadline))?,
    }
    let accounts = state.accounts.lock();
    let (counted, each) =
        (device.contexts.load(Ordering::Relaxed), device.context_bytes.load(Ordering::Relaxed));
    device.contexts.store(counted.saturating_add(1), Ordering::Relaxed);
    if each != bytes {
        // The estimate changed meanwhile: let the next charge bring all contexts to it.
        let total = bytes.saturating_add(each.saturating_mul(counted));
        let now = each.saturating_mul(counted.saturating_add(1));
        if let Some((pages, ordinal)) = accounts.pages().zip(accounts.ordinal(device)) {
            if now > total {
                let _granted = pages.usage.charge(pages.slot, ordinal, now - total, u64::MAX, u64::MAX);
            } else {
                pages.usage.uncharge(pages.slot, ordinal, total - now);
            }
        }
        add(&device.held, now.saturating_sub(total));
        subtract(&device.held, total.saturating_sub(now));
    }
    Ok(())
}

/// Gives a context back.
pub(crate) fn uncharge_context(state: &'static State, device: &Device) {
    let bytes = {
        let _accounts = state.accounts.lock();
        let contexts = device.contexts.load(Ordering::Relaxed);
        if contexts == 0 {
            return;
        }
        device.contexts.store(contexts - 1, Ordering::Relaxed);
        device.context_bytes.load(Ordering::Relaxed)
    };
    uncharge(state, device, bytes);
}

#[cold]
fn charge_slowly(
    state: &'static State,
    device: &Device,
    bytes: u64,
    first: Attempt,
    deadline: Option<Moment>,
) -> Result<(), Refused> {
    let began = sys::now();
    let mut reclaimed = false;
    let mut next = first;
    loop {
        match next {
            Attempt::Granted => return Ok(()),
            Attempt::NoPages => {
                if !client::await_agent(state) {
                    let accounts = state.accounts.lock();
                    if accounts.pages().is_none() {
                        count(device, bytes);
                        return Ok(());
                    }
                }
            }
            Attempt::OverLimit if !reclaimed => {
                // What pools and graphs have given back since is not known yet.
                reclaimed = true;
                reclaim(state, device);
            }
            Attempt::OverLimit => return refuse(state, device, bytes, over_limit(state, device)),
            Attempt::Invalid => return refuse(state, device, bytes, RefusedReason::Invalid),
            Attempt::NeedsGrant { ordinal, wanted_total, wait } => {
                // The agent's answer may come as late as the wait ends, or from the next agent.
                let patience = PATIENCE.max(wait.saturating_add(wait / 4));
                // A context is worth waiting for, whatever is set for single allocations.
                let wait = deadline.map_or(wait, |deadline| deadline.saturating_sub(began));
                let deadline = deadline.unwrap_or_else(|| began.saturating_add(patience));
                match client::ask(state, ordinal, wanted_total, wait, deadline) {
                    Answer::LookAgain => {}
                    Answer::Refused(NotGrantedReason::OverLimit) => {
                        return refuse(state, device, bytes, RefusedReason::OverLimit);
                    }
                    Answer::Refused(_) => return refuse(state, device, bytes, RefusedReason::NotGranted),
                }
            }
        }
        next = attempt(state, device, bytes, false);
        if let (Attempt::NeedsGrant { .. }, true) =
            (&next, sys::now() >= began.saturating_add(60 * sys::SECOND))
        {
            // An agent that grants again and again less than was asked for.
            return refuse(state, device, bytes, RefusedReason::NotGranted);
        }
    }
}

fn refuse(state: &'static State, device: &Device, bytes: u64, reason: RefusedReason) -> Result<(), Refused> {
    report(state, device, bytes, reason);
    Err(Refused)
}

/// Tells the agent of a refusal, if that can be done at once.
pub(crate) fn report(state: &'static State, device: &Device, bytes: u64, reason: RefusedReason) {
    let ordinal = state.accounts.lock().ordinal(device);
    if let Some(ordinal) = ordinal {
        client::report(state, ordinal, bytes, reason);
    }
}

fn over_limit(state: &'static State, device: &Device) -> RefusedReason {
    match quota(state, device) {
        Some(quota) if quota.limit < quota.context.saturating_add(CONTEXT_HEADROOM) => {
            RefusedReason::QuotaBelowContext
        }
        _ => RefusedReason::OverLimit,
    }
}

/// Makes the accounts as small as they can truthfully be, and pools give back what they keep.
fn reclaim(state: &'static State, device: &Device) {
    virtual_memory::settle(state);
    graphs::settle(state, device);
    pools::settle(state);
    pools::trim(state, device);
}

/// Has pools and graphs give back what they keep, on those devices of the quota page for which
/// `ordinals` has a bit.
#[cold]
pub(crate) fn give_back(state: &'static State, ordinals: u32) {
    for device in &state.devices {
        let ordinal = state.accounts.lock().ordinal(device).and_then(|ordinal| u32::try_from(ordinal).ok());
        if ordinal.and_then(|ordinal| ordinals.checked_shr(ordinal)).is_some_and(|bits| bits & 1 != 0) {
            graphs::trim(state, device);
            reclaim(state, device);
        }
    }
}

/// Brings the accounts up to date where that costs little.
pub(crate) fn refresh(state: &'static State, device: &Device) {
    if state.dirty.load(Ordering::Relaxed) != 0 {
        pools::settle(state);
        graphs::settle(state, device);
    }
    virtual_memory::settle(state);
}

/// What the pod may have on a device.
fn quota(state: &'static State, device: &Device) -> Option<DeviceQuota> {
    let accounts = state.accounts.lock();
    accounts.pages()?.quota.device(accounts.ordinal(device)?)
}

/// How managed memory is treated on a device.
pub(crate) fn managed(state: &'static State, device: &Device) -> Managed {
    quota(state, device).map_or(Managed::Charge, |quota| quota.managed)
}

/// A device as the pod is to see it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// All there is for it.
    pub(crate) total: u64,
    /// What it could get now.
    pub(crate) free: u64,
    /// What it has.
    pub(crate) used: u64,
}

impl View {
    /// What a pod sees where the device itself has `total` and `free`. None where it has no limit.
    fn of(quota: &DeviceQuota, charged: u64, total: u64, free: u64) -> Option<Self> {
        if quota.limit == u64::MAX {
            return None;
        }
        let limit = quota.limit.min(total);
        let used = charged.min(limit);
        // Where the agent does not know what is obtainable, the device itself does.
        let obtainable = if quota.free == u64::MAX { free } else { quota.free };
        Some(Self { total: limit, free: limit.saturating_sub(charged).min(obtainable), used })
    }
}

/// How the pod is to see a device that has `total` and `free`.
pub(crate) fn view(state: &'static State, device: &Device, total: u64, free: u64) -> Option<View> {
    refresh(state, device);
    let accounts = fresh(state);
    view_at(&accounts, accounts.ordinal(device)?, total, free)
}

/// The same by UUID, for those who know no ordinals.
pub(crate) fn view_by_uuid(state: &'static State, uuid: &[u8; 16], total: u64, free: u64) -> Option<View> {
    let known = state.devices.iter().find(|device| device.uuid().as_ref() == Some(uuid));
    if let Some(device) = known {
        refresh(state, device);
    }
    let accounts = fresh(state);
    let ordinal = accounts.pages()?.quota.find(uuid)?;
    view_at(&accounts, ordinal, total, free)
}

fn view_at(accounts: &Accounts, ordinal: usize, total: u64, free: u64) -> Option<View> {
    let pages = accounts.pages()?;
    View::of(&pages.quota.device(ordinal)?, pages.usage.charged(ordinal), total, free)
}

const _: () = assert!(DRIVER_GRANULE.is_multiple_of(UNIT));

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn quota(limit: u64, free: u64) -> DeviceQuota {
        DeviceQuota { limit, granted: limit, free, ..DeviceQuota::default() }
    }

    #[test]
    fn small_allocations_are_charged_as_many_as_fit_into_a_block() {
        assert_eq!(footprint(0), 0);
        assert_eq!(footprint(1), 4096);
        assert_eq!(footprint(MIB), MIB);
        assert_eq!(footprint(700 << 10), MIB);
        assert_eq!(footprint(MIB + 1), 2 * MIB);
        assert_eq!(footprint(2 * MIB - 1), 2 * MIB);
        assert_eq!(footprint(3 * MIB), 4 * MIB);
        assert_eq!(footprint(u64::MAX), u64::MAX);
        for bytes in (1..2 * MIB).step_by(4093) {
            assert!(footprint(bytes) >= bytes && footprint(bytes).is_multiple_of(4096), "{bytes}");
        }
    }

    #[test]
    fn a_view_never_has_more_free_than_there_is_to_have() {
        let view = View::of(&quota(16 * GIB, u64::MAX), 4 * GIB, 139 * GIB, 100 * GIB).unwrap();
        assert_eq!(view, View { total: 16 * GIB, free: 12 * GIB, used: 4 * GIB });
        let crowded = View::of(&quota(16 * GIB, u64::MAX), 4 * GIB, 139 * GIB, GIB).unwrap();
        assert_eq!(crowded.free, GIB);
        let held_back = View::of(&quota(16 * GIB, 2 * GIB), 4 * GIB, 139 * GIB, 0).unwrap();
        assert_eq!(held_back.free, 2 * GIB);
    }

    #[test]
    fn s8_free_memory_does_not_underflow_when_more_is_used_than_the_limit_allows() {
        let view = View::of(&quota(GIB, u64::MAX), 3 * GIB, 139 * GIB, 100 * GIB).unwrap();
        assert_eq!(view, View { total: GIB, free: 0, used: GIB });
    }

    #[test]
    fn a_limit_above_the_device_is_the_device_and_none_is_no_view() {
        let view = View::of(&quota(1000 * GIB, u64::MAX), GIB, 139 * GIB, 100 * GIB).unwrap();
        assert_eq!((view.total, view.free), (139 * GIB, 100 * GIB));
        assert_eq!(View::of(&quota(u64::MAX, u64::MAX), GIB, 139 * GIB, 100 * GIB), None);
    }
}

//! The two pages of a pod: what it may have, and what it has.
//!
//! Both are memory files that the agent makes, seals and hands to the guard. Their size is sealed,
//! so no process of the pod can cut a page short under the agent's mapping (which would kill the
//! agent with SIGBUS), and every field is an atomic number, so a page that is scribbled over gives
//! wrong numbers and nothing worse.
//!
//! The **quota page** is also sealed against new writable mappings once the agent has its own. A
//! restarted agent therefore cannot write it either: it makes a new one and raises the epoch in the
//! **usage page**, upon which the guard connects again and gets the new one.
//!
//! A page keeps the version that it was made in. A guard or an agent which does not speak that
//! version refuses to map it.

use core::ffi::c_void;
use core::fmt;
use core::mem::{offset_of, size_of};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fd::BorrowedFd;
#[cfg(any(test, feature = "std"))]
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::charge::{self, Charge, Device, Memory, Place, Slot};
#[cfg(any(test, feature = "std"))]
use crate::charge::{Audit, Contended, Reaped};
#[cfg(any(test, feature = "std"))]
use crate::reap;
use crate::{MAX_DEVICES, MAX_SLOTS, Versions};

const QUOTA_MAGIC: u64 = u64::from_le_bytes(*b"HWQUOTA\0");
const USAGE_MAGIC: u64 = u64::from_le_bytes(*b"HWUSAGE\0");

/// Size of a quota page.
pub const QUOTA_BYTES: usize = 4096;

/// Size of a usage page. Memory is taken only for the slots that are used: two pages for the first
/// ten processes.
pub const USAGE_BYTES: usize = size_of::<UsageLayout>().next_multiple_of(4096);

/// The size never changes, and neither do the seals.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// How managed memory is treated, which the driver may place on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Managed {
    /// It is charged like any other.
    #[default]
    Charge,
    /// It is refused.
    Refuse,
    /// It is left alone.
    Ignore,
}

/// What a pod may have on one device. Sizes in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceQuota {
    /// The device's UUID, or that of the MIG instance.
    pub uuid: [u8; 16],
    /// What the pod may have at most.
    pub limit: u64,
    /// What all its processes together may have charged now; the limit, where there is no pool.
    pub granted: u64,
    /// What a context is estimated to take.
    pub context: u64,
    /// What the pod could get now beyond what it has; `u64::MAX` if unknown.
    pub free: u64,
    /// What the device has.
    pub total: u64,
    /// How managed memory is treated.
    pub managed: Managed,
    /// How long an allocation may wait for a grant.
    pub wait_milliseconds: u32,
}

/// Why a page was not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapError {
    /// It is not of the right size.
    Size,
    /// It is not sealed as it must be.
    Seals,
    /// It is another kind of file.
    Magic,
    /// It has this version, which is not spoken here.
    Abi(u32),
    /// The kernel refused.
    System(Errno),
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size => f.write_str("the page has the wrong size"),
            Self::Seals => f.write_str("the page is not sealed"),
            Self::Magic => f.write_str("the file is no such page"),
            Self::Abi(version) => {
                let Versions { oldest, newest } = Versions::OURS;
                write!(f, "the page has version {version}; versions {oldest} to {newest} are spoken here")
            }
            Self::System(errno) => write!(f, "the page cannot be mapped: {errno}"),
        }
    }
}

impl core::error::Error for MapError {}

impl From<Errno> for MapError {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

#[cfg(any(test, feature = "std"))]
impl From<MapError> for std::io::Error {
    fn from(error: MapError) -> Self {
        match error {
            MapError::System(errno) => errno.into(),
            other => Self::new(std::io::ErrorKind::InvalidData, other),
        }
    }
}

/// The start of both pages.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    abi: AtomicU32,
    /// Quota page: devices that are described.
    devices: AtomicU32,
    /// Usage page: raised whenever the guard must connect again.
    epoch: AtomicU64,
    /// Usage page: no slot from here on was ever claimed.
    slots: AtomicU64,
    reserved: [AtomicU64; 4],
}

#[repr(C)]
struct QuotaDevice {
    uuid: [AtomicU64; 2],
    limit: AtomicU64,
    granted: AtomicU64,
    context: AtomicU64,
    free: AtomicU64,
    /// Bits 0-1: managed memory; bits 8-39: how long an allocation may wait, in milliseconds.
    flags: AtomicU64,
    total: AtomicU64,
}

#[repr(C)]
struct QuotaLayout {
    header: Header,
    device: [QuotaDevice; MAX_DEVICES],
}

#[repr(C)]
struct UsageSlot {
    token: AtomicU64,
    intent: AtomicU64,
    detail: AtomicU64,
    after: AtomicU64,
    applied: AtomicU64,
    reserved: [AtomicU64; 3],
    held: [AtomicU64; MAX_DEVICES],
    extra: [AtomicU64; MAX_DEVICES],
    total: [[AtomicU64; 2]; MAX_DEVICES],
}

#[repr(C)]
struct UsageLayout {
    header: Header,
    word: [AtomicU64; MAX_DEVICES],
    slot: [UsageSlot; MAX_SLOTS],
}

// The layout of version 1. A change here is a new version.
const _: () = {
    assert!(size_of::<Header>() == 64);
    assert!(offset_of!(Header, abi) == 8 && offset_of!(Header, devices) == 12);
    assert!(offset_of!(Header, epoch) == 16 && offset_of!(Header, slots) == 24);
    assert!(size_of::<QuotaDevice>() == 64);
    assert!(offset_of!(QuotaDevice, limit) == 16 && offset_of!(QuotaDevice, total) == 56);
    assert!(offset_of!(QuotaLayout, device) == 64);
    assert!(size_of::<QuotaLayout>() == 1088 && size_of::<QuotaLayout>() <= QUOTA_BYTES);
    assert!(size_of::<UsageSlot>() == 576);
    assert!(offset_of!(UsageSlot, applied) == 32 && offset_of!(UsageSlot, held) == 64);
    assert!(offset_of!(UsageSlot, extra) == 192 && offset_of!(UsageSlot, total) == 320);
    assert!(offset_of!(UsageLayout, word) == 64 && offset_of!(UsageLayout, slot) == 192);
    assert!(USAGE_BYTES == 593_920);
    assert!(crate::ABI == 1);
};

/// A mapping of a whole page, undone on drop.
struct Mapping {
    address: NonNull<c_void>,
    length: usize,
}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, length: usize, protection: ProtFlags) -> Result<Self, Errno> {
        // SAFETY: the kernel chooses the address, so no memory of this process is replaced.
        let address =
            unsafe { rustix::mm::mmap(ptr::null_mut(), length, protection, MapFlags::SHARED, fd, 0) }?;
        NonNull::new(address).map(|address| Self { address, length }).ok_or(Errno::FAULT)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the range that `new` mapped; every reference into it borrows `self`.
        // That it can fail is of no use to anybody here.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr(), self.length) };
    }
}

// SAFETY: a mapping belongs to the process, not to a thread; what is in it is reached through
// atomic numbers only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("length", &self.length).finish_non_exhaustive()
    }
}

/// Checks size and seals, so that a mapping is safe to read for ever.
fn check(fd: BorrowedFd<'_>, length: usize, seals: SealFlags) -> Result<(), MapError> {
    let size = rustix::fs::fstat(fd)?.st_size;
    // Only memory files have seals at all; on any other file this fails.
    let found = rustix::fs::fcntl_get_seals(fd)?;
    if !found.contains(seals) {
        return Err(MapError::Seals);
    }
    if usize::try_from(size) != Ok(length) {
        return Err(MapError::Size);
    }
    Ok(())
}

fn check_header(header: &Header, magic: u64) -> Result<(), MapError> {
    // Relaxed, as every load from a page that may be mapped read-only: only relaxed loads are
    // promised to work there.
    if header.magic.load(Ordering::Relaxed) != magic {
        return Err(MapError::Magic);
    }
    let abi = header.abi.load(Ordering::Relaxed);
    if Versions::OURS.contain(abi) { Ok(()) } else { Err(MapError::Abi(abi)) }
}

/// A memory file of `length` zero bytes that cannot be executed.
#[cfg(any(test, feature = "std"))]
fn memory_file(name: &str, length: usize) -> Result<OwnedFd, Errno> {
    use rustix::fs::MemfdFlags;

    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
        other => other?,
    };
    rustix::fs::ftruncate(&fd, u64::try_from(length).map_err(|_| Errno::INVAL)?)?;
    Ok(fd)
}

fn quota(device: &QuotaDevice) -> DeviceQuota {
    let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
    let mut uuid = [0; 16];
    for (bytes, half) in uuid.chunks_exact_mut(8).zip(&device.uuid) {
        bytes.copy_from_slice(&load(half).to_le_bytes());
    }
    let flags = load(&device.flags);
    DeviceQuota {
        uuid,
        limit: load(&device.limit),
        granted: load(&device.granted),
        context: load(&device.context),
        free: load(&device.free),
        total: load(&device.total),
        managed: match flags & 3 {
            1 => Managed::Refuse,
            2 => Managed::Ignore,
            _ => Managed::Charge,
        },
        wait_milliseconds: u32::try_from((flags >> 8) & u64::from(u32::MAX)).unwrap_or(0),
    }
}

impl QuotaLayout {
    fn len(&self) -> usize {
        usize::try_from(self.header.devices.load(Ordering::Relaxed))
            .map_or(MAX_DEVICES, |n| n.min(MAX_DEVICES))
    }

    fn get(&self, ordinal: usize) -> Option<&QuotaDevice> {
        self.device.get(ordinal).filter(|_| ordinal < self.len())
    }
}

/// The quota page as the agent has it: writable.
#[cfg(any(test, feature = "std"))]
#[derive(Debug)]
pub struct QuotaPage {
    mapping: Mapping,
}

#[cfg(any(test, feature = "std"))]
impl QuotaPage {
    /// Makes an empty page. The descriptor is for the pod: nobody can map it writable any more.
    pub fn create() -> std::io::Result<(Self, OwnedFd)> {
        let fd = memory_file("highwater-quota", QUOTA_BYTES)?;
        let mapping = Mapping::new(fd.as_fd(), QUOTA_BYTES, ProtFlags::READ | ProtFlags::WRITE)?;
        let page = Self { mapping };
        let header = &page.layout().header;
        header.abi.store(crate::ABI, Ordering::Relaxed);
        header.magic.store(QUOTA_MAGIC, Ordering::Release);
        // Last, as this mapping must be the only writable one.
        rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS | SealFlags::FUTURE_WRITE)?;
        Ok((page, fd))
    }

    fn layout(&self) -> &QuotaLayout {
        // SAFETY: the mapping is page-aligned, of QUOTA_BYTES which hold a QuotaLayout, of sealed
        // size, and lives as long as `self`. Every field is atomic, so other writers do no harm.
        unsafe { self.mapping.address.cast::<QuotaLayout>().as_ref() }
    }

    /// Sets everything about a device and makes it visible. False if there is no such ordinal.
    ///
    /// A reader may see some of the numbers old and some new; each of them is whole. Give a device
    /// its UUID before the page is handed out, and never another one.
    pub fn set(&self, ordinal: usize, quota: &DeviceQuota) -> bool {
        let layout = self.layout();
        let Some(device) = layout.device.get(ordinal) else { return false };
        let (low, high) = quota.uuid.split_at(8);
        for (half, bytes) in device.uuid.iter().zip([low, high]) {
            half.store(bytes.try_into().map_or(0, u64::from_le_bytes), Ordering::Relaxed);
        }
        let managed = match quota.managed {
            Managed::Charge => 0,
            Managed::Refuse => 1,
            Managed::Ignore => 2,
        };
        let flags = managed | u64::from(quota.wait_milliseconds) << 8;
        for (number, value) in [
            (&device.context, quota.context),
            (&device.flags, flags),
            (&device.total, quota.total),
            (&device.free, quota.free),
            (&device.limit, quota.limit),
            (&device.granted, quota.granted),
        ] {
            number.store(value, Ordering::Release);
        }
        let devices = u32::try_from(ordinal.saturating_add(1)).unwrap_or(0);
        layout.header.devices.fetch_max(devices, Ordering::Release);
        true
    }

    /// Sets what is granted on a device, in bytes. False if it was never set.
    pub fn set_granted(&self, ordinal: usize, bytes: u64) -> bool {
        self.layout().get(ordinal).map(|device| device.granted.store(bytes, Ordering::Release)).is_some()
    }

    /// Sets what is obtainable on a device, in bytes. False if it was never set.
    pub fn set_free(&self, ordinal: usize, bytes: u64) -> bool {
        self.layout().get(ordinal).map(|device| device.free.store(bytes, Ordering::Release)).is_some()
    }

    /// What was set.
    pub fn device(&self, ordinal: usize) -> Option<DeviceQuota> {
        self.layout().get(ordinal).map(quota)
    }

    /// Number of devices.
    pub fn len(&self) -> usize {
        self.layout().len()
    }

    /// Whether no device was set.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The quota page as the guard has it: read-only.
#[derive(Debug)]
pub struct QuotaView {
    mapping: Mapping,
}

impl QuotaView {
    /// Maps a page that [`QuotaPage::create`] made.
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, MapError> {
        check(fd, QUOTA_BYTES, SIZE_SEALS | SealFlags::FUTURE_WRITE)?;
        let view = Self { mapping: Mapping::new(fd, QUOTA_BYTES, ProtFlags::READ)? };
        check_header(&view.layout().header, QUOTA_MAGIC)?;
        Ok(view)
    }

    fn layout(&self) -> &QuotaLayout {
        // SAFETY: as in `QuotaPage::layout`; that the memory is read-only here is no matter, as it
        // is only reached by relaxed loads, which are promised to work on such memory.
        unsafe { self.mapping.address.cast::<QuotaLayout>().as_ref() }
    }

    /// The version of the page.
    pub fn abi(&self) -> u32 {
        self.layout().header.abi.load(Ordering::Relaxed)
    }

    /// Number of devices.
    pub fn len(&self) -> usize {
        self.layout().len()
    }

    /// Whether there is no device.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the pod may have on a device.
    pub fn device(&self, ordinal: usize) -> Option<DeviceQuota> {
        self.layout().get(ordinal).map(quota)
    }

    /// The limit on a device in bytes: one load.
    pub fn limit(&self, ordinal: usize) -> Option<u64> {
        self.layout().get(ordinal).map(|device| device.limit.load(Ordering::Relaxed))
    }

    /// What is granted on a device in bytes: one load.
    pub fn granted(&self, ordinal: usize) -> Option<u64> {
        self.layout().get(ordinal).map(|device| device.granted.load(Ordering::Relaxed))
    }

    /// The ordinal of a device.
    pub fn find(&self, uuid: &[u8; 16]) -> Option<usize> {
        (0..self.len()).find(|&ordinal| self.device(ordinal).is_some_and(|device| device.uuid == *uuid))
    }
}

impl UsageLayout {
    fn number(&self, place: Place) -> Option<&AtomicU64> {
        let slot = |slot: Slot| self.slot.get(slot.index());
        match place {
            Place::Word(device) => self.word.get(device.index()),
            Place::Token(of) => slot(of).map(|slot| &slot.token),
            Place::Intent(of) => slot(of).map(|slot| &slot.intent),
            Place::Detail(of) => slot(of).map(|slot| &slot.detail),
            Place::After(of) => slot(of).map(|slot| &slot.after),
            Place::Applied(of) => slot(of).map(|slot| &slot.applied),
            Place::Held(of, device) => slot(of)?.held.get(device.index()),
            Place::Extra(of, device) => slot(of)?.extra.get(device.index()),
            Place::Total(of, device, cell) => slot(of)?.total.get(device.index())?.get(usize::from(cell)),
        }
    }

    fn at(&self, place: Place) -> &AtomicU64 {
        // `Slot` and `Device` are bounded by construction, so the spare number is never used; a
        // page must not be able to make the guard or the agent panic, whatever happens.
        let [spare, ..] = &self.header.reserved;
        self.number(place).unwrap_or(spare)
    }

    #[cfg(any(test, feature = "std"))]
    fn slots(&self) -> usize {
        usize::try_from(self.header.slots.load(Ordering::SeqCst))
            .map_or(MAX_SLOTS, |slots| slots.min(MAX_SLOTS))
    }
}

impl Memory for UsageLayout {
    fn load(&self, place: Place) -> u64 {
        self.at(place).load(Ordering::SeqCst)
    }

    fn store(&self, place: Place, value: u64) {
        self.at(place).store(value, Ordering::SeqCst);
    }

    fn swap_if(&self, place: Place, current: u64, new: u64) -> bool {
        self.at(place).compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn raise(&self, place: Place, value: u64) {
        self.at(place).fetch_max(value, Ordering::SeqCst);
    }

    fn devices(&self) -> usize {
        MAX_DEVICES
    }
}

/// The usage page, which both sides write.
///
/// A slot has one owner: the process that was given it, and of that one thread at a time. After a
/// fork the child must not use the slot of its parent. One agent at a time may use a page; within
/// the agent, calls on the same object put themselves in order.
#[derive(Debug)]
pub struct UsagePage {
    mapping: Mapping,
    #[cfg(any(test, feature = "std"))]
    agent: std::sync::Mutex<()>,
}

impl UsagePage {
    /// Makes an empty page. The descriptor is for the pod, and for whoever keeps it for the next
    /// agent.
    #[cfg(any(test, feature = "std"))]
    pub fn create() -> std::io::Result<(Self, OwnedFd)> {
        let fd = memory_file("highwater-usage", USAGE_BYTES)?;
        let page = Self::over(Mapping::new(fd.as_fd(), USAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE)?);
        let header = &page.layout().header;
        header.abi.store(crate::ABI, Ordering::Relaxed);
        header.epoch.store(1, Ordering::Relaxed);
        header.slots.store(1, Ordering::Relaxed);
        header.magic.store(USAGE_MAGIC, Ordering::Release);
        rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS)?;
        Ok((page, fd))
    }

    /// Maps a page that [`UsagePage::create`] made.
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, MapError> {
        check(fd, USAGE_BYTES, SIZE_SEALS)?;
        let page = Self::over(Mapping::new(fd, USAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE)?);
        check_header(&page.layout().header, USAGE_MAGIC)?;
        Ok(page)
    }

    fn over(mapping: Mapping) -> Self {
        Self {
            mapping,
            #[cfg(any(test, feature = "std"))]
            agent: std::sync::Mutex::new(()),
        }
    }

    fn layout(&self) -> &UsageLayout {
        // SAFETY: the mapping is page-aligned, of USAGE_BYTES which hold a UsageLayout, of sealed
        // size, and lives as long as `self`. Every field is atomic, so other writers do no harm.
        unsafe { self.mapping.address.cast::<UsageLayout>().as_ref() }
    }

    /// The version of the page.
    pub fn abi(&self) -> u32 {
        self.layout().header.abi.load(Ordering::Relaxed)
    }

    /// Changes when the guard must connect again.
    pub fn epoch(&self) -> u64 {
        self.layout().header.epoch.load(Ordering::Acquire)
    }

    /// Makes every guard of the pod connect again; returns the new epoch.
    pub fn raise_epoch(&self) -> u64 {
        self.layout().header.epoch.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
    }

    /// Charges `bytes`, rounded up to 4 KiB, to the owner of `slot`, unless the pod's total would
    /// go over `limit` or `granted`, both in bytes (`u64::MAX` for none).
    pub fn charge(&self, slot: usize, device: usize, bytes: u64, limit: u64, granted: u64) -> Charge {
        match owned(slot, device) {
            Some((slot, device)) => charge::charge(self.layout(), slot, device, bytes, limit, granted),
            None => Charge::Invalid,
        }
    }

    /// Returns `bytes`, rounded up to 4 KiB, but never more than the slot holds. Says how many
    /// bytes were returned.
    pub fn uncharge(&self, slot: usize, device: usize, bytes: u64) -> u64 {
        owned(slot, device).map_or(0, |(slot, device)| charge::uncharge(self.layout(), slot, device, bytes))
    }

    /// What the pod has charged on a device, corrections included, in bytes.
    pub fn charged(&self, device: usize) -> u64 {
        Device::new(device).map_or(0, |device| charge::charged(self.layout(), device))
    }

    /// What a slot holds on a device, corrections excluded, in bytes. While its owner is amid a
    /// change this is the amount before or after it.
    pub fn held(&self, slot: usize, device: usize) -> u64 {
        named(slot, device).map_or(0, |(slot, device)| charge::held(self.layout(), slot, device))
    }

    /// What a slot was claimed with; 0 if it is free.
    pub fn token(&self, slot: usize) -> u64 {
        Slot::new(slot).map_or(0, |slot| self.layout().load(Place::Token(slot)))
    }
}

/// What only the agent does.
#[cfg(any(test, feature = "std"))]
impl UsagePage {
    fn alone(&self) -> std::sync::MutexGuard<'_, ()> {
        // The lock protects no data of its own that a panic could have left half changed.
        self.agent.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Completes what the last agent was doing when it died. A restarted agent calls it once after
    /// [`UsagePage::map`].
    pub fn recover(&self) {
        let _alone = self.alone();
        reap::recover(self.layout());
    }

    /// Gives a free slot to the process that `token` stands for. False if `token` is 0 or the slot
    /// does not exist, is the agent's, or is in use.
    ///
    /// The token is untrusted when it is read again: the pod can write it.
    pub fn claim(&self, slot: usize, token: u64) -> bool {
        let _alone = self.alone();
        self.claim_alone(slot, token)
    }

    /// Gives some free slot to the process that `token` stands for, the lowest there is.
    pub fn claim_any(&self, token: u64) -> Option<usize> {
        let _alone = self.alone();
        let end = self.layout().slots().saturating_add(1).min(MAX_SLOTS);
        (1..end).find(|&slot| self.claim_alone(slot, token)).or_else(|| {
            // The mark can be wrong in a page that was scribbled over.
            (end..MAX_SLOTS).find(|&slot| self.claim_alone(slot, token))
        })
    }

    fn claim_alone(&self, slot: usize, token: u64) -> bool {
        let layout = self.layout();
        let Some(claimed) = Slot::new(slot).filter(|&slot| slot != Slot::AGENT && token != 0) else {
            return false;
        };
        if layout.load(Place::Token(claimed)) != 0 {
            return false;
        }
        let end = u64::try_from(slot.saturating_add(1)).unwrap_or(u64::MAX);
        layout.header.slots.fetch_max(end, Ordering::SeqCst);
        layout.swap_if(Place::Token(claimed), 0, token)
    }

    /// Returns all that a slot holds and frees it.
    ///
    /// The process that owned it must be completely gone, all its threads included (its pidfd says
    /// so), or have replaced itself by exec. May be repeated after an error, and by another agent
    /// after this one died in the middle: nothing is returned twice.
    pub fn reap(&self, slot: usize) -> Result<Reaped, Contended> {
        let _alone = self.alone();
        match Slot::new(slot).filter(|&slot| slot != Slot::AGENT) {
            Some(slot) => reap::Reaping::new(slot).run(self.layout()),
            None => Ok(Reaped::default()),
        }
    }

    /// Sets the correction of a slot to `bytes` of either sign, rounded away from zero to 4 KiB,
    /// and returns the former one. It counts in addition to what the owner holds, and ends when the
    /// slot is reaped. That of slot 0 stands for the pod as a whole.
    pub fn correct(&self, slot: usize, device: usize, bytes: i64) -> Result<i64, Contended> {
        let _alone = self.alone();
        match named(slot, device) {
            Some((slot, device)) => reap::correct(self.layout(), slot, device, bytes),
            None => Ok(0),
        }
    }

    /// The correction of a slot in bytes.
    pub fn correction(&self, slot: usize, device: usize) -> i64 {
        named(slot, device).map_or(0, |(slot, device)| reap::correction(self.layout(), slot, device))
    }

    /// Compares what is charged on a device with the sum of what its slots hold, at one moment.
    /// `None` if the page never stood still: somebody is charging all the time, or died amid a
    /// change and is not reaped yet.
    pub fn audit(&self, device: usize) -> Option<Audit> {
        let _alone = self.alone();
        Device::new(device).and_then(|device| reap::audit(self.layout(), device, self.layout().slots()))
    }

    /// The slots that are claimed and the tokens they were claimed with. Untrusted: a restarted
    /// agent checks that each token stands for a process of the pod.
    pub fn slots_in_use(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        (1..self.layout().slots()).map(|slot| (slot, self.token(slot))).filter(|&(_, token)| token != 0)
    }
}

fn named(slot: usize, device: usize) -> Option<(Slot, Device)> {
    Slot::new(slot).zip(Device::new(device))
}

/// The same for a guard, which must not touch the agent's slot.
fn owned(slot: usize, device: usize) -> Option<(Slot, Device)> {
    named(slot, device).filter(|&(slot, _)| slot != Slot::AGENT)
}

/// For the fuzz targets: writes that another process could make.
#[cfg(any(test, feature = "fuzz"))]
impl Mapping {
    fn scribble(&self, index: usize, value: u64) {
        let numbers = self.length / size_of::<u64>();
        // SAFETY: the mapping holds that many aligned 64-bit numbers, and is only ever reached
        // through atomic operations of this width or, in the header, of half of it.
        let all = unsafe { core::slice::from_raw_parts(self.address.cast::<AtomicU64>().as_ptr(), numbers) };
        if let Some(number) = all.get(index % numbers) {
            number.store(value, Ordering::Relaxed);
        }
    }
}

#[cfg(any(test, feature = "fuzz"))]
impl UsagePage {
    pub(crate) fn scribble(&self, index: usize, value: u64) {
        self.mapping.scribble(index, value);
    }
}

#[cfg(any(test, feature = "fuzz"))]
impl QuotaPage {
    pub(crate) fn scribble(&self, index: usize, value: u64) {
        self.mapping.scribble(index, value);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use rustix::fs::{FallocateFlags, MemfdFlags};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn example() -> DeviceQuota {
        DeviceQuota {
            uuid: *b"0123456789abcdef",
            limit: 16 << 30,
            granted: 4 << 30,
            context: 518 * MIB,
            free: u64::MAX,
            total: 80 << 30,
            managed: Managed::Ignore,
            wait_milliseconds: u32::MAX,
        }
    }

    fn free_charge(page: &UsagePage, slot: usize, bytes: u64) -> Charge {
        page.charge(slot, 0, bytes, u64::MAX, u64::MAX)
    }

    #[test]
    fn the_guard_reads_what_the_agent_set() {
        let (page, fd) = QuotaPage::create().unwrap();
        let view = QuotaView::map(fd.as_fd()).unwrap();
        assert_eq!((view.abi(), view.len(), view.device(0)), (crate::ABI, 0, None));
        assert!(page.set(2, &example()));
        assert_eq!(view.len(), 3);
        assert_eq!(view.device(2), Some(example()));
        assert_eq!(view.find(b"0123456789abcdef"), Some(2));
        assert_eq!(view.find(b"another one here"), None);
        assert!(page.set_granted(2, 5 << 30) && page.set_free(2, 7));
        assert_eq!((view.granted(2), view.limit(2)), (Some(5 << 30), Some(16 << 30)));
        assert_eq!(view.device(2).unwrap().free, 7);
        assert!(!page.set(MAX_DEVICES, &example()) && !page.set_granted(3, 0));
    }

    #[test]
    fn a_pod_cannot_widen_its_quota() {
        let (page, fd) = QuotaPage::create().unwrap();
        page.set(0, &example());
        let writable = Mapping::new(fd.as_fd(), QUOTA_BYTES, ProtFlags::READ | ProtFlags::WRITE);
        assert_eq!(writable.unwrap_err(), Errno::PERM);
        let view = QuotaView::map(fd.as_fd()).unwrap();
        // SAFETY: the range is that of the view; the call is expected to change nothing.
        let protect = unsafe {
            rustix::mm::mprotect(
                view.mapping.address.as_ptr(),
                QUOTA_BYTES,
                rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE,
            )
        };
        assert_eq!(protect, Err(Errno::ACCESS));
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), Err(Errno::PERM));
        for size in [0, 8192] {
            assert_eq!(rustix::fs::ftruncate(&fd, size), Err(Errno::PERM));
        }
        assert_eq!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM));
        // Nor by opening the file anew.
        let path = format!("/proc/self/fd/{}", rustix::fd::AsRawFd::as_raw_fd(&fd));
        let mut again = File::options().read(true).write(true).open(path).unwrap();
        assert!(again.write_all(&[0xff; 64]).is_err());
        assert_eq!(view.device(0), Some(example()));
    }

    #[test]
    fn a_pod_that_truncates_or_empties_its_usage_page_does_not_harm_the_agent() {
        let (agent, fd) = UsagePage::create().unwrap();
        assert!(agent.claim(1, 77));
        assert_eq!(free_charge(&agent, 1, MIB), Charge::Granted);
        for size in [0, 4096, 1 << 30] {
            assert_eq!(rustix::fs::ftruncate(&fd, size), Err(Errno::PERM));
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&fd, punch, 0, USAGE_BYTES as u64).unwrap();
        assert_eq!((agent.charged(0), agent.held(1, 0), agent.token(1)), (0, 0, 0));
        assert_eq!(agent.reap(1), Ok(Reaped::default()));
        assert_eq!(UsagePage::map(fd.as_fd()).unwrap_err(), MapError::Magic);
    }

    #[test]
    fn files_that_are_no_pages_are_refused() {
        let file = memory_file("other", USAGE_BYTES).unwrap();
        assert_eq!(UsagePage::map(file.as_fd()).unwrap_err(), MapError::Seals);
        rustix::fs::fcntl_add_seals(&file, SIZE_SEALS).unwrap();
        assert_eq!(UsagePage::map(file.as_fd()).unwrap_err(), MapError::Magic);
        assert_eq!(QuotaView::map(file.as_fd()).unwrap_err(), MapError::Seals);
        let (_, quota) = QuotaPage::create().unwrap();
        assert_eq!(UsagePage::map(quota.as_fd()).unwrap_err(), MapError::Size);
        let plain = rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(UsagePage::map(plain.as_fd()).unwrap_err(), MapError::Seals);
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(matches!(UsagePage::map(reader.as_fd()), Err(MapError::System(_))));
    }

    #[test]
    fn a_page_of_another_version_is_refused_by_its_version() {
        let (page, fd) = UsagePage::create().unwrap();
        page.layout().header.abi.store(crate::ABI + 1, Ordering::Relaxed);
        assert_eq!(UsagePage::map(fd.as_fd()).unwrap_err(), MapError::Abi(crate::ABI + 1));
        page.layout().header.abi.store(0, Ordering::Relaxed);
        assert_eq!(UsagePage::map(fd.as_fd()).unwrap_err(), MapError::Abi(0));
    }

    #[test]
    fn charges_are_refused_at_the_limit_and_held_at_the_grant() {
        let (page, _fd) = UsagePage::create().unwrap();
        let slot = page.claim_any(1).unwrap();
        let charge = |bytes| page.charge(slot, 3, bytes, 10 * MIB, 4 * MIB);
        assert_eq!(charge(4 * MIB), Charge::Granted);
        assert_eq!(charge(1), Charge::NeedsGrant { wanted_total: 4 * MIB + 4096 });
        assert_eq!(charge(6 * MIB), Charge::NeedsGrant { wanted_total: 10 * MIB });
        assert_eq!(charge(6 * MIB + 1), Charge::OverLimit { limit: 10 * MIB, charged: 4 * MIB });
        assert_eq!(charge(u64::MAX), Charge::OverLimit { limit: 10 * MIB, charged: 4 * MIB });
        assert_eq!(charge(0), Charge::Granted);
        assert_eq!((page.charged(3), page.held(slot, 3), page.charged(0)), (4 * MIB, 4 * MIB, 0));
    }

    #[test]
    fn a01_what_is_freed_twice_is_returned_once() {
        let (page, _fd) = UsagePage::create().unwrap();
        let slot = page.claim_any(1).unwrap();
        let other = page.claim_any(2).unwrap();
        assert_eq!(free_charge(&page, slot, MIB), Charge::Granted);
        assert_eq!(free_charge(&page, other, MIB), Charge::Granted);
        assert_eq!(page.uncharge(slot, 0, MIB), MIB);
        assert_eq!(page.uncharge(slot, 0, MIB), 0);
        assert_eq!(page.uncharge(other, 0, u64::MAX), MIB);
        assert_eq!(page.charged(0), 0);
    }

    #[test]
    fn slots_and_devices_that_do_not_exist_are_refused() {
        let (page, _fd) = UsagePage::create().unwrap();
        for (slot, device) in [(0, 0), (MAX_SLOTS, 0), (1, MAX_DEVICES), (usize::MAX, usize::MAX)] {
            assert_eq!(page.charge(slot, device, 1, 9, 9), Charge::Invalid);
            assert_eq!(page.uncharge(slot, device, 1), 0);
        }
        assert!(!page.claim(0, 1) && !page.claim(MAX_SLOTS, 1) && !page.claim(1, 0));
        assert_eq!(page.reap(MAX_SLOTS), Ok(Reaped::default()));
        assert_eq!(page.audit(MAX_DEVICES), None);
    }

    #[test]
    fn slots_are_given_out_once_and_end_with_the_last() {
        let (page, _fd) = UsagePage::create().unwrap();
        assert!(page.claim(5, 50) && !page.claim(5, 51));
        for expected in (1..5).chain(6..MAX_SLOTS) {
            assert_eq!(page.claim_any(9), Some(expected));
        }
        assert_eq!(page.claim_any(9), None);
        assert_eq!(page.slots_in_use().count(), MAX_SLOTS - 1);
        page.reap(700).unwrap();
        assert_eq!(page.claim_any(9), Some(700));
    }

    #[test]
    fn reaping_returns_what_a_slot_held_and_its_correction() {
        let (page, fd) = UsagePage::create().unwrap();
        assert!(page.claim(1, 1) && page.claim(2, 2));
        assert_eq!(free_charge(&page, 1, 5 * MIB), Charge::Granted);
        assert_eq!(free_charge(&page, 2, MIB), Charge::Granted);
        let minus = -2 * MIB.cast_signed();
        assert_eq!(page.correct(1, 0, minus), Ok(0));
        assert_eq!(page.correct(1, 0, minus), Ok(minus));
        assert_eq!(page.correct(0, 0, 4096), Ok(0));
        assert_eq!(page.charged(0), 4 * MIB + 4096);
        // A new agent takes over by the descriptor alone.
        drop(page);
        let page = UsagePage::map(fd.as_fd()).unwrap();
        page.recover();
        assert_eq!(page.slots_in_use().collect::<Vec<_>>(), [(1, 1), (2, 2)]);
        assert_eq!(page.reap(1).unwrap().bytes[0], 3 * MIB);
        assert_eq!(page.reap(1).unwrap().bytes[0], 0);
        let sum = (MIB + 4096).cast_signed();
        assert_eq!(page.audit(0), Some(Audit { charged: sum, sum }));
        assert_eq!(page.correction(0, 0), 4096);
    }

    #[test]
    fn the_total_is_right_even_while_a_correction_is_larger_than_what_is_held() {
        let (page, _fd) = UsagePage::create().unwrap();
        assert!(page.claim(1, 1));
        assert_eq!(free_charge(&page, 1, MIB), Charge::Granted);
        page.correct(1, 0, -(MIB.cast_signed())).unwrap();
        assert_eq!(page.uncharge(1, 0, MIB), MIB);
        assert_eq!(page.charged(0), 0);
        page.correct(1, 0, 0).unwrap();
        assert_eq!(page.audit(0), Some(Audit { charged: 0, sum: 0 }));
    }

    #[test]
    fn the_epoch_rises() {
        let (page, fd) = UsagePage::create().unwrap();
        let guard = UsagePage::map(fd.as_fd()).unwrap();
        let before = guard.epoch();
        assert_eq!(page.raise_epoch(), before + 1);
        assert_eq!(guard.epoch(), before + 1);
    }

    #[test]
    fn a_pod_that_changes_its_page_without_pause_does_not_hold_the_agent_up() {
        use std::sync::atomic::AtomicBool;

        let (agent, fd) = UsagePage::create().unwrap();
        assert!(agent.claim(1, 1) && agent.claim(2, 2));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let pod = UsagePage::map(fd.as_fd()).unwrap();
                let mut value = 0;
                while !stop.load(Ordering::Relaxed) {
                    value += 1 << 11;
                    pod.layout().word[0].store(value, Ordering::SeqCst);
                }
            });
            while agent.layout().word[0].load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            // Each of these ends, whether or not it came to anything.
            for _ in 0..50 {
                let _ = agent.correct(0, 0, 4096);
                let _ = agent.correct(0, 0, 0);
                agent.charged(0);
                agent.audit(0);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(agent.reap(1).is_ok());
    }
}

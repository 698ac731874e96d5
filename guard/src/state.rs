//! The state of the guard in this process.
//!
//! It lies in memory of its own that the kernel wipes in forked children, and all zeroes is its
//! first value. So a child begins anew, with its own slot at the agent and nothing held, whatever
//! its parent's other threads were doing when it was forked.

use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use highwater_guard_abi::wire::STRENGTH_STOPPED;

use crate::accounts::Accounts;
use crate::blocks::Blocks;
use crate::client::{self, Client};
use crate::code::{Code, INVALID_DEVICE, SUCCESS};
use crate::contexts::ContextAccount;
use crate::exports::Exports;
use crate::graphs::GraphAccount;
use crate::pools::Pools;
use crate::symbols::driver;
use crate::sys::{self, Mutex, Zeroed};
use crate::table::Table;
use crate::virtual_memory::VirtualMemory;

/// Devices that a process can have; the driver's ordinals are their indices.
pub(crate) const DEVICES: usize = 64;

/// The oldest version of CUDA with which the guard can act: from here on a driver says which device is
/// which. With an older one it only watches.
pub(crate) const OLDEST_CUDA: i32 = 9020;

/// The newest major version of CUDA that the guard knows. With a newer one it only watches.
pub(crate) const NEWEST_CUDA: i32 = 13;

/// A device of this process.
#[repr(C)]
pub(crate) struct Device {
    /// 1 once the UUID is known.
    known: AtomicU32,
    uuid: [AtomicU64; 2],
    /// Its place in the quota page plus one, and the pages that this is about.
    pub(crate) ordinal: AtomicU32,
    pub(crate) generation: AtomicU32,
    /// Bytes that this process has charged, which is the truth when pages change.
    pub(crate) held: AtomicU64,
    /// Contexts that are charged, and what for each.
    pub(crate) contexts: AtomicU64,
    pub(crate) context_bytes: AtomicU64,
    /// Contexts as the driver is asked for them.
    pub(crate) context: Mutex<ContextAccount>,
    /// Small allocations.
    pub(crate) blocks: Mutex<Blocks>,
    /// Graph memory.
    pub(crate) graph: Mutex<GraphAccount>,
}

/// See the module.
#[repr(C)]
pub(crate) struct State {
    phase: AtomicU32,
    /// What is known of the driver's version.
    version: AtomicU32,
    /// The process, where the kernel cannot wipe.
    owner: AtomicU32,
    /// Streams that are being captured.
    pub(crate) captures: AtomicU32,
    /// How many more synchronisations may let memory go that was given back to pools or graphs.
    pub(crate) dirty: AtomicU32,
    /// Whether any graph was given memory of its own.
    pub(crate) graphs_seen: AtomicU32,
    /// Executable graphs with memory of their own, and a bit for each device that they use.
    pub(crate) graph_count: AtomicU32,
    pub(crate) graph_devices: AtomicU64,
    /// Memory that only exported descriptors keep, and when that was last looked at.
    pub(crate) orphans: AtomicU64,
    pub(crate) orphans_seen: AtomicU64,
    /// When it was last looked whether the agent asks for something.
    pub(crate) heeded: AtomicU64,
    pub(crate) accounts: Mutex<Accounts>,
    pub(crate) client: Mutex<Client>,
    pub(crate) table: Table,
    pub(crate) pools: Mutex<Pools>,
    pub(crate) virtual_memory: Mutex<VirtualMemory>,
    pub(crate) exports: Mutex<Exports>,
    pub(crate) devices: [Device; DEVICES],
}

// SAFETY: numbers, and what is zeroed by its own word.
unsafe impl Zeroed for State {}

const STARTING: u32 = 1;
const ACTIVE: u32 = 2;
const PASSING: u32 = 3;

const KNOWN: u32 = 1;
const UNKNOWN: u32 = 2;

static STATE: AtomicPtr<State> = AtomicPtr::new(ptr::null_mut());
static CANNOT_WIPE: AtomicBool = AtomicBool::new(false);

/// The state, where the guard is to act at all.
pub(crate) fn any() -> Option<&'static State> {
    // SAFETY: once made, it is never unmapped.
    let state = match unsafe { STATE.load(Ordering::Acquire).as_ref() } {
        Some(state) => state,
        None => create()?,
    };
    if CANNOT_WIPE.load(Ordering::Relaxed) {
        state.wipe_if_forked();
    }
    match state.phase.load(Ordering::Acquire) {
        ACTIVE => Some(state),
        PASSING => None,
        _ => state.start(),
    }
}

/// The state, where the guard is to act on calls of CUDA.
pub(crate) fn cuda() -> Option<&'static State> {
    let state = any()?;
    match state.version.load(Ordering::Relaxed) {
        KNOWN => Some(state),
        UNKNOWN => None,
        _ => state.judge_cuda(),
    }
}

/// The state, where the guard is to act on calls of NVML.
pub(crate) fn nvml() -> Option<&'static State> {
    let state = any()?;
    match state.version.load(Ordering::Relaxed) {
        KNOWN => Some(state),
        UNKNOWN => None,
        _ => {
            let mut version = 0;
            // SAFETY: the function takes a place for a number.
            let code = unsafe { driver!(nvmlSystemGetCudaDriverVersion_v2(&raw mut version => *mut i32)) };
            state.judge(code, version)
        }
    }
}

#[cold]
fn create() -> Option<&'static State> {
    let (memory, bytes) = sys::map_first::<State>()?;
    if !sys::wipe_in_children(memory.cast(), bytes) {
        CANNOT_WIPE.store(true, Ordering::Relaxed);
    }
    let made = memory.as_ptr();
    let first = match STATE.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => made,
        Err(other) => {
            // SAFETY: nobody has seen it.
            unsafe { sys::unmap(memory.cast(), bytes) };
            other
        }
    };
    // SAFETY: page-aligned zeroes, which are a state; it is never unmapped.
    unsafe { first.as_ref() }
}

impl State {
    #[cold]
    fn start(&'static self) -> Option<&'static Self> {
        match self.phase.compare_exchange(0, STARTING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.owner.store(process(), Ordering::Relaxed);
                let phase = if sys::is_secure() { PASSING } else { ACTIVE };
                self.phase.store(phase, Ordering::Release);
            }
            Err(_) => {
                while self.phase.load(Ordering::Acquire) == STARTING {
                    core::hint::spin_loop();
                }
            }
        }
        (self.phase.load(Ordering::Acquire) == ACTIVE).then_some(self)
    }

    /// Does by hand what the kernel could not.
    #[cold]
    fn wipe_if_forked(&'static self) {
        let (owner, now) = (self.owner.load(Ordering::Relaxed), process());
        if owner != 0
            && owner != now
            && self.owner.compare_exchange(owner, now, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            // SAFETY: a forked child has one thread until it makes more, and this is its first call.
            unsafe { ptr::write_bytes(STATE.load(Ordering::Acquire), 0, 1) };
        }
    }

    #[cold]
    fn judge_cuda(&'static self) -> Option<&'static Self> {
        let mut version = 0;
        // SAFETY: the function takes a place for a number, and may be called at any time.
        let code = unsafe { driver!(cuDriverGetVersion(&raw mut version => *mut i32)) };
        self.judge(code, version)
    }

    /// Looks at the version of CUDA once more.
    pub(crate) fn judge_again(&'static self) {
        self.version.store(0, Ordering::Relaxed);
        let _known = self.judge_cuda();
    }

    /// Decides by the version of CUDA whether the guard knows what it would be doing.
    #[cold]
    fn judge(&'static self, code: Code, version: i32) -> Option<&'static Self> {
        if code != SUCCESS || version <= 0 {
            // Not to be had yet: act, and ask again.
            return Some(self);
        }
        if version >= OLDEST_CUDA && version / 1000 <= NEWEST_CUDA {
            self.version.store(KNOWN, Ordering::Relaxed);
            return Some(self);
        }
        self.version.store(UNKNOWN, Ordering::Relaxed);
        client::weaken(STRENGTH_STOPPED);
        client::greet(self);
        client::confess(self);
        None
    }

    /// The device with that ordinal of the driver. An error is the driver's code for it.
    pub(crate) fn device(&'static self, ordinal: i32) -> Result<&'static Device, Code> {
        let index = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
        let device = self.devices.get(index).ok_or(INVALID_DEVICE)?;
        if device.known.load(Ordering::Acquire) == 0 {
            device.learn(ordinal)?;
        }
        Ok(device)
    }

    /// The device at that place of the list.
    pub(crate) fn device_at(&'static self, index: u8) -> Option<&'static Device> {
        self.devices.get(usize::from(index))
    }

    /// The place of a device in the list.
    pub(crate) fn index_of(&self, device: &Device) -> u8 {
        let position = self.devices.iter().position(|other| ptr::eq(other, device));
        position.and_then(|index| u8::try_from(index).ok()).unwrap_or(u8::MAX)
    }
}

impl Device {
    #[cold]
    fn learn(&self, ordinal: i32) -> Result<(), Code> {
        let mut uuid = [0_u8; 16];
        // SAFETY: both functions take a place for 16 bytes. The first knows MIG instances.
        let code = unsafe {
            match driver!(cuDeviceGetUuid_v2(&raw mut uuid => *mut [u8; 16], ordinal => i32)) {
                SUCCESS => SUCCESS,
                _ => driver!(cuDeviceGetUuid(&raw mut uuid => *mut [u8; 16], ordinal => i32)),
            }
        };
        if code != SUCCESS {
            return Err(code);
        }
        let (low, high) = uuid.split_at(8);
        for (half, bytes) in self.uuid.iter().zip([low, high]) {
            half.store(bytes.try_into().map_or(0, u64::from_le_bytes), Ordering::Relaxed);
        }
        self.known.store(1, Ordering::Release);
        Ok(())
    }

    /// Its UUID, once a call named it.
    pub(crate) fn uuid(&self) -> Option<[u8; 16]> {
        if self.known.load(Ordering::Acquire) == 0 {
            return None;
        }
        let [low, high] = &self.uuid;
        let number = u128::from(high.load(Ordering::Relaxed)) << 64 | u128::from(low.load(Ordering::Relaxed));
        Some(number.to_le_bytes())
    }
}

fn process() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
}

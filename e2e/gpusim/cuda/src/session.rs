//! What this process has in the driver.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use gpusim::client::socket_path;
use gpusim::driver::GRANULARITY;
use gpusim::files;
use gpusim::protocol::{Inventory, MemoryKind, ProcessList, Region, Reply, Request};
use gpusim::visible::{CUDA_VISIBLE_DEVICES, Visible};

use crate::array::Arrays;
use crate::code::Code;
use crate::exports;
use crate::graph::Graphs;
use crate::host::HostMemory;
use crate::launch::Modules;
use crate::link::{Link, is_null};
use crate::output::{Out, put};
use crate::pool::Pools;
use crate::stream::Streams;
use crate::uvm;

/// `CUdeviceptr`.
pub(crate) type DevicePointer = u64;

/// Names the process lists that show this process, separated by commas: `compute` (as if absent),
/// `graphics`, `mps`. No program of the real driver reads it.
const LISTS_VARIABLE: &str = "GPUSIM_PROCESS_LISTS";

/// Device memory has addresses from here on: far from where Linux puts anything of the host's.
const FIRST_ADDRESS: DevicePointer = 0x3000_0000_0000;
/// Nothing can be longer than what a process can address. A node of a graph has its addresses from the
/// moment it is made, and fails by this alone: its memory is taken later.
const ADDRESS_SPACE: u64 = 1 << 47;
/// Addresses for calls of the oldest form, which count in 32 bits.
const FIRST_LOW_ADDRESS: DevicePointer = 0x1000_0000;
const LAST_LOW_ADDRESS: DevicePointer = 0xf000_0000;
/// Handles of whatever the daemon does not number.
const FIRST_HANDLE: usize = 0x5000_0000_0000;

static SESSION: Mutex<Option<Session>> = Mutex::new(None);
/// Set in children that `fork` made of a process that uses the driver: they cannot use it.
static FORKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// This thread's contexts; the current one is the last.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Everything between `cuInit` and the end of the process.
pub(crate) struct Session {
    link: Link,
    pub(crate) inventory: Inventory,
    pub(crate) devices: Vec<Region>,
    /// By handle.
    pub(crate) contexts: HashMap<usize, Context>,
    /// By device ordinal.
    pub(crate) primaries: BTreeMap<usize, Primary>,
    /// Allocations by address.
    pub(crate) blocks: BTreeMap<DevicePointer, Block>,
    /// The blocks that small allocations are in, by address.
    pub(crate) shared: BTreeMap<DevicePointer, SharedBlock>,
    /// `cuMemCreate`'s memory by handle.
    pub(crate) physical: HashMap<u64, Physical>,
    /// Address ranges of `cuMemAddressReserve`, by start.
    pub(crate) reserved: BTreeMap<DevicePointer, u64>,
    /// What of those ranges is mapped: by start, the size and the handle.
    pub(crate) mapped: BTreeMap<DevicePointer, (u64, u64)>,
    pub(crate) pools: Pools,
    pub(crate) streams: Streams,
    pub(crate) graphs: Graphs,
    pub(crate) arrays: Arrays,
    pub(crate) host: HostMemory,
    pub(crate) modules: Modules,
    next_address: DevicePointer,
    next_low_address: DevicePointer,
    next_handle: usize,
    /// The device files, open as long as the driver is.
    _files: Vec<File>,
    uvm: Option<File>,
    /// Whether the driver's own part of managed memory is mapped.
    own_mapped: bool,
}

/// A context.
pub(crate) struct Context {
    /// Ordinal of its device.
    pub(crate) device: usize,
    /// As the daemon numbers it.
    pub(crate) id: u64,
    pub(crate) primary: bool,
}

/// A device's primary context in use.
pub(crate) struct Primary {
    pub(crate) handle: usize,
    pub(crate) users: usize,
}

/// An allocation.
pub(crate) struct Block {
    pub(crate) size: u64,
    pub(crate) backing: Backing,
    /// Handle of its context.
    pub(crate) context: usize,
    /// Ordinal of its device.
    pub(crate) device: usize,
}

/// Where an allocation's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backing {
    /// It is its own, as the daemon numbers it.
    Own(u64),
    /// It is its own, and moves between host and device; whether its addresses are mapped.
    Managed { id: u64, mapped: bool },
    /// It is a part of a shared block.
    Part,
    /// A pool's, by handle.
    Pool(usize),
    /// An executable graph's, by handle.
    Graph(usize),
    /// Another process's.
    Opened(u64),
}

/// A block that small allocations of one context share.
pub(crate) struct SharedBlock {
    /// As the daemon numbers it.
    pub(crate) id: u64,
    /// Handle of its context.
    pub(crate) context: usize,
    /// What is taken: by offset, the size.
    pub(crate) taken: BTreeMap<u64, u64>,
}

/// Memory of `cuMemCreate`, or imported.
pub(crate) struct Physical {
    pub(crate) size: u64,
    /// Where it is; nowhere on a device for memory of the host.
    pub(crate) device: Option<usize>,
    /// `CUmemLocation`: kind and number.
    pub(crate) location: (c_int, c_int),
    /// Handles that the program has, one in value.
    pub(crate) references: usize,
    pub(crate) mappings: usize,
    /// Its maker asked for descriptors.
    pub(crate) shareable: bool,
    /// It came by a descriptor.
    pub(crate) imported: bool,
}

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
    ) -> c_int;
}

extern "C" fn mark_forked() {
    FORKED.store(true, Ordering::Relaxed);
}

exports! {
    /// Opens the driver for this process.
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Code::InvalidValue);
        }
        if FORKED.load(Ordering::Relaxed) {
            return Err(Code::NotInitialized);
        }
        let mut session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
        if session.is_none() {
            *session = Some(Session::open()?);
            // SAFETY: the handler only stores to an atomic, which is allowed after `fork`; it is
            // part of a library that is never unloaded once it is in use.
            if unsafe { pthread_atfork(None, None, Some(mark_forked)) } != 0 {
                return Err(Code::Unknown);
            }
        }
        Ok(())
    }

    /// CUDA version of the driver; may be asked before `cuInit`.
    fn cuDriverGetVersion(version: Out<c_int>) {
        let open = with(|session| Ok(session.inventory.cuda_version));
        put(version, open.unwrap_or(13_000))
    }
}

/// Runs `body` with this process's session.
pub(crate) fn with<T>(body: impl FnOnce(&mut Session) -> Result<T, Code>) -> Result<T, Code> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(Code::NotInitialized);
    }
    let mut session = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    body(session.as_mut().ok_or(Code::NotInitialized)?)
}

/// Runs `body` with this thread's stack of contexts.
pub(crate) fn with_stack<T>(body: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    CURRENT.with_borrow_mut(body)
}

/// Runs `body` with the session and the handle of this thread's current context.
pub(crate) fn with_current<T>(body: impl FnOnce(&mut Session, usize) -> Result<T, Code>) -> Result<T, Code> {
    with(|session| {
        let handle = with_stack(|stack| stack.last().copied()).ok_or(Code::InvalidContext)?;
        if !session.contexts.contains_key(&handle) {
            return Err(Code::ContextIsDestroyed);
        }
        body(session, handle)
    })
}

impl Session {
    fn open() -> Result<Self, Code> {
        let mut link = Link::open()?;
        let Reply::Inventory(inventory) = link.call(&Request::Inventory)? else {
            return Err(Code::Unknown);
        };
        let chosen = std::env::var(CUDA_VISIBLE_DEVICES).ok();
        let devices = Visible::from_environment().chosen_devices(&inventory, chosen.as_deref());
        if devices.is_empty() {
            return Err(Code::NoDevice);
        }
        let open = devices.iter().map(|region| region.device).collect();
        link.call(&Request::Attach { devices: open, lists: lists() })?;
        for device in &devices {
            link.call(&Request::Check(*device))?;
        }
        let (uvm, files) = if is_null() { (None, Vec::new()) } else { device_files(&devices) };
        Ok(Self {
            link,
            inventory,
            devices,
            contexts: HashMap::new(),
            primaries: BTreeMap::new(),
            blocks: BTreeMap::new(),
            shared: BTreeMap::new(),
            physical: HashMap::new(),
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            pools: Pools::default(),
            streams: Streams::default(),
            graphs: Graphs::default(),
            arrays: Arrays::default(),
            host: HostMemory::default(),
            modules: Modules::default(),
            next_address: FIRST_ADDRESS,
            next_low_address: FIRST_LOW_ADDRESS,
            next_handle: FIRST_HANDLE,
            _files: files,
            uvm,
            own_mapped: false,
        })
    }

    /// Asks the daemon.
    pub(crate) fn call(&mut self, request: &Request) -> Result<Reply, Code> {
        Ok(self.link.call(request)?)
    }

    /// Asks the daemon for a descriptor that keeps an allocation.
    pub(crate) fn export(&mut self, allocation: u64) -> Result<OwnedFd, Code> {
        Ok(self.link.export(allocation)?)
    }

    /// Asks the daemon for something new.
    pub(crate) fn make(&mut self, request: &Request) -> Result<u64, Code> {
        match self.call(request)? {
            Reply::Made(id) => Ok(id),
            _ => Err(Code::Unknown),
        }
    }

    /// Asks the daemon for memory.
    pub(crate) fn allocate(
        &mut self,
        device: usize,
        kind: MemoryKind,
        bytes: u64,
        context: Option<u64>,
    ) -> Result<u64, Code> {
        let region = self.region(device)?;
        self.make(&Request::Allocate { region, kind, bytes, context })
    }

    /// Where a device is.
    pub(crate) fn region(&self, device: usize) -> Result<Region, Code> {
        self.devices.get(device).copied().ok_or(Code::InvalidDevice)
    }

    /// The context with that handle.
    pub(crate) fn context(&self, handle: usize) -> Result<&Context, Code> {
        self.contexts.get(&handle).ok_or(Code::InvalidContext)
    }

    /// A range of addresses that nothing else has.
    pub(crate) fn new_address(&mut self, size: u64) -> Result<DevicePointer, Code> {
        let size = size.checked_next_multiple_of(GRANULARITY).filter(|size| *size <= ADDRESS_SPACE);
        let size = size.ok_or(Code::OutOfMemory)?;
        let address = self.next_address;
        self.next_address = address.checked_add(size).ok_or(Code::OutOfMemory)?;
        Ok(address)
    }
}

impl Session {
    /// The position of a region among the devices of this process.
    pub(crate) fn position(&self, region: Region) -> Option<usize> {
        self.devices.iter().position(|device| *device == region)
    }

    /// Addresses below 4 GiB.
    pub(crate) fn new_low_address(&mut self, size: u64) -> Result<DevicePointer, Code> {
        let size = size.checked_next_multiple_of(GRANULARITY).ok_or(Code::OutOfMemory)?;
        let end = self.next_low_address.checked_add(size).filter(|end| *end <= LAST_LOW_ADDRESS);
        let address = self.next_low_address;
        self.next_low_address = end.ok_or(Code::OutOfMemory)?;
        Ok(address)
    }

    /// A handle that nothing else has.
    pub(crate) fn new_handle(&mut self) -> usize {
        // As far apart as if they pointed to something.
        self.next_handle += 16;
        self.next_handle
    }

    /// Shows managed memory in the address space; whether that was possible.
    pub(crate) fn map_managed(&self, address: DevicePointer, size: u64) -> bool {
        uvm::map(self.uvm.as_ref(), address, size)
    }

    /// Shows what the driver maps in each process that has a context.
    pub(crate) fn map_own(&mut self) {
        if self.own_mapped || self.uvm.is_none() {
            return;
        }
        if let Ok(address) = self.new_address(uvm::OWN) {
            self.own_mapped = self.map_managed(address, uvm::OWN);
        }
    }
}

/// Opens the device files, as far as they are there: that of managed memory, and the others.
fn device_files(devices: &[Region]) -> (Option<File>, Vec<File>) {
    let socket = socket_path();
    let names = devices.iter().map(|region| files::name(region.device));
    let mut all: Vec<_> = files::COMMON.iter().map(|name| (*name).to_owned()).chain(names).collect();
    all.dedup();
    let open = all.iter().filter(|name| *name != files::UVM).filter_map(|name| files::open(&socket, name));
    (files::open(&socket, files::UVM), open.collect())
}

/// The position that a device's number stands for.
pub(crate) fn ordinal(session: &Session, device: c_int) -> Result<usize, Code> {
    let ordinal = usize::try_from(device).map_err(|_| Code::InvalidDevice)?;
    session.region(ordinal).map(|_| ordinal)
}

/// A handle as callers hold it; it is a number and points nowhere.
pub(crate) fn opaque(handle: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(handle)
}

fn lists() -> Vec<ProcessList> {
    let named = std::env::var(LISTS_VARIABLE).unwrap_or_default();
    let lists: Vec<_> = named.split(',').filter_map(|name| name.trim().parse().ok()).collect();
    if lists.is_empty() { vec![ProcessList::Compute] } else { lists }
}

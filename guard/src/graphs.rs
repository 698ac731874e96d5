//! Memory of graphs. A graph may allocate when it runs; the driver takes memory for that when the
//! executable graph is uploaded or launched for the first time, and keeps it until it is trimmed.
//!
//! So that a refusal comes at a call which may be refused, an executable graph is charged when it is
//! made, for the most that it holds at a time. Once it has run, the driver's own number of what is
//! reserved for graphs takes the place of that.

use core::ffi::{c_char, c_int, c_void};
use core::mem::size_of;
use core::ptr;
use core::sync::atomic::Ordering;

use crate::accounts::{self, footprint};
use crate::code::{Code, OUT_OF_MEMORY, SUCCESS};
use crate::pools::{DEVICE, PoolProperties};
use crate::state::{self, DEVICES, Device, State};
use crate::streams::{self, NullStream, relaxed};
use crate::symbols::{driver, hooks};
use crate::sys::{self, Zeroed};
use crate::table::{Entry, Space};

type Graph = *mut c_void;
type Node = *mut c_void;
type Executable = *mut c_void;
type Stream = *mut c_void;

/// `CU_GRAPH_NODE_TYPE_GRAPH`
const CHILD: c_int = 4;
/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`
const ALLOCATES: c_int = 10;
/// `CU_GRAPH_NODE_TYPE_MEM_FREE`
const FREES: c_int = 11;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`
const RESERVED: c_int = 2;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
const UPLOADS: u64 = 2;
/// Graphs within graphs that are looked into.
const DEPTH: u32 = 16;

/// What becomes of the memory of an executable graph.
mod stage {
    /// It is charged, and the driver has not taken it yet.
    pub(super) const AHEAD: u8 = 0;
    /// It is part of what the driver says is reserved.
    pub(super) const TAKEN: u8 = 1;
    /// The driver has given it back, and takes it again when the graph runs.
    pub(super) const TRIMMED: u8 = 2;
}

/// What is charged for graphs on a device.
#[repr(C)]
pub(crate) struct GraphAccount {
    /// In all.
    charged: u64,
    /// For executable graphs that have not run yet.
    ahead: u64,
}

// SAFETY: numbers.
unsafe impl Zeroed for GraphAccount {}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`
#[repr(C)]
struct AllocationNode {
    pool: PoolProperties,
    rest_of_pool: [u64; 9],
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    pointer: u64,
}

const _: () = assert!(size_of::<AllocationNode>() == 120);

/// A graph was given memory of its own.
pub(crate) fn seen(state: &'static State) {
    state.graphs_seen.store(1, Ordering::Relaxed);
}

/// What graphs have reserved on a device.
fn reserved(device: c_int) -> Option<u64> {
    let mut value = 0_u64;
    let code = relaxed(|| {
        // SAFETY: the function writes a number of 64 bits for this attribute.
        unsafe {
            driver!(cuDeviceGetGraphMemAttribute(
                device => c_int, RESERVED => c_int, (&raw mut value).cast() => *mut c_void
            ))
        }
    });
    (code == SUCCESS).then_some(value)
}

/// Charges a device's graphs for what is reserved, and for what is still to come.
pub(crate) fn settle(state: &'static State, device: &Device) {
    if state.graphs_seen.load(Ordering::Relaxed) == 0 {
        return;
    }
    let mut graph = device.graph.lock();
    let Some(reserved) = reserved(c_int::from(state.index_of(device))) else { return };
    let target = reserved.saturating_add(graph.ahead);
    if target > graph.charged {
        accounts::charge_anyway(state, device, target - graph.charged);
    } else {
        accounts::uncharge(state, device, graph.charged - target);
    }
    graph.charged = target;
}

/// The same for every device that graphs use.
pub(crate) fn settle_all(state: &'static State) {
    each_device(state, |device| settle(state, device));
}

fn each_device(state: &'static State, mut visit: impl FnMut(&'static Device)) {
    let used = state.graph_devices.load(Ordering::Relaxed);
    if used != 0 {
        (0..)
            .zip(&state.devices)
            .filter(|(bit, _)| used >> bit & 1 != 0)
            .for_each(|(_, device)| visit(device));
    }
}

/// Makes the driver give back what it keeps for graphs of a device that do not run.
pub(crate) fn trim(state: &'static State, device: &Device) {
    let index = state.index_of(device);
    let used = state.graph_devices.load(Ordering::Relaxed);
    if used.checked_shr(u32::from(index)).is_none_or(|bits| bits & 1 == 0) {
        return;
    }
    // SAFETY: a device that the driver named.
    if relaxed(|| unsafe { driver!(cuDeviceGraphMemTrim(c_int::from(index) => c_int)) }) == SUCCESS {
        trimmed(state, device);
    }
}

/// The driver has given back what it kept for graphs.
fn trimmed(state: &'static State, device: &Device) {
    let index = state.index_of(device);
    settle(state, device);
    // Those that run take it again. Which ones the trim concerned is not said: all of them
    // are charged anew when they run, and the driver's number corrects that.
    state.table.each_mut(|entry| {
        if entry.is(Space::Graph) && entry.device == index && entry.flag == stage::TAKEN {
            entry.flag = stage::TRIMMED;
        }
    });
}

/// An array in memory of its own.
struct Scratch<T> {
    memory: ptr::NonNull<u8>,
    length: usize,
    of: core::marker::PhantomData<T>,
}

impl<T: Copy> Scratch<T> {
    /// `length` values of zeroes; `T` must allow that.
    fn new(length: usize) -> Option<Self> {
        let memory = sys::map(length.checked_mul(size_of::<T>())?.max(1))?;
        Some(Self { memory, length, of: core::marker::PhantomData })
    }

    fn slice(&mut self) -> &mut [T] {
        // SAFETY: the mapping holds so many values, is page-aligned and zeroed.
        unsafe { core::slice::from_raw_parts_mut(self.memory.as_ptr().cast(), self.length) }
    }
}

impl<T> Drop for Scratch<T> {
    fn drop(&mut self) {
        // SAFETY: nothing borrows it any more.
        unsafe { sys::unmap(self.memory, self.length.saturating_mul(size_of::<T>()).max(1)) };
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Allocated {
    pointer: u64,
    bytes: u64,
    device: u64,
}

/// The most that a graph holds at a time on each device, if its nodes run one after the other in the
/// order in which they were added.
struct Peaks {
    now: [u64; DEVICES],
    most: [u64; DEVICES],
}

impl Peaks {
    /// An error is the driver's code where it does not say it.
    fn of(graph: Graph) -> Result<Self, Code> {
        let mut peaks = Self { now: [0; DEVICES], most: [0; DEVICES] };
        peaks.add(graph, DEPTH)?;
        Ok(peaks)
    }

    fn any(&self) -> bool {
        self.most.iter().any(|bytes| *bytes > 0)
    }

    fn allocate(&mut self, device: usize, bytes: u64) {
        if let (Some(now), Some(most)) = (self.now.get_mut(device), self.most.get_mut(device)) {
            *now = now.saturating_add(bytes);
            *most = (*most).max(*now);
        }
    }

    fn free(&mut self, device: usize, bytes: u64) {
        if let Some(now) = self.now.get_mut(device) {
            *now = now.saturating_sub(bytes);
        }
    }

    fn add(&mut self, graph: Graph, depth: u32) -> Result<(), Code> {
        let depth = depth.checked_sub(1).ok_or(OUT_OF_MEMORY)?;
        let mut count = 0_usize;
        // SAFETY: without a place for the nodes, their number is written.
        said(unsafe {
            driver!(cuGraphGetNodes(
                graph => Graph, ptr::null_mut() => *mut Node, &raw mut count => *mut usize
            ))
        })?;
        if count == 0 {
            return Ok(());
        }
        let mut nodes = Scratch::<Node>::new(count).ok_or(OUT_OF_MEMORY)?;
        let mut allocated = Scratch::<Allocated>::new(count).ok_or(OUT_OF_MEMORY)?;
        let mut used = 0;
        // SAFETY: there is room for so many nodes.
        said(unsafe {
            driver!(cuGraphGetNodes(
                graph => Graph, nodes.slice().as_mut_ptr() => *mut Node, &raw mut count => *mut usize
            ))
        })?;
        for node in nodes.slice().iter().take(count).copied() {
            match kind(node)? {
                ALLOCATES => {
                    let Some((pointer, bytes, device)) = allocation(node)? else { continue };
                    self.allocate(device, bytes);
                    if let Some(place) = allocated.slice().get_mut(used) {
                        *place = Allocated { pointer, bytes, device: sys::bytes(device) };
                        used += 1;
                    }
                }
                FREES => {
                    let pointer = freed(node)?;
                    let known =
                        allocated.slice().iter_mut().take(used).rev().find(|one| one.pointer == pointer);
                    if let Some(one) = known {
                        self.free(usize::try_from(one.device).unwrap_or(usize::MAX), one.bytes);
                        one.pointer = 0;
                    }
                }
                CHILD => {
                    let mut child = ptr::null_mut();
                    // SAFETY: the function takes a place for a handle.
                    said(unsafe {
                        driver!(cuGraphChildGraphNodeGetGraph(node => Node, &raw mut child => *mut Graph))
                    })?;
                    self.add(child, depth)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Whether the driver has said what it was asked. Of a graph of which it does not, nobody knows what it
/// will take.
fn said(code: Code) -> Result<(), Code> {
    if code == SUCCESS { Ok(()) } else { Err(code) }
}

fn kind(node: Node) -> Result<c_int, Code> {
    let mut kind = 0;
    // SAFETY: the function takes a place for a number.
    said(unsafe { driver!(cuGraphNodeGetType(node => Node, &raw mut kind => *mut c_int)) })?;
    Ok(kind)
}

/// Pointer, size and device of what a node allocates; none if it is not of device memory.
fn allocation(node: Node) -> Result<Option<(u64, u64, usize)>, Code> {
    let mut node_says = core::mem::MaybeUninit::<AllocationNode>::zeroed();
    // SAFETY: the function takes a place for the parameters; all of it are numbers and pointers.
    let (code, says) = unsafe {
        let code = driver!(cuGraphMemAllocNodeGetParams(
            node => Node, node_says.as_mut_ptr() => *mut AllocationNode
        ));
        (code, node_says.assume_init())
    };
    said(code)?;
    let location = says.pool.location;
    let device = usize::try_from(location.id).ok().filter(|_| location.kind == DEVICE);
    Ok(device.map(|device| (says.pointer, sys::bytes(says.bytes), device)))
}

fn freed(node: Node) -> Result<u64, Code> {
    let mut pointer = 0;
    // SAFETY: the function takes a place for a pointer.
    said(unsafe { driver!(cuGraphMemFreeNodeGetParams(node => Node, &raw mut pointer => *mut u64)) })?;
    Ok(pointer)
}

/// The key of an executable graph on a device: addresses leave the highest bits free.
fn key(executable: u64, device: u8) -> u64 {
    executable ^ (u64::from(device) << 56)
}

/// Makes a graph executable.
fn instantiate(
    state: &'static State,
    out: *mut Executable,
    graph: Graph,
    uploads: bool,
    make: impl FnOnce() -> Code,
) -> Code {
    if state.graphs_seen.load(Ordering::Relaxed) == 0 || out.is_null() {
        return make();
    }
    let peaks = match Peaks::of(graph) {
        Ok(peaks) => peaks,
        Err(why) => return why,
    };
    if !peaks.any() {
        return make();
    }
    // A device that is not known to the driver makes it refuse the graph by itself.
    let wanted = || {
        (0_u8..).zip(peaks.most).filter(|(_, bytes)| *bytes > 0).filter_map(|(index, bytes)| {
            Some((index, state.device(c_int::from(index)).ok()?, footprint(bytes)))
        })
    };
    for (at, (_, device, bytes)) in wanted().enumerate() {
        if accounts::charge(state, device, bytes).is_err() {
            wanted().take(at).for_each(|(_, device, bytes)| accounts::uncharge(state, device, bytes));
            return OUT_OF_MEMORY;
        }
    }
    let code = make();
    if code != SUCCESS {
        wanted().for_each(|(_, device, bytes)| accounts::uncharge(state, device, bytes));
        return code;
    }
    // SAFETY: the driver has written it.
    let executable = unsafe { *out };
    for (index, device, bytes) in wanted() {
        expect(device, bytes);
        state.graph_devices.fetch_or(1 << index, Ordering::Relaxed);
        let handle = sys::key(executable);
        let entry = Entry {
            bytes,
            more: bytes,
            device: index,
            flag: stage::AHEAD,
            ..Entry::new(Space::Graph, key(handle, index))
        };
        // Without a note it stays charged ahead.
        if let Ok(Some(former)) = state.table.insert(entry) {
            expected(device, &former);
        } else {
            state.graph_count.fetch_add(1, Ordering::Relaxed);
        }
    }
    if uploads {
        ran(state, executable);
    }
    SUCCESS
}

/// Charged is so much that graphs are still to take.
fn expect(device: &Device, bytes: u64) {
    let mut account = device.graph.lock();
    account.charged = account.charged.saturating_add(bytes);
    account.ahead = account.ahead.saturating_add(bytes);
}

/// What was charged ahead for an executable graph is taken, or will not be. [`settle`] follows.
fn expected(device: &Device, entry: &Entry) {
    if entry.flag == stage::AHEAD {
        let mut account = device.graph.lock();
        account.ahead = account.ahead.saturating_sub(entry.more);
    }
}

/// Makes sure before it runs that the memory of an executable graph is charged. Says whether the
/// driver may take some.
fn about_to_run(state: &'static State, executable: Executable) -> Result<bool, accounts::Refused> {
    let mut takes = false;
    let mut result = Ok(());
    each_device(state, |device| {
        let key = key(sys::key(executable), state.index_of(device));
        let Some(entry) = state.table.get(Space::Graph, key) else { return };
        takes |= entry.flag != stage::TAKEN;
        if entry.flag == stage::TRIMMED && result.is_ok() {
            settle(state, device);
            // Graphs share what is reserved.
            let reserved = {
                let account = device.graph.lock();
                account.charged.saturating_sub(account.ahead)
            };
            let more = entry.bytes.saturating_sub(reserved);
            result = accounts::charge(state, device, more);
            if result.is_ok() {
                expect(device, more);
                state
                    .table
                    .change(Space::Graph, key, |entry| (entry.flag, entry.more) = (stage::AHEAD, more));
            }
        }
    });
    result.map(|()| takes)
}

/// The driver has taken the memory of an executable graph.
fn ran(state: &'static State, executable: Executable) {
    each_device(state, |device| {
        let key = key(sys::key(executable), state.index_of(device));
        let mut taken = None;
        state.table.change(Space::Graph, key, |entry| {
            if entry.flag == stage::AHEAD {
                taken = Some(*entry);
                entry.flag = stage::TAKEN;
            }
        });
        if let Some(entry) = taken {
            expected(device, &entry);
            settle(state, device);
        }
    });
}

/// Uploads or launches an executable graph.
fn run(
    state: &'static State,
    executable: Executable,
    (stream, null): (Stream, NullStream),
    call: impl FnOnce() -> Code,
) -> Code {
    if state.graph_count.load(Ordering::Relaxed) == 0 {
        return call();
    }
    if streams::is_captured(stream, null) {
        return call();
    }
    let Ok(waits) = about_to_run(state, executable) else { return OUT_OF_MEMORY };
    let code = call();
    if waits && code == SUCCESS {
        ran(state, executable);
    }
    code
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`, of which only the flags are read.
#[repr(C)]
pub(crate) struct InstantiateParameters {
    flags: u64,
}

/// The start of `CUgraphNodeParams`.
#[repr(C)]
pub(crate) struct NodeParameters {
    kind: c_int,
}

/// Notes whether a node allocates.
///
/// # Safety
/// Parameters are null or a node's.
unsafe fn note_node(state: &'static State, parameters: *const NodeParameters) {
    // SAFETY: as the caller says.
    if unsafe { parameters.as_ref() }.is_some_and(|node| node.kind == ALLOCATES) {
        seen(state);
    }
}

hooks! {
    /// Adds a node that allocates to a graph.
    fn cuGraphAddMemAllocNode(
        node: *mut Node, graph: Graph, dependencies: *const Node, count: usize, parameters: *mut c_void,
    ) via state::cuda, |state, real| {
        seen(state);
        real(node, graph, dependencies, count, parameters)
    }

    /// Adds a node of any kind to a graph.
    fn cuGraphAddNode(
        node: *mut Node, graph: Graph, dependencies: *const Node, count: usize, parameters: *mut NodeParameters,
    ) via state::cuda, |state, real| {
        // SAFETY: the caller passes a node's parameters.
        unsafe { note_node(state, parameters) };
        real(node, graph, dependencies, count, parameters)
    }

    /// Adds a node of any kind to a graph.
    fn cuGraphAddNode_v2(
        node: *mut Node, graph: Graph, dependencies: *const Node, edges: *const c_void, count: usize,
        parameters: *mut NodeParameters,
    ) via state::cuda, |state, real| {
        // SAFETY: the caller passes a node's parameters.
        unsafe { note_node(state, parameters) };
        real(node, graph, dependencies, edges, count, parameters)
    }

    /// Makes a graph executable.
    fn cuGraphInstantiate(
        executable: *mut Executable, graph: Graph, node: *mut Node, log: *mut c_char, size: usize,
    ) via state::cuda, |state, real| {
        instantiate(state, executable, graph, false, || real(executable, graph, node, log, size))
    }

    /// Makes a graph executable.
    fn cuGraphInstantiate_v2(
        executable: *mut Executable, graph: Graph, node: *mut Node, log: *mut c_char, size: usize,
    ) via state::cuda, |state, real| {
        instantiate(state, executable, graph, false, || real(executable, graph, node, log, size))
    }

    /// Makes a graph executable.
    fn cuGraphInstantiateWithFlags(
        executable: *mut Executable, graph: Graph, flags: u64,
    ) via state::cuda, |state, real| {
        instantiate(state, executable, graph, false, || real(executable, graph, flags))
    }

    /// Makes a graph executable.
    fn cuGraphInstantiateWithParams(
        executable: *mut Executable, graph: Graph, parameters: *mut InstantiateParameters,
    ) via state::cuda, |state, real| {
        // SAFETY: the caller passes parameters, which begin with the flags, or null.
        let uploads = unsafe { parameters.as_ref() }.is_some_and(|given| given.flags & UPLOADS != 0);
        instantiate(state, executable, graph, uploads, || real(executable, graph, parameters))
    }

    /// Makes a graph executable.
    fn cuGraphInstantiateWithParams_ptsz(
        executable: *mut Executable, graph: Graph, parameters: *mut InstantiateParameters,
    ) via state::cuda, |state, real| {
        // SAFETY: the caller passes parameters, which begin with the flags, or null.
        let uploads = unsafe { parameters.as_ref() }.is_some_and(|given| given.flags & UPLOADS != 0);
        instantiate(state, executable, graph, uploads, || real(executable, graph, parameters))
    }

    /// Makes an executable graph ready.
    fn cuGraphUpload(executable: Executable, stream: Stream) via state::cuda, |state, real| {
        run(state, executable, (stream, NullStream::Shared), || real(executable, stream))
    }

    /// Makes an executable graph ready.
    fn cuGraphUpload_ptsz(executable: Executable, stream: Stream) via state::cuda, |state, real| {
        run(state, executable, (stream, NullStream::OfThread), || real(executable, stream))
    }

    /// Launches an executable graph.
    fn cuGraphLaunch(executable: Executable, stream: Stream) via state::cuda, |state, real| {
        run(state, executable, (stream, NullStream::Shared), || real(executable, stream))
    }

    /// Launches an executable graph.
    fn cuGraphLaunch_ptsz(executable: Executable, stream: Stream) via state::cuda, |state, real| {
        run(state, executable, (stream, NullStream::OfThread), || real(executable, stream))
    }

    /// Destroys an executable graph. The driver keeps its memory until that is trimmed.
    fn cuGraphExecDestroy(executable: Executable) via state::cuda, |state, real| {
        if state.graph_count.load(Ordering::Relaxed) == 0 {
            return real(executable);
        }
        let handle = sys::key(executable);
        let mut known = [None; DEVICES];
        each_device(state, |device| {
            let index = state.index_of(device);
            if let Some(place) = known.get_mut(usize::from(index)) {
                *place = state.table.take(Space::Graph, key(handle, index));
            }
        });
        let code = real(executable);
        for (device, entry) in state.devices.iter().zip(known) {
            let Some(entry) = entry else { continue };
            if code == SUCCESS {
                state.graph_count.fetch_sub(1, Ordering::Relaxed);
                expected(device, &entry);
                settle(state, device);
            } else {
                let _put_back = state.table.insert(entry);
            }
        }
        code
    }

    /// Makes the driver give back what it keeps for graphs on a device.
    fn cuDeviceGraphMemTrim(device: c_int) via state::cuda, |state, real| {
        let code = real(device);
        if code == SUCCESS && let Ok(known) = state.device(device) {
            trimmed(state, known);
        }
        code
    }
}

//! Graphs, as far as they have memory: nodes that take it and nodes that give it back.
//!
//! As measured: memory of a graph is taken when its executable form is uploaded or first launched,
//! stays when the allocation is freed, and goes when the executable form is destroyed and the
//! device's graph memory trimmed.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::MaybeUninit;

use gpusim::driver::GRANULARITY;
use gpusim::protocol::{MemoryKind, Request};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put, put_if_wanted};
use crate::pool::PoolProperties;
use crate::session::{Backing, Block, DevicePointer, Session, opaque, ordinal, with};
use crate::stream;

/// `CUgraphNodeType`.
const KERNEL_NODE: c_int = 0;
const EMPTY_NODE: c_int = 5;
const ALLOCATION_NODE: c_int = 10;
const FREE_NODE: c_int = 11;
/// CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH and ..._UPLOAD.
const AUTO_FREE: c_ulonglong = 1;
const UPLOAD: c_ulonglong = 2;
/// `CUgraphMem_attribute`.
const USED: c_int = 0;
const USED_HIGH: c_int = 1;
const RESERVED: c_int = 2;
const RESERVED_HIGH: c_int = 3;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`, in both its versions.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationParameters {
    pool: PoolProperties,
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    address: DevicePointer,
}

/// `CUgraphNodeParams`, for nodes with memory.
#[repr(C)]
struct NodeParameters {
    kind: c_int,
    reserved: [c_int; 3],
    content: NodeContent,
    last: i64,
}

#[repr(C)]
union NodeContent {
    allocation: AllocationParameters,
    free: DevicePointer,
    room: [i64; 29],
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
struct InstantiateParameters {
    flags: c_ulonglong,
    stream: *mut c_void,
    error_node: *mut c_void,
    result: c_uint,
}

const _: () = assert!(size_of::<AllocationParameters>() == 120);
const _: () = assert!(size_of::<NodeParameters>() == 256);

/// The graphs of a process.
#[derive(Default)]
pub(crate) struct Graphs {
    /// The nodes of each.
    made: BTreeMap<usize, Vec<usize>>,
    nodes: BTreeMap<usize, Node>,
    executables: BTreeMap<usize, Executable>,
    /// By device ordinal.
    memory: BTreeMap<usize, GraphMemory>,
    /// Allocations that outlive the executable form that made them.
    orphans: BTreeMap<DevicePointer, Allocation>,
}

#[derive(Clone, Copy)]
enum Node {
    Kernel,
    Empty,
    Allocation(Allocation),
    Free(DevicePointer),
}

#[derive(Clone, Copy)]
struct Allocation {
    device: usize,
    address: DevicePointer,
    size: u64,
}

impl Allocation {
    fn on_device(&self) -> u64 {
        self.size.next_multiple_of(GRANULARITY)
    }
}

/// A graph that can be launched.
struct Executable {
    allocations: Vec<Allocation>,
    frees: Vec<DevicePointer>,
    auto_free: bool,
    /// Its memory is on the device.
    resident: bool,
    /// What it took at its last launch and nobody freed.
    live: BTreeSet<DevicePointer>,
}

/// What graphs have of a device.
#[derive(Default)]
struct GraphMemory {
    /// As the daemon numbers it, and the context that it is part of.
    memory: Option<(u64, usize)>,
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
}

exports! {
    /// Makes an empty graph.
    fn cuGraphCreate(graph: Out<*mut c_void>, flags: c_uint) {
        let out = graph.ok_or(Code::InvalidValue)?;
        if flags != 0 {
            return Err(Code::InvalidValue);
        }
        let handle = with(|session| Ok(create(session)))?;
        put(Some(out), opaque(handle))
    }

    /// Ends a graph; its executable forms go on.
    fn cuGraphDestroy(graph: *mut c_void) {
        with(|session| {
            nodes(session, graph)?;
            session.graphs.drop_graph(graph.addr());
            Ok(())
        })
    }

    /// Adds a node that takes memory; its address is known at once.
    fn cuGraphAddMemAllocNode(
        node: Out<*mut c_void>, graph: *mut c_void, _dependencies: *const *mut c_void, _count: usize,
        parameters: Option<&mut AllocationParameters>,
    ) {
        let out = node.ok_or(Code::InvalidValue)?;
        let parameters = parameters.ok_or(Code::InvalidValue)?;
        let handle = add_by(graph, parameters)?;
        put(Some(out), opaque(handle))
    }

    /// Adds a node that gives memory back.
    fn cuGraphAddMemFreeNode(
        node: Out<*mut c_void>, graph: *mut c_void, _dependencies: *const *mut c_void, _count: usize,
        address: DevicePointer,
    ) {
        let out = node.ok_or(Code::InvalidValue)?;
        let handle = with(|session| {
            nodes(session, graph)?;
            add_free(session, graph.addr(), address)
        })?;
        put(Some(out), opaque(handle))
    }

    /// Adds a node that does nothing.
    fn cuGraphAddEmptyNode(
        node: Out<*mut c_void>, graph: *mut c_void, _dependencies: *const *mut c_void, _count: usize,
    ) {
        let out = node.ok_or(Code::InvalidValue)?;
        let handle = with(|session| {
            nodes(session, graph)?;
            Ok(add(session, graph.addr(), Node::Empty))
        })?;
        put(Some(out), opaque(handle))
    }

    /// Adds a node of any kind; here one with memory, or an empty one.
    fn cuGraphAddNode(
        node: Out<*mut c_void>, graph: *mut c_void, _dependencies: *const *mut c_void, _count: usize,
        parameters: Option<&mut NodeParameters>,
    ) {
        add_any(node, graph, parameters)
    }

    /// Adds a node of any kind; here one with memory, or an empty one.
    fn cuGraphAddNode_v2(
        node: Out<*mut c_void>, graph: *mut c_void, _dependencies: *const *mut c_void,
        _edges: *const c_void, _count: usize, parameters: Option<&mut NodeParameters>,
    ) {
        add_any(node, graph, parameters)
    }

    /// The nodes of a graph: how many where there is no room for them, else as many as fit.
    fn cuGraphGetNodes(graph: *mut c_void, places: *mut MaybeUninit<*mut c_void>, count: Option<&mut usize>) {
        let count = count.ok_or(Code::InvalidValue)?;
        let known = with(|session| Ok(nodes(session, graph)?.clone()))?;
        if places.is_null() {
            *count = known.len();
            return Ok(());
        }
        // SAFETY: the caller has room for as many handles as it says, as the interface asks.
        let places = unsafe { std::slice::from_raw_parts_mut(places, *count) };
        for (place, node) in places.iter_mut().zip(known.iter().copied().chain(std::iter::repeat(0))) {
            place.write(opaque(node));
        }
        *count = known.len();
        Ok(())
    }

    /// What kind a node is.
    fn cuGraphNodeGetType(node: *mut c_void, kind: Out<c_int>) {
        let known = with(|session| {
            Ok(match find(session, node)? {
                Node::Kernel => KERNEL_NODE,
                Node::Empty => EMPTY_NODE,
                Node::Allocation(_) => ALLOCATION_NODE,
                Node::Free(_) => FREE_NODE,
            })
        })?;
        put(kind, known)
    }

    /// What a node takes.
    fn cuGraphMemAllocNodeGetParams(node: *mut c_void, parameters: Out<AllocationParameters>) {
        let out = parameters.ok_or(Code::InvalidValue)?;
        let allocation = with(|session| match find(session, node)? {
            Node::Allocation(allocation) => Ok(allocation),
            _ => Err(Code::InvalidValue),
        })?;
        put(Some(out), AllocationParameters {
            pool: PoolProperties::on_device(c_int::try_from(allocation.device).map_err(|_| Code::Unknown)?),
            access: std::ptr::null(),
            access_count: 0,
            bytes: usize::try_from(allocation.size).map_err(|_| Code::Unknown)?,
            address: allocation.address,
        })
    }

    /// What a node gives back.
    fn cuGraphMemFreeNodeGetParams(node: *mut c_void, address: Out<DevicePointer>) {
        let known = with(|session| match find(session, node)? {
            Node::Free(address) => Ok(address),
            _ => Err(Code::InvalidValue),
        })?;
        put(address, known)
    }

    /// Makes a graph's executable form.
    fn cuGraphInstantiate(
        executable: Out<*mut c_void>, graph: *mut c_void, error_node: Out<*mut c_void>, _log: *mut c_char,
        _length: usize,
    ) {
        put_if_wanted(error_node, std::ptr::null_mut());
        instantiate(executable, graph, 0).map(|_| ())
    }

    /// Makes a graph's executable form.
    fn cuGraphInstantiate_v2(
        executable: Out<*mut c_void>, graph: *mut c_void, error_node: Out<*mut c_void>, _log: *mut c_char,
        _length: usize,
    ) {
        put_if_wanted(error_node, std::ptr::null_mut());
        instantiate(executable, graph, 0).map(|_| ())
    }

    /// Makes a graph's executable form.
    fn cuGraphInstantiateWithFlags(executable: Out<*mut c_void>, graph: *mut c_void, flags: c_ulonglong) {
        instantiate(executable, graph, flags).map(|_| ())
    }

    /// Makes a graph's executable form.
    fn cuGraphInstantiateWithParams(
        executable: Out<*mut c_void>, graph: *mut c_void, parameters: Option<&mut InstantiateParameters>,
    ) {
        instantiate_with(executable, graph, parameters, false)
    }

    /// Makes a graph's executable form.
    fn cuGraphInstantiateWithParams_ptsz(
        executable: Out<*mut c_void>, graph: *mut c_void, parameters: Option<&mut InstantiateParameters>,
    ) {
        instantiate_with(executable, graph, parameters, true)
    }

    /// Takes the memory of an executable graph before its first launch.
    fn cuGraphUpload(executable: *mut c_void, stream: *mut c_void) { upload(executable, stream, false) }

    /// Takes the memory of an executable graph before its first launch.
    fn cuGraphUpload_ptsz(executable: *mut c_void, stream: *mut c_void) { upload(executable, stream, true) }

    /// Launches an executable graph.
    fn cuGraphLaunch(executable: *mut c_void, stream: *mut c_void) { launch(executable, stream, false) }

    /// Launches an executable graph.
    fn cuGraphLaunch_ptsz(executable: *mut c_void, stream: *mut c_void) { launch(executable, stream, true) }

    /// Ends an executable graph.
    fn cuGraphExecDestroy(executable: *mut c_void) {
        with(|session| {
            let gone = session.graphs.executables.remove(&executable.addr()).ok_or(Code::InvalidValue)?;
            if !gone.resident {
                return Ok(());
            }
            for allocation in gone.allocations {
                if gone.live.contains(&allocation.address) {
                    session.graphs.orphans.insert(allocation.address, allocation);
                } else if let Some(memory) = session.graphs.memory.get_mut(&allocation.device) {
                    memory.used = memory.used.saturating_sub(allocation.on_device());
                }
            }
            Ok(())
        })
    }

    /// Gives back what graphs have of a device and do not use.
    fn cuDeviceGraphMemTrim(device: c_int) {
        with(|session| {
            let device = ordinal(session, device)?;
            let Some(memory) = session.graphs.memory.get(&device) else { return Ok(()) };
            let (wanted, reserved, id) = (memory.used, memory.reserved, memory.memory);
            if let Some((id, _)) = id.filter(|_| wanted < reserved) {
                if wanted == 0 {
                    session.call(&Request::Free(id))?;
                } else {
                    session.call(&Request::Resize { id, bytes: wanted })?;
                }
            }
            if let Some(memory) = session.graphs.memory.get_mut(&device) {
                memory.reserved = wanted;
                memory.memory = memory.memory.filter(|_| wanted > 0);
            }
            Ok(())
        })
    }

    /// What graphs have of a device.
    fn cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: Out<c_ulonglong>) {
        let number = with(|session| {
            let device = ordinal(session, device)?;
            let memory = session.graphs.memory.entry(device).or_default();
            Ok(match attribute {
                USED => memory.used,
                USED_HIGH => memory.used_high,
                RESERVED => memory.reserved,
                RESERVED_HIGH => memory.reserved_high,
                _ => return Err(Code::InvalidValue),
            })
        })?;
        put(value, number)
    }

    /// Begins a high mark anew; it can be set to 0 only.
    fn cuDeviceSetGraphMemAttribute(device: c_int, attribute: c_int, value: Option<&c_ulonglong>) {
        if value != Some(&0) {
            return Err(Code::InvalidValue);
        }
        with(|session| {
            let device = ordinal(session, device)?;
            let memory = session.graphs.memory.entry(device).or_default();
            match attribute {
                USED_HIGH => memory.used_high = memory.used,
                RESERVED_HIGH => memory.reserved_high = memory.reserved,
                _ => return Err(Code::InvalidValue),
            }
            Ok(())
        })
    }
}

impl Graphs {
    /// A graph is gone, with its nodes.
    pub(crate) fn drop_graph(&mut self, graph: usize) {
        for node in self.made.remove(&graph).unwrap_or_default() {
            self.nodes.remove(&node);
        }
    }

    /// What was part of a context is gone with it.
    pub(crate) fn forget(&mut self, context: usize) {
        let gone = |memory: &GraphMemory| memory.memory.is_some_and(|(_, part_of)| part_of == context);
        let devices: Vec<usize> =
            self.memory.iter().filter(|(_, memory)| gone(memory)).map(|(device, _)| *device).collect();
        for device in devices {
            self.memory.remove(&device);
            self.orphans.retain(|_, allocation| allocation.device != device);
            for executable in self.executables.values_mut() {
                if executable.allocations.iter().any(|allocation| allocation.device == device) {
                    executable.resident = false;
                    executable.live.clear();
                }
            }
        }
    }
}

/// Makes an empty graph.
pub(crate) fn create(session: &mut Session) -> usize {
    let handle = session.new_handle();
    session.graphs.made.insert(handle, Vec::new());
    handle
}

/// Adds a launch of a kernel.
pub(crate) fn add_kernel(session: &mut Session, graph: usize) {
    add(session, graph, Node::Kernel);
}

/// Adds a node that takes memory; gives the node and the address.
pub(crate) fn add_allocation(
    session: &mut Session,
    graph: usize,
    device: usize,
    size: u64,
) -> Result<(usize, DevicePointer), Code> {
    let address = session.new_address(size)?;
    Ok((add(session, graph, Node::Allocation(Allocation { device, address, size })), address))
}

/// Adds a node that gives memory back.
pub(crate) fn add_free(session: &mut Session, graph: usize, address: DevicePointer) -> Result<usize, Code> {
    let allocated = |node: &Node| matches!(node, Node::Allocation(taken) if taken.address == address);
    let known = session.graphs.nodes.values().any(allocated)
        || session.blocks.get(&address).is_some_and(|block| matches!(block.backing, Backing::Graph(_)));
    if known { Ok(add(session, graph, Node::Free(address))) } else { Err(Code::InvalidValue) }
}

/// An allocation of a graph's ends; its memory stays with the graph.
pub(crate) fn give_back(
    session: &mut Session,
    executable: usize,
    address: DevicePointer,
) -> Result<(), Code> {
    session.blocks.remove(&address).ok_or(Code::InvalidValue)?;
    if let Some(executable) = session.graphs.executables.get_mut(&executable) {
        executable.live.remove(&address);
    }
    if let Some(orphan) = session.graphs.orphans.remove(&address)
        && let Some(memory) = session.graphs.memory.get_mut(&orphan.device)
    {
        memory.used = memory.used.saturating_sub(orphan.on_device());
    }
    Ok(())
}

fn nodes(session: &Session, graph: *mut c_void) -> Result<&Vec<usize>, Code> {
    session.graphs.made.get(&graph.addr()).ok_or(Code::InvalidValue)
}

fn find(session: &Session, node: *mut c_void) -> Result<Node, Code> {
    session.graphs.nodes.get(&node.addr()).copied().ok_or(Code::InvalidValue)
}

fn add(session: &mut Session, graph: usize, node: Node) -> usize {
    let handle = session.new_handle();
    session.graphs.nodes.insert(handle, node);
    session.graphs.made.entry(graph).or_default().push(handle);
    handle
}

fn add_by(graph: *mut c_void, parameters: &mut AllocationParameters) -> Result<usize, Code> {
    let size = u64::try_from(parameters.bytes).ok().filter(|size| *size > 0).ok_or(Code::InvalidValue)?;
    let (handle, address) = with(|session| {
        nodes(session, graph)?;
        let device = parameters.pool.device(session)?;
        add_allocation(session, graph.addr(), device, size)
    })?;
    parameters.address = address;
    Ok(handle)
}

fn add_any(
    node: Out<*mut c_void>,
    graph: *mut c_void,
    parameters: Option<&mut NodeParameters>,
) -> Result<(), Code> {
    let out = node.ok_or(Code::InvalidValue)?;
    let parameters = parameters.ok_or(Code::InvalidValue)?;
    let handle = match parameters.kind {
        // SAFETY: the kind says which member of the union the caller has filled in, and all of
        // them are numbers and pointers that any bytes are good for.
        ALLOCATION_NODE => add_by(graph, unsafe { &mut parameters.content.allocation })?,
        FREE_NODE => {
            // SAFETY: as above.
            let address = unsafe { parameters.content.free };
            with(|session| {
                nodes(session, graph)?;
                add_free(session, graph.addr(), address)
            })?
        }
        EMPTY_NODE => with(|session| {
            nodes(session, graph)?;
            Ok(add(session, graph.addr(), Node::Empty))
        })?,
        _ => return Err(Code::NotSupported),
    };
    put(Some(out), opaque(handle))
}

fn instantiate(executable: Out<*mut c_void>, graph: *mut c_void, flags: c_ulonglong) -> Result<usize, Code> {
    let out = executable.ok_or(Code::InvalidValue)?;
    let handle = with(|session| {
        let kinds = nodes(session, graph)?.iter().filter_map(|node| session.graphs.nodes.get(node).copied());
        let kinds: Vec<Node> = kinds.collect();
        let allocations = kinds.iter().filter_map(|node| match node {
            Node::Allocation(allocation) => Some(*allocation),
            _ => None,
        });
        let frees = kinds.iter().filter_map(|node| match node {
            Node::Free(address) => Some(*address),
            _ => None,
        });
        let executable = Executable {
            allocations: allocations.collect(),
            frees: frees.collect(),
            auto_free: flags & AUTO_FREE != 0,
            resident: false,
            live: BTreeSet::new(),
        };
        let handle = session.new_handle();
        session.graphs.executables.insert(handle, executable);
        Ok(handle)
    })?;
    put(Some(out), opaque(handle))?;
    Ok(handle)
}

fn instantiate_with(
    executable: Out<*mut c_void>,
    graph: *mut c_void,
    parameters: Option<&mut InstantiateParameters>,
    per_thread: bool,
) -> Result<(), Code> {
    let parameters = parameters.ok_or(Code::InvalidValue)?;
    let handle = instantiate(executable, graph, parameters.flags)?;
    (parameters.error_node, parameters.result) = (std::ptr::null_mut(), 0);
    if parameters.flags & UPLOAD != 0 {
        upload(opaque(handle), parameters.stream, per_thread)?;
    }
    Ok(())
}

fn upload(executable: *mut c_void, stream: *mut c_void, per_thread: bool) -> Result<(), Code> {
    let stream = stream::key(stream, per_thread);
    with(|session| {
        let context = stream::context_of(session, stream)?;
        make_resident(session, executable.addr(), context)
    })
}

/// Takes the memory of an executable graph, unless it has it.
fn make_resident(session: &mut Session, handle: usize, context: usize) -> Result<(), Code> {
    let executable = session.graphs.executables.get(&handle).ok_or(Code::InvalidValue)?;
    if executable.resident {
        return Ok(());
    }
    let mut needed: BTreeMap<usize, u64> = BTreeMap::new();
    for allocation in &executable.allocations {
        *needed.entry(allocation.device).or_default() += allocation.on_device();
    }
    for (device, bytes) in needed {
        reserve(session, device, bytes, context)?;
    }
    if let Some(executable) = session.graphs.executables.get_mut(&handle) {
        executable.resident = true;
    }
    Ok(())
}

fn reserve(session: &mut Session, device: usize, bytes: u64, context: usize) -> Result<(), Code> {
    let memory = session.graphs.memory.entry(device).or_default();
    let (used, reserved, id) = (memory.used.saturating_add(bytes), memory.reserved, memory.memory);
    let mut now = id;
    if used > reserved {
        now = Some(if let Some((id, part_of)) = id {
            session.call(&Request::Resize { id, bytes: used })?;
            (id, part_of)
        } else {
            let part_of = session.context(context)?.id;
            (session.allocate(device, MemoryKind::Plain, used, Some(part_of))?, context)
        });
    }
    let memory = session.graphs.memory.entry(device).or_default();
    memory.memory = now;
    memory.used = used;
    memory.used_high = memory.used_high.max(used);
    memory.reserved = reserved.max(used);
    memory.reserved_high = memory.reserved_high.max(memory.reserved);
    Ok(())
}

fn launch(executable: *mut c_void, stream: *mut c_void, per_thread: bool) -> Result<(), Code> {
    let stream = stream::key(stream, per_thread);
    with(|session| {
        let handle = executable.addr();
        let context = stream::context_of(session, stream)?;
        if stream::graph_of(session, stream)?.is_some() {
            // A graph within a graph.
            return Err(Code::NotSupported);
        }
        let known = session.graphs.executables.get(&handle).ok_or(Code::InvalidValue)?;
        let live: Vec<DevicePointer> = known.live.iter().copied().collect();
        if !live.is_empty() && !known.auto_free {
            // What it took the last time must be freed first.
            return Err(Code::InvalidValue);
        }
        for address in live {
            give_back(session, handle, address)?;
        }
        make_resident(session, handle, context)?;
        let known = session.graphs.executables.get(&handle).ok_or(Code::InvalidValue)?;
        let (allocations, frees) = (known.allocations.clone(), known.frees.clone());
        for Allocation { device, address, size } in &allocations {
            let block = Block { size: *size, backing: Backing::Graph(handle), context, device: *device };
            session.blocks.insert(*address, block);
        }
        if let Some(executable) = session.graphs.executables.get_mut(&handle) {
            executable.live = allocations.iter().map(|allocation| allocation.address).collect();
        }
        for address in frees {
            let backing = session.blocks.get(&address).map(|block| block.backing);
            if let Some(Backing::Graph(owner)) = backing {
                give_back(session, owner, address)?;
            }
        }
        Ok(())
    })
}

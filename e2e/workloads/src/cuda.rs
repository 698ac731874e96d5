//! The calls of the CUDA driver that workloads make.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::loader::{Bypass, Library, Lookup};

/// Where the driver is found on every Linux that has one.
const LIBRARY: &CStr = c"libcuda.so.1";
/// CU_MEM_ATTACH_GLOBAL.
const ATTACH_GLOBAL: c_uint = 1;
const OUT_OF_MEMORY: c_uint = 2;
/// CUDA_ERROR_NOT_FOUND, which stands for a function that the driver does not have.
const NOT_FOUND: c_uint = 500;
/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
const POSIX_DESCRIPTOR: c_int = 1;
/// The version from which on the driver's function for finding functions says why it finds none.
const FINDS_WITH_STATUS: c_int = 12_000;
/// CU_STREAM_NON_BLOCKING.
const NON_BLOCKING: c_uint = 1;
/// CU_STREAM_CAPTURE_MODE_GLOBAL.
const CAPTURE_GLOBAL: c_int = 0;
/// CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.
const LAZY_PEER_ACCESS: c_uint = 1;
/// CU_MEMPOOL_ATTR_RELEASE_THRESHOLD.
const RELEASE_THRESHOLD: c_int = 4;
/// CU_AD_FORMAT_FLOAT.
const FLOAT: c_int = 0x20;
/// What memory that is made by itself comes in.
pub(crate) const STEP: u64 = 2 << 20;
/// Rows of arrays and of pitched memory.
const ROW: usize = 64 << 10;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CudaError {
    pub(crate) call: &'static str,
    /// `CUresult`.
    pub(crate) code: c_uint,
    /// Its name, for example `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(crate) name: String,
}

impl CudaError {
    /// Whether memory was refused.
    pub(crate) fn is_refusal(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {} ({})", self.call, self.name, self.code)
    }
}

impl std::error::Error for CudaError {}

/// A context, as the driver knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContextHandle(*mut c_void);

/// Something else that the driver knows: a pool, an array, a graph.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle(*mut c_void);

/// `CUmemAllocationProp`.
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    requested_handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    win32_meta_data: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location_kind: c_int,
    location: c_int,
    flags: c_int,
}

/// `CUmemPoolProps`.
#[repr(C)]
struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    security: *mut c_void,
    max_size: usize,
    rest: [u8; 56],
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
struct NodeParameters {
    pool: PoolProperties,
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    address: c_ulonglong,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
struct ArrayShape {
    width: usize,
    height: usize,
    format: c_int,
    channels: c_uint,
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// `cuGetProcAddress` in its second form.
type Finder =
    unsafe extern "C" fn(*const c_char, *mut *const c_void, c_int, c_ulonglong, *mut c_int) -> c_uint;

/// Declares the functions: the symbol, the name and version by which the driver is asked for it,
/// and its C types. Each gets a method, and may be absent.
macro_rules! functions {
    ($($method:ident = $symbol:ident / $name:ident @ $version:literal ($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The driver, opened and initialised.
        pub(crate) struct Cuda {
            error_name: Option<unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint>,
            $($method: Option<unsafe extern "C" fn($($type),*) -> c_uint>,)*
        }

        impl Cuda {
            fn find(find: impl Fn(&CStr, &CStr, c_int) -> Option<*const c_void>) -> Self {
                Self {
                    // SAFETY: the types are those of cuda.h for this name.
                    error_name: unsafe { function(find(c"cuGetErrorName", c"cuGetErrorName", 6000)) },
                    $(
                        // SAFETY: the types are those of cuda.h for this name.
                        $method: unsafe {
                            function(find(c_name!($symbol), c_name!($name), $version))
                        },
                    )*
                }
            }

            $(
                fn $method(&self, $($argument: $type),*) -> Result<(), CudaError> {
                    let Some(function) = self.$method else { return Err(absent(stringify!($symbol))) };
                    // SAFETY: pointers among the arguments are made from references by the safe
                    // methods below, which are the only callers.
                    let code = unsafe { function($($argument),*) };
                    self.check(stringify!($symbol), code)
                }
            )*
        }
    };
}

/// A function's name as C wants it.
macro_rules! c_name {
    ($name:ident) => {
        // Every name of a function is a text without zero bytes, so this never gives another.
        CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).unwrap_or(c"")
    };
}

/// An address as a function of that type.
///
/// # Safety
/// The function at the address has that type.
unsafe fn function<F: Copy>(address: Option<*const c_void>) -> Option<F> {
    // SAFETY: a pointer to a function has the size of a pointer; the rest is the caller's promise.
    address.map(|address| unsafe { std::mem::transmute_copy(&address) })
}

functions! {
    init = cuInit / cuInit @ 2000 (flags: c_uint);
    device_get = cuDeviceGet / cuDeviceGet @ 2000 (device: *mut c_int, ordinal: c_int);
    device_uuid = cuDeviceGetUuid_v2 / cuDeviceGetUuid @ 11_040 (uuid: *mut [u8; 16], device: c_int);
    device_total = cuDeviceTotalMem_v2 / cuDeviceTotalMem @ 3020 (bytes: *mut usize, device: c_int);
    primary_retain = cuDevicePrimaryCtxRetain / cuDevicePrimaryCtxRetain @ 7000 (
        context: *mut *mut c_void, device: c_int,
    );
    primary_release = cuDevicePrimaryCtxRelease_v2 / cuDevicePrimaryCtxRelease @ 11_000 (device: c_int);
    set_current = cuCtxSetCurrent / cuCtxSetCurrent @ 4000 (context: *mut c_void);
    context_synchronize = cuCtxSynchronize / cuCtxSynchronize @ 2000 ();
    mem_info = cuMemGetInfo_v2 / cuMemGetInfo @ 3020 (free: *mut usize, total: *mut usize);
    mem_alloc = cuMemAlloc_v2 / cuMemAlloc @ 3020 (address: *mut c_ulonglong, bytes: usize);
    mem_alloc_pitch = cuMemAllocPitch_v2 / cuMemAllocPitch @ 3020 (
        address: *mut c_ulonglong, pitch: *mut usize, width: usize, height: usize, element: c_uint,
    );
    mem_alloc_managed = cuMemAllocManaged / cuMemAllocManaged @ 6000 (
        address: *mut c_ulonglong, bytes: usize, flags: c_uint,
    );
    mem_free = cuMemFree_v2 / cuMemFree @ 3020 (address: c_ulonglong);
    mem_host_alloc = cuMemHostAlloc / cuMemHostAlloc @ 2020 (
        address: *mut *mut c_void, bytes: usize, flags: c_uint,
    );
    mem_host_free = cuMemFreeHost / cuMemFreeHost @ 2000 (address: *mut c_void);
    mem_create = cuMemCreate / cuMemCreate @ 10_020 (
        handle: *mut c_ulonglong, bytes: usize, properties: *const AllocationProperties, flags: c_ulonglong,
    );
    mem_release = cuMemRelease / cuMemRelease @ 10_020 (handle: c_ulonglong);
    mem_reserve = cuMemAddressReserve / cuMemAddressReserve @ 10_020 (
        address: *mut c_ulonglong, bytes: usize, alignment: usize, hint: c_ulonglong, flags: c_ulonglong,
    );
    mem_unreserve = cuMemAddressFree / cuMemAddressFree @ 10_020 (address: c_ulonglong, bytes: usize);
    mem_map = cuMemMap / cuMemMap @ 10_020 (
        address: c_ulonglong, bytes: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong,
    );
    mem_unmap = cuMemUnmap / cuMemUnmap @ 10_020 (address: c_ulonglong, bytes: usize);
    mem_set_access = cuMemSetAccess / cuMemSetAccess @ 10_020 (
        address: c_ulonglong, bytes: usize, access: *const Access, count: usize,
    );
    mem_export = cuMemExportToShareableHandle / cuMemExportToShareableHandle @ 10_020 (
        descriptor: *mut c_int, handle: c_ulonglong, kind: c_int, flags: c_ulonglong,
    );
    mem_import = cuMemImportFromShareableHandle / cuMemImportFromShareableHandle @ 10_020 (
        handle: *mut c_ulonglong, descriptor: *mut c_void, kind: c_int,
    );
    mem_alloc_async = cuMemAllocAsync / cuMemAllocAsync @ 11_020 (
        address: *mut c_ulonglong, bytes: usize, stream: *mut c_void,
    );
    mem_free_async = cuMemFreeAsync / cuMemFreeAsync @ 11_020 (address: c_ulonglong, stream: *mut c_void);
    mem_alloc_from_pool = cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync @ 11_020 (
        address: *mut c_ulonglong, bytes: usize, pool: *mut c_void, stream: *mut c_void,
    );
    pool_create = cuMemPoolCreate / cuMemPoolCreate @ 11_020 (
        pool: *mut *mut c_void, properties: *const PoolProperties,
    );
    pool_destroy = cuMemPoolDestroy / cuMemPoolDestroy @ 11_020 (pool: *mut c_void);
    pool_trim = cuMemPoolTrimTo / cuMemPoolTrimTo @ 11_020 (pool: *mut c_void, keep: usize);
    pool_set_attribute = cuMemPoolSetAttribute / cuMemPoolSetAttribute @ 11_020 (
        pool: *mut c_void, attribute: c_int, value: *const c_void,
    );
    default_pool = cuDeviceGetDefaultMemPool / cuDeviceGetDefaultMemPool @ 11_020 (
        pool: *mut *mut c_void, device: c_int,
    );
    array_create = cuArrayCreate_v2 / cuArrayCreate @ 3020 (array: *mut *mut c_void, shape: *const ArrayShape);
    array_destroy = cuArrayDestroy / cuArrayDestroy @ 2000 (array: *mut c_void);
    graph_create = cuGraphCreate / cuGraphCreate @ 10_000 (graph: *mut *mut c_void, flags: c_uint);
    graph_destroy = cuGraphDestroy / cuGraphDestroy @ 10_000 (graph: *mut c_void);
    graph_add_allocation = cuGraphAddMemAllocNode / cuGraphAddMemAllocNode @ 11_040 (
        node: *mut *mut c_void, graph: *mut c_void, dependencies: *const *mut c_void, count: usize,
        parameters: *mut NodeParameters,
    );
    graph_instantiate = cuGraphInstantiateWithFlags / cuGraphInstantiateWithFlags @ 11_040 (
        executable: *mut *mut c_void, graph: *mut c_void, flags: c_ulonglong,
    );
    graph_launch = cuGraphLaunch / cuGraphLaunch @ 10_000 (executable: *mut c_void, stream: *mut c_void);
    executable_destroy = cuGraphExecDestroy / cuGraphExecDestroy @ 10_000 (executable: *mut c_void);
    graph_trim = cuDeviceGraphMemTrim / cuDeviceGraphMemTrim @ 11_040 (device: c_int);
    stream_create = cuStreamCreate / cuStreamCreate @ 2000 (stream: *mut *mut c_void, flags: c_uint);
    stream_destroy = cuStreamDestroy_v2 / cuStreamDestroy @ 4000 (stream: *mut c_void);
    stream_synchronize = cuStreamSynchronize / cuStreamSynchronize @ 2000 (stream: *mut c_void);
    stream_begin_capture = cuStreamBeginCapture_v2 / cuStreamBeginCapture @ 10_010 (
        stream: *mut c_void, mode: c_int,
    );
    stream_end_capture = cuStreamEndCapture / cuStreamEndCapture @ 10_000 (
        stream: *mut c_void, graph: *mut *mut c_void,
    );
    ipc_get = cuIpcGetMemHandle / cuIpcGetMemHandle @ 4010 (handle: *mut IpcHandle, address: c_ulonglong);
    ipc_open = cuIpcOpenMemHandle_v2 / cuIpcOpenMemHandle @ 11_000 (
        address: *mut c_ulonglong, handle: IpcHandle, flags: c_uint,
    );
    ipc_close = cuIpcCloseMemHandle / cuIpcCloseMemHandle @ 4010 (address: c_ulonglong);
    memset = cuMemsetD8_v2 / cuMemsetD8 @ 3020 (address: c_ulonglong, value: u8, count: usize);
}

/// A piece of memory that a script holds, and what it takes to give it back.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// By `cuMemAlloc` and its like.
    Address(u64),
    /// By `cuMemAllocAsync`, from a device's own pool.
    Async(u64),
    /// From a pool that was made for it.
    Pool(u64, Handle),
    /// Mapped, without a handle; and how much of it.
    Mapped(u64, usize),
    /// A handle, without an address.
    Physical(u64),
    Array(Handle),
    /// An executable graph, and the address that its memory has while that is not freed.
    Graph(Handle, Option<u64>, c_int),
    /// Memory of the host.
    Host(Handle),
    /// Another process's, opened.
    Opened(u64),
}

impl Cuda {
    /// Opens and initialises the driver.
    pub(crate) fn open(lookup: Lookup, bypass: Option<Bypass>) -> anyhow::Result<Self> {
        let library = Library::open(LIBRARY, bypass)?;
        let by_symbol = |symbol: &CStr| library.symbol(symbol);
        // SAFETY: the types are those of cuda.h for this name.
        let finder: Option<Finder> = unsafe { function(by_symbol(c"cuGetProcAddress_v2")) };
        let finder = finder.filter(|_| lookup == Lookup::ProcAddress).map(through);
        let cuda = match finder {
            Some(finder) => Self::find(|_, name, version| find(finder, name, version)),
            None => Self::find(|symbol, _, _| by_symbol(symbol)),
        };
        cuda.init(0)?;
        Ok(cuda)
    }

    /// Checks that a device is there.
    pub(crate) fn device(&self, ordinal: c_int) -> Result<c_int, CudaError> {
        let mut device = 0;
        self.device_get(&raw mut device, ordinal)?;
        Ok(device)
    }

    /// The identifier of a device, or of the MIG instance that stands for it.
    pub(crate) fn uuid(&self, device: c_int) -> Result<[u8; 16], CudaError> {
        let mut uuid = [0; 16];
        self.device_uuid(&raw mut uuid, device)?;
        Ok(uuid)
    }

    /// Bytes that a device says it has.
    pub(crate) fn total(&self, device: c_int) -> Result<usize, CudaError> {
        let mut bytes = 0;
        self.device_total(&raw mut bytes, device)?;
        Ok(bytes)
    }

    /// Free and whole memory of the current context's device.
    pub(crate) fn info(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        self.mem_info(&raw mut free, &raw mut total)?;
        Ok((free, total))
    }

    /// Makes the device's primary context, and makes it current.
    pub(crate) fn enter(&self, device: c_int) -> Result<ContextHandle, CudaError> {
        let mut context = std::ptr::null_mut();
        self.primary_retain(&raw mut context, device)?;
        self.set_current(context)?;
        Ok(ContextHandle(context))
    }

    /// Makes a context that this process has current.
    pub(crate) fn make_current(&self, context: ContextHandle) -> Result<(), CudaError> {
        self.set_current(context.0)
    }

    /// Ends the device's primary context and all memory in it.
    pub(crate) fn leave(&self, device: c_int) -> Result<(), CudaError> {
        self.primary_release(device)
    }

    /// Takes device memory.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Place, CudaError> {
        let mut address = 0;
        self.mem_alloc(&raw mut address, bytes)?;
        Ok(Place::Address(address))
    }

    /// Takes device memory in rows.
    pub(crate) fn allocate_pitch(&self, bytes: usize) -> Result<Place, CudaError> {
        let (mut address, mut pitch) = (0, 0);
        let rows = bytes.div_ceil(ROW);
        self.mem_alloc_pitch(&raw mut address, &raw mut pitch, ROW.min(bytes), rows, 16)?;
        Ok(Place::Address(address))
    }

    /// Takes managed memory.
    pub(crate) fn allocate_managed(&self, bytes: usize) -> Result<Place, CudaError> {
        let mut address = 0;
        self.mem_alloc_managed(&raw mut address, bytes, ATTACH_GLOBAL)?;
        Ok(Place::Address(address))
    }

    /// Takes memory of the host that the device reaches.
    pub(crate) fn allocate_host(&self, bytes: usize) -> Result<Place, CudaError> {
        let mut address = std::ptr::null_mut();
        self.mem_host_alloc(&raw mut address, bytes, 0)?;
        Ok(Place::Host(Handle(address)))
    }

    /// Takes device memory from the device's own pool.
    pub(crate) fn allocate_async(&self, bytes: usize) -> Result<Place, CudaError> {
        let mut address = 0;
        self.mem_alloc_async(&raw mut address, bytes, std::ptr::null_mut())?;
        Ok(Place::Async(address))
    }

    /// Takes device memory from a new pool.
    pub(crate) fn allocate_from_pool(&self, device: c_int, bytes: usize) -> Result<Place, CudaError> {
        let (mut pool, mut address) = (std::ptr::null_mut(), 0);
        let properties = pool_properties(device);
        self.pool_create(&raw mut pool, &raw const properties)?;
        match self.mem_alloc_from_pool(&raw mut address, bytes, pool, std::ptr::null_mut()) {
            Ok(()) => Ok(Place::Pool(address, Handle(pool))),
            Err(error) => {
                // The refusal is what matters.
                let _ = self.pool_destroy(pool);
                Err(error)
            }
        }
    }

    /// Makes memory on a device without a context; for descriptors of it too.
    pub(crate) fn create(&self, device: c_int, bytes: usize) -> Result<u64, CudaError> {
        // Pinned memory, at a device.
        let properties = AllocationProperties {
            kind: 1,
            requested_handle_types: POSIX_DESCRIPTOR,
            location_kind: 1,
            location: device,
            win32_meta_data: std::ptr::null_mut(),
            flags: [0; 8],
        };
        let mut handle = 0;
        self.mem_create(&raw mut handle, bytes, &raw const properties, 0)?;
        Ok(handle)
    }

    /// Gives memory an address, and its handle back: the memory stays as long as it is mapped.
    pub(crate) fn map(&self, device: c_int, handle: u64, bytes: usize) -> Result<Place, CudaError> {
        let mut address = 0;
        let mapped = self.mem_reserve(&raw mut address, bytes, 0, 0, 0).and_then(|()| {
            let mapped = self.mem_map(address, bytes, 0, handle, 0).and_then(|()| {
                let access = Access { location_kind: 1, location: device, flags: 3 };
                let allowed = self.mem_set_access(address, bytes, &raw const access, 1);
                allowed.inspect_err(|_| drop(self.mem_unmap(address, bytes)))
            });
            mapped.inspect_err(|_| drop(self.mem_unreserve(address, bytes)))
        });
        // Whether it is mapped now or not, the handle is not needed any more.
        let released = self.mem_release(handle);
        mapped?;
        released?;
        Ok(Place::Mapped(address, bytes))
    }

    /// A descriptor that keeps memory.
    pub(crate) fn export(&self, handle: u64) -> Result<OwnedFd, CudaError> {
        let mut descriptor = -1;
        self.mem_export(&raw mut descriptor, handle, POSIX_DESCRIPTOR, 0)?;
        // SAFETY: the driver has just made the descriptor for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// The memory that a descriptor keeps.
    pub(crate) fn import(&self, descriptor: BorrowedFd<'_>) -> Result<u64, CudaError> {
        let mut handle = 0;
        // The number stands in the place of a pointer.
        let number = usize::try_from(descriptor.as_raw_fd()).unwrap_or(usize::MAX);
        self.mem_import(&raw mut handle, std::ptr::without_provenance_mut(number), POSIX_DESCRIPTOR)?;
        Ok(handle)
    }

    /// Makes an array of that size, or of the next rows.
    pub(crate) fn create_array(&self, bytes: usize) -> Result<Place, CudaError> {
        let mut array = std::ptr::null_mut();
        // Four numbers of 32 bits an element, and as many rows as it takes.
        let width = (ROW / 16).min(bytes.div_ceil(16));
        let shape = ArrayShape { width, height: bytes.div_ceil(ROW), format: FLOAT, channels: 4 };
        self.array_create(&raw mut array, &raw const shape)?;
        Ok(Place::Array(Handle(array)))
    }

    /// Makes a graph that takes memory, and launches it.
    pub(crate) fn launch_graph(&self, device: c_int, bytes: usize) -> Result<Place, CudaError> {
        let (mut graph, mut node) = (std::ptr::null_mut(), std::ptr::null_mut());
        self.graph_create(&raw mut graph, 0)?;
        let mut parameters = NodeParameters {
            pool: pool_properties(device),
            access: std::ptr::null(),
            access_count: 0,
            bytes,
            address: 0,
        };
        let added = self.graph_add_allocation(&raw mut node, graph, std::ptr::null(), 0, &raw mut parameters);
        let launched = added.and_then(|()| self.launch(graph));
        self.graph_destroy(graph)?;
        Ok(Place::Graph(launched?, Some(parameters.address), device))
    }

    /// Captures a stream that takes memory and gives it back, and launches the graph.
    pub(crate) fn launch_captured(&self, device: c_int, bytes: usize) -> Result<Place, CudaError> {
        let (mut stream, mut graph, mut address) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        self.stream_create(&raw mut stream, NON_BLOCKING)?;
        let captured = self.stream_begin_capture(stream, CAPTURE_GLOBAL).and_then(|()| {
            let work = self.mem_alloc_async(&raw mut address, bytes, stream);
            let work = work.and_then(|()| self.mem_free_async(address, stream));
            // A capture that went wrong must be ended too.
            self.stream_end_capture(stream, &raw mut graph).and(work)
        });
        let launched = captured.and_then(|()| self.launch(graph));
        if !graph.is_null() {
            self.graph_destroy(graph)?;
        }
        self.stream_destroy(stream)?;
        Ok(Place::Graph(launched?, None, device))
    }

    /// Makes the executable form of a graph, and launches it once.
    fn launch(&self, graph: *mut c_void) -> Result<Handle, CudaError> {
        let mut executable = std::ptr::null_mut();
        self.graph_instantiate(&raw mut executable, graph, 0)?;
        let launched = self.graph_launch(executable, std::ptr::null_mut());
        let launched = launched.and_then(|()| self.stream_synchronize(std::ptr::null_mut()));
        match launched {
            Ok(()) => Ok(Handle(executable)),
            Err(error) => {
                let _ = self.executable_destroy(executable);
                Err(error)
            }
        }
    }

    /// By what another process can open an allocation.
    pub(crate) fn offer(&self, address: u64) -> Result<IpcHandle, CudaError> {
        let mut handle = IpcHandle([0; 64]);
        self.ipc_get(&raw mut handle, address)?;
        Ok(handle)
    }

    /// Opens another process's allocation.
    pub(crate) fn open_offer(&self, handle: IpcHandle) -> Result<Place, CudaError> {
        let mut address = 0;
        self.ipc_open(&raw mut address, handle, LAZY_PEER_ACCESS)?;
        Ok(Place::Opened(address))
    }

    /// Gives back whatever it is.
    pub(crate) fn give_back(&self, place: Place) -> Result<(), CudaError> {
        let nowhere = std::ptr::null_mut();
        match place {
            Place::Address(address) => self.mem_free(address),
            Place::Async(address) => self.mem_free_async(address, nowhere),
            Place::Pool(address, pool) => {
                self.mem_free_async(address, nowhere)?;
                self.pool_destroy(pool.0)
            }
            Place::Mapped(address, bytes) => {
                self.mem_unmap(address, bytes)?;
                self.mem_unreserve(address, bytes)
            }
            Place::Physical(handle) => self.mem_release(handle),
            Place::Array(array) => self.array_destroy(array.0),
            Place::Graph(executable, address, device) => {
                if let Some(address) = address {
                    self.mem_free(address)?;
                }
                self.executable_destroy(executable.0)?;
                self.graph_trim(device)
            }
            Place::Host(address) => self.mem_host_free(address.0),
            Place::Opened(address) => self.ipc_close(address),
        }
    }

    /// Waits for the device, at which pools give back what they do not use.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.context_synchronize()
    }

    /// Makes a device's own pool and its graphs give back what they do not use.
    pub(crate) fn trim(&self, device: c_int) -> Result<(), CudaError> {
        let mut pool = std::ptr::null_mut();
        self.default_pool(&raw mut pool, device)?;
        self.pool_trim(pool, 0)?;
        self.graph_trim(device)
    }

    /// Lets a device's own pool keep whatever is freed.
    pub(crate) fn retain(&self, device: c_int) -> Result<(), CudaError> {
        let mut pool = std::ptr::null_mut();
        self.default_pool(&raw mut pool, device)?;
        let everything = u64::MAX;
        self.pool_set_attribute(pool, RELEASE_THRESHOLD, (&raw const everything).cast())
    }

    /// Writes to memory, and waits until that is done.
    pub(crate) fn touch(&self, address: u64, bytes: usize) -> Result<(), CudaError> {
        self.memset(address, 1, bytes)?;
        self.context_synchronize()
    }

    fn check(&self, call: &'static str, code: c_uint) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        if let Some(error_name) = self.error_name {
            // SAFETY: the function writes one pointer, and there is room for it.
            unsafe { error_name(code, &raw mut name) };
        }
        let name = if name.is_null() {
            "an error without a name".to_owned()
        } else {
            // SAFETY: the driver's names are texts that last for ever.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        Err(CudaError { call, code, name })
    }
}

fn absent(call: &'static str) -> CudaError {
    CudaError { call, code: NOT_FOUND, name: "a function that this driver does not have".into() }
}

/// The driver's function for finding functions, as it finds itself: the CUDA runtime asks for it
/// so, and from then on asks that one.
fn through(finder: Finder) -> Finder {
    let own = find(finder, c"cuGetProcAddress", FINDS_WITH_STATUS);
    // SAFETY: for this version it is the form with a status.
    unsafe { function(own) }.unwrap_or(finder)
}

fn find(finder: Finder, name: &CStr, version: c_int) -> Option<*const c_void> {
    let (mut address, mut status) = (std::ptr::null(), 0);
    // SAFETY: the function reads a text and writes a pointer and a number, and there is room for
    // both.
    let code = unsafe { finder(name.as_ptr(), &raw mut address, version, 0, &raw mut status) };
    (code == 0 && !address.is_null()).then_some(address)
}

/// Of a pool on a device, without a limit.
fn pool_properties(device: c_int) -> PoolProperties {
    PoolProperties {
        kind: 1,
        handle_types: 0,
        location_kind: 1,
        location: device,
        security: std::ptr::null_mut(),
        max_size: 0,
        rest: [0; 56],
    }
}

//! The calls of the CUDA driver that workloads make.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;

use libloading::Library;

/// Where the driver is found on every Linux that has one.
const LIBRARY: &str = "libcuda.so.1";
/// CU_MEM_ATTACH_GLOBAL.
const ATTACH_GLOBAL: c_uint = 1;
const OUT_OF_MEMORY: c_uint = 2;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CudaError {
    call: &'static str,
    /// `CUresult`.
    code: c_uint,
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

/// Declares the functions with their C types, finds them, and gives each a method.
macro_rules! functions {
    ($($method:ident = $name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The driver, opened and initialised.
        pub(crate) struct Cuda {
            error_name: unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint,
            $($method: unsafe extern "C" fn($($type),*) -> c_uint,)*
        }

        impl Cuda {
            fn find(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are those of cuda.h for this name.
                    error_name: unsafe { *library.get(b"cuGetErrorName\0")? },
                    $(
                        // SAFETY: the types are those of cuda.h for this name.
                        $method: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes())? },
                    )*
                })
            }

            $(
                fn $method(&self, $($argument: $type),*) -> Result<(), CudaError> {
                    // SAFETY: pointers among the arguments are made from references by the safe
                    // methods below, which are the only callers.
                    let code = unsafe { (self.$method)($($argument),*) };
                    self.check(stringify!($name), code)
                }
            )*
        }
    };
}

functions! {
    init = cuInit(flags: c_uint);
    device_get = cuDeviceGet(device: *mut c_int, ordinal: c_int);
    primary_retain = cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
    primary_release = cuDevicePrimaryCtxRelease_v2(device: c_int);
    set_current = cuCtxSetCurrent(context: *mut c_void);
    context_synchronize = cuCtxSynchronize();
    mem_alloc = cuMemAlloc_v2(address: *mut c_ulonglong, bytes: usize);
    mem_alloc_managed = cuMemAllocManaged(address: *mut c_ulonglong, bytes: usize, flags: c_uint);
    mem_free = cuMemFree_v2(address: c_ulonglong);
    mem_create = cuMemCreate(
        handle: *mut c_ulonglong, bytes: usize, properties: *const AllocationProperties, flags: c_ulonglong,
    );
    mem_release = cuMemRelease(handle: c_ulonglong);
    memset = cuMemsetD8_v2(address: c_ulonglong, value: u8, count: usize);
}

impl Cuda {
    /// Opens and initialises the driver.
    pub(crate) fn open() -> anyhow::Result<Self> {
        // SAFETY: the library that carries this name is a CUDA driver, whose loading has no
        // conditions.
        let library = unsafe { Library::new(LIBRARY) }?;
        let cuda = Self::find(&library)?;
        // The functions stay in use until the process ends.
        std::mem::forget(library);
        cuda.init(0)?;
        Ok(cuda)
    }

    /// Checks that a device is there.
    pub(crate) fn device(&self, ordinal: c_int) -> Result<c_int, CudaError> {
        let mut device = 0;
        self.device_get(&raw mut device, ordinal)?;
        Ok(device)
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
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        let mut address = 0;
        self.mem_alloc(&raw mut address, bytes)?;
        Ok(address)
    }

    /// Takes managed memory.
    pub(crate) fn allocate_managed(&self, bytes: usize) -> Result<u64, CudaError> {
        let mut address = 0;
        self.mem_alloc_managed(&raw mut address, bytes, ATTACH_GLOBAL)?;
        Ok(address)
    }

    /// Gives either back.
    pub(crate) fn free(&self, address: u64) -> Result<(), CudaError> {
        self.mem_free(address)
    }

    /// Makes memory on a device without a context.
    pub(crate) fn create(&self, device: c_int, bytes: usize) -> Result<u64, CudaError> {
        // Pinned memory, at a device.
        let properties = AllocationProperties {
            kind: 1,
            requested_handle_types: 0,
            location_kind: 1,
            location: device,
            win32_meta_data: std::ptr::null_mut(),
            flags: [0; 8],
        };
        let mut handle = 0;
        self.mem_create(&raw mut handle, bytes, &raw const properties, 0)?;
        Ok(handle)
    }

    /// Gives it back.
    pub(crate) fn release(&self, handle: u64) -> Result<(), CudaError> {
        self.mem_release(handle)
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
        // SAFETY: the function writes one pointer, and there is room for it.
        unsafe { (self.error_name)(code, &raw mut name) };
        let name = if name.is_null() {
            "an error without a name".to_owned()
        } else {
            // SAFETY: the driver's names are texts that last for ever.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        Err(CudaError { call, code, name })
    }
}

//! The driver, as programs find it and as it is by itself.
//!
//! Where the guard is loaded, the loader gives its functions in place of the driver's. The driver's
//! own are found in the tables of its library, so that one process can call both in turn.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr;

use anyhow::{Result, bail, ensure};

/// Who is asked for a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The loader, as programs do.
    Found,
    /// The library's own tables.
    Own,
}

type Handle = *mut c_void;
type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_uint;
type Free = unsafe extern "C" fn(u64) -> c_uint;
type Launch = unsafe extern "C" fn(
    Handle,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Handle,
    *mut Handle,
    *mut Handle,
) -> c_uint;

/// Calls a function of the driver by its name, as a program would; fails unless it answers 0.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr => $type:ty),* $(,)?)) => {{
        let name = concat!(stringify!($name), "\0");
        let name = CStr::from_bytes_with_nul(name.as_bytes())?;
        let function = $driver.function(name, Way::Found)?;
        // SAFETY: the type is that of cuda.h for this name, and what pointers point to lives here.
        let code = unsafe {
            let function = transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> c_uint>(function);
            function($($argument),*)
        };
        ensure!(code == 0, "{} failed with CUDA error {code}", stringify!($name));
    }};
}

/// Allocation and its return.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    allocate: Allocate,
    free: Free,
}

impl Memory {
    /// Allocates so many bytes; the driver's code where it does not.
    pub(crate) fn allocate(self, bytes: usize) -> Result<u64, c_uint> {
        let mut address = 0;
        // SAFETY: the type is that of cuda.h, and there is room for the address.
        match unsafe { (self.allocate)(&raw mut address, bytes) } {
            0 => Ok(address),
            code => Err(code),
        }
    }

    /// Gives memory back.
    pub(crate) fn free(self, address: u64) -> Result<(), c_uint> {
        // SAFETY: as above. An address that is not the driver's is refused by the driver.
        match unsafe { (self.free)(address) } {
            0 => Ok(()),
            code => Err(code),
        }
    }
}

/// `CUmemAllocationProp`: pinned memory of the first device.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    windows: usize,
    flags: [u8; 8],
}

/// A device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) uuid: [u8; 16],
    pub(crate) total: u64,
}

/// A kernel that does nothing, and a graph of some of them.
#[derive(Debug)]
pub(crate) struct Kernels {
    kernel: Handle,
    launch: Launch,
    stream: Handle,
    graph: Handle,
}

/// Kernels in a graph.
pub(crate) const NODES: usize = 8;

/// A kernel that does nothing, for any device of the last years.
const KERNEL: &CStr =
    c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing()\n{\n ret;\n}\n";

/// The driver's library, loaded as a program loads it.
#[derive(Debug)]
pub(crate) struct Driver {
    handle: Handle,
    own: HashMap<&'static CStr, usize>,
}

impl Driver {
    /// Loads the library.
    pub(crate) fn open() -> Result<Self> {
        // SAFETY: libraries of drivers have no conditions for being loaded.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        ensure!(!handle.is_null(), "libcuda.so.1 cannot be loaded: {}", last_error());
        Ok(Self { handle, own: HashMap::new() })
    }

    /// Opens the driver for this process.
    pub(crate) fn init(&self) -> Result<()> {
        call!(self, cuInit(0 => c_uint));
        Ok(())
    }

    /// Makes the primary context of the first device current.
    pub(crate) fn context(&self) -> Result<()> {
        let mut context: Handle = ptr::null_mut();
        call!(self, cuDevicePrimaryCtxRetain(&raw mut context => *mut Handle, 0 => c_int));
        call!(self, cuCtxSetCurrent(context => Handle));
        Ok(())
    }

    /// Takes memory of the first device, until the process ends. It needs no context, of which a device
    /// does not hold hundreds.
    pub(crate) fn create(&self, bytes: usize) -> Result<()> {
        let properties =
            Properties { kind: 1, handle_types: 0, location_kind: 1, location: 0, windows: 0, flags: [0; 8] };
        let mut made = 0_u64;
        call!(self, cuMemCreate(
            &raw mut made => *mut u64, bytes => usize, &raw const properties => *const Properties, 0 => u64
        ));
        Ok(())
    }

    /// Waits until the device has done all that it was asked for.
    pub(crate) fn synchronize(&self) -> Result<()> {
        call!(self, cuCtxSynchronize());
        Ok(())
    }

    /// What the driver says that the first device has.
    pub(crate) fn total(&self) -> Result<u64> {
        let mut total = 0_usize;
        call!(self, cuDeviceTotalMem_v2(&raw mut total => *mut usize, 0 => c_int));
        Ok(u64::try_from(total)?)
    }

    /// Every device.
    pub(crate) fn devices(&self) -> Result<Vec<Device>> {
        let mut count: c_int = 0;
        call!(self, cuDeviceGetCount(&raw mut count => *mut c_int));
        let mut devices = Vec::new();
        for ordinal in 0..count {
            let mut uuid = [0_u8; 16];
            let mut total = 0_usize;
            // The newer form knows MIG instances.
            if self.function(c"cuDeviceGetUuid_v2", Way::Found).is_ok() {
                call!(self, cuDeviceGetUuid_v2(&raw mut uuid => *mut [u8; 16], ordinal => c_int));
            } else {
                call!(self, cuDeviceGetUuid(&raw mut uuid => *mut [u8; 16], ordinal => c_int));
            }
            call!(self, cuDeviceTotalMem_v2(&raw mut total => *mut usize, ordinal => c_int));
            devices.push(Device { uuid, total: u64::try_from(total)? });
        }
        Ok(devices)
    }

    /// Allocation and its return, found in this way.
    pub(crate) fn memory(&self, way: Way) -> Result<Memory> {
        let allocate = self.function(c"cuMemAlloc_v2", way)?;
        let free = self.function(c"cuMemFree_v2", way)?;
        // SAFETY: the types are those of cuda.h for these names.
        let (allocate, free) = unsafe {
            (transmute::<*const c_void, Allocate>(allocate), transmute::<*const c_void, Free>(free))
        };
        Ok(Memory { allocate, free })
    }

    /// Whether something stands between this program and the driver's allocations.
    pub(crate) fn is_guarded(&self) -> Result<bool> {
        Ok(self.function(c"cuMemAlloc_v2", Way::Found)? != self.function(c"cuMemAlloc_v2", Way::Own)?)
    }

    /// Loads a kernel, and records a graph.
    pub(crate) fn kernels(&self) -> Result<Kernels> {
        let (mut module, mut kernel, mut stream): (Handle, Handle, Handle) =
            (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        call!(self, cuModuleLoadData(&raw mut module => *mut Handle, KERNEL.as_ptr().cast() => *const c_void));
        call!(self, cuModuleGetFunction(
            &raw mut kernel => *mut Handle, module => Handle, c"nothing".as_ptr() => *const c_char
        ));
        call!(self, cuStreamCreate(&raw mut stream => *mut Handle, 1 => c_uint));
        let launch = self.function(c"cuLaunchKernel", Way::Found)?;
        // SAFETY: the type is that of cuda.h for this name.
        let launch = unsafe { transmute::<*const c_void, Launch>(launch) };
        let mut kernels = Kernels { kernel, launch, stream, graph: ptr::null_mut() };
        kernels.launch(1)?;
        let mut graph: Handle = ptr::null_mut();
        // The capture concerns this thread alone.
        call!(self, cuStreamBeginCapture_v2(stream => Handle, 1 => c_uint));
        kernels.launch(NODES)?;
        call!(self, cuStreamEndCapture(stream => Handle, &raw mut graph => *mut Handle));
        let mut executable: Handle = ptr::null_mut();
        call!(self, cuGraphInstantiateWithFlags(
            &raw mut executable => *mut Handle, graph => Handle, 0 => u64
        ));
        kernels.graph = executable;
        Ok(kernels)
    }

    /// Launches the graph so many times.
    pub(crate) fn launch_graph(&self, kernels: &Kernels, times: usize) -> Result<()> {
        let function = self.function(c"cuGraphLaunch", Way::Found)?;
        // SAFETY: the type is that of cuda.h for this name.
        let function =
            unsafe { transmute::<*const c_void, unsafe extern "C" fn(Handle, Handle) -> c_uint>(function) };
        for _ in 0..times {
            // SAFETY: both handles are alive.
            let code = unsafe { function(kernels.graph, kernels.stream) };
            ensure!(code == 0, "cuGraphLaunch failed with CUDA error {code}");
        }
        Ok(())
    }

    fn function(&self, name: &CStr, way: Way) -> Result<*const c_void> {
        let address = match way {
            // SAFETY: the handle is open, and stays so.
            Way::Found => unsafe { libc::dlsym(self.handle, name.as_ptr()) }.cast_const(),
            Way::Own => {
                let address = self.own.get(name).copied().unwrap_or(0);
                ptr::with_exposed_provenance(address)
            }
        };
        ensure!(!address.is_null(), "the driver's library has no {}", name.to_string_lossy());
        Ok(address)
    }

    /// Looks up what the library itself has under these names.
    pub(crate) fn look_up(&mut self, names: &[&'static CStr]) -> Result<()> {
        // SAFETY: the handle is open, and stays so.
        self.own = unsafe { own_symbols(self.handle, names) }?;
        Ok(())
    }
}

impl Kernels {
    /// Launches the kernel so many times.
    pub(crate) fn launch(&self, times: usize) -> Result<()> {
        for _ in 0..times {
            // SAFETY: the type is that of cuda.h, and the kernel takes no arguments.
            let code = unsafe {
                (self.launch)(self.kernel, 1, 1, 1, 1, 1, 1, 0, self.stream, ptr::null_mut(), ptr::null_mut())
            };
            ensure!(code == 0, "cuLaunchKernel failed with CUDA error {code}");
        }
        Ok(())
    }
}

fn last_error() -> String {
    // SAFETY: the text is the loader's, until this thread's next call to it.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "the loader does not say why".to_owned();
    }
    // SAFETY: not null, so a text that ends in a zero byte.
    unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned()
}

/// The beginning of `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
}

/// `Elf64_Dyn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// `Elf64_Sym`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

/// Where a library keeps its symbols.
#[derive(Clone, Copy, Default)]
struct Tables {
    texts: usize,
    symbols: usize,
    hash: usize,
}

const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// The addresses of functions by the tables of a loaded library.
///
/// # Safety
/// The handle is open, and stays so.
unsafe fn own_symbols(handle: Handle, names: &[&'static CStr]) -> Result<HashMap<&'static CStr, usize>> {
    let mut map: *const LinkMap = ptr::null();
    // SAFETY: the request writes one pointer, and there is room for it.
    let code = unsafe { libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if code != 0 || map.is_null() {
        bail!("the loader does not describe the driver's library: {}", last_error());
    }
    // SAFETY: the loader's description of an open library.
    let LinkMap { base, mut dynamic, .. } = unsafe { map.read() };
    let mut tables = Tables::default();
    loop {
        // SAFETY: the list ends in an entry of tag 0, and is mapped as long as the library is.
        let entry = unsafe { dynamic.read() };
        // The loader has added the base already, on most machines.
        let address = if entry.value < base { entry.value + base } else { entry.value };
        match entry.tag {
            0 => break,
            DT_STRTAB => tables.texts = address,
            DT_SYMTAB => tables.symbols = address,
            DT_GNU_HASH => tables.hash = address,
            _ => {}
        }
        // SAFETY: not the last entry.
        dynamic = unsafe { dynamic.add(1) };
    }
    ensure!(
        tables.texts != 0 && tables.symbols != 0 && tables.hash != 0,
        "the driver's library has no symbols"
    );
    let mut found = HashMap::new();
    for name in names {
        // SAFETY: these are the tables of a loaded library.
        if let Some(value) = unsafe { tables.find(name) } {
            found.insert(*name, base + value);
        }
    }
    Ok(found)
}

impl Tables {
    /// The value of a symbol that the library defines, by its hash table.
    ///
    /// # Safety
    /// The tables are those of a library that is loaded.
    unsafe fn find(self, name: &CStr) -> Option<usize> {
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381_u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
        let numbers: *const u32 = ptr::with_exposed_provenance(self.hash);
        // SAFETY: the table begins with these numbers; then come the filter, in words of 64 bits, the
        // buckets, and a chain of hashes for each symbol from `first` on, whose last has its lowest
        // bit set.
        unsafe {
            let buckets = numbers.read();
            let first = numbers.add(1).read();
            let words = usize::try_from(numbers.add(2).read()).ok()?;
            let lists = numbers.add(4 + 2 * words);
            let chains = lists.add(usize::try_from(buckets).ok()?);
            let mut index = lists.add(usize::try_from(hash.checked_rem(buckets)?).ok()?).read();
            while index >= first && index != 0 {
                let link = chains.add(usize::try_from(index - first).ok()?).read();
                if link | 1 == hash | 1 && self.is_named(index, name)? {
                    return self.value(index);
                }
                if link & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
        None
    }

    /// # Safety
    /// As [`Tables::find`]; the library has a symbol of this number.
    unsafe fn symbol(self, index: u32) -> Option<Symbol> {
        let symbols: *const Symbol = ptr::with_exposed_provenance(self.symbols);
        // SAFETY: as the caller says.
        Some(unsafe { symbols.add(usize::try_from(index).ok()?).read() })
    }

    /// # Safety
    /// As [`Tables::symbol`].
    unsafe fn is_named(self, index: u32, name: &CStr) -> Option<bool> {
        let texts: *const c_char = ptr::with_exposed_provenance(self.texts);
        // SAFETY: as the caller says; names are texts in the table of texts.
        unsafe {
            let symbol = self.symbol(index)?;
            Some(CStr::from_ptr(texts.add(usize::try_from(symbol.name).ok()?)) == name)
        }
    }

    /// # Safety
    /// As [`Tables::symbol`].
    unsafe fn value(self, index: u32) -> Option<usize> {
        // SAFETY: as the caller says.
        let symbol = unsafe { self.symbol(index) }?;
        (symbol.section != 0 && symbol.value != 0).then_some(symbol.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_librarys_own_tables_say_what_the_loader_says() {
        // The C library is loaded in every program.
        // SAFETY: it is loaded already, and has no conditions.
        let handle = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOW) };
        let mut library = Driver { handle, own: HashMap::new() };
        let names = [c"getpid", c"malloc", c"open", c"no_such_function"];
        library.look_up(&names).unwrap();
        for name in [c"getpid", c"malloc", c"open"] {
            let (found, own) = (library.function(name, Way::Found), library.function(name, Way::Own));
            assert_eq!(found.unwrap(), own.unwrap(), "{}", name.to_string_lossy());
        }
        assert!(library.function(c"no_such_function", Way::Own).is_err());
    }
}

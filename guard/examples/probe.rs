//! A program that calls the driver as it is told, a line at a time, and says what came of it. The
//! tests run it under the guard; it knows nothing of that.
//!
//! The argument says how it finds functions: `handle` (`dlsym` on the library), `default` (`dlsym` on
//! everything that is loaded, as a linked program would), `getproc` (by `cuGetProcAddress`), `oldproc` (by
//! its first form, as programs of CUDA 11.4).
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "a tool for tests: what is not there is an error anyway"
)]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::{BufRead, Write};
use std::sync::{Barrier, Mutex};
use std::time::Instant;

unsafe extern "C" {
    fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void;
    fn dlclose(handle: *mut c_void) -> c_int;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
    fn dladdr(address: *const c_void, info: *mut Place) -> c_int;
    fn fork() -> c_int;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(code: c_int) -> !;
    fn close(descriptor: c_int) -> c_int;
    fn getpid() -> c_int;
    fn syscall(number: std::ffi::c_long, ...) -> std::ffi::c_long;
}

/// `Dl_info`
#[repr(C)]
struct Place {
    file: *const c_char,
    base: *mut c_void,
    name: *const c_char,
    address: *mut c_void,
}

/// `RTLD_NOW | RTLD_GLOBAL`
const OPEN: c_int = 2 | 0x100;
const NEXT: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

type Handle = *mut c_void;
type FirstGetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_uint;
type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_uint;

#[derive(Clone, Copy, PartialEq)]
enum Lookup {
    Handle,
    Default,
    GetProc,
    OldProc,
}

#[derive(Clone, Copy)]
struct Driver {
    cuda: usize,
    nvml: usize,
    lookup: Lookup,
}

impl Driver {
    fn library(self, name: &str) -> Handle {
        std::ptr::with_exposed_provenance_mut(if name.starts_with("nvml") { self.nvml } else { self.cuda })
    }

    /// A function by its exported name.
    fn find(self, name: &str) -> *mut c_void {
        let text = CString::new(name).unwrap();
        // SAFETY: lookups of a text.
        unsafe {
            match self.lookup {
                Lookup::Default => dlsym(std::ptr::null_mut(), text.as_ptr()),
                Lookup::GetProc if name.starts_with("cu") => self.get_proc(name),
                Lookup::OldProc if name.starts_with("cu") => self.first_get_proc(name),
                _ => dlsym(self.library(name), text.as_ptr()),
            }
        }
    }

    /// A function by the name that programs write, in its newest form.
    unsafe fn get_proc(self, name: &str) -> *mut c_void {
        let (base, flags) = base(name);
        let mut found = std::ptr::null_mut();
        let mut status = 0;
        // SAFETY: the type is that of cuda.h.
        unsafe {
            let first = dlsym(self.library("cu"), c"cuGetProcAddress_v2".as_ptr());
            let first = std::mem::transmute::<*mut c_void, GetProcAddress>(first);
            // As the CUDA runtime does: the function that it uses is found by the one before.
            let mut second = std::ptr::null_mut();
            assert_eq!(first(c"cuGetProcAddress".as_ptr(), &raw mut second, 12_000, 0, &raw mut status), 0);
            let second = std::mem::transmute::<*mut c_void, GetProcAddress>(second);
            second(base.as_ptr(), &raw mut found, 13_000, flags, &raw mut status);
        }
        found
    }

    /// The same as programs do that were built when there was only the first form.
    unsafe fn first_get_proc(self, name: &str) -> *mut c_void {
        const VERSION: c_int = 11_040;
        let (base, flags) = base(name);
        let mut found = std::ptr::null_mut();
        // SAFETY: the type is that of cuda.h.
        unsafe {
            let first = dlsym(self.library("cu"), c"cuGetProcAddress".as_ptr());
            let first = std::mem::transmute::<*mut c_void, FirstGetProcAddress>(first);
            let mut second = std::ptr::null_mut();
            assert_eq!(first(c"cuGetProcAddress".as_ptr(), &raw mut second, VERSION, 0), 0);
            let second = std::mem::transmute::<*mut c_void, FirstGetProcAddress>(second);
            second(base.as_ptr(), &raw mut found, VERSION, flags);
        }
        found
    }
}

/// The name that programs write for a function, and the flags for its form.
fn base(name: &str) -> (CString, u64) {
    let (base, flags) = match name.strip_suffix("_ptsz") {
        Some(base) => (base, 2),
        None => (name, 0),
    };
    let base = base.trim_end_matches("_v2").trim_end_matches("_v3").trim_end_matches("_v4");
    (CString::new(base).unwrap(), flags)
}

/// Calls a function of the driver; 500 where there is none.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr => $type:ty),* $(,)?)) => {{
        let function = $driver.find(stringify!($name));
        if function.is_null() {
            500
        } else {
            // SAFETY: the type is that of cuda.h or nvml.h for this name.
            unsafe {
                let function = std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_uint>(function);
                function($($argument),*)
            }
        }
    }};
}

#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    windows: usize,
    flags: [u8; 8],
}

#[repr(C)]
struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    security: usize,
    max_size: usize,
    rest: [u8; 56],
}

#[repr(C)]
struct AllocationNode {
    pool: PoolProperties,
    access: usize,
    access_count: usize,
    bytes: usize,
    pointer: u64,
}

#[repr(C)]
struct ArrayShape {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

#[repr(C)]
struct ArrayShape3 {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle([u8; 64]);

#[repr(C)]
struct Memory2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

fn size(text: &str) -> u64 {
    let (digits, shift) = match text.as_bytes().last().unwrap() {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().unwrap() << shift
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

struct Probe {
    driver: Driver,
    device: c_int,
    /// Pointers, handles and descriptors by the names that the tests give them.
    named: HashMap<String, u64>,
    stream: Handle,
}

fn handle(number: u64) -> Handle {
    std::ptr::with_exposed_provenance_mut(number as usize)
}

fn number(handle: Handle) -> u64 {
    handle.expose_provenance() as u64
}

impl Probe {
    fn get(&self, name: &str) -> u64 {
        *self.named.get(name).unwrap_or_else(|| panic!("nothing is named {name}"))
    }

    /// Notes what a call made, if it succeeded.
    fn note(&mut self, code: c_uint, name: &str, value: u64) -> String {
        if code == 0 {
            self.named.insert(name.to_owned(), value);
        }
        code.to_string()
    }

    #[allow(clippy::too_many_lines, reason = "a list of commands, one after the other")]
    fn run(&mut self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        let driver = self.driver;
        let at = |index: usize| words[index];
        match words[0] {
            "init" => call!(driver, cuInit(0 => c_uint)).to_string(),
            "device" => {
                self.device = at(1).parse().unwrap();
                "0".to_owned()
            }
            "retain" => {
                let mut context = std::ptr::null_mut();
                let code = call!(driver, cuDevicePrimaryCtxRetain(&raw mut context => *mut Handle, self.device => c_int));
                if code == 0 {
                    call!(driver, cuCtxSetCurrent(context => Handle));
                }
                code.to_string()
            }
            "leave" => call!(driver, cuDevicePrimaryCtxRelease_v2(self.device => c_int)).to_string(),
            "reset" => call!(driver, cuDevicePrimaryCtxReset_v2(self.device => c_int)).to_string(),
            "context" => {
                let mut context = std::ptr::null_mut();
                let code = call!(driver, cuCtxCreate_v2(&raw mut context => *mut Handle, 0 => c_uint, self.device => c_int));
                self.note(code, at(1), number(context))
            }
            "endcontext" => call!(driver, cuCtxDestroy_v2(handle(self.get(at(1))) => Handle)).to_string(),
            "nocontext" => call!(driver, cuCtxSetCurrent(std::ptr::null_mut() => Handle)).to_string(),
            "limit" => {
                let (limit, value) = (at(1).parse().unwrap(), size(at(2)) as usize);
                call!(driver, cuCtxSetLimit(limit => c_int, value => usize)).to_string()
            }
            "alloc" => {
                let mut pointer = 0;
                let code =
                    call!(driver, cuMemAlloc_v2(&raw mut pointer => *mut u64, size(at(2)) as usize => usize));
                self.note(code, at(1), pointer)
            }
            "allocnull" => {
                call!(driver, cuMemAlloc_v2(std::ptr::null_mut() => *mut u64, size(at(1)) as usize => usize))
                    .to_string()
            }
            "pitch" => {
                let (mut pointer, mut pitch) = (0, 0);
                let code = call!(driver, cuMemAllocPitch_v2(
                    &raw mut pointer => *mut u64, &raw mut pitch => *mut usize, size(at(2)) as usize => usize,
                    size(at(3)) as usize => usize, 4 => c_uint
                ));
                self.note(code, at(1), pointer)
            }
            "managed" => {
                let mut pointer = 0;
                let code = call!(driver, cuMemAllocManaged(
                    &raw mut pointer => *mut u64, size(at(2)) as usize => usize, 1 => c_uint
                ));
                self.note(code, at(1), pointer)
            }
            "ismanaged" => {
                let mut managed: c_int = -1;
                let code = call!(driver, cuPointerGetAttribute(
                    (&raw mut managed).cast() => *mut c_void, 8 => c_int, self.get(at(1)) => u64
                ));
                format!("{code} {managed}")
            }
            "free" => call!(driver, cuMemFree_v2(self.get(at(1)) => u64)).to_string(),
            "create" => {
                let (kind, location) = match words.get(3) {
                    Some(&"host") => (2, 0),
                    Some(other) => (1, other.parse().unwrap()),
                    None => (1, self.device),
                };
                let properties = Properties {
                    kind: 1,
                    handle_types: 1,
                    location_kind: kind,
                    location,
                    windows: 0,
                    flags: [0; 8],
                };
                let mut made = 0;
                let code = call!(driver, cuMemCreate(
                    &raw mut made => *mut u64, size(at(2)) as usize => usize, &raw const properties => *const Properties,
                    0 => u64
                ));
                self.note(code, at(1), made)
            }
            "release" => call!(driver, cuMemRelease(self.get(at(1)) => u64)).to_string(),
            "reserve" => {
                let mut address = 0;
                let code = call!(driver, cuMemAddressReserve(
                    &raw mut address => *mut u64, size(at(2)) as usize => usize, 0 => usize, 0 => u64, 0 => u64
                ));
                self.note(code, at(1), address)
            }
            // map ADDRESS OFFSET HANDLE SIZE
            "map" => call!(driver, cuMemMap(
                self.get(at(1)) + size(at(2)) => u64, size(at(4)) as usize => usize, 0 => usize,
                self.get(at(3)) => u64, 0 => u64
            ))
            .to_string(),
            "unmap" => call!(driver, cuMemUnmap(
                self.get(at(1)) + size(at(2)) => u64, size(at(3)) as usize => usize
            ))
            .to_string(),
            "handleof" => {
                let mut found = 0;
                let address = handle(self.get(at(2)) + size(at(3)));
                let code =
                    call!(driver, cuMemRetainAllocationHandle(&raw mut found => *mut u64, address => Handle));
                self.note(code, at(1), found)
            }
            "export" => {
                let mut descriptor: c_int = -1;
                let code = call!(driver, cuMemExportToShareableHandle(
                    (&raw mut descriptor).cast() => *mut c_void, self.get(at(2)) => u64, 1 => c_int, 0 => u64
                ));
                self.note(code, at(1), u64::from(descriptor.unsigned_abs()))
            }
            "import" => {
                let mut made = 0;
                let code = call!(driver, cuMemImportFromShareableHandle(
                    &raw mut made => *mut u64, handle(self.get(at(2))) => Handle, 1 => c_int
                ));
                self.note(code, at(1), made)
            }
            "number" => self.get(at(1)).to_string(),
            "name" => {
                self.named.insert(at(1).to_owned(), at(2).parse().unwrap());
                "0".to_owned()
            }
            // fetch NAME PROCESS DESCRIPTOR: a duplicate of another process's descriptor
            "fetch" => {
                const PIDFD_OPEN: std::ffi::c_long = 434;
                const PIDFD_GETFD: std::ffi::c_long = 438;
                let (process, descriptor): (c_int, c_int) = (at(2).parse().unwrap(), at(3).parse().unwrap());
                // SAFETY: two queries of the kernel.
                let fetched = unsafe {
                    let process = syscall(PIDFD_OPEN, process, 0 as c_int);
                    let fetched = syscall(PIDFD_GETFD, process, descriptor, 0 as c_int);
                    close(process as c_int);
                    fetched
                };
                self.note(c_uint::from(fetched < 0), at(1), fetched.unsigned_abs())
            }
            // SAFETY: the tests name a descriptor that is theirs.
            "close" => unsafe { close(self.get(at(1)) as c_int) }.to_string(),
            "async" => {
                let mut pointer = 0;
                let code = call!(driver, cuMemAllocAsync(
                    &raw mut pointer => *mut u64, size(at(2)) as usize => usize, self.stream => Handle
                ));
                self.note(code, at(1), pointer)
            }
            "asyncfree" => {
                call!(driver, cuMemFreeAsync(self.get(at(1)) => u64, self.stream => Handle)).to_string()
            }
            "pool" => {
                let properties = PoolProperties {
                    kind: 1,
                    handle_types: 0,
                    location_kind: 1,
                    location: self.device,
                    security: 0,
                    max_size: 0,
                    rest: [0; 56],
                };
                let mut pool = std::ptr::null_mut();
                let code = call!(driver, cuMemPoolCreate(
                    &raw mut pool => *mut Handle, &raw const properties => *const PoolProperties
                ));
                self.note(code, at(1), number(pool))
            }
            // keep POOL BYTES: what it keeps at a synchronisation
            "keep" => {
                let mut bytes = size(at(2));
                let pool = self.pool(at(1));
                call!(driver, cuMemPoolSetAttribute(
                    pool => Handle, 4 => c_int, (&raw mut bytes).cast() => *mut c_void
                ))
                .to_string()
            }
            "reserved" => {
                let mut bytes = 0_u64;
                let pool = self.pool(at(1));
                let code = call!(driver, cuMemPoolGetAttribute(
                    pool => Handle, 5 => c_int, (&raw mut bytes).cast() => *mut c_void
                ));
                format!("{code} {bytes}")
            }
            "frompool" => {
                let mut pointer = 0;
                let code = call!(driver, cuMemAllocFromPoolAsync(
                    &raw mut pointer => *mut u64, size(at(3)) as usize => usize, handle(self.get(at(2))) => Handle,
                    self.stream => Handle
                ));
                self.note(code, at(1), pointer)
            }
            "endpool" => call!(driver, cuMemPoolDestroy(handle(self.get(at(1))) => Handle)).to_string(),
            "trim" => {
                let pool = self.pool(at(1));
                call!(driver, cuMemPoolTrimTo(pool => Handle, 0 => usize)).to_string()
            }
            "stream" => {
                let mut stream = std::ptr::null_mut();
                let code = call!(driver, cuStreamCreate(&raw mut stream => *mut Handle, 1 => c_uint));
                self.stream = stream;
                code.to_string()
            }
            "sync" => call!(driver, cuStreamSynchronize(self.stream => Handle)).to_string(),
            "array" => {
                let shape = ArrayShape {
                    width: size(at(2)) as usize,
                    height: size(at(3)) as usize,
                    format: 0x20,
                    channels: 4,
                };
                let mut array = std::ptr::null_mut();
                let code = call!(driver, cuArrayCreate_v2(
                    &raw mut array => *mut Handle, &raw const shape => *const ArrayShape
                ));
                self.note(code, at(1), number(array))
            }
            "endarray" => call!(driver, cuArrayDestroy(handle(self.get(at(1))) => Handle)).to_string(),
            "mipmap" => {
                let shape = ArrayShape3 {
                    width: size(at(2)) as usize,
                    height: size(at(3)) as usize,
                    depth: 0,
                    format: 0x20,
                    channels: 4,
                    flags: 0,
                };
                let mut array = std::ptr::null_mut();
                let code = call!(driver, cuMipmappedArrayCreate(
                    &raw mut array => *mut Handle, &raw const shape => *const ArrayShape3, 4 => c_uint
                ));
                self.note(code, at(1), number(array))
            }
            "endmipmap" => {
                call!(driver, cuMipmappedArrayDestroy(handle(self.get(at(1))) => Handle)).to_string()
            }
            "graph" => {
                let mut graph = std::ptr::null_mut();
                let code = call!(driver, cuGraphCreate(&raw mut graph => *mut Handle, 0 => c_uint));
                self.note(code, at(1), number(graph))
            }
            // node GRAPH NAME BYTES: a node that allocates
            "node" => {
                let mut parameters = AllocationNode {
                    pool: PoolProperties {
                        kind: 1,
                        handle_types: 0,
                        location_kind: 1,
                        location: self.device,
                        security: 0,
                        max_size: 0,
                        rest: [0; 56],
                    },
                    access: 0,
                    access_count: 0,
                    bytes: size(at(3)) as usize,
                    pointer: 0,
                };
                let mut node = std::ptr::null_mut();
                let code = call!(driver, cuGraphAddMemAllocNode(
                    &raw mut node => *mut Handle, handle(self.get(at(1))) => Handle, std::ptr::null() => *const Handle,
                    0 => usize, &raw mut parameters => *mut AllocationNode
                ));
                self.named.insert(format!("{}.node", at(2)), number(node));
                self.note(code, at(2), parameters.pointer)
            }
            // freenode GRAPH NAME: frees what the node of that name allocates
            "freenode" => {
                let before = handle(self.get(&format!("{}.node", at(2))));
                let mut node = std::ptr::null_mut();
                call!(driver, cuGraphAddMemFreeNode(
                    &raw mut node => *mut Handle, handle(self.get(at(1))) => Handle, &raw const before => *const Handle,
                    1 => usize, self.get(at(2)) => u64
                ))
                .to_string()
            }
            "instantiate" => {
                let mut executable = std::ptr::null_mut();
                let code = call!(driver, cuGraphInstantiateWithFlags(
                    &raw mut executable => *mut Handle, handle(self.get(at(2))) => Handle, 0 => u64
                ));
                self.note(code, at(1), number(executable))
            }
            "upload" => {
                call!(driver, cuGraphUpload(handle(self.get(at(1))) => Handle, self.stream => Handle))
                    .to_string()
            }
            "launch" => {
                call!(driver, cuGraphLaunch(handle(self.get(at(1))) => Handle, self.stream => Handle))
                    .to_string()
            }
            "endexecutable" => {
                call!(driver, cuGraphExecDestroy(handle(self.get(at(1))) => Handle)).to_string()
            }
            "graphtrim" => call!(driver, cuDeviceGraphMemTrim(self.device => c_int)).to_string(),
            "begincapture" => {
                call!(driver, cuStreamBeginCapture_v2(self.stream => Handle, 0 => c_int)).to_string()
            }
            "endcapture" => {
                let mut graph = std::ptr::null_mut();
                let code =
                    call!(driver, cuStreamEndCapture(self.stream => Handle, &raw mut graph => *mut Handle));
                self.note(code, at(1), number(graph))
            }
            "info" => {
                let (mut free, mut total) = (0_usize, 0_usize);
                let code =
                    call!(driver, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize));
                format!("{code} {free} {total}")
            }
            "infonull" => {
                let mut total = 0_usize;
                let none = std::ptr::null_mut();
                let both = call!(driver, cuMemGetInfo_v2(none => *mut usize, none => *mut usize));
                let one = call!(driver, cuMemGetInfo_v2(none => *mut usize, &raw mut total => *mut usize));
                format!("{both} {one} {total}")
            }
            "total" => {
                let mut total = 0_usize;
                let code =
                    call!(driver, cuDeviceTotalMem_v2(&raw mut total => *mut usize, self.device => c_int));
                format!("{code} {total}")
            }
            "nvml" => {
                let mut device = std::ptr::null_mut();
                let (mut one, mut two) =
                    ([0_u64; 3], Memory2 { version: 0x0200_0028, total: 0, reserved: 0, free: 0, used: 0 });
                call!(driver, nvmlInit_v2());
                let index = self.device.unsigned_abs();
                call!(driver, nvmlDeviceGetHandleByIndex_v2(index => c_uint, &raw mut device => *mut Handle));
                let codes = (
                    call!(driver, nvmlDeviceGetMemoryInfo(device => Handle, &raw mut one => *mut [u64; 3])),
                    call!(driver, nvmlDeviceGetMemoryInfo_v2(device => Handle, &raw mut two => *mut Memory2)),
                );
                format!(
                    "{} {} {} {} {} {} {} {} {}",
                    codes.0, codes.1, one[0], one[1], one[2], two.total, two.reserved, two.free, two.used
                )
            }
            "ipcget" => {
                let mut made = IpcHandle([0; 64]);
                let code =
                    call!(driver, cuIpcGetMemHandle(&raw mut made => *mut IpcHandle, self.get(at(1)) => u64));
                format!("{code} {}", hex(&made.0))
            }
            "ipcopen" => {
                let mut given = IpcHandle([0; 64]);
                for (index, byte) in given.0.iter_mut().enumerate() {
                    *byte = u8::from_str_radix(&at(2)[index * 2..index * 2 + 2], 16).unwrap();
                }
                let mut pointer = 0;
                let code = call!(driver, cuIpcOpenMemHandle_v2(
                    &raw mut pointer => *mut u64, given => IpcHandle, 1 => c_uint
                ));
                self.note(code, at(1), pointer)
            }
            "ipcclose" => call!(driver, cuIpcCloseMemHandle(self.get(at(1)) => u64)).to_string(),
            "threads" => self.threads(at(1).parse().unwrap(), (size(at(2)), 1), at(3).parse().unwrap()),
            // The first allocates so much, and each four times as much as the one before.
            "rising" => self.threads(at(1).parse().unwrap(), (size(at(2)), 4), 1),
            "storm" => self.storm(at(1).parse().unwrap(), at(2).parse().unwrap()),
            "many" => self.many(at(1).parse().unwrap(), size(at(2))),
            "forever" => self.forever(size(at(1))),
            "fork" => self.fork(line.split_once(' ').unwrap().1),
            "high" => {
                let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
                let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<c_int>().ok();
                descriptors.filter_map(number).filter(|descriptor| *descriptor >= 512).count().to_string()
            }
            "highclose" => {
                // SAFETY: nothing of the probe's own is there.
                (512..1024).for_each(|descriptor| unsafe {
                    close(descriptor);
                });
                "0".to_owned()
            }
            "where" => place(driver.find(at(1))),
            "wherenext" => place(lookup(NEXT, at(1))),
            "whereversion" => {
                let (name, version) = (CString::new(at(1)).unwrap(), CString::new(at(2)).unwrap());
                // SAFETY: a lookup of texts.
                place(unsafe { dlvsym(driver.library(at(1)), name.as_ptr(), version.as_ptr()) })
            }
            "wherelookup" => place(lookup(driver.library("cu"), "dlsym")),
            "reopen" => self.reopen(),
            "chaincalls" => {
                let function = lookup(std::ptr::null_mut(), "chain_calls");
                // SAFETY: the type is that of the library of the tests.
                unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_uint>(function)() }
                    .to_string()
            }
            "wherechain" => {
                let function = lookup(std::ptr::null_mut(), "chain_lookup");
                // SAFETY: the type is that of the library of the tests.
                place(unsafe {
                    std::mem::transmute::<*mut c_void, extern "C" fn() -> *mut c_void>(function)()
                })
            }
            // SAFETY: it has no conditions.
            "pid" => unsafe { getpid() }.to_string(),
            "table" => {
                let name: [u8; 16] = std::array::from_fn(|_| size(at(1)) as u8);
                let mut table = std::ptr::null();
                call!(driver, cuGetExportTable(&raw mut table => *mut *const c_void, &raw const name => *const [u8; 16]))
                    .to_string()
            }
            "sleep" => {
                std::thread::sleep(std::time::Duration::from_millis(at(1).parse().unwrap()));
                "0".to_owned()
            }
            other => panic!("no command {other}"),
        }
    }

    fn pool(&self, name: &str) -> Handle {
        if name != "default" {
            return handle(self.get(name));
        }
        let mut pool = std::ptr::null_mut();
        call!(self.driver, cuDeviceGetDefaultMemPool(&raw mut pool => *mut Handle, self.device => c_int));
        pool
    }

    /// Threads that all ask at once, several times: how many in each round got something.
    fn threads(&self, count: usize, (first, factor): (u64, u64), rounds: usize) -> String {
        let (driver, device) = (self.driver, self.device);
        let barrier = Barrier::new(count);
        let codes: Vec<Vec<c_uint>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..count as u32)
                .map(|index: u32| {
                    let barrier = &barrier;
                    let bytes = first * factor.pow(index);
                    scope.spawn(move || {
                        let mut context = std::ptr::null_mut();
                        call!(driver, cuDevicePrimaryCtxRetain(&raw mut context => *mut Handle, device => c_int));
                        call!(driver, cuCtxSetCurrent(context => Handle));
                        let mut codes = Vec::new();
                        for _ in 0..rounds {
                            let mut pointer = 0_u64;
                            barrier.wait();
                            let code = call!(driver, cuMemAlloc_v2(&raw mut pointer => *mut u64, bytes as usize => usize));
                            barrier.wait();
                            if code == 0 {
                                call!(driver, cuMemFree_v2(pointer => u64));
                            }
                            codes.push(code);
                        }
                        call!(driver, cuDevicePrimaryCtxRelease_v2(device => c_int));
                        codes
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let granted = |round: usize| codes.iter().filter(|codes| codes[round] == 0).count().to_string();
        let others = codes.iter().flatten().filter(|code| ![0, 2].contains(code)).count();
        format!("{others} {}", (0..rounds).map(granted).collect::<Vec<_>>().join(" "))
    }

    /// Threads that allocate in every way, free what they and others have, and ask, all at once; in the
    /// end nothing is left. Says how many calls failed otherwise than for want of memory, how many
    /// allocations there were, and how many were refused.
    fn storm(&self, count: u64, rounds: u64) -> String {
        let held = Mutex::new(Vec::new());
        let counts: Vec<[u64; 3]> = std::thread::scope(|scope| {
            let threads: Vec<_> = (1..=count)
                .map(|seed| {
                    let held = &held;
                    let (driver, device) = (self.driver, self.device);
                    scope.spawn(move || {
                        Whirl { driver, device, held, random: seed, counts: [0; 3] }.run(rounds)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let sum = |index: usize| counts.iter().map(|counts| counts[index]).sum::<u64>().to_string();
        [sum(0), sum(1), sum(2)].join(" ")
    }

    /// Many allocations at once; says how many there were, and the nanoseconds of a free with few and
    /// with all of them held.
    fn many(&self, count: usize, bytes: u64) -> String {
        let driver = self.driver;
        let (alloc, free) = (driver.find("cuMemAlloc_v2"), driver.find("cuMemFree_v2"));
        // SAFETY: the types are those of cuda.h.
        let (alloc, free) = unsafe {
            (
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut u64, usize) -> c_uint>(alloc),
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64) -> c_uint>(free),
            )
        };
        let one = || {
            let mut pointer = 0;
            // SAFETY: there is a place for the pointer.
            (unsafe { alloc(&raw mut pointer, bytes as usize) } == 0).then_some(pointer)
        };
        let timed = |pointers: &[u64]| {
            let began = Instant::now();
            // SAFETY: each is freed once.
            pointers.iter().for_each(|pointer| unsafe {
                free(*pointer);
            });
            began.elapsed().as_nanos() / pointers.len().max(1) as u128
        };
        let few: Vec<u64> = (0..200).map_while(|_| one()).collect();
        let with_few = timed(&few);
        let mut held: Vec<u64> = (0..count).map_while(|_| one()).collect();
        let got = held.len();
        let last = held.split_off(got.saturating_sub(200));
        let with_many = timed(&last);
        timed(&held);
        format!("{got} {with_few} {with_many}")
    }

    /// Allocates and frees until it is killed.
    fn forever(&self, bytes: u64) -> String {
        loop {
            let mut pointer = 0_u64;
            let code =
                call!(self.driver, cuMemAlloc_v2(&raw mut pointer => *mut u64, bytes as usize => usize));
            if code == 0 {
                call!(self.driver, cuMemFree_v2(pointer => u64));
            }
        }
    }

    /// Runs the rest of a line in a child; says how each command ended there.
    fn fork(&mut self, commands: &str) -> String {
        let (reader, mut writer) = std::io::pipe().unwrap();
        // SAFETY: the probe has one thread when it forks, and the child leaves by `_exit`.
        unsafe {
            let child = fork();
            if child == 0 {
                let answers: Vec<String> =
                    commands.split(';').map(|command| self.run(command.trim())).collect();
                writer.write_all(answers.join(", ").as_bytes()).unwrap();
                _exit(0);
            }
            drop(writer);
            let text = std::io::read_to_string(reader).unwrap();
            let mut status = 0;
            waitpid(child, &raw mut status, 0);
            text
        }
    }

    /// Unloads the driver and loads it again.
    fn reopen(&mut self) -> String {
        // SAFETY: nothing of the library is in use.
        unsafe {
            dlclose(self.driver.library("cu"));
            self.driver.cuda = dlopen(c"libcuda.so.1".as_ptr(), OPEN).expose_provenance();
        }
        u8::from(self.driver.cuda == 0).to_string()
    }
}

/// Something of a storm that is to be freed.
#[derive(Clone, Copy)]
enum Held {
    Pointer(u64),
    /// Freed in the order of a stream.
    Ordered(u64),
    Physical(u64),
    Array(usize),
}

/// One thread of a storm.
struct Whirl<'a> {
    driver: Driver,
    device: c_int,
    held: &'a Mutex<Vec<Held>>,
    random: u64,
    /// Failures, allocations and refusals.
    counts: [u64; 3],
}

impl Whirl<'_> {
    fn run(mut self, rounds: u64) -> [u64; 3] {
        let driver = self.driver;
        let (mut context, mut stream): (Handle, Handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        self.check(
            call!(driver, cuDevicePrimaryCtxRetain(&raw mut context => *mut Handle, self.device => c_int)),
        );
        self.check(call!(driver, cuCtxSetCurrent(context => Handle)));
        self.check(call!(driver, cuStreamCreate(&raw mut stream => *mut Handle, 1 => c_uint)));
        for _ in 0..rounds {
            self.take(stream);
            self.ask();
            // Somebody's, and a little less often than something is taken.
            if self.roll(5) > 0 {
                let at = self.roll(1 << 20) as usize;
                let one = {
                    let mut held = self.held.lock().unwrap();
                    at.checked_rem(held.len()).map(|index| held.swap_remove(index))
                };
                if let Some(one) = one {
                    self.free(one, stream);
                }
            }
        }
        let held = self.held;
        let left = || held.lock().unwrap().pop();
        while let Some(one) = left() {
            self.free(one, stream);
        }
        self.check(call!(driver, cuStreamSynchronize(stream => Handle)));
        self.check(call!(driver, cuDevicePrimaryCtxRelease_v2(self.device => c_int)));
        self.counts
    }

    fn roll(&mut self, below: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % below
    }

    fn check(&mut self, code: c_uint) {
        self.counts[0] += u64::from(code != 0);
    }

    fn take(&mut self, stream: Handle) {
        let driver = self.driver;
        // From pieces of a block to sixteen of them.
        let bytes = 1_usize << (10 + self.roll(16));
        let mut made = 0_u64;
        let (code, one) = match self.roll(5) {
            0 | 1 => {
                let code = call!(driver, cuMemAlloc_v2(&raw mut made => *mut u64, bytes => usize));
                (code, Held::Pointer(made))
            }
            2 => {
                let code = call!(driver, cuMemAllocAsync(
                    &raw mut made => *mut u64, bytes => usize, stream => Handle
                ));
                (code, Held::Ordered(made))
            }
            3 => {
                let properties = Properties {
                    kind: 1,
                    handle_types: 1,
                    location_kind: 1,
                    location: self.device,
                    windows: 0,
                    flags: [0; 8],
                };
                let code = call!(driver, cuMemCreate(
                    &raw mut made => *mut u64, bytes.next_multiple_of(2 << 20) => usize,
                    &raw const properties => *const Properties, 0 => u64
                ));
                (code, Held::Physical(made))
            }
            _ => {
                let shape = ArrayShape { width: 256, height: bytes >> 10, format: 0x20, channels: 1 };
                let mut array = std::ptr::null_mut();
                let code = call!(driver, cuArrayCreate_v2(
                    &raw mut array => *mut Handle, &raw const shape => *const ArrayShape
                ));
                (code, Held::Array(array.expose_provenance()))
            }
        };
        match code {
            0 => {
                self.counts[1] += 1;
                self.held.lock().unwrap().push(one);
            }
            2 => self.counts[2] += 1,
            _ => self.counts[0] += 1,
        }
    }

    fn ask(&mut self) {
        let driver = self.driver;
        let (mut free, mut total) = (0_usize, 0_usize);
        self.check(call!(driver, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize)));
        self.counts[0] += u64::from(free > total);
    }

    fn free(&mut self, one: Held, stream: Handle) {
        let driver = self.driver;
        let code = match one {
            Held::Pointer(pointer) => call!(driver, cuMemFree_v2(pointer => u64)),
            Held::Ordered(pointer) => call!(driver, cuMemFreeAsync(pointer => u64, stream => Handle)),
            Held::Physical(made) => call!(driver, cuMemRelease(made => u64)),
            Held::Array(array) => {
                let array: Handle = std::ptr::with_exposed_provenance_mut(array);
                call!(driver, cuArrayDestroy(array => Handle))
            }
        };
        self.check(code);
    }
}

fn lookup(handle: Handle, name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    // SAFETY: a lookup of a text.
    unsafe { dlsym(handle, name.as_ptr()) }
}

/// The file name of the library that an address is in.
fn place(address: *mut c_void) -> String {
    let mut place = Place {
        file: std::ptr::null(),
        base: std::ptr::null_mut(),
        name: std::ptr::null(),
        address: std::ptr::null_mut(),
    };
    // SAFETY: there is a place for the answer, whose texts live as long as the library.
    unsafe {
        if address.is_null() || dladdr(address, &raw mut place) == 0 || place.file.is_null() {
            return "nowhere".to_owned();
        }
        CStr::from_ptr(place.file).to_string_lossy().rsplit('/').next().unwrap().to_owned()
    }
}

fn main() {
    let lookup = match std::env::args().nth(1).as_deref() {
        None | Some("handle") => Lookup::Handle,
        Some("default") => Lookup::Default,
        Some("getproc") => Lookup::GetProc,
        Some("oldproc") => Lookup::OldProc,
        Some(other) => panic!("no lookup {other}"),
    };
    // SAFETY: loading the driver has no conditions.
    let open = |name: &CStr| unsafe { dlopen(name.as_ptr(), OPEN) }.expose_provenance();
    let without = std::env::args().nth(2).is_some_and(|word| word == "without");
    let driver = Driver {
        cuda: if without { 0 } else { open(c"libcuda.so.1") },
        nvml: if without { 0 } else { open(c"libnvidia-ml.so.1") },
        lookup,
    };
    let mut probe = Probe { driver, device: 0, named: HashMap::new(), stream: std::ptr::null_mut() };
    let mut output = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let answer = probe.run(&line.unwrap());
        writeln!(output, "{answer}").unwrap();
        output.flush().unwrap();
    }
}

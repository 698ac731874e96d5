//! Calls `libcuda.so.1` rightly and wrongly, and prints each result code: on the simulator and on
//! a real driver the output must be the same. Lines about bytes are rounded to MiB.
//!
//! Without an argument it makes the calls whose results on a real driver are known; with `open`
//! those that have not been tried on one yet. Any group may be named by itself.
//!
//! What makes a real driver crash is no contract, and not asked: exporting a handle that is none,
//! and looking up a null name by the first form of `cuGetProcAddress`.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a tool for tests: what is not there is an error anyway"
)]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::ptr::null_mut;

use libloading::Library;

type Code = c_uint;

/// `CUmemAllocationProp` and `CUmemAccessDesc`.
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: [c_int; 2],
    meta: *mut c_void,
    flags: [u8; 8],
}
#[repr(C)]
struct Access {
    location: [c_int; 2],
    flags: c_int,
}

const MIB: usize = 1 << 20;

macro_rules! call {
    ($library:expr, $name:literal: fn($($type:ty),*), $($value:expr),* $(,)?) => {{
        // SAFETY: the types are those of cuda.h for this name, and the arguments are what the
        // driver has to bear with.
        unsafe {
            let function = $library.get::<unsafe extern "C" fn($($type),*) -> Code>($name.as_bytes()).unwrap();
            function($($value),*)
        }
    }};
}

macro_rules! show {
    ($what:literal, $code:expr) => {
        println!("{}: {}", $what, $code)
    };
}

/// `CUmemPoolProps` and `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    location: [c_int; 2],
    security: *mut c_void,
    max_size: usize,
    rest: [u8; 56],
}
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
struct IpcHandle([u64; 8]);

/// Some calls in a row.
type Group = fn(&Library);

/// Each runs in a process of its own, so that a crash of the driver ends no other.
const GROUPS: [(&str, Group); 21] = [
    ("before init", before_init),
    ("devices", devices),
    ("without context", without_context),
    ("with context", with_context),
    ("contexts", contexts),
    ("virtual memory", virtual_memory),
    ("errors and entry points", errors_and_entry_points),
    ("after fork", after_fork),
    ("memory", memory),
    ("descriptors", descriptors),
    ("pools", pools),
    ("graphs", graphs),
    ("sizes", sizes),
    ("sharing wrongly", sharing_wrongly),
    ("lookups", lookups),
    ("pointers", pointers),
    ("host locations", host_locations),
    ("pools wrongly", pools_wrongly),
    ("graphs wrongly", graphs_wrongly),
    ("captures", captures),
    ("another's allocations", opened),
];

/// Not tried on a real driver yet.
const OPEN: [(&str, Group); 7] = [
    ("sharing", sharing),
    ("importing wrongly", importing_wrongly),
    ("rare lookups", rare_lookups),
    ("freeing in a stream's order", freeing),
    ("pools within captures", pools_within_captures),
    ("large nodes", large_nodes),
    ("checkpoints", checkpoints),
];

/// Parts of other groups that are processes of their own.
const IMPORTER: &str = "an importer";
const PARKED: &str = "a parked one";

fn main() {
    let name = std::env::args().nth(1).filter(|name| name != "open");
    let Some(name) = name else {
        let open = std::env::args().len() > 1;
        let groups = if open { &OPEN[..] } else { &GROUPS[..] };
        for (name, _) in groups {
            println!("--- {name}");
            let status = Command::new(std::env::current_exe().unwrap()).arg(name).status().unwrap();
            if !status.success() {
                println!("{status}");
            }
        }
        return;
    };
    // SAFETY: loading a CUDA driver has no conditions.
    let cuda = unsafe { Library::new("libcuda.so.1") }.unwrap();
    let known: [(&str, Group); 2] = [(IMPORTER, importer), (PARKED, parked)];
    let mut groups = GROUPS.iter().chain(&OPEN).chain(&known);
    let (name, group) = groups.find(|(known, _)| *known == name).unwrap();
    if !["before init", "memory", "descriptors"].contains(name) {
        assert_eq!(call!(cuda, "cuInit": fn(c_uint), 0), 0);
    }
    group(&cuda);
}

fn before_init(cuda: &Library) {
    let (mut number, mut address) = (0, 0);
    show!("version", call!(cuda, "cuDriverGetVersion": fn(*mut c_int), &raw mut number));
    show!("version to null", call!(cuda, "cuDriverGetVersion": fn(*mut c_int), null_mut()));
    show!("count before init", call!(cuda, "cuDeviceGetCount": fn(*mut c_int), &raw mut number));
    show!("alloc before init", alloc(cuda, &raw mut address, MIB));
    show!("synchronize before init", call!(cuda, "cuCtxSynchronize": fn(),));
    show!("init with flags", call!(cuda, "cuInit": fn(c_uint), 1));
    show!("init", call!(cuda, "cuInit": fn(c_uint), 0));
    show!("init again", call!(cuda, "cuInit": fn(c_uint), 0));
}

fn devices(cuda: &Library) {
    let mut number = 0;
    show!("count to null", call!(cuda, "cuDeviceGetCount": fn(*mut c_int), null_mut()));
    show!("device 99", call!(cuda, "cuDeviceGet": fn(*mut c_int, c_int), &raw mut number, 99));
    show!("device -1", call!(cuda, "cuDeviceGet": fn(*mut c_int, c_int), &raw mut number, -1));
    show!("device to null", call!(cuda, "cuDeviceGet": fn(*mut c_int, c_int), null_mut(), 0));
    show!("device", call!(cuda, "cuDeviceGet": fn(*mut c_int, c_int), &raw mut number, 0));
    let mut text = [1; 64];
    let name = |buffer: *mut c_char, length, device| call!(cuda, "cuDeviceGetName": fn(*mut c_char, c_int, c_int), buffer, length, device);
    show!("name to null", name(null_mut(), 64, 0));
    show!("name of device 99", name(text.as_mut_ptr(), 64, 99));
    show!("name cut to 4", name(text.as_mut_ptr(), 4, 0));
    println!("name cut to 4 is {:?}", &text[..5]);
    let attribute = |out: *mut c_int, which| call!(cuda, "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int), out, which, 0);
    for which in [10, 41, 75, 76, 83, 89, 102, 103] {
        let code = attribute(&raw mut number, which);
        println!("attribute {which}: {code} {number}");
    }
    show!("attribute 0", attribute(&raw mut number, 0));
    show!("attribute 99999", attribute(&raw mut number, 99_999));
    show!("attribute to null", attribute(null_mut(), 10));
    let total = |out: *mut usize| call!(cuda, "cuDeviceTotalMem_v2": fn(*mut usize, c_int), out, 0);
    show!("total to null", total(null_mut()));
    let mut uuid = [0_u8; 16];
    show!("uuid", call!(cuda, "cuDeviceGetUuid_v2": fn(*mut [u8; 16], c_int), &raw mut uuid, 0));
    show!("uuid to null", call!(cuda, "cuDeviceGetUuid_v2": fn(*mut [u8; 16], c_int), null_mut(), 0));
}

fn without_context(cuda: &Library) {
    let (mut address, mut free, mut total, mut number) = (0, 0, 0, 0);
    let mut context = null_mut();
    show!("alloc without context", alloc(cuda, &raw mut address, MIB));
    show!("alloc to null without context", alloc(cuda, null_mut(), MIB));
    show!("free of 0 without context", release(cuda, 0));
    show!("info without context", info(cuda, &raw mut free, &raw mut total));
    show!("synchronize without context", call!(cuda, "cuCtxSynchronize": fn(),));
    show!("device without context", call!(cuda, "cuCtxGetDevice": fn(*mut c_int), &raw mut number));
    show!("pop without context", call!(cuda, "cuCtxPopCurrent_v2": fn(*mut *mut c_void), &raw mut context));
    show!("set to null", call!(cuda, "cuCtxSetCurrent": fn(*mut c_void), null_mut()));
    show!("push of null", call!(cuda, "cuCtxPushCurrent_v2": fn(*mut c_void), null_mut()));
    show!("current", call!(cuda, "cuCtxGetCurrent": fn(*mut *mut c_void), &raw mut context));
    println!("current is null: {}", context.is_null());
    show!("release unretained", call!(cuda, "cuDevicePrimaryCtxRelease_v2": fn(c_int), 0));
    show!(
        "retain to null",
        call!(cuda, "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int), null_mut(), 0)
    );
    show!(
        "retain of device 99",
        call!(cuda, "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int), &raw mut context, 99)
    );
    show!("destroy of null", call!(cuda, "cuCtxDestroy_v2": fn(*mut c_void), null_mut()));
}

fn with_context(cuda: &Library) {
    let (mut context, mut address, mut free, mut total) = (null_mut(), 0, 0, 0);
    show!(
        "retain",
        call!(cuda, "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int), &raw mut context, 0)
    );
    show!("set", call!(cuda, "cuCtxSetCurrent": fn(*mut c_void), context));
    show!("info", info(cuda, &raw mut free, &raw mut total));
    let mut device_total = 0_usize;
    call!(cuda, "cuDeviceTotalMem_v2": fn(*mut usize, c_int), &raw mut device_total, 0);
    println!("info and device agree on the total: {}", total == device_total);
    show!("info to null", info(cuda, null_mut(), null_mut()));
    show!("info of total alone", info(cuda, null_mut(), &raw mut total));
    show!("alloc to null", alloc(cuda, null_mut(), MIB));
    show!("alloc of 0", alloc(cuda, &raw mut address, 0));
    show!("alloc of too much", alloc(cuda, &raw mut address, 1 << 50));
    show!("alloc of everything", alloc(cuda, &raw mut address, usize::MAX));
    show!("free of 0", release(cuda, 0));
    show!("free of nonsense", release(cuda, 0x1234));
    show!("alloc", alloc(cuda, &raw mut address, 4 * MIB));
    let set = |address, count| call!(cuda, "cuMemsetD8_v2": fn(c_ulonglong, u8, usize), address, 7, count);
    let set32 =
        |address, count| call!(cuda, "cuMemsetD32_v2": fn(c_ulonglong, c_uint, usize), address, 7, count);
    show!("set all", set(address, 4 * MIB));
    show!("set nothing", set(address, 0));
    show!("set too much", set(address, 4 * MIB + 1));
    show!("set beyond", set(address + (4 << 20), 1));
    show!("set nonsense", set(0x1234, 1));
    show!("set nothing at nonsense", set(0x1234, 0));
    show!("set null", set(0, 1));
    show!("set words", set32(address, MIB));
    show!("set words too far", set32(address, MIB + 1));
    show!("set words askew", set32(address + 1, 1));
    let (mut base, mut size) = (0, 0);
    let range = |base: *mut c_ulonglong, size: *mut usize, address| call!(cuda, "cuMemGetAddressRange_v2": fn(*mut c_ulonglong, *mut usize, c_ulonglong), base, size, address);
    show!("range", range(&raw mut base, &raw mut size, address + 5));
    println!("range is the allocation: {}", base == address && size == 4 * MIB);
    show!("range of nonsense", range(&raw mut base, &raw mut size, 0x1234));
    show!("range to null", range(null_mut(), null_mut(), address));
    show!("free inside", release(cuda, address + 4096));
    show!("free", release(cuda, address));
    show!("free again", release(cuda, address));
    let managed = |out: *mut c_ulonglong, bytes, flags| call!(cuda, "cuMemAllocManaged": fn(*mut c_ulonglong, usize, c_uint), out, bytes, flags);
    show!("managed without flags", managed(&raw mut address, MIB, 0));
    show!("managed of 0", managed(&raw mut address, 0, 1));
    show!("managed to null", managed(null_mut(), MIB, 1));
    show!("managed", managed(&raw mut address, MIB, 1));
    show!("set managed", set(address, MIB));
    show!("free managed", release(cuda, address));
}

fn contexts(cuda: &Library) {
    let (mut context, mut other, mut popped, mut address) = (null_mut(), null_mut(), null_mut(), 0);
    let (mut flags, mut active) = (0, 0);
    let create = |out: *mut *mut c_void, device| call!(cuda, "cuCtxCreate_v2": fn(*mut *mut c_void, c_uint, c_int), out, 0, device);
    let mut primary = null_mut();
    call!(cuda, "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int), &raw mut primary, 0);
    call!(cuda, "cuCtxSetCurrent": fn(*mut c_void), primary);
    show!("create to null", create(null_mut(), 0));
    show!("create on device 99", create(&raw mut context, 99));
    show!("create", create(&raw mut context, 0));
    show!("current", call!(cuda, "cuCtxGetCurrent": fn(*mut *mut c_void), &raw mut other));
    println!("the new one is current: {}", other == context);
    show!("alloc in it", alloc(cuda, &raw mut address, MIB));
    show!("destroy", call!(cuda, "cuCtxDestroy_v2": fn(*mut c_void), context));
    show!("current after", call!(cuda, "cuCtxGetCurrent": fn(*mut *mut c_void), &raw mut other));
    println!("another is current: {}", !other.is_null() && other != context);
    show!("free of its memory", release(cuda, address));
    show!("destroy of a primary", call!(cuda, "cuCtxDestroy_v2": fn(*mut c_void), other));
    show!("pop", call!(cuda, "cuCtxPopCurrent_v2": fn(*mut *mut c_void), &raw mut popped));
    println!("popped what was current: {}", popped == other);
    show!("push", call!(cuda, "cuCtxPushCurrent_v2": fn(*mut c_void), popped));
    let state = |flags: *mut c_uint, active: *mut c_int| call!(cuda, "cuDevicePrimaryCtxGetState": fn(c_int, *mut c_uint, *mut c_int), 0, flags, active);
    show!("state", state(&raw mut flags, &raw mut active));
    println!("active: {active}");
    show!("release", call!(cuda, "cuDevicePrimaryCtxRelease_v2": fn(c_int), 0));
    show!("state", state(&raw mut flags, &raw mut active));
    println!("active: {active}");
    show!("release again", call!(cuda, "cuDevicePrimaryCtxRelease_v2": fn(c_int), 0));
    show!("alloc in a released one", alloc(cuda, &raw mut address, MIB));
    show!("synchronize a released one", call!(cuda, "cuCtxSynchronize": fn(),));
    show!("set to null", call!(cuda, "cuCtxSetCurrent": fn(*mut c_void), null_mut()));
}

fn virtual_memory(cuda: &Library) {
    let properties =
        |kind, location| Properties { kind, handle_types: 0, location, meta: null_mut(), flags: [0; 8] };
    let (good, elsewhere, kindless) = (properties(1, [1, 0]), properties(1, [1, 99]), properties(0, [1, 0]));
    let granularity = |out: *mut usize, wanted: *const Properties, option| call!(cuda, "cuMemGetAllocationGranularity": fn(*mut usize, *const Properties, c_int), out, wanted, option);
    let mut step = 0;
    show!("granularity", granularity(&raw mut step, &raw const good, 0));
    println!("granularity is {step}");
    show!("granularity recommended", granularity(&raw mut step, &raw const good, 1));
    println!("granularity is {step}");
    show!("granularity to null", granularity(null_mut(), &raw const good, 0));
    show!("granularity of null", granularity(&raw mut step, std::ptr::null(), 0));
    let create = |out: *mut c_ulonglong, size, wanted: *const Properties, flags| call!(cuda, "cuMemCreate": fn(*mut c_ulonglong, usize, *const Properties, c_ulonglong), out, size, wanted, flags);
    let (mut handle, mut address) = (0, 0);
    show!("create of odd size", create(&raw mut handle, MIB, &raw const good, 0));
    show!("create of 0", create(&raw mut handle, 0, &raw const good, 0));
    show!("create to null", create(null_mut(), 2 * MIB, &raw const good, 0));
    show!("create of null", create(&raw mut handle, 2 * MIB, std::ptr::null(), 0));
    show!("create with flags", create(&raw mut handle, 2 * MIB, &raw const good, 1));
    show!("create of kind 0", create(&raw mut handle, 2 * MIB, &raw const kindless, 0));
    show!("create on device 99", create(&raw mut handle, 2 * MIB, &raw const elsewhere, 0));
    show!("create of too much", create(&raw mut handle, 1 << 50, &raw const good, 0));
    show!("create", create(&raw mut handle, 4 * MIB, &raw const good, 0));
    let reserve = |out: *mut c_ulonglong, size| {
        call!(
            cuda, "cuMemAddressReserve": fn(*mut c_ulonglong, usize, usize, c_ulonglong, c_ulonglong),
            out, size, 0, 0, 0,
        )
    };
    show!("reserve of odd size", reserve(&raw mut address, MIB));
    show!("reserve of 0", reserve(&raw mut address, 0));
    show!("reserve to null", reserve(null_mut(), 2 * MIB));
    show!("reserve", reserve(&raw mut address, 8 * MIB));
    let map = |address, size, offset, handle| {
        call!(
            cuda, "cuMemMap": fn(c_ulonglong, usize, usize, c_ulonglong, c_ulonglong),
            address, size, offset, handle, 0,
        )
    };
    let access = Access { location: [1, 0], flags: 3 };
    let allow = |address, size, access: *const Access, count| call!(cuda, "cuMemSetAccess": fn(c_ulonglong, usize, *const Access, usize), address, size, access, count);
    let unmap = |address, size| call!(cuda, "cuMemUnmap": fn(c_ulonglong, usize), address, size);
    let unreserve = |address, size| call!(cuda, "cuMemAddressFree": fn(c_ulonglong, usize), address, size);
    let release = |handle| call!(cuda, "cuMemRelease": fn(c_ulonglong), handle);
    show!("map nowhere", map(0x4000_0000, 4 * MIB, 0, handle));
    show!("map less than there is", map(address, 2 * MIB, 0, handle));
    show!("map of odd size", map(address, MIB, 0, handle));
    show!("map more than there is", map(address, 6 * MIB, 0, handle));
    show!("access before map", allow(address, 4 * MIB, &raw const access, 1));
    show!("unmap before map", unmap(address, 4 * MIB));
    show!("map", map(address, 4 * MIB, 0, handle));
    show!("map again there", map(address, 4 * MIB, 0, handle));
    show!("map again elsewhere", map(address + (4 << 20), 4 * MIB, 0, handle));
    show!("unmap elsewhere", unmap(address + (4 << 20), 4 * MIB));
    show!("access for nobody", allow(address, 4 * MIB, std::ptr::null(), 0));
    show!("access", allow(address, 4 * MIB, &raw const access, 1));
    show!("access to too much", allow(address, 8 * MIB, &raw const access, 1));
    show!("free while mapped", unreserve(address, 8 * MIB));
    show!("unmap a part", unmap(address, 2 * MIB));
    show!("release while mapped", release(handle));
    show!("release again", release(handle));
    show!("map after release", map(address + (4 << 20), 4 * MIB, 0, handle));
    show!("unmap", unmap(address, 4 * MIB));
    show!("unmap again", unmap(address, 4 * MIB));
    show!("free a part", unreserve(address, 4 * MIB));
    show!("free", unreserve(address, 8 * MIB));
    show!("free again", unreserve(address, 8 * MIB));
}

fn errors_and_entry_points(cuda: &Library) {
    let mut text = std::ptr::null();
    let name = |code, out: *mut *const c_char| call!(cuda, "cuGetErrorName": fn(Code, *mut *const c_char), code, out);
    for code in [0, 1, 2, 3, 100, 101, 201, 500, 709, 801, 999] {
        name(code, &raw mut text);
        // SAFETY: the driver's names are texts that last for ever.
        println!("error {code} is {:?}", unsafe { std::ffi::CStr::from_ptr(text) });
        call!(cuda, "cuGetErrorString": fn(Code, *mut *const c_char), code, &raw mut text);
        // SAFETY: the driver's texts last for ever.
        println!("error {code} means {:?}", unsafe { std::ffi::CStr::from_ptr(text) });
    }
    show!("name of no error", name(12_345, &raw mut text));
    println!("name of no error is null: {}", text.is_null());
    let find = |name: &std::ffi::CStr, version, status: *mut c_uint| {
        let mut function = null_mut();
        let code = call!(
            cuda, "cuGetProcAddress_v2": fn(*const c_char, *mut *mut c_void, c_int, c_ulonglong, *mut c_uint),
            name.as_ptr(), &raw mut function, version, 0, status,
        );
        let found = !function.is_null();
        format!("{code}, found: {found}")
    };
    let mut status = 9;
    println!("find cuMemAlloc: {}, {status}", find(c"cuMemAlloc", 12_000, &raw mut status));
    println!("find cuNothing: {}", find(c"cuNothing", 12_000, null_mut()));
    println!("find cuNothing with status: {}", find(c"cuNothing", 12_000, &raw mut status));
    println!("status {status}");
}

fn after_fork(cuda: &Library) {
    // SAFETY: the child makes a few calls that are safe in a copy of a process with one thread,
    // and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let (mut number, mut context) = (0, null_mut());
        show!("count in a fork", call!(cuda, "cuDeviceGetCount": fn(*mut c_int), &raw mut number));
        show!("init in a fork", call!(cuda, "cuInit": fn(c_uint), 0));
        show!(
            "retain in a fork",
            call!(cuda, "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int), &raw mut context, 0)
        );
        // SAFETY: ends the copy without the handlers of the original.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, null_mut(), 0) };
}

/// What memory costs, in MiB, by the process's own entry in NVML and by the device.
fn memory(cuda: &Library) {
    let mut reader = Reader::new();
    let (mut context, mut first, mut second, mut handle) = (null_mut(), 0, 0, 0);
    call!(cuda, "cuInit": fn(c_uint), 0);
    reader.report("after init");
    let good = Properties { kind: 1, handle_types: 0, location: [1, 0], meta: null_mut(), flags: [0; 8] };
    let create = |out: *mut c_ulonglong| {
        call!(
            cuda, "cuMemCreate": fn(*mut c_ulonglong, usize, *const Properties, c_ulonglong),
            out, 64 * MIB, &raw const good, 0,
        )
    };
    create(&raw mut handle);
    reader.report("after a create of 64 MiB without context");
    call!(cuda, "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int), &raw mut context, 0);
    call!(cuda, "cuCtxSetCurrent": fn(*mut c_void), context);
    reader.report("after the context");
    alloc(cuda, &raw mut first, 1);
    reader.report("after an alloc of 1 byte");
    alloc(cuda, &raw mut second, 1);
    reader.report("after another of 1 byte");
    alloc(cuda, &raw mut second, 3 * MIB);
    reader.report("after an alloc of 3 MiB");
    alloc(cuda, &raw mut second, 65 * MIB);
    reader.report("after an alloc of 65 MiB");
    create(&raw mut handle);
    reader.report("after a create of 64 MiB with context");
    for (kib, times) in [(4, 3), (512, 5), (1024, 5), (1536, 3), (2048, 2), (2560, 2)] {
        let mut addresses = Vec::new();
        for _ in 0..times {
            alloc(cuda, &raw mut second, kib << 10);
            reader.report(&format!("after an alloc of {kib} KiB"));
            addresses.push(second);
        }
        for address in addresses {
            release(cuda, address);
        }
        reader.report("after freeing these");
    }
    call!(
        cuda, "cuMemAllocManaged": fn(*mut c_ulonglong, usize, c_uint), &raw mut second, 128 * MIB, 1,
    );
    reader.report("after 128 MiB managed");
    call!(cuda, "cuMemsetD8_v2": fn(c_ulonglong, u8, usize), second, 1, 128 * MIB);
    call!(cuda, "cuCtxSynchronize": fn(),);
    reader.report("after touching it");
    release(cuda, second);
    reader.report("after its free");
    call!(cuda, "cuCtxCreate_v2": fn(*mut *mut c_void, c_uint, c_int), &raw mut context, 0, 0);
    reader.report("after a second context");
}

/// Reads NVML in a process of its own, as an agent would.
struct Reader {
    before: (i64, i64),
}

impl Reader {
    fn new() -> Self {
        Self { before: Self::read() }
    }

    fn read() -> (i64, i64) {
        let reader = std::env::current_exe().unwrap().with_file_name("nvml");
        let output = Command::new(reader).output().unwrap();
        let state: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let device = &state["devices"][0];
        let own = device["compute"].as_array().unwrap().iter().find(|p| p["pid"] == std::process::id());
        let own = own.map_or(0, |process| process["bytes"].as_i64().unwrap());
        (own, device["memory"]["used"].as_i64().unwrap())
    }

    fn report(&mut self, when: &str) {
        let (process, device) = self.changes();
        println!("{when}: process {process:+}, device {device:+}");
    }

    fn report_process(&mut self, when: &str) {
        println!("{when}: process {:+}", self.changes().0);
    }

    fn report_device(&mut self, when: &str) {
        println!("{when}: device {:+}", self.changes().1);
    }

    /// In MiB, since the last look.
    fn changes(&mut self) -> (i64, i64) {
        let now = Self::read();
        let changes = ((now.0 - self.before.0) / 1_048_576, (now.1 - self.before.1) / 1_048_576);
        self.before = now;
        changes
    }
}

/// What a descriptor keeps, and for how long.
fn descriptors(cuda: &Library) {
    call!(cuda, "cuInit": fn(c_uint), 0);
    let mut reader = Reader::new();
    let mut handle = 0;
    show!("create", create_shareable(cuda, &raw mut handle));
    reader.report("after a create of 64 MiB without context");
    let mut descriptor = -1;
    show!("export", export(cuda, &raw mut descriptor, handle, 1, 0));
    show!("release", call!(cuda, "cuMemRelease": fn(c_ulonglong), handle));
    reader.report("after its export and release");
    // SAFETY: the driver made the descriptor for this process.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let input = descriptor.try_clone().unwrap();
    let mut importer = Command::new(std::env::current_exe().unwrap());
    let status = importer.arg(IMPORTER).stdin(input).status().unwrap();
    assert!(status.success());
    drop(importer);
    reader.report("after its import by another process, now gone");
    drop(descriptor);
    // The simulator learns of it a moment later.
    std::thread::sleep(std::time::Duration::from_millis(100));
    reader.report("after closing the descriptor");
}

/// In another process, whose standard input is the descriptor.
fn importer(cuda: &Library) {
    let (mut handle, mut descriptor) = (0, -1);
    // The number goes by a pointer, so that this one is null.
    show!("import of descriptor 0", import(cuda, &raw mut handle, 0, 1));
    show!("export of handle 0", export(cuda, &raw mut descriptor, 0, 1, 0));
    let input = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    show!("import by another process", import(cuda, &raw mut handle, input.as_raw_fd(), 1));
    show!("export of what was imported", export(cuda, &raw mut descriptor, handle, 1, 0));
}

/// What a stream-ordered pool reserves.
fn pools(cuda: &Library) {
    enter(cuda);
    let mut pool = null_mut();
    show!(
        "default pool",
        call!(cuda, "cuDeviceGetDefaultMemPool": fn(*mut *mut c_void, c_int), &raw mut pool, 0)
    );
    let report = |when: &str| {
        let number = |attribute| {
            let mut value = 0_u64;
            let code = pool_attribute(cuda, pool, attribute, (&raw mut value).cast());
            if code == 0 { value } else { u64::MAX }
        };
        println!("{when}: reserved {} MiB, used {} bytes", number(5) >> 20, number(7));
    };
    report("at first");
    let mut addresses = Vec::new();
    for size in [1, 4 * MIB, 64 * MIB, 100 * MIB] {
        let mut address = 0;
        alloc_async(cuda, &raw mut address, size, null_mut());
        report(&format!("after an allocation of {size} bytes"));
        addresses.push(address);
    }
    for address in addresses {
        free_async(cuda, address, null_mut());
    }
    report("after freeing all");
    call!(cuda, "cuStreamSynchronize": fn(*mut c_void), null_mut());
    report("after a synchronisation");
}

/// When a graph's memory is taken and given back.
fn graphs(cuda: &Library) {
    enter(cuda);
    let mut reader = Reader::new();
    let (mut graph, mut node, mut executable) = (null_mut(), null_mut(), null_mut());
    let report = |reader: &mut Reader, when: &str| {
        let number = |attribute| {
            let mut value = 0_u64;
            call!(cuda, "cuDeviceGetGraphMemAttribute": fn(c_int, c_int, *mut u64), 0, attribute, &raw mut value);
            value >> 20
        };
        println!("graphs use {} MiB and have reserved {}", number(0), number(2));
        reader.report_device(when);
    };
    show!("graph", call!(cuda, "cuGraphCreate": fn(*mut *mut c_void, c_uint), &raw mut graph, 0));
    let mut parameters = node_parameters(256 * MIB);
    show!("node", add_node(cuda, &raw mut node, graph, &raw mut parameters));
    report(&mut reader, "after adding a node of 256 MiB");
    show!("instantiate", instantiate(cuda, &raw mut executable, graph));
    report(&mut reader, "after instantiation");
    show!("upload", call!(cuda, "cuGraphUpload": fn(*mut c_void, *mut c_void), executable, null_mut()));
    call!(cuda, "cuStreamSynchronize": fn(*mut c_void), null_mut());
    report(&mut reader, "after the upload");
    show!("launch", launch(cuda, executable));
    call!(cuda, "cuStreamSynchronize": fn(*mut c_void), null_mut());
    report(&mut reader, "after the launch");
    show!("free", release(cuda, parameters.address));
    report(&mut reader, "after the free");
    show!("destroy", call!(cuda, "cuGraphExecDestroy": fn(*mut c_void), executable));
    show!("trim", call!(cuda, "cuDeviceGraphMemTrim": fn(c_int), 0));
    report(&mut reader, "after destruction and trim");
}

/// What arrays and rows cost.
fn sizes(cuda: &Library) {
    enter(cuda);
    let mut reader = Reader::new();
    let mut array = null_mut();
    let shape = ArrayShape { width: 4096, height: 4096, format: 0x20, channels: 4 };
    show!(
        "array",
        call!(cuda, "cuArrayCreate_v2": fn(*mut *mut c_void, *const ArrayShape), &raw mut array, &raw const shape)
    );
    reader.report_process("after an array of 256 MiB");
    let (mut address, mut pitch) = (0, 0);
    show!(
        "pitch",
        call!(
            cuda, "cuMemAllocPitch_v2": fn(*mut c_ulonglong, *mut usize, usize, usize, c_uint),
            &raw mut address, &raw mut pitch, 1000, 100_000, 4,
        )
    );
    println!("pitch is {pitch}");
    reader.report_process("after 100000 rows of 1000 bytes");
}

fn sharing_wrongly(cuda: &Library) {
    let (mut handle, mut plain, mut descriptor) = (0, 0, -1);
    create_shareable(cuda, &raw mut handle);
    create_of(cuda, &raw mut plain, 0, [1, 0]);
    show!("export of memory made without asking for it", export(cuda, &raw mut descriptor, plain, 1, 0));
    show!("export of kind 0", export(cuda, &raw mut descriptor, handle, 0, 0));
    show!("export with flags", export(cuda, &raw mut descriptor, handle, 1, 1));
    show!("export to null", export(cuda, null_mut(), handle, 1, 0));
}

fn sharing(cuda: &Library) {
    let (mut handle, mut taken, mut descriptor) = (0, 0, -1);
    create_shareable(cuda, &raw mut handle);
    show!("export", export(cuda, &raw mut descriptor, handle, 1, 0));
    let mut second = -1;
    show!("export again", export(cuda, &raw mut second, handle, 1, 0));
    println!("it is another descriptor: {}", second != descriptor);
    // SAFETY: asks about a descriptor of this process.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFD) };
    println!("it is closed by exec: {}", flags & libc::FD_CLOEXEC != 0);
    show!("import by its maker", import(cuda, &raw mut taken, descriptor, 1));
    println!("it is another handle: {}", taken != handle);
    show!("release of the first", call!(cuda, "cuMemRelease": fn(c_ulonglong), handle));
    show!("export of the second", export(cuda, &raw mut descriptor, taken, 1, 0));
}

/// In the order in which they could crash.
fn importing_wrongly(cuda: &Library) {
    let (mut handle, mut taken, mut descriptor) = (0, 0, -1);
    create_shareable(cuda, &raw mut handle);
    export(cuda, &raw mut descriptor, handle, 1, 0);
    let null = std::fs::File::open("/dev/null").unwrap();
    show!("import of another file", import(cuda, &raw mut taken, null.as_raw_fd(), 1));
    show!("import of no file", import(cuda, &raw mut taken, 1000, 1));
    show!("import of kind 0", import(cuda, &raw mut taken, descriptor, 0));
    show!("import to null", import(cuda, null_mut(), descriptor, 1));
}

fn lookups(cuda: &Library) {
    let find = |name: &std::ffi::CStr, version, flags| {
        let (mut function, mut status) = (null_mut::<c_void>(), 9);
        let code = call!(
            cuda, "cuGetProcAddress_v2": fn(*const c_char, *mut *mut c_void, c_int, c_ulonglong, *mut c_uint),
            name.as_ptr(), &raw mut function, version, flags, &raw mut status,
        );
        println!(
            "{name:?} of {version} with {flags}: {code}, found: {}, status {status}",
            !function.is_null()
        );
        function
    };
    let newest = find(c"cuMemAlloc", 13_000, 0);
    let oldest = find(c"cuMemAlloc", 2000, 0);
    println!("they differ: {}", newest != oldest);
    find(c"cuMemAlloc", 1000, 0);
    find(c"cuMemAlloc_v2", 13_000, 0);
    find(c"cuMemAllocAsync", 11_010, 0);
    let legacy = find(c"cuMemAllocAsync", 13_000, 1);
    let own = find(c"cuMemAllocAsync", 13_000, 2);
    println!("they differ: {}", legacy != own);
    find(c"cuMemAllocAsync", 13_000, 3);
    find(c"cuMemAllocAsync", 13_000, 4);
    find(c"cuGraphInstantiate", 12_000, 0);
    find(c"cuGetProcAddress", 12_000, 0);
    let mut function = null_mut();
    show!("by the old form", find_by_old_form(cuda, c"cuMemAlloc", &raw mut function));
    show!("by the old form, of nothing", find_by_old_form(cuda, c"cuNothing", &raw mut function));
}

/// In the order in which they could crash.
fn rare_lookups(cuda: &Library) {
    let mut table = null_mut();
    let id = [7_u8; 16];
    show!(
        "a table that there is not",
        call!(cuda, "cuGetExportTable": fn(*mut *mut c_void, *const [u8; 16]), &raw mut table, &raw const id)
    );
    show!("by the old form, to null", find_by_old_form(cuda, c"cuMemAlloc", null_mut()));
}

fn find_by_old_form(cuda: &Library, name: &std::ffi::CStr, function: *mut *mut c_void) -> Code {
    call!(
        cuda, "cuGetProcAddress": fn(*const c_char, *mut *mut c_void, c_int, c_ulonglong),
        name.as_ptr(), function, 13_000, 0,
    )
}

fn pointers(cuda: &Library) {
    enter(cuda);
    let (mut plain, mut managed, mut host) = (0, 0, null_mut::<c_void>());
    alloc(cuda, &raw mut plain, 4 * MIB);
    call!(cuda, "cuMemAllocManaged": fn(*mut c_ulonglong, usize, c_uint), &raw mut managed, 4 * MIB, 1);
    call!(cuda, "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint), &raw mut host, 4 * MIB, 0);
    let host = u64::try_from(host.addr()).unwrap();
    for (what, address) in [("plain", plain + 5), ("managed", managed), ("host", host), ("nonsense", 0x1234)]
    {
        for attribute in [2, 8, 9] {
            let mut value = 0_u64;
            let code = call!(
                cuda, "cuPointerGetAttribute": fn(*mut u64, c_int, c_ulonglong), &raw mut value, attribute, address,
            );
            // What is not written to stays as it was.
            println!("attribute {attribute} of {what}: {code}, {}", value & 0xffff_ffff);
        }
    }
    let (mut kind, mut ordinal) = (7_u32, 7_i32);
    let (kinds, mut places) = ([2, 9], [(&raw mut kind).cast::<c_void>(), (&raw mut ordinal).cast()]);
    let several = |address, places: *mut *mut c_void| {
        call!(
            cuda, "cuPointerGetAttributes": fn(c_uint, *const c_int, *mut *mut c_void, c_ulonglong),
            2, kinds.as_ptr(), places, address,
        )
    };
    show!("several of plain", several(plain, places.as_mut_ptr()));
    show!("several of nonsense", several(0x1234, places.as_mut_ptr()));
    println!("they are {kind} and {ordinal}");
}

fn host_locations(cuda: &Library) {
    for location in [[2, 0], [3, 0], [4, 0], [0, 0], [5, 0]] {
        let mut handle = 0;
        println!("create at location {location:?}: {}", create_of(cuda, &raw mut handle, 0, location));
    }
}

fn pools_wrongly(cuda: &Library) {
    let (mut address, mut pool, mut number) = (0, null_mut(), 0_u64);
    show!("async without context", alloc_async(cuda, &raw mut address, MIB, null_mut()));
    enter(cuda);
    show!("async of 0", alloc_async(cuda, &raw mut address, 0, null_mut()));
    show!("async to null", alloc_async(cuda, null_mut(), MIB, null_mut()));
    show!("async of too much", alloc_async(cuda, &raw mut address, 1 << 50, null_mut()));
    show!("free of nothing", free_async(cuda, 0, null_mut()));
    show!("free of nonsense", free_async(cuda, 0x1234, null_mut()));
    let mut plain = 0;
    alloc(cuda, &raw mut plain, 4 * MIB);
    show!("free of plain memory", free_async(cuda, plain, null_mut()));
    show!("async", alloc_async(cuda, &raw mut address, MIB, null_mut()));
    show!("plain free of it", release(cuda, address));
    let mut properties = pool_properties();
    properties.max_size = 64 * MIB;
    let create = |out: *mut *mut c_void, properties: *const PoolProperties| call!(cuda, "cuMemPoolCreate": fn(*mut *mut c_void, *const PoolProperties), out, properties);
    show!("pool of null", create(&raw mut pool, std::ptr::null()));
    show!("pool", create(&raw mut pool, &raw const properties));
    let from = |out: *mut c_ulonglong, size| call!(cuda, "cuMemAllocFromPoolAsync": fn(*mut c_ulonglong, usize, *mut c_void, *mut c_void), out, size, pool, null_mut());
    show!("more than the pool may have", from(&raw mut address, 65 * MIB));
    show!("as much as it may have", from(&raw mut address, 64 * MIB));
    for attribute in [0, 1, 4, 5, 6, 7, 8, 99] {
        let code = pool_attribute(cuda, pool, attribute, (&raw mut number).cast());
        println!(
            "attribute {attribute}: {code}, {}",
            if attribute > 3 { number } else { number & 0xffff_ffff }
        );
    }
    let set = |attribute, number: *const u64| call!(cuda, "cuMemPoolSetAttribute": fn(*mut c_void, c_int, *const u64), pool, attribute, number);
    show!("high mark to 1", set(8, &1));
    show!("high mark to 0", set(8, &0));
    show!("reserved to 0", set(5, &0));
    show!("threshold", set(4, &(32 << 20)));
    let destroy = |pool| call!(cuda, "cuMemPoolDestroy": fn(*mut c_void), pool);
    show!("destroy in use", destroy(pool));
    show!("free afterwards", free_async(cuda, address, null_mut()));
    let mut default = null_mut();
    call!(cuda, "cuDeviceGetDefaultMemPool": fn(*mut *mut c_void, c_int), &raw mut default, 0);
    show!("destroy of the default pool", destroy(default));
}

fn graphs_wrongly(cuda: &Library) {
    enter(cuda);
    let (mut graph, mut node, mut executable, mut kind) = (null_mut(), null_mut(), null_mut(), 9);
    call!(cuda, "cuGraphCreate": fn(*mut *mut c_void, c_uint), &raw mut graph, 0);
    let mut parameters = node_parameters(0);
    show!("node of 0", add_node(cuda, &raw mut node, graph, &raw mut parameters));
    parameters = node_parameters(1 << 50);
    show!("node of too much", add_node(cuda, &raw mut node, graph, &raw mut parameters));
    call!(cuda, "cuGraphDestroy": fn(*mut c_void), graph);
    call!(cuda, "cuGraphCreate": fn(*mut *mut c_void, c_uint), &raw mut graph, 0);
    parameters = node_parameters(4 * MIB);
    add_node(cuda, &raw mut node, graph, &raw mut parameters);
    show!("type", call!(cuda, "cuGraphNodeGetType": fn(*mut c_void, *mut c_int), node, &raw mut kind));
    println!("type is {kind}");
    let mut count = 0;
    show!(
        "count",
        call!(cuda, "cuGraphGetNodes": fn(*mut c_void, *mut *mut c_void, *mut usize), graph, null_mut(), &raw mut count)
    );
    println!("count is {count}");
    let mut free_node = |address| call!(cuda, "cuGraphAddMemFreeNode": fn(*mut *mut c_void, *mut c_void, *const *mut c_void, usize, c_ulonglong), &raw mut node, graph, std::ptr::null(), 0, address);
    show!("free node of nonsense", free_node(0x1234));
    show!("instantiate", instantiate(cuda, &raw mut executable, graph));
    show!("free before the launch", release(cuda, parameters.address));
    show!("launch", launch(cuda, executable));
    show!("launch again", launch(cuda, executable));
    show!("free", release(cuda, parameters.address));
    show!("launch after the free", launch(cuda, executable));
    show!("free async", free_async(cuda, parameters.address, null_mut()));
}

/// What became of memory that went in a stream's order and did not come so.
fn freeing(cuda: &Library) {
    enter(cuda);
    let (mut nothing, mut plain, mut managed, mut pooled) = (7, 0, 0, 0);
    alloc_async(cuda, &raw mut nothing, 0, null_mut());
    println!("async of 0 gives null: {}", nothing == 0);
    show!("free of what it gave", free_async(cuda, nothing, null_mut()));
    alloc(cuda, &raw mut plain, 4 * MIB);
    free_async(cuda, plain, null_mut());
    show!("free of plain memory again", release(cuda, plain));
    call!(cuda, "cuMemAllocManaged": fn(*mut c_ulonglong, usize, c_uint), &raw mut managed, 4 * MIB, 1);
    show!("free of managed memory", free_async(cuda, managed, null_mut()));
    show!("free of it again", release(cuda, managed));
    alloc_async(cuda, &raw mut pooled, 4 * MIB, null_mut());
    show!("free of a pool's middle", free_async(cuda, pooled + (2 << 20), null_mut()));
    show!("free of a pool's", free_async(cuda, pooled, null_mut()));
    show!("free of it again", free_async(cuda, pooled, null_mut()));
}

/// What a thread that captures may do with memory of the default stream.
fn pools_within_captures(cuda: &Library) {
    enter(cuda);
    let (mut stream, mut pool) = (null_mut(), null_mut());
    let (mut kept, mut address) = (0, 0);
    call!(cuda, "cuStreamCreate": fn(*mut *mut c_void, c_uint), &raw mut stream, 1);
    call!(cuda, "cuDeviceGetDefaultMemPool": fn(*mut *mut c_void, c_int), &raw mut pool, 0);
    let begin = || call!(cuda, "cuStreamBeginCapture_v2": fn(*mut c_void, c_int), stream, 0);
    let end = || {
        let mut graph = null_mut();
        call!(cuda, "cuStreamEndCapture": fn(*mut c_void, *mut *mut c_void), stream, &raw mut graph)
    };
    let exchange = |mode: *mut c_int| call!(cuda, "cuThreadExchangeStreamCaptureMode": fn(*mut c_int), mode);
    let trim = || call!(cuda, "cuMemPoolTrimTo": fn(*mut c_void, usize), pool, 0);
    // The pool has room from here on.
    alloc_async(cuda, &raw mut kept, MIB, null_mut());
    begin();
    show!("async where there is room", alloc_async(cuda, &raw mut address, MIB, null_mut()));
    show!("end", end());
    begin();
    show!("free of a pool's", free_async(cuda, kept, null_mut()));
    show!("end", end());
    begin();
    show!("trim of graphs", call!(cuda, "cuDeviceGraphMemTrim": fn(c_int), 0));
    show!("end", end());
    let mut mode = 2;
    begin();
    exchange(&raw mut mode);
    show!("async while relaxed", alloc_async(cuda, &raw mut address, MIB, null_mut()));
    show!("free while relaxed", free_async(cuda, address, null_mut()));
    show!("trim while relaxed", trim());
    exchange(&raw mut mode);
    show!("end", end());
}

/// From which size on a node that takes memory cannot be made.
fn large_nodes(cuda: &Library) {
    enter(cuda);
    let (mut graph, mut node) = (null_mut(), null_mut());
    call!(cuda, "cuGraphCreate": fn(*mut *mut c_void, c_uint), &raw mut graph, 0);
    for tebibytes in [1_usize, 16, 64, 256] {
        let mut parameters = node_parameters(tebibytes << 40);
        println!("node of {tebibytes} TiB: {}", add_node(cuda, &raw mut node, graph, &raw mut parameters));
    }
}

/// A call that may spoil a capture, by a name.
type Spoiler<'a> = (&'static str, &'a dyn Fn(&mut c_ulonglong) -> Code);

fn captures(cuda: &Library) {
    enter(cuda);
    let mut stream = null_mut();
    let begin = |stream, mode| call!(cuda, "cuStreamBeginCapture_v2": fn(*mut c_void, c_int), stream, mode);
    let end = |stream| {
        let mut graph = null_mut();
        let code =
            call!(cuda, "cuStreamEndCapture": fn(*mut c_void, *mut *mut c_void), stream, &raw mut graph);
        format!("{code}, graph: {}", !graph.is_null())
    };
    let status = |stream| {
        let mut status = 9;
        let code = call!(cuda, "cuStreamIsCapturing": fn(*mut c_void, *mut c_int), stream, &raw mut status);
        format!("{code}, {status}")
    };
    let synchronize = |stream| call!(cuda, "cuStreamSynchronize": fn(*mut c_void), stream);
    show!("stream", call!(cuda, "cuStreamCreate": fn(*mut *mut c_void, c_uint), &raw mut stream, 1));
    show!("capture of the default stream", begin(null_mut(), 0));
    show!("capture of mode 3", begin(stream, 3));
    show!("end without begin", end(stream));
    show!("status", status(stream));
    let (mut address, mut pooled, mut free, mut total) = (0, 0, 0, 0);
    let spoilers: [Spoiler<'_>; 6] = [
        ("alloc", &|address| alloc(cuda, address, MIB)),
        (
            "managed",
            &|address| call!(cuda, "cuMemAllocManaged": fn(*mut c_ulonglong, usize, c_uint), address, MIB, 1),
        ),
        ("context synchronize", &|_| call!(cuda, "cuCtxSynchronize": fn(),)),
        ("synchronize", &|_| synchronize(stream)),
        ("query", &|_| call!(cuda, "cuStreamQuery": fn(*mut c_void), stream)),
        ("trim", &|_| {
            let mut pool = null_mut();
            call!(cuda, "cuDeviceGetDefaultMemPool": fn(*mut *mut c_void, c_int), &raw mut pool, 0);
            call!(cuda, "cuMemPoolTrimTo": fn(*mut c_void, usize), pool, 0)
        }),
    ];
    for (name, spoil) in spoilers {
        begin(stream, 0);
        println!("{name} within: {}, status {}", spoil(&mut address), status(stream));
        println!("end after {name}: {}", end(stream));
    }
    show!("begin", begin(stream, 0));
    show!("begin again", begin(stream, 0));
    show!("info within", info(cuda, &raw mut free, &raw mut total));
    show!("async within", alloc_async(cuda, &raw mut pooled, MIB, stream));
    show!("async on the default stream within", alloc_async(cuda, &raw mut address, MIB, null_mut()));
    show!("free within", free_async(cuda, pooled, stream));
    show!("status", status(stream));
    show!("end", end(stream));
    begin(stream, 0);
    let mut mode = 2;
    let exchange = |mode: *mut c_int| call!(cuda, "cuThreadExchangeStreamCaptureMode": fn(*mut c_int), mode);
    show!("relaxed", exchange(&raw mut mode));
    show!("alloc while relaxed", alloc(cuda, &raw mut address, MIB));
    show!("back", exchange(&raw mut mode));
    show!("end", end(stream));
    begin(stream, 2);
    show!("alloc within a relaxed capture", alloc(cuda, &raw mut address, MIB));
    show!("end", end(stream));
    let mut handle = 0;
    begin(stream, 0);
    show!("create within", create_of(cuda, &raw mut handle, 0, [1, 0]));
    show!("end", end(stream));
}

fn opened(cuda: &Library) {
    enter(cuda);
    let (mut plain, mut managed, mut pooled, mut other) = (0, 0, 0, 0);
    let mut handle = [0_u64; 8];
    let get = |handle: *mut [u64; 8], address| call!(cuda, "cuIpcGetMemHandle": fn(*mut [u64; 8], c_ulonglong), handle, address);
    alloc(cuda, &raw mut plain, 4 * MIB);
    call!(cuda, "cuMemAllocManaged": fn(*mut c_ulonglong, usize, c_uint), &raw mut managed, 4 * MIB, 1);
    alloc_async(cuda, &raw mut pooled, MIB, null_mut());
    show!("of managed memory", get(&raw mut handle, managed));
    show!("of a pool's", get(&raw mut handle, pooled));
    show!("of nonsense", get(&raw mut handle, 0x1234));
    show!("of plain memory", get(&raw mut handle, plain));
    show!("of its middle", get(&raw mut handle, plain + 4096));
    show!("close of what is its own", call!(cuda, "cuIpcCloseMemHandle": fn(c_ulonglong), plain));
    show!(
        "open of its own",
        call!(
            cuda, "cuIpcOpenMemHandle_v2": fn(*mut c_ulonglong, IpcHandle, c_uint),
            &raw mut other, IpcHandle(handle), 1,
        )
    );
}

/// Where a process is, as a number; negative where the driver does not say.
fn state(cuda: &Library, pid: c_int) -> c_int {
    let mut state = -1;
    let code = call!(cuda, "cuCheckpointProcessGetState": fn(c_int, *mut c_int), pid, &raw mut state);
    if code == 0 { state } else { -c_int::try_from(code).unwrap() }
}

/// Another process goes to the host and comes back.
fn checkpoints(cuda: &Library) {
    let mut other = Command::new(std::env::current_exe().unwrap());
    let mut other = other.arg(PARKED).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut orders, answers) = (other.stdin.take().unwrap(), other.stdout.take().unwrap());
    let mut answers = BufReader::new(answers).lines();
    assert_eq!(answers.next().unwrap().unwrap(), "ready");
    let pid = c_int::try_from(other.id()).unwrap();
    let zeroes = [0_u64; 8];
    let step = |name: &str, pid| {
        // SAFETY: the types are those of cuda.h, and zeroes are good arguments of each.
        unsafe {
            let name = format!("cuCheckpointProcess{name}");
            let step =
                cuda.get::<unsafe extern "C" fn(c_int, *const [u64; 8]) -> Code>(name.as_bytes()).unwrap();
            step(pid, &raw const zeroes)
        }
    };
    println!("state: {}", state(cuda, pid));
    show!(
        "state to null",
        call!(cuda, "cuCheckpointProcessGetState": fn(c_int, *mut c_int), pid, null_mut())
    );
    println!("state of no process: {}", state(cuda, 0));
    show!("checkpoint while it runs", step("Checkpoint", pid));
    show!("restore while it runs", step("Restore", pid));
    show!("unlock while it runs", step("Unlock", pid));
    show!("lock", step("Lock", pid));
    println!("state: {}", state(cuda, pid));
    show!("lock again", step("Lock", pid));
    show!("restore while it is locked", step("Restore", pid));
    writeln!(orders, "allocate").unwrap();
    show!("checkpoint", step("Checkpoint", pid));
    println!("state: {}", state(cuda, pid));
    show!("checkpoint again", step("Checkpoint", pid));
    show!("unlock while it is on the host", step("Unlock", pid));
    show!("restore", step("Restore", pid));
    println!("state: {}", state(cuda, pid));
    show!("unlock", step("Unlock", pid));
    println!("state: {}", state(cuda, pid));
    println!("its allocation meanwhile: {}", answers.next().unwrap().unwrap());
    // What it imports does not come back.
    writeln!(orders, "import").unwrap();
    println!("its import: {}", answers.next().unwrap().unwrap());
    show!("lock", step("Lock", pid));
    show!("checkpoint", step("Checkpoint", pid));
    show!("restore", step("Restore", pid));
    println!("state: {}", state(cuda, pid));
    other.kill().unwrap();
    other.wait().unwrap();
}

/// In another process, which does as it is told.
fn parked(cuda: &Library) {
    enter(cuda);
    let (mut address, mut handle, mut taken, mut descriptor) = (0, 0, 0, -1);
    alloc(cuda, &raw mut address, 64 * MIB);
    println!("ready");
    for order in std::io::stdin().lines() {
        if order.unwrap() == "allocate" {
            println!("{}", alloc(cuda, &raw mut address, 64 * MIB));
        } else {
            create_shareable(cuda, &raw mut handle);
            export(cuda, &raw mut descriptor, handle, 1, 0);
            println!("{}", import(cuda, &raw mut taken, descriptor, 1));
        }
    }
}

/// Makes device 0's context current.
fn enter(cuda: &Library) {
    let mut context = null_mut();
    call!(cuda, "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int), &raw mut context, 0);
    call!(cuda, "cuCtxSetCurrent": fn(*mut c_void), context);
}

/// Makes 64 MiB that a descriptor may keep.
fn create_shareable(cuda: &Library, out: *mut c_ulonglong) -> Code {
    create_of(cuda, out, 1, [1, 0])
}

fn create_of(cuda: &Library, out: *mut c_ulonglong, handle_types: c_int, location: [c_int; 2]) -> Code {
    let properties = Properties { kind: 1, handle_types, location, meta: null_mut(), flags: [0; 8] };
    call!(
        cuda, "cuMemCreate": fn(*mut c_ulonglong, usize, *const Properties, c_ulonglong),
        out, 64 * MIB, &raw const properties, 0,
    )
}

fn export(cuda: &Library, out: *mut c_int, handle: c_ulonglong, kind: c_int, flags: c_ulonglong) -> Code {
    call!(
        cuda, "cuMemExportToShareableHandle": fn(*mut c_int, c_ulonglong, c_int, c_ulonglong),
        out, handle, kind, flags,
    )
}

fn import(cuda: &Library, out: *mut c_ulonglong, descriptor: c_int, kind: c_int) -> Code {
    let number: *mut c_void = std::ptr::without_provenance_mut(usize::try_from(descriptor).unwrap());
    call!(
        cuda, "cuMemImportFromShareableHandle": fn(*mut c_ulonglong, *mut c_void, c_int), out, number, kind,
    )
}

fn alloc_async(cuda: &Library, out: *mut c_ulonglong, bytes: usize, stream: *mut c_void) -> Code {
    call!(cuda, "cuMemAllocAsync": fn(*mut c_ulonglong, usize, *mut c_void), out, bytes, stream)
}

fn free_async(cuda: &Library, address: c_ulonglong, stream: *mut c_void) -> Code {
    call!(cuda, "cuMemFreeAsync": fn(c_ulonglong, *mut c_void), address, stream)
}

fn pool_attribute(cuda: &Library, pool: *mut c_void, attribute: c_int, value: *mut c_void) -> Code {
    call!(cuda, "cuMemPoolGetAttribute": fn(*mut c_void, c_int, *mut c_void), pool, attribute, value)
}

fn pool_properties() -> PoolProperties {
    PoolProperties {
        kind: 1,
        handle_types: 0,
        location: [1, 0],
        security: null_mut(),
        max_size: 0,
        rest: [0; 56],
    }
}

fn node_parameters(bytes: usize) -> NodeParameters {
    NodeParameters { pool: pool_properties(), access: std::ptr::null(), access_count: 0, bytes, address: 0 }
}

fn add_node(
    cuda: &Library,
    out: *mut *mut c_void,
    graph: *mut c_void,
    parameters: *mut NodeParameters,
) -> Code {
    call!(
        cuda,
        "cuGraphAddMemAllocNode": fn(*mut *mut c_void, *mut c_void, *const *mut c_void, usize, *mut NodeParameters),
        out, graph, std::ptr::null(), 0, parameters,
    )
}

fn instantiate(cuda: &Library, out: *mut *mut c_void, graph: *mut c_void) -> Code {
    call!(
        cuda, "cuGraphInstantiateWithFlags": fn(*mut *mut c_void, *mut c_void, c_ulonglong), out, graph, 0,
    )
}

fn launch(cuda: &Library, executable: *mut c_void) -> Code {
    call!(cuda, "cuGraphLaunch": fn(*mut c_void, *mut c_void), executable, null_mut())
}

fn alloc(cuda: &Library, out: *mut c_ulonglong, bytes: usize) -> Code {
    call!(cuda, "cuMemAlloc_v2": fn(*mut c_ulonglong, usize), out, bytes)
}

fn release(cuda: &Library, address: c_ulonglong) -> Code {
    call!(cuda, "cuMemFree_v2": fn(c_ulonglong), address)
}

fn info(cuda: &Library, free: *mut usize, total: *mut usize) -> Code {
    call!(cuda, "cuMemGetInfo_v2": fn(*mut usize, *mut usize), free, total)
}

//! Calls `libcuda.so.1` rightly and wrongly, and prints each result code: on the simulator and on
//! a real driver the output must be the same. Lines about bytes are rounded to MiB.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a tool for tests: what is not there is an error anyway"
)]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::process::Command;
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

/// Some calls in a row.
type Group = fn(&Library);

/// Each runs in a process of its own, so that a crash of the driver ends no other.
const GROUPS: [(&str, Group); 9] = [
    ("before init", before_init),
    ("devices", devices),
    ("without context", without_context),
    ("with context", with_context),
    ("contexts", contexts),
    ("virtual memory", virtual_memory),
    ("errors and entry points", errors_and_entry_points),
    ("after fork", after_fork),
    ("memory", memory),
];

fn main() {
    let Some(name) = std::env::args().nth(1) else {
        for (name, _) in GROUPS {
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
    let (name, group) = GROUPS.iter().find(|(known, _)| *known == name).unwrap();
    if *name != "before init" && *name != "memory" {
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
        let now = Self::read();
        let mib = |bytes: i64| bytes / 1_048_576;
        println!("{when}: process {:+}, device {:+}", mib(now.0 - self.before.0), mib(now.1 - self.before.1));
        self.before = now;
    }
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

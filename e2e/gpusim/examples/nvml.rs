//! Prints what NVML says about every device, as JSON: an independent reader, for the simulator
//! and for real devices alike.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a tool for tests: what is not there is an error anyway"
)]

use std::ffi::{CString, c_char, c_uint, c_void};

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use std::time::{Duration, Instant};

use nvml_wrapper::{Device, Nvml, error::NvmlError};
use serde_json::{Value, json};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "limits") {
        return println!("{}", limits(&arguments[1..]));
    }
    let nvml = match Nvml::init() {
        Ok(nvml) => nvml,
        Err(error) => {
            println!("{}", json!({ "error": format!("{error:?}") }));
            return;
        }
    };
    match arguments.first().map(String::as_str) {
        Some("lines") => lines(&nvml),
        Some("child") => child(&nvml),
        Some(pid) => follow(&nvml, pid.parse().unwrap()),
        None => println!("{}", look(&nvml)),
    }
}

/// `lines`: everything for each line of the input, which goes before it.
fn lines(nvml: &Nvml) {
    for line in std::io::stdin().lines() {
        println!("{}: {}", line.unwrap(), look(nvml));
    }
}

/// `child`: as `lines`, by a child of the process that opened the driver and looked once.
fn child(nvml: &Nvml) {
    look(nvml);
    // SAFETY: this process has one thread, so the child has all that it needs.
    match unsafe { libc::fork() } {
        0 => lines(nvml),
        // SAFETY: it is our child, and a null pointer asks for no status.
        child => drop(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }),
    }
}

/// Everything.
fn look(nvml: &Nvml) -> Value {
    let count = nvml.device_count().unwrap();
    let devices: Vec<Value> = (0..count).map(|index| show(nvml, nvml.device_by_index(index))).collect();
    let driver = nvml.sys_driver_version().unwrap();
    let cuda = nvml.sys_cuda_driver_version().unwrap();
    json!({ "driver": driver, "cuda": cuda, "devices": devices })
}

/// `limits get INDEX CGROUP` and `limits set INDEX CGROUP SOFT HARD`: the code of the call, and what
/// it says.
fn limits(arguments: &[String]) -> Value {
    #[repr(C)]
    struct Limits {
        namespace: *const c_char,
        soft: u64,
        hard: u64,
        used: u64,
    }
    let (index, namespace) = (arguments[1].parse::<c_uint>().unwrap(), CString::new(&*arguments[2]).unwrap());
    let number = |at: usize| arguments.get(at).map_or(0, |text| text.parse().unwrap());
    let mut limits = Limits { namespace: namespace.as_ptr(), soft: number(3), hard: number(4), used: 0 };
    // SAFETY: loading NVML has no conditions, and the types are those of nvml.h for these names.
    let code = unsafe {
        let nvml = libloading::Library::new("libnvidia-ml.so.1").unwrap();
        nvml.get::<unsafe extern "C" fn() -> c_uint>(b"nvmlInit_v2").unwrap()();
        let mut device = std::ptr::null_mut::<c_void>();
        let find = b"nvmlDeviceGetHandleByIndex_v2";
        nvml.get::<unsafe extern "C" fn(c_uint, *mut *mut c_void) -> c_uint>(find).unwrap()(
            index,
            &raw mut device,
        );
        let name: &[u8] = match &*arguments[0] {
            "set" => b"nvmlDeviceSetMemoryLimits_v1",
            _ => b"nvmlDeviceGetMemoryLimits_v1",
        };
        nvml.get::<unsafe extern "C" fn(*mut c_void, *mut Limits) -> c_uint>(name).unwrap()(
            device,
            &raw mut limits,
        )
    };
    json!({ "code": code, "soft": limits.soft, "hard": limits.hard, "used": limits.used })
}

/// Prints each change of what device 0 and `/proc` say about a process, until its memory is back.
fn follow(nvml: &Nvml, pid: u32) {
    let device = nvml.device_by_index(0).unwrap();
    let start = Instant::now();
    let mut before = Value::Null;
    let mut gone_since = None;
    while gone_since.is_none_or(|since: Instant| since.elapsed() < Duration::from_millis(500)) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let state = status.lines().find_map(|line| line.strip_prefix("State:")).map(str::trim);
        let list = device.running_compute_processes().unwrap();
        let now = json!({
            "proc": state,
            "listed": list.iter().find(|process| process.pid == pid).map(|process| format!("{process:?}")),
            "usedMib": device.memory_info().unwrap().used >> 20,
        });
        if now != before {
            println!("{:.1} ms: {now}", start.elapsed().as_secs_f64() * 1e3);
            before = now;
        }
        if state.is_none() && gone_since.is_none() {
            gone_since = Some(Instant::now());
        }
    }
}

fn show(nvml: &Nvml, device: Result<Device, NvmlError>) -> Value {
    let device = match device {
        Ok(device) => device,
        Err(error) => return json!({ "error": format!("{error:?}") }),
    };
    let uuid = device.uuid().unwrap();
    assert_eq!(nvml.device_by_uuid(uuid.as_str()).unwrap().uuid().unwrap(), uuid);
    let instances = device.mig_device_count().unwrap_or(0);
    let instances = (0..instances).map_while(|index| device.mig_device_by_index(index).ok());
    let instances: Vec<Value> = instances
        .map(|instance| {
            assert!(instance.mig_is_mig_device_handle().unwrap());
            assert_eq!(instance.mig_parent_device().unwrap().uuid().unwrap(), uuid);
            memory_and_processes(&instance, json!({ "uuid": instance.uuid().unwrap() }))
        })
        .collect();
    let facts = json!({
        "uuid": uuid,
        "name": device.name().unwrap(),
        "minor": device.minor_number().unwrap(),
        "bus": device.pci_info().unwrap().bus_id,
        "brand": format!("{:?}", device.brand().unwrap()),
        "mig": device.mig_mode().map(|mode| mode.current).ok(),
        "instances": instances,
    });
    memory_and_processes(&device, facts)
}

fn memory_and_processes(device: &Device, facts: Value) -> Value {
    let memory = match device.memory_info() {
        Ok(memory) => json!({
            "total": memory.total, "reserved": memory.reserved, "used": memory.used, "free": memory.free,
        }),
        Err(error) => json!({ "error": format!("{error:?}") }),
    };
    let lists = json!({
        "memory": memory,
        "compute": processes(device.running_compute_processes()),
        "graphics": processes(device.running_graphics_processes()),
        "mps": processes(device.mps_running_compute_processes()),
    });
    let all = [facts, lists].into_iter().filter_map(|value| value.as_object().cloned()).flatten();
    Value::Object(all.collect())
}

fn processes(list: Result<Vec<ProcessInfo>, NvmlError>) -> Value {
    let entry = |process: &ProcessInfo| {
        let bytes = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        json!({ "pid": process.pid, "bytes": bytes, "gi": process.gpu_instance_id, "ci": process.compute_instance_id })
    };
    match list {
        Ok(list) => list.iter().map(entry).collect(),
        Err(error) => json!({ "error": format!("{error:?}") }),
    }
}

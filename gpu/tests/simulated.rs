//! The crate against the simulated driver: its library, opened as the real one would be, and its
//! daemon, served by a thread of this process.
//!
//! The tests run at once and share one host, so each has devices of its own.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod host;

use std::{
    process::{Child, Command, Stdio},
    sync::{LazyLock, RwLock},
    time::{Duration, Instant},
};

use gpusim::{
    client::Client,
    fault::{Fault, FaultKind},
    protocol::{Control, MemoryKind, ProcessList, Region, Request},
    size::Bytes,
};
use highwater_gpu::{
    Device, DeviceInfo, Driver, ErrorClass, Inventory, Kinds, LimitError, MAX_RETAKES, Partition, Reading,
    Unavailable,
};

use host::Host;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const CONTEXT: u64 = 518 * MIB;

/// Nine GPUs, the last one cut in two; all memory is somebody's.
const CONFIG: &str = r#"{"driverVersion": "580.1", "contextOverhead": 0, "openOverhead": 0, "devices": [
    {"count": 8},
    {"mig": [{"profile": "1g.18gb", "memory": "16Gi", "gpuInstance": 7},
             {"profile": "2g.35gb", "memory": "32Gi", "gpuInstance": 3}]}
]}"#;

static HOST: LazyLock<Host> = LazyLock::new(|| Host::start(CONFIG, &["gpusim-nvml"]));

fn open() -> Driver {
    Driver::open(Some(&HOST.nvml())).unwrap()
}

/// Taking stock reads the memory of every device, which ends a tear of one that is under test.
static STOCK: RwLock<()> = RwLock::new(());

fn inventory(driver: &Driver) -> Inventory {
    let _others_may = STOCK.read().unwrap();
    driver.inventory().unwrap()
}

fn devices(driver: &Driver) -> Vec<DeviceInfo> {
    inventory(driver).devices
}

/// The whole GPU at an index, and a connection that acts on it.
fn gpu(driver: &Driver, index: u32) -> (Device, Simulator) {
    let info = devices(driver).into_iter().find(|d| d.index == index).unwrap();
    (Device::new(info.uuid), Simulator::at(Region { device: index, instance: None }))
}

struct Simulator {
    client: Client,
    region: Region,
}

impl Simulator {
    fn at(region: Region) -> Self {
        Self { client: Client::connect(&HOST.socket).unwrap(), region }
    }

    fn inject(&mut self, kind: FaultKind) {
        self.client.control(Control::Inject(Fault { region: self.region, kind })).unwrap();
    }

    fn clear(&mut self) {
        self.client.control(Control::Clear { device: Some(self.region.device), kind: None }).unwrap();
    }

    fn create_context(&mut self) {
        let (devices, lists) = (vec![self.region.device], vec![ProcessList::Compute]);
        self.client.call(&Request::Attach { devices, lists }).unwrap();
        self.client.call(&Request::CreateContext(self.region)).unwrap();
    }

    fn allocate(&mut self, kind: MemoryKind, bytes: u64) {
        let request = Request::Allocate { region: self.region, kind, bytes, context: None };
        self.client.call(&request).unwrap();
    }
}

/// A process that lives until it is dropped.
struct Other(Child);

impl Other {
    fn start() -> Self {
        Self(Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn pids_and_bytes(reading: &Reading) -> Vec<(u32, Option<u64>)> {
    reading.processes.as_ref().unwrap().iter().map(|process| (process.pid, process.bytes)).collect()
}

#[test]
fn instances_are_listed_in_the_place_of_their_gpu() {
    let driver = open();
    assert_eq!(driver.version(), "580.1");
    let inventory = inventory(&driver);
    assert_eq!(inventory.failed, []);
    let labels: Vec<_> = inventory.devices.iter().map(DeviceInfo::label).collect();
    assert_eq!(labels, ["0", "1", "2", "3", "4", "5", "6", "7", "8/7", "8/3"]);
    let (whole, instance) = (&inventory.devices[0], &inventory.devices[8]);
    assert_eq!((whole.product.as_str(), &whole.partition), ("NVIDIA H200", &Partition::Whole));
    assert_eq!(whole.total, Some(143_771 * MIB));
    assert_eq!(whole.minor, Some(0));
    assert!(whole.uuid.starts_with("GPU-"), "{}", whole.uuid);
    assert_eq!(instance.product, "NVIDIA H200 MIG 1g.18gb");
    assert!(instance.uuid.starts_with("MIG-"), "{}", instance.uuid);
    let Partition::Mig { parent, gpu_instance: 7, compute_instance: 0 } = &instance.partition else {
        panic!("{:?}", instance.partition)
    };
    assert!(parent.starts_with("GPU-"), "{parent}");
}

#[test]
fn contexts_count_and_memory_without_one_is_charged_to_nobody() {
    let driver = open();
    let (mut device, mut simulator) = gpu(&driver, 0);
    let idle = driver.sample(&mut device);
    assert_eq!(idle.errors, []);
    assert_eq!(idle.processes, Some(vec![]));
    assert_eq!(idle.used.zip(idle.free).zip(idle.reserved).map(|((u, f), r)| u + f + r), idle.total);

    simulator.allocate(MemoryKind::Physical, GIB);
    let hidden = driver.sample(&mut device);
    assert_eq!(hidden.used, idle.used.map(|used| used + GIB));
    assert_eq!(hidden.processes, Some(vec![]));

    let mut with_context = Simulator::at(simulator.region);
    with_context.create_context();
    with_context.allocate(MemoryKind::Plain, GIB);
    let busy = driver.sample(&mut device);
    assert_eq!(busy.used, idle.used.map(|used| used + 2 * GIB + CONTEXT));
    let charged: u64 = pids_and_bytes(&busy).iter().filter_map(|(_, bytes)| *bytes).sum();
    assert!([GIB + CONTEXT, 2 * GIB + CONTEXT].contains(&charged), "{charged}");
    assert!(!busy.torn);
}

#[test]
fn a_process_in_several_lists_counts_once() {
    let driver = open();
    let (mut device, mut simulator) = gpu(&driver, 1);
    let (one, other) = (Other::start(), Other::start());
    for (process, list) in
        [(&one, ProcessList::Compute), (&one, ProcessList::Graphics), (&other, ProcessList::Mps)]
    {
        simulator.inject(FaultKind::Foreign { pid: process.0.id(), bytes: Bytes(GIB), list });
    }
    let reading = driver.sample(&mut device);
    let kinds: Vec<_> = reading.processes.unwrap().iter().map(|p| (p.pid, p.kinds)).collect();
    assert_eq!(
        kinds,
        [
            (one.0.id(), Kinds { compute: true, graphics: true, mps: false }),
            (other.0.id(), Kinds { compute: false, graphics: false, mps: true }),
        ]
    );
}

#[test]
fn the_first_client_of_mps_is_found_soon_and_then_seen_in_every_sample() {
    let driver = open();
    let (mut device, mut simulator) = gpu(&driver, 7);
    driver.sample(&mut device);
    let client = Other::start();
    simulator.inject(FaultKind::Foreign { pid: client.0.id(), bytes: Bytes(GIB), list: ProcessList::Mps });
    let started = Instant::now();
    let sees = |reading: Reading| pids_and_bytes(&reading) == [(client.0.id(), Some(GIB))];
    while !sees(driver.sample(&mut device)) {
        assert!(started.elapsed() < Duration::from_secs(5), "not found");
    }
    assert!((0..10).all(|_| sees(driver.sample(&mut device))));
}

#[test]
fn missing_numbers_are_missing() {
    let driver = open();
    let (mut device, mut simulator) = gpu(&driver, 2);
    let (seen, unseen) = (Other::start(), Other::start());
    for pid in [seen.0.id(), unseen.0.id()] {
        simulator.inject(FaultKind::Foreign { pid, bytes: Bytes(GIB), list: ProcessList::Compute });
    }
    simulator.inject(FaultKind::MissingProcessMemory { pid: Some(unseen.0.id()) });
    let reading = driver.sample(&mut device);
    assert_eq!(pids_and_bytes(&reading), [(seen.0.id(), Some(GIB)), (unseen.0.id(), None)]);

    simulator.inject(FaultKind::MissingMemory);
    let reading = driver.sample(&mut device);
    assert_eq!((reading.total, reading.used, reading.free, reading.reserved), (None, None, None, None));
    assert_eq!(reading.errors.iter().map(|e| e.class).collect::<Vec<_>>(), [ErrorClass::NotSupported]);
    assert_eq!(pids_and_bytes(&reading).len(), 2);
}

#[test]
fn a_lost_device_says_so_and_is_found_again() {
    let driver = open();
    let (mut device, mut simulator) = gpu(&driver, 3);
    simulator.inject(FaultKind::Lost);
    for _ in 0..2 {
        let reading = driver.sample(&mut device);
        assert!(reading.lost(), "{reading:?}");
        assert_eq!((reading.used, reading.processes), (None, None));
    }
    let inventory = inventory(&driver);
    assert_eq!(
        inventory.failed.iter().map(|(i, e)| (*i, e.class)).collect::<Vec<_>>(),
        [(3, ErrorClass::Lost)]
    );
    simulator.clear();
    let reading = driver.sample(&mut device);
    assert_eq!((reading.errors, reading.processes), (vec![], Some(vec![])));
}

#[test]
fn a_torn_sample_is_taken_again_and_flagged_if_it_stays_torn() {
    let driver = open();
    let (mut device, mut simulator) = gpu(&driver, 4);
    let _nobody_else = STOCK.write().unwrap();
    let idle = driver.sample(&mut device);
    simulator.inject(FaultKind::Torn { bytes: Bytes(8 * GIB), reads: Some(1), raised: false });
    let reading = driver.sample(&mut device);
    assert_eq!((reading.torn, reading.retakes, reading.used), (false, 1, idle.used));
    simulator.inject(FaultKind::Torn { bytes: Bytes(8 * GIB), reads: None, raised: false });
    let reading = driver.sample(&mut device);
    assert_eq!((reading.torn, reading.retakes), (true, MAX_RETAKES));
    simulator.clear();
    let reading = driver.sample(&mut device);
    assert_eq!((reading.torn, reading.retakes, reading.used), (false, 0, idle.used));
}

#[test]
fn an_instance_shows_its_own_memory_and_processes() {
    let driver = open();
    let instances: Vec<_> = devices(&driver).into_iter().filter(|d| d.index == 8).collect();
    let mut simulator = Simulator::at(Region { device: 8, instance: Some(0) });
    simulator.create_context();
    let mut readings = instances.iter().map(|info| driver.sample(&mut Device::new(info.uuid.as_str())));
    let (used, unused) = (readings.next().unwrap(), readings.next().unwrap());
    assert_eq!(pids_and_bytes(&used), [(std::process::id(), Some(CONTEXT))]);
    assert_eq!(pids_and_bytes(&unused), []);
    assert_eq!(used.used, unused.used.map(|bytes| bytes + CONTEXT));
    assert_eq!(used.total, instances[0].total);
}

#[test]
fn more_processes_than_expected_are_all_listed() {
    let driver = open();
    let (mut device, mut simulator) = gpu(&driver, 5);
    let others: Vec<_> = (0..70).map(|_| Other::start()).collect();
    for other in &others {
        let fault = FaultKind::Foreign { pid: other.0.id(), bytes: Bytes(MIB), list: ProcessList::Compute };
        simulator.inject(fault);
    }
    assert_eq!(driver.sample(&mut device).processes.unwrap().len(), others.len());
}

#[test]
fn a_device_outlives_the_driver_that_was_closed() {
    let driver = open();
    let (mut device, _) = gpu(&driver, 6);
    let before = driver.sample(&mut device);
    driver.close().unwrap();
    let driver = open();
    assert_eq!(driver.sample(&mut device), before);
    let mut unknown = Device::new("GPU-00000000-0000-0000-0000-000000000000");
    assert_eq!(driver.sample(&mut unknown).errors[0].class, ErrorClass::NotFound);
}

#[test]
fn a_driver_before_limits_says_that_it_has_none() {
    let driver = open();
    let (device, _) = gpu(&driver, 0);
    // A file that every directory of a cgroup v2 tree has.
    let cgroup = tempfile::tempdir().unwrap();
    std::fs::write(cgroup.path().join("cgroup.controllers"), "").unwrap();
    let error = match driver.limits() {
        Ok(limits) => limits.set(device.uuid(), cgroup.path(), GIB).unwrap_err(),
        Err(unavailable) => unavailable.into(),
    };
    assert_eq!(error, LimitError::Unavailable(Unavailable::DriverTooOld { version: "580.1".into() }));
}

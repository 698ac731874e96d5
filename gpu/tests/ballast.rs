//! Memory that a descriptor holds, and limits of the driver's own, against a simulated driver
//! that is new enough for both. A daemon of its own, served by a thread of this process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod host;

use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use gpusim::{client::Client, protocol::State};
use highwater_gpu::{Ballast, BallastError, Device, Driver, Limit, LimitError, Partition, Unavailable};

use host::Host;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const CONFIG: &str = r#"{"driverVersion": "615.10", "memoryLimits": "force", "contextOverhead": 0, "openOverhead": 0,
    "devices": [{}, {"mig": [{"profile": "1g.18gb", "memory": "16Gi", "gpuInstance": 7}]}]}"#;

static HOST: LazyLock<Host> = LazyLock::new(|| Host::start(CONFIG, &["gpusim-nvml", "gpusim-cuda"]));

/// The tests share one device and what is in use of it.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn driver() -> Driver {
    Driver::open(Some(&HOST.nvml())).unwrap()
}

/// UUIDs of the whole GPU and of the instance.
fn uuids(driver: &Driver) -> (String, String) {
    let devices = driver.inventory().unwrap().devices;
    assert_eq!(devices[0].partition, Partition::Whole);
    (devices[0].uuid.clone(), devices[1].uuid.clone())
}

fn ballast(uuid: &str) -> Result<Ballast, BallastError> {
    Ballast::open(Some(&HOST.libraries.join("libgpusim_cuda.so")), uuid)
}

fn state() -> State {
    Client::connect(&HOST.socket).unwrap().show().unwrap()
}

/// What descriptors alone keep, once it is as much.
fn await_kept(bytes: u64) {
    let kept = || state().kept.iter().map(|kept| kept.bytes).sum::<u64>();
    let started = Instant::now();
    while kept() != bytes {
        assert!(started.elapsed() < Duration::from_secs(10), "{} bytes are kept, not {bytes}", kept());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_descriptor_holds_memory_that_nobody_is_charged_for() {
    let _alone = alone();
    let driver = driver();
    let (uuid, _) = uuids(&driver);
    let mut device = Device::new(uuid.as_str());
    let idle = driver.sample(&mut device);
    let ballast = ballast(&uuid).unwrap();
    assert_eq!(ballast.granularity(), 2 * MIB);

    let chunks: Vec<OwnedFd> = [2 * MIB, 128 * MIB, GIB].map(|bytes| ballast.create(bytes).unwrap()).into();
    await_kept(GIB + 130 * MIB);
    let held = driver.sample(&mut device);
    assert_eq!(held.used, idle.used.map(|used| used + GIB + 130 * MIB));
    assert_eq!(held.processes, Some(vec![]), "nobody is charged");

    let duplicate = chunks[2].try_clone().unwrap();
    drop(chunks);
    await_kept(GIB);
    drop(duplicate);
    await_kept(0);
    assert_eq!(driver.sample(&mut device).used, idle.used);
}

#[test]
fn what_cannot_be_made_is_refused_by_name_and_holds_nothing() {
    let _alone = alone();
    let driver = driver();
    let (uuid, _) = uuids(&driver);
    let ballast = ballast(&uuid).unwrap();
    for bytes in [0, 1, 3 * MIB] {
        let error = ballast.create(bytes).unwrap_err();
        assert!(matches!(error, BallastError::Granularity { .. }) && !error.out_of_memory(), "{error}");
    }
    let error = ballast.create(1 << 42).unwrap_err();
    assert!(error.out_of_memory(), "{error}");
    assert_eq!(error.to_string(), "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)");
    await_kept(0);
}

#[test]
fn a_device_is_found_by_its_uuid_alone() {
    let _alone = alone();
    let driver = driver();
    let (_, instance) = uuids(&driver);
    // CUDA shows the first instance of a GPU in MIG mode to whoever asks for none.
    let chunk = ballast(&instance).unwrap().create(2 * MIB).unwrap();
    await_kept(2 * MIB);
    assert!(state().kept[0].region.instance.is_some());
    drop(chunk);
    await_kept(0);
    let unknown = "GPU-00000000-0000-0000-0000-000000000000";
    let error = ballast(unknown).unwrap_err();
    assert!(matches!(&error, BallastError::NoDevice { uuid, visible: 2 } if uuid == unknown), "{error}");
    assert!(matches!(ballast("0").unwrap_err(), BallastError::NotAUuid(_)));
}

/// A cgroup, made for a test. Under version 1, where no driver limits memory, the simulated one
/// takes the path within the hierarchy, and the directory of that path is made to look like a
/// cgroup of version 2.
struct Cgroup {
    path: PathBuf,
    made: PathBuf,
    _directory: Option<tempfile::TempDir>,
}

impl Cgroup {
    /// `None` where the user may not make cgroups.
    fn make() -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        if root.join("cgroup.controllers").exists() {
            let cgroup = root.join(format!("highwater-test-{}", std::process::id()));
            fs::create_dir(&cgroup).ok()?;
            return Some(Self { path: cgroup.clone(), made: cgroup, _directory: None });
        }
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("cgroup.controllers"), "").unwrap();
        let path = directory.path().to_owned();
        let cgroup = root.join("memory").join(path.strip_prefix("/").unwrap());
        fs::create_dir_all(&cgroup).ok()?;
        Some(Self { path, made: cgroup, _directory: Some(directory) })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Others may use what lies above.
        let _ = fs::remove_dir(&self.made);
    }
}

#[test]
fn a_limit_is_set_read_and_lifted() {
    let _alone = alone();
    let driver = driver();
    let (uuid, _) = uuids(&driver);
    let Some(cgroup) = Cgroup::make() else { return };
    let limits = driver.limits().unwrap();
    assert_eq!(limits.get(&uuid, &cgroup.path).unwrap(), Limit { hard: None, used: 0 });
    limits.set(&uuid, &cgroup.path, 3 * GIB).unwrap();
    assert_eq!(limits.get(&uuid, &cgroup.path).unwrap(), Limit { hard: Some(3 * GIB), used: 0 });
    let known = state().limits;
    assert_eq!((known.len(), known[0].soft, known[0].hard), (1, 0, 3 * GIB), "hard alone");
    limits.clear(&uuid, &cgroup.path).unwrap();
    assert_eq!(limits.get(&uuid, &cgroup.path).unwrap().hard, None);
}

#[test]
fn where_there_are_no_limits_the_reason_is_told() {
    let _alone = alone();
    let driver = driver();
    let (uuid, instance) = uuids(&driver);
    let limits = driver.limits().unwrap();
    let plain = tempfile::tempdir().unwrap();
    let error = limits.set(&uuid, plain.path(), GIB).unwrap_err();
    assert_eq!(error, Unavailable::NoCgroup2 { path: plain.path().to_owned() }.into());
    fs::write(plain.path().join("cgroup.controllers"), "").unwrap();
    assert_eq!(limits.set(&instance, plain.path(), GIB).unwrap_err(), Unavailable::Mig.into());
    // Looks like a cgroup, and is none that the driver knows.
    let error = limits.set(&uuid, plain.path(), GIB).unwrap_err();
    assert!(matches!(error, LimitError::Call(_)), "{error}");
    let unknown = limits.get("GPU-00000000-0000-0000-0000-000000000000", plain.path()).unwrap_err();
    assert!(matches!(unknown, LimitError::Call(_)), "{unknown}");
}

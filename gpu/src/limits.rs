//! Memory limits that the driver itself keeps, on a cgroup: drivers from R615 on.
//!
//! Only the hard limit is set. A soft one is added to the ancestors of the cgroup and outlives
//! it there, so that it would have to be undone before a pod ends, by an agent that may be away.

use std::{
    ffi::{CString, c_char, c_ulonglong},
    fmt,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use libloading::Library;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use crate::{CallError, Driver};

/// `NVML_DEVICE_MEMORY_LIMIT_MAX`: no limit.
const NO_LIMIT: u64 = u64::MAX;
/// A file that is in each directory of a cgroup v2 tree, and in none of a v1 tree.
const CGROUP2_FILE: &str = "cgroup.controllers";

/// Why the driver cannot limit memory here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The driver has no such calls.
    #[error("driver {version} has no memory limits: they begin with R615")]
    DriverTooOld {
        /// Version of the driver.
        version: String,
    },
    /// The node uses cgroup v1, or the path is no cgroup.
    #[error("{} is not in a cgroup v2 tree: limits need a node with cgroup v2", path.display())]
    NoCgroup2 {
        /// The path that was given.
        path: PathBuf,
    },
    /// The device is a MIG instance, or a GPU cut into such.
    #[error("the driver limits whole GPUs only, and this device is under MIG")]
    Mig,
    /// The driver says that this device or this kernel has none.
    #[error("the driver says that limits are not supported on this device")]
    NotSupported,
}

/// Why a limit was not read or set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// It cannot be done here, now or later.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The driver refused.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// What the driver keeps for a cgroup on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bytes that it may use at most; `None`: as many as there are.
    pub hard: Option<u64>,
    /// Bytes that it uses now.
    pub used: u64,
}

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct SetLimits {
    name_space: *const c_char,
    soft_limit: c_ulonglong,
    hard_limit: c_ulonglong,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
struct GetLimits {
    name_space: *const c_char,
    soft_limit: c_ulonglong,
    hard_limit: c_ulonglong,
    current_used: c_ulonglong,
}

const _: () = assert!(size_of::<SetLimits>() == 24 && size_of::<GetLimits>() == 32);

type Set = unsafe extern "C" fn(nvmlDevice_t, *mut SetLimits) -> nvmlReturn_t;
type Get = unsafe extern "C" fn(nvmlDevice_t, *mut GetLimits) -> nvmlReturn_t;

/// The memory limits of a driver that has them.
pub struct Limits<'driver> {
    driver: &'driver Driver,
    set: Set,
    get: Get,
    /// Keeps the calls in place.
    _library: Library,
}

impl Driver {
    /// The driver's memory limits, if it has any.
    ///
    /// # Errors
    /// [`Unavailable::DriverTooOld`] if it has none.
    pub fn limits(&self) -> Result<Limits<'_>, Unavailable> {
        let too_old = || Unavailable::DriverTooOld { version: self.version().to_owned() };
        // SAFETY: this library is open already, so nothing is initialised anew.
        let library = unsafe { Library::new(self.library()) }.map_err(|_| too_old())?;
        // SAFETY: the types are those of the driver's header, and the library is kept as long as
        // the pointers are.
        let set = unsafe { library.get::<Set>(b"nvmlDeviceSetMemoryLimits_v1\0") }.map(|set| *set);
        // SAFETY: as above.
        let get = unsafe { library.get::<Get>(b"nvmlDeviceGetMemoryLimits_v1\0") }.map(|get| *get);
        match (set, get) {
            (Ok(set), Ok(get)) => Ok(Limits { driver: self, set, get, _library: library }),
            _ => Err(too_old()),
        }
    }
}

impl Limits<'_> {
    /// What is kept for a cgroup, given by the full path of its directory.
    ///
    /// # Errors
    /// See [`LimitError`].
    pub fn get(&self, uuid: &str, cgroup: &Path) -> Result<Limit, LimitError> {
        const CALL: &str = "get memory limits";
        let (device, name) = self.place(uuid, cgroup)?;
        let mut limits =
            GetLimits { name_space: name.as_ptr(), soft_limit: 0, hard_limit: NO_LIMIT, current_used: 0 };
        // SAFETY: the handle is of the open library, and the path outlives the call.
        let code = unsafe { (self.get)(device, &raw mut limits) };
        self.settle(CALL, code)?;
        Ok(Limit {
            hard: Some(limits.hard_limit).filter(|&hard| hard != NO_LIMIT),
            used: limits.current_used,
        })
    }

    /// Lets a cgroup use `bytes` of the device at most, the limits of its ancestors apart. What
    /// it uses above that already stays; managed memory is not counted. Needs root.
    ///
    /// # Errors
    /// See [`LimitError`].
    pub fn set(&self, uuid: &str, cgroup: &Path, bytes: u64) -> Result<(), LimitError> {
        self.write(uuid, cgroup, bytes)
    }

    /// Lifts the limit of a cgroup.
    ///
    /// # Errors
    /// See [`LimitError`].
    pub fn clear(&self, uuid: &str, cgroup: &Path) -> Result<(), LimitError> {
        self.write(uuid, cgroup, NO_LIMIT)
    }

    fn write(&self, uuid: &str, cgroup: &Path, hard_limit: u64) -> Result<(), LimitError> {
        const CALL: &str = "set memory limits";
        let (device, name) = self.place(uuid, cgroup)?;
        let mut limits = SetLimits { name_space: name.as_ptr(), soft_limit: 0, hard_limit };
        // SAFETY: the handle is of the open library, and the path outlives the call.
        let code = unsafe { (self.set)(device, &raw mut limits) };
        self.settle(CALL, code)
    }

    fn settle(&self, call: &'static str, code: nvmlReturn_t) -> Result<(), LimitError> {
        match nvml_try(code) {
            Ok(()) => Ok(()),
            // A newer library beside an older driver.
            Err(NvmlError::FunctionNotFound) => {
                Err(Unavailable::DriverTooOld { version: self.driver.version().to_owned() }.into())
            }
            Err(NvmlError::NotSupported) => Err(Unavailable::NotSupported.into()),
            Err(error) => Err(CallError::new(call, error).into()),
        }
    }

    /// The device's handle and the path as the driver wants it.
    fn place(&self, uuid: &str, cgroup: &Path) -> Result<(nvmlDevice_t, CString), LimitError> {
        const CALL: &str = "device by UUID";
        let no_cgroup = || Unavailable::NoCgroup2 { path: cgroup.to_owned() };
        if !cgroup.join(CGROUP2_FILE).is_file() {
            return Err(no_cgroup().into());
        }
        let name = CString::new(cgroup.as_os_str().as_bytes()).map_err(|_| no_cgroup())?;
        let device = self.driver.nvml().device_by_uuid(uuid).map_err(|e| CallError::new(CALL, e))?;
        let divided = device.mig_mode().is_ok_and(|mode| mode.current == 1);
        if divided || device.mig_is_mig_device_handle().is_ok_and(|is| is) {
            return Err(Unavailable::Mig.into());
        }
        // SAFETY: the handle does not outlive the call that it is asked for, and the driver stays
        // open meanwhile.
        Ok((unsafe { device.handle() }, name))
    }
}

impl fmt::Debug for Limits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limits").field("driver", &self.driver.version()).finish_non_exhaustive()
    }
}

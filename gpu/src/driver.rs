//! Opening and closing the driver's library.

use std::{
    ffi::{OsStr, OsString},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use nvml_wrapper::{Device as NvmlDevice, Nvml, error::NvmlError};

use crate::{CallError, OpenError};

/// Name by which the loader finds the library.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Tells handles of one opening from those of another.
static SESSIONS: AtomicU64 = AtomicU64::new(1);

/// The open driver. May be shared between threads.
///
/// While it lives, device handles are open in the kernel, which blocks driver upgrades, MIG
/// changes and GPU resets: close it to stand down.
#[derive(Debug)]
pub struct Driver {
    nvml: Nvml,
    library: OsString,
    version: String,
    session: u64,
}

impl Driver {
    /// Opens the library at the path `library`, or where the loader finds it.
    ///
    /// # Errors
    /// Each says what to change on the node or in the pod.
    pub fn open(library: Option<&Path>) -> Result<Self, OpenError> {
        let library = library.map_or(OsStr::new(LIBRARY), Path::as_os_str);
        let name = || library.to_string_lossy().into_owned();
        let nvml = Nvml::builder().lib_path(library).init().map_err(|error| match error {
            NvmlError::LibloadingError(error) => {
                OpenError::NoLibrary { library: name(), detail: error.to_string() }
            }
            NvmlError::FailedToLoadSymbol(detail) => OpenError::NoLibrary { library: name(), detail },
            NvmlError::LibraryNotFound => OpenError::NoLibrary { library: name(), detail: error.to_string() },
            NvmlError::DriverNotLoaded => OpenError::DriverNotLoaded,
            NvmlError::NoPermission | NvmlError::OperatingSystem => OpenError::NoPermission,
            NvmlError::LibRmVersionMismatch => OpenError::Mismatch { library: name() },
            error => OpenError::Driver(CallError::new("init", error)),
        })?;
        let version =
            nvml.sys_driver_version().map_err(|e| OpenError::Driver(CallError::new("driver version", e)))?;
        let needed = [
            ("nvmlDeviceGetMemoryInfo_v2", nvml.lib().nvmlDeviceGetMemoryInfo_v2.is_ok()),
            (
                "nvmlDeviceGetComputeRunningProcesses_v3",
                nvml.lib().nvmlDeviceGetComputeRunningProcesses_v3.is_ok(),
            ),
        ];
        if let Some((missing, _)) = needed.into_iter().find(|(_, present)| !present) {
            return Err(OpenError::TooOld { version, missing });
        }
        let (library, session) = (library.to_owned(), SESSIONS.fetch_add(1, Ordering::Relaxed));
        Ok(Self { nvml, library, version, session })
    }

    /// Version of the driver, for example `580.159.03`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Closes every handle and unloads the library. Dropping does the same, without a word.
    ///
    /// # Errors
    /// Fails when the library could not shut down in order; it is unloaded all the same.
    pub fn close(self) -> Result<(), CallError> {
        self.nvml.shutdown().map_err(|e| CallError::new("shutdown", e))
    }

    pub(crate) fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    /// The path or name by which the library was opened.
    pub(crate) fn library(&self) -> &OsStr {
        &self.library
    }

    /// A number that no other opening of the library has.
    pub(crate) fn session(&self) -> u64 {
        self.session
    }

    /// GPU instance and compute instance of a MIG device.
    pub(crate) fn instance_ids(&self, device: &NvmlDevice<'_>) -> Result<(u32, u32), CallError> {
        let lib = self.nvml.lib();
        let ask = |call, symbol: Option<&unsafe extern "C" fn(_, *mut u32) -> u32>| {
            let function = symbol.ok_or_else(|| CallError::new(call, NvmlError::FunctionNotFound))?;
            let mut id = 0;
            // SAFETY: the handle is of this library, which is open for as long as `device` borrows
            // it, and `id` outlives the call.
            let code = unsafe { function(device.handle(), &raw mut id) };
            nvml_wrapper::error::nvml_try(code).map_err(|e| CallError::new(call, e))?;
            Ok(id)
        };
        Ok((
            ask("GPU instance id", lib.nvmlDeviceGetGpuInstanceId.as_ref().ok())?,
            ask("compute instance id", lib.nvmlDeviceGetComputeInstanceId.as_ref().ok())?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_to_set() {
        let error = Driver::open(Some(Path::new("/nonexistent/libnvidia-ml.so.1"))).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, OpenError::NoLibrary { .. }), "{text}");
        assert!(text.contains("/nonexistent/libnvidia-ml.so.1"), "{text}");
        assert!(text.contains("--driver-library"), "{text}");
    }

    #[test]
    fn a_library_that_is_not_the_drivers_is_refused() {
        let error = Driver::open(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(matches!(error, OpenError::NoLibrary { .. }), "{error}");
    }
}

//! Device memory that is held without being used: made, exported as a descriptor, and let go.
//!
//! No context is ever created, which would cost half a gigabyte on its device: the process that
//! makes the memory stays at some ten megabytes, appears in no process list, and is charged
//! nothing. What was exported lives for as long as its descriptor, or a duplicate of it, is open
//! anywhere, with or without CUDA there. Closing the last one frees the memory at once.
//!
//! Loading this library leaves threads and device handles in the process until it ends, so it is
//! done in a process of its own.

use std::{
    ffi::{c_char, c_int, c_uint, c_ulonglong, c_void},
    fmt,
    mem::ManuallyDrop,
    os::fd::{FromRawFd, OwnedFd, RawFd},
    path::Path,
    ptr,
};

use libloading::Library;

use crate::cuda::{self, LoadError, NO_DEVICE, OUT_OF_MEMORY, SUCCESS, calls};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_int = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const MINIMUM: c_int = 0;
/// More devices than a node has: a count from a broken driver must not keep us busy.
const MOST_DEVICES: c_int = 1024;

/// The oldest driver that can export memory.
const OLDEST: u16 = 450;

/// Why no memory can be made on a device, or was not.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BallastError {
    /// The CUDA driver cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The text is not the UUID of a device.
    #[error("{0:?} is not the UUID of a GPU or of a MIG instance")]
    NotAUuid(String),
    /// CUDA shows no such device.
    #[error(
        "CUDA shows {visible} devices, and none of them is {uuid}: its device node is missing here, or it is gone"
    )]
    NoDevice {
        /// The device that was asked for.
        uuid: String,
        /// How many there are.
        visible: i32,
    },
    /// A size that is 0, or not a multiple of the granularity.
    #[error("{bytes} bytes are not a multiple of the {granularity} in which the device's memory is made")]
    Granularity {
        /// What was asked for.
        bytes: u64,
        /// The device's granularity.
        granularity: u64,
    },
    /// The driver refused.
    #[error("{call}: {name} ({code})")]
    Refused {
        /// Name of the call.
        call: &'static str,
        /// The driver's code.
        code: i32,
        /// Its name for it.
        name: String,
    },
    /// The driver reported success and gave something that cannot be.
    #[error("{call} gave {detail}")]
    Nonsense {
        /// Name of the call.
        call: &'static str,
        /// What it gave.
        detail: String,
    },
}

impl BallastError {
    /// Whether the device has no more memory: the one refusal that is no fault.
    pub fn out_of_memory(&self) -> bool {
        matches!(self, Self::Refused { code: OUT_OF_MEMORY, .. })
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_int,
    requested_handle_types: c_int,
    location: Location,
    win32_meta_data: *mut c_void,
    flags: [u8; 8],
}

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Uuid([u8; 16]);

const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Uuid>() == 16);

/// `CUmemGenericAllocationHandle`.
type Handle = c_ulonglong;

calls! {
    cuInit(c_uint);
    cuGetErrorName(c_int, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut c_int, c_int);
    cuDeviceGetUuid_v2(*mut Uuid, c_int);
    cuMemGetAllocationGranularity(*mut usize, *const Properties, c_int);
    cuMemCreate(*mut Handle, usize, *const Properties, c_ulonglong);
    cuMemExportToShareableHandle(*mut c_void, Handle, c_int, c_ulonglong);
    cuMemRelease(Handle);
}

/// A device on which memory can be made.
pub struct Ballast {
    calls: Calls,
    properties: Properties,
    granularity: u64,
    /// Unloading it would pull the code from under the driver's threads.
    _library: ManuallyDrop<Library>,
}

impl Ballast {
    /// Opens the CUDA driver at the path `library`, or where the loader finds it, and finds the
    /// device.
    ///
    /// CUDA shows whole GPUs, or the first MIG instance of a GPU in MIG mode: for another
    /// instance the process must have been started with `CUDA_VISIBLE_DEVICES` set to its UUID.
    ///
    /// # Errors
    /// Each says what to change.
    pub fn open(library: Option<&Path>, uuid: &str) -> Result<Self, BallastError> {
        let wanted = parse(uuid).ok_or_else(|| BallastError::NotAUuid(uuid.to_owned()))?;
        let (calls, opened) = cuda::open(library, OLDEST, Calls::find)?;
        // SAFETY: no flags are defined.
        match unsafe { (calls.cuInit)(0) } {
            NO_DEVICE => return Err(BallastError::NoDevice { uuid: uuid.to_owned(), visible: 0 }),
            code => calls.check("cuInit", code)?,
        }
        let device = calls.device(wanted, uuid)?;
        let properties = Properties {
            kind: PINNED,
            requested_handle_types: DESCRIPTOR,
            location: Location { kind: DEVICE, id: device },
            win32_meta_data: ptr::null_mut(),
            flags: [0; 8],
        };
        let mut granularity = 0;
        // SAFETY: both pointers are good for the call.
        let code = unsafe {
            (calls.cuMemGetAllocationGranularity)(&raw mut granularity, &raw const properties, MINIMUM)
        };
        calls.check("cuMemGetAllocationGranularity", code)?;
        let granularity = u64::try_from(granularity).unwrap_or(0);
        if granularity == 0 {
            return Err(BallastError::Nonsense {
                call: "cuMemGetAllocationGranularity",
                detail: "a granularity of 0".to_owned(),
            });
        }
        Ok(Self { calls, properties, granularity, _library: opened })
    }

    /// The step in which memory can be made, in bytes: 2 MiB on the GPUs of today.
    pub fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Makes `bytes` of memory, a multiple of [`Ballast::granularity`]. The descriptor alone
    /// keeps it.
    ///
    /// # Errors
    /// [`BallastError::out_of_memory`] where the device has no more; otherwise a fault. Nothing
    /// is held after an error.
    pub fn create(&self, bytes: u64) -> Result<OwnedFd, BallastError> {
        let granularity = self.granularity;
        let size = usize::try_from(bytes).ok().filter(|_| bytes > 0 && bytes.is_multiple_of(granularity));
        let size = size.ok_or(BallastError::Granularity { bytes, granularity })?;
        let mut handle = 0;
        // SAFETY: both pointers are good for the call, and the properties are whole.
        let code = unsafe { (self.calls.cuMemCreate)(&raw mut handle, size, &raw const self.properties, 0) };
        self.calls.check("cuMemCreate", code)?;
        let exported = self.export(handle);
        // From here on the descriptor keeps the memory; without one it goes now.
        // SAFETY: the handle was given by `cuMemCreate` and is not used again.
        let released = unsafe { (self.calls.cuMemRelease)(handle) };
        let descriptor = exported?;
        self.calls.check("cuMemRelease", released)?;
        Ok(descriptor)
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, BallastError> {
        const CALL: &str = "cuMemExportToShareableHandle";
        let mut descriptor: RawFd = -1;
        // SAFETY: for this type of handle the driver writes one descriptor, an `int`.
        let code = unsafe {
            (self.calls.cuMemExportToShareableHandle)((&raw mut descriptor).cast(), handle, DESCRIPTOR, 0)
        };
        self.calls.check(CALL, code)?;
        if descriptor < 0 {
            return Err(BallastError::Nonsense { call: CALL, detail: format!("descriptor {descriptor}") });
        }
        // SAFETY: the driver opened the descriptor for us, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

impl Calls {
    fn check(&self, call: &'static str, code: c_int) -> Result<(), BallastError> {
        if code == SUCCESS {
            return Ok(());
        }
        let name = cuda::error_name(self.cuGetErrorName, code);
        Err(BallastError::Refused { call, code, name })
    }

    /// The ordinal of the device.
    fn device(&self, wanted: Uuid, text: &str) -> Result<c_int, BallastError> {
        let mut visible = 0;
        // SAFETY: the pointer is good for the call; so it is below.
        self.check("cuDeviceGetCount", unsafe { (self.cuDeviceGetCount)(&raw mut visible) })?;
        for ordinal in 0..visible.min(MOST_DEVICES) {
            let (mut device, mut uuid) = (0, Uuid::default());
            // SAFETY: as above.
            self.check("cuDeviceGet", unsafe { (self.cuDeviceGet)(&raw mut device, ordinal) })?;
            // SAFETY: as above; the device is one that the driver named.
            self.check("cuDeviceGetUuid", unsafe { (self.cuDeviceGetUuid_v2)(&raw mut uuid, device) })?;
            if uuid == wanted {
                return Ok(device);
            }
        }
        Err(BallastError::NoDevice { uuid: text.to_owned(), visible })
    }
}

impl fmt::Debug for Ballast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ballast").field("granularity", &self.granularity).finish_non_exhaustive()
    }
}

/// The bytes of a UUID as NVML writes it: `GPU-` or `MIG-`, then 32 hexadecimal digits in groups.
fn parse(text: &str) -> Option<Uuid> {
    let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"))?;
    let mut nibbles = digits.chars().filter(|c| *c != '-').map(|c| c.to_digit(16));
    let mut uuid = Uuid::default();
    for byte in &mut uuid.0 {
        let (high, low) = (nibbles.next()??, nibbles.next()??);
        *byte = u8::try_from(high << 4 | low).ok()?;
    }
    nibbles.next().is_none().then_some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_read_as_nvml_writes_them() {
        let read = |text| parse(text).map(|uuid| uuid.0);
        let expected = Some([0x4b, 0x1e, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0xff]);
        assert_eq!(read("GPU-4b1e0001-0203-0405-0607-08090a0b0cff"), expected);
        assert_eq!(read("MIG-4b1e0001-0203-0405-0607-08090a0b0cff"), expected);
        for wrong in [
            "",
            "GPU-",
            "4b1e0001-0203-0405-0607-08090a0b0cff",
            "GPU-4b1e0001-0203-0405-0607-08090a0b0cf",
            "GPU-4b1e0001-0203-0405-0607-08090a0b0cff0",
            "GPU-4b1e0001-0203-0405-0607-08090a0b0cfg",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}

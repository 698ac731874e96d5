//! The CUDA driver library: opened at run time, never unloaded.

use std::{
    ffi::{CStr, OsStr, c_char, c_int},
    mem::ManuallyDrop,
    path::Path,
};

use libloading::Library;

/// Name by which the loader finds the library.
const LIBRARY: &str = "libcuda.so.1";
/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NO_DEVICE`: also where `CUDA_VISIBLE_DEVICES` names one that is not there.
pub(crate) const NO_DEVICE: c_int = 100;

/// `cuGetErrorName`.
pub(crate) type ErrorName = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

/// What was tried to be opened, as messages name it.
pub(crate) fn name(library: Option<&Path>) -> String {
    library.map_or(OsStr::new(LIBRARY), Path::as_os_str).to_string_lossy().into_owned()
}

/// Opens the library at a path, or where the loader finds it; an error is what the loader says.
/// Unloading it would pull the code from under the driver's threads.
pub(crate) fn load(library: Option<&Path>) -> Result<ManuallyDrop<Library>, String> {
    // SAFETY: the library is the driver's, whose initialisation may run at any time. It is
    // never unloaded, so its termination routines run at exit only.
    let library = unsafe { Library::new(library.map_or(OsStr::new(LIBRARY), Path::as_os_str)) };
    library.map(ManuallyDrop::new).map_err(|error| error.to_string())
}

/// The driver's name for a result code.
pub(crate) fn error_name(names: ErrorName, code: c_int) -> String {
    let mut name = std::ptr::null();
    // SAFETY: the driver writes a pointer to a constant text, or none for a code it does not
    // know.
    let known = unsafe { names(code, &raw mut name) } == SUCCESS && !name.is_null();
    if known {
        // SAFETY: see above; the text ends with a zero byte.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        "unknown error".to_owned()
    }
}

/// Declares the calls that are needed, as fields of a table and as their names.
macro_rules! calls {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The driver's calls, good for as long as the library stays loaded.
        #[allow(non_snake_case)]
        struct Calls {
            $($name: unsafe extern "C" fn($($argument),*) -> std::ffi::c_int,)*
        }

        impl Calls {
            /// Finds every call, or names the first that is missing.
            fn find(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the types are those of the driver's header, and the pointers are
                    // used only while the library is loaded: it is never unloaded.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|_| stringify!($name))?,)*
                })
            }
        }
    };
}
pub(crate) use calls;

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

/// Why the CUDA driver cannot be used here, whatever is tried.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library is not there, or is not a library.
    #[error(
        "cannot load the CUDA driver library {library:?}: {detail}. Install the NVIDIA driver on the node, or mount \
         its libcuda.so.1 and set --cuda-library to the path"
    )]
    NoLibrary {
        /// The path or name that was tried.
        library: String,
        /// What the loader said.
        detail: String,
    },
    /// The library lacks a call.
    #[error(
        "the CUDA driver library {library:?} has no {call}: driver {oldest} is the oldest that has what is needed"
    )]
    NoCall {
        /// The path or name that was opened.
        library: String,
        /// Name of the call.
        call: &'static str,
        /// The major version of the oldest driver that has all calls.
        oldest: u16,
    },
}

/// `cuGetErrorName`.
pub(crate) type ErrorName = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

/// Opens the library at a path, or where the loader finds it, and has `find` look its calls up, which
/// drivers have from `oldest` on. Unloading it would pull the code from under the driver's threads.
pub(crate) fn open<C>(
    library: Option<&Path>,
    oldest: u16,
    find: impl FnOnce(&Library) -> Result<C, &'static str>,
) -> Result<(C, ManuallyDrop<Library>), LoadError> {
    let path = library.map_or(OsStr::new(LIBRARY), Path::as_os_str);
    let name = || path.to_string_lossy().into_owned();
    // SAFETY: the library is the driver's, whose initialisation may run at any time. It is
    // never unloaded, so its termination routines run at exit only.
    let opened = unsafe { Library::new(path) }.map(ManuallyDrop::new);
    let opened =
        opened.map_err(|error| LoadError::NoLibrary { library: name(), detail: error.to_string() })?;
    let calls = find(&opened).map_err(|call| LoadError::NoCall { library: name(), call, oldest })?;
    Ok((calls, opened))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_loaded_says_what_to_change() {
        let absent = Path::new("/nonexistent/libcuda.so.1");
        let error = open(Some(absent), 450, |_| Ok(())).unwrap_err();
        assert!(matches!(error, LoadError::NoLibrary { .. }), "{error}");
        assert!(error.to_string().contains("--cuda-library"), "{error}");
        let other = Path::new("libc.so.6");
        let error = open(Some(other), 570, |_| Err::<(), _>("cuInit")).unwrap_err();
        assert!(matches!(error, LoadError::NoCall { call: "cuInit", oldest: 570, .. }), "{error}");
        assert!(error.to_string().contains("driver 570"), "{error}");
    }
}

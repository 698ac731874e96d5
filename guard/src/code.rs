//! The driver's result codes that the guard gives or looks at.

use core::ffi::c_uint;

/// A `CUresult` or `nvmlReturn_t`, as C has it.
pub(crate) type Code = c_uint;

/// `CUDA_SUCCESS` and `NVML_SUCCESS`.
pub(crate) const SUCCESS: Code = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`: what a refusal is, whatever was called.
pub(crate) const OUT_OF_MEMORY: Code = 2;
/// `CUDA_ERROR_INVALID_DEVICE`: a device that the guard has no place for.
pub(crate) const INVALID_DEVICE: Code = 101;
/// `CUDA_ERROR_NOT_FOUND`: what was called is not in this driver.
pub(crate) const NOT_FOUND: Code = 500;
/// `CUDA_ERROR_NOT_SUPPORTED`: what devices without managed memory say.
pub(crate) const NOT_SUPPORTED: Code = 801;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
pub(crate) const NVML_NOT_FOUND: Code = 13;

/// Answers a call that is to give memory, where the driver would not say what is needed to charge it:
/// `why` is its code. Usually it refuses the call for the same reason, and then has the last word; but
/// what it gives cannot be charged, and must not be had.
pub(crate) fn uncharged(why: Code, call: impl FnOnce() -> Code, undo: impl FnOnce()) -> Code {
    let code = call();
    if code != SUCCESS {
        return code;
    }
    undo();
    why
}

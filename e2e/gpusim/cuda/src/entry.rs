//! Finding functions by name, as the CUDA runtime does.

use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use crate::code::Code;
use crate::output::{Out, put, put_if_wanted};
use crate::{
    array, checkpoint, code, context, device, exports, graph, host, ipc, launch, memory, pointer, pool,
    session, stream, virtual_memory,
};

/// Names functions that [`find`] does not find, separated by commas, as if the driver were of a release
/// that does not have them yet. No program of the real driver reads it.
const MISSING_VARIABLE: &str = "GPUSIM_MISSING_CALLS";

/// `CUdriverProcAddressQueryResult`.
const FOUND: c_uint = 0;
const SYMBOL_NOT_FOUND: c_uint = 1;
const VERSION_NOT_SUFFICIENT: c_uint = 2;
/// CU_GET_PROC_ADDRESS_LEGACY_STREAM and ..._PER_THREAD_DEFAULT_STREAM.
const LEGACY_STREAM: c_ulonglong = 1;
const PER_THREAD_STREAM: c_ulonglong = 2;

/// The forms of functions that have had several, or another name than programs write: the name,
/// the first version that means the form by it, and the form's symbol. In ascending order.
const FORMS: [(&str, c_int, &str); 74] = [
    ("cuArray3DCreate", 2000, "cuArray3DCreate"),
    ("cuArray3DCreate", 3020, "cuArray3DCreate_v2"),
    ("cuArray3DGetDescriptor", 3020, "cuArray3DGetDescriptor_v2"),
    ("cuArrayCreate", 2000, "cuArrayCreate"),
    ("cuArrayCreate", 3020, "cuArrayCreate_v2"),
    ("cuArrayGetDescriptor", 3020, "cuArrayGetDescriptor_v2"),
    ("cuCtxCreate", 2000, "cuCtxCreate"),
    ("cuCtxCreate", 3020, "cuCtxCreate_v2"),
    ("cuCtxCreate", 11_040, "cuCtxCreate_v3"),
    ("cuCtxCreate", 12_050, "cuCtxCreate_v4"),
    ("cuCtxDestroy", 2000, "cuCtxDestroy"),
    ("cuCtxDestroy", 4000, "cuCtxDestroy_v2"),
    ("cuCtxGetDevice", 2000, "cuCtxGetDevice"),
    ("cuCtxGetDevice", 13_000, "cuCtxGetDevice_v2"),
    ("cuCtxPopCurrent", 2000, "cuCtxPopCurrent"),
    ("cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"),
    ("cuCtxPushCurrent", 2000, "cuCtxPushCurrent"),
    ("cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"),
    ("cuCtxSynchronize", 2000, "cuCtxSynchronize"),
    ("cuCtxSynchronize", 13_000, "cuCtxSynchronize_v2"),
    ("cuDeviceGetUuid", 9020, "cuDeviceGetUuid"),
    ("cuDeviceGetUuid", 11_040, "cuDeviceGetUuid_v2"),
    ("cuDevicePrimaryCtxRelease", 7000, "cuDevicePrimaryCtxRelease"),
    ("cuDevicePrimaryCtxRelease", 11_000, "cuDevicePrimaryCtxRelease_v2"),
    ("cuDevicePrimaryCtxReset", 7000, "cuDevicePrimaryCtxReset"),
    ("cuDevicePrimaryCtxReset", 11_000, "cuDevicePrimaryCtxReset_v2"),
    ("cuDevicePrimaryCtxSetFlags", 7000, "cuDevicePrimaryCtxSetFlags"),
    ("cuDevicePrimaryCtxSetFlags", 11_000, "cuDevicePrimaryCtxSetFlags_v2"),
    ("cuDeviceTotalMem", 2000, "cuDeviceTotalMem"),
    ("cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"),
    ("cuGetProcAddress", 11_030, "cuGetProcAddress"),
    ("cuGetProcAddress", 12_000, "cuGetProcAddress_v2"),
    ("cuGraphAddNode", 12_020, "cuGraphAddNode"),
    ("cuGraphAddNode", 12_030, "cuGraphAddNode_v2"),
    ("cuGraphInstantiate", 10_000, "cuGraphInstantiate"),
    ("cuGraphInstantiate", 11_000, "cuGraphInstantiate_v2"),
    ("cuGraphInstantiate", 12_000, "cuGraphInstantiateWithFlags"),
    ("cuIpcOpenMemHandle", 4010, "cuIpcOpenMemHandle"),
    ("cuIpcOpenMemHandle", 11_000, "cuIpcOpenMemHandle_v2"),
    ("cuMemAlloc", 2000, "cuMemAlloc"),
    ("cuMemAlloc", 3020, "cuMemAlloc_v2"),
    ("cuMemAllocAsync", 11_020, "cuMemAllocAsync"),
    ("cuMemAllocFromPoolAsync", 11_020, "cuMemAllocFromPoolAsync"),
    ("cuMemAllocHost", 2000, "cuMemAllocHost"),
    ("cuMemAllocHost", 3020, "cuMemAllocHost_v2"),
    ("cuMemAllocPitch", 2000, "cuMemAllocPitch"),
    ("cuMemAllocPitch", 3020, "cuMemAllocPitch_v2"),
    ("cuMemCreate", 10_020, "cuMemCreate"),
    ("cuMemExportToShareableHandle", 10_020, "cuMemExportToShareableHandle"),
    ("cuMemFree", 2000, "cuMemFree"),
    ("cuMemFree", 3020, "cuMemFree_v2"),
    ("cuMemFreeAsync", 11_020, "cuMemFreeAsync"),
    ("cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2"),
    ("cuMemGetInfo", 2000, "cuMemGetInfo"),
    ("cuMemGetInfo", 3020, "cuMemGetInfo_v2"),
    ("cuMemHostGetDevicePointer", 3020, "cuMemHostGetDevicePointer_v2"),
    ("cuMemHostRegister", 6050, "cuMemHostRegister_v2"),
    ("cuMemImportFromShareableHandle", 10_020, "cuMemImportFromShareableHandle"),
    ("cuMemMap", 10_020, "cuMemMap"),
    ("cuMemPoolCreate", 11_020, "cuMemPoolCreate"),
    ("cuMemRetainAllocationHandle", 11_000, "cuMemRetainAllocationHandle"),
    ("cuMemsetD16", 3020, "cuMemsetD16_v2"),
    ("cuMemsetD32", 3020, "cuMemsetD32_v2"),
    ("cuMemsetD8", 3020, "cuMemsetD8_v2"),
    ("cuStreamBeginCapture", 10_000, "cuStreamBeginCapture"),
    ("cuStreamBeginCapture", 10_010, "cuStreamBeginCapture_v2"),
    ("cuStreamDestroy", 2000, "cuStreamDestroy"),
    ("cuStreamDestroy", 4000, "cuStreamDestroy_v2"),
    ("cuStreamGetCaptureInfo", 10_010, "cuStreamGetCaptureInfo"),
    ("cuStreamGetCaptureInfo", 11_030, "cuStreamGetCaptureInfo_v2"),
    ("cuStreamGetCaptureInfo", 12_030, "cuStreamGetCaptureInfo_v3"),
    ("cuThreadExchangeStreamCaptureMode", 10_010, "cuThreadExchangeStreamCaptureMode"),
    ("cuGraphAddMemAllocNode", 11_040, "cuGraphAddMemAllocNode"),
    ("cuGraphInstantiateWithFlags", 11_040, "cuGraphInstantiateWithFlags"),
];

exports! {
    /// Finds a function by the name that programs write.
    fn cuGetProcAddress(
        name: *const c_char, function: Out<*const c_void>, version: c_int, flags: c_ulonglong,
    ) {
        if find(name, function, version, flags)? == FOUND { Ok(()) } else { Err(Code::NotFound) }
    }

    /// Finds a function by the name that programs write, and says why there is none.
    fn cuGetProcAddress_v2(
        name: *const c_char, function: Out<*const c_void>, version: c_int, flags: c_ulonglong,
        status: Out<c_uint>,
    ) {
        // That there is none is an answer, not a failure.
        put_if_wanted(status, find(name, function, version, flags)?);
        Ok(())
    }

    /// Internal tables of the real driver: there are none here.
    fn cuGetExportTable(table: Out<*const c_void>, _id: *const c_void) {
        put(table, std::ptr::null())?;
        Err(Code::NotFound)
    }
}

/// Writes the address of a function, or null; says whether there is one.
fn find(
    name: *const c_char,
    function: Out<*const c_void>,
    version: c_int,
    flags: c_ulonglong,
) -> Result<c_uint, Code> {
    let out = function.ok_or(Code::InvalidValue)?;
    if name.is_null() || flags & !(LEGACY_STREAM | PER_THREAD_STREAM) != 0 {
        return Err(Code::InvalidValue);
    }
    // SAFETY: a text that ends in a zero byte, as the interface asks.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::InvalidValue)?;
    out.write(std::ptr::null());
    let (symbol, status) = symbol(name, version);
    let Some(symbol) = symbol else { return Ok(status) };
    let own = ["_ptsz", "_ptds"].iter().filter(|_| flags & PER_THREAD_STREAM != 0);
    let found = own.map(|suffix| format!("{symbol}{suffix}")).find_map(|name| anywhere(&name));
    match found.or_else(|| anywhere(symbol)) {
        Some(address) => {
            out.write(address);
            Ok(FOUND)
        }
        None => Ok(SYMBOL_NOT_FOUND),
    }
}

/// The symbol that a name means for a version; or why it means none. Names of single forms do not
/// mean themselves.
fn symbol(name: &str, version: c_int) -> (Option<&str>, c_uint) {
    // What a driver lacks is no form to it, whatever version is asked for.
    let is_form = |form: &&(&str, c_int, &str)| form.0 == name && !is_missing(form.2);
    let mut forms = FORMS.iter().filter(is_form).peekable();
    if forms.peek().is_some() {
        let newest = forms.rfind(|(_, since, _)| *since <= version);
        return newest.map_or((None, VERSION_NOT_SUFFICIENT), |(.., symbol)| (Some(*symbol), FOUND));
    }
    let suffixes = ["_ptsz", "_ptds", "_v2", "_v3", "_v4"];
    if suffixes.iter().any(|suffix| name.ends_with(suffix)) {
        return (None, SYMBOL_NOT_FOUND);
    }
    (Some(name), FOUND)
}

fn anywhere(name: &str) -> Option<*const c_void> {
    if is_missing(name) {
        return None;
    }
    let modules = [
        session::address,
        device::address,
        context::address,
        memory::address,
        virtual_memory::address,
        pool::address,
        stream::address,
        graph::address,
        array::address,
        checkpoint::address,
        host::address,
        ipc::address,
        pointer::address,
        launch::address,
        code::address,
        address,
    ];
    modules.iter().find_map(|find| find(name))
}

/// Whether a function is to be missing because a test wants it.
fn is_missing(name: &str) -> bool {
    static NAMES: OnceLock<HashSet<String>> = OnceLock::new();
    let read = || std::env::var(MISSING_VARIABLE).unwrap_or_default().split(',').map(str::to_owned).collect();
    NAMES.get_or_init(read).contains(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_the_form_of_its_version() {
        assert_eq!(symbol("cuMemAlloc", 2020).0, Some("cuMemAlloc"));
        assert_eq!(symbol("cuMemAlloc", 13_000).0, Some("cuMemAlloc_v2"));
        assert_eq!(symbol("cuGraphInstantiate", 12_080).0, Some("cuGraphInstantiateWithFlags"));
        assert_eq!(symbol("cuMemAllocAsync", 11_010), (None, VERSION_NOT_SUFFICIENT));
        assert_eq!(symbol("cuMemAlloc_v2", 13_000), (None, SYMBOL_NOT_FOUND));
        assert_eq!(symbol("cuMemMap", 12_000).0, Some("cuMemMap"));
    }

    #[test]
    fn every_form_is_there_and_after_the_one_before_it() {
        for (name, since, symbol) in FORMS {
            assert!(anywhere(symbol).is_some(), "{symbol}");
            let earlier = FORMS.iter().take_while(|form| **form != (name, since, symbol));
            assert!(
                earlier.filter(|(other, ..)| *other == name).all(|(_, before, _)| *before < since),
                "{name}"
            );
        }
    }
}

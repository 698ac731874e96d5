//! The functions of the driver that the guard stands in front of or calls: their names, what takes
//! their place, and where they are.

use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::code::{Code, NOT_FOUND, NVML_NOT_FOUND};
use crate::elf::{self, Library, Object};
use crate::{arrays, contexts, graphs, info, ipc, lookup, plain, pools, streams, virtual_memory};

/// A function of the driver.
pub(crate) struct Entry {
    /// Its exported name.
    pub(crate) name: &'static CStr,
    /// Where it is.
    pub(crate) library: Library,
    /// Address of what takes its place; none for what the guard only calls.
    hook: Option<Hook>,
}

/// The address of a hook.
#[derive(Clone, Copy)]
struct Hook(*const ());

// SAFETY: the address of a function, which never changes.
unsafe impl Sync for Hook {}

macro_rules! symbols {
    (
        $(hooked $library:ident in $module:ident { $($hooked:ident)* })*
        $(called $called_library:ident { $($called:ident)* })*
    ) => {
        /// A function of the driver, by its exported name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types, reason = "the names are the driver's")]
        #[repr(u16)]
        pub(crate) enum Symbol {
            $($($hooked,)*)*
            $($($called,)*)*
        }

        const NAMES: &[&str] = &[$($(stringify!($hooked),)*)* $($(stringify!($called),)*)*];

        static ENTRIES: [Entry; NAMES.len()] = [
            $($(Entry {
                name: terminated(concat!(stringify!($hooked), "\0")),
                library: Library::$library,
                hook: Some(Hook($module::$hooked as *const ())),
            },)*)*
            $($(Entry {
                name: terminated(concat!(stringify!($called), "\0")),
                library: Library::$called_library,
                hook: None,
            },)*)*
        ];

        const ALL: [Symbol; NAMES.len()] = [$($(Symbol::$hooked,)*)* $($(Symbol::$called,)*)*];
    };
}

symbols! {
    hooked Cuda in contexts {
        cuInit
        cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
        cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2
        cuCtxCreate cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4
        cuGLCtxCreate cuGLCtxCreate_v2 cuVDPAUCtxCreate cuVDPAUCtxCreate_v2
        cuCtxDestroy cuCtxDestroy_v2 cuCtxAttach cuCtxDetach
        cuGreenCtxCreate cuGreenCtxDestroy cuCtxSetLimit
    }
    hooked Cuda in plain {
        cuMemAlloc cuMemAlloc_v2 cuMemAllocPitch cuMemAllocPitch_v2 cuMemAllocManaged
        cuMemFree cuMemFree_v2
    }
    hooked Cuda in virtual_memory {
        cuMemCreate cuMemRelease cuMemRetainAllocationHandle cuMemMap cuMemUnmap
        cuMemExportToShareableHandle cuMemImportFromShareableHandle
        cuMemMapArrayAsync cuMemMapArrayAsync_ptsz
        cuMulticastCreate cuMulticastBindMem cuMulticastBindAddr
    }
    hooked Cuda in pools {
        cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz
        cuMemFreeAsync cuMemFreeAsync_ptsz
        cuMemPoolCreate cuMemPoolDestroy cuMemPoolTrimTo cuMemGetDefaultMemPool cuMemGetMemPool
    }
    hooked Cuda in streams {
        cuStreamBeginCapture cuStreamBeginCapture_ptsz
        cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz
        cuStreamBeginCaptureToGraph cuStreamBeginCaptureToGraph_ptsz
        cuStreamEndCapture cuStreamEndCapture_ptsz
        cuStreamSynchronize cuStreamSynchronize_ptsz
        cuCtxSynchronize cuCtxSynchronize_v2 cuEventSynchronize
    }
    hooked Cuda in arrays {
        cuArrayCreate cuArrayCreate_v2 cuArray3DCreate cuArray3DCreate_v2 cuMipmappedArrayCreate
        cuArrayDestroy cuMipmappedArrayDestroy
    }
    hooked Cuda in graphs {
        cuGraphAddMemAllocNode cuGraphAddNode cuGraphAddNode_v2
        cuGraphInstantiate cuGraphInstantiate_v2 cuGraphInstantiateWithFlags
        cuGraphInstantiateWithParams cuGraphInstantiateWithParams_ptsz
        cuGraphUpload cuGraphUpload_ptsz cuGraphLaunch cuGraphLaunch_ptsz
        cuGraphExecDestroy cuDeviceGraphMemTrim
    }
    hooked Cuda in ipc {
        cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
        cuMemPoolExportPointer cuMemPoolImportPointer
    }
    hooked Cuda in info {
        cuMemGetInfo cuMemGetInfo_v2 cuDeviceTotalMem cuDeviceTotalMem_v2
    }
    hooked Cuda in lookup {
        cuGetProcAddress cuGetProcAddress_v2 cuGetExportTable
    }
    hooked Nvml in info {
        nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2
    }
    called Cuda {
        cuDriverGetVersion cuDeviceGetUuid cuDeviceGetUuid_v2 cuDevicePrimaryCtxGetState
        cuCtxGetDevice cuCtxGetCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent_v2
        cuStreamGetCtx cuStreamGetDevice cuStreamIsCapturing cuStreamIsCapturing_ptsz
        cuThreadExchangeStreamCaptureMode
        cuDeviceGetMemPool cuMemPoolGetAttribute cuDeviceGetGraphMemAttribute
        cuGraphGetNodes cuGraphNodeGetType cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams
        cuGraphChildGraphNodeGetGraph
        cuMemGetAllocationPropertiesFromHandle cuMemGetAddressRange_v2
    }
    called Nvml {
        nvmlDeviceGetUUID nvmlSystemGetCudaDriverVersion_v2
    }
}

const fn terminated(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        // Never: every name above is a word with a zero added.
        Err(_) => c"",
    }
}

const fn hash(name: &[u8]) -> u32 {
    let (mut hash, mut rest) = (0x811c_9dc5_u32, name);
    while let [byte, tail @ ..] = rest {
        hash = (hash ^ *byte as u32).wrapping_mul(0x0100_0193);
        rest = tail;
    }
    hash
}

/// Hash and position of every name, in the order of the hashes.
#[allow(clippy::indexing_slicing, reason = "computed by the compiler, which checks it")]
const BY_HASH: [(u32, Symbol); NAMES.len()] = {
    let mut sorted = [(0, Symbol::cuInit); NAMES.len()];
    let mut index = 0;
    while index < NAMES.len() {
        let entry = (hash(NAMES[index].as_bytes()), ALL[index]);
        let mut at = index;
        while at > 0 && sorted[at - 1].0 > entry.0 {
            sorted[at] = sorted[at - 1];
            at -= 1;
        }
        sorted[at] = entry;
        index += 1;
    }
    sorted
};

static HASHES: [(u32, Symbol); NAMES.len()] = BY_HASH;

/// Where the functions are, once that was looked up; 0 for those that the driver does not have.
static ADDRESSES: [AtomicUsize; NAMES.len()] = [const { AtomicUsize::new(0) }; NAMES.len()];

/// First and last address of the libraries that [`ADDRESSES`] is about; 0 before.
static BOUND: [[AtomicUsize; 2]; 2] = [const { [const { AtomicUsize::new(0) }; 2] }; 2];

impl Symbol {
    fn index(self) -> usize {
        usize::from(self as u16)
    }

    /// What is known about it.
    pub(crate) fn entry(self) -> Option<&'static Entry> {
        ENTRIES.get(self.index())
    }

    /// What is said where the driver does not have it.
    pub(crate) fn missing(self) -> Code {
        match self.entry().map(|entry| entry.library) {
            Some(Library::Nvml) => NVML_NOT_FOUND,
            _ => NOT_FOUND,
        }
    }

    /// Address of what takes its place.
    pub(crate) fn hook(self) -> Option<*const ()> {
        self.entry()?.hook.map(|hook| hook.0)
    }
}

/// The function with that name, if the guard stands in front of it.
pub(crate) fn hooked(name: &CStr) -> Option<Symbol> {
    let hash = hash(name.to_bytes());
    let from = HASHES.partition_point(|(other, _)| *other < hash);
    let candidates = HASHES.get(from..)?.iter().take_while(|(other, _)| *other == hash);
    candidates
        .map(|(_, symbol)| *symbol)
        .find(|symbol| symbol.entry().is_some_and(|entry| entry.hook.is_some() && entry.name == name))
}

/// The function at that address of the driver, if the guard stands in front of it.
pub(crate) fn hooked_at(address: usize) -> Option<Symbol> {
    let same = |place: &AtomicUsize| place.load(Ordering::Relaxed) == address;
    let mut found = ADDRESSES.iter().zip(ALL).filter(|(place, _)| address != 0 && same(place));
    found.find_map(|(_, symbol)| symbol.hook().map(|_| symbol))
}

/// The driver's own function; none where the driver does not have it or is not loaded.
pub(crate) fn real(symbol: Symbol) -> Option<*const ()> {
    let place = ADDRESSES.get(symbol.index())?;
    let mut address = place.load(Ordering::Relaxed);
    if address == 0 {
        let library = symbol.entry()?.library;
        if bound(library).is_none() {
            bind(library);
        }
        address = place.load(Ordering::Relaxed);
    }
    (address != 0).then(|| core::ptr::with_exposed_provenance(address))
}

/// First and last address of the library whose functions are called.
pub(crate) fn bound(library: Library) -> Option<(usize, usize)> {
    let [start, end] = BOUND.get(library as usize)?;
    let start = start.load(Ordering::Acquire);
    (start != 0).then(|| (start, end.load(Ordering::Relaxed)))
}

/// Finds the functions of a library in the first object that is it.
pub(crate) fn bind(library: Library) -> bool {
    elf::find(|object| {
        // SAFETY: the object cannot be unloaded during the visit.
        object.is(library).then(|| unsafe { bind_to(library, object) })
    })
    .is_some()
}

/// Finds the functions of a library in an object.
///
/// # Safety
/// The object is still loaded.
pub(crate) unsafe fn bind_to(library: Library, object: &Object) {
    for (place, entry) in ADDRESSES.iter().zip(&ENTRIES) {
        if entry.library == library {
            // SAFETY: as the caller says.
            place.store(unsafe { object.function(entry.name) }.unwrap_or(0), Ordering::Relaxed);
        }
    }
    if let Some([start, end]) = BOUND.get(library as usize) {
        end.store(object.end, Ordering::Relaxed);
        start.store(object.start, Ordering::Release);
    }
}

/// Calls a function of the driver; [`NOT_FOUND`] where there is none.
macro_rules! driver {
    ($symbol:ident($($argument:expr => $type:ty),* $(,)?)) => {
        match $crate::symbols::real($crate::symbols::Symbol::$symbol) {
            Some(address) => {
                let function =
                    core::mem::transmute::<*const (), unsafe extern "C" fn($($type),*) -> $crate::code::Code>(address);
                function($($argument),*)
            }
            None => $crate::code::NOT_FOUND,
        }
    };
}
pub(crate) use driver;

/// Defines functions that take the place of the driver's.
///
/// Each passes through to the driver where the guard is not to act (setuid programs, a driver that
/// is not known, no memory for its own state), and says so where the driver lacks the function.
macro_rules! hooks {
    ($(
        $(#[$about:meta])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) via $active:path, |$state:ident, $real:ident| $body:block
    )*) => {$(
        $(#[$about])*
        ///
        /// # Safety
        /// As for the driver's function of that name.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the name is the driver's")]
        #[allow(clippy::too_many_arguments, reason = "the driver has so many")]
        pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> $crate::code::Code {
            let Some(address) = $crate::symbols::real($crate::symbols::Symbol::$name) else {
                return $crate::symbols::Symbol::$name.missing();
            };
            // SAFETY: the function of that name has this type.
            let function = unsafe {
                core::mem::transmute::<*const (), unsafe extern "C" fn($($type),*) -> $crate::code::Code>(address)
            };
            // SAFETY: the caller keeps to the rules of the function, and the arguments are theirs
            // unless a hook says why it changes one.
            let $real = |$($argument: $type),*| unsafe { function($($argument),*) };
            let Some($state) = $active() else {
                return $real($($argument),*);
            };
            $body
        }
    )*};
}
pub(crate) use hooks;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hooked_name_is_found_and_no_other() {
        for (name, symbol) in NAMES.iter().zip(ALL) {
            let text = std::ffi::CString::new(*name).unwrap();
            let entry = symbol.entry().unwrap();
            assert_eq!(entry.name, text.as_c_str());
            assert_eq!(hooked(&text), symbol.hook().map(|_| symbol), "{name}");
        }
        assert_eq!(hooked(c""), None);
        assert_eq!(hooked(c"cuMemAlloc_v3"), None);
    }

    #[test]
    fn the_table_of_entry_points_says_hooked_of_what_is_hooked() {
        let table = include_str!("../entry-points.tsv");
        let mut listed: Vec<&str> = table
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| {
                let mut fields = line.split('\t');
                let name = fields.next()?;
                (fields.next()? == "hooked").then_some(name)
            })
            .collect();
        listed.sort_unstable();
        let mut hooked: Vec<&str> = NAMES
            .iter()
            .zip(ALL)
            .filter(|(_, symbol)| symbol.hook().is_some())
            .map(|(name, _)| *name)
            .collect();
        hooked.sort_unstable();
        assert_eq!(listed, hooked);
    }
}

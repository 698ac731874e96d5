//! What is loaded into the process, read from the loader's own tables.
//!
//! The functions that the guard stands in front of are found here and not by `dlsym`: that name is
//! taken by the guard itself, and asking for "the next one" would depend on who asks.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::size_of;
use core::ptr;

/// One of the driver's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    /// `libcuda.so.1`
    Cuda = 0,
    /// `libnvidia-ml.so.1`
    Nvml = 1,
}

impl Library {
    const fn stem(self) -> &'static [u8] {
        match self {
            Self::Cuda => b"libcuda.so",
            Self::Nvml => b"libnvidia-ml.so",
        }
    }
}

/// `dl_phdr_info`, as far as it is read.
#[repr(C)]
struct Info {
    address: usize,
    name: *const c_char,
    headers: *const Header,
    count: u16,
}

/// `Elf64_Phdr`
#[repr(C)]
struct Header {
    kind: u32,
    flags: u32,
    offset: u64,
    address: usize,
    physical: u64,
    file_size: u64,
    memory_size: usize,
    align: u64,
}

/// `Elf64_Dyn`
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// `Elf64_Sym`
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

const LOADED: u32 = 1;
const DYNAMIC: u32 = 2;

const END: i64 = 0;
const HASH: i64 = 4;
const STRINGS: i64 = 5;
const SYMBOLS: i64 = 6;
const SONAME: i64 = 14;
const GNU_HASH: i64 = 0x6fff_fef5;

const FUNCTION: u8 = 2;

#[link(name = "c")]
unsafe extern "C" {
    fn dl_iterate_phdr(
        visit: unsafe extern "C" fn(*const Info, usize, *mut c_void) -> c_int,
        data: *mut c_void,
    ) -> c_int;
}

/// A loaded object. It may be unloaded at any time once the visit in which it was seen is over,
/// unless something keeps it.
#[derive(Clone, Copy)]
pub(crate) struct Object {
    /// What is added to the addresses in its tables.
    base: usize,
    /// Its first address.
    pub(crate) start: usize,
    /// The address after its last one.
    pub(crate) end: usize,
    name: *const c_char,
    symbols: *const Symbol,
    strings: *const c_char,
    hash: *const u32,
    gnu_hash: *const u32,
    soname: Option<usize>,
}

impl Object {
    /// Reads what the loader says.
    ///
    /// # Safety
    /// `info` describes an object that stays loaded meanwhile.
    unsafe fn read(info: &Info) -> Self {
        let mut object = Self {
            base: info.address,
            start: usize::MAX,
            end: 0,
            name: info.name,
            symbols: ptr::null(),
            strings: ptr::null(),
            hash: ptr::null(),
            gnu_hash: ptr::null(),
            soname: None,
        };
        let mut dynamic: *const Dynamic = ptr::null();
        for index in 0..usize::from(info.count) {
            // SAFETY: the loader gives so many headers.
            let header = unsafe { &*info.headers.add(index) };
            let address = object.base.wrapping_add(header.address);
            if header.kind == LOADED {
                object.start = object.start.min(address);
                object.end = object.end.max(address.wrapping_add(header.memory_size));
            } else if header.kind == DYNAMIC {
                dynamic = ptr::with_exposed_provenance(address);
            }
        }
        while !dynamic.is_null() {
            // SAFETY: the list goes on until its end mark.
            let entry = unsafe { &*dynamic };
            match entry.tag {
                END => break,
                HASH => object.hash = object.table(entry.value),
                STRINGS => object.strings = object.table(entry.value),
                SYMBOLS => object.symbols = object.table(entry.value),
                GNU_HASH => object.gnu_hash = object.table(entry.value),
                SONAME => object.soname = Some(entry.value),
                _ => {}
            }
            // SAFETY: as above, this was not the end.
            dynamic = unsafe { dynamic.add(1) };
        }
        object
    }

    /// The loader has put addresses into most objects' lists, but not into read-only ones.
    fn table<T>(&self, value: usize) -> *const T {
        let address = if value < self.base { self.base.wrapping_add(value) } else { value };
        ptr::with_exposed_provenance(address)
    }

    /// Whether an address is inside.
    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// The path under which it was loaded; empty for the program.
    pub(crate) fn path(&self) -> &CStr {
        // SAFETY: the loader's names are texts that live as long as the object.
        if self.name.is_null() { c"" } else { unsafe { CStr::from_ptr(self.name) } }
    }

    /// The name it gives itself, or else that of its file.
    fn name(&self) -> &[u8] {
        match self.soname {
            Some(offset) if !self.strings.is_null() => {
                // SAFETY: the name is in the object's table of strings.
                unsafe { CStr::from_ptr(self.strings.add(offset)) }.to_bytes()
            }
            _ => self.path().to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default(),
        }
    }

    /// Whether it is that library.
    pub(crate) fn is(&self, library: Library) -> bool {
        matches!(self.name().strip_prefix(library.stem()), Some([] | [b'.', ..]))
    }

    /// Whether it is where the loader's functions are.
    pub(crate) fn is_loader(&self) -> bool {
        matches!(self.name(), b"libc.so.6" | b"libdl.so.2")
    }

    /// The address of a function that the object defines.
    ///
    /// # Safety
    /// The object is still loaded.
    pub(crate) unsafe fn function(&self, name: &CStr) -> Option<usize> {
        if self.symbols.is_null() || self.strings.is_null() {
            return None;
        }
        // SAFETY: as the caller says.
        unsafe {
            if !self.gnu_hash.is_null() {
                self.by_gnu_hash(name)
            } else if !self.hash.is_null() {
                self.by_hash(name)
            } else {
                None
            }
        }
    }

    /// The function with that index, if it has that name.
    ///
    /// # Safety
    /// The object is still loaded, and has so many symbols.
    unsafe fn check(&self, index: u32, name: &CStr) -> Option<usize> {
        // SAFETY: as the caller says; names are offsets into the table of strings.
        let (symbol, text) = unsafe {
            let symbol = &*self.symbols.add(usize::try_from(index).ok()?);
            (symbol, CStr::from_ptr(self.strings.add(usize::try_from(symbol.name).ok()?)))
        };
        let defined = symbol.section != 0 && symbol.info & 0xf == FUNCTION;
        (defined && text == name).then(|| self.base.wrapping_add(symbol.value))
    }

    /// # Safety
    /// The object is still loaded and has this table.
    unsafe fn by_gnu_hash(&self, name: &CStr) -> Option<usize> {
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381_u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
        let table = self.gnu_hash;
        // SAFETY: the layout of the table: four numbers, words of a filter, buckets, and for each
        // symbol from `first` on its hash, whose lowest bit ends the bucket.
        unsafe {
            let (buckets, first, words) = (*table, *table.add(1), *table.add(2));
            if buckets == 0 || words == 0 {
                return None;
            }
            let shift = *table.add(3);
            // The words of the filter have 64 bits; read by halves, since nothing says how they lie.
            let filter = table.add(4);
            let half = usize::try_from((hash / 64) % words).ok()?.checked_mul(2)?;
            let word = u64::from(*filter.add(half)) | u64::from(*filter.add(half + 1)) << 32;
            let wanted = (1_u64 << (hash % 64)) | (1_u64 << ((hash >> (shift & 31)) % 64));
            if word & wanted != wanted {
                return None;
            }
            let bucket = filter.add(usize::try_from(words).ok()?.checked_mul(2)?);
            let chain = bucket.add(usize::try_from(buckets).ok()?);
            let mut index = *bucket.add(usize::try_from(hash % buckets).ok()?);
            if index < first {
                return None;
            }
            loop {
                let entry = *chain.add(usize::try_from(index - first).ok()?);
                if entry | 1 == hash | 1
                    && let Some(address) = self.check(index, name)
                {
                    return Some(address);
                }
                if entry & 1 != 0 {
                    return None;
                }
                index = index.checked_add(1)?;
            }
        }
    }

    /// Whether one of the functions that the object defines is at that address.
    ///
    /// # Safety
    /// The object is still loaded.
    pub(crate) unsafe fn exports(&self, address: usize) -> bool {
        if self.symbols.is_null() {
            return false;
        }
        // SAFETY: as the caller says.
        let count = unsafe { self.count() };
        (0..count.unwrap_or(0)).any(|index| {
            // SAFETY: there are so many symbols.
            let symbol = unsafe { &*self.symbols.add(index) };
            let defined = symbol.section != 0 && symbol.info & 0xf == FUNCTION;
            defined && self.base.wrapping_add(symbol.value) == address
        })
    }

    /// Number of symbols.
    ///
    /// # Safety
    /// The object is still loaded.
    unsafe fn count(&self) -> Option<usize> {
        // SAFETY: the layouts of the tables, as below.
        unsafe {
            if !self.hash.is_null() {
                return usize::try_from(*self.hash.add(1)).ok();
            }
            if self.gnu_hash.is_null() {
                return None;
            }
            let table = self.gnu_hash;
            let (buckets, first, words) = (*table, *table.add(1), usize::try_from(*table.add(2)).ok()?);
            let bucket = table.add(4).add(words.checked_mul(2)?);
            let chain = bucket.add(usize::try_from(buckets).ok()?);
            let mut last = 0;
            for index in 0..usize::try_from(buckets).ok()? {
                last = last.max(*bucket.add(index));
            }
            // The bucket that begins last ends last.
            while last >= first && *chain.add(usize::try_from(last - first).ok()?) & 1 == 0 {
                last = last.checked_add(1)?;
            }
            usize::try_from(last.checked_add(1)?).ok()
        }
    }

    /// # Safety
    /// The object is still loaded and has this table.
    unsafe fn by_hash(&self, name: &CStr) -> Option<usize> {
        let hash = name.to_bytes().iter().fold(0_u32, |hash, byte| {
            let shifted = hash.wrapping_shl(4).wrapping_add(u32::from(*byte));
            (shifted ^ ((shifted & 0xf000_0000) >> 24)) & 0x0fff_ffff
        });
        let table = self.hash;
        // SAFETY: the layout of the table: number of buckets, number of symbols, buckets, and for
        // each symbol the next one of its bucket.
        unsafe {
            let buckets = *table;
            if buckets == 0 {
                return None;
            }
            let bucket = table.add(2);
            let chain = bucket.add(usize::try_from(buckets).ok()?);
            let mut index = *bucket.add(usize::try_from(hash % buckets).ok()?);
            while index != 0 {
                if let Some(address) = self.check(index, name) {
                    return Some(address);
                }
                index = *chain.add(usize::try_from(index).ok()?);
            }
        }
        None
    }
}

/// Visits the loaded objects in the order in which the loader searches them, the program first;
/// those of other namespaces are not among them. Ends when `visit` returns something.
///
/// The loader's lock is held meanwhile: `visit` must not take any lock of the guard.
pub(crate) fn find<T>(mut visit: impl FnMut(&Object) -> Option<T>) -> Option<T> {
    struct Search<'a, T> {
        visit: &'a mut dyn FnMut(&Object) -> Option<T>,
        found: Option<T>,
    }

    unsafe extern "C" fn one<T>(info: *const Info, size: usize, data: *mut c_void) -> c_int {
        if info.is_null() || size < size_of::<Info>() {
            return 0;
        }
        // SAFETY: `data` is the search below, which nothing else uses meanwhile; `info` describes an
        // object that cannot be unloaded during the visit.
        let (search, object) = unsafe { (&mut *data.cast::<Search<'_, T>>(), Object::read(&*info)) };
        search.found = (search.visit)(&object);
        c_int::from(search.found.is_some())
    }

    let mut search = Search { visit: &mut visit, found: None };
    // SAFETY: the search outlives the call, and `one` expects it.
    unsafe { dl_iterate_phdr(one::<T>, ptr::from_mut(&mut search).cast()) };
    search.found
}

/// The object that contains an address.
#[cfg(test)]
pub(crate) fn containing(address: usize) -> Option<Object> {
    find(|object| object.contains(address).then_some(*object))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_libc(name: &CStr) -> Option<usize> {
        // SAFETY: the object is loaded during the visit.
        find(|object| unsafe {
            object.path().to_bytes().ends_with(b"/libc.so.6").then(|| object.function(name))?
        })
    }

    #[test]
    fn functions_are_found_where_they_are() {
        let found = in_libc(c"getpid").unwrap();
        // SAFETY: that is what getpid is.
        let getpid: extern "C" fn() -> c_int = unsafe { core::mem::transmute(found) };
        assert_eq!(u32::try_from(getpid()).unwrap(), std::process::id());
        assert!(containing(found).unwrap().path().to_bytes().ends_with(b"/libc.so.6"));
    }

    #[test]
    fn exported_functions_are_known_by_their_addresses() {
        let (getpid, write) = (in_libc(c"getpid").unwrap(), in_libc(c"write").unwrap());
        let object = containing(getpid).unwrap();
        // SAFETY: the C library is never unloaded.
        unsafe {
            assert!(object.exports(getpid) && object.exports(write));
            assert!(!object.exports(getpid + 1) && !object.exports(0));
        }
    }

    #[test]
    fn what_is_not_there_or_is_no_function_is_not_found() {
        assert_eq!(in_libc(c"no_such_function_of_any_library"), None);
        // Data of libc.
        assert_eq!(in_libc(c"environ"), None);
        assert_eq!(in_libc(c""), None);
    }

    #[test]
    fn the_program_is_the_first_object_and_contains_its_code() {
        let program = find(|object| Some(*object)).unwrap();
        let here = (the_program_is_the_first_object_and_contains_its_code as fn() as *const ()).addr();
        assert!(program.contains(here));
        assert!(!program.is(Library::Cuda) && !program.is(Library::Nvml));
    }
}

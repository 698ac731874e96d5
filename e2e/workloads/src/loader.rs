//! How a program gets at the functions of a driver's library.
//!
//! Real programs link it, ask the loader, or ask the driver itself as the CUDA runtime does; some
//! bring ways of their own. What stands between programs and driver must take part in the former
//! and cannot in the latter: `--bypass` is a program that avoids it. A program that is linked
//! statically avoids it too; this one is not, since it could not load a library then.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;

/// How functions are found by those who hide nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Lookup {
    /// From the driver's own function for that, as the CUDA runtime does.
    #[default]
    ProcAddress,
    /// From the loader.
    Dlsym,
}

/// How functions are found by those who want nobody between themselves and the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bypass {
    /// The library in a link namespace of its own.
    Namespace,
    /// A copy of the library's file, under another name.
    Copy,
}

/// A library that stays loaded until the process ends.
#[derive(Debug)]
pub(crate) struct Library {
    handle: *mut c_void,
    /// Its own symbols, where the loader is not to be asked.
    symbols: Option<HashMap<CString, usize>>,
}

impl Library {
    /// Loads a library by the name under which every program finds it.
    pub(crate) fn open(name: &CStr, bypass: Option<Bypass>) -> Result<Self> {
        let handle = match bypass {
            // SAFETY: libraries of drivers have no conditions for being loaded.
            None => unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) },
            // SAFETY: as above.
            Some(Bypass::Namespace) => unsafe {
                libc::dlmopen(libc::LM_ID_NEWLM, name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL)
            },
            Some(Bypass::Copy) => {
                let path = copy(name)?;
                let file = CString::new(path.as_os_str().as_encoded_bytes())?;
                // SAFETY: as above.
                let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                // What is loaded needs its name no more, and nobody is to find it.
                std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
                handle
            }
        };
        if handle.is_null() {
            bail!("{}", last_error());
        }
        // SAFETY: the handle is open, and stays so.
        let symbols = bypass.map(|_| unsafe { symbols(handle) }).transpose()?;
        Ok(Self { handle, symbols })
    }

    /// The address of a function, if the library has it.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<*const c_void> {
        if let Some(symbols) = &self.symbols {
            return symbols.get(name).map(|address| std::ptr::with_exposed_provenance(*address));
        }
        // SAFETY: the handle is open.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const())
    }
}

fn last_error() -> String {
    // SAFETY: the text is the loader's, until this thread's next call to it.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "the loader does not say why".into();
    }
    // SAFETY: not null, so a text that ends in a zero byte.
    unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned()
}

/// Copies the file of a library to where nobody looks for it.
fn copy(name: &CStr) -> Result<PathBuf> {
    let name = name.to_str().context("a library's name")?;
    let path = find(name).ok_or_else(|| anyhow!("no {name} where loaders look"))?;
    let copy = std::env::temp_dir().join(format!("private-{}-{name}", std::process::id()));
    std::fs::copy(&path, &copy).with_context(|| format!("copy {} to {}", path.display(), copy.display()))?;
    Ok(copy)
}

/// The file that a loader would find.
fn find(name: &str) -> Option<PathBuf> {
    let named = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let named = named.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let multiarch = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let usual = [&multiarch, "/usr/local/nvidia/lib64", "/usr/lib64", "/lib64", "/usr/lib", "/lib"];
    let usual = usual.into_iter().map(PathBuf::from);
    named.chain(usual).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// `struct link_map`, as far as it is public.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
}

/// `Elf64_Dyn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// `Elf64_Sym`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

const DT_NULL: i64 = 0;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// Reads the symbols of a loaded library from its own tables.
///
/// # Safety
/// The handle is open, and stays so.
unsafe fn symbols(handle: *mut c_void) -> Result<HashMap<CString, usize>> {
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: the request writes one pointer, and there is room for it.
    let code = unsafe { libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if code != 0 || map.is_null() {
        bail!("{}", last_error());
    }
    // SAFETY: the loader's description of an open library.
    let LinkMap { base, mut dynamic, .. } = unsafe { map.read() };
    let mut tables: HashMap<i64, usize> = HashMap::new();
    // SAFETY: the list ends in an entry of this tag, and is mapped as long as the library is.
    while let entry = unsafe { dynamic.read() }
        && entry.tag != DT_NULL
    {
        // The loader of most machines has added the base already.
        tables.insert(entry.tag, if entry.value < base { entry.value + base } else { entry.value });
        // SAFETY: not the last entry.
        dynamic = unsafe { dynamic.add(1) };
    }
    let table =
        |tag: i64| tables.get(&tag).map(|address| std::ptr::with_exposed_provenance::<c_void>(*address));
    let (Some(texts), Some(list)) = (table(DT_STRTAB), table(DT_SYMTAB)) else {
        bail!("the library has no symbols");
    };
    let count = match (table(DT_HASH), table(DT_GNU_HASH)) {
        // The number of chains is that of symbols.
        // SAFETY: the table begins with these two numbers.
        (Some(hash), _) => unsafe { hash.cast::<u32>().add(1).read() },
        // SAFETY: a table of the loaded library.
        (None, Some(hash)) => unsafe { gnu_count(hash.cast()) },
        (None, None) => bail!("the library does not say how many symbols it has"),
    };
    let mut symbols = HashMap::new();
    for index in 0..usize::try_from(count)? {
        // SAFETY: the table has so many entries.
        let symbol = unsafe { list.cast::<Symbol>().add(index).read() };
        if symbol.section != 0 && symbol.value != 0 {
            // SAFETY: names are texts in the table of texts.
            let name = unsafe { CStr::from_ptr(texts.cast::<c_char>().add(usize::try_from(symbol.name)?)) };
            symbols.insert(name.to_owned(), base + symbol.value);
        }
    }
    Ok(symbols)
}

/// How many symbols a library has, by the end of its last chain.
///
/// # Safety
/// `hash` is a library's table of that kind.
unsafe fn gnu_count(hash: *const u32) -> u32 {
    // SAFETY: the table begins with these numbers; then come the filter, in words of 64 bits, the
    // buckets, and the chains of all symbols from `first` on, each ended by its lowest bit.
    unsafe {
        let (buckets, first, words) = (hash.read(), hash.add(1).read(), hash.add(2).read());
        let lists = hash.add(4 + 2 * words as usize);
        let last = (0..buckets).map(|index| lists.add(index as usize).read()).max().unwrap_or(0);
        if last < first {
            return first;
        }
        let chains = lists.add(buckets as usize);
        let mut index = last;
        while chains.add((index - first) as usize).read() & 1 == 0 {
            index += 1;
        }
        index + 1
    }
}

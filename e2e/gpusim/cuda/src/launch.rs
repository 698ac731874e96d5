//! Kernels. None of them ever runs: a launch is what it costs to ask for one.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::code::Code;
use crate::link::is_null;
use crate::output::{Out, put};
use crate::session::{Session, opaque, with, with_current, with_stack};
use crate::{exports, graph, stream};

/// Modules and libraries, and the functions that were asked for: each function's home.
#[derive(Default)]
pub(crate) struct Modules {
    loaded: BTreeSet<usize>,
    functions: BTreeMap<usize, usize>,
}

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfiguration {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: *mut c_void,
    attributes: *mut c_void,
    attribute_count: c_uint,
}

exports! {
    /// Loads code: any bytes will do.
    fn cuModuleLoadData(module: Out<*mut c_void>, image: *const c_void) { load(module, image.is_null()) }

    /// Loads code: any bytes will do.
    fn cuModuleLoadDataEx(
        module: Out<*mut c_void>, image: *const c_void, _count: c_uint, _options: *mut c_int,
        _values: *mut *mut c_void,
    ) {
        load(module, image.is_null())
    }

    /// Loads code: any bytes will do.
    fn cuModuleLoadFatBinary(module: Out<*mut c_void>, image: *const c_void) { load(module, image.is_null()) }

    /// Ends a module and its functions.
    fn cuModuleUnload(module: *mut c_void) { unload(module) }

    /// A function of a module; any name is known.
    fn cuModuleGetFunction(function: Out<*mut c_void>, module: *mut c_void, name: *const c_char) {
        find(function, module, name)
    }

    /// Loads code: any bytes will do.
    fn cuLibraryLoadData(
        library: Out<*mut c_void>, image: *const c_void, _options: *mut c_int, _values: *mut *mut c_void,
        _count: c_uint, _library_options: *mut c_int, _library_values: *mut *mut c_void, _library_count: c_uint,
    ) {
        load(library, image.is_null())
    }

    /// Ends a library and its kernels.
    fn cuLibraryUnload(library: *mut c_void) { unload(library) }

    /// A kernel of a library; any name is known.
    fn cuLibraryGetKernel(kernel: Out<*mut c_void>, library: *mut c_void, name: *const c_char) {
        find(kernel, library, name)
    }

    /// The function of a kernel: itself.
    fn cuKernelGetFunction(function: Out<*mut c_void>, kernel: *mut c_void) {
        with(|session| known(session, kernel))?;
        put(function, kernel)
    }

    /// Launches a kernel.
    fn cuLaunchKernel(
        function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, _shared_bytes: c_uint, stream: *mut c_void, _parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        launch(function, [grid_x, grid_y, grid_z, block_x, block_y, block_z], stream, false)
    }

    /// Launches a kernel.
    fn cuLaunchKernel_ptsz(
        function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, _shared_bytes: c_uint, stream: *mut c_void, _parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        launch(function, [grid_x, grid_y, grid_z, block_x, block_y, block_z], stream, true)
    }

    /// Launches a kernel.
    fn cuLaunchKernelEx(
        configuration: Option<&LaunchConfiguration>, function: *mut c_void, _parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        launch_by(configuration, function, false)
    }

    /// Launches a kernel.
    fn cuLaunchKernelEx_ptsz(
        configuration: Option<&LaunchConfiguration>, function: *mut c_void, _parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        launch_by(configuration, function, true)
    }
}

fn load(module: Out<*mut c_void>, nothing: bool) -> Result<(), Code> {
    let out = module.ok_or(Code::InvalidValue)?;
    if nothing {
        return Err(Code::InvalidValue);
    }
    let handle = with_current(|session, _| {
        let handle = session.new_handle();
        session.modules.loaded.insert(handle);
        Ok(handle)
    })?;
    put(Some(out), opaque(handle))
}

fn unload(module: *mut c_void) -> Result<(), Code> {
    with(|session| {
        if !session.modules.loaded.remove(&module.addr()) {
            return Err(Code::InvalidHandle);
        }
        session.modules.functions.retain(|_, home| *home != module.addr());
        Ok(())
    })
}

fn find(function: Out<*mut c_void>, module: *mut c_void, name: *const c_char) -> Result<(), Code> {
    let out = function.ok_or(Code::InvalidValue)?;
    if name.is_null() {
        return Err(Code::InvalidValue);
    }
    let handle = with(|session| {
        if !session.modules.loaded.contains(&module.addr()) {
            return Err(Code::InvalidHandle);
        }
        let handle = session.new_handle();
        session.modules.functions.insert(handle, module.addr());
        Ok(handle)
    })?;
    put(Some(out), opaque(handle))
}

fn known(session: &Session, function: *mut c_void) -> Result<(), Code> {
    session.modules.functions.get(&function.addr()).map(|_| ()).ok_or(Code::InvalidHandle)
}

fn launch_by(
    configuration: Option<&LaunchConfiguration>,
    function: *mut c_void,
    per_thread: bool,
) -> Result<(), Code> {
    let configuration = configuration.ok_or(Code::InvalidValue)?;
    let [grid, block] = [configuration.grid, configuration.block];
    let lengths = [grid, block].as_flattened().first_chunk().copied().unwrap_or_default();
    launch(function, lengths, configuration.stream, per_thread)
}

/// Takes no lock while nothing is captured: a launch must cost as little as may be.
fn launch(
    function: *mut c_void,
    lengths: [c_uint; 6],
    stream: *mut c_void,
    per_thread: bool,
) -> Result<(), Code> {
    if lengths.contains(&0) {
        return Err(Code::InvalidValue);
    }
    if function.is_null() {
        return Err(Code::InvalidHandle);
    }
    if !is_null() && with_stack(|stack| stack.is_empty()) {
        return Err(Code::InvalidContext);
    }
    if !stream::any_capture() {
        return Ok(());
    }
    let stream = stream::key(stream, per_thread);
    with(|session| {
        known(session, function)?;
        if let Some(graph) = stream::graph_of(session, stream)? {
            graph::add_kernel(session, graph);
            return Ok(());
        }
        if stream <= 1 { stream::forbid_implicit(session) } else { Ok(()) }
    })
}

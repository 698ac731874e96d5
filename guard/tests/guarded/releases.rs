//! Drivers of older releases: what they lack is not found through the guard either and holds nothing up,
//! and what they have is held to the quota.

use gpusim::config::Config;
use highwater_guard_abi::wire::STRENGTH_STOPPED;

use crate::host::{Host, Pod, Program};
use crate::{CONTEXT, GIB, MIB, REFUSED};

const GUARD: &str = "libhighwater-guard.so";
const LIMIT: u64 = CONTEXT + GIB;

/// What a program answers for a function that it did not find.
const MISSING: &str = "500";

/// The functions of the simulated driver that CUDA has had since each version.
const SINCE: [(i32, &[&str]); 16] = [
    (9_020, &["cuDeviceGetUuid", "cuStreamGetCtx", "cuStreamGetCtx_ptsz"]),
    (
        10_000,
        &[
            "cuGraphAddEmptyNode",
            "cuGraphCreate",
            "cuGraphDestroy",
            "cuGraphExecDestroy",
            "cuGraphGetNodes",
            "cuGraphInstantiate",
            "cuGraphLaunch",
            "cuGraphLaunch_ptsz",
            "cuGraphNodeGetType",
            "cuStreamBeginCapture",
            "cuStreamBeginCapture_ptsz",
            "cuStreamEndCapture",
            "cuStreamEndCapture_ptsz",
            "cuStreamIsCapturing",
            "cuStreamIsCapturing_ptsz",
        ],
    ),
    (
        10_010,
        &[
            "cuStreamBeginCapture_v2",
            "cuStreamBeginCapture_v2_ptsz",
            "cuStreamGetCaptureInfo",
            "cuStreamGetCaptureInfo_ptsz",
            "cuThreadExchangeStreamCaptureMode",
        ],
    ),
    (
        10_020,
        &[
            "cuMemAddressFree",
            "cuMemAddressReserve",
            "cuMemCreate",
            "cuMemExportToShareableHandle",
            "cuMemGetAllocationGranularity",
            "cuMemGetAllocationPropertiesFromHandle",
            "cuMemImportFromShareableHandle",
            "cuMemMap",
            "cuMemRelease",
            "cuMemSetAccess",
            "cuMemUnmap",
        ],
    ),
    (
        11_000,
        &[
            "cuDevicePrimaryCtxRelease_v2",
            "cuDevicePrimaryCtxReset_v2",
            "cuDevicePrimaryCtxSetFlags_v2",
            "cuGraphInstantiate_v2",
            "cuIpcOpenMemHandle_v2",
            "cuMemRetainAllocationHandle",
        ],
    ),
    (11_010, &["cuGraphUpload", "cuGraphUpload_ptsz"]),
    (
        11_020,
        &[
            "cuDeviceGetDefaultMemPool",
            "cuDeviceGetMemPool",
            "cuDeviceSetMemPool",
            "cuMemAllocAsync",
            "cuMemAllocAsync_ptsz",
            "cuMemAllocFromPoolAsync",
            "cuMemAllocFromPoolAsync_ptsz",
            "cuMemFreeAsync",
            "cuMemFreeAsync_ptsz",
            "cuMemPoolCreate",
            "cuMemPoolDestroy",
            "cuMemPoolGetAttribute",
            "cuMemPoolSetAttribute",
            "cuMemPoolTrimTo",
        ],
    ),
    (11_030, &["cuGetProcAddress", "cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v2_ptsz"]),
    (
        11_040,
        &[
            "cuCtxCreate_v3",
            "cuDeviceGetGraphMemAttribute",
            "cuDeviceGetUuid_v2",
            "cuDeviceGraphMemTrim",
            "cuDeviceSetGraphMemAttribute",
            "cuGraphAddMemAllocNode",
            "cuGraphAddMemFreeNode",
            "cuGraphInstantiateWithFlags",
            "cuGraphMemAllocNodeGetParams",
            "cuGraphMemFreeNodeGetParams",
        ],
    ),
    (11_060, &["nvmlDeviceGetMemoryInfo_v2"]),
    (11_080, &["cuLaunchKernelEx", "cuLaunchKernelEx_ptsz"]),
    (
        12_000,
        &[
            "cuCtxGetId",
            "cuGetProcAddress_v2",
            "cuGraphInstantiateWithParams",
            "cuGraphInstantiateWithParams_ptsz",
            "cuKernelGetFunction",
            "cuLibraryGetKernel",
            "cuLibraryLoadData",
            "cuLibraryUnload",
        ],
    ),
    (
        12_030,
        &[
            "cuGraphAddNode",
            "cuGraphAddNode_v2",
            "cuStreamGetCaptureInfo_v3",
            "cuStreamGetCaptureInfo_v3_ptsz",
        ],
    ),
    (12_050, &["cuCtxCreate_v4"]),
    (
        12_080,
        &[
            "cuCheckpointProcessCheckpoint",
            "cuCheckpointProcessGetState",
            "cuCheckpointProcessLock",
            "cuCheckpointProcessRestore",
            "cuCheckpointProcessUnlock",
        ],
    ),
    (13_000, &["cuCtxGetDevice_v2", "cuCtxSynchronize_v2"]),
];

/// What a driver for this version of CUDA lacks.
fn lacks(cuda_version: i32) -> Vec<&'static str> {
    SINCE
        .iter()
        .filter(|(since, _)| *since > cuda_version)
        .flat_map(|(_, names)| names.iter().copied())
        .collect()
}

/// A host with the last driver for this version of CUDA.
fn host_of(cuda_version: i32, driver_version: &str) -> Host {
    let config = Config { cuda_version, driver_version: driver_version.to_owned(), ..Config::default() };
    Host::lacking(config, lacks(cuda_version))
}

/// That each order is refused where it asks for more than there is, and charged where it does not, until
/// what undoes it.
fn held_to_the_quota(pod: &Pod<'_>, program: &mut Program, ways: &[(&str, &str, &str, u64)]) {
    for (large, small, undo, bytes) in ways {
        assert_eq!(program.ask(large), REFUSED, "{large}");
        assert_eq!(pod.agent.charged(), CONTEXT, "{large}");
        program.succeed(&[small]);
        assert_eq!(pod.agent.charged(), CONTEXT + bytes, "{small}");
        program.succeed(&undo.split("; ").collect::<Vec<_>>());
        assert_eq!(pod.agent.charged(), CONTEXT, "{undo}");
    }
}

#[test]
fn h14_under_a_driver_without_pools_and_lookups_of_its_own_what_it_has_is_held_to_the_quota() {
    let host = host_of(11_000, "450.248.02");
    let pod = host.pod(LIMIT);
    for lookup in ["handle", "default"] {
        let mut program = pod.volume.program_that_looks(lookup);
        for name in lacks(11_000) {
            assert_eq!(program.ask(&format!("where {name}")), "nowhere", "{lookup}");
        }
        for name in ["cuMemAlloc_v2", "cuMemCreate", "cuMemGetInfo_v2", "cuIpcOpenMemHandle_v2"] {
            assert_eq!(program.ask(&format!("where {name}")), GUARD, "{name} by {lookup}");
        }
        program.start();
        for order in ["async a 2M", "trim default", "graphtrim"] {
            assert_eq!(program.ask(order), MISSING, "{order}");
        }
        program.succeed(&["stream", "sync"]);
        held_to_the_quota(
            &pod,
            &mut program,
            &[
                ("alloc x 1026M", "alloc x 64M", "free x", 64 * MIB),
                ("pitch x 64K 17K", "pitch x 1M 64", "free x", 64 * MIB),
                ("managed x 1026M", "managed x 64M", "free x", 64 * MIB),
                ("create x 1026M", "create x 64M", "release x", 64 * MIB),
                ("array x 8192 8200", "array x 4096 1024", "endarray x", 64 * MIB),
            ],
        );
        // Contexts of its own, up to the quota, and memory that is handed on.
        program.succeed(&["context x"]);
        assert_eq!(program.ask("context y"), REFUSED);
        program.succeed(&["endcontext x", "retain"]);
        program.succeed(&["create a 512M", "export d a", "release a"]);
        assert_eq!(program.ask("create b 768M"), REFUSED);
        program.succeed(&["close d", "create b 768M", "release b"]);
        // The quota is the device in every form that there is of what tells about it.
        assert_eq!(program.numbers("info"), [0, GIB, LIMIT]);
        let nvml = program.numbers("nvml");
        assert_eq!((nvml[0], nvml[1].to_string(), nvml[2]), (0, MISSING.to_owned(), LIMIT));
        program.end();
        pod.agent.await_charged(0);
    }
    assert_eq!(pod.agent.heard().weaknesses, 0);
    assert!(pod.agent.is_consistent());
}

#[test]
fn h14_under_a_driver_with_the_first_form_of_its_lookup_alone_every_way_of_looking_finds_the_guard() {
    let host = host_of(11_040, "470.256.02");
    let pod = host.pod(LIMIT);
    for lookup in ["handle", "default", "oldproc"] {
        let mut program = pod.volume.program_that_looks(lookup);
        // By the other way a later form has the name of an earlier one.
        let is_plain = |name: &&str| lookup != "oldproc" || !name.contains("_v");
        for name in lacks(11_040).into_iter().filter(is_plain) {
            assert_eq!(program.ask(&format!("where {name}")), "nowhere", "{lookup}");
        }
        for name in ["cuMemAlloc_v2", "cuMemAllocAsync", "cuMemCreate", "cuGraphInstantiateWithFlags"] {
            assert_eq!(program.ask(&format!("where {name}")), GUARD, "{name} by {lookup}");
        }
        program.start();
        program.succeed(&["stream", "pool p", "graph g", "node g n 64M", "freenode g n"]);
        held_to_the_quota(
            &pod,
            &mut program,
            &[
                ("alloc x 1026M", "alloc x 64M", "free x", 64 * MIB),
                ("create x 1026M", "create x 64M", "release x", 64 * MIB),
                ("async x 1026M", "async x 64M", "asyncfree x; sync", 64 * MIB),
                ("frompool x p 1026M", "frompool x p 64M", "asyncfree x; sync", 64 * MIB),
            ],
        );
        program.succeed(&["alloc a 1000M"]);
        assert_eq!(program.ask("instantiate x g"), REFUSED);
        program.succeed(&["free a", "instantiate x g", "launch x", "sync"]);
        assert_eq!(pod.agent.charged(), CONTEXT + 64 * MIB);
        program.succeed(&["endexecutable x", "graphtrim"]);
        assert_eq!(pod.agent.charged(), CONTEXT);
        program.end();
        pod.agent.await_charged(0);
    }
    assert_eq!(pod.agent.heard().weaknesses, 0);
    assert!(pod.agent.is_consistent());
}

#[test]
fn h13_h14_with_a_driver_that_cannot_say_which_device_is_which_the_guard_stands_aside_and_says_so() {
    let host = host_of(9_010, "390.157");
    let pod = host.pod(LIMIT);
    let mut program = pod.ready();
    assert_eq!(program.ask("where cuMemCreate"), "nowhere");
    // More than the quota: the program works as if there were no guard.
    program.succeed(&["alloc a 2G", "free a"]);
    assert_eq!(pod.agent.charged(), 0);
    pod.agent.await_heard(|heard| heard.weaknesses & STRENGTH_STOPPED != 0);
}

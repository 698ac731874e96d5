//! Limits on the memory of cgroups, which drivers from R615 on have. Older ones answer that there
//! are no such functions.

use std::ffi::{c_char, c_ulonglong};

use gpusim::protocol::{Reply, Request};

use crate::code::Code;
use crate::exports;
use crate::output::text;
use crate::session::{Handle, ask};

/// `nvmlDeviceMemoryLimits_v1_t`: what to set.
#[repr(C)]
struct Limits {
    /// Path of a cgroup.
    namespace: *const c_char,
    /// What it may keep when memory is short; 0 is nothing.
    soft: c_ulonglong,
    /// What it may have; the highest number is no limit.
    hard: c_ulonglong,
}

/// What is set, and what is used.
#[repr(C)]
struct LimitsInUse {
    /// Path of a cgroup, from the caller.
    namespace: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

const _: () = assert!(size_of::<Limits>() == 24 && size_of::<LimitsInUse>() == 32);

exports! {
    /// Limits a cgroup, with all below it.
    fn nvmlDeviceSetMemoryLimits_v1(device: Handle, limits: Option<&Limits>) {
        let limits = limits.ok_or(Code::InvalidArgument)?;
        // SAFETY: a text that ends in a zero byte, as the interface asks.
        let namespace = unsafe { text(limits.namespace) }?.to_owned();
        let (soft, hard) = (limits.soft, limits.hard);
        ask(device, |region| Request::SetLimits { region, namespace, soft, hard }).map(|_| ())
    }

    /// The limits of a cgroup.
    fn nvmlDeviceGetMemoryLimits_v1(device: Handle, limits: Option<&mut LimitsInUse>) {
        let limits = limits.ok_or(Code::InvalidArgument)?;
        // SAFETY: a text that ends in a zero byte, as the interface asks.
        let namespace = unsafe { text(limits.namespace) }?.to_owned();
        match ask(device, |region| Request::GetLimits { region, namespace })? {
            Reply::Limits { soft, hard, used } => {
                (limits.soft, limits.hard, limits.used) = (soft, hard, used);
                Ok(())
            }
            _ => Err(Code::Unknown),
        }
    }
}

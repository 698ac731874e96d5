//! MIG: devices cut into instances.

use std::ffi::{c_uint, c_ulonglong};

use gpusim::protocol::{InstanceFacts, Region};

use crate::code::Code;
use crate::exports;
use crate::output::{Out, put};
use crate::session::{Handle, facts, handle, with};

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
struct Attributes {
    multiprocessor_count: c_uint,
    shared_copy_engine_count: c_uint,
    shared_decoder_count: c_uint,
    shared_encoder_count: c_uint,
    shared_jpeg_count: c_uint,
    shared_ofa_count: c_uint,
    gpu_instance_slice_count: c_uint,
    compute_instance_slice_count: c_uint,
    memory_size_mib: c_ulonglong,
}

/// No device has more instances.
const MOST_INSTANCES: c_uint = 7;
/// Multiprocessors of one of a Hopper device's slices.
const MULTIPROCESSORS_PER_SLICE: c_uint = 16;

exports! {
    /// Whether MIG is on, and will be after the next reset.
    fn nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) {
        let mode = facts(device, |_, device, instance| match instance {
            None => Ok(c_uint::from(!device.instances.is_empty())),
            Some(_) => Err(Code::InvalidArgument),
        })?;
        put(current, mode)?;
        put(pending, mode)
    }

    /// How many instances there may be; 0 while MIG is off.
    fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: Out<c_uint>) {
        let on = facts(device, |_, device, _| Ok(!device.instances.is_empty()))?;
        put(count, if on { MOST_INSTANCES } else { 0 })
    }

    /// An instance by its position in the device.
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, instance: Out<Handle>) {
        // The layout may have changed since this process opened the driver.
        let found = with(|session| {
            session.refresh()?;
            let whole = session.region(device)?;
            let instances = session.devices().iter().find(|(region, _)| *region == whole).ok_or(Code::InvalidArgument)?;
            let index = usize::try_from(index).map_err(|_| Code::InvalidArgument)?;
            instances.1.get(index).copied().ok_or(Code::NotFound)
        })?;
        put(instance, handle(found))
    }

    /// The device that an instance is part of.
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance: Handle, device: Out<Handle>) {
        let region = with(|session| session.region(instance))?;
        region.instance.ok_or(Code::InvalidArgument)?;
        put(device, handle(Region { instance: None, ..region }))
    }

    /// Whether a handle stands for an instance.
    fn nvmlDeviceIsMigDeviceHandle(device: Handle, answer: Out<c_uint>) {
        let region = with(|session| session.region(device))?;
        put(answer, c_uint::from(region.instance.is_some()))
    }

    /// Number of the instance's GPU instance.
    fn nvmlDeviceGetGpuInstanceId(device: Handle, id: Out<c_uint>) {
        put(id, instance(device, |instance| instance.gpu_instance)?)
    }

    /// Number of the instance's compute instance.
    fn nvmlDeviceGetComputeInstanceId(device: Handle, id: Out<c_uint>) {
        put(id, instance(device, |instance| instance.compute_instance)?)
    }

    /// What an instance is made of.
    fn nvmlDeviceGetAttributes_v2(device: Handle, attributes: Out<Attributes>) {
        let (slices, bytes) = instance(device, |instance| {
            // "NVIDIA H200 MIG 2g.35gb": the profile begins with the number of slices.
            let profile = instance.name.rsplit(' ').next().unwrap_or_default();
            let slices = profile.split('g').next().and_then(|slices| slices.parse().ok());
            (slices.unwrap_or(1), instance.usable)
        })?;
        put(attributes, Attributes {
            multiprocessor_count: slices * MULTIPROCESSORS_PER_SLICE,
            shared_copy_engine_count: slices,
            shared_decoder_count: slices,
            shared_encoder_count: 0,
            shared_jpeg_count: slices,
            shared_ofa_count: 0,
            gpu_instance_slice_count: slices,
            compute_instance_slice_count: slices,
            memory_size_mib: bytes >> 20,
        })
    }
}

fn instance<T>(device: Handle, body: impl FnOnce(&InstanceFacts) -> T) -> Result<T, Code> {
    facts(device, |_, _, instance| instance.map(body).ok_or(Code::NotSupported))
}
